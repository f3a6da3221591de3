"""What the hardware allows: pinned copies to the device, copies from the cache to pinned memory, cuFile.

Nothing of hoistway runs here: plain calls of the driver by ctypes, and `preadv` on threads. What the drive gives to
direct reads is measured by the host benchmark's `limits.py`. A line of JSON each.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import threading
import time
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import limits as host

from gpu.driver import Driver
from gpu.process import answers, tell

SLOT = 4 << 20
SLOTS = 8
BUFFER = 1 << 30
# Reads of cuFile at a time.
DEPTH = 16


def pinned_copies(size: int, by_slots: bool) -> dict[str, Any]:
    """Copies to the device: from eight slots of 4 MiB one after the other, or from one large buffer."""
    driver = Driver()
    piece = SLOT if by_slots else min(BUFFER, size)
    sources = [driver.pinned(piece) for _ in range(SLOTS if by_slots else 1)]
    for source in sources:
        source[:] = 1
    # Where the model would not fit, the same memory again.
    target_size = max(piece, min(size, int(driver.memory()[0] * 0.8)) // piece * piece)
    target = driver.allocate(target_size)
    stream = driver.stream()
    for source in sources:
        stream.to_device(target, source)
    stream.synchronize()
    started = time.perf_counter()
    for number, start in enumerate(range(0, size, piece)):
        source = sources[number % len(sources)][: min(piece, size - start)]
        stream.to_device(target + start % target_size, source)
    stream.synchronize()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": size, "unit_bytes": piece}


def cache_to_pinned(paths: list[str], threads: int) -> dict[str, Any]:
    """Buffered reads of cached files into pinned slots, two for each thread."""
    driver = Driver()
    slots = threading.local()
    spare = [driver.pinned(2 * SLOT) for _ in range(threads)]
    for memory in spare:
        memory[:] = 1
    jobs = []
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        jobs += [(descriptor, start, min(SLOT, size - start)) for start in range(0, size, SLOT)]

    def read(job: tuple[int, int, int]) -> None:
        descriptor, start, size = job
        if not hasattr(slots, "memory"):
            slots.memory = spare.pop()
            slots.turn = 0
        slots.turn = 1 - slots.turn
        place = slots.turn * SLOT
        if os.preadv(descriptor, [slots.memory[place : place + size]], start) != size:
            raise OSError(f"short read at {start}")

    seconds = host.on_threads(threads, jobs, read)
    return {"seconds": seconds, "bytes": sum(job[2] for job in jobs), "threads": threads}


class _Description(ctypes.Structure):
    """`CUfileDescr_t`, for a file descriptor of Linux."""

    _fields_ = (("kind", c_int), ("descriptor", c_void_p), ("operations", c_void_p))


class _Status(ctypes.Structure):
    """`CUfileError_t`."""

    _fields_ = (("code", c_int), ("driver_code", c_int))


def drive_to_device(paths: list[str], library: str) -> dict[str, Any]:
    """Reads by cuFile into the device, 4 MiB each, on threads. Only where the path is known to be direct."""
    driver = Driver()
    cufile = ctypes.CDLL(library)
    for function, arguments in (
        ("cuFileDriverOpen", []),
        ("cuFileHandleRegister", [POINTER(c_void_p), POINTER(_Description)]),
        ("cuFileBufRegister", [c_uint64, c_size_t, c_int]),
    ):
        getattr(cufile, function).argtypes = arguments
        getattr(cufile, function).restype = _Status
    cufile.cuFileRead.argtypes = [c_void_p, c_uint64, c_size_t, c_int64, c_int64]
    cufile.cuFileRead.restype = ctypes.c_ssize_t
    _good("cuFileDriverOpen", cufile.cuFileDriverOpen())
    jobs = []
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        handle = c_void_p()
        described = _Description(1, descriptor, None)
        _good("cuFileHandleRegister", cufile.cuFileHandleRegister(byref(handle), byref(described)))
        size = os.fstat(descriptor).st_size
        jobs += [(handle, start, min(SLOT, size - start)) for start in range(0, size, SLOT)]
    target = driver.allocate(DEPTH * SLOT)
    _good("cuFileBufRegister", cufile.cuFileBufRegister(target, DEPTH * SLOT, 0))
    places = threading.local()
    spare = list(range(DEPTH))

    def read(job: tuple[c_void_p, int, int]) -> None:
        handle, start, size = job
        if not hasattr(places, "place"):
            driver.enter()
            places.place = spare.pop() * SLOT
        if cufile.cuFileRead(handle, target, size, start, places.place) != size:
            raise OSError(f"cuFileRead failed at {start}")

    seconds = host.on_threads(DEPTH, jobs, read)
    return {"seconds": seconds, "bytes": sum(job[2] for job in jobs), "depth": DEPTH}


def _good(function: str, status: _Status) -> None:
    if status.code != 0:
        raise OSError(f"{function}: {status.code}, of the driver {status.driver_code}")


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("limit", choices=("slots", "buffer", "cache", "gds", "drive"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--library", default="libcufile.so.0")
    parser.add_argument("paths", nargs="+")
    arguments = parser.parse_args()
    lines = answers()
    # A thread that fails says so on stderr alone; the figure would be of a part.
    failed: list[str] = []
    threading.excepthook = lambda thrown: failed.append(f"{thrown.exc_type.__name__}: {thrown.exc_value}")
    size = sum(os.path.getsize(path) for path in arguments.paths)
    try:
        if arguments.limit in ("slots", "buffer"):
            result = pinned_copies(size, by_slots=arguments.limit == "slots")
        elif arguments.limit == "cache":
            result = cache_to_pinned(arguments.paths, arguments.threads)
        elif arguments.limit == "drive":
            result = host.device(arguments.paths, arguments.threads)
        else:
            result = drive_to_device(arguments.paths, arguments.library)
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
    tell(lines, **({"error": failed[0]} if failed else result))


if __name__ == "__main__":
    main()
