"""Tensors of torch, numpy and jax: types, sharing, and lifetimes."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import hoistway
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import BITS, run, same_bytes, write_model

TORCH = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [[2, 4], [], [0, 4]], ids=str)
def test_torch_types(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    if BITS[dtype] < 8 and not shape:
        pytest.skip("a packed scalar does not fill a byte")
    path = write_model(tmp_path / "m.safetensors", {"a": (dtype, shape)})
    tensor = hoistway.load_file(path)["a"]
    assert tensor.dtype == TORCH[dtype]
    assert list(tensor.shape) == ([*shape[:-1], shape[-1] // 2] if dtype == "F4" else shape)
    size = int(np.prod(shape)) * BITS[dtype] // 8
    if size:
        found = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found == path.read_bytes()[-size:]
    assert tensor.untyped_storage().nbytes() == size, "a tensor's storage is its own"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    {
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items(),
)
def test_numpy_types_of_ml_dtypes(tmp_path: Path, dtype: str, expected: type) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": (dtype, [2, 4])})
    array = hoistway.load_file(path, framework="numpy")["a"]
    assert array.dtype == expected
    assert array.shape == (2, 4)
    assert array.tobytes() == path.read_bytes()[-array.nbytes :]


@pytest.mark.parametrize(
    "dtype", ["BOOL", "U8", "I16", "F16", "BF16", "I32", "F32", "C64", "F8_E4M3", "F64", "I64"]
)
def test_jax_arrays(tmp_path: Path, dtype: str) -> None:
    path = write_model(
        tmp_path / "m.safetensors", {"a": (dtype, [2, 4]), "e": (dtype, [0]), "s": (dtype, [])}
    )
    with np.errstate(over="ignore"):
        ours = hoistway.load_file(path, framework="jax")
    arrays = hoistway.load_file(path, framework="numpy")
    for name, array in ours.items():
        assert isinstance(array, jax.Array)
        # 64-bit types follow jax's own setting: random bytes overflow its 32 bits.
        with np.errstate(over="ignore"):
            expected = np.asarray(jax.numpy.asarray(arrays[name]))
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert np.asarray(array).tobytes() == expected.tobytes()


def test_tensors_outlive_everything_else(model: Path) -> None:
    tensor = hoistway.load_file(model)["layers.0.weight"]
    array = hoistway.load_file(model, framework="numpy")["layers.0.weight"]
    shared = jax.dlpack.from_dlpack(hoistway.load_file(model, framework="raw")["embed"])
    expected = tensor.view(torch.uint8).numpy().tobytes(), np.asarray(shared).tobytes()
    view = tensor[100:110]
    del tensor
    gc.collect()
    for _ in range(5):
        hoistway.load_file(model)
    row = 1024 * 2
    assert view.view(torch.uint8).numpy().tobytes() == expected[0][100 * row : 110 * row]
    assert array.tobytes() == expected[0]
    assert np.asarray(shared).tobytes() == expected[1]


def test_tensors_are_private_writable_memory(model: Path) -> None:
    before = model.read_bytes()
    for options in ({}, {"route": "mapped"}):
        tensors = hoistway.load_file(model, **options)
        neighbour = tensors["layers.0.bias"].clone()
        tensors["layers.0.weight"].fill_(1)
        assert same_bytes(tensors["layers.0.bias"], neighbour)
        tensors["embed"] += 1
    assert model.read_bytes() == before


def test_dlpack_is_offered_as_the_standard_says(model: Path) -> None:
    raw = hoistway.load_file(model, framework="raw")["embed"]
    assert raw.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(raw)
    assert array.ctypes.data == raw.data_ptr
    assert torch.from_dlpack(raw).data_ptr() == raw.data_ptr
    unused = raw.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(unused)
    del unused
    with pytest.raises(BufferError):
        raw.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        raw.__dlpack__(copy=True)


def test_narrow_floats_cross_dlpack_only_to_those_who_know_them(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F8_E4M3", [4])})
    raw = hoistway.load_file(path, framework="raw")["a"]
    with pytest.raises(BufferError):
        raw.__dlpack__()
    raw.__dlpack__(max_version=(1, 1))


def test_tensors_can_be_saved_and_pickled(model: Path, tmp_path: Path) -> None:
    tensors = hoistway.load_file(model)
    torch.save(tensors["ids"], tmp_path / "ids.pt")
    assert (tmp_path / "ids.pt").stat().st_size < 10_000, "only the tensor is saved, not its neighbours"
    assert same_bytes(pickle.loads(pickle.dumps(tensors["ids"])), tensors["ids"])


def test_a_package_that_is_missing_is_told_before_anything_is_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [100]), "b": ("BF16", [100])})
    done = run(
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import hoistway
        path, read = sys.argv[1], []
        def load(**options):
            return hoistway.load_file(path, framework="numpy", progress=lambda done, _: read.append(done), **options)
        for start in (load, lambda: hoistway.iter_tensors(path, framework="numpy")):
            try:
                start()
            except ImportError as error:
                print(error, read)
        # What is left out needs nothing.
        print(list(load(exclude="b")), len(dict(hoistway.iter_tensors(path, framework="numpy", select="a"))))
        """,
        path,
    )
    told = "tensor 'b' is of type BF16: numpy needs ml_dtypes for that; install it, or choose another framework []"
    assert done.stdout.splitlines() == [told, told, "['a'] 1"], done.stderr


def test_readers_tell_of_a_missing_package_before_they_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [4, 25]), "b": ("BF16", [4, 25])})
    done = run(
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import hoistway
        from hoistway.experts import Rows
        path, reader = sys.argv[1], hoistway.Reader(sys.argv[1], framework="numpy")
        for start in (
            lambda: reader.prefetch(["a", "b"]),
            lambda: reader.read("b", slices={"b": slice(0, 1)}),
            lambda: hoistway.stream_layers(path, {"one": ["a", "b"]}, framework="numpy"),
            lambda: Rows(path, "b", framework="numpy"),
        ):
            try:
                start()
            except ImportError as error:
                print(error)
        print(list(reader.read("a")), len(Rows(path, "a", framework="numpy")))
        """,
        path,
    )
    told = (
        "tensor 'b' is of type BF16: numpy needs ml_dtypes for that; install it, or choose another framework"
    )
    assert done.stdout.splitlines() == [told] * 4 + ["['a'] 4"], done.stderr
