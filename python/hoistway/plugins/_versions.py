"""The versions of the hosts that the plug-ins were tested with, and what is said in others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = {"vllm": ("vLLM", "0.33.0"), "sglang": ("SGLang", "0.5.23")}
"""By package: the host's name and the version that ``just test-hosts`` runs."""


def unfit(package: str, load_format: str, error: Exception) -> str:
    """What to say where the host lacks what its plug-in needs."""
    name, tested = TESTED[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "not installed"
    return (
        f"load format {load_format!r} is not registered, as this version of {name} ({found}) lacks what it needs: "
        f"{error}. The format was tested with {name} {tested}: install that version, or use another load format"
    )
