"""Measures a mixture of experts that is larger than memory: by mmap, as llama.cpp does, and by hoistway.

Every run is a process of its own under a control group's limit of memory, on the processor only. The file is put out
of the page cache before, ways run in turn, hoistway's with a pack and without, each round beginning with another one,
and the drive's limit runs before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cache import put_into_state
from host import machine
from loaders import processor_count

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "integrations/llama.cpp"))

import build  # noqa: E402
import limited  # noqa: E402
import models  # noqa: E402

DEPTHS = (12, 6, 3)
# Matrices of an expert.
PARTS = 3
PACKED = "hoistway with a pack"


@dataclass(frozen=True)
class Case:
    """One limit of memory, and the goal against the other way."""

    name: str
    title: str
    limit_mib: int | None
    tokens: int
    peer: str
    goal: float
    # Which seconds count: of all tokens, or of the last half, when each expert has been read once.
    key: str = "decode_seconds"


CASES = (
    Case("400", "400 MiB", 400, 48, "mmap", 25),
    Case("200", "200 MiB", 200, 48, "mmap", 12),
    Case("none", "none: the budget holds all experts", None, 200, "none", 0.9, "late_seconds"),
)


def main() -> None:
    """Runs what the command line says and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=processor_count())
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"
    shape = models.MIDDLE
    model = models.make(build.DATA / "models/middle.gguf", shape)
    packed = pack(model)
    stock = build.build(patched=False)
    document: dict[str, Any] = {
        "machine": machine(model, ("gguf",)),
        "llama_cpp": f"of llama-cpp-python {build.VERSION}",
        "threads": arguments.threads,
        "bytes": model.stat().st_size,
        "expert_bytes": models.expert_bytes(shape),
        "token_cycle_bytes": shape.layers * shape.experts_used * models.expert_bytes(shape),
        "results": [],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    for turn in range(arguments.rounds):
        results = [limit_of_drive(model, shape, depth) for depth in DEPTHS]
        for case in CASES:
            ways = ["hoistway", PACKED, case.peer]
            for way in ways if turn % 2 == 0 else reversed(ways):
                path = packed if way == PACKED else model
                put_into_state([str(path), *map(str, path.parent.glob(f"{path.name}.*"))], "cold")
                results.append(
                    {"case": case.name, "way": way, **run(case, way, stock, path, arguments.threads)}
                )
        for result in results:
            document["results"].append({"round": turn, **result})
            print(json.dumps({key: value for key, value in result.items() if key != "tokens"}), flush=True)
        (arguments.output / "experts.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.output / "experts.md").write_text(tables(document))
    shutil.rmtree(packed.parent)


def pack(model: Path) -> Path:
    """The same file elsewhere, with a pack beside it; that of before is made again."""
    folder = model.parent / "packed"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    os.link(model, folder / model.name)
    command = [sys.executable, "-m", "hoistway", "moe", "pack", folder / model.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / model.name


def run(case: Case, way: str, stock: build.Build, model: Path, threads: int) -> dict[str, Any]:
    """One run from a cold file."""
    limit = case.limit_mib << 20 if case.limit_mib else None
    options: dict[str, Any] = {"limit": limit, "tokens": case.tokens, "threads": threads}
    if way == case.peer:
        return limited.run_stock(stock, model, mode=way, **options)
    everything = model.stat().st_size
    budget = limited.budget_of(limit, model, models.MIDDLE) if limit else everything
    result = limited.run_streamed(stock, model, budget=budget, **options)
    if result.get("killed"):
        return result
    packing = result["stats"]["packing"]
    if (packing["state"] == "none") != (way == "hoistway"):
        raise SystemExit(f"{way}: the store says of a pack: {packing}")
    # Where it lies is this machine's affair.
    packing.pop("path", None)
    return result


def limit_of_drive(model: Path, shape: models.Shape, depth: int) -> dict[str, Any]:
    """Direct reads of slices as large as a part of an expert, at random."""
    put_into_state([str(model)], "cold")
    size = models.expert_bytes(shape) // PARTS
    script = [sys.executable, HERE / "limits.py", "slices"]
    command = [*script, "--bytes", str(size), "--depth", str(depth), "--count", "1000", model]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def tables(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = document["results"]
    for case in CASES:
        hashes = {
            result["hash"] for result in results if result.get("case") == case.name and "hash" in result
        }
        if len(hashes) > 1:
            raise SystemExit(f"the logits differ between ways: limit {case.name}")
    about = document["machine"]
    rounds = 1 + max(result["round"] for result in results)
    version = next(result["version"] for result in results if "version" in result)
    drive = limits(results)
    rates = ", ".join(f"{rate:.2f} GB/s with {depth}" for depth, rate in drive.items())
    lines = [
        "# A mixture of experts that is larger than memory",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {about['kernel']}, {about['file_system']}, virtual machine: {about['virtual_machine']}. "
        f"hoistway {version}, llama.cpp {document['llama_cpp']}, processor only, without OpenMP and repacking. "
        f"{about['date']}. Commit {about['commit']}.",
        "",
        f"A model of {document['bytes'] / 1e6:.0f} MB with random weights: experts of "
        f"{document['expert_bytes'] / 2**20:.1f} MiB, {document['token_cycle_bytes'] / 2**20:.0f} MiB of them a token. "
        f"Hit rates are those of its routers, not of a trained model's. Threads that compute: {document['threads']}. "
        f"Medians of {rounds} rounds, with the slowest and fastest; a process each, from a file that is not "
        "cached, under a control group's limit, which counts the page cache too. `against` is the median over rounds "
        "of hoistway's tokens a second by the other's in the same round. All ways gave the same logits, bit by bit. "
        "Made by `just bench-experts`.",
        "",
        f"Direct reads of an expert's parts at random: {rates} in flight.",
        "",
        "| limit | hoistway tokens/s | other | tokens/s | against | goal | hits | read a token | waiting | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(results, case, drive) for case in CASES]
    lines += [
        "",
        "With a pack beside the model, which `hoistway moe pack` makes:",
        "",
        "| limit | tokens/s | against without | first token | without | CPU seconds | without |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [packed_row(results, case) for case in CASES]
    lines += [
        "",
        "`read a token` counts the prompt as one token. `waiting` is what was read by the time that the model "
        "waited for experts, and its share of the direct reads above with as many in flight as a layer lacks parts. "
        "`peak` is hoistway's process, all included. Without a limit, the last half of 200 tokens counts, when most "
        "experts have been read; `none` is llama.cpp's load into memory. `CPU seconds` are those of the process. With "
        "a pack they include the comparison of each expert with its digest, as it is read for the first time.",
    ]
    return "\n".join(lines) + "\n"


def row(results: list[dict[str, Any]], case: Case, drive: dict[int, float]) -> str:
    """One case's row."""
    own, other = by_round(results, case, "hoistway"), by_round(results, case, case.peer)
    if any(result.get("killed") for result in (*own.values(), *other.values())):
        return f"| {case.title} | killed | {case.peer} | | | {case.goal}× | | | | |"
    against = median(speed(case, own[turn]) / speed(case, other[turn]) for turn in own)
    stats = [result["stats"] for result in own.values()]
    rates = [s["bytes_read"] / s["stall"] / 1e9 for s in stats if s["stall"] > 0]
    depth = depth_of(stats[0], case)
    verdict = "reached" if against >= case.goal else "missed"
    cells = [
        case.title,
        spread([speed(case, result) for result in own.values()]),
        case.peer,
        spread([speed(case, result) for result in other.values()]),
        f"**{against:.2f}×**",
        f"{case.goal}×: {verdict}",
        f"{median(s['hit_rate'] for s in stats):.0%}",
        f"{median(s['bytes_per_token'] for s in stats) / 2**20:.1f} MiB",
        f"{median(rates):.2f} GB/s, {median(rates) / drive[depth]:.0%} of {depth} in flight",
        f"{median(result['peak_bytes'] for result in own.values()) / 2**20:.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def packed_row(results: list[dict[str, Any]], case: Case) -> str:
    """One case's row of the ways with a pack and without."""
    own, without = by_round(results, case, PACKED), by_round(results, case, "hoistway")
    if any(result.get("killed") for result in (*own.values(), *without.values())):
        return f"| {case.title} | killed | | | | | |"
    against = median(speed(case, own[turn]) / speed(case, without[turn]) for turn in own)
    cells = [
        case.title,
        spread([speed(case, result) for result in own.values()]),
        f"**{against:.2f}×**",
        *(
            f"{median(result['first_token_seconds'] for result in way.values()):.2f} s"
            for way in (own, without)
        ),
        *(spread([result["cpu_seconds"] for result in way.values()]) for way in (own, without)),
    ]
    return f"| {' | '.join(cells)} |"


def speed(case: Case, result: dict[str, Any]) -> float:
    """Tokens a second."""
    count = case.tokens - 1 if case.key == "decode_seconds" else case.tokens // 2
    return count / result[case.key]


def limits(results: list[dict[str, Any]]) -> dict[int, float]:
    """The drive's GB/s by the number of reads in flight."""
    depths: dict[int, list[float]] = {}
    for result in results:
        if "limit" in result:
            depths.setdefault(result["depth"], []).append(result["bytes"] / result["seconds"] / 1e9)
    return {depth: median(rates) for depth, rates in sorted(depths.items())}


def depth_of(stats: dict[str, Any], case: Case) -> int:
    """About how many reads a layer that lacks experts begins at once: the parts of those that it lacks."""
    missing = stats["misses"] / (case.tokens * models.MIDDLE.layers)
    return min(DEPTHS, key=lambda depth: abs(depth - PARTS * max(1, missing)))


def by_round(results: list[dict[str, Any]], case: Case, way: str) -> dict[int, dict[str, Any]]:
    """A way's results in a case."""
    return {
        result["round"]: result
        for result in results
        if result.get("case") == case.name and result.get("way") == way
    }


def spread(values: list[float]) -> str:
    """The median with the smallest and largest."""
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
