"""Runs the benchmark: ours and the peers in turn, cold, warm and half warm, with the hardware's limits beside them.

Every measurement is a process of its own. The files are put into the state that the case asks for, and the state
is checked; then the process imports what it needs, touches memory and gives it back, and only then loads: so that no
loader pays for pages that a virtual machine has to get from its host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checksum
import model
import report
from cache import put_into_state
from host import machine
from limits import SLACK
from loaders import HEAP_ENVIRONMENT, LOADERS, processor_count

HERE = Path(__file__).resolve().parent
# Reads of 4 MiB in flight that the device's limit is measured with, one after the other.
DEPTHS = (8, 4, 16, 2, 32, 64)
PACKAGES = ("hoistway", "safetensors", "fastsafetensors", "runai-model-streamer", "torch", "numpy")


@dataclass(frozen=True)
class Case:
    """One table of results."""

    name: str
    title: str
    model: str
    state: str
    """How much of each file is cached: `cold`, `warm` or `half`."""
    touched: bool
    """Whether the destination is memory that was touched before."""
    loaders: tuple[str, ...]


COPYING = (
    "hoistway",
    "hoistway_threads",
    "safetensors_clone",
    "safetensors_pread",
    "fastsafetensors",
    "fastsafetensors_buffered",
    "runai",
    "runai_16",
    "runai_buffered",
)
SMALL = ("hoistway", "hoistway_numpy", "safetensors_clone", "safetensors_pread", "fastsafetensors", "runai")
HALF = (
    "hoistway",
    "hoistway_uring",
    "hoistway_buffered",
    "safetensors_clone",
    "fastsafetensors",
    "fastsafetensors_buffered",
    "runai",
    "runai_buffered",
)

CASES = (
    Case("cold-fresh", "Cold, fresh process", "large", "cold", False, COPYING),
    Case("cold-touched", "Cold, memory touched before", "large", "cold", True, COPYING),
    Case("warm-fresh", "Warm, fresh process", "large", "warm", False, COPYING),
    Case("warm-touched", "Warm, memory touched before", "large", "warm", True, COPYING),
    Case("half-fresh", "Half of each file cached, fresh process", "large", "half", False, HALF),
    Case("half-touched", "Half of each file cached, memory touched before", "large", "half", True, HALF),
    Case(
        "mapped",
        "Warm, views of the page cache",
        "large",
        "warm",
        False,
        ("hoistway_mapped", "safetensors_mmap"),
    ),
    Case("small-cold", "100,000 small tensors, cold, fresh process", "small", "cold", False, SMALL),
    Case("small-warm", "100,000 small tensors, warm, fresh process", "small", "warm", False, SMALL),
)


def main() -> None:
    """Runs what the command line says and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the model that is made")
    parser.add_argument("--model", type=Path, nargs="+", help="safetensors files to load instead")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--append", action="store_true", help="add rounds to the results that are there")
    arguments = parser.parse_args()

    models = {
        "large": arguments.model
        or model.transformer(arguments.data / "model", int(arguments.gib * 2**30), 4),
        "small": model.small_tensors(arguments.data / "small" / "model.safetensors", 100_000),
    }
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    document: dict[str, Any] = {
        "machine": machine(models["large"][0], PACKAGES),
        "cases": {
            case.name: {"title": case.title, "touched": case.touched, "state": case.state} for case in cases
        },
        "loaders": {
            loader.name: {"package": loader.package, "setting": loader.setting, "is_ours": loader.is_ours}
            for loader in LOADERS.values()
        },
        "bytes": {name: sum(os.path.getsize(path) for path in paths) for name, paths in models.items()},
        "models": {case.name: case.model for case in cases},
        "checksums": {name: checksum.of_files(paths) for name, paths in models.items()},
        "results": [],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.append:
        document = continued(json.loads((arguments.output / "host.json").read_text()), document)
    done = {
        case.name: 1
        + max((own["round"] for own in document["results"] if own["case"] == case.name), default=-1)
        for case in cases
    }
    for turn in range(arguments.rounds):
        for case in cases:
            round_number = done[case.name] + turn
            for result in run_case(case, [str(path) for path in models[case.model]], round_number):
                document["results"].append({"case": case.name, "round": round_number, **result})
                print(progress_line(case, round_number, document["results"][-1]), flush=True)
        # After every round: what was measured is kept when a later round is interrupted.
        (arguments.output / "host.json").write_text(json.dumps(document, indent=1) + "\n")
        report.write(document, arguments.output)


def continued(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Earlier results, to which more are added; only what was measured alike belongs together."""
    for key in ("processor", "cores", "memory_bytes", "kernel", "file_system", "packages"):
        if before["machine"][key] != now["machine"][key]:
            raise SystemExit(f"the earlier results are of another machine: {key} differs")
    if any(before["checksums"][name] != value for name, value in now["checksums"].items()):
        raise SystemExit("the earlier results are of another model")
    for part in ("cases", "loaders", "models"):
        before[part].update({name: value for name, value in now[part].items() if name not in before[part]})
    return before


def run_case(case: Case, paths: list[str], round_number: int) -> Iterator[dict[str, Any]]:
    """One round of a case: each loader once, beginning with another one each round, and a limit before each.

    Drives and memory drift, in virtual machines most of all: a limit that is measured once says little about a
    loader that runs minutes later.
    """
    size = sum(os.path.getsize(path) for path in paths)
    turn = round_number % len(case.loaders)
    for position, name in enumerate(case.loaders[turn:] + case.loaders[:turn]):
        if case.model == "large" and case.name != "mapped":
            yield from limits(case, paths, size, round_number * len(case.loaders) + position)
        loader = LOADERS[name]
        # A pool or heap a little larger than the model: arenas and buffers are rounded up.
        touched = int(size * 1.15) + (256 << 20) if case.touched else 0
        environment = {**os.environ, **loader.environment}
        if case.touched and not loader.is_ours:
            environment.update(HEAP_ENVIRONMENT)
        # Page-cache pages that a buffered load fills are fresh memory too.
        fresh = (2 if case.state != "warm" else 1) * size + SLACK
        cached = put_into_state(paths, case.state)
        command = [sys.executable, str(HERE / "measure.py"), name]
        command += ["--touched-bytes", str(touched), "--refresh-bytes", str(fresh), *paths]
        result = json.loads(run(command, environment))
        yield {"loader": name, "cached_before": cached, **result}


def limits(case: Case, paths: list[str], size: int, turn: int) -> Iterator[dict[str, Any]]:
    """One of the limits that a case is held against, another one each turn."""
    script = [sys.executable, str(HERE / "limits.py")]
    of_device = case.state == "cold" or (case.state == "half" and turn % 2 == 0)
    if of_device:
        depth = DEPTHS[turn // (1 if case.state == "cold" else 2) % len(DEPTHS)]
        put_into_state(paths, "cold")
        yield json.loads(run([*script, "device", "--depth", str(depth), *paths], dict(os.environ)))
        return
    copies = [*script, "copy", "--bytes", str(size), "--threads", str(processor_count())]
    # Into touched memory is the limit of the memory; fresh pages have to be cleared as well.
    if case.touched or turn % 4 < 2:
        copies.append("--touched")
    yield json.loads(run(copies, dict(os.environ)))


def run(command: list[str], environment: dict[str, str]) -> str:
    """Standard output of a command; what it printed if it failed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def progress_line(case: Case, round_number: int, result: dict[str, Any]) -> str:
    """One line of progress for the terminal."""
    what = result.get("loader") or f"limit {result['limit']} {result.get('depth', '')}"
    clock = time.strftime("%H:%M:%S")
    return f"{clock}  round {round_number + 1}  {case.name:<14} {what:<26} {result['seconds']:7.3f} s"


if __name__ == "__main__":
    main()
