"""What loaders delivered, as one number: names, shapes and every byte at its place."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BLOCK = 1 << 20
# Odd weights, so that no bit of a word is lost; another one for each word, so that moved words show.
WEIGHTS = np.random.default_rng(0).integers(0, 2**63, BLOCK // 8, np.uint64) * np.uint64(2) + np.uint64(1)


def of_tensors(tensors: Iterable[tuple[str, Iterable[int], np.ndarray]]) -> int:
    """The number for tensors as (name, shape, flat array of uint8), in any order."""
    total = 0
    for name, shape, data in tensors:
        key = zlib.crc32(f"{name} {list(shape)}".encode()) | 1
        total = (total + of_bytes(data) * key) % 2**64
    return total


def of_bytes(data: np.ndarray) -> int:
    """The number for some bytes."""
    value = len(data)
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        whole = len(block) // 8 * 8
        words = block[:whole]
        # Loaders that do not align tensors are right all the same.
        words = np.frombuffer(words.tobytes() if words.ctypes.data % 8 else words, np.uint64)
        tail = int.from_bytes(block[whole:].tobytes(), "little")
        value = (value * 31 + int(np.dot(words, WEIGHTS[: len(words)])) + tail) % 2**64
    return value


def of_files(paths: Iterable[str | Path]) -> int:
    """The number that a loader of these safetensors files must arrive at."""
    total = 0
    for path in paths:
        file = np.memmap(path, np.uint8, "r")
        header_end = 8 + int.from_bytes(file[:8].tobytes(), "little")
        header = json.loads(file[8:header_end].tobytes())
        header.pop("__metadata__", None)
        entries = (
            (name, entry["shape"], file[slice(*(header_end + place for place in entry["data_offsets"]))])
            for name, entry in header.items()
        )
        total = (total + of_tensors(entries)) % 2**64
    return total
