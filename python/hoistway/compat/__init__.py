"""Other libraries' interfaces, with hoistway behind them: change an import, keep the program."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The interfaces, once they are asked for: each needs the library that it stands for, or torch."""
    if name in ("fastsafetensors", "safetensors", "threefs"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
