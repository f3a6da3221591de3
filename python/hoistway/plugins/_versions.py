"""The versions of the hosts that the plug-ins were tested with, and what is said in others."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

TESTED = {"vllm": ("vLLM", "0.33.0"), "sglang": ("SGLang", "0.5.23")}
"""By package: the host's name and the version that ``just test-hosts`` runs."""

OLDEST = {"vllm": "0.28", "sglang": "0.5.20"}
"""By package: the oldest version that ran the tests; what an older one lacks, nothing stands in for."""


def is_older(package: str, first: str) -> bool:
    """Whether the host is one of those that ran the tests, and older than a version.

    A host that does not say which version it is, or an impossible one, is none: what it lacks was renamed, as far as
    can be told, and has to be missed.
    """
    found = _release(_found(package))
    oldest, end = _release(OLDEST[package]), _release(first)
    return found is not None and oldest is not None and end is not None and oldest <= found < end


def unfit(package: str, load_format: str, error: Exception) -> str:
    """What to say where the host lacks what its plug-in needs."""
    name, tested = TESTED[package]
    found = _found(package)
    return (
        f"load format {load_format!r} is not registered, as this version of {name} ({found}) lacks what it needs: "
        f"{error}. The format was tested with {name} {tested}: install that version, or use another load format"
    )


def lacking(package: str, what: str, first: str, error: Exception) -> str:
    """What to say where the host lacks what a part of hoistway uses; ``first`` is the oldest version that has it."""
    name, tested = TESTED[package]
    found = _found(package)
    release, needed = _release(found), _release(first)
    needs = f" {first} or later" if release and needed and release < needed else ""
    return (
        f"{what} needs {name}{needs}, and this version of {name} ({found}) lacks what it uses: {error}. It was tested "
        f"with {name} {tested}: install that version"
    )


def _found(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _release(text: str) -> tuple[int, ...] | None:
    """The numbers of a version, without what follows them; ``None`` if it has none."""
    numbers = re.match(r"\d+(\.\d+)+", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else None
