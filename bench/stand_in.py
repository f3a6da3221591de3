"""What the way to a device costs the host, measured on the stand-in driver: CPU time beside that of a load to the host.

The stand-in copies with the CPU, as no GPU does: its own trace says how long its copies took, and that is taken off.
Its speed says nothing about any GPU, so none is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import model

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "target" / "release" / "libfake_cuda.so"
LOAD = """
import sys, hoistway
paths, device, route = sys.argv[3:], sys.argv[1], sys.argv[2]
print(hoistway.load_file(paths, device, framework="raw", route=route).report._json)
"""
GOAL = 1.3


def measure(paths: list[str], device: str, route: str) -> dict[str, float]:
    """One load in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.jsonl"
        environment = {
            **os.environ,
            "HOISTWAY_CUDA_DRIVER": str(LIBRARY),
            "FAKE_CUDA_POISON": "0",
            "FAKE_CUDA_TRACE": str(trace),
        }
        command = [sys.executable, "-c", LOAD, device, route, *paths]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)
        lines = trace.read_text().splitlines() if trace.exists() else []
    copies = [json.loads(line) for line in lines]
    copied = sum(copy["end_ns"] - copy["begin_ns"] for copy in copies) / 1e9
    gigabytes = report["tensor_bytes"] / 1e9
    return {
        "cpu": (report["time"]["cpu_seconds"] - copied) / gigabytes,
        "copies": len(copies),
        "staging_mib": report["memory"]["staging_bytes"] / (1 << 20),
    }


def settle(paths: list[str], *, cached: bool) -> None:
    """Brings files into the page cache, or drops them from it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        if cached:
            while os.read(descriptor, 8 << 20):
                pass
        else:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Measures what the command line says, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "stand-in.md")
    arguments = parser.parse_args()
    if not LIBRARY.exists():
        raise SystemExit(f"{LIBRARY} is missing: cargo build --release --package fake-cuda")
    paths = [str(path) for path in model.transformer(HERE / "data" / "stand-in", arguments.bytes, 1)]
    rows = []
    for state in ("cold", "warm"):
        samples: dict[str, list[dict[str, float]]] = {"cpu": [], "cuda": []}
        for _ in range(arguments.rounds):
            for device, route in (("cpu", "auto"), ("cuda", "staged")):
                settle(paths, cached=state == "warm")
                samples[device].append(measure(paths, device, route))
        host, device = (statistics.median(s["cpu"] for s in samples[name]) for name in ("cpu", "cuda"))
        staging = max(sample["staging_mib"] for sample in samples["cuda"])
        reached = "reached" if device <= GOAL * host else "missed"
        copies = int(samples["cuda"][0]["copies"])
        rows.append(
            f"| {state} | {host:.3f} | {device:.3f} | {device / host:.2f} ({reached}) | {copies} | {staging:.0f} MiB |"
        )
    text = f"""# The way to a device on the stand-in driver

CPU seconds for each GB (medians of {arguments.rounds} rounds, in turn, a process each; one file of
{arguments.bytes / (1 << 30):.1f} GiB). Those of the stand-in's own copies, which a GPU makes by itself, are left out.
The goal is at most {GOAL} times the host's. Made by `just bench-stand-in`; no GPU was involved.

| files | to the host | to a device, staged | ratio | copies | pinned at most |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
