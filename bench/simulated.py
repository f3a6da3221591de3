"""Loads to a simulated GPU: the stand-in driver with the costs of an H100, and how often its functions are called.

Pinning, allocating, freeing and the one bus take the time that they take on an H100; copies move no bytes. Whatever
processors do takes the time that it takes on this machine. So the figures show what calls of the driver cost, which
of them are in the way of copies, and how near the device's part of a load is to its bus. They do not show how fast
processors copy to slots there: a machine with an H100 has many more and faster cores, so routes that copy look
worse here, and the share of a bus that they reach means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import model
from host import told_by

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "target" / "release" / "libfake_cuda.so"
BUS = 55.0
"""GB/s of the simulated bus."""
CALLS = (
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyHtoDAsync_v2",
)
SMALL_BYTES = 16 << 20
SMALL_THREADS = 8
SMALL_CALLS = (
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemAlloc_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuCtxPushCurrent_v2",
)
LOAD = """
import ctypes, json, sys, time
import hoistway
driver = ctypes.CDLL(sys.argv[1])
driver.fake_cuda_count.restype = ctypes.c_uint64
calls = sys.argv[3].split(",")
loads = []
for _ in range(2):
    before = [driver.fake_cuda_count(f"calls.{name}".encode()) for name in calls]
    threads = int(sys.argv[4]) or None
    loaded = hoistway.load_file(sys.argv[5:], "cuda:0", framework="raw", route=sys.argv[2], threads=threads)
    report = json.loads(loaded.report._json)
    after = [driver.fake_cuda_count(f"calls.{name}".encode()) for name in calls]
    loads.append({"report": report, "calls": [new - old for old, new in zip(before, after)]})
    del loaded
print(json.dumps(loads))
"""


def measure(
    library: Path, paths: list[str], route: str, calls: tuple[str, ...] = CALLS, threads: int = 0
) -> list[dict]:
    """The first and the second load of a fresh process."""
    environment = {
        **os.environ,
        "HOISTWAY_CUDA_DRIVER": str(library),
        "FAKE_CUDA_COSTS": "h100",
        "FAKE_CUDA_MOVES": "0",
        "FAKE_CUDA_POISON": "0",
        "FAKE_CUDA_MEMORY_MIB": "65536",
    }
    command = [sys.executable, "-c", LOAD, str(library), route, ",".join(calls), str(threads), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def rows(library: Path, paths: list[str], place: str, routes: tuple[str, ...], rounds: int) -> list[str]:
    """A line for each route, and for the first and the second load of a process."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
    lines = []
    for route in routes:
        samples = [measure(library, paths, route) for _ in range(rounds)]
        for number, name in enumerate(("first", "second")):
            loads = [sample[number] for sample in samples]
            size = loads[0]["report"]["tensor_bytes"]
            times = [load["report"]["time"] for load in loads]
            seconds, prepare, cpu = (
                statistics.median(time[f"{part}_seconds"] for time in times)
                for part in ("total", "prepare", "cpu")
            )
            bus = size / BUS / 1e9
            shares = ", ".join(
                f"{carrier['route']} {100 * carrier['tensor_bytes'] / size:.0f} %"
                for carrier in loads[0]["report"]["carriers"]
            )
            counts = " | ".join(str(count) for count in loads[0]["calls"])
            lines.append(
                f"| {place} | {route} | {name} | {1000 * seconds:.0f} | {bus / seconds:.2f} | {1000 * prepare:.1f} "
                f"| {cpu:.2f} | {shares} | {counts} |"
            )
    return lines


def small_rows(library: Path, rounds: int) -> list[str]:
    """Lines for both loads of one tensor, from the process whose second load took the median time."""
    path = HERE / "data" / "simulated" / "one.safetensors"
    if not path.exists():
        model.write_file(path, [("one", "U8", [SMALL_BYTES], SMALL_BYTES)], 0)
    path.read_bytes()
    samples = [measure(library, [str(path)], "auto", SMALL_CALLS, SMALL_THREADS) for _ in range(rounds)]
    samples.sort(key=lambda loads: loads[1]["report"]["time"]["total_seconds"])
    lines = []
    for name, load in zip(("first", "second"), samples[len(samples) // 2], strict=True):
        seconds = load["report"]["time"]["total_seconds"]
        counts = " | ".join(str(count) for count in load["calls"])
        lines.append(f"| {name} | {1000 * seconds:.1f} | {counts} |")
    return lines


def main() -> None:
    """Measures what the command line says, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "simulated.md")
    arguments = parser.parse_args()
    if not arguments.library.exists():
        raise SystemExit(f"{arguments.library} is missing: cargo build --release --package fake-cuda")
    lines = []
    for place, folder, routes in (
        ("page cache", HERE / "data" / "simulated", ("auto", "pinned-cache", "staged")),
        ("tmpfs", Path("/dev/shm/hoistway-simulated"), ("auto", "pinned-cache", "staged")),
    ):
        paths = [str(path) for path in model.transformer(folder, arguments.bytes, 1)]
        lines += rows(arguments.library, paths, place, routes, arguments.rounds)
        if place == "tmpfs":
            shutil.rmtree(folder)
    small = small_rows(arguments.library, arguments.rounds)
    columns = [
        "files",
        "route",
        "load",
        "simulated ms",
        "of the simulated bus",
        "prepare ms",
        "CPU s",
        "came by",
    ]
    columns += [f"`{name}`" for name in CALLS]
    text = f"""# Loads to a simulated GPU

**Simulated**: the stand-in driver with the costs of an H100 (`FAKE_CUDA_COSTS=h100`), {os.cpu_count()} cores,
{arguments.bytes / (1 << 30):.1f} GiB, medians of {arguments.rounds} processes, commit
{told_by("git", "-C", str(HERE), "describe", "--always", "--dirty")}. Made by `just bench-simulated`; no GPU was
involved.

{" ".join((__doc__ or "").split(chr(10) * 2, 1)[1].split())}

| {" | ".join(columns)} |
{"|---" * len(columns)}|
{chr(10).join(lines)}

## One tensor of {SMALL_BYTES >> 20} MiB

From the page cache, by `auto` and `threads={SMALL_THREADS}`; calls of the driver by one load, without those that
free the tensor.

| load | simulated ms | {" | ".join(f"`{name}`" for name in SMALL_CALLS)} |
|---|---{"|---" * len(SMALL_CALLS)}|
{chr(10).join(small)}
"""
    arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
