"""Two builds of hoistway in turn: what a change does to the speed and the processor time of each row.

Each measurement is a process of its own, as in `run.py`, and both builds run in each round, one directly after the
other, the first of a round being the second of the next. What counts is the median over rounds of the ratio within a
round, so that a drive or a machine that drifts does not look like a change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import many_tensors
import model
import threefs
from cache import put_into_state
from host import machine
from layers import write as write_layers
from limits import SLACK, refresh
from loaders import LOADERS
from run import CASES, run

HERE = Path(__file__).resolve().parent
BUILDS = ("old", "new")
# What a change may cost: speed as a part of the old build's, processor time as a multiple of it.
LEAST_SPEED, MOST_CPU = 0.97, 1.05
# Less processor time than this is noise.
LEAST_CPU_SECONDS = 0.02
LAYER_BYTES, LAYERS = 32 << 20, 32
# What the stand-in of 3FS adds to its copies (see `threefs.NETWORKS`), and the reader's memory in MiB.
THREEFS = [(0, 0, 32), (1000, 0, 32), (3000, 25, 128)]


@dataclass(frozen=True)
class Row:
    """One thing that both builds do."""

    name: str
    measure: Callable[[Path], dict[str, Any]]
    """Given the folder of a build, its seconds and, where they are known, those of the processor."""


def main() -> None:
    """Measures what the command line says, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "old", type=Path, help="folder of the build to compare with, as `just bench-compare` makes it"
    )
    parser.add_argument("new", type=Path, help="folder of the build to judge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model that is made")
    parser.add_argument("--row", action="append", help="only rows whose name has this text")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    builds = dict(zip(BUILDS, (arguments.old.resolve(), arguments.new.resolve()), strict=True))
    rows = [
        row
        for row in all_rows(arguments.data, arguments.gib)
        if not arguments.row or any(text in row.name for text in arguments.row)
    ]
    document: dict[str, Any] = {
        "machine": machine(arguments.data, ()),
        "commits": {build: (folder / "COMMIT").read_text().strip() for build, folder in builds.items()},
        "gib": arguments.gib,
        "results": {},
    }
    for number in range(arguments.rounds):
        for row in rows:
            for build in BUILDS if number % 2 == 0 else BUILDS[::-1]:
                found = row.measure(builds[build])
                document["results"].setdefault(row.name, {}).setdefault(build, []).append(found)
                print(f"round {number + 1}  {row.name:<52} {build}  {found['seconds']:8.4f} s", flush=True)
        # After every round: what was measured is kept when a later round is interrupted.
        document["rounds"] = number + 1
        (arguments.output / "compare.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.output / "compare.md").write_text(table(document))
    print(table(document))


def all_rows(data: Path, gib: float) -> Iterator[Row]:
    """Every row: loads of the benchmark's cases, of many tensors, and streams of layers."""
    models = {
        "large": [str(path) for path in model.transformer(data / f"model-{gib:g}", int(gib * 2**30), 4)],
        "small": [str(path) for path in model.small_tensors(data / "small" / "model.safetensors", 100_000)],
    }
    for case in CASES:
        for name in case.loaders:
            if LOADERS[name].is_ours:
                yield Row(
                    f"{case.title}: {LOADERS[name].setting}",
                    lambda build, case=case, name=name: load(build, case, name, models[case.model]),
                )
    folder = data / "many-tensors" / "small"
    many_tensors.make(folder, many_tensors.SMALL_BYTES, is_sparse=False)
    many_tensors.make(data / "many-tensors" / "sparse", many_tensors.LARGE_BYTES, is_sparse=True)
    for name in ("load_file", "iter_tensors", "bounded", "filter"):
        yield Row(
            f"30,000 tensors: {name}", lambda build, name=name: many(build, data / "many-tensors", name)
        )
    layered = data / "layers" / "model.bin"
    write_layers(layered, LAYERS, LAYER_BYTES)
    for mode in ("on-demand", "prefetch"):
        yield Row(f"layers by a reader: {mode}", lambda build, mode=mode: stream(build, layered, mode))
    files = threefs.make(data / "3fs", 1 << 30, 4)
    for delay_us, gbits, buffer_mib in THREEFS:
        yield Row(
            f"3FS stand-in, {threefs.network({'delay_us': delay_us, 'gbits': gbits})}: {buffer_mib} MiB",
            lambda build, network=(delay_us, gbits), mib=buffer_mib: from_3fs(build, files, network, mib),
        )
    weights = llama_cpp.models.make(llama_cpp.build.DATA / "models/middle.gguf", llama_cpp.models.MIDDLE)
    program = llama_cpp.build.build(patched=True)
    for case, title in llama_cpp.TITLES.items():
        yield Row(
            f"llama.cpp, {title.lower()}",
            lambda build, case=case: into_llama_cpp(build, program, weights, case),
        )


def environment(build: Path) -> dict[str, str]:
    """The environment of a process that is to import this build."""
    return {**os.environ, "PYTHONPATH": str(build / "python")}


def load(build: Path, case: Any, name: str, paths: list[str]) -> dict[str, Any]:
    """One load of a case."""
    size = sum(os.path.getsize(path) for path in paths)
    touched = int(size * 1.15) + (256 << 20) if case.touched else 0
    fresh = (2 if case.state != "warm" else 1) * size + SLACK
    put_into_state(paths, case.state)
    command = [sys.executable, str(HERE / "measure.py"), name]
    command += ["--touched-bytes", str(touched), "--refresh-bytes", str(fresh), *paths]
    found = json.loads(run(command, environment(build) | LOADERS[name].environment))
    return {key: found[key] for key in ("seconds", "cpu_seconds", "checksum")}


def many(build: Path, data: Path, name: str) -> dict[str, Any]:
    """One of the measurements of many tensors."""
    command = [sys.executable, str(HERE / "many_tensors.py"), "--data", str(data), "--measure", name]
    return {"seconds": json.loads(run(command, environment(build)))["seconds"]}


def stream(build: Path, path: Path, mode: str) -> dict[str, Any]:
    """One pass over a cold file, layer by layer, with a stand-in that computes as long as reading takes."""
    put_into_state([str(path)], "cold")
    refresh(SLACK)
    command = [build / "stream_layers", path, str(LAYER_BYTES), "20", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {"seconds": found["total_seconds"], "checksum": found["sum"]}


def from_3fs(build: Path, files: list[Path], network: tuple[int, int], buffer_mib: int) -> dict[str, Any]:
    """All files once from a stand-in of 3FS, to host memory."""
    with threefs.daemon(files[0].parent, *network) as mount:
        paths = [mount / file.name for file in files]
        return threefs.read(
            threefs.OURS, mount, buffer_mib, paths, kept=True, check=False, build=build / "python"
        )


def into_llama_cpp(build: Path, program: Any, weights: Path, case: str) -> dict[str, Any]:
    """One load by llama.cpp with this build's C library."""
    put_into_state([str(weights)], case)
    library = build / "capi/lib/libhoistway.so"
    found = llama_cpp.load(llama_cpp.LOADERS[0], weights, {"patched": program}, library)
    return {
        "seconds": found["load_seconds"],
        "cpu_seconds": found["load_cpu_seconds"],
        "checksum": found["hash"],
    }


def table(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    about, commits = document["machine"], document["commits"]
    lines = [
        "# Before and after",
        "",
        f"Commit {commits['new']} beside {commits['old']}, in turn, a process for each measurement. "
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, {about['file_system']}, "
        f"virtual machine: {about['virtual_machine']}. {about['date']}. A model of {document['gib']:g} GiB, "
        f"{document['rounds']} rounds. "
        "Made by `just bench-compare`.",
        "",
        f"Speed is the median over rounds of the old seconds by the new ones, with the range; at least {LEAST_SPEED} "
        f"is asked for. CPU is that of the new processor seconds by the old ones; at most {MOST_CPU}.",
        "",
        "| what | old s | new s | speed | CPU | |",
        "|---|---|---|---|---|---|",
    ]
    for name, builds in document["results"].items():
        old, new = builds["old"], builds["new"]
        if {result.get("checksum") for result in old + new} != {old[0].get("checksum")}:
            raise SystemExit(f"{name}: the builds delivered different bytes")
        speeds = [before["seconds"] / after["seconds"] for before, after in zip(old, new, strict=True)]
        missed = ["speed"] if statistics.median(speeds) < LEAST_SPEED else []
        cpu = ""
        if statistics.median(result.get("cpu_seconds", 0) for result in old) > LEAST_CPU_SECONDS:
            ratio = statistics.median(
                after["cpu_seconds"] / before["cpu_seconds"] for before, after in zip(old, new, strict=True)
            )
            cpu = f"{ratio:.2f}"
            missed += ["CPU"] if ratio > MOST_CPU else []
        old_seconds, new_seconds = (statistics.median(one["seconds"] for one in side) for side in (old, new))
        lines.append(
            f"| {name} | {old_seconds:.4f} | {new_seconds:.4f} | {statistics.median(speeds):.2f} "
            f"({min(speeds):.2f}–{max(speeds):.2f}) | {cpu} | {'missed: ' + ', '.join(missed) if missed else ''} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
