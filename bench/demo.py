"""Loads a file with safetensors and with hoistway in turn, from the drive and from the page cache.

For a first look. `just bench` measures with all peers, large models and the limits of the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hoistway
import safetensors.numpy

ROUNDS = 7


def drop(path: Path) -> None:
    """Takes the file out of the page cache, as far as the kernel does so without root."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_with_hoistway(path: Path) -> Any:
    """As arrays of numpy."""
    return hoistway.load_file(path, framework="numpy")


def seconds(load: Callable[[Path], Any], path: Path, is_cold: bool) -> float:
    """One load, until each tensor's bytes are in memory."""
    if is_cold:
        drop(path)
    else:
        path.read_bytes()
    begin = time.perf_counter()
    load(path)
    return time.perf_counter() - begin


def main() -> None:
    """Prints the medians of some rounds."""
    path = Path(sys.argv[1])
    loaders = {"safetensors": safetensors.numpy.load_file, "hoistway": load_with_hoistway}
    print(f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, medians of {ROUNDS} loads:")
    for label, is_cold in (("from the drive", True), ("from the page cache", False)):
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(ROUNDS):
            for name, load in loaders.items():
                times[name].append(seconds(load, path, is_cold))
        median = {name: statistics.median(all_times) for name, all_times in times.items()}
        print(
            f"  {label:20}"
            + "   ".join(f"{name} {median[name] * 1000:6.1f} ms" for name in loaders)
            + f"   ({median['safetensors'] / median['hoistway']:.1f} x)"
        )


if __name__ == "__main__":
    main()
