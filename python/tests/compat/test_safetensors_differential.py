"""Thousands of random operations on the drop-in and on the reference library, which must agree."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hoistway.compat.safetensors as drop_in
import numpy as np
import pytest
import safetensors as reference
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch
from conftest import BITS, header_cases, write_model
from hoistway.compat.safetensors import torch as drop_in_torch

FRAMEWORKS = ("pt", "np")
BACKENDS = ("mmap", "pread")
LIBRARIES = (drop_in, reference)
# The drop-in has the interface of this version, whichever is installed.
compares_interfaces = pytest.mark.skipif(
    tuple(map(int, reference.__version__.split(".")[:2])) < (0, 8),
    reason="compares with the interface of safetensors 0.8",
)
pytestmark = compares_interfaces
TORCH_ONLY = ("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")

# Where the two differ, and why. "Reference" is the package safetensors.
DIFFERENCES = {
    # Allowed by `compare`, where the reference fails and the drop-in does not.
    "reversed slice": "the reference crashes where a slice ends before it begins; here it is empty",
    "slice of nothing": "the reference refuses `...` and `:` of an empty dimension; here they are what they say",
    "narrow floats": "the reference has no arrays of numpy for them; here ml_dtypes has",
    "bytes": "the reference loads fewer types from bytes than from files; here it is the same",
    # Each with a test of its own.
    "duplicate": "the reference takes the last of two tensors of one name; here that is an error",
    "F4": "the reference cannot slice it; here it is sliced in the pairs that torch has",
    "layout": "the reference saves other values for arrays that are not contiguous; here they are saved as they are",
    "nothing": "of no tensors and empty metadata the reference makes a header that it cannot read; here it is one",
    "types": "the reference fails with KeyError for types that files cannot hold; here with UnsupportedDtypeError",
    "memory": "tensors of one file share memory in the reference; here each has its own",
    "index": "the reference takes any name; here one that ends in .json is an index, which is refused",
}


class Outcome(NamedTuple):
    """A value, or the kind of an error."""

    value: Any
    error: BaseException | None


def outcome(operation: Callable[..., Any], *arguments: Any, **keywords: Any) -> Outcome:
    """What an operation gives."""
    try:
        with warnings.catch_warnings():
            # Of torch, about indices that it will take differently one day.
            warnings.simplefilter("ignore")
            return Outcome(operation(*arguments, **keywords), None)
    except BaseException as error:
        # A panic of the reference library's is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return Outcome(None, error)
        raise


def same(mine: Any, theirs: Any) -> bool:
    """Whether two results have the same types, shapes and bits."""
    if isinstance(theirs, dict):
        return (
            isinstance(mine, dict)
            and mine.keys() == theirs.keys()
            and all(same(mine[key], value) for key, value in theirs.items())
        )
    if isinstance(theirs, torch.Tensor):
        return (
            isinstance(mine, torch.Tensor)
            and (mine.dtype, mine.shape, mine.device) == (theirs.dtype, theirs.shape, theirs.device)
            and bits(mine) == bits(theirs)
        )
    if hasattr(theirs, "dtype"):
        return (
            type(mine) is type(theirs)
            and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            and np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
        )
    return type(mine) is type(theirs) and mine == theirs


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def family(error: BaseException) -> type[BaseException]:
    """The kind of an error that callers of the reference library catch."""
    kinds = (
        reference.SafetensorError, FileNotFoundError, OSError, ImportError, KeyError, IndexError, OverflowError,
        TypeError, ValueError, AttributeError, SystemError, RuntimeError,
    )  # fmt: skip
    return next((kind for kind in kinds if isinstance(error, kind)), type(error))


def agree(mine: Outcome, theirs: Outcome) -> bool:
    if theirs.error is None or mine.error is None:
        return mine.error is theirs.error and same(mine.value, theirs.value)
    return isinstance(mine.error, family(theirs.error))


def compare(what: str, mine: Outcome, theirs: Outcome, allowed: str | None = None) -> str | None:
    """Fails unless both agree, or the difference is one of those that are listed; says which."""
    if agree(mine, theirs):
        return None
    is_handled = mine.error is None or isinstance(mine.error, reference.SafetensorError)
    if allowed is not None and theirs.error is not None and is_handled:
        assert allowed in DIFFERENCES
        return allowed
    pytest.fail(f"{what}\n  hoistway:  {mine!r:.600}\n  reference: {theirs!r:.600}")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of all types that both libraries know, of none to four dimensions, some empty; names of all kinds."""
    generator = random.Random(1)
    shapes = [[], [1], [7], [0], [3, 4], [4, 0, 2], [2, 3, 4], [5, 1, 2, 3], [64, 33]]
    tensors: dict[str, tuple[str, list[int]]] = {}
    for dtype in BITS:
        if dtype not in SUB_BYTE:
            for shape in generator.sample(shapes, 4):
                tensors[f"{dtype}.{'x'.join(map(str, shape))}"] = (dtype, shape)
    tensors |= {
        "a*": ("I8", [3]),
        "ab": ("I8", [2]),
        "[x]": ("U8", [2]),
        "": ("U8", [1]),
        'é\n"': ("U8", [4]),
    }
    path = tmp_path_factory.mktemp("differential") / "model.safetensors"
    return write_model(path, tensors, metadata={"format": "pt", "ключ": "значение"}, seed=3)


@pytest.fixture(scope="module")
def contents(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Types and shapes in the file."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return {name: (at["dtype"], at["shape"]) for name, at in header.items() if name != "__metadata__"}


class Indices:
    """Random indices, those that make sense and others."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def bound(self, size: int) -> Any:
        choices = [None, 0, size, self.random.randint(0, size), self.random.randint(-size - 2, size + 2)]
        return self.random.choice(choices)

    def item(self, size: int) -> Any:
        kind = self.random.random()
        if kind < 0.35:
            item = slice(self.bound(size), self.bound(size))
        elif kind < 0.5:
            item = slice(self.bound(size), self.bound(size), self.random.choice([None, 1, 2, 3, 7, 0, -1]))
        elif kind < 0.8:
            item = self.random.randint(-size, size - 1) if size else 0
        elif kind < 0.84:
            item = self.random.randint(-size - 3, size + 3)
        elif kind < 0.9:
            item = slice(None)
        else:
            item = self.random.choice(
                [None, True, False, "x", 1.0, [], [0], [0, -1], np.int64(0), np.array(0), torch.tensor(0),
                 torch.tensor([0]), np.array([0]), slice("a"), slice(1.0, 2), slice(np.int64(0), None), 1 << 70,
                 slice(0, 1 << 70), {}, range(1), [True]]
            )  # fmt: skip
        return item

    def index(self, shape: list[int]) -> Any:
        length = self.random.choice([len(shape), len(shape), self.random.randint(0, len(shape) + 1)])
        items = [self.item(size) for size in (*shape, 3)[:length]]
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 2])):
            items.insert(self.random.randint(0, len(items)), ...)
        return items[0] if len(items) == 1 and self.random.random() < 0.7 else tuple(items)


def is_reversed(index: Any) -> bool:
    """Whether a slice of an index ends before it begins."""
    items = index if isinstance(index, tuple) else (index,)
    bounds = [(item.start or 0, item.stop) for item in items if isinstance(item, slice)]
    numbers = [
        (start, stop) for start, stop in bounds if hasattr(start, "__index__") and hasattr(stop, "__index__")
    ]
    return any(start > stop for start, stop in numbers)


def allowed_slice(dtype: str, shape: list[int], index: Any, theirs: Outcome, framework: str) -> str | None:
    """Which difference a slice may show."""
    if framework != "pt" and dtype in TORCH_ONLY:
        return "narrow floats"
    if not isinstance(theirs.error, reference.SafetensorError) and is_reversed(index):
        return "reversed slice"
    return "slice of nothing" if 0 in shape and "index 0 out of bounds" in str(theirs.error) else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slices(file: Path, contents: dict[str, tuple[str, list[int]]], framework: str, backend: str) -> None:
    indices = Indices(FRAMEWORKS.index(framework) * 2 + BACKENDS.index(backend))
    mine = drop_in.safe_open(file, framework, backend=backend)
    theirs = reference.safe_open(file, framework, backend=backend)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        name, (dtype, shape) = indices.random.choice(list(contents.items()))
        index = indices.index(shape)
        a, b = mine.get_slice(name), theirs.get_slice(name)
        assert (a.get_shape(), a.get_dtype()) == (b.get_shape(), b.get_dtype())
        expected = outcome(b.__getitem__, index)
        got = outcome(a.__getitem__, index)
        allowed = allowed_slice(dtype, shape, index, expected, framework)
        seen[compare(f"{name}{shape}[{index}]", got, expected, allowed) or type(expected.error).__name__] += 1
    # Enough of each: values, and errors of several kinds.
    assert seen["NoneType"] > 300
    assert sum(seen.values()) - seen["NoneType"] > 200
    assert len(seen) > 3


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "flax"])
def test_whole_tensors(file: Path, contents: dict[str, tuple[str, list[int]]], framework: str) -> None:
    names = [*contents, "missing", "ab ", "*", 3, None]
    generator = random.Random(2)
    mine, theirs = (library.safe_open(file, framework) for library in (drop_in, reference))
    for name in generator.choices(names, k=100 if framework == "flax" else 600):
        allowed = "narrow floats" if contents.get(name, [""])[0] in TORCH_ONLY and framework != "pt" else None
        got, expected = (outcome(f.get_tensor, name) for f in (mine, theirs))
        compare(f"get_tensor({name!r})", got, expected, allowed)


def test_everything_else_that_a_file_says(file: Path) -> None:
    for framework in (*FRAMEWORKS, "flax"):
        with drop_in.safe_open(file, framework) as mine, reference.safe_open(file, framework) as theirs:
            assert mine.keys() == theirs.keys()
            assert mine.metadata() == theirs.metadata()
            assert sorted(mine.offset_keys()) == sorted(theirs.offset_keys())
            if framework == "pt":
                a, b = mine.get_tensors(), theirs.get_tensors()
                assert same(a, b)
        for name in ("keys", "offset_keys", "metadata", "get_tensors"):
            got, expected = (outcome(getattr(f, name)) for f in (mine, theirs))
            assert agree(got, expected)
            assert isinstance(got.error, reference.SafetensorError)
        for name in ("get_tensor", "get_slice"):
            got, expected = (outcome(getattr(f, name), "ab") for f in (mine, theirs))
            assert agree(got, expected)


def test_tensors_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"z": ("F32", [2]), "a": ("F32", [3]), "m": ("I8", [4])})
    for library in (drop_in, reference):
        with library.safe_open(path, "pt") as file:
            assert file.offset_keys() == list(file.get_tensors()) == ["z", "a", "m"]


DEVICES = (
    "cpu", "CPU", "cpu:0", "", "gpu", "meta", "disk", "cuda:x", "cuda:-1", "cuda:", "cuda:1:2", "cuda: 1", "mps:1",
    "xpu:x", "cuda:99999999999999999999", -1, 1.5, 1 << 70, None, torch.device("cpu"), torch.device("cuda:1"),
)  # fmt: skip


def names(library: Any, path: Any, framework: Any, device: Any, backend: Any) -> list[str]:
    return library.safe_open(path, framework, device, backend=backend).keys()


@pytest.mark.parametrize("framework", ["pt", "torch", "np", "numpy", "jax", "flax", "PT", "xx", "", None, 1])
@pytest.mark.parametrize("backend", ["mmap", "pread", "x", None])
def test_arguments(file: Path, framework: Any, backend: Any) -> None:
    for path in (
        file,
        str(file),
        file.parent,
        file / "x",
        file.parent / "none",
        str(file).encode(),
        3,
        None,
        "a\0b",
        "",
    ):
        for device in DEVICES:
            got, expected = (
                outcome(names, library, path, framework, device, backend) for library in LIBRARIES
            )
            compare(f"safe_open({path!r}, {framework!r}, {device!r}, backend={backend!r})", got, expected)


def test_device_of_a_framework_that_has_none(file: Path) -> None:
    for framework in ("np", "flax"):
        for device in ("cuda", "cuda:1", 0, True):
            got, expected = (outcome(library.safe_open, file, framework, device) for library in LIBRARIES)
            assert isinstance(expected.error, reference.SafetensorError)
            assert isinstance(got.error, reference.SafetensorError)


def mutations(data: bytes, generator: random.Random) -> Iterator[bytes]:
    """A file with something wrong, or something that might be."""
    length = struct.unpack("<Q", data[:8])[0]
    for _ in range(400):
        damaged = bytearray(data)
        kind = generator.random()
        if kind < 0.2:
            del damaged[generator.randrange(len(damaged)) :]
        elif kind < 0.3:
            damaged += bytes(generator.randint(1, 9))
        elif kind < 0.4:
            damaged[generator.randrange(8)] = generator.randrange(256)
        else:
            for _ in range(generator.choice([1, 1, 2])):
                damaged[8 + generator.randrange(length)] = generator.choice(b'0123456789-."{}[],: \x00\xff')
        yield bytes(damaged)


def check_files(files: list[bytes], directory: Path) -> Counter[str]:
    """Loads each with both, from a file and from bytes."""
    path = directory / "damaged.safetensors"
    seen: Counter[str] = Counter()
    for data in files:
        path.write_bytes(data)
        got, expected = (outcome(m.load_file, path) for m in (drop_in_torch, reference.torch))
        if "given twice" in str(got.error) and expected.error is None:
            assert isinstance(got.error, reference.SafetensorError)
            seen["duplicate"] += 1
            continue
        compare(f"load_file of {data[:300]!r}", got, expected)
        got, expected = (outcome(m.load, data) for m in (drop_in_torch, reference.torch))
        compare(
            f"load of {data[:300]!r}",
            got,
            expected,
            "bytes" if isinstance(expected.error, (KeyError, RuntimeError)) else None,
        )
        seen[type(expected.error).__name__] += 1
    return seen


def test_damaged_files(tmp_path: Path) -> None:
    tensors = {"a": ("F32", [2, 3]), "b": ("I8", [5]), "c": ("BF16", [0, 2]), "d": ("F8_E4M3", [])}
    data = write_model(tmp_path / "m", tensors, metadata={"k": "v"}).read_bytes()
    seen = check_files(list(mutations(data, random.Random(5))), tmp_path)
    assert seen["SafetensorError"] > 200
    assert seen["NoneType"] > 5


def test_the_corpus_of_headers(tmp_path: Path) -> None:
    files = [contents for _, contents, _ in header_cases() if len(contents) < 1 << 20]
    seen = check_files(files, tmp_path)
    assert seen["SafetensorError"] > 20
    assert seen["NoneType"] > 5
    assert seen["duplicate"] >= 1
