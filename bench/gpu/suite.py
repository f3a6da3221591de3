"""The whole run: finds the device, runs checks and measurements, and writes what came of them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import correctness, environment, report, targets
from gpu.benchmark import Benchmark
from gpu.data import Model, Place, has_room_for, parsed_bytes, place
from gpu.driver import VENDORS
from gpu.machine import told_by
from gpu.process import Child, ChildError, Deadline

BENCH = Path(__file__).resolve().parents[1]
WHEELS = BENCH.parent / "dist" / "gpu"
STAND_IN_NAME = "Stand-in"
FAILED, NO_GPU = 1, 2


def main() -> int:
    """Runs what the command line says; 0, 1 if something failed, 2 if there is no GPU."""
    arguments = parsed()
    deadline = Deadline(arguments.deadline)
    drivers = [each.variable for each in VENDORS]
    if arguments.stand_in and not any(name in os.environ for name in drivers):
        return no_gpu(
            f"--stand-in needs the stand-in's library in {' or '.join(drivers)}, and in HOISTWAY_CUFILE"
        )
    if not arguments.stand_in:
        for name in (*drivers, "HOISTWAY_CUFILE"):
            os.environ.pop(name, None)
    work = Path(tempfile.mkdtemp(prefix="hoistway-gpu-work-"))
    places: list[Place] = []
    try:
        own = environment.installed(arguments.stand_in)
        gpu = described(own, work, "--gpu")
        if "missing" in gpu:
            return no_gpu(gpu["missing"])
        if gpu["name"].startswith(STAND_IN_NAME) and not arguments.stand_in:
            return no_gpu(f"the driver is a stand-in ({gpu['name']}), which --stand-in allows")
        if not arguments.installed:
            own = environment.of_wheels(arguments.wheels, work, arguments.stand_in)
        home = place(arguments.data, BENCH / "data", 4 * arguments.bytes)
        places.append(home)
        machine = described(own, work, str(home.path))
        machine["commit"] = commit(arguments.wheels)
        print(
            f"{gpu['name']}, {gpu['vendor']} {gpu['version']}, {machine['cores']} cores, files in {home.path}",
            flush=True,
        )
        if "missing" in machine["hoistway"]:
            print(f"hoistway cannot be imported: {machine['hoistway']['missing']}", file=sys.stderr)
            return FAILED
        return run(arguments, deadline, own, work, home=home.path, machine=machine)
    finally:
        for each in places:
            each.remove()
        shutil.rmtree(work, ignore_errors=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("correctness", "benchmark"), help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", type=parsed_bytes, default=8 << 30, help="of the model, such as 8GiB")
    parser.add_argument(
        "--data", type=Path, help="folder for files; default: on the local disk with most room"
    )
    parser.add_argument("--output", type=Path, help="folder for gpu.json and gpu.md; default: bench/results")
    parser.add_argument(
        "--deadline", type=float, default=520, help="seconds, after which nothing new is begun"
    )
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="what 'just gpu-pack' made")
    parser.add_argument("--installed", action="store_true", help="use the hoistway that this Python has")
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="run on the driver of HOISTWAY_CUDA_DRIVER or HOISTWAY_HIP_DRIVER",
    )
    arguments = parser.parse_args()
    if arguments.output is None:
        # Results of the stand-in are not to be taken for others.
        temporary = Path(tempfile.gettempdir()) / "hoistway-stand-in"
        arguments.output = temporary if arguments.stand_in else BENCH / "results"
    return arguments


def run(
    arguments: argparse.Namespace,
    deadline: Deadline,
    own: environment.Environment,
    work: Path,
    *,
    home: Path,
    machine: dict[str, Any],
) -> int:
    """Both parts; 0, or 1 if something failed."""
    marker = " (stand-in driver)" if arguments.stand_in else ""
    document: dict[str, Any] = {
        "title": f"Loading to a GPU{marker}",
        "stand_in": arguments.stand_in,
        "problems": problems(own, machine),
        "machine": machine,
        "correctness": None,
        "benchmark": None,
    }
    failures = []
    # Made while the checks run, which are not timed.
    model = Model(home, arguments.bytes) if arguments.only != "correctness" else None
    has_room = has_room_for(home, 2 * arguments.bytes, machine["gpu"]["memory_bytes"])
    large = Model(home, 2 * arguments.bytes) if model is not None and has_room else None
    if arguments.only != "benchmark":
        folder = Path(tempfile.mkdtemp(prefix="checks-", dir=home))
        checks = correctness.Checks(own, work, folder, deadline, has_torch=machine["torch"] is None)
        document["correctness"] = checks.done
        try:
            checks.run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failures += [check["name"] for check in checks.done if check["outcome"] == "fail"]
        write(document, arguments.output)
    if model is not None:
        benchmark = Benchmark(
            own, work, (model, large), deadline, machine["torch"], device_bytes=machine["gpu"]["memory_bytes"]
        )
        document["benchmark"] = benchmark.document
        try:
            benchmark.run(arguments.rounds, lambda: write(document, arguments.output))
        finally:
            benchmark.close()
        failures += benchmark.failures()
        for line in targets.judged(benchmark.document):
            print(line.text(is_judged=not arguments.stand_in))
    print(f"results are in {arguments.output}/gpu.md and gpu.json")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return FAILED if failures else 0


def described(own: environment.Environment, work: Path, *arguments: str) -> dict[str, Any]:
    """What the machine has, as the children's Python sees it."""
    child = Child(own, work, "-m", "gpu.machine", *arguments)
    try:
        return child.answer(180)
    except ChildError as error:
        raise SystemExit(f"the machine could not be described: {error}") from error
    finally:
        child.end(patience=20)


def commit(wheels: Path) -> str:
    """The commit that is measured: as the wheels say, or the working tree."""
    packed = wheels / "commit"
    if packed.exists():
        return packed.read_text().strip()
    return told_by("git", "-C", str(BENCH), "describe", "--always", "--dirty")


def problems(own: environment.Environment, machine: dict[str, Any]) -> list[str]:
    """What is missing, in words."""
    found = list(own.problems)
    if machine["torch"] is not None:
        found.append(machine["torch"])
    found += [f"{name} is not installed" for name, version in machine["packages"].items() if version is None]
    return found


def write(document: dict[str, Any], output: Path) -> None:
    """Writes `gpu.json`, `gpu.md`, and their chart `gpu.svg`."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (output / "gpu.md").write_text(report.markdown(document))
    picture = report.chart(document) if document["benchmark"] and not document["stand_in"] else None
    if picture is not None:
        (output / "gpu.svg").write_text(picture)


def no_gpu(reason: str) -> int:
    """Says that there is nothing to run on."""
    print(f"there is no GPU: {reason}", file=sys.stderr)
    return NO_GPU
