"""Arguments that fastsafetensors knows and that change nothing here: a warning says so, once for each."""

from __future__ import annotations

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
    """An argument has no effect in windlass."""


def warn_without_effect(given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Warns of each argument that is given another value than the usual one, unless it did before."""
    for name, value in given.items():
        if value != usual[name] and name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}={value!r} has no effect: {_INSTEAD[name]}", NoEffectWarning, stacklevel=4)
