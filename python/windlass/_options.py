"""Options of loads, as keyword arguments take them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

RouteName = Literal[
    "auto",
    "io_uring",
    "threads",
    "cached",
    "mapped",
    "usrbio",
    "staged",
    "unified",
    "gds",
    "gds-compat",
]


class LoadOptions(TypedDict, total=False):
    """What loads can be told besides what to load: the options of ``windlass load``, with the same defaults.

    Sizes are numbers of bytes or text such as ``"64MiB"``.
    """

    route: RouteName | None
    """Which way the bytes take."""
    direct: Literal["auto", "always", "never"] | None
    """Whether reads go past the page cache."""
    usrbio: Literal["auto", "native", "vendor"] | None
    """Who speaks to the daemon of a 3FS: the vendor's library if there is one that works, else windlass itself, or only
    one of them."""
    dtype: Any
    """The type that a device converts floats to as they arrive: ``"float32"``, ``"float16"`` or ``"bfloat16"``, as
    text or as torch's."""
    layout: Literal["file", "packed", "tensor"] | None
    """How tensors share memory."""
    chunk: int | str | None
    """Longest single read."""
    coalesce_gap: int | str | None
    """Unwanted bytes between two wanted ranges that are read along rather than skipped."""
    in_flight: int | str | None
    """Bytes in flight to one device."""
    rings: int | None
    """Rings of routes ``io_uring`` and ``usrbio``."""
    threads: int | None
    """Threads of route ``threads`` and of copies from the page cache."""
    huge_pages: Literal["transparent", "reserved", "never"] | None
    """Kind of pages."""
    numa: int | Literal["unbound", "near_storage"] | None
    """NUMA node of memory and threads."""
    memory_budget: int | str | None
    """Most host memory that the load may take."""
    populate: bool
    """With route ``mapped``: read everything in at once."""
