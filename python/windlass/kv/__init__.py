"""A store of KV-cache blocks: from host or device memory to storage and back, safe against crashes.

>>> import windlass.kv as kv
>>> with kv.Store("/mnt/nvme/kv", capacity="100GiB") as store:  # doctest: +SKIP
...     blocks = store.namespace(model="llama@1", dtype="bfloat16", block_tokens=16)
...     blocks.store([b"tokens 0..16"], [memory]).wait()
...     if blocks.lookup_prefix([b"tokens 0..16", b"tokens 16..32"]) == 1:
...         blocks.load([b"tokens 0..16"], [memory]).wait()

Works without torch and numpy; takes the tensors of either, and everything that has the buffer protocol.
"""

from __future__ import annotations

from windlass._native import Addresses, Completion, Pins, Region
from windlass.errors import (
    ForkedError,
    MemoryLostError,
    RequestError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReadOnlyError,
    WaitTimeoutError,
)
from windlass.errors import WindlassError as Error
from windlass.kv._namespace import Buffers, Key, Namespace
from windlass.kv._store import Store
from windlass.kv._ticket import Ticket

__all__ = [
    "Addresses",
    "Buffers",
    "Completion",
    "Error",
    "ForkedError",
    "Key",
    "MemoryLostError",
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
