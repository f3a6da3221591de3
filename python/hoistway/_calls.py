"""Keyword arguments of the calls that return tensors, for type checkers: not imported when a program runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hoistway import _native
from hoistway._arguments import PathType
from hoistway._checkpoint import Progress, Select
from hoistway._options import LoadOptions, StoreOptions
from hoistway._stream import Order
from hoistway._targets import CopyInto


class OpenArguments(LoadOptions, total=False):
    """Arguments of `Checkpoint`, besides device and framework."""

    pool: _native.MemoryPool | None
    allocator: Literal["driver", "torch"]
    lenient: bool | None
    offset: int | None
    store: StoreOptions | None
    cache: PathType | None


class LoadFileArguments(OpenArguments, total=False):
    """Arguments of `load_file`, besides device and framework."""

    select: Select | None
    exclude: str | Iterable[str] | None
    slices: Mapping[str, Any] | None
    progress: Progress


class IterTensorsArguments(OpenArguments, total=False):
    """Arguments of `iter_tensors`, besides device and framework."""

    select: Select | None
    exclude: str | Iterable[str] | None
    slices: Mapping[str, Any] | None
    order: Order
    max_in_flight: int | str | None
    copy_into: CopyInto | None
