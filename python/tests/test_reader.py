"""Reads of tensors on request."""

from __future__ import annotations

import os
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import write_model
from hoistway.errors import (
    CancelledError,
    ForkedError,
    OptionError,
    SliceError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    WaitTimeoutError,
)
from write import File, Tensor


@pytest.fixture
def reader(model: Path) -> hoistway.Reader:
    return hoistway.Reader(model, framework="numpy")


@pytest.fixture
def expected(model: Path) -> dict[str, np.ndarray]:
    return hoistway.load_file(model, framework="numpy")


def test_tensors_are_read_as_they_are(reader, expected) -> None:
    names = ["scalar", "layers.0.weight", "empty", "ids"]
    tensors = reader.read(names)
    assert list(tensors) == names
    for name in names:
        assert tensors[name].dtype == expected[name].dtype
        assert tensors[name].shape == expected[name].shape
        assert tensors[name].tobytes() == expected[name].tobytes()
    assert reader.read("flags")["flags"].tobytes() == expected["flags"].tobytes()


@pytest.mark.parametrize("index", [slice(3, 9), slice(0, 0), slice(None), 7, -1, (slice(2, 4), slice(None))])
def test_ranges_of_rows_are_read(reader, expected, index) -> None:
    found = reader.read(["layers.1.weight"], slices={"layers.1.weight": index})["layers.1.weight"]
    whole = expected["layers.1.weight"][index]
    assert found.shape == whole.shape
    assert found.tobytes() == whole.tobytes()


def test_a_range_reads_its_own_bytes(reader) -> None:
    reading = reader.submit(["embed"], slices={"embed": slice(10, 20)})
    reading.wait()
    assert reading.report()["delivered_bytes"] == reading.progress()[1] == 10 * 64 * 4


def test_steps_take_no_parts_of_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(File((), [Tensor("q", [4, 64], "Q8_0", data=bytes(4 * 68))]).to_bytes())
    for framework in ("numpy", "raw"):
        reader = hoistway.Reader(path, framework=framework)
        with pytest.raises(SliceError, match="its elements lie in blocks of 32"):
            reader.read("q", slices={"q": (slice(None), slice(None, None, 2))})
    with hoistway.Reader(path, framework="numpy") as reader:
        assert reader.read("q", slices={"q": slice(None, None, 2)})["q"].shape == (2, 68)


def test_what_is_read_outlives_the_reader(model: Path, expected) -> None:
    names = list(expected)
    assert list(hoistway.Reader(model, framework="numpy").submit(names).wait()) == names
    with hoistway.Reader(model, framework="numpy", in_flight=1) as reader:
        later = reader.prefetch(names)
    assert later.wait()["embed"].tobytes() == expected["embed"].tobytes()


def test_a_tensor_that_cannot_be_converted_costs_no_other(tmp_path: Path) -> None:
    tensors = {"a": ("F32", [4]), "b": ("F6_E2M3", [4]), "c": ("U8", [4])}
    path = write_model(tmp_path / "model.safetensors", tensors)
    reading = hoistway.Reader(path, framework="torch").submit(list(tensors))
    for _ in range(2):
        with pytest.raises(UnsupportedDtypeError, match="F6_E2M3"):
            reading.wait()
    found = [next(reading)[0]]
    with pytest.raises(UnsupportedDtypeError, match="F6_E2M3"):
        next(reading)
    assert [*found, *(name for name, _ in reading)] == ["a", "c"]


def test_waits_at_one_time_hand_each_tensor_out_once(reader) -> None:
    reading = reader.prefetch(["embed", "ids"])
    convert, others = reading._convert, []

    def meanwhile(tensors, converted) -> None:
        reading._convert = convert
        others.append(reading.wait())
        convert(tensors, converted)

    reading._convert = meanwhile
    assert sorted(reading.wait()) == ["embed", "ids"]
    assert others == [{}]


def test_raw_tensors_are_not_indexed(model: Path) -> None:
    for index in (0, slice(None, None, 2)):
        reader = hoistway.Reader(model, framework="raw")
        with pytest.raises(OptionError, match="'raw' takes slices of step 1"):
            reader.submit(["embed"], slices={"embed": index})
        with hoistway.open(model, framework="raw") as checkpoint:
            with pytest.raises(OptionError, match="'raw' takes slices of step 1"):
                checkpoint.load(slices={"embed": index})
            assert checkpoint.report is None


def test_slices_of_other_dimensions_are_refused(reader) -> None:
    with pytest.raises(SliceError, match="first dimension"):
        reader.read(["embed"], slices={"embed": (slice(None), slice(0, 2))})
    with pytest.raises(SliceError, match="'ids'"):
        reader.read(["embed"], slices={"ids": slice(0, 1)})


def test_what_is_prefetched_is_handed_out_once(reader, expected) -> None:
    reading = reader.prefetch(["embed", "ids", "flags"])
    seen = dict(reading)
    assert sorted(seen) == ["embed", "flags", "ids"]
    assert all(seen[name].tobytes() == expected[name].tobytes() for name in seen)
    assert reading.done()
    assert reading.wait() == {}
    report = reading.report()
    assert report["failed"] == 0
    assert sum(carrier["tensor_bytes"] for carrier in report["carriers"]) == reading.progress()[0]


def test_reads_that_are_cancelled_say_so(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{number}": ("U8", [1 << 20]) for number in range(64)})
    reader = hoistway.Reader(
        path, framework="raw", route="threads", direct="always", chunk="4KiB", in_flight=1
    )
    reading = reader.prefetch([f"t{number}" for number in range(64)])
    with pytest.raises(WaitTimeoutError, match="of 64 reads"):
        reading.wait(timeout=0)
    reading.cancel()
    with pytest.raises(CancelledError):
        reading.wait()
    late = reader.prefetch([f"t{number}" for number in range(64)], begin_by=0)
    with pytest.raises(CancelledError):
        late.wait()


def test_tensors_outlive_the_reader_and_belong_to_the_caller(model, expected) -> None:
    with hoistway.Reader(hoistway.open(model), framework="numpy") as reader:
        tensor = reader.read(["embed"])["embed"]
    assert tensor.tobytes() == expected["embed"].tobytes()
    tensor[:] = 0
    with pytest.raises(ValueError, match="closed"):
        reader.read(["embed"])


def test_what_is_wrong_is_an_error(reader, model) -> None:
    with pytest.raises(TensorNotFoundError):
        reader.read(["nothing"])
    with pytest.raises(OptionError, match="priority"):
        reader.submit(["embed"], priority="urgent")
    with pytest.raises(OptionError, match="in_flight"):
        hoistway.Reader(model, framework="numpy", in_flight=0)
    with pytest.raises(TypeError, match="'depth'"):
        hoistway.Reader(model, framework="numpy", depth=3)


def test_a_file_that_shrinks_names_the_tensor(reader, model) -> None:
    with open(model, "r+b") as file:
        file.truncate(4096)
    with pytest.raises(hoistway.HoistwayError) as caught:
        reader.read(["layers.1.weight"])
    assert isinstance(caught.value, OSError | ValueError)
    assert caught.value.tensor == "layers.1.weight"
    assert Path(caught.value.path) == model


def test_a_child_of_fork_is_told(reader) -> None:
    reading = reader.prefetch(["embed"])
    child = os.fork()
    if child == 0:
        told = 0
        for call in (reading.wait, lambda: reader.read(["embed"])):
            try:
                call()
            except ForkedError:
                told += 1
        os._exit(7 if told == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(reading.wait()) == ["embed"]
