"""Timelines of loads, saves and KV stores."""

import json
import os
import signal
import sys

import hoistway
import numpy as np
import pytest
from conftest import SMALL_STORE


def events(path):
    return json.loads(path.read_text())


def named(path, name):
    return [event for event in events(path) if event["name"] == name]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    hoistway.save_file({f"w{i}": np.arange(1 << 20, dtype=np.int32) for i in range(3)}, path)
    return path


def test_a_timeline_has_each_step_of_a_load(model, tmp_path):
    path = tmp_path / "timeline.json"
    with hoistway.trace(path):
        tensors = hoistway.load_file(model, framework="numpy")
    assert sum(read["args"]["bytes"] for read in named(path, "read")) >= tensors.report.tensor_bytes
    assert {event["args"]["name"] for event in named(path, "tensor")} == {"w0", "w1", "w2"}
    for name in ("open", "load", "prepare", "plan", "transfer", "deliver"):
        assert named(path, name), name
    assert not any(event["args"].get("unfinished") for event in events(path))


def test_a_timeline_has_saves_and_ends_with_its_block(model, tmp_path):
    path = tmp_path / "timeline.json"
    with hoistway.trace(path):
        hoistway.save_file({"x": np.ones(1 << 18)}, tmp_path / "saved.safetensors")
    size = path.stat().st_size
    hoistway.load_file(model, framework="numpy")
    assert path.stat().st_size == size
    assert [event["args"]["tensors"] for event in named(path, "save")] == [1]
    assert named(path, "write")


def test_a_block_that_raises_leaves_a_whole_timeline(model, tmp_path):
    path = tmp_path / "timeline.json"
    with pytest.raises(KeyError), hoistway.trace(path):
        hoistway.open(model, framework="numpy").get_tensor("missing")
    assert named(path, "open")


def test_a_model_is_not_overwritten(model):
    content = model.read_bytes()
    with pytest.raises(OSError, match="not a timeline"), hoistway.trace(model):
        pass
    assert model.read_bytes() == content


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk")
def test_a_full_disk_does_not_hide_what_the_block_raised(model):
    with pytest.raises(KeyError, match="missing") as caught, hoistway.trace("/dev/full"):
        hoistway.open(model, framework="numpy").get_tensor("missing")
    if sys.version_info >= (3, 11):
        assert "the timeline is not whole" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="space"), hoistway.trace("/dev/full"):
        pass


def test_a_second_timeline_at_a_time_is_refused(tmp_path):
    with hoistway.trace(tmp_path / "1.json"):
        with pytest.raises(OSError, match="recorded already") as caught, hoistway.trace(tmp_path / "2.json"):
            pass
        assert isinstance(caught.value, hoistway.HoistwayError)
    with hoistway.trace(tmp_path / "2.json"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_of_fork_leaves_the_file_to_its_parent(model, tmp_path):
    path = tmp_path / "timeline.json"
    with hoistway.trace(path):
        hoistway.load_file(model, framework="numpy")
        child = os.fork()
        if child == 0:
            try:
                with hoistway.trace(tmp_path / "child.json"):
                    os._exit(1)
            except OSError:
                os._exit(0)
            finally:
                # Whatever else it raises: it must not go on with these tests.
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        hoistway.load_file(model, framework="numpy")
    assert len(named(path, "load")) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="stores are for Linux")
def test_a_timeline_has_requests_of_kv_stores(tmp_path):
    path = tmp_path / "timeline.json"
    with hoistway.trace(path), hoistway.kv.Store(tmp_path / "kv", **SMALL_STORE) as store:
        blocks = store.namespace(model="m")
        assert blocks.store([b"a"], [b"x" * 65536]).wait(30).ok
        assert blocks.load([b"a"], [bytearray(65536)]).wait(30).ok
    assert [event["args"]["bytes"] for event in named(path, "kv.store")] == [65536]
    assert [event["args"]["bytes"] for event in named(path, "kv.load")] == [65536]
    assert named(path, "kv.write")
    assert named(path, "kv.read")


def test_copies_to_a_device_have_rows_of_the_device(model, tmp_path, stand_in):
    path = tmp_path / "timeline.json"
    with hoistway.trace(path):
        tensors = hoistway.load_file(model, framework="raw", device="cuda:0", route="staged")
    copied = named(path, "copy")
    assert sum(copy["args"]["bytes"] for copy in copied) >= tensors.report.tensor_bytes
    rows = {event["tid"]: event["args"]["name"] for event in named(path, "thread_name")}
    assert {rows[copy["tid"]] for copy in copied} == {"cuda:0: copy"}
    assert named(path, "wait for copies")


@pytest.mark.skipif(sys.platform != "linux", reason="named pipes")
def test_the_wait_for_a_program_that_reads_a_pipe_sees_signals(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def interrupt(*_):
        raise KeyboardInterrupt

    def record():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with hoistway.trace(path):
            pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            record()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
