"""A store of KV-cache blocks: from host or device memory to storage and back, safe against crashes.

Examples:
    >>> import hoistway.kv as kv
    >>> with kv.Store("/mnt/nvme/kv", capacity="100GiB") as store:  # doctest: +SKIP
    ...     blocks = store.namespace(model="llama@1", dtype="bfloat16", block_tokens=16)
    ...     blocks.store([b"tokens 0..16"], [memory]).wait()
    ...     if blocks.lookup_prefix([b"tokens 0..16", b"tokens 16..32"]) == 1:
    ...         blocks.load([b"tokens 0..16"], [memory]).wait()

Works without torch and numpy; takes the tensors of either, and everything that has the buffer protocol.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    raise ImportError("hoistway.kv: stores of KV-cache blocks are available on Linux only", name=__name__)

from hoistway._native import Addresses, Completion, Pins, Region
from hoistway.errors import (
    ForkedError,
    MemoryLostError,
    RequestError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReadOnlyError,
    WaitTimeoutError,
)
from hoistway.errors import HoistwayError as Error
from hoistway.kv._metrics import MetricsCollector
from hoistway.kv._namespace import Buffers, Key, Namespace
from hoistway.kv._store import Store
from hoistway.kv._ticket import Ticket

__all__ = [
    "Addresses",
    "Buffers",
    "Completion",
    "Error",
    "ForkedError",
    "Key",
    "MemoryLostError",
    "MetricsCollector",
    "Namespace",
    "Pins",
    "Region",
    "RequestError",
    "Store",
    "StoreClosedError",
    "StoreNotFoundError",
    "StoreReadOnlyError",
    "Ticket",
    "WaitTimeoutError",
]
