"""Arguments that fastsafetensors knows and that change nothing here: a warning says so, once for each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

_INSTEAD = {
    "bbuf_size_kb": "in_flight= bounds the memory that copies go through",
    "set_numa": "numa= chooses the node of memory and threads",
    "overlap_io": "loading goes on while tensors are consumed",
    "broadcast_run_bytes": "ranks agree on what travels together",
    "broadcast_run_tensors": "ranks agree on what travels together",
    "entries": "buffer_size bounds the bytes in flight, and with them the number of reads",
    "io_depth": "the daemon of 3FS answers each read by itself",
}

_warned: set[str] = set()


class NoEffectWarning(UserWarning):
    """An argument has no effect in hoistway."""


def warn_without_effect(given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Warns of each argument that is given another value than the usual one, unless it did before."""
    for name, value in given.items():
        if value != usual[name] and name not in _warned:
            _warned.add(name)
            message = f"{name}={value!r} has no effect: {_INSTEAD[name]}"
            warnings.warn(message, NoEffectWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The stack level, from the caller of this, of the code that called hoistway."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hoistway."):
        level, frame = level + 1, frame.f_back
    return level
