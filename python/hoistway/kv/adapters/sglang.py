"""A storage backend of SGLang's HiCache, for ``--hicache-storage-backend dynamic``.

Named in ``--hicache-storage-backend-extra-config`` by ``"module_path": "hoistway.kv.adapters.sglang"`` and
``"class_name": "HiCacheHoistway"``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hoistway.errors import MissingPackageError, OptionError, RequestError
from hoistway.kv import Addresses, MemoryLostError, Namespace, Store, Ticket
from hoistway.kv._ending import log, summary
from hoistway.kv.adapters._metrics import Exported
from hoistway.kv.adapters._settings import Settings
from hoistway.kv.adapters._tickets import complete, is_accepted
from hoistway.plugins._versions import lacking

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.runtime_context import get_model
except ImportError as error:
    raise MissingPackageError(lacking("sglang", "the backend HiCacheHoistway", "0.5.23", error)) from error

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

_GIB = 1 << 30
# Facts of a host pool that its pages depend on, as far as it has them.
_GEOMETRY = (
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "item_bytes",
    "state_page_bytes",
    "temporal_state_elem_size",
    "conv_state_elem_sizes",
    "num_mamba_layers",
    "start_layer",
    "end_layer",
    "size_per_token",
    "storage_format_tag",
)
# Draft pools of MHA are split over the ranks, also where the model's own cache is not.
_DRAFTS = (PoolName.DRAFT, PoolName.DRAFT_SWA)


class HiCacheHoistway(HiCacheStorage):  # type: ignore[misc]
    """Pages of host pools in a KV store. Each rank opens it for itself; they share the directory."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Opens the store.

        Args:
            storage_config: As SGLang's controller makes it. Its ``extra_config`` has ``store``, with ``root``, options
                of `hoistway.kv.Store`, ``namespace``, and ``checkpoint``: where the weights are, if not where SGLang
                has the model from.
            kwargs: What SGLang's factory adds: nothing so far.
        """
        self._config = storage_config
        extra = storage_config.extra_config or {}
        options = extra.get("store")
        if not isinstance(options, dict) or not options.get("root"):
            raise OptionError(
                "the extra config of the storage backend needs 'store', an object with 'root', the store's directory"
            )
        self._settings = Settings.parse(options, "store", own=("root",))
        self._is_zero_copy = bool(extra.get("interface_v1", 0))
        self._weights = self._settings.weights(*_model_of(storage_config))
        self._store: Store = self._settings.open(options["root"])
        self._exported = Exported(self._store) if storage_config.enable_storage_metrics else None
        self._main: _Pool | None = None
        self._pools: dict[str, _Pool] = {}
        self._flat_pages: Namespace | None = None
        self._traffic = _Traffic()

    # --- host pools -------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Pages of this pool are meant where none is named."""
        super().register_mem_pool_host(mem_pool_host)
        self._main = self._pool(PoolName.KV, mem_pool_host)
        if mem_pool_host.kv_buffer is not None:
            # Tensors that the pool makes of a page have another order of bytes than the page.
            self._flat_pages = self._namespace(PoolName.KV, mem_pool_host, "flat pages")

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Pages of this pool are meant by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if (
            host_pool_name in _DRAFTS
            and self._config.is_mla_model
            and self._config.tp_size > 1
            and getattr(host_pool, "head_num", 0)
            and hasattr(host_pool, "v_buffer")
        ):
            raise OptionError(
                f"the pool {host_pool_name} is split over {self._config.tp_size} ranks, and SGLang stores that of the "
                "first rank alone in dynamic backends: run without a draft model, or without a storage backend"
            )
        self._pools[host_pool_name] = self._pool(host_pool_name, host_pool)

    def _pool(self, name: PoolName, pool: HostKVCache) -> _Pool:
        if getattr(pool, "kv_buffer", None) is None and name == PoolName.KV:
            # It counts pages that others have the bytes of.
            return _Pool(name, pool, None, has_pieces=False)
        page = torch.arange(_page_size(pool), dtype=torch.int64)
        try:
            has_pieces = pool.get_page_buffer_meta(page) is not None
        except (NotImplementedError, ValueError) as reason:
            log.info("pages of pool %s are copied once on their way, as the pool says: %s", name, reason)
            has_pieces = False
        blocks = self._namespace(name, pool, "pieces" if has_pieces else "flat pages")
        return _Pool(name, pool, blocks, has_pieces=has_pieces)

    def _namespace(self, name: PoolName, pool: HostKVCache, form: str) -> Namespace:
        config = self._config
        # Where all ranks have the same cache, the first one stores it. The states of Mamba are split all the same.
        is_replicated = config.is_mla_model and name != PoolName.MAMBA
        geometry = {what: getattr(pool, what) for what in _GEOMETRY if getattr(pool, what, None) is not None}
        return self._settings.open_namespace(
            self._store,
            model=config.model_name or "",
            dtype=str(getattr(pool, "dtype", "")),
            layout=f"{getattr(pool, 'layout', '')}, {form}",
            layers=int(getattr(pool, "layer_num", 0) or 0),
            block_tokens=int(getattr(pool, "page_size", 0) or 0),
            tensor_parallel=None if is_replicated else (config.tp_rank, config.tp_size),
            pipeline_parallel=(config.pp_rank, config.pp_size),
            context_parallel=(config.attn_cp_rank, config.attn_cp_size),
            key_algorithm="sglang page hash",
            other={
                "engine": "sglang",
                "pool": str(name),
                "decode_context_parallel": f"{config.dcp_rank}/{config.dcp_size}",
                "logical_page_size": config.logical_page_size,
                **geometry,
                **self._weights,
            },
        )

    def _main_pool(self) -> _Pool:
        if self._main is None:
            raise RequestError("SGLang has not registered its host pool yet")
        return self._main

    # --- pages of the main pool -------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages, from the first on, are there without a gap."""
        pool = self._main_pool()
        if pool.blocks is None:
            return len(keys)
        blocks = pool.blocks if self._is_zero_copy else self._flat_namespace()
        return blocks.lookup_prefix(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages into the pool, without a copy in between."""
        return self._move(self._main_pool(), keys, host_indices, is_load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the pool, without a copy in between."""
        return self._move(self._main_pool(), keys, host_indices, is_load=False)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Loads a page into a tensor: the one that is given, or a new one."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Loads pages into tensors. Those that cannot be loaded are None."""
        blocks = self._flat_namespace()
        pages = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        begin = time.perf_counter()
        loaded = _ended(partial(blocks.load, keys, list(pages)), "load", PoolName.KV)
        self._note(is_load=True, pages=sum(loaded), size=_size_of(pages, loaded), begin=begin)
        return [page if is_loaded else None for page, is_loaded in zip(pages, loaded, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores pages from tensors."""
        blocks = self._flat_namespace()
        if values is None or any(value is None for value in values):
            raise RequestError(
                "there are no tensors to store: pages by their places in the pool go to batch_set_v1"
            )
        if self._settings.is_read_only:
            return True
        pages = [value.contiguous() for value in values if value is not None]
        begin = time.perf_counter()
        stored = _ended(partial(blocks.store, keys, pages), "store", PoolName.KV)
        self._note(is_load=False, pages=sum(stored), size=_size_of(pages, stored), begin=begin)
        return all(stored)

    def _flat_namespace(self) -> Namespace:
        if self._flat_pages is None:
            raise RequestError("SGLang has not registered a host pool that has pages of its own")
        return self._flat_pages

    # --- pages of several pools -------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """For which prefixes of the pages all that each pool has to have is there."""
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            boundary, usable = _usable(transfer, keys, pages, self._named_pool(transfer))
            if boundary:
                hits[transfer.name] = boundary
            if usable is not None:
                restorable = [length for length in restorable if length in usable]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Loads pages of several pools."""
        return self._move_all(transfers, is_load=True)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Stores pages of several pools."""
        return self._move_all(transfers, is_load=False)

    def _named_pool(self, transfer: PoolTransfer) -> _Pool:
        pool = self._pools.get(transfer.name)
        if pool is None and transfer.name == PoolName.KV:
            pool = self._main
        if pool is None:
            raise RequestError(f"SGLang has not registered the pool {transfer.name}")
        return pool

    def _move_all(self, transfers: list[PoolTransfer], *, is_load: bool) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys, pool = list(transfer.keys or ()), self._named_pool(transfer)
            indices = transfer.host_indices
            if indices is None or len(indices) != len(keys) * pool.page_size:
                log.error(
                    "pool %s: %d pages have %d places of %d tokens each",
                    transfer.name,
                    len(keys),
                    0 if indices is None else len(indices),
                    pool.page_size,
                )
                results[transfer.name] = [False] * len(keys)
                continue
            results[transfer.name] = self._move(pool, keys, indices, is_load=is_load)
        return results

    def _move(self, pool: _Pool, keys: list[str], indices: torch.Tensor, *, is_load: bool) -> list[bool]:
        if pool.blocks is None or not keys or (self._settings.is_read_only and not is_load):
            return [True] * len(keys)
        begin = time.perf_counter()
        moved, size = (pool.load if is_load else pool.store)(keys, indices)
        self._note(is_load=is_load, pages=sum(moved), size=size, begin=begin)
        return moved

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _note(self, *, is_load: bool, pages: int, size: int, begin: float) -> None:
        if self._config.enable_storage_metrics and pages:
            self._traffic.note(is_load, pages, size / _GIB / max(time.perf_counter() - begin, 1e-9))

    def clear(self) -> None:
        """Removes the pages that this rank stored."""
        pools = [self._main, *self._pools.values()]
        for blocks in [pool.blocks for pool in pools if pool is not None] + [self._flat_pages]:
            if blocks is not None:
                blocks.clear()

    def get_stats(self) -> StorageMetrics:
        """Pages and speeds since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415

        traffic, self._traffic = self._traffic, _Traffic()
        return StorageMetrics(
            prefetch_pgs=traffic.loaded_pages,
            backup_pgs=traffic.stored_pages,
            prefetch_bandwidth=traffic.load_speeds,
            backup_bandwidth=traffic.store_speeds,
        )

    def close(self) -> None:
        """Ends what is under way and closes the store."""
        if self._exported is not None:
            self._exported.close()
        self._store.close()


@dataclass
class _Pool:
    """A host pool and where its pages are stored."""

    name: PoolName
    host: HostKVCache
    blocks: Namespace | None
    """`None` if it has no bytes of its own."""
    has_pieces: bool
    """Whether it says where the pieces of a page are; else pages are copied from and to tensors."""

    @property
    def page_size(self) -> int:
        return _page_size(self.host)

    def load(self, keys: list[str], indices: torch.Tensor) -> tuple[list[bool], int]:
        """Loads pages; which were loaded, and bytes of them."""
        if self.has_pieces:
            return self._move_pieces(Namespace.load, "load", keys, indices)
        pages = [self.host.get_dummy_flat_data_page() for _ in keys]
        loaded = _ended(partial(self._blocks().load, keys, pages), "load", self.name)
        for page, place, is_loaded in zip(pages, self._places(indices), loaded, strict=True):
            if is_loaded:
                self.host.set_from_flat_data_page(place, page)
        return loaded, _size_of(pages, loaded)

    def store(self, keys: list[str], indices: torch.Tensor) -> tuple[list[bool], int]:
        """Stores pages; which are there now, and bytes of them."""
        if self.has_pieces:
            return self._move_pieces(Namespace.store, "store", keys, indices)
        pages = [self.host.get_data_page(place, flat=True).contiguous() for place in self._places(indices)]
        stored = _ended(partial(self._blocks().store, keys, pages), "store", self.name)
        return stored, _size_of(pages, stored)

    def _blocks(self) -> Namespace:
        if self.blocks is None:
            raise RequestError(f"the pool {self.name} has no bytes of its own")
        return self.blocks

    def _places(self, indices: torch.Tensor) -> list[int]:
        return [int(place) for place in indices[:: self.page_size].tolist()]

    def _move_pieces(
        self, start: Callable[..., Ticket], what: str, keys: list[str], indices: torch.Tensor
    ) -> tuple[list[bool], int]:
        addresses, sizes = (_rows(values, len(keys)) for values in self.host.get_page_buffer_meta(indices))
        if addresses.shape != sizes.shape:
            raise RequestError(f"the pool {self.name} has {addresses.size} pieces, and sizes of {sizes.size}")
        memory = Addresses(addresses, sizes, owner=self.host)
        moved = _ended(partial(start, self._blocks(), keys, memory), what, self.name)
        return moved, int(sizes[np.array(moved, dtype=bool)].sum())


@dataclass
class _Traffic:
    """What SGLang's metrics are made of."""

    loaded_pages: list[int] = field(default_factory=list)
    stored_pages: list[int] = field(default_factory=list)
    load_speeds: list[float] = field(default_factory=list)
    store_speeds: list[float] = field(default_factory=list)

    def note(self, is_load: bool, pages: int, speed: float) -> None:
        (self.loaded_pages if is_load else self.stored_pages).append(pages)
        (self.load_speeds if is_load else self.store_speeds).append(speed)


def _model_of(config: HiCacheStorageConfig) -> tuple[str | None, str | None]:
    """Where SGLang has the model from, and which revision of it."""
    try:
        model = get_model()
    except ValueError:
        # Not SGLang's server, but a program that uses its caches.
        return config.model_name, None
    return model.model_path, model.revision


def _page_size(pool: HostKVCache) -> int:
    """Places of a page, of all ranks that share the context."""
    return int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)


def _usable(transfer: PoolTransfer, keys: list[str], pages: int, pool: _Pool) -> tuple[int, set[int] | None]:
    """How far a pool's pages reach, and the lengths of prefixes that it can restore; `None` if it does not matter."""
    policy = transfer.hit_policy
    if policy == PoolHitPolicy.BLOCK_GROUPS:
        return _group_pages(transfer, pool), None
    found = pool.blocks.lookup(keys[:pages]) if pool.blocks is not None else [True] * pages
    if policy == PoolHitPolicy.ALL_PAGES:
        boundary = found.index(False) if False in found else pages
        return boundary, set(range(1, boundary + 1))
    if policy == PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        lengths = {length for length in range(1, pages + 1) if all(found[max(0, length - trailing) : length])}
        return max(lengths, default=0), lengths
    raise RequestError(f"the pool {transfer.name} has a hit policy that is not known: {policy}")


def _group_pages(transfer: PoolTransfer, pool: _Pool) -> int:
    """Pages that the leading whole groups of a pool cover."""
    if not transfer.keys or transfer.group_pages < 1 or transfer.block_pages < 1:
        raise RequestError(f"the pool {transfer.name} has groups without keys, or without sizes")
    found = pool.blocks.lookup_prefix(transfer.keys) if pool.blocks is not None else len(transfer.keys)
    return int(found // transfer.group_pages * transfer.block_pages)


def _rows(values: Sequence[int], pages: int) -> np.ndarray:
    """Values of pieces, a row for each page."""
    found = np.array(values, dtype=np.uint64)
    if found.size == 0 or found.size % pages:
        raise RequestError(f"{found.size} pieces make no {pages} pages")
    return found.reshape(pages, -1)


def _ended(start: Callable[[], Ticket], what: str, pool: str) -> list[bool]:
    """Begins a request, and says which of its items succeeded, once it is over."""
    try:
        statuses = complete(start).statuses
    except MemoryLostError as error:
        log.error(
            "SGLang cannot keep pages back, so its process has to be restarted: pool %s: %s", pool, error
        )
        raise
    accepted = [is_accepted(status) for status in statuses]
    if not all(accepted):
        log.warning("%s of pages of pool %s: %s", what, pool, summary(statuses))
    return accepted


def _size_of(pages: Sequence[torch.Tensor], moved: list[bool]) -> int:
    return sum(page.nbytes for page, is_moved in zip(pages, moved, strict=True) if is_moved)
