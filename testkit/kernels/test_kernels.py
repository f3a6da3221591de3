"""The device kernels, compiled for the CPU: what they compute, and which bytes they touch.

Casts are compared with PyTorch, bit by bit; the shim ``host.cpp`` watches each access. This needs ``g++``, NumPy
and PyTorch, but no GPU.
"""

import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
DEVICE = HERE.parents[1] / "crates/hoistway-device/src"
PTX = DEVICE / "cuda/kernels/compute_60.ptx"
# What precedes and follows a kernel's name in its machine code, by the vendor's kind of file.
SYMBOLS = {"*.cubin": rb"\0\.text\.(hoistway_\w+)(?=\0)", "*.co": rb"\0(hoistway_\w+)\.kd(?=\0)"}
MACHINE_CODE = [
    (path, symbol) for kind, symbol in SYMBOLS.items() for path in sorted(DEVICE.glob(f"*/kernels/{kind}"))
]
# All images for NVIDIA's devices, in bytes: they are a part of every wheel.
MOST_BYTES = 1 << 20

# Blocks a segment and threads a block: one thread that does all, some that share unevenly, and more than items.
SHAPES = [(1, 1), (3, 7), (2, 128)]
# What the kernels may not touch holds this.
UNTOUCHED = 0xA5


class DType(NamedTuple):
    """An element type: that of PyTorch, that of its bits, and the bits that tell NaNs from other values."""

    torch: torch.dtype
    bits: type[np.unsignedinteger]
    infinity: int
    nan: int


# ``nan`` is the one that casts make; in f8e4m3, ``infinity`` is the largest number.
DTYPES = {
    "f32": DType(torch.float32, np.uint32, 0x7F800000, 0x7FC00000),
    "f16": DType(torch.float16, np.uint16, 0x7C00, 0x7E00),
    "bf16": DType(torch.bfloat16, np.uint16, 0x7F80, 0x7FC0),
    "f8e4m3": DType(torch.float8_e4m3fn, np.uint8, 0x7E, 0x7F),
    "f8e5m2": DType(torch.float8_e5m2, np.uint8, 0x7C, 0x7F),
}
CASTS = [
    *(("f32", to) for to in ("f16", "bf16")),
    *(("f16", to) for to in ("f32", "bf16")),
    *(("bf16", to) for to in ("f32", "f16")),
    *((source, to) for source in ("f8e4m3", "f8e5m2") for to in ("f32", "f16", "bf16")),
]


class Segment(ctypes.Structure):
    """The entry of a kernel's table."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("destination", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


class Outcome(ctypes.Structure):
    """What the shim watched."""

    _fields_ = (("strays", ctypes.c_uint64), ("stored_bytes", ctypes.c_uint64))


class Buffer:
    """Memory whose first byte is aligned as that of a GPU's allocation."""

    def __init__(self, size: int, fill: int = UNTOUCHED) -> None:
        raw = np.full(size + 256, fill, np.uint8)
        self.bytes = raw[-raw.ctypes.data % 256 :][:size]
        self.address = self.bytes.ctypes.data

    def put(self, offset: int, values: np.ndarray) -> None:
        """Writes the bytes of an array at an offset."""
        data = values.view(np.uint8)
        self.bytes[offset : offset + data.size] = data


class Kernels:
    """The kernels as a library for the CPU."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.run_kernel.restype = ctypes.c_bool

    def has(self, name: str) -> bool:
        """Whether there is a kernel of this name."""
        return self._run(name, [], (1, 1), 1, 1, 1) is not None

    def copy(self, segments: Sequence[tuple[int, int, int]], shape: tuple[int, int]) -> None:
        """Copies segments of so many bytes."""
        outcome = self._run("hoistway_copy", segments, shape, 1, 1, 4)
        self._assert_clean(outcome, sum(count for _, _, count in segments))

    def cast(
        self, source: str, to: str, segments: Sequence[tuple[int, int, int]], shape: tuple[int, int]
    ) -> None:
        """Casts segments of so many elements."""
        source_size, to_size = (np.dtype(DTYPES[name].bits).itemsize for name in (source, to))
        outcome = self._run(f"hoistway_cast_{source}_{to}", segments, shape, source_size, to_size, 1)
        self._assert_clean(outcome, sum(count for _, _, count in segments) * to_size)

    @staticmethod
    def _assert_clean(outcome: Outcome | None, stored_bytes: int) -> None:
        assert outcome is not None, "no such kernel"
        assert outcome.strays == 0, "accesses out of bounds, or not aligned to their size"
        assert outcome.stored_bytes == stored_bytes, "some bytes were stored twice, or never"

    def _run(
        self, name: str, segments: Sequence[tuple[int, int, int]], shape: tuple[int, int], *sizes: int
    ) -> Outcome | None:
        table = (Segment * len(segments))(*segments)
        outcome = Outcome()
        found = self._library.run_kernel(
            name.encode(), table, len(segments), *shape, *sizes, ctypes.byref(outcome)
        )
        return outcome if found else None


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Compiles the kernels; undefined behaviour in them ends the process."""
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(["g++", *flags, *checks, str(HERE / "host.cpp"), "-o", str(library)], check=True)
    return Kernels(library)


@pytest.mark.parametrize("script", ["compile_nvidia.py", "compile_amd.py"])
def test_images_belong_to_the_source(script: str) -> None:
    """Exit status 1 says that they do not; 2, that the compilers are not installed to compile them anew."""
    command = [sys.executable, str(HERE / script), "--check"]
    check = subprocess.run(command, check=False, capture_output=True, text=True)
    assert check.returncode in (0, 2), check.stdout


@pytest.mark.parametrize(("path", "symbol"), MACHINE_CODE, ids=lambda value: getattr(value, "stem", ""))
def test_each_image_has_every_kernel(path: Path, symbol: bytes) -> None:
    """By the names under which drivers look them up."""
    kernels = set(re.findall(symbol, path.read_bytes()))
    expected = {"hoistway_copy", *(f"hoistway_cast_{source}_{to}" for source, to in CASTS)}
    assert {name.decode() for name in kernels} == expected


def test_images_are_small() -> None:
    """What is carried for NVIDIA's devices."""
    assert sum(path.stat().st_size for path in PTX.parent.iterdir()) <= MOST_BYTES


def test_ptx_and_host_have_the_same_kernels(kernels: Kernels) -> None:
    """No kernel is looked up that only one of them has."""
    entries = set(re.findall(r"\.entry (\w+)", PTX.read_text()))
    assert entries == {"hoistway_copy", *(f"hoistway_cast_{source}_{to}" for source, to in CASTS)}
    assert all(kernels.has(name) for name in entries)
    assert not any(
        kernels.has(name) for name in ("", "hoistway_cop", "hoistway_copyx", "hoistway_cast_f16_f16")
    )


@pytest.mark.parametrize(("source", "to"), CASTS)
def test_casts_agree_with_torch(kernels: Kernels, source: str, to: str) -> None:
    """Every bit pattern, by each of the ways to load it."""
    values = _patterns(source)
    to_bits = DTYPES[to].bits
    # Aligned for whole words; for some of each size of access; and not even to an element.
    for number, misalignment in enumerate((0, 8, 4, 2, 1)):
        memory = Buffer(values.nbytes + 16)
        memory.put(misalignment, values)
        result = Buffer(values.size * to_bits().itemsize)
        segment = (memory.address + misalignment, result.address, values.size)
        kernels.cast(source, to, [segment], SHAPES[number % len(SHAPES)])
        _assert_same(source, to, values, result.bytes.view(to_bits))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("source", "to"), CASTS)
def test_casts_of_any_place_and_length(
    kernels: Kernels, source: str, to: str, shape: tuple[int, int]
) -> None:
    """Whatever lies before, within and after the whole words, and nothing around the destination."""
    size, to_size = (DTYPES[name].bits().itemsize for name in (source, to))
    values = np.random.default_rng(0).permutation(_patterns(source))[:70]
    lengths = [*range(20), 33, 70]
    places = [
        (misalignment, element * to_size, length)
        for misalignment in range(17)
        for element in range(16 // to_size)
        for length in lengths
    ]
    room = 128 + 70 * max(size, to_size)
    memory, result = Buffer(room * len(places)), Buffer(room * len(places))
    expected = _cast_by_torch(source, to, values).view(np.uint8)
    untouched = result.bytes.copy()
    segments = []
    for number, (misalignment, offset, length) in enumerate(places):
        at, to_at = number * room + misalignment, number * room + 32 + offset
        memory.put(at, values[:length])
        untouched[to_at : to_at + length * to_size] = expected[: length * to_size]
        segments.append((memory.address + at, result.address + to_at, length))
    kernels.cast(source, to, segments, shape)
    np.testing.assert_array_equal(result.bytes, untouched)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_any_place_and_length(kernels: Kernels, shape: tuple[int, int]) -> None:
    """Every misalignment of either side, and nothing around the destination."""
    room = 160
    lengths = range(101)
    memory = Buffer(room * len(lengths))
    memory.bytes[:] = np.random.default_rng(0).integers(0, 256, memory.bytes.size, np.uint8)
    for misalignment in range(17):
        for offset in range(17):
            result = Buffer(room * len(lengths))
            expected = result.bytes.copy()
            segments = []
            for length in lengths:
                at, to_at = length * room + misalignment, length * room + 32 + offset
                expected[to_at : to_at + length] = memory.bytes[at : at + length]
                segments.append((memory.address + at, result.address + to_at, length))
            kernels.copy(segments, shape)
            np.testing.assert_array_equal(result.bytes, expected)


@pytest.mark.parametrize("misalignment", [0, 4, 8, 1, 2, 3, 15])
def test_long_copies(kernels: Kernels, misalignment: int) -> None:
    """Long enough that threads take several words at once, many times over."""
    length = (1 << 20) + 13
    memory, result = Buffer(length + 64), Buffer(length + 64)
    memory.bytes[:] = np.random.default_rng(0).integers(0, 256, memory.bytes.size, np.uint8)
    for offset, shape in zip((32, 35), ((2, 32), (5, 96)), strict=True):
        result.bytes[:] = UNTOUCHED
        expected = result.bytes.copy()
        expected[offset : offset + length] = memory.bytes[misalignment : misalignment + length]
        kernels.copy([(memory.address + misalignment, result.address + offset, length)], shape)
        np.testing.assert_array_equal(result.bytes, expected)


def _patterns(name: str) -> np.ndarray:
    """All bits that a type of 8 or 16 can have; of f32, those where casts decide, in every exponent."""
    bits = DTYPES[name].bits
    if bits is not np.uint32:
        return np.arange(1 << 8 * bits().itemsize, dtype=np.uint32).astype(bits)
    # Ties and their neighbours wherever the cast may cut: f16 keeps 10 bits and fewer when subnormal, bf16 keeps 7.
    random = np.random.default_rng(0)
    fractions = [0, 1, 2, 0x400000, 0x3FFFFF, 0x7FFFFE, 0x7FFFFF, *random.integers(0, 1 << 23, 800)]
    for cut in range(1, 24):
        kept = 23 - cut
        for above in {0, 1, 2, 3, (1 << kept) - 2, (1 << kept) - 1, *random.integers(0, 1 << kept, 12)}:
            fractions += [((above << cut) + (1 << (cut - 1)) + near) & 0x7FFFFF for near in (-1, 0, 1)]
    signed_exponents = np.arange(1 << 9, dtype=np.uint32) << 23
    return (signed_exponents[:, None] | np.unique(np.array(fractions, np.uint32))).ravel()


def _cast_by_torch(source: str, to: str, values: np.ndarray) -> np.ndarray:
    """The bits of what PyTorch makes of bits; NaNs as the kernels make them."""
    kind, target = DTYPES[source], DTYPES[to]
    tensor = torch.from_numpy(values.copy()).view(kind.torch).to(target.torch)
    bits = tensor.view(_torch_bits(target)).numpy().copy()
    is_nan = _is_nan(source, values)
    np.testing.assert_array_equal(_is_nan(to, bits), is_nan)
    sign = (values >> (8 * values.itemsize - 1)).astype(target.bits) << (8 * bits.itemsize - 1)
    return np.where(is_nan, sign | target.bits(target.nan), bits).astype(target.bits)


def _torch_bits(kind: DType) -> torch.dtype:
    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[kind.bits().itemsize]


def _is_nan(name: str, values: np.ndarray) -> np.ndarray:
    kind = DTYPES[name]
    magnitude_mask = (1 << (8 * values.itemsize - 1)) - 1
    return (values & kind.bits(magnitude_mask)) > kind.infinity


def _assert_same(source: str, to: str, values: np.ndarray, result: np.ndarray) -> None:
    expected = _cast_by_torch(source, to, values)
    differs = np.flatnonzero(result != expected)
    first = [f"{values[i]:#x} became {result[i]:#x}, not {expected[i]:#x}" for i in differs[:5]]
    assert not differs.size, f"{differs.size} of {values.size}: {', '.join(first)}"
