"""The versions of the hosts that the plug-ins were tested with, and what is said in others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = {"vllm": ("vLLM", "0.33.0"), "sglang": ("SGLang", "0.5.23")}
"""By package: the host's name and the version that ``just test-hosts`` runs."""


def unfit(package: str, load_format: str, error: Exception) -> str:
    """What to say where the host lacks what its plug-in needs."""
    name, tested = TESTED[package]
    found = _found(package)
    return (
        f"load format {load_format!r} is not registered, as this version of {name} ({found}) lacks what it needs: "
        f"{error}. The format was tested with {name} {tested}: install that version, or use another load format"
    )


def lacking(package: str, what: str, first: str, error: Exception) -> str:
    """What to say where the host lacks what one of its parts needs, which a later version has."""
    name, tested = TESTED[package]
    return (
        f"{what} needs {name} {first} or later, and this version of {name} ({_found(package)}) lacks what it uses: "
        f"{error}. It was tested with {name} {tested}: install that version"
    )


def _found(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
