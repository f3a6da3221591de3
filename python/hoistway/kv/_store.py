"""Open stores."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn

from hoistway import _native
from hoistway._arguments import path_text, refuse_unknown
from hoistway._native import Completion, Region
from hoistway.kv._namespace import Namespace
from hoistway.kv._waiting import Waiting

Rank = tuple[int, int]
"""The number of a process among those that share something, from 0, and their count."""


class Store:
    """A store of blocks below a directory, open. Threads may share it; a child of ``fork`` opens its own.

    Processes share a store by opening the same directory: each finds the blocks of all, and evicts its own.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        capacity: int | str | None = None,
        access: Literal["read_write", "read"] = "read_write",
        layout: Literal["segments", "files"] | None = None,
        durability: Literal["none", "batched", "sync"] = "batched",
        eviction: Literal["s3fifo", "lru"] = "s3fifo",
        admission: Literal["always", "second_touch"] = "always",
        segment_bytes: int | str | None = None,
        min_free: int | str = "1GiB",
        route: Literal["auto", "io_uring", "threads"] = "auto",
        direct: bool | Literal["off", "prefer", "require"] = "prefer",
        io_threads: int | None = None,
        staging: int | str | None = None,
        max_in_flight: int | str = "256MiB",
        verify: bool = True,
        timeout: float | None = None,
        partial_timeout: float = 60.0,
        scrub_bytes_per_second: int | str = 0,
        far: Mapping[str, Any] | None = None,
        **unknown: NoReturn,
    ) -> None:
        """Opens a store, and makes it if it is not there.

        Args:
            root: Directory of the store.
            capacity: Most bytes that all files below it take, of all processes: a number, or text such as ``"100GiB"``.
                Needed for writing.
            access: ``"read"`` finds what others write, and changes no file.
            layout: How blocks lie in files: ``"segments"``, in slots of large files, the default of a new store; or
                ``"files"``, a file each, for file systems that others read too.
            durability: What a completed store means after a power cut: ``"none"``, the block may be missing, and in
                layout ``"files"`` a key that was deleted and stored again may have its older bytes;
                ``"batched"``, it is on the disk, and blocks that come while others are synced share the next sync;
                ``"sync"``, the same.
            eviction: Which block goes first when room is needed.
            admission: ``"second_touch"`` stores what was stored or asked for before, and spares the drive the rest.
            segment_bytes: Size of a segment. By default 1 GiB, less for small capacities.
            min_free: What is left free on the file system, whatever the capacity.
            route: How bytes move between host memory and files. A route that is named and cannot be used is an error.
            direct: Whether devices are read and written past the host's memory: ``"prefer"``, where that is proven
                to work; ``"require"`` or True, else it is an error; ``"off"`` or False, never.
            io_threads: Threads that move bytes. By default 4; 8 with route `threads`.
            staging: Memory of the host, through which pass blocks that are not aligned; once a device is used, as much
                again, pinned. By default 64 MiB, at least 8 MiB.
            max_in_flight: Most bytes of transfers under way. Further loads wait. A store is taken whole, and waits too,
                unless those before it leave it no room: then it is dropped as busy. A larger one goes alone. So
                is a request to load that has more than 65,536 blocks with those before it.
            verify: Whether checksums are compared when blocks are loaded. Those of blocks that no sync covers, after
                durability ``"none"``, are always compared.
            timeout: Seconds that a load or a store may take, unless it says otherwise.
            partial_timeout: Seconds after which a block is given up that lacks shards and has got no further one.
            scrub_bytes_per_second: What is read in the background to find damaged blocks.
            far: A second store behind this one, such as one on a shared file system: ``root`` (a directory that is made
                by hand: until it is there, this store works alone) and ``capacity``, and
                ``policy`` (``"write_through"`` or ``"write_back"``), ``promote``, ``timeout``, ``lookup_timeout``,
                ``backlog``, ``staging``, ``layout``, ``durability`` and ``min_free``.
            unknown: None: a misspelt option is an error that names the nearest.
        """
        refuse_unknown(unknown, list(Store.__init__.__kwdefaults__ or ()))
        self._native = _native.KvStore(
            path_text(root),
            capacity=capacity,
            access=access,
            layout=layout,
            durability=durability,
            eviction=eviction,
            admission=admission,
            segment_bytes=segment_bytes,
            min_free=min_free,
            route=route,
            direct=direct,
            io_threads=io_threads,
            staging=staging,
            max_in_flight=max_in_flight,
            verify=verify,
            timeout=timeout,
            partial_timeout=partial_timeout,
            scrub_bytes_per_second=scrub_bytes_per_second,
            far=None if far is None else dict(far),
        )
        self._waiting = Waiting(self._native)

    @property
    def root(self) -> str:
        """Its directory."""
        return os.fspath(self._native.root)

    def namespace(
        self,
        *,
        model: str = "",
        dtype: str = "",
        layout: str = "",
        layers: int = 0,
        kv_heads: int = 0,
        head_dim: int = 0,
        block_tokens: int = 0,
        tensor_parallel: Rank | None = None,
        pipeline_parallel: Rank | None = None,
        context_parallel: Rank | None = None,
        key_algorithm: str = "",
        salt: str = "",
        other: Mapping[str, str] | None = None,
        ttl: float | None = None,
        quota: int | str | None = None,
        **unknown: NoReturn,
    ) -> Namespace:
        """Opens the namespace of this description. Blocks of other descriptions are not found in it.

        Args:
            model: The model, by a name that changes when its weights do.
            dtype: Element type of the cache.
            layout: How a block's bytes are arranged.
            layers: Layers that a block has parts of.
            kv_heads: Heads of keys and values, of this rank.
            head_dim: Elements of a head.
            block_tokens: Tokens in a block.
            tensor_parallel: Which of the ranks this is that share each layer, and how many there are.
            pipeline_parallel: The same of ranks that share the layers.
            context_parallel: The same of ranks that share the context.
            key_algorithm: How the engine makes keys of tokens.
            salt: A tenant's secret. It is hashed, never written down. A process finds only blocks of its own
                salt. It is no access control: a process that can read the directory can read all blocks.
            other: Whatever else tells blocks apart, by name.
            ttl: Seconds that a block is kept after it was stored, at most.
            quota: Most bytes of storage that the blocks of the namespace take, of all processes together.
            unknown: None: a misspelt field is an error that names the nearest.
        """
        refuse_unknown(unknown, list(Store.namespace.__kwdefaults__ or ()))
        native = self._native.namespace(
            model=model,
            dtype=dtype,
            layout=layout,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_tokens=block_tokens,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            context_parallel=context_parallel,
            key_algorithm=key_algorithm,
            salt=salt,
            other=dict(other or {}),
            ttl=ttl,
            quota=quota,
        )
        return Namespace(native, self._waiting)

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """Descriptions of the namespaces that the store has, by their identity."""
        return {id: json.loads(description) for id, description in self._native.namespaces()}  # noqa: A001

    def register(self, buffer: Any) -> Region:
        """Makes memory known ahead, so that transfers from and to it cost less; the memory of a CUDA device has to be
        known to be read and written directly. It is held until the region is dropped.
        """
        return self._native.register(buffer)

    def event_fd(self) -> int:
        """A descriptor that can be read while completions wait for `drain_completions`. It is the store's: do not close
        it. Where tickets are awaited, their event loop watches it.
        """
        return self._native.event_fd()

    def drain_completions(self) -> list[Completion]:
        """The completions of requests with ``notify=True`` since the last call, but for those that were awaited."""
        return self._waiting.drain()

    def stats(self) -> dict[str, Any]:
        """The contents of the store, and counts since it was opened."""
        stats: dict[str, Any] = json.loads(self._native.stats())
        return stats

    def metrics(self) -> str:
        """The same as text for Prometheus."""
        return self._native.metrics()

    def report(self) -> dict[str, Any]:
        """How it works: what it was told, which way bytes went, why not a better one, and what it warns of."""
        report: dict[str, Any] = json.loads(self._native.report())
        return report

    def events(self) -> list[dict[str, Any]]:
        """The events since the last call: damaged blocks and logs, a lack of room, failed transfers, namespaces that
        cannot be used, directories that other users can change. ``kind`` and ``reason`` say what, ``key`` which block.
        """
        events: list[dict[str, Any]] = json.loads(self._native.events())
        return events

    def evicted(self) -> tuple[list[str], int]:
        """Fingerprints of blocks of this process that went to make room, or as their time was over, since the last
        call, and how many others did: only the last 65,536 are remembered. A block that was stored again is among them.
        """
        return self._native.evicted()

    def follow(self) -> None:
        """Looks now for blocks that other processes have stored, which is done a few times a second anyway."""
        self._native.follow()

    def maintain(self) -> None:
        """Does now what is done a few times a second: expire blocks, follow other processes, evict ahead."""
        self._native.maintain()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every store that was asked for before has ended; `WaitTimeoutError` after ``timeout`` seconds."""
        self._native.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Ends it. Stores under way get ``timeout`` seconds to end, by default as long as they take; other requests are
        cancelled. Closing it again does nothing.
        """
        self._native.close(timeout)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.root!r})"
