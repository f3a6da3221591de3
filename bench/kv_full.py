"""Measures the KV store as a cache is for its whole life: full, on space that the disk has had before.

Each case is a store that is filled once before the clock. Then processes store distinct blocks for some seconds, in
spans that reach 1, 2 and 4 times the capacity. Direct writes and reads of one file with the same lengths stand beside
them, and demand loads are timed alone and beside the stores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from host import HERE, machine
from kv_engines import BATCH, THREADS, touched

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Bytes of the blocks of a case, which come in turn.
SIZES: dict[str, tuple[int, ...]] = {
    "64 KiB": (64 * KIB,),
    "1 MiB": (MIB,),
    "8 MiB": (8 * MIB,),
    "mixed": (60 * KIB, MIB, 4 * MIB),
}
DURABILITIES = ("none", "batched")
SPANS = (1, 2, 4)
# Memory of each thread that stores.
MEMORY_BYTES = 32 * MIB
# A store that has not been filled after this many times the seconds of a span takes no blocks.
FILL_SPANS = 30
# Time after which each process knows what the others have stored.
FOLLOWED_SECONDS = 0.5


def opened(root: Path, capacity: int, durability: Any) -> Any:
    """A namespace of the store, and the store."""
    import hoistway.kv  # noqa: PLC0415

    store = hoistway.kv.Store(root, capacity=capacity, min_free=0, durability=durability)
    return store, store.namespace(model="benchmark", dtype="uint8", layout="opaque")


def batches_of(
    sizes: tuple[int, ...], prefix: str, memory: memoryview
) -> Iterator[tuple[list[str], list[memoryview]]]:
    """Keys that were never stored, and memory for each, some at a time."""
    number = 0
    while True:
        keys: list[str] = []
        views: list[memoryview] = []
        offset = 0
        for _ in range(BATCH):
            size = sizes[number % len(sizes)]
            if views and offset + size > len(memory):
                break
            keys.append(f"{prefix}/{number}")
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


class Stored:
    """What the threads of a process have stored, and what was refused."""

    def __init__(self) -> None:
        self.bytes = 0
        self.refused: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, statuses: list[str], views: list[memoryview]) -> None:
        """Counts the blocks of one request."""
        with self._lock:
            for status, view in zip(statuses, views, strict=True):
                if status == "ok":
                    self.bytes += len(view)
                else:
                    self.refused[status] += 1


def store_some(case: Case, process: int, spans: list[int], together: Any, out: Any) -> None:
    """Stores until each span's bytes are accepted or its time is over, and says what was accepted in what time."""
    store, blocks = opened(case.root, case.capacity, case.durability)
    memories = [touched(MEMORY_BYTES) for _ in range(THREADS)]
    batches = [
        batches_of(SIZES[case.sizes], f"{process}/{thread}", memory) for thread, memory in enumerate(memories)
    ]
    total = 0

    def work(thread: int, stored: Stored, most: int, deadline: float) -> None:
        while stored.bytes < most and time.perf_counter() < deadline:
            keys, views = next(batches[thread])
            stored.add(blocks.store(keys, views).wait().statuses, views)

    results = []
    for number, end_bytes in enumerate(spans):
        together.wait()
        stored, started = Stored(), time.perf_counter()
        deadline = started + case.seconds * (1 if number else FILL_SPANS)
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [
                pool.submit(work, thread, stored, end_bytes - total, deadline) for thread in range(THREADS)
            ]
            for job in jobs:
                job.result()
        store.flush()
        total += stored.bytes
        result = {
            "bytes": stored.bytes,
            "started": started,
            "ended": time.perf_counter(),
            "refused": stored.refused,
        }
        together.wait()
        time.sleep(FOLLOWED_SECONDS)
        results.append({**result, "payload_share": store.stats()["payload_bytes"] / case.capacity})
    together.wait()
    store.close()
    out.put(results)


def rate_of(results: tuple[dict[str, Any], ...]) -> float:
    """GB/s of all processes together, from the start of the first to the end of the last."""
    seconds = max(result["ended"] for result in results) - min(result["started"] for result in results)
    return float(sum(result["bytes"] for result in results) / seconds / 1e9)


def stores(case: Case) -> list[dict[str, Any]]:
    """The rates of all processes together: of the filling, and of each span after it."""
    shutil.rmtree(case.root, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    # A process that fails leaves the others waiting.
    longest = 2 * FILL_SPANS * case.seconds + 60
    out, together = context.Queue(), context.Barrier(case.processes, timeout=longest)
    ends = [case.capacity * (1 + span) // case.processes for span in (0, *SPANS)]
    workers = [
        context.Process(target=store_some, args=(case, number, ends, together, out))
        for number in range(case.processes)
    ]
    for worker in workers:
        worker.start()
    each = [out.get(timeout=(1 + len(SPANS)) * longest) for _ in workers]
    for worker in workers:
        worker.join()
    return [
        {
            "span": span,
            "gb_s": rate_of(results),
            "refused": dict(sum((result["refused"] for result in results), Counter[str]())),
            "payload_share": statistics.median(result["payload_share"] for result in results),
        }
        for span, results in zip(("fill", *SPANS), zip(*each, strict=True), strict=True)
    ]


def raw(
    program: Path, directory: Path, capacity: int, sizes: tuple[int, ...], seconds: float
) -> dict[str, Any]:
    """Direct writes and reads of one file that was written once, in GB/s, and the times of single reads."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "raw"
    path.unlink(missing_ok=True)
    lens = [str(-(-size // 4096) * 4096) for size in sizes]
    command = [str(program), str(path), str(capacity), str(seconds), *lens]
    rates: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return rates


def demand(program: Path, directory: Path, capacity: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds of single demand loads in a full store, alone and while blocks of these sizes are stored."""
    command = [str(program), str(directory), str(capacity), *map(str, sizes)]
    times: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return times


def table_of_stores(results: dict[str, Any]) -> str:
    """The rates of all cases as Markdown."""
    lines = [
        "| blocks | durability | processes | fill | 1× | 2× | 4× | 4×, of raw | 4×, of none | payload | refused |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    last = {
        (case["sizes"], case["durability"], case["processes"]): case["spans"][-1]["gb_s"]
        for case in results["stores"]
    }
    for case in results["stores"]:
        rates = " | ".join(f"{span['gb_s']:.2f}" for span in case["spans"])
        end = case["spans"][-1]
        plain = last.get((case["sizes"], "none", case["processes"]))
        of_none = f"{end['gb_s'] / plain:.2f}" if plain and case["durability"] != "none" else ""
        share = min(span["payload_share"] for span in case["spans"][1:])
        refused = sum((Counter(span["refused"]) for span in case["spans"]), Counter[str]())
        reasons = ", ".join(f"{count} {status}" for status, count in sorted(refused.items()))
        lines.append(
            f"| {case['sizes']} | {case['durability']} | {case['processes']} | {rates} | "
            f"{end['gb_s'] / results['raw'][case['sizes']]['write']:.2f} | {of_none} | {share:.2f} | {reasons or 0} |"
        )
    return "\n".join(lines)


def table_of_raw(results: dict[str, Any]) -> str:
    """What the drive takes and gives as Markdown."""
    lines = ["| blocks | first write | write | read |", "|---|---|---|---|"]
    lines += [
        f"| {size} | {rates['once']:.2f} | {rates['write']:.2f} | {rates['read']:.2f} |"
        for size, rates in results["raw"].items()
    ]
    return "\n".join(lines)


def table_of_demand(results: dict[str, Any]) -> str:
    """The times of demand loads as Markdown: of the store, and of the drive without it."""
    lines = [
        "| | beside | median, ms | p95, ms | p99, ms | p95, × alone | p99, × alone | stored meanwhile, GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line(what: str, beside: str, times: dict[str, float], alone: dict[str, float]) -> None:
        lines.append(
            f"| {what} | {beside} | {times['median_ms']:.2f} | {times['p95_ms']:.2f} | {times['p99_ms']:.2f} | "
            f"{times['p95_ms'] / alone['p95_ms']:.1f} | {times['p99_ms'] / alone['p99_ms']:.1f} | "
            f"{times['stored_gb_per_s']:.2f} |"
        )

    for name, both in results["demand"].items():
        line("store", "nothing", both["alone"], both["alone"])
        line("store", f"stores of {name}", both["beside stores"], both["alone"])
    drive = next(iter(results["raw"].values()))["demand"]
    for times in drive:
        beside = f"one write of {times['beside'] >> 10} KiB at a time" if times["beside"] else "nothing"
        line("drive", beside, times, drive[0])
    return "\n".join(lines)


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    host = results["host"]
    return f"""# A full KV store

Rates in GB/s of blocks that the store accepted. A store of {results["capacity"] / GIB:g} GiB is filled; then blocks
that it does not have are stored until 1, 2 and 4 times its capacity were stored after that, or for
{results["seconds"]:g} s each. Each process has eight threads with {MEMORY_BYTES >> 20} MiB in a request each, and
ends each span with a flush. *mixed* is blocks of 60 KiB, 1 MiB and 4 MiB in turn. *Payload* is the least part of the
capacity that bytes of blocks take at the end of a span, *refused* the blocks that were not stored, by their status.
Made by `just bench-kv-full`.

{host["processor"]}, {host["cores"]} cores, {host["memory_bytes"] >> 30} GiB; {host["kernel"]}, {host["file_system"]};
virtual: {host["virtual_machine"]}; {host["date"]}, commit {host["commit"]}.

## Stores

{table_of_stores(results)}

## The drive

Direct writes and reads of one file of the same size, from four threads with a ring each, which have 64 MiB in flight
together. As in the store, neighbouring blocks are joined into transfers of up to 1 MiB.

{table_of_raw(results)}

## Demand beside stores

From Rust: loads in demand of blocks of 64 KiB at random, one after the other, without and with a thread that stores in
the background as fast as the store takes it (`batched`, four requests of 8 MiB at a time). *Drive*: direct reads of
64 KiB of a file, one after the other, and beside them direct writes, of which one is in flight at any time.

{table_of_demand(results)}
"""


def bytes_of(text: str) -> int:
    """A number of bytes such as 4GiB."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def main() -> None:
    """Measures what the command line says, and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the drive to measure; its store is removed")
    parser.add_argument("--capacity", type=bytes_of, default=4 * GIB)
    parser.add_argument("--seconds", type=float, default=20, help="longest time of each span")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--durability", nargs="*", choices=DURABILITIES, default=list(DURABILITIES))
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 4])
    parser.add_argument(
        "--programs", type=Path, default=HERE.parent / "target/release/examples", help="with raw and latency"
    )
    parser.add_argument("--output", type=Path, help="directory for kv-full.json and kv-full.md")
    arguments = parser.parse_args()
    root, capacity, seconds = arguments.directory / "kv-full", arguments.capacity, arguments.seconds
    results: dict[str, Any] = {
        "host": machine(arguments.directory, ("hoistway",)),
        "capacity": capacity,
        "seconds": seconds,
        "stores": [],
        "raw": {},
    }
    for name in arguments.sizes:
        results["raw"][name] = raw(
            arguments.programs / "raw", arguments.directory, capacity, SIZES[name], seconds
        )
        for durability in arguments.durability:
            for processes in arguments.processes:
                spans = stores(Case(root, capacity, durability, name, processes, seconds))
                case = {"sizes": name, "durability": durability, "processes": processes, "spans": spans}
                results["stores"].append(case)
                print(json.dumps(case), file=sys.stderr)
    shutil.rmtree(root, ignore_errors=True)
    results["demand"] = {
        name: demand(arguments.programs / "latency", arguments.directory, capacity, SIZES[name])
        for name in arguments.sizes
    }
    text = document(results)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "kv-full.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.output / "kv-full.md").write_text(text)


if __name__ == "__main__":
    main()
