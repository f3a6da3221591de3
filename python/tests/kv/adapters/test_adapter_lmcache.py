"""LMCache's own tests of native connectors on our client, and what they leave out: real files, and damage to them."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import select
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from adapter_hosts import (
    SMALL,
    assert_exported,
    examples,
    exported_metrics,
    flip_bit,
    random_bytes,
    truncate,
    wait_until,
)
from conftest import run
from plugin_hosts import HOST_WARNINGS, import_host

import_host("lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter")

from hoistway.errors import OptionError  # noqa: E402
from hoistway.kv.adapters._metrics import Exported  # noqa: E402
from hoistway.kv.adapters.lmcache import Client  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import (  # noqa: E402
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from prometheus_client import generate_latest  # noqa: E402

pytestmark = HOST_WARNINGS

PATIENCE_S = 60.0


def module_at(*path: str):
    """A module of LMCache's by its file: packages that it is in ask for more than is here."""
    host = find_spec("lmcache")
    assert host is not None
    assert host.origin is not None
    spec = importlib.util.spec_from_file_location(
        "lmcache_" + path[-1], Path(host.origin).parents[1].joinpath(*path)
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLIENTS = ("lmcache", "v1", "storage_backend", "native_clients", "connector_client_base.py")
ConnectorClientBase = module_at(*CLIENTS).ConnectorClientBase


class Connector(Client):
    """Our client where LMCache's tests make their own of a native one."""

    root: Path
    count = 0

    def __init__(self) -> None:
        type(self).count += 1
        super().__init__(str(self.root / str(self.count)), **SMALL)


@pytest.fixture(autouse=True)
def _stores_of_connectors(tmp_path):
    Connector.root = tmp_path


def _upstream():
    """LMCache's tests, with our client in the place of theirs."""
    module = module_at("tests", "v1", "distributed", "test_native_connector_l2_adapter.py")
    # One of theirs that counts what it is given is made of the one that is replaced; LMCache has it since 0.5.6.
    if hasattr(module, "RecordingNativeConnector"):
        module.RecordingNativeConnector.__bases__ = (Connector,)
    module.MockNativeConnector = Connector
    # They give an operation five seconds, which a busy machine may exceed. None of them waits for nothing to come.
    wait = module.wait_for_event_fd
    module.wait_for_event_fd = lambda event_fd, timeout=0.0: wait(event_fd, max(timeout, PATIENCE_S))
    return module


upstream = _upstream()
FIXTURES = ("adapter", "adapter_with_capacity", "recording_adapter", "padded_adapter")
TESTS = [name for name in vars(upstream) if name.startswith("Test")]
globals().update({name: getattr(upstream, name) for name in (*TESTS, *FIXTURES) if hasattr(upstream, name)})


def test_upstream_tests_are_all_here():
    if not hasattr(upstream, "RecordingNativeConnector"):
        pytest.skip("LMCache before 0.5.6 has fewer tests of its own")
    assert len(TESTS) == 18
    assert issubclass(upstream.RecordingNativeConnector, Client)


# --- the rest ---------------------------------------------------------------------------------------------------------


def finish(client: Client, *numbers: int) -> dict[int, tuple]:
    """Waits as LMCache does for operations to end."""
    poll, found = select.poll(), {}
    poll.register(client.event_fd(), select.POLLIN)
    while not found.keys() >= set(numbers):
        assert poll.poll(PATIENCE_S * 1000), "nothing came"
        for number, *rest in client.drain_completions():
            assert number not in found
            found[number] = tuple(rest)
    return found


def do(client: Client, number: int) -> tuple:
    return finish(client, number)[number]


@pytest.fixture
def client(tmp_path):
    client = Client(str(tmp_path / "kv"), **SMALL)
    yield client
    client.close()


def test_documented_configurations_make_adapters_of_ours(tmp_path):
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    for number, example in enumerate(examples("lmcache", tmp_path)):
        arguments = parser.parse_args(["--l2-adapter", json.dumps(example)])
        (config,) = parse_args_to_l2_adapters_config(arguments).adapters
        adapter = create_l2_adapter(config)
        try:
            assert adapter.report_status()["type"] == "Client"
            assert adapter.report_status()["is_healthy"]
            obj = upstream.create_memory_obj(size=100, fill_value=7.0 + number)
            key = upstream.create_object_key(number)
            task = adapter.submit_store_task([key], [obj])
            assert upstream.wait_for_event_fd(adapter.get_store_event_fd())
            assert adapter.pop_completed_store_tasks()[task].is_successful()
        finally:
            adapter.close()


@pytest.mark.parametrize("size", [1, 511, 4095, 4097, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 513])
def test_memory_of_any_length_and_place_round_trips(client, size, offset):
    arena = bytearray(size + 2 * offset)
    content = random_bytes(size, size + offset)
    memory = memoryview(arena)[offset : offset + size]
    memory[:] = content
    assert do(client, client.submit_batch_set(["k"], [memory]))[0]
    memory[:] = bytes(size)
    assert do(client, client.submit_batch_get(["k"], [memory])) == (True, "", [True])
    assert bytes(memory) == content
    assert not any(arena[:offset])
    assert not any(arena[offset + size :])


def test_a_missing_object_does_not_fail_the_others(client):
    contents = {f"k{number}": random_bytes(5000, number) for number in range(4)}
    memory = [memoryview(bytearray(content)) for content in contents.values()]
    assert do(client, client.submit_batch_set(list(contents), memory))[0]
    keys = ["k0", "gone", "k2", "k3"]
    memory = [memoryview(bytearray(5000)) for _ in keys]
    ok, error, loaded = do(client, client.submit_batch_get(keys, memory))
    assert not ok
    assert "1 miss" in error
    assert loaded == [True, False, True, True]
    for key, view in zip(keys, memory, strict=True):
        assert bytes(view) == contents.get(key, bytes(5000))


def test_memory_of_another_length_is_refused_and_the_object_stays(client):
    content = random_bytes(8192, 1)
    assert do(client, client.submit_batch_set(["k"], [memoryview(content)]))[0]
    for wrong in (4096, 8191, 8193, 20_000):
        assert do(client, client.submit_batch_get(["k"], [memoryview(bytearray(wrong))]))[2] == [False]
    memory = memoryview(bytearray(8192))
    assert do(client, client.submit_batch_get(["k"], [memory]))[0]
    assert bytes(memory) == content


def test_objects_of_several_lengths_in_one_batch(client):
    contents = [random_bytes(size, size) for size in (100, 70_000, 100, 5000)]
    keys = [f"k{number}" for number in range(4)]
    assert do(client, client.submit_batch_set(keys, [memoryview(content) for content in contents]))[0]
    memory = [memoryview(bytearray(len(content))) for content in contents]
    assert do(client, client.submit_batch_get(keys, memory)) == (True, "", [True] * 4)
    assert [bytes(view) for view in memory] == contents


def test_a_batch_without_keys_ends(client):
    assert do(client, client.submit_batch_get([], [])) == (True, "", [])
    assert do(client, client.submit_batch_exists([])) == (True, "", [])


def test_a_key_that_no_block_can_have_fails_its_operation_alone(client):
    long = "k" * 2000
    memory = [memoryview(bytearray(100))]
    numbers = [
        client.submit_batch_set([long], memory),
        client.submit_batch_get([long], memory),
        client.submit_batch_exists([long]),
        client.submit_batch_delete([long]),
    ]
    for ok, error, _ in finish(client, *numbers).values():
        assert not ok
        assert "2000 bytes" in error
    assert do(client, client.submit_batch_set(["k"], memory))[0]


def test_many_operations_at_once_all_end(client):
    memory = [memoryview(random_bytes(3000, number)) for number in range(100)]
    stores = [client.submit_batch_set([f"k{number}"], [view]) for number, view in enumerate(memory)]
    lookups = [client.submit_batch_exists([f"k{number}"]) for number in range(100)]
    found = finish(client, *stores, *lookups)
    assert all(found[number][0] for number in stores)
    assert all(do(client, client.submit_batch_exists([f"k{number}" for number in range(100)]))[2])


def test_objects_are_there_after_a_restart(tmp_path):
    content = random_bytes(10_000, 3)
    client = Client(str(tmp_path / "kv"), **SMALL)
    assert do(client, client.submit_batch_set(["k"], [memoryview(content)]))[0]
    client.close()
    client = Client(str(tmp_path / "kv"), **SMALL)
    memory = memoryview(bytearray(10_000))
    assert do(client, client.submit_batch_get(["k"], [memory]))[0]
    assert bytes(memory) == content
    client.close()


def test_a_store_for_reading_takes_nothing_and_says_no_error(tmp_path):
    client = Client(str(tmp_path / "kv"), **SMALL)
    assert do(client, client.submit_batch_set(["k"], [memoryview(bytes(100))]))[0]
    client.close()
    client = Client(str(tmp_path / "kv"), access="read")
    number = client.submit_batch_set(["other"], [memoryview(bytes(100))])
    assert do(client, number) == (True, "", [True])
    assert do(client, client.submit_batch_exists(["k", "other"]))[2] == [True, False]
    client.close()


@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_a_damaged_object_is_missing(tmp_path, client, damage):
    content = random_bytes(50_000, 4)
    assert do(client, client.submit_batch_set(["k"], [memoryview(content)]))[0]
    damage(tmp_path / "kv", content)
    memory = memoryview(bytearray(50_000))
    ok, error, loaded = do(client, client.submit_batch_get(["k"], [memory]))
    assert (ok, loaded) == (False, [False])
    assert "corrupt" in error
    assert do(client, client.submit_batch_exists(["k"]))[2] == [False]
    # And may be stored anew.
    assert do(client, client.submit_batch_set(["k"], [memoryview(content)]))[0]
    assert do(client, client.submit_batch_get(["k"], [memory]))[0]
    assert bytes(memory) == content


def test_deletion_says_what_was_there(client):
    assert do(client, client.submit_batch_set(["a", "b"], [memoryview(b"a" * 100), memoryview(b"b" * 100)]))[
        0
    ]
    assert do(client, client.submit_batch_delete(["a", "gone"])) == (True, "", [True, False])
    assert do(client, client.submit_batch_exists(["a", "b"]))[2] == [False, True]


def test_what_admission_leaves_out_is_no_failure(tmp_path):
    client = Client(str(tmp_path / "kv"), admission="second_touch", **SMALL)
    memory = [memoryview(random_bytes(5000, 1))]
    assert do(client, client.submit_batch_set(["k"], memory)) == (True, "", [True])
    assert do(client, client.submit_batch_exists(["k"]))[2] == [False]
    assert do(client, client.submit_batch_set(["k"], memory)) == (True, "", [True])
    assert do(client, client.submit_batch_exists(["k"]))[2] == [True]
    client.close()


def test_blocks_of_another_namespace_are_not_found(tmp_path):
    root = str(tmp_path / "kv")
    client = Client(root, namespace={"model": "m@1", "dtype": "bfloat16"}, **SMALL)
    assert do(client, client.submit_batch_set(["k"], [memoryview(bytes(100))]))[0]
    client.close()
    for namespace, is_there in ((None, False), ({"model": "m@1", "dtype": "fp8"}, False)):
        client = Client(root, namespace=namespace, **SMALL)
        assert do(client, client.submit_batch_exists(["k"]))[2] == [is_there]
        client.close()


def test_a_misspelt_option_is_named(tmp_path):
    with pytest.raises(OptionError, match="'capacty' in adapter_params"):
        Client(str(tmp_path / "kv"), capacty="1GiB")
    with pytest.raises(OptionError, match="'modle' in namespace"):
        Client(str(tmp_path / "kv"), namespace={"modle": "m"}, **SMALL)


def test_without_the_multi_process_mode(tmp_path):
    async def run() -> None:
        client = Client(str(tmp_path / "kv"), **SMALL)
        connector = ConnectorClientBase(client)
        content = np.frombuffer(random_bytes(5000, 5), np.uint8).copy()
        await connector.batch_set(["a", "b"], [memoryview(content), memoryview(content)])
        assert await connector.batch_exists(["a", "gone"]) == [True, False]
        memory = np.zeros_like(content)
        await connector.get("b", memoryview(memory))
        assert (memory == content).all()
        with pytest.raises(RuntimeError, match="1 miss"):
            await connector.get("gone", memoryview(memory))
        connector.close()

    asyncio.run(run())


def test_closing_lets_stores_end_and_is_idempotent(tmp_path):
    client = Client(str(tmp_path / "kv"), **SMALL)
    memory = [memoryview(random_bytes(1 << 20, number)) for number in range(16)]
    client.submit_batch_set([f"k{number}" for number in range(16)], memory)
    client.close()
    client.close()
    assert client.drain_completions() == []
    # Nothing has the memory any more.
    for view in memory:
        view.release()
    client = Client(str(tmp_path / "kv"), **SMALL)
    assert all(do(client, client.submit_batch_exists([f"k{number}" for number in range(16)]))[2])
    client.close()


def test_prometheus_gets_the_stores_metrics(client):
    do(client, client.submit_batch_set(["a"], [memoryview(bytearray(5000))]))
    for _ in range(2):
        do(client, client.submit_batch_get(["a"], [memoryview(bytearray(5000))]))
        assert_exported(client._exported, client._store)


def test_a_counter_that_begins_anew_goes_on_in_prometheus(client):
    samples = {"a": 3.0}

    def metrics() -> str:
        lines = [f'hoistway_kv_test_total{{of="{name}"}} {value}' for name, value in samples.items()]
        return "\n".join(
            ["# HELP hoistway_kv_test Of a test.", "# TYPE hoistway_kv_test counter", *lines, "# EOF\n"]
        )

    exported = Exported(SimpleNamespace(metrics=metrics, root="none"))
    exported.update()
    samples["a"] = 2.0
    exported.update()
    del samples["a"]
    exported.update()
    samples["a"] = 4.0
    exported.update()
    assert 'hoistway_kv_test_total{of="a"} 9.0\n' in generate_latest().decode()
    exported.close()


def test_metrics_are_exported_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("hoistway.kv.adapters._metrics._EVERY_S", 0.01)
    client = Client(str(tmp_path / "kv"), **SMALL)

    def exported() -> dict:
        return exported_metrics(generate_latest().decode(), tmp_path / "kv")

    wait_until(lambda: ("hoistway_kv_root_bytes",) in exported())
    client.close()


def test_processes_of_a_host_export_their_metrics_together(tmp_path):
    script = """
    import sys
    from pathlib import Path
    import prometheus_client
    from hoistway.kv.adapters.lmcache import Client

    client = Client(sys.argv[1], capacity="64MiB", min_free=0)
    client._blocks.store([sys.argv[2]], [bytearray(5000)]).wait(20)
    client._exported.update()
    client.close()
    """
    root, metrics = tmp_path / "kv", tmp_path / "metrics"
    metrics.mkdir()
    for key in "ab":
        done = run(script, root, key, PROMETHEUS_MULTIPROC_DIR=str(metrics))
        assert done.returncode == 0, done.stderr
    gather = """
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    """
    found = exported_metrics(run(gather, PROMETHEUS_MULTIPROC_DIR=str(metrics)).stdout, root)
    (stored,) = [value for name, value in found.items() if name[0] == "hoistway_kv_stored_bytes_total"]
    assert stored == 10_000
