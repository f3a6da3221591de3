"""Names of the peer's modules that have no sense here: using one is an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def absent(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` of a module: an `ImportError` for these names, with the reason that each has."""

    def getattr_of_module(name: str) -> Any:
        if name in names:
            raise ImportError(f"hoistway has no {module}.{name}: {names[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
