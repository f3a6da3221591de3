"""Small checkpoints for checks, written and read by hand; and files put into and out of the page cache."""

from __future__ import annotations

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cache import cached_part

BITS = {
    "F4": 4,
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
}
CHUNK = 8 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def sliced(self, index: tuple[slice, ...]) -> bytes:
        """The bytes of a part."""
        elements = np.frombuffer(self.data, f"V{BITS[self.dtype] // 8}").reshape(self.shape)
        return elements[index].tobytes()


def write(
    path: Path, tensors: dict[str, tuple[str, list[int]]], *, padding: int | None = None, seed: int = 0
) -> Path:
    """Writes a file of (dtype, shape) tensors of random bytes; BOOL ones of zeros and ones.

    Data begins at a multiple of 16 plus `padding`, or where the header ends.
    """
    generator = np.random.default_rng(seed)
    stored = {}
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
        high = 2 if dtype == "BOOL" else 256
        stored[name] = Stored(dtype, tuple(shape), generator.integers(0, high, size, np.uint8).tobytes())
    return write_stored(path, stored, padding=padding)


def write_stored(path: Path, tensors: dict[str, Stored], *, padding: int | None = None) -> Path:
    """Writes tensors whose bytes are known."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (0 if padding is None else (padding - 8 - len(text)) % 16)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data)
    return path


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """A file of (dtype, shape, bytes) tensors, none of which is on the drive."""
    header = {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def read(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by nothing but the format's description."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def make_warm(paths: list[str], part: float = 1.0) -> float | None:
    """Brings files into the page cache, or the first part of each; returns how much is there afterwards."""
    with ThreadPoolExecutor(min(len(paths), len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda path: _read(path, part), paths))
    return cached_part(paths)


def _read(path: str, part: float) -> None:
    with open(path, "rb", buffering=0) as file:
        left = int(os.path.getsize(path) * part)
        # Reading ahead, as programs do: the page cache then consists of large folios.
        buffer = bytearray(CHUNK)
        while left > 0 and (count := file.readinto(memoryview(buffer)[: min(left, CHUNK)])):
            left -= count


def make_cold(paths: list[str]) -> float | None:
    """Drops files from the page cache; returns how much is still there, `None` if the kernel does not say.

    Drops the whole cache only if that did not help: the next process would wait for its program's own pages.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    cached = cached_part(paths)
    if cached is None or cached > 0.001:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        except OSError:
            return cached
        cached = cached_part(paths)
    return cached
