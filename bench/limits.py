"""What the hardware allows: direct reads at several depths, and copies in memory. A line of JSON each.

Nothing of hoistway runs here: plain `preadv` and numpy copies on threads, which release the interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import threading
import time

import numpy as np

CHUNK = 4 << 20
BLOCK = 4096
MADV_POPULATE_WRITE = 23
# Memory beyond the model's that a load may take.
SLACK = 1 << 30


def memory(size: int, touched: bool) -> np.ndarray:
    """Anonymous memory of huge pages, aligned to 2 MiB, touched or not."""
    huge = 2 << 20
    mapping = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % huge
    if touched:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(whole.ctypes.data + start)
        if libc.madvise(address, ctypes.c_size_t(size), MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "madvise")
    return whole[start : start + size]


def on_threads(count: int, jobs: list, work) -> float:
    """Seconds that `count` threads take for all jobs."""
    position = iter(jobs)
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                job = next(position, None)
            if job is None:
                return
            work(job)

    threads = [threading.Thread(target=run) for _ in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def device(paths: list[str], depth: int) -> dict:
    """Direct reads of whole files, `depth` of 4 MiB in flight, into memory that was touched."""
    jobs = []
    offset = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        size = os.fstat(descriptor).st_size
        for start in range(0, size, CHUNK):
            jobs.append((descriptor, start, min(CHUNK, size - start), offset + start))
        offset += -(-size // CHUNK) * CHUNK
    target = memory(offset, touched=True)

    def read(job) -> None:
        descriptor, start, size, place = job
        # Direct reads take whole blocks; the last one of a file comes back short.
        if os.preadv(descriptor, [target[place : place + CHUNK]], start) != size:
            raise OSError(f"short read at {start}")

    seconds = on_threads(depth, jobs, read)
    return {"limit": "device", "depth": depth, "seconds": seconds, "bytes": sum(job[2] for job in jobs)}


def slices(path: str, size: int, depth: int, count: int) -> dict:
    """Direct reads of `size` bytes at random blocks of a file, `depth` in flight, into memory that was touched."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = -(-size // BLOCK) * BLOCK
    blocks = (os.fstat(descriptor).st_size - size) // BLOCK
    random = np.random.default_rng()
    jobs = [
        (place % depth, int(block) * BLOCK) for place, block in enumerate(random.integers(0, blocks, count))
    ]
    target = memory(depth * size, touched=True)

    def read(job) -> None:
        slot, start = job
        if os.preadv(descriptor, [target[slot * size : (slot + 1) * size]], start) != size:
            raise OSError(f"short read at {start}")

    seconds = on_threads(depth, jobs, read)
    return {"limit": "slices", "depth": depth, "seconds": seconds, "bytes": count * size}


def copy(size: int, threads: int, touched: bool) -> dict:
    """Copies in memory, from touched to touched or fresh pages."""
    source = memory(size, touched=True)
    source[:] = 1
    if not touched:
        refresh(size + SLACK)
    target = memory(size, touched=touched)
    jobs = list(range(0, size, CHUNK))
    seconds = on_threads(
        threads, jobs, lambda start: np.copyto(target[start : start + CHUNK], source[start : start + CHUNK])
    )
    kind = "memory touched" if touched else "memory fresh"
    return {"limit": kind, "threads": threads, "seconds": seconds, "bytes": size}


def refresh(size: int) -> None:
    """Touches memory and gives it back.

    A virtual machine may have to get pages from its host first, and returns what lies idle for a few seconds.
    The next process gets pages that the machine really has, as on hardware.
    """
    memory(size, touched=True)


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("device")
    command.add_argument("--depth", type=int, required=True)
    command.add_argument("paths", nargs="+")
    command = commands.add_parser("slices")
    command.add_argument("--bytes", type=int, required=True)
    command.add_argument("--depth", type=int, required=True)
    command.add_argument("--count", type=int, required=True)
    command.add_argument("path")
    command = commands.add_parser("copy")
    command.add_argument("--bytes", type=int, required=True)
    command.add_argument("--threads", type=int, required=True)
    command.add_argument("--touched", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "device":
        result = device(arguments.paths, arguments.depth)
    elif arguments.command == "slices":
        result = slices(arguments.path, arguments.bytes, arguments.depth, arguments.count)
    else:
        result = copy(arguments.bytes, arguments.threads, arguments.touched)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
