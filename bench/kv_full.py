"""Measures the KV store as a cache is for its whole life: full, on space that the disk has had before.

Each case is a store that is filled once before the clock. Then processes store distinct blocks for some seconds, in
spans that reach 1, 2 and 4 times the capacity, raw direct writes and reads of the same sizes stand beside them, and
demand loads are timed alone and beside the stores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from host import machine
from kv_engines import BATCH, THREADS, touched

KIB, MIB = 1 << 10, 1 << 20
# Bytes of the blocks of a case, which come in turn.
SIZES: dict[str, tuple[int, ...]] = {
    "64 KiB": (64 * KIB,),
    "1 MiB": (MIB,),
    "8 MiB": (8 * MIB,),
    "mixed": (60 * KIB, MIB, 4 * MIB),
}
SPANS = (1, 2, 4)
# What demand loads: few blocks, so that they stay.
HOT_BLOCKS, HOT_BYTES = 64, 64 * KIB


def opened(root: Path, capacity: int, durability: str) -> Any:
    """A namespace of the store, and the store."""
    import hoistway.kv  # noqa: PLC0415

    store = hoistway.kv.Store(root, capacity=capacity, min_free=0, durability=durability)
    return store, store.namespace(model="benchmark", dtype="uint8", layout="opaque")


def batches_of(
    sizes: tuple[int, ...], process: int, first: int, memory: memoryview
) -> Iterator[tuple[list[str], list[memoryview]]]:
    """Keys that were never stored, and memory for each, some at a time."""
    number = first
    while True:
        keys: list[str] = []
        views: list[memoryview] = []
        offset = 0
        for _ in range(BATCH):
            size = sizes[number % len(sizes)]
            if views and offset + size > len(memory):
                break
            keys.append(f"{process}/{number}")
            views.append(memory[offset : offset + size])
            offset, number = offset + size, number + 1
        yield keys, views


class Case(NamedTuple):
    """What processes store, and where."""

    root: Path
    capacity: int
    durability: str
    sizes: str
    processes: int
    seconds: float


def store_some(case: Case, process: int, spans: list[int], out: Any) -> None:
    """Stores until each span's bytes are written or its time is over, and says how fast that went."""
    store, blocks = opened(case.root, case.capacity, case.durability)
    memories = [touched(32 * MIB) for _ in range(THREADS)]
    sizes, lock, written = SIZES[case.sizes], threading.Lock(), 0

    def work(thread: int, stop_bytes: int, deadline: float) -> int:
        nonlocal written
        refused = 0
        batches = batches_of(sizes, process * THREADS + thread, written, memories[thread])
        while time.perf_counter() < deadline:
            with lock:
                if written >= stop_bytes:
                    break
            keys, views = next(batches)
            completion = blocks.store(keys, views).wait()
            refused += sum(status != "ok" for status in completion.statuses)
            with lock:
                written += sum(map(len, views))
        return refused

    results = []
    for number, stop_bytes in enumerate(spans):
        before, started = written, time.perf_counter()
        # The first one fills the store, however long that takes.
        deadline = started + case.seconds if number else float("inf")
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(work, thread, stop_bytes, deadline) for thread in range(THREADS)]
            refused = sum(job.result() for job in jobs)
        store.flush()
        took = time.perf_counter() - started
        stats = store.stats()
        results.append(
            {
                "gb_s": (written - before) / took / 1e9,
                "refused": refused,
                "payload_share": stats["payload_bytes"] / case.capacity,
            }
        )
    store.close()
    out.put(results)


def stores(case: Case) -> list[dict[str, Any]]:
    """The rates of all processes together: of the filling, and of each span after it."""
    shutil.rmtree(case.root, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ends = [case.capacity * (1 + span) // case.processes for span in (0, *SPANS)]
    workers = [
        context.Process(target=store_some, args=(case, number, ends, out)) for number in range(case.processes)
    ]
    for worker in workers:
        worker.start()
    each = [out.get() for _ in workers]
    for worker in workers:
        worker.join()
    return [
        {
            "span": span,
            "gb_s": sum(result["gb_s"] for result in results),
            "refused": sum(result["refused"] for result in results),
            "payload_share": max(result["payload_share"] for result in results),
        }
        for span, results in zip(("fill", *SPANS), zip(*each, strict=True), strict=True)
    ]


def raw(root: Path, capacity: int, size: int, seconds: float) -> dict[str, float]:
    """Direct writes and reads of one file that was written once."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / "raw"
    file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CREAT, 0o600)
    os.posix_fallocate(file, 0, capacity)
    memory = touched(size)
    count = capacity // size

    def run(transfer: Any, deadline: float, thread: int) -> int:
        moved, number = 0, thread
        while time.perf_counter() < deadline:
            moved += transfer(file, [memory], number % count * size)
            number += THREADS
        return moved

    rates = {}
    for what, transfer in (("once", os.pwritev), ("write", os.pwritev), ("read", os.preadv)):
        started = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(run, transfer, started + seconds, thread) for thread in range(THREADS)]
            moved = sum(job.result() for job in jobs)
        rates[what] = moved / (time.perf_counter() - started) / 1e9
    os.close(file)
    path.unlink()
    return rates


def demand(root: Path, capacity: int, name: str | None, seconds: float) -> dict[str, float]:
    """Milliseconds of demand loads of hot blocks, while blocks of these sizes are stored, or none."""
    shutil.rmtree(root, ignore_errors=True)
    store, blocks = opened(root, capacity, "batched")
    memory, hot = touched(HOT_BYTES), [f"hot {number}" for number in range(HOT_BLOCKS)]
    for key in hot:
        blocks.store([key], [memory]).wait()
    done = threading.Event()

    def fill(thread: int) -> None:
        own = touched(32 * MIB)
        for keys, views in batches_of(SIZES[name or ""], thread, 0, own):
            blocks.store(keys, views).wait()
            if done.is_set():
                return

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(2 if name else 0)]
    for thread in threads:
        thread.start()
    times, number, end = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        blocks.load([hot[number % HOT_BLOCKS]], [memory]).wait()
        times.append((time.perf_counter() - started) * 1e3)
        number += 1
    done.set()
    for thread in threads:
        thread.join()
    store.close()
    cuts = statistics.quantiles(times, n=100)
    return {"median": statistics.median(times), "p95": cuts[94], "p99": cuts[98]}


def table(results: dict[str, Any]) -> str:
    """All cases as Markdown."""
    lines = [
        "| blocks | durability | processes | 1× | 2× | 4× | payload | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in results["stores"]:
        rates = " | ".join(f"{span['gb_s']:.2f}" for span in case["spans"][1:])
        last = case["spans"][-1]
        lines.append(
            f"| {case['sizes']} | {case['durability']} | {case['processes']} | {rates} | "
            f"{last['payload_share']:.2f} | {sum(span['refused'] for span in case['spans'])} |"
        )
    lines += ["", "| raw, 8 threads | write | read |", "|---|---|---|"]
    lines += [
        f"| {size} | {rates['write']:.2f} | {rates['read']:.2f} |" for size, rates in results["raw"].items()
    ]
    lines += ["", "| demand loads of 64 KiB, ms | median | p95 | p99 |", "|---|---|---|---|"]
    for beside, times in results["demand"].items():
        lines.append(f"| {beside} | {times['median']:.2f} | {times['p95']:.2f} | {times['p99']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the drive to measure; its store is removed")
    parser.add_argument("--capacity", type=int, default=4 << 30)
    parser.add_argument("--seconds", type=float, default=20, help="longest time of each span")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    root, capacity, seconds = arguments.directory / "kv-full", arguments.capacity, arguments.seconds
    results: dict[str, Any] = {"host": machine(arguments.directory, ("hoistway",)), "stores": [], "raw": {}}
    for name in arguments.sizes:
        results["raw"][name] = raw(arguments.directory, capacity, max(SIZES[name]) // 4096 * 4096, seconds)
        for durability in ("none", "batched"):
            for processes in arguments.processes:
                spans = stores(Case(root, capacity, durability, name, processes, seconds))
                case = {"sizes": name, "durability": durability, "processes": processes, "spans": spans}
                results["stores"].append(case)
                print(json.dumps(case), file=sys.stderr)
    besides = {"alone": None, **{f"beside stores of {name}": name for name in arguments.sizes}}
    results["demand"] = {beside: demand(root, capacity, name, seconds) for beside, name in besides.items()}
    shutil.rmtree(root, ignore_errors=True)
    print(table(results))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
