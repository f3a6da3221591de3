"""UCM's own factory and interface V1 on our store: what its contract says, and probes that its own stores fail."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapter_hosts import (
    INTERRUPTS,
    SMALL,
    Held,
    assert_exported,
    examples,
    failing_on_second_call,
    flip_bit,
    random_bytes,
    released_later,
    sharded_checkpoint,
    truncate,
    wait_until,
)
from plugin_hosts import HOST_WARNINGS, import_host
from test_kv_device import DeviceMemory

import_host("ucm.store.factory_v1")

from hoistway.errors import OptionError, RequestError, StorageError, StoreClosedError  # noqa: E402
from hoistway.kv.adapters.ucm import HoistwayStore, HoistwayTask  # noqa: E402
from ucm.store.factory_v1 import UcmConnectorFactoryV1  # noqa: E402
from ucm.store.pipeline.errors import StoreNotFoundError, StoreUnhealthyError  # noqa: E402
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1  # noqa: E402

pytestmark = HOST_WARNINGS

SHARDS = 4
TENSORS = [4096, 4096, 1024]
# As UCM's connectors round it up.
SHARD = 12288

blocks = itertools.count()


def block_ids(count: int) -> list[bytes]:
    return [next(blocks).to_bytes(16, "big") for _ in range(count)]


class Opened:
    """Stores that are closed again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: list[HoistwayStore] = []

    def __call__(self, **changes: Any) -> HoistwayStore:
        """As UCM's worker makes it."""
        own = {**SMALL, **changes.pop("hoistway", {})}
        config: dict[str, Any] = {
            "storage_backends": [str(self.root / "kv")],
            "unique_id": "engine",
            "tensor_layout": "gqa",
            "device_id": 0,
            "tensor_size_list": TENSORS,
            "shard_size": SHARD,
            "block_size": SHARD * SHARDS,
            "local_rank_size": 1,
            "share_buffer_enable": False,
            "posix_gc_enable": False,
            "hoistway": own,
            **changes,
        }
        store = UcmConnectorFactoryV1.create_connector("HoistwayStore", config, "hoistway.kv.adapters.ucm")
        assert type(store) is HoistwayStore
        assert isinstance(store, UcmKVStoreBaseV1)
        self.stores.append(store)
        return store

    def scheduler(self, **changes: Any) -> HoistwayStore:
        """As UCM's scheduler makes it: it knows nothing of the tensors."""
        geometry = dict.fromkeys(("tensor_size_list", "shard_size", "block_size", "local_rank_size"))
        return self(device_id=-1, **geometry, **changes)


@pytest.fixture
def opened(tmp_path):
    opened = Opened(tmp_path)
    yield opened
    for store in opened.stores:
        store.close()


@pytest.fixture
def store(opened):
    return opened()


def tensors(ids: list[bytes], shards: int = SHARDS) -> list[list[torch.Tensor]]:
    """Memory of shards, a row each: those of the first block, then those of the next."""

    def tensor(*seed: Any) -> torch.Tensor:
        content = random_bytes(seed[-1], hash(seed) % 2**32)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return [[tensor(block, shard, size) for size in TENSORS] for block in ids for shard in range(shards)]


def empty(rows: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[torch.zeros_like(tensor) for tensor in row] for row in rows]


def pointers(rows: list[list[torch.Tensor]]) -> np.ndarray:
    return np.array([[tensor.data_ptr() for tensor in row] for row in rows], dtype=np.uint64)


def shards_of(ids: list[bytes], shards: int = SHARDS) -> tuple[list[bytes], list[int]]:
    """Blocks and numbers of shards, for all shards of blocks."""
    return [block for block in ids for _ in range(shards)], list(range(shards)) * len(ids)


def dump(store: HoistwayStore, ids: list[bytes]) -> list[list[torch.Tensor]]:
    rows = tensors(ids)
    store.wait(store.dump(*shards_of(ids), rows))
    return rows


def layout_of(store: HoistwayStore) -> str:
    return store._stores[0].report()["layout"]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True))


def first_shard(row: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in row)


@pytest.mark.parametrize("wants", [True, False])
def test_documented_configurations_make_stores_of_ours(tmp_path, wants):
    for example in examples("ucm", tmp_path / "kv"):
        (connector,) = example["ucm_connectors"]
        # What UCM's connectors do with it.
        config = dict(connector["ucm_connector_config"])
        config["storage_backends"] = config["storage_backends"].split(":")
        config |= {"unique_id": "engine", "device_id": 0 if wants else -1}
        if wants:
            config |= {"tensor_size_list": TENSORS, "shard_size": SHARD, "block_size": SHARD * SHARDS}
        store = UcmConnectorFactoryV1.create_connector(
            connector["ucm_connector_name"], config, connector["ucm_connector_module_path"]
        )
        assert store.lookup(block_ids(2)) == [False, False]
        store.close()


def test_tensors_round_trip(store):
    ids = block_ids(3)
    rows = dump(store, ids)
    target = empty(rows)
    task = store.load(*shards_of(ids), target)
    store.wait(task)
    assert same(target, rows)


def test_addresses_round_trip(store):
    ids = block_ids(3)
    rows = tensors(ids)
    # UCM's connectors hand arrays; its interface also has lists.
    store.wait(store.dump_data(*shards_of(ids), pointers(rows)))
    for make in (pointers, lambda target: pointers(target).tolist()):
        target = empty(rows)
        store.wait(store.load_data(*shards_of(ids), make(target)))
        assert same(target, rows)


def test_memory_at_any_place_round_trips(opened):
    """Probe: a store of UCM's drops such blocks where it reads and writes past the page cache, and says nothing."""
    store = opened(tensor_size_list=[1001, 7, 513], shard_size=4096, block_size=8192)
    (block,) = block_ids(1)
    arena = torch.from_numpy(np.frombuffer(bytearray(random_bytes(8000, 1)), np.uint8))
    rows = [
        [arena[1:1002], arena[1003:1010], arena[1011:1524]],
        [arena[3001:4002], arena[5:12], arena[5001:5514]],
    ]
    expected = [[tensor.clone() for tensor in row] for row in rows]
    store.wait(store.dump_data([block] * 2, [0, 1], pointers(rows)))
    arena.zero_()
    store.wait(store.load_data([block] * 2, [0, 1], pointers(rows)))
    assert same(rows, expected)
    assert arena[0] == 0
    assert arena[1002] == 0


def test_a_block_is_found_once_all_its_shards_are_there(store):
    ids = block_ids(2)
    rows = tensors(ids)
    # The last shard first, which is where others think that they are done.
    for shard in (3, 0, 2):
        store.wait(store.dump(ids, [shard] * 2, [rows[shard], rows[SHARDS + shard]]))
        assert store.lookup(ids) == [False, False]
    store.wait(store.dump(ids[:1], [1], rows[1:2]))
    assert store.lookup(ids) == [True, False]
    target = empty(rows[:SHARDS])
    store.wait(store.load(*shards_of(ids[:1]), target))
    assert same(target, rows[:SHARDS])


def test_blocks_are_whole_when_they_are_found(store):
    """Probe: one in thirty blocks of a store of UCM's is torn when it is found first."""
    count = 60
    ids = block_ids(count)
    rows = tensors(ids)
    torn: list[bytes] = []
    seen: set[bytes] = set()

    def watch() -> None:
        while len(seen) < count:
            found = [block for block, is_there in zip(ids, store.lookup(ids), strict=True) if is_there]
            for block in found:
                if block in seen:
                    continue
                place = ids.index(block) * SHARDS
                target = empty(rows[place : place + SHARDS])
                store.wait(store.load(*shards_of([block]), target))
                if not same(target, rows[place : place + SHARDS]):
                    torn.append(block)
                seen.add(block)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for number, block in enumerate(ids):
        place = number * SHARDS
        store.wait(store.dump(*shards_of([block]), rows[place : place + SHARDS]))
    watcher.join(60)
    assert len(seen) == count
    assert torn == []


@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_a_damaged_block_fails_its_load_and_is_gone(opened, store, damage):
    """Probes: a store of UCM's loads zeros for what was cut off, and flipped bits as they are, and still finds both."""
    ids = block_ids(1)
    rows = dump(store, ids)
    damage(opened.root / "kv", first_shard(rows[1]))
    target = empty(rows)
    task = store.load(*shards_of(ids), target)
    with pytest.raises(StoreNotFoundError, match="corrupt"):
        store.wait(task)
    assert store.lookup(ids) == [False]
    assert same(dump(store, ids), rows)
    store.wait(store.load(*shards_of(ids), target))
    assert same(target, rows)


def test_lookups_have_ucms_answers(store):
    ids = block_ids(6)
    for block in (ids[0], ids[1], ids[3]):
        dump(store, [block])
    assert store.lookup(ids) == [True, True, False, True, False, False]
    assert store.lookup_on_prefix(ids) == 1
    assert store.lookup_on_prefix(ids[2:]) == -1
    assert store.lookup_on_prefix(ids[:2]) == 1
    assert store.lookup_on_reverse(ids) == 3
    assert store.lookup_on_reverse(ids[4:]) == -1
    assert store.lookup_on_reverse(ids[:3]) == 1
    assert store.lookup([]) == []
    store.prefetch(ids)


def test_missing_blocks_are_ucms_error(store):
    ids = block_ids(2)
    rows = dump(store, ids[:1])
    target = empty(rows * 2)
    task = store.load(*shards_of(ids), target)
    with pytest.raises(StoreNotFoundError, match=f"{SHARDS} miss"):
        store.wait(task)
    # What is there was loaded.
    assert same(target[:SHARDS], rows)


def test_check_says_when_a_task_has_ended(store):
    ids = block_ids(2)
    task = store.dump(*shards_of(ids), tensors(ids))
    wait_until(lambda: store.check(task))
    store.wait(task)
    # Waiting again is as good.
    store.wait(task)
    missing = store.load(*shards_of(block_ids(1)), empty(tensors(ids[:1])))
    wait_until(lambda: store.check(missing))
    with pytest.raises(StoreNotFoundError):
        store.wait(missing)


def test_a_scheduler_finds_what_workers_store(opened):
    worker, scheduler = opened(), opened.scheduler()
    ids = block_ids(3)
    dump(worker, ids[:2])
    wait_until(lambda: scheduler.lookup(ids) == [True, True, False])
    assert scheduler.lookup_on_prefix(ids) == 1
    with pytest.raises(RequestError, match="tensor_size_list"):
        scheduler.load_data(ids, [0] * 3, np.ones((3, 3), dtype=np.uint64))


def test_another_rank_loads_what_was_stored_just_now(opened):
    first, second = opened(), opened(device_id=1)
    for _ in range(10):
        ids = block_ids(1)
        rows = dump(first, ids)
        target = empty(rows)
        second.wait(second.load(*shards_of(ids), target))
        assert same(target, rows)


def test_several_backends_share_the_blocks(opened):
    roots = [str(opened.root / name) for name in ("one", "two", "three")]
    store = opened(storage_backends=":".join(roots))
    ids = block_ids(30)
    rows = dump(store, ids)
    assert store.lookup(ids) == [True] * 30
    assert store.lookup_on_prefix(ids) == 29
    assert store.lookup_on_reverse([*ids, *block_ids(2)]) == 29
    target = empty(rows)
    store.wait(store.load(*shards_of(ids), target))
    assert same(target, rows)
    # Each has some of them.
    counts = [sum(opened(storage_backends=[root]).lookup(ids)) for root in roots]
    assert sum(counts) == 30
    assert min(counts) > 0


def test_a_slot_without_memory_is_left_out(opened):
    """Layers without an indexer have an address of 0 where others have that of its keys."""
    store = opened(tensor_size_list=[4096, 512], shard_size=8192, block_size=16384)
    (block,) = block_ids(1)
    full, bare = tensors([block], shards=2)
    rows = [[full[0], full[2][:512].clone()], [bare[0]]]
    addresses = np.array(
        [[rows[0][0].data_ptr(), rows[0][1].data_ptr()], [rows[1][0].data_ptr(), 0]], dtype=np.uint64
    )
    store.wait(store.dump_data([block] * 2, [0, 1], addresses))
    assert store.lookup([block]) == [True]
    expected = [[tensor.clone() for tensor in row] for row in rows]
    for row in rows:
        for tensor in row:
            tensor.zero_()
    store.wait(store.load_data([block] * 2, [0, 1], addresses))
    assert same(rows, expected)


def test_two_tensors_of_one_size_make_a_shard(opened):
    """UCM's integration with SGLang has no list of sizes."""
    store = opened(tensor_size_list=None, tensor_size=4096, shard_size=8192, block_size=8192)
    (block,) = block_ids(1)
    row = [tensor[:4096] for tensor in tensors([block])[0][:2]]
    store.wait(store.dump_data([block], [0], [[tensor.data_ptr() for tensor in row]]))
    target = empty([row])
    store.wait(store.load_data([block], [0], pointers(target)))
    assert same(target, [row])


def test_blocks_of_another_shape_are_not_delivered(opened):
    store = opened()
    ids = block_ids(1)
    dump(store, ids)
    other = opened(tensor_size_list=[4096, 4096], shard_size=8192, block_size=8192 * SHARDS)
    target = [[torch.zeros(4096, dtype=torch.uint8) for _ in range(2)] for _ in range(SHARDS)]
    with pytest.raises(StoreNotFoundError, match="mismatch"):
        other.wait(other.load(*shards_of(ids), target))
    assert opened(tensor_layout="mla").lookup(ids) == [False]
    assert opened(hoistway={"namespace": {"dtype": "fp8"}}).lookup(ids) == [False]
    assert opened().lookup(ids) == [True]


def test_a_shard_that_is_longer_than_those_before_is_not_stored(opened):
    store = opened(tensor_size_list=None, shard_size=65536, block_size=131072)
    (block,) = block_ids(1)
    store.wait(store.dump([block], [0], [[torch.zeros(1024, dtype=torch.uint8)]]))
    with pytest.raises(RuntimeError, match="mismatch"):
        store.wait(store.dump([block], [1], [[torch.zeros(65536, dtype=torch.uint8)]]))


def test_blocks_of_other_weights_at_the_same_path_are_not_found(opened):
    path, ids = opened.root / "llama", block_ids(1)
    for seed, expected in ((0, False), (1, False), (0, True)):
        sharded_checkpoint(path, seed)
        store = opened(hoistway={"checkpoint": str(path)})
        assert store.lookup(ids) == [expected]
        dump(store, ids)
        store.close()
        shutil.rmtree(path)


def test_prometheus_gets_the_metrics_of_all_stores(opened):
    store = opened(storage_backends=[str(opened.root / name) for name in ("one", "two")])
    dump(store, block_ids(20))
    for exported, own in zip(store._exported, store._stores, strict=True):
        assert_exported(exported, own)


def test_what_admission_leaves_out_is_no_failure(opened):
    store = opened(hoistway={"admission": "second_touch"})
    ids = block_ids(1)
    dump(store, ids)
    assert store.lookup(ids) == [False]
    dump(store, ids)
    assert store.lookup(ids) == [True]


def test_a_store_for_reading_takes_nothing_and_says_no_error(opened, store):
    old, new = block_ids(2)
    rows = dump(store, [old])
    reader = opened(hoistway={"access": "read"})
    dump(reader, [new])
    assert reader.lookup([old, new]) == [True, False]
    loaded = empty(rows)
    reader.wait(reader.load(*shards_of([old]), loaded))
    assert same(rows, loaded)


def test_memory_in_doubt_is_an_error_of_the_storage(store):
    ids = block_ids(1)
    dump(store, ids)
    ticket = SimpleNamespace(
        done=lambda: True,
        released=lambda: False,
        lost=lambda: True,
        wait=lambda: SimpleNamespace(statuses=["io:5"]),
    )
    task = HoistwayTask([ticket], is_load=True)
    assert store.check(task)
    with pytest.raises(StoreUnhealthyError, match="1 io:5"):
        store.wait(task)


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_ucm_gets_its_memory_back_when_a_task_cannot_begin(opened, monkeypatch, interrupt):
    # A task of two requests, one for each store.
    store = opened(storage_backends=[str(opened.root / name) for name in ("one", "two")])
    ids = block_ids(20)
    first = Held("cancelled")
    monkeypatch.setattr("hoistway.kv.Namespace.load", failing_on_second_call(first, interrupt))
    timer = released_later(first)
    with pytest.raises(interrupt, match="of the second"):
        store.load(ids, [0] * 20, tensors(ids, 1))
    assert first.is_cancelled
    assert first.is_released, "UCM may use the memory now"
    timer.join()


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_a_wait_that_is_interrupted_ends_the_task(store, interrupt):
    ticket = Held("cancelled")
    ticket.interrupts = [interrupt()]
    timer = released_later(ticket)
    with pytest.raises(interrupt):
        store.wait(HoistwayTask([ticket], is_load=True))
    assert ticket.is_cancelled
    assert ticket.is_released
    timer.join()


def test_all_stores_are_closed_though_one_cannot_be(opened, monkeypatch, caplog):
    store = opened(storage_backends=[str(opened.root / name) for name in ("one", "two")])
    first, second = store._stores
    close = first.close

    def fail() -> None:
        raise StorageError("no room for the index")

    monkeypatch.setattr(first, "close", fail)
    store.close()
    assert "no room for the index" in caplog.text
    with pytest.raises(StoreClosedError):
        second.stats()
    close()


def test_the_same_block_may_be_stored_again(store):
    ids = block_ids(1)
    rows = dump(store, ids)
    store.wait(store.dump(*shards_of(ids), empty(rows)))
    target = empty(rows)
    store.wait(store.load(*shards_of(ids), target))
    assert same(target, rows)


def test_a_request_that_makes_no_sense_is_refused(store):
    ids = block_ids(2)
    with pytest.raises(RequestError, match="2 blocks, 1 shards"):
        store.dump(ids, [0], tensors(ids, 1))
    with pytest.raises(RequestError, match="3 tensors"):
        store.dump_data(ids, [0, 0], np.ones((2, 2), dtype=np.uint64))
    with pytest.raises(NotImplementedError):
        store.cc_store()
    assert store.lookup(ids) == [False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage_backends": []}, "storage_backends"),
        ({"hoistway": {"capacty": 1}}, "'capacty' in hoistway"),
        ({"hoistway": {"namespace": []}}, "namespace in hoistway is an object"),
        ({"hoistway": {"namespace": {"other": "x"}}}, "other of namespace in hoistway is an object"),
        ({"shard_size": 4096, "block_size": 5000}, "block_size cannot be 5000"),
        ({"use_direct": "maybe"}, "maybe"),
        ({"useDirect": "maybe"}, "maybe"),
        ({"useDirect": True, "use_direct": False}, "useDirect is True, and use_direct False"),
        ({"usedirect": True}, "'usedirect' in ucm_connector_config means nothing"),
        ({"posix_capcity_gb": 1}, "'posix_capcity_gb' in ucm_connector_config means nothing"),
        ({"posix_capacity_gb": "inf"}, "posix_capacity_gb is a number of GiB, not 'inf'"),
        ({"posix_capacity_gb": "x"}, "posix_capacity_gb is a number of GiB, not 'x'"),
    ],
)
def test_what_cannot_be_is_said_when_the_store_is_made(opened, changes, message):
    with pytest.raises(OptionError, match=message):
        opened(**changes)


@pytest.mark.parametrize(("gib", "capacity"), [(3, 3 << 30), (0.5, 1 << 29), ("2.5", 5 << 29)])
def test_ucms_own_options_are_the_stores(opened, gib, capacity):
    store = opened(
        posix_capacity_gb=gib, device_id=None, timeout_ms=5000, use_direct=False, hoistway={"capacity": None}
    )
    assert store._stores[0].stats()["capacity_bytes"] == capacity
    assert store._stores[0].report()["direct"] == "off"


@pytest.mark.parametrize(("value", "mode"), [(True, "require"), (False, "off"), ("prefer", "prefer")])
@pytest.mark.parametrize("name", ["useDirect", "use_direct"])
def test_both_spellings_of_use_direct_are_heard(opened, name, value, mode):
    assert opened(**{name: value})._stores[0].report()["direct"] == mode


def test_a_store_without_a_capacity_takes_most_of_its_file_system(opened):
    roots = [str(opened.root / "new" / name) for name in ("one", "two")]
    size = shutil.disk_usage(opened.root).total
    (one,) = opened(storage_backends=roots[:1], hoistway={"capacity": None})._stores
    assert one.stats()["capacity_bytes"] == size * 90 // 100
    # UCM's own word for no limit.
    both = opened(storage_backends=roots, hoistway={"capacity": None}, posix_capacity_gb=0)._stores
    assert [store.stats()["capacity_bytes"] for store in both] == [size * 90 // 100 // 2] * 2


def test_a_new_store_on_a_file_system_of_the_network_has_files(opened, monkeypatch):
    local = opened(storage_backends=[str(opened.root / "local")])
    monkeypatch.setattr("hoistway._native.is_remote", lambda _path: True)
    assert layout_of(opened(storage_backends=[str(opened.root / "new")])) == "files"
    assert layout_of(opened(storage_backends=[str(opened.root / "new")])) == "files"
    assert layout_of(opened(storage_backends=[str(opened.root / "local")])) == layout_of(local) == "segments"
    own = {"layout": "segments"}
    assert layout_of(opened(storage_backends=[str(opened.root / "own")], hoistway=own)) == "segments"


def test_keys_of_ucms_own_stores_have_no_effect_and_are_named(opened, caplog):
    opened(store_pipeline="Cache|Posix", io_direct=True, posix_io_engine="aio", cache_buffer_capacity_gb=64)
    (message,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert "io_direct, posix_io_engine have no effect" in message


@pytest.mark.parametrize("use_direct", ["off", "prefer"])
def test_blocks_of_a_device(opened, stand_in, monkeypatch, use_direct):
    """As UCM's connector for vLLM has it: addresses on the device, in buffers that it announces."""
    monkeypatch.setattr("hoistway.kv.adapters.ucm._has_cuda", lambda: True)
    size = SHARD * SHARDS
    memory = DeviceMemory(stand_in.library, 1, size)
    store = opened(
        device_id=1, gpu_kv_buffer_addrs=[memory.address], gpu_kv_buffer_sizes=[size], use_direct=use_direct
    )
    (block,) = block_ids(1)
    offsets = np.add.accumulate([0, *TENSORS[:-1]], dtype=np.uint64)
    addresses = np.array(
        [memory.address + shard * SHARD + offsets for shard in range(SHARDS)], dtype=np.uint64
    )
    content = random_bytes(size, 1)
    memory.write(content)
    store.wait(store.dump_data(*shards_of([block]), addresses))
    assert store.lookup([block]) == [True]
    memory.write(bytes(size))
    store.wait(store.load_data(*shards_of([block]), addresses))
    expected = bytearray(size)
    for shard in range(SHARDS):
        used = slice(shard * SHARD, shard * SHARD + sum(TENSORS))
        expected[used] = content[used]
    assert memory.read() == expected
    store.close()
    memory.free()


def test_files_are_the_owners_alone(opened, store):
    dump(store, block_ids(1))
    for path in (opened.root / "kv").rglob("*"):
        assert os.stat(path).st_mode & 0o077 == 0, path
