"""SGLang's own factory and host pools, with our storage backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_hosts import (
    INTERRUPTS,
    SMALL,
    Held,
    assert_exported,
    examples,
    flip_bit,
    released_later,
    sharded_checkpoint,
    wait_until,
)
from plugin_hosts import HOST_WARNINGS, host_is_before, import_host

import_host("sglang.srt.mem_cache.pool_host.mha")
if host_is_before("sglang", "0.5.23"):
    pytest.skip("these tests make pools as SGLang 0.5.23 and later do", allow_module_level=True)

from hoistway.errors import OptionError, RequestError  # noqa: E402
from hoistway.kv.adapters.sglang import HiCacheHoistway  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

pytestmark = HOST_WARNINGS

LAYERS, HEADS, HEAD_DIM, PAGE, TOKENS = 2, 4, 16, 8, 64
CPU = torch.device("cpu")
# Layouts whose pages have K and V, or each layer, in places of their own.
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(
    layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, heads: int = HEADS
) -> MHATokenToKVPoolHost:
    k, v = (tuple(torch.zeros(TOKENS, heads, HEAD_DIM, dtype=dtype) for _ in range(LAYERS)) for _ in "kv")
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=heads,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=CPU,
    )
    return filled(
        MHATokenToKVPoolHost(
            info,
            2.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
        )
    )


def mla_pool(layout: str = "page_first") -> MLATokenToKVPoolHost:
    buffers = tuple(torch.zeros(TOKENS, 1, 24, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=pointers(buffers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return filled(
        MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
        )
    )


def mamba_pool() -> MambaPoolHost:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 16, 4, 8, 8),
        conv=(torch.zeros(LAYERS, 16, 12, 3, dtype=torch.bfloat16),),
    )
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=16, pin_memory=False, layout="page_first")
    pool.temporal_buffer.copy_(torch.rand_like(pool.temporal_buffer))
    pool.conv_buffer[0].copy_(torch.rand_like(pool.conv_buffer[0]))
    return pool


def filled(pool: Any) -> Any:
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape).to(pool.dtype))
    return pool


def indices(*pages: int) -> torch.Tensor:
    """The places of pages, as SGLang has them."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def content(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE, flat=True).clone()


def wipe(pool: Any) -> None:
    pool.kv_buffer.zero_()


def storage_config(extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "org/llama",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**values, **changes})


@contextmanager
def opened(
    root: Path, pool: Any, *, zero_copy: bool = True, store: dict[str, Any] | None = None, **changes: Any
) -> Iterator:
    """A backend as SGLang's controller attaches it."""
    extra = {
        "backend_name": "hoistway",
        "module_path": "hoistway.kv.adapters.sglang",
        "class_name": "HiCacheHoistway",
        "interface_v1": int(zero_copy),
        "store": {"root": str(root), **SMALL, **(store or {})},
    }
    backend = StorageBackendFactory.create_backend("dynamic", storage_config(extra, **changes), pool)
    try:
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        yield backend
    finally:
        backend.close()


def test_documented_configurations_make_backends_of_ours(tmp_path):
    for example in examples("sglang", tmp_path):
        extra, *_ = HybridCacheController.parse_storage_backend_extra_config(json.dumps(example))
        pool = mha_pool()
        backend = StorageBackendFactory.create_backend("dynamic", storage_config(extra), pool)
        assert type(backend) is HiCacheHoistway
        backend.register_mem_pool_host(pool)
        assert backend.batch_set_v1(["a"], indices(0)) == [True]
        assert backend.exists("a")
        backend.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_round_trip_by_their_places(tmp_path, layout):
    pool = mha_pool(layout)
    pages = [content(pool, page) for page in range(3)]
    with opened(tmp_path, pool) as backend:
        assert backend.batch_exists(["a", "b", "c"]) == 0
        assert backend.batch_set_v1(["a", "b", "c"], indices(0, 1, 2)) == [True] * 3
        assert backend.batch_exists(["a", "b", "c", "d"]) == 3
        wipe(pool)
        # To other places than they are from, and not side by side.
        assert backend.batch_get_v1(["c", "a", "d", "b"], indices(5, 7, 9, 3)) == [True, True, False, True]
        for place, page in ((7, 0), (3, 1), (5, 2)):
            assert torch.equal(content(pool, place), pages[page])
        assert not content(pool, 4).any()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_round_trip_by_tensors(tmp_path, layout):
    pool = mha_pool(layout)
    with opened(tmp_path, pool, zero_copy=False) as backend:
        values = [content(pool, page) for page in range(2)]
        assert backend.batch_set(["a", "b"], values)
        assert backend.set("c", content(pool, 5))
        assert [backend.exists(key) for key in ("a", "b", "c", "d")] == [True, True, True, False]
        targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
        loaded = backend.batch_get(["a", "gone", "b"], targets)
        assert loaded[1] is None
        assert torch.equal(loaded[0], values[0])
        assert torch.equal(loaded[2], values[1])
        assert loaded[0] is targets[0]
        assert torch.equal(backend.get("c"), content(pool, 5))
        assert backend.get("gone") is None


def test_the_bytes_are_those_that_sglangs_file_backend_has(tmp_path):
    pool = mha_pool("layer_first")
    values = [content(pool, page) for page in range(3)]
    files = HiCacheFile(storage_config({"file_storage_path": str(tmp_path / "files")}))
    assert files.batch_set(["a", "b", "c"], values)
    with opened(tmp_path / "kv", pool, zero_copy=False) as backend:
        assert backend.batch_set(["a", "b", "c"], values)
        targets = [[pool.get_dummy_flat_data_page() for _ in range(3)] for _ in range(2)]
        ours = backend.batch_get(["a", "b", "c"], targets[0])
        theirs = files.batch_get(["a", "b", "c"], targets[1])
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_both_ways_have_pages_of_their_own(tmp_path):
    # In this layout a tensor of a page has another order of bytes than the page.
    pool = mha_pool("layer_first")
    with opened(tmp_path, pool) as by_place:
        assert by_place.batch_set_v1(["a"], indices(0)) == [True]
    with opened(tmp_path, pool, zero_copy=False) as by_tensor:
        assert not by_tensor.exists("a")
        assert by_tensor.get("a") is None


def test_replicated_pages_are_written_once_and_read_by_all_ranks(tmp_path):
    pools = [mla_pool() for _ in range(2)]
    page = content(pools[0], 1)
    with (
        opened(tmp_path, pools[0], is_mla_model=True, tp_rank=0, tp_size=2) as writer,
        opened(tmp_path, pools[1], is_mla_model=True, tp_rank=1, tp_size=2) as reader,
    ):
        assert writer.batch_set_v1(["a"], indices(1)) == [True]
        wait_until(lambda: reader.batch_exists(["a"]) == 1)
        assert reader.batch_get_v1(["a"], indices(4)) == [True]
        assert torch.equal(content(pools[1], 4), page)


def test_ranks_that_share_heads_have_pages_of_their_own(tmp_path):
    pools = [mha_pool() for _ in range(2)]
    pages = [content(pool, 0) for pool in pools]
    for rank, pool in enumerate(pools):
        with opened(tmp_path, pool, tp_rank=rank, tp_size=2) as backend:
            assert backend.batch_exists(["a"]) == 0
            assert backend.batch_set_v1(["a"], indices(0)) == [True]
    for rank, pool in enumerate(pools):
        with opened(tmp_path, pool, tp_rank=rank, tp_size=2) as backend:
            wipe(pool)
            assert backend.batch_get_v1(["a"], indices(0)) == [True]
            assert torch.equal(content(pool, 0), pages[rank])


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model_name": "org/other"}),
    "dtype": ({"dtype": torch.float16}, {}),
    "layout": ({"layout": "page_first_direct"}, {}),
    "heads": ({"heads": 2}, {}),
    "ranks": ({}, {"tp_size": 2}),
    "stages": ({}, {"pp_size": 2}),
    "context": ({}, {"attn_cp_size": 2}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_pages_of_another_layout_are_not_found(tmp_path, what):
    pool_changes, changes = DIFFERENT[what]
    with opened(tmp_path, mha_pool()) as ours:
        assert ours.batch_set_v1(["a"], indices(0)) == [True]
    with opened(tmp_path, mha_pool(**pool_changes), **changes) as other:
        assert other.batch_exists(["a"]) == 0
        assert other.batch_get_v1(["a"], indices(0)) == [False]
    with opened(tmp_path, mha_pool()) as same:
        assert same.batch_exists(["a"]) == 1


def test_a_damaged_page_ends_the_prefix(tmp_path):
    pool = mha_pool("page_head")
    page = content(pool, 1).view(torch.uint8).numpy().tobytes()
    with opened(tmp_path, pool) as backend:
        assert backend.batch_set_v1(["a", "b", "c"], indices(0, 1, 2)) == [True] * 3
        flip_bit(tmp_path, page)
        assert backend.batch_get_v1(["a", "b", "c"], indices(0, 1, 2)) == [True, False, True]
        assert backend.batch_exists(["a", "b", "c"]) == 1
        assert backend.batch_set_v1(["a", "b", "c"], indices(0, 5, 2)) == [True] * 3
        assert backend.batch_exists(["a", "b", "c"]) == 3


def test_pages_that_admission_leaves_out_stop_nothing(tmp_path):
    pool = mha_pool()
    with opened(tmp_path, pool, store={"admission": "second_touch"}) as backend:
        assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
        assert backend.batch_exists(["a"]) == 0
        assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
        assert backend.batch_exists(["a", "b"]) == 2


def test_a_store_for_reading_takes_nothing_and_says_no_error(tmp_path):
    pool = filled(mha_pool())
    with opened(tmp_path, pool) as backend:
        assert backend.batch_set_v1(["a"], indices(0)) == [True]
    expected = content(pool, 0).clone()
    with opened(tmp_path, pool, store={"access": "read"}) as backend:
        assert backend.batch_set_v1(["b"], indices(1)) == [True]
        assert backend.batch_exists(["b"]) == 0
        wipe(pool)
        assert backend.batch_get_v1(["a"], indices(0)) == [True]
        assert torch.equal(content(pool, 0), expected)


def test_clear_removes_the_pages(tmp_path):
    pool = mha_pool()
    with opened(tmp_path, pool) as backend:
        backend.batch_set_v1(["a", "b"], indices(0, 1))
        backend.clear()
        assert backend.batch_exists(["a"]) == 0
        assert backend.batch_get_v1(["a"], indices(0)) == [False]


def test_stats_are_sglangs(tmp_path):
    pool = mha_pool()
    with opened(tmp_path, pool) as backend:
        backend.batch_set_v1(["a", "b"], indices(0, 1))
        backend.batch_get_v1(["a", "gone"], indices(0, 1))
        stats = backend.get_stats()
        assert stats.backup_pgs == [2]
        assert stats.prefetch_pgs == [1]
        assert all(speed > 0 for speed in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
        assert backend.get_stats().backup_pgs == []


# --- several pools ----------------------------------------------------------------------------------------------------


@contextmanager
def with_mamba(root: Path) -> Iterator:
    main, mamba = mha_pool(), mamba_pool()
    with opened(root, main) as backend:
        backend.register_mem_host_pool_v2(main, PoolName.KV)
        backend.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
        yield backend, main, mamba


def trailing(keys: list[str], pages: int = 1) -> PoolTransfer:
    return PoolTransfer(PoolName.MAMBA, keys=keys[-pages:], hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_pages_of_several_pools_round_trip(tmp_path):
    with with_mamba(tmp_path) as (backend, main, mamba):
        states, page = mamba.temporal_buffer.clone(), content(main, 1)
        convolutions = mamba.conv_buffer[0].clone()
        transfers = [
            PoolTransfer(PoolName.KV, host_indices=indices(0, 1), keys=["a", "b"]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([3]), keys=["b"]),
        ]
        assert backend.batch_set_v2(transfers) == {PoolName.KV: [True, True], PoolName.MAMBA: [True]}
        wipe(main)
        mamba.temporal_buffer.zero_()
        mamba.conv_buffer[0].zero_()
        transfers = [
            PoolTransfer(PoolName.KV, host_indices=indices(6, 7), keys=["a", "b"]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5, 6]), keys=["b", "a"]),
        ]
        assert backend.batch_get_v2(transfers) == {PoolName.KV: [True, True], PoolName.MAMBA: [True, False]}
        assert torch.equal(content(main, 7), page)
        assert torch.equal(mamba.temporal_buffer[5], states[3])
        assert torch.equal(mamba.conv_buffer[0][5], convolutions[3])


def test_places_that_do_not_fit_fail_their_pool_alone(tmp_path):
    with with_mamba(tmp_path) as (backend, _, _):
        transfers = [
            PoolTransfer(PoolName.KV, host_indices=indices(0), keys=["a", "b"]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["b"]),
        ]
        assert backend.batch_set_v2(transfers) == {PoolName.KV: [False, False], PoolName.MAMBA: [True]}


def test_hits_are_cut_to_what_all_pools_have(tmp_path):
    keys = ["a", "b", "c", "d", "e"]
    with with_mamba(tmp_path) as (backend, _, _):
        backend.batch_set_v1(keys[:4], indices(0, 1, 2, 3))
        states = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 1]), keys=["b", "c"])
        assert backend.batch_set_v2([states])[PoolName.MAMBA] == [True, True]
        # Without other pools, what the first has.
        assert backend.batch_exists_v2(keys).kv_hit_pages == 4
        # A state is needed where the prefix ends: after b, or after c.
        found = backend.batch_exists_v2(keys, [trailing(keys)])
        assert found.kv_hit_pages == 3
        assert found.restorable_prefix_pages == [2, 3]
        assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.MAMBA: 3}
        # Two states are needed: b and c are there, and of longer prefixes one is missing.
        found = backend.batch_exists_v2(keys, [trailing(keys, 2)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        # All are needed, and the first is missing.
        found = backend.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA, keys=keys)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        assert backend.batch_exists_v2(["gone"], [trailing(keys)]).kv_hit_pages == 0


def test_hits_are_those_of_sglangs_file_backend(tmp_path):
    """On the same pages, for windows of every length."""
    keys = [f"k{number}" for number in range(8)]
    stored = {PoolName.KV: keys[:7], PoolName.MAMBA: [keys[number] for number in (1, 2, 4, 5, 6)]}
    files = HiCacheFile(storage_config({"file_storage_path": str(tmp_path / "files")}))
    with with_mamba(tmp_path / "kv") as (backend, _, _):
        for name, names in stored.items():
            pages = [number for number, _ in enumerate(names)]
            place = indices(*pages) if name == PoolName.KV else torch.tensor(pages)
            assert all(backend.batch_set_v2([PoolTransfer(name, host_indices=place, keys=names)])[name])
            for key in names:
                assert files.set(files._log_key(name, key), torch.ones(4))
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            for window in range(1, 5):
                transfer = PoolTransfer(PoolName.MAMBA, keys=keys[-window:], hit_policy=policy)
                assert backend.batch_exists_v2(keys, [transfer]) == files.batch_exists_v2(keys, [transfer])


def test_groups_report_what_they_cover_and_cut_nothing(tmp_path):
    keys = [f"k{number}" for number in range(8)]
    with with_mamba(tmp_path) as (backend, _, _):
        backend.batch_set_v1(keys, indices(*range(8)))
        groups = PoolTransfer(
            PoolName.MAMBA,
            host_indices=torch.arange(5),
            keys=keys[:5],
            hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=4,
            group_pages=2,
        )
        assert all(backend.batch_set_v2([groups])[PoolName.MAMBA])
        groups.keys = keys
        found = backend.batch_exists_v2(keys, [groups])
        # Of the third group one key is missing.
        assert found.extra_pool_hit_pages[PoolName.MAMBA] == 8
        assert found.kv_hit_pages == 8


def test_a_pool_that_only_counts_has_no_pages_to_move(tmp_path):
    with opened(tmp_path, LogicalHostPool(TOKENS, PAGE)) as backend:
        backend.register_mem_host_pool_v2(mla_pool(), PoolName.DEEPSEEK_V4_C4)
        assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
        assert backend.batch_get_v1(["a", "b"], indices(0, 1)) == [True, True]
        assert backend.batch_exists(["a", "b"]) == 2
        transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, host_indices=indices(2), keys=["a"])
        assert backend.batch_exists_v2(["a", "b"], [transfer]).kv_hit_pages == 0
        assert backend.batch_set_v2([transfer])[PoolName.DEEPSEEK_V4_C4] == [True]
        assert backend.batch_exists_v2(["a", "b"], [transfer]).kv_hit_pages == 1


def test_a_draft_that_is_split_over_ranks_is_refused_where_one_rank_writes(tmp_path):
    with (
        opened(tmp_path, mla_pool(), is_mla_model=True, tp_size=2) as backend,
        pytest.raises(OptionError, match="draft"),
    ):
        backend.register_mem_host_pool_v2(mha_pool(), PoolName.DRAFT)


def test_a_pool_that_is_not_registered_is_named(tmp_path):
    with (
        opened(tmp_path, mha_pool()) as backend,
        pytest.raises(RequestError, match="has not registered the pool swa"),
    ):
        backend.batch_get_v2([PoolTransfer(PoolName.SWA, host_indices=indices(0), keys=["a"])])


@pytest.mark.parametrize(
    ("store", "message"),
    [({"root": ""}, "'root'"), ({"capcity": 1}, "'capcity' in store"), ({"route": "magic"}, "magic")],
)
def test_what_cannot_be_is_said_when_the_backend_is_attached(tmp_path, store, message):
    with pytest.raises(OptionError, match=message), opened(tmp_path, mha_pool(), store=store):
        pass


def test_prometheus_gets_the_stores_metrics_if_sglang_exports_any(tmp_path):
    with opened(tmp_path / "with", mha_pool()) as backend:
        assert backend.batch_set_v1(["a"], indices(0)) == [True]
        assert_exported(backend._exported, backend._store)
    with opened(tmp_path / "without", mha_pool(), enable_storage_metrics=False) as backend:
        assert backend._exported is None


@pytest.mark.parametrize("is_published", [False, True])
def test_pages_of_other_weights_at_the_same_path_are_not_found(tmp_path, monkeypatch, is_published):
    path = tmp_path / "llama"
    if is_published:
        # As in SGLang's server. Its pools may add to the name.
        model = SimpleNamespace(model_path=str(path), revision=None)
        monkeypatch.setattr("hoistway.kv.adapters.sglang.get_model", lambda: model)
    name = "llama-unified-token-major" if is_published else str(path)
    pool = mha_pool()
    for seed, expected in ((0, 0), (1, 0), (0, 1)):
        sharded_checkpoint(path, seed)
        with opened(tmp_path / "kv", pool, model_name=name) as backend:
            assert backend.batch_exists(["a"]) == expected
            assert backend.batch_set_v1(["a"], indices(0)) == [True]
        shutil.rmtree(path)


@pytest.mark.parametrize("interrupt", INTERRUPTS)
@pytest.mark.parametrize("what", ["batch_get_v1", "batch_set_v1"])
def test_sglang_gets_its_pages_back_when_a_call_is_interrupted(tmp_path, monkeypatch, what, interrupt):
    with opened(tmp_path / "kv", mha_pool()) as ours:
        ticket = Held("cancelled")
        ticket.interrupts = [interrupt()]
        monkeypatch.setattr("hoistway.kv.Namespace.load", lambda *_, **__: ticket)
        monkeypatch.setattr("hoistway.kv.Namespace.store", lambda *_, **__: ticket)
        timer = released_later(ticket)
        with pytest.raises(interrupt):
            getattr(ours, what)(["one"], indices(0))
        assert ticket.is_cancelled
        assert ticket.is_released, "SGLang may use the page now"
        timer.join()


def test_sglangs_own_faults_reach_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    pool = mha_pool()
    with opened(tmp_path, pool) as backend:
        assert isinstance(backend, HiCacheStorageFailureInjector)
        assert backend.batch_set_v1(["a"], indices(0)) == [False]
        assert backend.batch_exists(["a"]) == 0
