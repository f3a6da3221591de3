"""Names of the peer's modules that have no sense here: using one is an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def absent_copier(name: str) -> ImportError:
    """The error of importing the module of a copier of the peer's."""
    return ImportError(
        f"hoistway has no fastsafetensors.copier.{name}: what its copiers do is done by the engine; name one as "
        "copier_type= of a loader, or register one of your own",
        name=f"fastsafetensors.copier.{name}",
    )


def absent(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` of a module: an `ImportError` for these names, with the reason that each has."""

    def getattr_of_module(name: str) -> Any:
        if name in names:
            raise ImportError(f"hoistway has no {module}.{name}: {names[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
