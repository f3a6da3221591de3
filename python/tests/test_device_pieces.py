"""How often the driver is called where there are many small pieces: on the stand-in driver, which counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import SMALL_STORE, StandIn, run
from device_work import Array
from hoistway import kv

COUNT, SIZE = 1000, 16 << 10
# Each of these gives a stream something to copy; from the device to itself, what was read there directly.
COPIES = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyBatchAsync",
)
MIB = 1 << 20


class Calls:
    """What was called meanwhile."""

    copies = events = waits = pins = 0


@contextmanager
def counted(stand_in: StandIn) -> Iterator[Calls]:
    def now() -> list[int]:
        names = {
            "copies": COPIES,
            "events": ["cuEventRecord"],
            "waits": ["cuEventSynchronize", "cuStreamSynchronize"],
            "pins": ["cuMemHostRegister_v2"],
        }
        return [sum(stand_in.count(f"calls.{name}") for name in each) for each in names.values()]

    calls, before = Calls(), now()
    yield calls
    calls.copies, calls.events, calls.waits, calls.pins = (
        after - earlier for after, earlier in zip(now(), before, strict=True)
    )


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return {f"t{i:04}": np.full(SIZE, i % 251, np.uint8) for i in range(COUNT)}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    path = tmp_path / "model.safetensors"
    hoistway.save_file(tensors, path)
    return path


def test_a_save_from_a_device_copies_each_write_at_once(
    model: Path, tensors: dict[str, np.ndarray], stand_in: StandIn
) -> None:
    loaded = dict(hoistway.load_file(model, "cuda", framework="raw"))
    saved = model.with_name("saved.safetensors")
    with counted(stand_in) as calls:
        hoistway.save_file(loaded, saved)
    # A write has 4 MiB, of all tensors that lie there.
    writes = -(-saved.stat().st_size // (4 * MIB))
    assert calls.copies == calls.events == calls.waits == writes
    assert calls.pins <= writes
    del loaded
    again = hoistway.load_file(saved, framework="raw")
    assert all(again[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_targets_of_a_load_are_copied_together(
    model: Path, tensors: dict[str, np.ndarray], stand_in: StandIn
) -> None:
    memory = hoistway.load_file(model, "cuda", framework="raw")
    targets = {name: Array(tensor.data_ptr, tensor.nbytes) for name, tensor in memory.items()}
    with (
        hoistway.open(model, device="cuda", framework="raw") as checkpoint,
        counted(stand_in) as calls,
    ):
        checkpoint.copy_into(targets)
    # How many at a time, is a matter of how fast they come.
    assert calls.copies == calls.events == calls.waits <= COUNT
    assert all(memory[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


@pytest.mark.parametrize("version", [12000, 12080, 13000])
def test_blocks_of_a_kv_store_are_copied_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DRIVER_VERSION", str(version))
    script = """
        import sys
        from pathlib import Path

        sys.path.insert(0, sys.argv[1])
        from conftest import StandIn
        from test_device_pieces import assert_blocks_are_copied_together

        assert_blocks_are_copied_together(Path(sys.argv[2]), StandIn(), int(sys.argv[3]))
    """
    done = run(script, Path(__file__).parent, tmp_path, version)
    assert done.returncode == 0, done.stderr


def assert_blocks_are_copied_together(folder: Path, stand_in: StandIn, version: int) -> None:
    """Blocks of 64 KiB at no regular distance: one copy, one event and one wait for each MiB."""
    count, size = 256, 64 << 10
    path = folder / "memory.safetensors"
    content = np.random.default_rng(0).integers(0, 256, 2 * count * size, np.uint8)
    hoistway.save_file({"memory": content}, path)
    memory = hoistway.load_file(path, "cuda", framework="raw")["memory"]
    places = random.Random(0).sample(range(2 * count), count)
    blocks = [Array(memory.data_ptr + place * size, size) for place in places]
    keys = [f"block {place}" for place in places]
    with kv.Store(folder / "store", **SMALL_STORE) as store:
        namespace = store.namespace(model="test")
        # A segment of 16 MiB ends within a MiB of blocks and headers.
        steps = count * size // MIB + 2
        for work in (namespace.store, namespace.load):
            before = {name: stand_in.count(f"calls.{name}") for name in (*COPIES, "cuMemcpyBatchAsync_v2")}
            with counted(stand_in) as calls:
                assert work(keys, blocks).wait(30).ok
            assert calls.events == calls.waits <= steps
            made = {name: stand_in.count(f"calls.{name}") - before[name] for name in before}
            batch = "cuMemcpyBatchAsync_v2" if version >= 13000 else "cuMemcpyBatchAsync"
            if version >= 12080:
                assert 0 < made[batch] <= sum(made.values()) <= steps, made
            else:
                assert made["cuMemcpyBatchAsync"] == made["cuMemcpyBatchAsync_v2"] == 0, made
        assert memory.tobytes() == content.tobytes()


@pytest.mark.parametrize("refusal", [801, 1])
def test_a_driver_that_refuses_several_copies_by_one_call_is_given_them_one_by_one(
    model: Path, tensors: dict[str, np.ndarray], stand_in: StandIn, refusal: int
) -> None:
    loaded = dict(hoistway.load_file(model, "cuda", framework="raw"))
    # In any order, so that they lie at no regular distance.
    names = random.Random(0).sample(sorted(loaded), COUNT)
    parts = {f"{number:04}": loaded[name] for number, name in enumerate(names)}
    stand_in.library.fake_cuda_configure(f"FAULTS=cuMemcpyBatchAsync:*={refusal}".encode())
    before = stand_in.count("calls.cuMemcpyBatchAsync")
    saved = model.with_name("saved.safetensors")
    hoistway.save_file(parts, saved)
    asked = stand_in.count("calls.cuMemcpyBatchAsync") - before
    # Threads may ask at the same time, but none does after the first answer.
    assert 0 < asked <= 16
    hoistway.save_file(parts, saved)
    assert stand_in.count("calls.cuMemcpyBatchAsync") == before + asked
    del loaded, parts
    again = hoistway.load_file(saved, framework="raw")
    assert all(
        again[f"{number:04}"].tobytes() == tensors[name].tobytes() for number, name in enumerate(names)
    )
