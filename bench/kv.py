"""The KV store beside those of others: blocks are stored, and loaded cold, by each in turn.

Needs root, to drop the page cache, and the peers that `just bench-kv` fetches.
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
from typing import Any

from host import machine
from kv_engines import ENGINES

HERE = Path(__file__).resolve().parent
LATENCY = HERE.parent / "target" / "release" / "examples" / "latency"
OURS = "hoistway"
LIMITS = tuple(name for name in ENGINES if name.startswith("drive"))
PEERS = tuple(name for name in ENGINES if not name.startswith(("hoistway", "drive")))
PHASES = ("store", "load", "scattered")
TITLES = {"store": "store", "load": "load, as stored", "scattered": "load, scattered"}


def run(engine: str, phase: str, root: Path, block_bytes: int, count: int) -> dict[str, Any]:
    """One phase of one engine, in a fresh process."""
    command = [sys.executable, str(HERE / "kv_engines.py"), engine, phase, str(root)]
    command += ["--block-bytes", str(block_bytes), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine}, {phase}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_cold() -> None:
    """Writes everything down and empties the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases: for each the measurements of each engine, round by round."""
    cases = []
    for block_bytes, count in arguments.cases:
        found: dict[str, dict[str, list[dict[str, Any]]]] = {
            name: {phase: [] for phase in PHASES} for name in ENGINES
        }
        for number in range(arguments.rounds):
            names = list(ENGINES)
            # Another one begins each round.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                root = arguments.data / "kv"
                shutil.rmtree(root, ignore_errors=True)
                for phase in PHASES:
                    # Each begins without a page in the cache.
                    make_cold()
                    result = run(name, phase, root, block_bytes, count)
                    found[name][phase].append(result)
                    rate = block_bytes * count / result["seconds"] / 1e9
                    print(f"{block_bytes >> 10} KiB, {name}, {phase}: {rate:.2f} GB/s", file=sys.stderr)
                shutil.rmtree(root)
        cases.append({"block_bytes": block_bytes, "count": count, "engines": found})
    return cases


def measure_index(arguments: argparse.Namespace) -> dict[str, Any]:
    """A store of many blocks: opened after its process was killed, and again after it was closed."""
    root = arguments.data / "kv"
    shutil.rmtree(root, ignore_errors=True)
    found = {}
    for name, phase in (("fill", "fill"), ("after a kill", "look_up"), ("after a close", "look_up")):
        command = [
            sys.executable,
            str(HERE / "kv_index.py"),
            phase,
            str(root),
            "--count",
            str(arguments.many),
        ]
        make_cold()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout)
        print(f"{arguments.many} blocks, {name}: {found[name]}", file=sys.stderr)
    shutil.rmtree(root)
    return {"count": arguments.many, **found}


def measure_latency(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """How long single loads take, alone and while stores take all they can: a measurement for each round."""
    found = []
    for _ in range(arguments.rounds):
        make_cold()
        done = subprocess.run([LATENCY, arguments.data], stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(f"latency: {found[-1]}", file=sys.stderr)
    return found


def table_of_latency(rounds: list[dict[str, Any]]) -> str:
    """The latency of single loads as Markdown."""
    lines = [
        "## One block of 64 KiB at a time",
        "",
        "From Rust: loads in demand of blocks at random, one after the other, without and with a thread that stores",
        "blocks of 1 MiB in the background as fast as the store takes them.",
        "",
        "| | median, ms | p99, ms | stored meanwhile, GB/s |",
        "|---|---|---|---|",
    ]
    for name in ("alone", "beside stores"):
        middle, slow, stored = (
            statistics.median(result[name][value] for result in rounds)
            for value in ("median_ms", "p99_ms", "stored_gb_per_s")
        )
        lines.append(f"| {name} | {middle:.2f} | {slow:.2f} | {stored:.2f} |")
    ratio = statistics.median(
        result["beside stores"]["p99_ms"] / result["alone"]["p99_ms"] for result in rounds
    )
    lines += ["", f"* p99 beside stores: {ratio:.2f}× that alone, the median of the rounds"]
    return "\n".join(lines)


def table_of_index(index: dict[str, Any]) -> str:
    """Many blocks as Markdown."""
    lines = [
        f"## {index['count']:,} blocks in one store",
        "",
        "From Python; lookups of 1,000 keys of 32 bytes each. *Memory* is how much the process grew by opening the",
        "store, for each block. Storing them, with 512 bytes each, took "
        f"{index['fill']['seconds'] / index['count'] * 1e6:.1f} µs a block.",
        "",
        "| opened | takes, cold | memory, bytes a block | key that is there | key that is not |",
        "|---|---|---|---|---|",
    ]
    for name in ("after a kill", "after a close"):
        found = index[name]
        lines.append(
            f"| {name} | {found['opening']:.2f} s | {found['memory_bytes'] / found['blocks']:.0f} | "
            f"{found['hit_us']:.2f} µs | {found['miss_us']:.2f} µs |"
        )
    return "\n".join(lines)


def rate(case: dict[str, Any], engine: str, phase: str) -> float:
    """The median of an engine's rounds, in GB/s."""
    seconds = statistics.median(result["seconds"] for result in case["engines"][engine][phase])
    return case["block_bytes"] * case["count"] / seconds / 1e9


def table(case: dict[str, Any]) -> str:
    """A case as Markdown."""
    lines = [
        f"## {case['block_bytes'] >> 10} KiB × {case['count']}",
        "",
        "| | store, GB/s | load as stored, GB/s | load scattered, GB/s | CPU s per GB: stored | loaded as stored | "
        "loaded scattered |",
        "|---|---|---|---|---|---|---|",
    ]
    size = case["block_bytes"] * case["count"] / 1e9
    for name, phases in case["engines"].items():
        cells = []
        for phase in PHASES:
            rates = [size / result["seconds"] for result in phases[phase]]
            cells.append(f"{rate(case, name, phase):.2f} ({min(rates):.2f}–{max(rates):.2f})")
        for phase in PHASES:
            cells.append(f"{statistics.median(result['cpu_seconds'] for result in phases[phase]) / size:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for phase in PHASES:
        ours = rate(case, OURS, phase)
        peers = [rate(case, name, phase) for name in PEERS]
        limit = max(rate(case, name, phase) for name in LIMITS)
        lines.append(
            f"* {TITLES[phase]}: {ours / max(peers):.2f}× the best peer, "
            f"{ours / statistics.median(peers):.2f}× the median peer, {ours / limit:.2f}× plain transfers of one file"
        )
    return "\n".join(lines)


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    host, rounds = results["host"], results["rounds"]
    tables = "\n\n".join(
        [
            *map(table, results["cases"]),
            table_of_latency(results["latency"]),
            table_of_index(results["index"]),
        ]
    )
    return f"""# KV blocks, stored and loaded

Medians of {rounds} rounds (and their range), each measurement a process; engines in turn, page cache dropped before
each. Host memory that was touched, eight threads, past the page cache, every byte compared. *As stored* asks for the
blocks in the order in which they were stored, *scattered* in a random order, 32 in a call. `hoistway` is at its
defaults: checksums made and compared, stores on the disk, in groups, before they are found (`batched`);
`hoistway (none)` syncs nothing, as the peers, which make no checksums either. `drive` is plain reads and writes of one
file by so many threads, the writes synced: what the drive gives for large blocks, while for small ones a ring gets more
out of it. Made by `just bench-kv`.

{host["processor"]}, {host["cores"]} cores, {host["memory_bytes"] >> 30} GiB; {host["kernel"]}, {host["file_system"]};
virtual: {host["virtual_machine"]}; {host["date"]}, commit {host["commit"]}.

{tables}
"""


def case_of(text: str) -> tuple[int, int]:
    """A case such as 1024x512: KiB of a block, and how many."""
    kib, count = text.split("x")
    return int(kib) << 10, int(count)


def main() -> None:
    """Measures what the command line says, and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=case_of, nargs="+", default=[(1 << 20, 512), (64 << 10, 4096)])
    parser.add_argument(
        "--many", type=int, default=1_000_000, help="blocks of the store whose index is measured"
    )
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.data.mkdir(parents=True, exist_ok=True)
    results = {
        "host": machine(arguments.data, ("torch", "numpy")),
        "rounds": arguments.rounds,
        "cases": measure(arguments),
        "latency": measure_latency(arguments),
        "index": measure_index(arguments),
    }
    (arguments.output / "kv.json").write_text(json.dumps(results, indent=1) + "\n")
    text = document(results)
    (arguments.output / "kv.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
