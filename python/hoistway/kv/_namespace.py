"""Requests to a namespace: lookups, loads, stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from hoistway._native import Addresses, Pins
from hoistway.kv._ticket import Ticket, begin

if TYPE_CHECKING:
    from hoistway import _native
    from hoistway.kv._waiting import Waiting

Key = bytes | str
"""The key of a block: 1 to 1024 bytes. Text counts as its UTF-8."""

Buffers = Sequence[Any] | Addresses
"""Memory of each item: an object with the buffer protocol, a contiguous tensor of torch's on the host or a CUDA device,
an object with ``__cuda_array_interface__``, or a list of these, which are the pieces of the item in their order."""

Priority = Literal["demand", "prefetch", "background"]


class Namespace:
    """Blocks of one model, layout and tenant. Threads may share it."""

    __slots__ = ("_native", "_waiting")

    def __init__(self, native: _native.KvNamespace, waiting: Waiting) -> None:
        self._native = native
        self._waiting = waiting

    @property
    def id(self) -> str:
        """Its identity, which follows from its description."""
        return self._native.id

    def fingerprint(self, key: Key) -> str:
        """The name of a block in `Store.evicted`."""
        return self._native.fingerprint(key)

    def lookup(self, keys: Sequence[Key]) -> list[bool]:
        """Whether blocks are there."""
        return self._native.lookup(keys)

    def lookup_prefix(self, keys: Sequence[Key]) -> int:
        """How many of the blocks, from the first on, are there without a gap."""
        return self._native.lookup_prefix(keys)

    def lookup_reverse(self, keys: Sequence[Key]) -> int | None:
        """The last of the blocks that is there, by its place in ``keys``."""
        return self._native.lookup_reverse(keys)

    def store(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        shard: int | Sequence[int] = 0,
        shards: int = 1,
        shard_bytes: int | None = None,
        timeout: float | None = None,
        ttl: float | None = None,
        wait_event: Any = None,
        priority: Priority = "background",
        notify: bool = False,
    ) -> Ticket:
        """Starts to store shards of blocks. A block is found once all its shards were stored, in whatever order.

        The memory must not change until the ticket is released. The ticket's request keeps it: buffers and tensors may
        be dropped at once.

        Args:
            keys: The block of each item.
            buffers: The memory of each item.
            shard: Which shard of its block each item is; one number for all.
            shards: How many shards each of the blocks has.
            shard_bytes: Size of the longest shard of the blocks, where the requests for one block differ in that.
            timeout: Seconds that it may take. By default that of the store.
            ttl: Seconds that the blocks are kept, at most.
            wait_event: A CUDA event, of torch's or as a handle of the driver's, that work on the device must have
                reached before the memory is read. By default what torch's current stream was given so far, if tensors
                of torch's are on a device; other memory of devices has to hold its bytes already. An event that is
                given by its handle must live until `ticket.released()`.
            priority: How urgent it is. Requests in demand go first, then prefetches, then those in the background.
            notify: Whether `Store.event_fd` tells of the end.
        """
        return begin(
            self._native.store,
            self._waiting,
            keys,
            buffers,
            shard=shard,
            shards=shards,
            shard_bytes=shard_bytes,
            timeout=timeout,
            ttl=ttl,
            wait_event=wait_event,
            priority=priority,
            notify=notify,
        )

    def load(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        shard: int | Sequence[int] = 0,
        timeout: float | None = None,
        wait_event: Any = None,
        priority: Priority = "demand",
        notify: bool = False,
    ) -> Ticket:
        """Starts to load shards of blocks. What is not there, or damaged, is said by the statuses of the completion.

        Nothing may use the memory until the ticket is released; that of items that did not succeed holds anything then.
        The sizes must be those that were stored.

        Args:
            keys: The block of each item.
            buffers: The memory of each item, which must not be read-only.
            shard: Which shard of its block each item is; one number for all.
            timeout: Seconds that it may take. By default that of the store.
            wait_event: As for `store`: before the memory is written.
            priority: How urgent it is. Requests in demand go first, then prefetches, then those in the background.
            notify: Whether `Store.event_fd` tells of the end.
        """
        return begin(
            self._native.load,
            self._waiting,
            keys,
            buffers,
            shard=shard,
            timeout=timeout,
            wait_event=wait_event,
            priority=priority,
            notify=notify,
        )

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that blocks were used, so that they stay longer."""
        self._native.touch(keys)

    def pin(self, keys: Sequence[Key]) -> Pins:
        """Keeps blocks from being evicted or deleted by this process until the pins are released, or dropped."""
        return self._native.pin(keys)

    def delete(self, keys: Sequence[Key]) -> int:
        """Removes blocks that are not pinned, and says how many.

        With layout ``segments`` those that this process stored; with ``files`` also those of other processes and hosts.
        """
        return self._native.delete(keys)

    def clear(self) -> int:
        """Removes all blocks of the namespace that are not pinned, and says how many.

        With layout ``segments`` those that this process stored; with ``files`` also those of other processes and hosts.
        """
        return self._native.clear()

    def __repr__(self) -> str:
        return f"Namespace({self.id})"
