"""Saving, loading from bytes, and whole models: the drop-in beside the reference library."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import hoistway.compat.safetensors.flax
import hoistway.compat.safetensors.numpy
import hoistway.compat.safetensors.torch
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError
from test_safetensors_differential import compare, compares_interfaces, outcome, same

MINE, THEIRS = hoistway.compat.safetensors, safetensors
TORCH_TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
NUMPY_TYPES = [
    "f4", "f8", "f2", "i1", "u1", "i2", "i4", "i8", "u2", "u4", "u8", "?", "c8", ">f4", ">i2", ">u8",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
METADATA: list[dict[str, str] | None] = [None, {}, {"format": "pt"}, {"ключ": 'a"\n\\'}]

# Of no tensors and empty metadata the reference library makes a header that it cannot read itself.
METADATA_OF_NOTHING = [metadata for metadata in METADATA if metadata != {}]


def random_torch(generator: random.Random) -> dict[str, torch.Tensor]:
    tensors = {}
    for number in range(generator.randrange(5)):
        shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
        # Of pairs of elements there has to be a dimension to say how many.
        dtype = generator.choice(TORCH_TYPES[: None if shape else -1])
        count = int(np.prod(shape)) * dtype.itemsize
        data = torch.tensor([generator.randrange(2) for _ in range(count)], dtype=torch.uint8)
        tensors[generator.choice("abcdeé\"")+str(number)] = data.view(dtype).reshape(shape) if count else (
            torch.empty(0, dtype=dtype).reshape([*shape[:-1], 0] if shape else [0])
        )  # fmt: skip
    return tensors


def random_numpy(generator: random.Random) -> dict[str, np.ndarray]:
    tensors = {}
    for number in range(generator.randrange(5)):
        shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
        dtype = np.dtype(generator.choice(NUMPY_TYPES))
        tensors[f"t{number}"] = np.array(np.random.default_rng(number).integers(0, 99, shape)).astype(dtype)
    return tensors


def test_memory_that_is_gone_is_not_saved(tmp_path: Path) -> None:
    """What is wrong is found before anything reads the memory, also to put it in the order of files."""
    module = torch.nn.Linear(30, 30)
    module.weight.untyped_storage().resize_(40)
    transposed = torch.zeros(30, 30).T
    transposed.untyped_storage().resize_(40)
    array = np.zeros((30, 30), ">f4")
    view = array[1:].T
    array.resize((3, 3), refcheck=False)
    path = tmp_path / "m.safetensors"
    for save, gone in [
        (MINE.torch.save_file, {"weight": module.weight}),
        (MINE.torch.save_file, {"weight": transposed}),
        (MINE.numpy.save_file, {"weight": view}),
        (MINE.torch.save_model, module),
    ]:
        with pytest.raises(SafetensorError, match="tensor 'weight' cannot be saved") as caught:
            save(gone, path)
        assert isinstance(caught.value, ValueError)
        assert caught.value.tensor == "weight"
    assert not path.exists()


@compares_interfaces
def test_torch_bytes_are_the_same(tmp_path: Path) -> None:
    generator = random.Random(7)
    for round_number in range(300):
        tensors = random_torch(generator)
        metadata = generator.choice(METADATA if tensors else METADATA_OF_NOTHING)
        expected = THEIRS.torch.save(tensors, metadata)
        assert MINE.torch.save(tensors, metadata=metadata) == expected
        got, theirs = (outcome(m.torch.load, expected) for m in (MINE, THEIRS))
        compare(f"load of {expected!r}", got, theirs, "bytes" if isinstance(theirs.error, KeyError) else None)
        if round_number % 10 == 0:
            MINE.torch.save_file(tensors, tmp_path / "m", metadata)
            assert (tmp_path / "m").read_bytes() == expected
            assert same(MINE.torch.load_file(tmp_path / "m"), THEIRS.torch.load_file(tmp_path / "m"))


@compares_interfaces
def test_numpy_bytes_are_the_same(tmp_path: Path) -> None:
    generator = random.Random(8)
    for round_number in range(300):
        tensors = random_numpy(generator)
        metadata = generator.choice(METADATA if tensors else METADATA_OF_NOTHING)
        expected = THEIRS.numpy.save(tensors, metadata)
        assert MINE.numpy.save(tensors, metadata=metadata) == expected
        got, theirs = (outcome(m.numpy.load, expected) for m in (MINE, THEIRS))
        compare(f"load of {expected!r}", got, theirs, "bytes" if isinstance(theirs.error, KeyError) else None)
        if round_number % 10 == 0:
            MINE.numpy.save_file(tensors, str(tmp_path / "m"), metadata)
            assert (tmp_path / "m").read_bytes() == expected


def test_a_file_of_nothing() -> None:
    data = MINE.torch.save({}, {})
    assert THEIRS.torch.load(data) == MINE.torch.load(data) == {}


def test_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    tensors = {"a": jax.numpy.arange(6.0).reshape(2, 3), "b": jax.numpy.ones((2,), jax.numpy.bfloat16)}
    data = MINE.flax.save(tensors)
    assert data == THEIRS.numpy.save({name: np.asarray(array) for name, array in tensors.items()})
    MINE.flax.save_file(tensors, tmp_path / "m", {"format": "flax"})
    for loaded in (MINE.flax.load(data), MINE.flax.load_file(tmp_path / "m")):
        assert same(loaded, tensors)
    assert isinstance(tensors["a"], jax.Array), "saving changed the caller's dictionary"


SQUARE = torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        [SQUARE], None, {"a": 1}, {"a": np.zeros(2)}, {1: SQUARE}, {"a": SQUARE.t()}, {"a": SQUARE, "b": SQUARE},
        {"a": SQUARE[:3], "b": SQUARE[2:]}, {"a": SQUARE[:2], "b": SQUARE[2:]}, {"a": SQUARE.to_sparse()},
        {"a": SQUARE[0], "b": SQUARE}, {"a": torch.zeros(0), "b": torch.zeros(0)}, {"a": torch.nn.Parameter(SQUARE)},
        {"a": torch.empty(2, device="meta")}, {"a": torch.zeros(2, dtype=torch.complex128)}, {},
        {"a": SQUARE[:, :2], "b": SQUARE[:, 2:]}, {"a": SQUARE[::2]}, {"a": SQUARE[2:2]},
    ],
)  # fmt: skip
def test_what_torch_refuses(tensors: Any) -> None:
    got, expected = (outcome(m.torch.save, tensors) for m in (MINE, THEIRS))
    if isinstance(expected.error, KeyError):
        # A type that files cannot hold: here an error of both libraries instead.
        assert isinstance(got.error, SafetensorError)
    else:
        compare(f"save of {tensors}", got, expected)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, [1], "a", {"a": None}])
def test_metadata_is_text(metadata: Any, tmp_path: Path) -> None:
    path = tmp_path / "m"
    for library in (MINE, THEIRS):
        with pytest.raises(TypeError):
            library.torch.save({"a": SQUARE}, metadata)
        with pytest.raises(TypeError):
            library.numpy.save_file({"a": np.zeros(2)}, path, metadata)


@compares_interfaces
@pytest.mark.parametrize(
    "array", [np.array([None]), np.array(["x"]), np.zeros(2, complex), [1], np.float32(3), SQUARE,
              np.array(["2020"], "M8[D]"), np.zeros(2, [("x", "i4")]), np.zeros(2, np.longdouble)],
)  # fmt: skip
def test_what_numpy_refuses(array: Any) -> None:
    got, expected = (outcome(m.numpy.save, {"a": array}) for m in (MINE, THEIRS))
    compare(f"save of {array!r}", got, expected)


def test_arrays_that_are_not_contiguous_are_saved_as_they_are() -> None:
    array = np.arange(12.0).reshape(3, 4).T
    assert np.array_equal(MINE.numpy.load(MINE.numpy.save({"a": array}))["a"], array)


def test_where_a_file_cannot_be(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "m", tmp_path, b"m", 1):
        got, expected = (outcome(m.torch.save_file, {"a": SQUARE}, path) for m in (MINE, THEIRS))
        compare(f"save_file to {path!r}", got, expected)
    assert list(tmp_path.iterdir()) == []


class Tied(torch.nn.Module):
    """Two names for one layer."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2)
        self.b = self.a
        self.c = torch.nn.Linear(2, rows)


class Halves(torch.nn.Module):
    """Parameters that overlap, neither of which is all of their memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(4)
        self.left, self.right = torch.nn.Parameter(memory[:3]), torch.nn.Parameter(memory[1:])


class View(torch.nn.Module):
    """A parameter that is a part of a larger memory, which no other parameter has."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.whole = torch.nn.Linear(2, 2)
        self.part = torch.nn.Parameter(part, requires_grad=False)


class Turned(torch.nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(SQUARE.t())


@compares_interfaces
def test_models_are_saved_alike(tmp_path: Path) -> None:
    for model in (Tied(), Turned(), torch.nn.Linear(2, 2)):
        for metadata in (None, {"format": "pt"}, {"b.bias": "mine"}):
            MINE.torch.save_model(model, str(tmp_path / "mine"), metadata)
            THEIRS.torch.save_model(model, str(tmp_path / "theirs"), metadata and dict(metadata))
            mine, theirs = (safetensors.safe_open(tmp_path / name, "pt") for name in ("mine", "theirs"))
            assert mine.metadata() == theirs.metadata()
            assert same(mine.get_tensors(), theirs.get_tensors())
    for model in (Halves(), Turned()):
        got, expected = (
            outcome(m.torch.save_model, model, str(tmp_path / "m"), force_contiguous=False)
            for m in (MINE, THEIRS)
        )
        assert expected.error is not None
        compare(f"save_model of {model}", got, expected)


@pytest.mark.parametrize(
    ("part", "is_refused"),
    [
        (SQUARE[:2], True),
        (SQUARE[:, 1], True),
        (SQUARE[2:2], True),
        (SQUARE[:], False),
        (SQUARE[0].clone(), False),
    ],
)
def test_models_with_views_of_larger_memory(tmp_path: Path, part: torch.Tensor, is_refused: bool) -> None:
    path = tmp_path / "m"
    model = View(part)
    for library in (MINE, THEIRS):
        found = outcome(library.torch.save_model, model, str(path))
        assert isinstance(found.error, RuntimeError) == is_refused, (library, found)
        assert path.exists() != is_refused
        THEIRS.torch.save_file({"part": part.clone(memory_format=torch.contiguous_format)}, path)
        found = outcome(library.torch.load_model, model, str(path), strict=False)
        assert isinstance(found.error, RuntimeError) == is_refused, (library, found)
        path.unlink()


def loaded(library: Any, model: torch.nn.Module, path: Path, strict: bool) -> list[set[str]]:
    return [set(names) for names in library.torch.load_model(model, path, strict=strict)]


@compares_interfaces
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_models_are_loaded_alike(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "m"
    model = Tied()
    MINE.torch.save_model(model, path)
    other = Tied()
    assert MINE.torch.load_model(other, path, backend=backend) == (set(), [])
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    for wrong in (torch.nn.Linear(2, 2), Halves(), torch.nn.Sequential(Tied())):
        for strict in (True, False):
            got, expected = (outcome(loaded, m, wrong, path, strict) for m in (MINE, THEIRS))
            compare(f"load_model into {wrong}, strict={strict}", got, expected)
    with pytest.raises(RuntimeError, match="size mismatch"):
        MINE.torch.load_model(Tied(rows=4), path)


def test_threads_save_and_load_at_the_same_time(tmp_path: Path) -> None:
    tensors = {
        "1": torch.randn(5, 25),
        "2": torch.randn(300, 100, 2),
        "3": torch.tensor(768, dtype=torch.int32),
    }
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        path = tmp_path / str(number)
        try:
            start.wait(timeout=60)
            for _ in range(10):
                MINE.torch.save_file(tensors, path)
                assert same(dict(MINE.torch.load_file(path)), tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
