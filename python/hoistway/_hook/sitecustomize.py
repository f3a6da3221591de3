"""Puts hoistway in the place of safetensors in a Python that `hoistway.run` started.

Python imports this module as it starts, as its folder is on ``PYTHONPATH``. Nothing of hoistway is imported before the
program imports safetensors.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Has the drop-in installed once the program has imported safetensors. Stays until then, whatever looks for it."""

    def __init__(self) -> None:
        self._asks_others = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as others find it, with a loader that installs the drop-in afterwards."""
        if fullname != "safetensors" or getattr(self._asks_others, "now", False):
            return None
        self._asks_others.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            drop_in = importlib.import_module("hoistway.compat.safetensors")
        except ImportError as error:
            # No ImportError: programs take that for a Python without safetensors, and go on without.
            raise RuntimeError(
                "HOISTWAY_SAFETENSORS=1 asks for hoistway in the place of safetensors, but "
                f"{sys.executable} cannot import it: {error}; install hoistway there, or unset the variable"
            ) from error
        install = getattr(drop_in, "install", None)
        if install is None:
            # The program imports the drop-in itself, which has come to its import of safetensors.
            drop_in._is_awaited = True  # type: ignore[attr-defined]
            # In another thread it may have come to its end meanwhile, without having seen that.
            install = getattr(drop_in, "install", None)
            if install is not None and drop_in.__dict__.pop("_is_awaited", False):
                install()
        else:
            install()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def _is_hook(entry: str) -> bool:
    """Whether this folder is that of this module, in this or another installation of hoistway."""
    folder = os.path.realpath(entry or os.getcwd())
    return folder.endswith(os.path.join("hoistway", "_hook"))


def _run_hidden() -> None:
    """Runs the `sitecustomize` that this one hides, if there is any."""
    others = [entry for entry in sys.path if not _is_hook(entry)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("HOISTWAY_SAFETENSORS") == "1":
    sys.meta_path.insert(0, _Finder())
_run_hidden()
