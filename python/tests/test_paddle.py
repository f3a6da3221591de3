"""Tensors of paddle, over DLPack, on the host."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.fastsafetensors as fst
import hoistway.compat.fastsafetensors.saver
import numpy as np
import pytest
import torch
from conftest import BITS, write_model
from hoistway import errors

paddle = pytest.importorskip("paddle", reason="paddlepaddle is not installed")

HAD = [
    "BOOL", "U8", "I8", "I16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2",
]  # fmt: skip
SHAPES: list[list[int]] = [[3, 4], [], [0, 5], [7]]


def raw(tensor: Any) -> bytes:
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    assert nbytes == 0 or tensor.is_contiguous()
    return ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else b""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {f"{dtype}.{number}": (dtype, shape) for dtype in HAD for number, shape in enumerate(SHAPES)}
    return write_model(tmp_path / "m.safetensors", tensors)


def assert_same(tensors: dict[str, Any], path: Path) -> None:
    """That tensors of paddle are what hoistway itself finds in the file."""
    expected = hoistway.load_file(path, framework="raw")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert isinstance(tensor, paddle.Tensor)
        assert (
            str(tensor.dtype).removeprefix("paddle.")
            == hoistway._frameworks.ELEMENT_TYPES[name.partition(".")[0]]
        )
        assert tuple(tensor.shape) == expected[name].shape, name
        assert raw(tensor) == expected[name].tobytes(), name


def test_tensors_of_all_types_that_paddle_has(model: Path) -> None:
    loaded = hoistway.load_file(model, framework="paddle")
    assert_same(loaded, model)
    assert loaded.report.tensor_bytes > 0
    assert_same(dict(hoistway.iter_tensors(model, framework="paddle")), model)
    assert_same(hoistway.load(model.read_bytes(), framework="paddle"), model)


def test_tensors_are_not_copied_and_outlive_the_load(model: Path) -> None:
    with hoistway.open(model, framework="raw") as checkpoint:
        native = checkpoint.load()
    tensor = paddle.utils.dlpack.from_dlpack(native["F32.0"])
    assert tensor.data_ptr() == native["F32.0"].data_ptr
    expected = raw(tensor)
    kept = hoistway.load_file(model, framework="paddle")["F32.0"]
    del native
    assert raw(kept) == raw(tensor) == expected


@pytest.mark.parametrize("dtype", sorted(set(BITS) - set(HAD)))
def test_types_that_paddle_lacks_are_refused(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"odd": (dtype, [8])})
    with pytest.raises(errors.UnsupportedDtypeError, match=f"no type for {dtype}, which tensor 'odd'"):
        hoistway.load_file(path, framework="paddle")
    loader = fst.SafeTensorsFileLoader(None, nogds=True, framework="paddle")
    loader.add_filenames({0: [str(path)]})
    with pytest.raises(errors.UnsupportedDtypeError, match="'odd'"):
        loader.copy_files_to_device()


def test_tensors_are_saved_as_they_are(model: Path, tmp_path: Path) -> None:
    loaded = hoistway.load_file(model, framework="paddle")
    hoistway.save_file(loaded, tmp_path / "again.safetensors")
    assert_same(hoistway.load_file(tmp_path / "again.safetensors", framework="paddle"), model)
    assert hoistway.load(hoistway.save({"a": loaded["F32.0"]}), framework="torch")["a"].shape == (3, 4)
    with pytest.raises(errors.OptionError, match="contiguous"):
        hoistway.save({"a": paddle.arange(6).reshape([2, 3]).t()})


def test_fastsafetensors_loads_for_paddle(model: Path) -> None:
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), "cpu", nogds=True, framework="paddle")
    loader.add_filenames({0: [str(model)]})
    buffer = loader.copy_files_to_device()
    assert_same({name: buffer.get_tensor(name) for name in loader.get_keys()}, model)
    wrapped = buffer.get_tensor_wrapped("BF16.0")
    assert (wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes()) == (fst.DType.BF16, [3, 4], 24)
    memory = bytearray(24)
    wrapped.copy_to_buffer(memoryview(memory))
    assert bytes(memory) == raw(wrapped.get_raw())
    assert buffer.get_tensor("F16.0", dtype=fst.DType.F32).dtype == paddle.float32
    part = raw(buffer.get_tensor("F8_E4M3.0"))
    rows = [part[start : start + 4] for start in range(0, 12, 4)]
    joined = buffer.get_multi_cols(["F8_E4M3.0", "F8_E4M3.0"], 1)
    assert joined.get_shape() == [3, 8]
    assert raw(joined.get_raw()) == b"".join(row * 2 for row in rows)
    with pytest.raises(errors.UnsupportedDtypeError, match="cannot be joined"):
        buffer.get_multi_cols(["F16.0", "F32.0"], 0)


def test_fastsafetensors_streams_for_paddle(model: Path) -> None:
    loader = fst.ParallelLoader(None, [str(model)], use_tqdm_on_load=False, nogds=True, framework="paddle")
    assert_same(dict(loader.iterate_weights()), model)
    loader.close()
    with fst.fastsafe_open(str(model), framework="paddle", nogds=True) as opened:
        assert (
            raw(opened.get_tensor("I32.0")) == hoistway.load_file(model, framework="raw")["I32.0"].tobytes()
        )


def test_fastsafetensors_saves_for_paddle(model: Path, tmp_path: Path) -> None:
    loaded = hoistway.load_file(model, framework="paddle")
    for fill in (None, fst.saver.tensor_fill(framework="paddle")):
        saver = fst.ParallelSaver(num_shards=2, framework="paddle", fill=fill)
        paths = saver.save(loaded, str(tmp_path / "again"))
        assert_same(hoistway.load_file(paths, framework="paddle"), model)


def test_several_ranks_are_refused() -> None:
    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match="for a single rank"):
        fst.SafeTensorsFileLoader(Two(), framework="paddle")


def test_values_are_those_of_other_frameworks(tmp_path: Path) -> None:
    values = {"bf16": torch.tensor([1.5, -2.0]).bfloat16(), "f32": torch.tensor([[0.25, 3.0]])}
    hoistway.save_file(values, tmp_path / "m.safetensors")
    loaded = hoistway.load_file(tmp_path / "m.safetensors", framework="paddle")
    for name, tensor in values.items():
        assert np.array_equal(loaded[name].cast("float32").numpy(), tensor.float().numpy())
