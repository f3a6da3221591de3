"""Measures how long llama.cpp takes to load a model: by itself in its three ways, and with hoistway.

Every load is a process of its own, on the processor only. The file is put into the page cache or out of it before,
loaders run in turn, each round beginning with another one, and a limit of the hardware runs before each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cache import put_into_state
from host import machine
from limits import SLACK
from loaders import processor_count

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "integrations/llama.cpp"))

import build  # noqa: E402
import models  # noqa: E402
from build import Build  # noqa: E402

DEPTHS = (8, 4, 16, 2)
GOAL = 1.5
TITLES = {"cold": "File not cached", "warm": "File cached"}


@dataclass(frozen=True)
class Loader:
    """One way to load."""

    name: str
    title: str
    mode: str
    is_ours: bool = False


LOADERS = (
    Loader("hoistway", "with hoistway, `none`", "none", is_ours=True),
    Loader("none", "stock, `none`", "none"),
    Loader("dio", "stock, `dio`", "dio"),
    Loader("mmap", "stock, `mmap`", "mmap"),
)


def main() -> None:
    """Runs what the command line says and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a GGUF file to load instead of the one that is made")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    model = arguments.model or models.make(build.DATA / "models/middle.gguf", models.MIDDLE)
    builds = {"stock": build.build(patched=False), "patched": build.build(patched=True)}
    document: dict[str, Any] = {
        "machine": machine(model, ("gguf",)),
        "llama_cpp": f"of llama-cpp-python {build.VERSION}",
        "bytes": model.stat().st_size,
        "results": [],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    for turn in range(arguments.rounds):
        for case in TITLES:
            for result in run_case(case, turn, model, builds, build.LIBRARY):
                document["results"].append({"case": case, "round": turn, **result})
                print(json.dumps(document["results"][-1]), flush=True)
        (arguments.output / "llama.cpp.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.output / "llama.cpp.md").write_text(tables(document))


def run_case(
    case: str, turn: int, model: Path, builds: dict[str, Build], library: Path
) -> Iterator[dict[str, Any]]:
    """One round of a case."""
    start = turn % len(LOADERS)
    for position, loader in enumerate(LOADERS[start:] + LOADERS[:start]):
        yield limit(case, model, DEPTHS[(turn + position) % len(DEPTHS)])
        put_into_state([str(model)], case)
        yield {"loader": loader.name, **load(loader, model, builds, library)}


def limit(case: str, model: Path, depth: int) -> dict[str, Any]:
    """What the drive allows, or the memory."""
    script = [sys.executable, str(HERE / "limits.py")]
    if case == "cold":
        put_into_state([str(model)], "cold")
        command = [*script, "device", "--depth", str(depth), str(model)]
    else:
        size = str(model.stat().st_size)
        command = [*script, "copy", "--bytes", size, "--threads", str(processor_count())]
    return json.loads(output(command, dict(os.environ)).stdout)


def load(loader: Loader, model: Path, builds: dict[str, Build], library: Path) -> dict[str, Any]:
    """One load in a fresh process, after it touched memory and gave it back."""
    environment = {name: value for name, value in os.environ.items() if name != "LLAMA_WEIGHT_SOURCE"}
    if loader.is_ours:
        environment["LLAMA_WEIGHT_SOURCE"] = str(library)
    program = builds["patched" if loader.is_ours else "stock"].logits
    fresh = 2 * model.stat().st_size + SLACK
    command = [str(program), "--mode", loader.mode, "--touch", str(fresh), "--tokens", "2"]
    command += ["--threads", str(processor_count()), str(model)]
    done = output(command, environment)
    if loader.is_ours and ("hoistway: read" not in done.stderr or "are left to llama.cpp" in done.stderr):
        raise SystemExit(f"hoistway did not read everything:\n{done.stderr[-2000:]}")
    version = re.search(r"hoistway: version (\S+)", done.stderr)
    return json.loads(done.stdout) | ({"version": version[1]} if version else {})


def output(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What a command printed; ends everything if it failed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr[-3000:]}")
    return done


def tables(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = document["results"]
    if len({result["hash"] for result in results if "hash" in result}) > 1:
        raise SystemExit("the logits differ between loads")
    about = document["machine"]
    version = next(result["version"] for result in results if "version" in result)
    rounds = 1 + max(result["round"] for result in results)
    lines = [
        "# Loading into llama.cpp",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {about['kernel']}, {about['file_system']}, virtual machine: {about['virtual_machine']}, "
        f"huge pages: {about['transparent_huge_pages']}. hoistway {version}, llama.cpp {document['llama_cpp']}, "
        f"processor only, without OpenMP and repacking. {about['date']}. Commit {about['commit']}.",
        "",
        f"A mixture of experts of {document['bytes'] / 1e6:.0f} MB. Medians of {rounds} rounds, with the fastest and "
        "slowest; loaders ran in turn, a process each. All loads gave the same logits, bit by bit. `load` ends when "
        "llama.cpp returns the model, `first token` with the logits of a prompt of 8 tokens; a mapped model may "
        "be read later, as far as the prompt's experts need it. `against hoistway` is the median over rounds "
        "of a loader's seconds by hoistway's in the same round. Before its clock starts, each process touches "
        "memory for two models and 1 GiB and gives it back: a virtual machine may have to get it from its host. "
        "llama.cpp is built without `GGML_NATIVE`. Made by `just bench-llama-cpp`.",
    ]
    for case, title in TITLES.items():
        lines += [
            "",
            f"## {title}",
            "",
            limit_line(document, case),
            "",
            *table(document, case),
            "",
            goal(results, case),
        ]
    return "\n".join(lines) + "\n"


def limit_line(document: dict[str, Any], case: str) -> str:
    """The limit of a case: the drive's at its best depth, or the memory's."""
    kind = "device" if case == "cold" else "memory fresh"
    depths: dict[int, list[float]] = {}
    for result in document["results"]:
        if result.get("limit") == kind and result["case"] == case:
            depths.setdefault(result.get("depth", 0), []).append(result["bytes"] / result["seconds"] / 1e9)
    best = max(depths.values(), key=median)
    what = "Direct reads of the file" if case == "cold" else "Copies into fresh memory, on all cores"
    return f"{what}: {median(best):.2f} GB/s ({min(best):.2f} to {max(best):.2f})."


def table(document: dict[str, Any], case: str) -> list[str]:
    """A row for each loader."""
    size = document["bytes"]
    ours = by_round(document["results"], case, "hoistway")
    lines = [
        "| loader | load s | GB/s | against hoistway | first token s | against hoistway | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for loader in LOADERS:
        own = by_round(document["results"], case, loader.name)
        seconds = [result["load_seconds"] for result in own.values()]
        cells = [f"**{loader.title}**" if loader.is_ours else loader.title]
        # What is mapped has not been read when the load returns.
        rate = "" if loader.mode == "mmap" else f"{size / median(seconds) / 1e9:.2f}"
        cells += [spread(seconds), rate]
        cells.append("" if loader.is_ours else f"{ratio(own, ours, 'load_seconds'):.2f}×")
        cells.append(spread([result["first_token_seconds"] for result in own.values()]))
        cells.append("" if loader.is_ours else f"{ratio(own, ours, 'first_token_seconds'):.2f}×")
        cells.append(f"{median(result['load_cpu_seconds'] for result in own.values()):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def goal(results: list[dict[str, Any]], case: str) -> str:
    """Whether the load is as much faster as it should be."""
    reached = ratio(by_round(results, case, "none"), by_round(results, case, "hoistway"), "load_seconds")
    return (
        f"The goal is {GOAL}× against `none`: {'reached' if reached >= GOAL else 'missed'} ({reached:.2f}×)."
    )


def by_round(results: list[dict[str, Any]], case: str, loader: str) -> dict[int, dict[str, Any]]:
    """A loader's results in a case."""
    return {
        result["round"]: result
        for result in results
        if result["case"] == case and result.get("loader") == loader
    }


def ratio(theirs: dict[int, dict[str, Any]], ours: dict[int, dict[str, Any]], key: str) -> float:
    """How many times longer theirs took, the median over rounds."""
    return median(theirs[turn][key] / ours[turn][key] for turn in ours)


def spread(values: list[float]) -> str:
    """The median with the smallest and largest."""
    return f"{median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    main()
