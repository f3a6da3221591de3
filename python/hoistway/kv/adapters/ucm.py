"""A store of UCM, by its interface V1: named in `ucm_connectors` with ``ucm_connector_name`` `HoistwayStore` and
``ucm_connector_module_path`` `hoistway.kv.adapters.ucm`.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ucm.store.pipeline.errors import StoreNotFoundError, StoreUnhealthyError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

from hoistway import _native
from hoistway._devices import dlpack_kind, of_number
from hoistway.errors import OptionError, RequestError
from hoistway.kv import Addresses, Error, MemoryLostError, Namespace, Region, Store, Ticket
from hoistway.kv._ending import abandon, settle_all, start_into, summary
from hoistway.kv.adapters._metrics import Exported
from hoistway.kv.adapters._settings import Settings
from hoistway.kv.adapters._tickets import is_accepted, outcome

log = logging.getLogger("hoistway.kv")

# Statuses of blocks that are not there, or that are not what was asked for: UCM computes them anew.
_GONE = frozenset({"miss", "expired", "corrupt", "mismatch"})
_GIB = 1 << 30
# Percent of a file system that a store takes which no capacity is said of.
_DEFAULT_SHARE = 90

# What the store takes from UCM's configuration. `useDirect` and `use_direct` are one option.
_TAKEN = frozenset(
    {
        "storage_backends",
        "useDirect",
        "use_direct",
        "timeout_ms",
        "posix_capacity_gb",
        "tensor_size_list",
        "tensor_size",
        "shard_size",
        "block_size",
        "device_id",
        "tensor_layout",
        "gpu_kv_buffer_addrs",
        "gpu_kv_buffer_sizes",
        "hoistway",
    }
)
# What UCM's connectors set for its own stores.
_SET_BY_UCM = frozenset(
    {
        "unique_id",
        "local_rank_size",
        "share_buffer_enable",
        "posix_gc_enable",
        "cpu_affinity_cores",
        "cache_buffer_capacity_gb",
        "cache_io_aggregation",
        "store_pipeline",
    }
)
# What users set for UCM's own stores: their cache, their files, their health.
_OF_OTHER_STORES = frozenset(
    {
        "io_direct",
        "cache_stream_number",
        "cache_sdma_direct",
        "cache_load_backend_only",
        "cache_load_exclusive_buffer_number",
        "waiting_queue_depth",
        "running_queue_depth",
        "data_dir_shard_bytes",
        "stream_number",
        "use_gdr",
        "compress_ratio",
        "store_health",
        "posix_io_engine",
        "posix_data_trans_concurrency",
        "posix_lookup_concurrency",
        "posix_open_concurrency",
        "posix_commit_concurrency",
        "posix_gc_recycle_percent",
        "posix_gc_concurrency",
        "posix_gc_check_interval_sec",
        "posix_gc_trigger_threshold_ratio",
        "posix_gc_max_recycle_count_per_shard",
        "posix_gc_shard_sample_ratio",
        "posix_gc_cross_instance_lock",
        "posix_gc_heartbeat_interval_sec",
        "posix_gc_stale_threshold_sec",
        "posix_gc_task_timeout_ms",
        "posix_gc_precise_mode",
        "posix_gc_candidate_extra_percent",
    }
)

T = TypeVar("T")


@dataclass(eq=False)
class HoistwayTask(Task):  # type: ignore[misc]
    """A dump or a load under way: requests of one or several stores."""

    tickets: list[Ticket]
    is_load: bool


@dataclass
class _Rows:
    """Memory of shards: the tensors of each, or their addresses."""

    tensors: Sequence[Sequence[Any]] | None = None
    addresses: np.ndarray | None = None
    sizes: np.ndarray | None = None
    device: str = "cpu"

    def __len__(self) -> int:
        rows = self.tensors if self.addresses is None else self.addresses
        return 0 if rows is None else len(rows)

    def split(self, rows: list[int]) -> list[tuple[list[int], Any]]:
        """Memory of some of the rows, as requests take it: those of like absent slots together.

        A slot without memory, at address 0, stands for a layer that has no such tensor. It is not stored, so the shard
        is shorter for it, as it is again when it is loaded.
        """
        if self.addresses is None:
            tensors = self.tensors or ()
            return [(rows, [list(tensors[row]) for row in rows])]
        addresses, sizes = self.addresses[rows], np.asarray(self.sizes)
        present = addresses != 0
        if present.all():
            return [(rows, Addresses(addresses, sizes, device=self.device))]
        found: list[tuple[list[int], Any]] = []
        for columns in np.unique(present, axis=0):
            some = np.flatnonzero((present == columns).all(axis=1))
            pieces = np.ascontiguousarray(addresses[some][:, columns])
            found.append(([rows[row] for row in some], Addresses(pieces, sizes[columns], device=self.device)))
        return found


class HoistwayStore(UcmKVStoreBaseV1):  # type: ignore[misc]
    """Blocks of UCM in KV stores, one for each of the ``storage_backends``. Threads may share it."""

    def __init__(self, config: dict[str, object]) -> None:
        """Opens the stores.

        Args:
            config: As UCM's connectors make it: ``storage_backends``, ``device_id``, ``shard_size``, ``block_size``,
                ``tensor_size_list`` or ``tensor_size``, ``useDirect`` or ``use_direct``, ``timeout_ms``,
                ``posix_capacity_gb``. Options of `hoistway.kv.Store`, ``namespace`` and ``checkpoint`` are below
                ``hoistway``; they win.
        """
        super().__init__(config)
        _check(config)
        roots = _roots(config)
        settings = Settings.parse(_options(config, len(roots)), "hoistway")
        self._is_read_only = settings.is_read_only
        self._geometry = _Geometry.of(config)
        self._stores: list[Store] = []
        self._exported: list[Exported] = []
        self._blocks: list[Namespace] = []
        self._regions: list[Region] = []
        other = {"engine": "ucm", **settings.weights()}
        try:
            for root, defaults in zip(roots, _defaults(roots), strict=True):
                own = replace(settings, store={**defaults, **settings.store})
                # UCM has the model, the ranks and the element type in its block ids.
                store, blocks = own.open_both(
                    root,
                    layout=str(config.get("tensor_layout", "")),
                    key_algorithm="ucm block id",
                    other=other,
                )
                self._stores.append(store)
                self._exported.append(Exported(store))
                self._blocks.append(blocks)
                # Without, bytes would not pass the host's memory by.
                self._regions += [store.register(buffer) for buffer in self._geometry.buffers]
        except Exception:
            self.close()
            raise

    def cc_store(self) -> int:
        """Fails: there is no store of UCM's C++ interface behind this one, so no other can be stacked on it."""
        raise NotImplementedError(
            "HoistwayStore is no store of UCM's C++ interface; do not stack others on it"
        )

    def lookup(self, block_ids: list[bytes]) -> list[bool]:
        """Whether blocks are there, with all their shards."""
        if len(self._blocks) == 1:
            return self._blocks[0].lookup(block_ids)
        found = [False] * len(block_ids)
        for blocks, places in self._by_store(block_ids):
            for place, is_there in zip(
                places, blocks.lookup([block_ids[place] for place in places]), strict=True
            ):
                found[place] = is_there
        return found

    def lookup_on_prefix(self, block_ids: list[bytes]) -> int:
        """The last block before the first that is missing, by its place; -1 if that is the first."""
        if len(self._blocks) == 1:
            return self._blocks[0].lookup_prefix(block_ids) - 1
        found = self.lookup(block_ids)
        return (found.index(False) if False in found else len(found)) - 1

    def lookup_on_reverse(self, block_ids: list[bytes]) -> int:
        """The last block that is there, by its place; -1 if none is."""
        if len(self._blocks) == 1:
            last = self._blocks[0].lookup_reverse(block_ids)
            return -1 if last is None else last
        found = self.lookup(block_ids)
        return len(found) - 1 - found[::-1].index(True) if True in found else -1

    def prefetch(self, block_ids: list[bytes]) -> None:
        """Blocks that are about to be loaded stay."""
        for blocks, places in self._by_store(block_ids):
            blocks.touch([block_ids[place] for place in places])

    def load(self, block_ids: list[bytes], shard_index: list[int], dst_tensor: list[list[Any]]) -> Task:
        """Starts to load shards into tensors."""
        self._follow(block_ids)
        return self._begin(Namespace.load, block_ids, shard_index, _Rows(tensors=dst_tensor))

    def dump(self, block_ids: list[bytes], shard_index: list[int], src_tensor: list[list[Any]]) -> Task:
        """Starts to store shards from tensors. A block is found when all its shards are there."""
        return self._begin(
            Namespace.store, block_ids, shard_index, _Rows(tensors=src_tensor), **self._shards()
        )

    def load_data(
        self, block_ids: list[bytes], shard_index: list[int], dst_addr: list[list[int]] | np.ndarray
    ) -> Task:
        """Starts to load shards to addresses."""
        self._follow(block_ids)
        return self._begin(Namespace.load, block_ids, shard_index, self._geometry.rows(dst_addr))

    def dump_data(
        self,
        block_ids: list[bytes],
        shard_index: list[int],
        src_addr: list[list[int]] | np.ndarray,
        prerequisite_handle: int = 0,
    ) -> Task:
        """Starts to store shards from addresses, once the device has reached an event."""
        return self._begin(
            Namespace.store,
            block_ids,
            shard_index,
            self._geometry.rows(src_addr),
            wait_event=prerequisite_handle or None,
            **self._shards(),
        )

    def wait(self, task: Task) -> None:
        """Waits until a task has ended and nothing uses its memory.

        Raises:
            StoreNotFoundError: Blocks that were to be loaded are not there, or damaged.
            StoreUnhealthyError: The storage failed, or took too long; or it may use the memory for ever.
            RuntimeError: Blocks were not stored, as there is no room, or as they have other shards.
        """
        completions = _ended(settle_all, task.tickets)
        statuses = [status for completion in completions for status in completion.statuses]
        bad = [status for status in statuses if not is_accepted(status)]
        if not bad:
            return
        message = f"of {len(statuses)} shards: {summary(bad)}"
        if task.is_load and all(status in _GONE for status in bad):
            raise StoreNotFoundError(message)
        if any(status == "timed_out" or status.startswith("io:") for status in bad):
            raise StoreUnhealthyError(message)
        raise RuntimeError(message)

    def check(self, task: Task) -> bool:
        """Whether a task has ended, well or not."""
        return all(ticket.lost() or outcome(ticket) is not None for ticket in task.tickets)

    def close(self) -> None:
        """Ends what is under way and closes the stores. UCM leaves that to the end of the process."""
        for exported in self._exported:
            exported.close()
        for store in self._stores:
            try:
                store.close()
            except Error as error:
                # The others are to be closed, too.
                log.error("closing UCM's store %s: %s", store.root, error)
        # Not before: what is under way reads and writes them.
        self._regions.clear()

    def _shards(self) -> dict[str, int | None]:
        return {"shards": self._geometry.shards, "shard_bytes": self._geometry.shard_bytes}

    def _follow(self, block_ids: list[bytes]) -> None:
        """Looks for blocks that another process stored just now: the scheduler may have seen them before."""
        if not all(self.lookup(block_ids)):
            for store in self._stores:
                store.follow()

    def _begin(
        self,
        start: Callable[..., Ticket],
        block_ids: list[bytes],
        shard_index: list[int],
        rows: _Rows,
        **options: Any,
    ) -> HoistwayTask:
        if not len(block_ids) == len(shard_index) == len(rows):
            raise RequestError(
                f"there are {len(block_ids)} blocks, {len(shard_index)} shards, and memory of {len(rows)}"
            )
        task = HoistwayTask([], is_load=start is Namespace.load)
        if self._is_read_only and start is Namespace.store:
            return task
        try:
            for blocks, places in self._by_store(block_ids):
                for some, memory in rows.split(places):
                    ids = [block_ids[place] for place in some]
                    shards = [int(shard_index[place]) for place in some]
                    start_into(task.tickets, start, blocks, ids, memory, shard=shards, **options)
        except BaseException:
            # The caller learns of no task, and takes its memory back.
            _ended(abandon, task.tickets)
            raise
        return task

    def _by_store(self, block_ids: Sequence[bytes]) -> list[tuple[Namespace, list[int]]]:
        """Which store each block is in. Processes agree on that."""
        if len(self._blocks) == 1:
            return [(self._blocks[0], list(range(len(block_ids))))]
        places: list[list[int]] = [[] for _ in self._blocks]
        for place, block in enumerate(block_ids):
            places[zlib.crc32(block) % len(places)].append(place)
        return [(blocks, some) for blocks, some in zip(self._blocks, places, strict=True) if some]


UcmNfsStore = HoistwayStore
"""The name that configurations for UCM's own store of files have."""


@dataclass(frozen=True)
class _DeviceBuffer:
    """Memory of a device, by its address alone. UCM's connector keeps it as long as it has the store."""

    address: int
    size: int
    place: tuple[int, int]
    """As DLPack names it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place


@dataclass(frozen=True)
class _Geometry:
    """What a worker says of its blocks. A scheduler only looks blocks up, and knows nothing of this."""

    sizes: np.ndarray | None
    """Bytes of the tensors of a shard."""
    shards: int
    shard_bytes: int | None
    device: str
    buffers: list[_DeviceBuffer]
    """Memory of the device that blocks are in."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Geometry:
        shard, block = int(config.get("shard_size") or 0), int(config.get("block_size") or 0)
        sizes = None
        if config.get("tensor_size_list"):
            sizes = np.array(config["tensor_size_list"], dtype=np.uint64)
        elif config.get("tensor_size") and shard:
            sizes = np.full(shard // int(config["tensor_size"]), config["tensor_size"], dtype=np.uint64)
        if shard and block % shard:
            raise OptionError(f"block_size cannot be {block}: it is no multiple of shard_size, {shard}")
        # Only memory of a device is announced so.
        device, buffers, ordinal = "cpu", [], _ordinal(config)
        if config.get("gpu_kv_buffer_addrs") and ordinal >= 0 and _has_cuda():
            device = of_number(ordinal)
            ranges = zip(config["gpu_kv_buffer_addrs"], config["gpu_kv_buffer_sizes"], strict=True)
            place = (dlpack_kind(device), ordinal)
            buffers = [_DeviceBuffer(int(address), int(size), place) for address, size in ranges]
        return cls(
            sizes=sizes,
            shards=block // shard if shard else 1,
            shard_bytes=int(sizes.sum()) if sizes is not None else None,
            device=device,
            buffers=buffers,
        )

    def rows(self, addresses: Sequence[Sequence[int]] | np.ndarray) -> _Rows:
        if self.sizes is None:
            raise RequestError(
                "UCM's configuration has no tensor_size_list, nor tensor_size, so addresses have no lengths"
            )
        found = np.asarray(addresses, dtype=np.uint64)
        if found.ndim != 2 or found.shape[1] != len(self.sizes):
            raise RequestError(
                f"addresses of {found.shape} make no shards of {len(self.sizes)} tensors, as tensor_size_list has them"
            )
        return _Rows(addresses=found, sizes=self.sizes, device=self.device)


def _ordinal(config: Mapping[str, Any]) -> int:
    """The number of the device, or -1 for none."""
    ordinal = config.get("device_id")
    return -1 if ordinal is None else int(ordinal)


def _ended(end: Callable[[list[Ticket]], T], tickets: list[Ticket]) -> T:
    """Ends requests, one way or another, so that nothing uses their memory."""
    try:
        return end(tickets)
    except MemoryLostError as error:
        log.error("UCM cannot keep memory back, so its process has to be restarted: %s", error)
        raise StoreUnhealthyError(str(error)) from error


def _roots(config: Mapping[str, Any]) -> list[str]:
    backends = config.get("storage_backends")
    # UCM's connectors split it; its own tests, and others, do not.
    roots = backends.split(":") if isinstance(backends, str) else list(backends or ())
    roots = [str(root) for root in roots if root]
    if not roots:
        raise OptionError(
            "storage_backends has to name a directory for the store, or several with ':' between them"
        )
    return roots


def _check(config: Mapping[str, Any]) -> None:
    """Refuses options that mean nothing, and names those that have no effect here."""
    for name in config:
        if name not in _TAKEN | _SET_BY_UCM | _OF_OTHER_STORES:
            raise OptionError(
                f"{name!r} in ucm_connector_config means nothing to HoistwayStore nor to UCM; HoistwayStore takes "
                f"{', '.join(sorted(_TAKEN))}"
            )
    if unused := sorted(_OF_OTHER_STORES & config.keys()):
        log.warning(
            "of ucm_connector_config, %s have no effect: they are of UCM's own stores", ", ".join(unused)
        )


def _options(config: Mapping[str, Any], stores: int) -> dict[str, Any]:
    """UCM's own options in the store's words, and what is below ``hoistway``."""
    options: dict[str, Any] = {}
    directs = [config[name] for name in ("useDirect", "use_direct") if config.get(name) is not None]
    if directs:
        if any(direct != directs[0] for direct in directs):
            raise OptionError(
                f"useDirect is {directs[0]!r}, and use_direct {directs[1]!r}: they are one option, say one of them"
            )
        options["direct"] = directs[0]
    if config.get("timeout_ms"):
        options["timeout"] = int(config["timeout_ms"]) / 1000
    if config.get("posix_capacity_gb"):
        try:
            capacity = int(float(config["posix_capacity_gb"]) * _GIB)
        except (OverflowError, TypeError, ValueError):
            raise OptionError(
                f"posix_capacity_gb is a number of GiB, not {config['posix_capacity_gb']!r}"
            ) from None
        options["capacity"] = capacity // stores
    own = config.get("hoistway") or {}
    if not isinstance(own, Mapping):
        raise OptionError(f"hoistway is an object of names and values, not {own!r}")
    return {**options, **{name: value for name, value in own.items() if value is not None}}


def _defaults(roots: Sequence[str]) -> list[dict[str, Any]]:
    """Options of each store that its file system decides unless the user does: the capacity, of which stores on one
    file system have equal shares, and the layout of a new store.
    """
    directories = [_existing(Path(root)) for root in roots]
    sharing = Counter(os.stat(directory).st_dev for directory in directories)
    defaults: list[dict[str, Any]] = []
    for root, directory in zip(roots, directories, strict=True):
        status = os.statvfs(directory)
        size = status.f_blocks * status.f_frsize * _DEFAULT_SHARE // 100
        options: dict[str, Any] = {"capacity": size // sharing[os.stat(directory).st_dev]}
        if _native.is_remote(directory) and not os.path.exists(os.path.join(root, "STORE")):
            options["layout"] = "files"
        defaults.append(options)
    return defaults


def _existing(path: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    path = path.absolute()
    return next(directory for directory in (path, *path.parents) if directory.is_dir())


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415

    return bool(torch.cuda.is_available())
