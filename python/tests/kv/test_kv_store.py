"""Blocks go in and come out, and what a store says of itself."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import hoistway
import pytest
from conftest import SMALL_STORE, OpenStore, random_bytes, run
from hoistway import errors, kv


def put(blocks: kv.Namespace, *keys: kv.Key, size: int = 1000, **options) -> list[bytearray]:
    stored = [random_bytes(size) for _ in keys]
    completion = blocks.store(keys, stored, **options).wait(30)
    assert completion.statuses == ["ok"] * len(keys)
    return stored


def get(blocks: kv.Namespace, key: kv.Key, size: int = 1000) -> bytearray:
    found = bytearray(size)
    assert blocks.load([key], [found]).wait(30).ok
    return found


@pytest.mark.parametrize("size", [1, 7, 4095, 4096, 4097, 100_000, 3 << 20])
@pytest.mark.parametrize("route", ["auto", "threads"])
def test_what_was_stored_is_loaded(open_store: OpenStore, size: int, route: str) -> None:
    blocks = open_store(route=route).namespace(model="test")
    (stored,) = put(blocks, b"key", size=size)
    assert get(blocks, b"key", size) == stored


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("layout", ["segments", "files"])
def test_a_far_tier_has_what_the_near_one_lacks(tmp_path: Path, policy: str, layout: str) -> None:
    far = {"root": tmp_path / "far", "capacity": "64MiB", "min_free": 0, "policy": policy, "layout": layout}
    # More time than it needs.
    far |= {"timeout": 60, "lookup_timeout": 20}
    options = {**SMALL_STORE, "far": far}
    (tmp_path / "far").mkdir()
    with kv.Store(tmp_path / "one", **options) as store:
        (stored,) = put(store.namespace(model="test"), b"key")
        store.close(30)
    with kv.Store(tmp_path / "other", **options) as store:
        blocks = store.namespace(model="test")
        assert blocks.lookup_prefix([b"key", b"none"]) == 1
        found = bytearray(1000)
        completion = blocks.load([b"key"], [found]).wait(30)
        assert (completion.statuses, completion.far_bytes, found) == (["ok"], 1000, stored)
        assert store.stats()["far"]["hits"] == 1
        assert f'\nhoistway_kv_far_hits_total{{store="{store.root}"}} 1\n' in store.metrics()
        assert store.report()["far"]["policy"] == policy


def test_a_store_works_until_the_directory_of_its_far_tier_is_there(tmp_path: Path) -> None:
    far = {"root": tmp_path / "far", "capacity": "64MiB", "min_free": 0, "policy": "write_back"}
    with kv.Store(tmp_path / "near", **SMALL_STORE, far=far) as store:
        put(store.namespace(model="test"), b"key")
        assert "make the directory" in store.report()["far"]["failure"]
        assert f'\nhoistway_kv_far_up{{store="{store.root}"}} 0\n' in store.metrics()
        (tmp_path / "far").mkdir()
        deadline = time.monotonic() + 60
        while store.stats()["far"]["written_blocks"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert store.report()["far"]["failure"] is None


def test_an_option_of_the_far_tier_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'far' has no 'rot'"):
        kv.Store(tmp_path / "near", **SMALL_STORE, far={"root": tmp_path / "far", "rot": 1})
    with pytest.raises(TypeError, match="no 'root'"):
        kv.Store(tmp_path / "near", **SMALL_STORE, far={"capacity": "1GiB"})


def test_a_capacity_beyond_the_file_system_is_warned_of(tmp_path: Path) -> None:
    program = """
        import hoistway.kv as kv, sys
        kv.Store(sys.argv[1], capacity="900TiB").close()
        """
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the file system cannot hold the capacity of 900.0 TiB: it has " in done.stderr
    assert "of which min_free keeps 1.0 GiB" in done.stderr


def test_a_completion_says_what_became_of_each_item(blocks: kv.Namespace) -> None:
    put(blocks, "a", "b")
    ticket = blocks.load(["a", "missing", "b"], [bytearray(1000) for _ in range(3)])
    completion = ticket.wait(30)
    assert completion.statuses == ["ok", "miss", "ok"]
    assert completion.succeeded == [True, False, True]
    assert not completion.ok
    assert completion.bytes == 2000
    assert completion.ticket == ticket.id
    assert completion.queued >= 0
    assert completion.moving >= 0
    assert ticket.done()
    assert ticket.released()
    assert not ticket.lost()
    assert not ticket.cancel(), "it has ended"
    assert "2 of 3 ok" in repr(ticket)
    assert "miss" in repr(ticket)


@pytest.mark.parametrize(("route", "carrier"), [("threads", "threads"), ("auto", "")])
def test_a_completion_says_how_its_bytes_went(open_store: OpenStore, route: str, carrier: str) -> None:
    with open_store(route=route) as store:
        blocks = store.namespace(model="test")
        stored = blocks.store(["a", "b"], [random_bytes(100_001)] * 2).wait(30)
        loaded = blocks.load(["a"], [bytearray(100_001)]).wait(30)
        for completion in (stored, loaded):
            assert completion.ok
            assert sum(completion.carried.values()) >= completion.bytes
            assert all(name.startswith(carrier) for name in completion.carried)
        assert 0 < loaded.bounced_bytes <= loaded.bytes, "its memory is not aligned"
        carriers = store.report()["carriers"]
        assert {
            f"{share['route']} {share['access']}": share["read_bytes"] for share in carriers
        } == loaded.carried
        assert {
            f"{share['route']} {share['access']}": share["written_bytes"] for share in carriers
        } == stored.carried
        assert blocks.load(["missing"], [bytearray(5)]).wait(30).carried == {}


def test_a_block_is_stored_once(blocks: kv.Namespace) -> None:
    (stored,) = put(blocks, "a")
    assert blocks.store(["a"], [random_bytes(1000)]).wait(30).statuses == ["exists"]
    assert get(blocks, "a") == stored


def test_another_length_is_a_mismatch_and_the_block_stays(blocks: kv.Namespace) -> None:
    (stored,) = put(blocks, "a")
    for size in (999, 1001):
        assert blocks.load(["a"], [bytearray(size)]).wait(30).statuses == ["mismatch"]
    assert get(blocks, "a") == stored


def test_lookups(blocks: kv.Namespace) -> None:
    put(blocks, "a", "b", "d")
    assert blocks.lookup(["a", "x", "d"]) == [True, False, True]
    assert blocks.lookup_prefix(["a", "b", "c", "d"]) == 2
    assert blocks.lookup_prefix(["x", "a"]) == 0
    assert blocks.lookup_reverse(["a", "b", "c", "d", "e"]) == 3
    assert blocks.lookup_reverse(["x", "y"]) is None
    assert blocks.lookup([]) == []
    assert blocks.lookup_prefix([]) == 0


def test_text_and_its_bytes_are_one_key(blocks: kv.Namespace) -> None:
    (stored,) = put(blocks, "clé")
    assert blocks.lookup(["clé".encode()]) == [True]
    assert get(blocks, "clé".encode()) == stored


def test_a_block_is_found_when_all_its_shards_are_there(blocks: kv.Namespace) -> None:
    shards = [random_bytes(5000) for _ in range(3)]
    assert blocks.store(["a"], [shards[1]], shard=1, shards=3).wait(30).ok
    assert blocks.lookup(["a"]) == [False]
    assert blocks.store(["a", "a"], [shards[2], shards[0]], shard=[2, 0], shards=3).wait(30).ok
    assert blocks.lookup(["a"]) == [True]
    found = [bytearray(5000) for _ in range(3)]
    assert blocks.load(["a"] * 3, found, shard=range(3)).wait(30).ok
    assert found == shards


def test_a_block_that_does_not_become_whole_is_given_up(open_store: OpenStore) -> None:
    with open_store(partial_timeout=0.05) as store:
        blocks = store.namespace(model="test")
        assert blocks.store(["a"], [random_bytes(5000)], shards=2).wait(30).ok
        end = time.monotonic() + 20
        while store.stats()["abandoned"] == 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert store.stats()["partial_blocks"] == 0


def test_what_went_is_told_by_its_fingerprint(open_store: OpenStore) -> None:
    with open_store() as store:
        blocks = store.namespace(model="test", ttl=1)
        assert store.evicted() == ([], 0)
        put(blocks, "a", b"b")
        end = time.monotonic() + 60
        gone: list[str] = []
        while len(gone) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
            gone += store.evicted()[0]
        assert set(gone) == {blocks.fingerprint(b"a"), blocks.fingerprint("b")}
        assert len(set(gone)) == 2


def test_shards_of_several_lengths_in_several_requests(blocks: kv.Namespace) -> None:
    first, second = random_bytes(100), random_bytes(9000)
    assert blocks.store(["a"], [first], shard=0, shards=2, shard_bytes=9000).wait(30).ok
    assert blocks.store(["a"], [second], shard=1, shards=2, shard_bytes=9000).wait(30).ok
    found = [bytearray(100), bytearray(9000)]
    assert blocks.load(["a", "a"], found, shard=[0, 1]).wait(30).ok
    assert found == [first, second]


def test_namespaces_do_not_see_each_other(store: kv.Store) -> None:
    names = [
        store.namespace(model="m"),
        store.namespace(model="m", dtype="float16"),
        store.namespace(model="m", tensor_parallel=(0, 2)),
        store.namespace(model="m", tensor_parallel=(1, 2)),
        store.namespace(model="m", salt="a"),
        store.namespace(model="m", salt="b"),
        store.namespace(model="m", other={"lora": "x"}),
    ]
    assert len({namespace.id for namespace in names}) == len(names)
    stored = [put(namespace, "a")[0] for namespace in names]
    assert [get(namespace, "a") for namespace in names] == stored
    assert names[0].clear() == 1
    assert [namespace.lookup(["a"]) for namespace in names] == [[False]] + [[True]] * 6
    described = store.namespaces()
    assert described[names[2].id]["tensor_parallel"] == {"rank": 0, "size": 2}
    assert len(described[names[5].id]["salt"]) == 64, "its digest"


def test_pins_and_removal(blocks: kv.Namespace) -> None:
    put(blocks, "a", "b", "c")
    blocks.touch(["a", "missing"])
    with blocks.pin(["a", "missing"]) as pins:
        assert pins.pinned == [True, False]
        assert blocks.delete(["a", "b", "missing"]) == 1
        assert blocks.lookup(["a", "b", "c"]) == [True, False, True]
    pins.release()
    assert blocks.delete(["a"]) == 1
    assert blocks.clear() == 1
    assert blocks.lookup(["a", "b", "c"]) == [False] * 3


def test_a_dropped_pin_holds_nothing(blocks: kv.Namespace) -> None:
    put(blocks, "a")
    pins = blocks.pin(["a"])
    assert blocks.delete(["a"]) == 0
    del pins
    assert blocks.delete(["a"]) == 1


def test_a_store_that_is_opened_again_has_its_blocks(open_store: OpenStore) -> None:
    with open_store() as store:
        stored = put(store.namespace(model="test"), "a", "b")
    blocks = open_store().namespace(model="test")
    assert [get(blocks, key) for key in "ab"] == stored


def test_time_to_live(store: kv.Store) -> None:
    blocks = store.namespace(model="test", ttl=3600)
    put(blocks, "a")
    put(blocks, "b", ttl=0.001)
    while blocks.lookup(["b"]) == [True]:
        pass
    assert blocks.load(["b"], [bytearray(1000)]).wait(30).statuses[0] in ("expired", "miss")
    assert blocks.lookup(["a"]) == [True]


def test_quota(store: kv.Store) -> None:
    blocks = store.namespace(model="test", quota="1MiB")
    for number in range(40):
        blocks.store([str(number)], [random_bytes(100_000)]).wait(30)
    held = sum(blocks.lookup([str(number) for number in range(40)]))
    assert 0 < held <= 10


def test_reports(store: kv.Store, blocks: kv.Namespace, store_root: Path) -> None:
    put(blocks, "a", "b")
    blocks.load(["a", "missing"], [bytearray(1000)] * 2).wait(30)
    stats = store.stats()
    assert stats["blocks"] == 2
    assert stats["payload_bytes"] == 2000
    assert stats["capacity_bytes"] == 256 << 20
    assert isinstance(stats["recovery"], float)
    (own,) = (own for own in stats["namespaces"] if own["namespace"] == blocks.id)
    assert (own["stored_blocks"], own["hits"], own["misses"]) == (2, 1, 1)
    report = store.report()
    assert report["root"] == str(store_root) == store.root
    assert report["layout"] == "segments"
    assert report["route"] in ("io_uring", "threads")
    assert sum(own["written_bytes"] for own in report["carriers"]) >= 2000
    metrics = store.metrics()
    assert metrics.strip().endswith("# EOF")
    assert "hoistway_kv_" in metrics
    assert store.events() == []
    store.maintain()
    assert "store" in repr(store)
    assert blocks.id in repr(blocks)


def damage(store_root: Path, data: bytes) -> None:
    """Changes a byte of a block on the disk."""
    for path in store_root.rglob("*"):
        if path.is_file() and (offset := path.read_bytes().find(data)) >= 0:
            with path.open("r+b") as file:
                file.seek(offset + 10)
                file.write(bytes([data[10] ^ 1]))
            subprocess.run(["sync"], check=True)
            return
    raise AssertionError("the block is in no file")


def test_a_damaged_block_is_a_miss_and_an_event(
    store: kv.Store, blocks: kv.Namespace, store_root: Path
) -> None:
    (stored,) = put(blocks, "a")
    store.flush()
    damage(store_root, bytes(stored))
    assert blocks.load(["a"], [bytearray(1000)]).wait(30).statuses == ["corrupt"]
    assert blocks.lookup(["a"]) == [False]
    (event,) = store.events()
    assert (event["kind"], event["key"], event["namespace"]) == ("corrupt_block", "a", blocks.id)
    assert isinstance(event["at"], float)
    assert store.stats()["corrupt_blocks"] == 1
    put(blocks, "a")


def test_a_reader_finds_what_a_writer_stores(store: kv.Store, store_root: Path) -> None:
    blocks = store.namespace(model="test")
    (stored,) = put(blocks, "a")
    store.flush()
    with kv.Store(store_root, access="read") as reader:
        seen = reader.namespace(model="test")
        reader.follow()
        assert get(seen, "a") == stored
        with pytest.raises(kv.StoreReadOnlyError, match="reading only") as refused:
            seen.store(["b"], [b"x"])
        assert isinstance(refused.value, PermissionError)


def test_errors_have_types_and_say_what_to_do(store_root: Path, tmp_path: Path) -> None:
    with pytest.raises(kv.StoreNotFoundError, match="not a KV store") as missing:
        kv.Store(store_root, access="read")
    assert isinstance(missing.value, FileNotFoundError)
    assert str(missing.value.path) == str(store_root)
    with pytest.raises(errors.OptionError, match="capacity"):
        kv.Store(store_root)
    for option, value in [
        ("capacity", "much"),
        ("layout", "heap"),
        ("durability", "perhaps"),
        ("eviction", "mru"),
        ("admission", "never"),
        ("route", "warp"),
        ("access", "write"),
        ("direct", "sometimes"),
        ("timeout", -1),
        ("timeout", float("inf")),
        ("min_free", "-1"),
    ]:
        with pytest.raises(errors.OptionError, match=str(value)):
            kv.Store(store_root, **{**SMALL_STORE, option: value})  # type: ignore[arg-type]
    assert not store_root.exists(), "nothing was made"
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(kv.Error):
        kv.Store(file, capacity="1GiB")
    with pytest.raises(TypeError):
        kv.Store(store_root, capacity="1GiB", colour="red")  # type: ignore[call-arg]
    assert issubclass(kv.Error, hoistway.HoistwayError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "capacity cannot be none: a store that is written to needs a limit"),
        ({"capacity": 0}, "capacity cannot be 0: nothing could be stored"),
        ({"layout": "files"}, "capacity cannot be none: a store that is written to needs a limit for .*"),
        ({"capacity": 4096}, "capacity cannot be 4096: nothing could be stored: a segment takes .*"),
        (
            {"capacity": "1MiB", "segment_bytes": "2MiB"},
            "segment_bytes cannot be 2097152: it is more than .*",
        ),
        ({"capacity": "1GiB", "min_free": "900PiB"}, "min_free cannot be .* has [0-9.]+ [KMGT]iB in all"),
        ({"capacity": "1GiB", "max_in_flight": 0}, "max_in_flight cannot be 0: nothing could be moved"),
        ({"capacity": "1GiB", "staging": 1}, "staging cannot be 1: it is at least 8 MiB"),
        ({"capacity": "1GiB", "io_threads": 0}, "io_threads cannot be 0: no thread would move bytes"),
        ({"capacity": "1GiB", "io_threads": 257}, "io_threads cannot be 257: it is at most 256"),
        ({"capacity": "1GiB", "far": {"root": "far", "staging": 0}}, "far.staging cannot be 0: .*"),
        ({"capacity": "1GiB", "far": {"root": "far", "backlog": 0}}, "far.backlog cannot be 0: .*"),
    ],
)
def test_errors_name_options_as_they_are_written(store_root: Path, options: dict, message: str) -> None:
    with pytest.raises(errors.OptionError, match=f"^{message}$"):
        kv.Store(store_root, **options)


def test_a_collector_has_the_metrics_of_all_stores(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    with kv.Store(tmp_path / "one", **SMALL_STORE) as one, kv.Store(tmp_path / "two", **SMALL_STORE) as two:
        collector = kv.MetricsCollector(one)
        registry.register(collector)
        collector.add(two)
        put(one.namespace(model="test"), b"key", b"other")
        put(two.namespace(model="test"), b"key")

        def value(name: str, store: kv.Store) -> float | None:
            return registry.get_sample_value(name, {"store": store.root})

        # More than what a store holds, such as histograms.
        assert (value("hoistway_kv_blocks", one), value("hoistway_kv_blocks", two)) == (2, 1)
        text = prometheus_client.generate_latest(registry).decode()
        assert text.count("# TYPE hoistway_kv_blocks gauge") == 1
        assert "_bucket{" in text
        for line in one.metrics().splitlines():
            if not line.startswith("#"):
                assert line.partition("{")[0].partition(" ")[0] in text, line
        one.close()
        assert value("hoistway_kv_blocks", one) is None
        assert value("hoistway_kv_blocks", two) == 1
    del one, two
    assert list(collector.collect()) == []


def test_a_typo_of_a_keyword_names_the_nearest(store_root: Path) -> None:
    with pytest.raises(
        errors.UnknownOptionError, match=r"^option cannot be 'capcity': did you mean 'capacity'\?"
    ):
        kv.Store(store_root, capcity="1GiB")  # type: ignore[arg-type]
    with pytest.raises(errors.UnknownOptionError, match=r"'max_inflight': did you mean 'max_in_flight'\?"):
        kv.Store(store_root, capacity="1GiB", max_inflight="1GiB")  # type: ignore[arg-type]
    with (
        kv.Store(store_root, **SMALL_STORE) as store,
        pytest.raises(errors.UnknownOptionError, match=r"'head_dims': did you mean 'head_dim'\?"),
    ):
        store.namespace(model="test", head_dims=128)  # type: ignore[arg-type]
    with pytest.raises(
        errors.UnknownOptionError, match=r"it has no such option \(the options are capacity, "
    ):
        kv.Store(store_root, xyz=1)  # type: ignore[arg-type]


def test_options_of_requests_are_checked(blocks: kv.Namespace) -> None:
    with pytest.raises(errors.OptionError, match="demand, prefetch, background"):
        blocks.load(["a"], [bytearray(1)], priority="first")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="timeout"):
        blocks.load(["a"], [bytearray(1)], timeout=-1)
    with pytest.raises(kv.RequestError):
        blocks.store(["a"], [b"x"], shards=0)
    with pytest.raises(kv.RequestError):
        blocks.store(["a"], [b"x"], shard=5, shards=2)
    with pytest.raises(kv.RequestError):
        blocks.store(["a"], [b"x"], shards=257)


def test_nothing_can_be_asked_of_a_closed_store(store: kv.Store, blocks: kv.Namespace) -> None:
    put(blocks, "a")
    store.close()
    store.close()
    for ask in (
        lambda: blocks.lookup(["a"]),
        lambda: blocks.load(["a"], [bytearray(1000)]),
        lambda: blocks.store(["b"], [b"x"]),
        lambda: store.namespace(model="other"),
        store.stats,
        store.flush,
    ):
        with pytest.raises(kv.StoreClosedError, match="closed"):
            ask()
