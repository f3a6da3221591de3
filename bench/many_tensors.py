"""What a checkpoint of 30,000 tensors costs: Python's share of each, ours and the peers', and what a filter reads.

Each measurement is a process that has imported what it needs, and the files are cached: what is left is the work
that each tensor makes. The filter is that of expert parallelism, on sparse files with experts of a usual size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
LAYERS, EXPERTS, SHARDS = 62, 160, 8
RANKS = 8
SMALL_BYTES, LARGE_BYTES = 16 << 10, 256 << 10
GOAL_MICROSECONDS = 10.0
GOAL_SHARE = 0.02


def main() -> None:
    """Measures what the command line says, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "many-tensors")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    small, large = arguments.data / "small", arguments.data / "sparse"
    if arguments.measure:
        print(json.dumps(MEASUREMENTS[arguments.measure](large if arguments.measure == "filter" else small)))
        return
    make(small, SMALL_BYTES, is_sparse=False)
    make(large, LARGE_BYTES, is_sparse=True)
    for path in shards(small):
        path.read_bytes()
    names = [name for name in MEASUREMENTS if name != "fastsafetensors" or find_spec("fastsafetensors")]
    results = []
    for _ in range(arguments.rounds):
        for name in names:
            command = [sys.executable, __file__, "--data", str(arguments.data), "--measure", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append({"measurement": name} | json.loads(done.stdout))
            print(f"{name:<18} {results[-1]['seconds'] * 1000:8.1f} ms", flush=True)
    # Not at the top: processes that are measured import no more than they need.
    from host import machine  # noqa: PLC0415

    packages = [name for name in ("hoistway", "torch", "safetensors", "fastsafetensors") if find_spec(name)]
    document = {"machine": machine(small, tuple(packages)), "rounds": arguments.rounds, "results": results}
    (arguments.output / "many-tensors.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "many-tensors.md").write_text(report(document))
    print(report(document))


def shards(folder: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def tensors(expert_bytes: int) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes, in BF16, as models with many experts have them."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for expert in range(EXPERTS):
            for part in ("down_proj", "gate_proj", "up_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{part}.weight", [64, expert_bytes // 128]
        for part in (
            "mlp.gate",
            "self_attn.k_proj",
            "self_attn.o_proj",
            "self_attn.q_proj",
            "self_attn.v_proj",
        ):
            yield f"{prefix}.{part}.weight", [64, 64]
        yield f"{prefix}.input_layernorm.weight", [64]


def make(folder: Path, expert_bytes: int, *, is_sparse: bool) -> None:
    """Writes a checkpoint, if it is not there."""
    if len(shards(folder)) == SHARDS:
        return
    folder.mkdir(parents=True, exist_ok=True)
    named = list(tensors(expert_bytes))
    length = -(-len(named) // SHARDS)
    for number in range(SHARDS):
        header, end = {}, 0
        for name, shape in named[number * length : (number + 1) * length]:
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            if is_sparse:
                file.truncate(8 + len(text) + end)
            else:
                file.write(os.urandom(end))


def load_file(folder: Path) -> dict[str, float]:
    """Everything at once, and what is asked of a checkpoint besides."""
    import hoistway  # noqa: PLC0415
    import torch  # noqa: F401, PLC0415

    found: dict[str, float] = {}
    loaded = timed(found, "seconds", lambda: hoistway.load_file(folder))
    found["engine_seconds"] = loaded.report.total_seconds
    count = len(loaded)
    del loaded
    with hoistway.open(folder) as checkpoint:
        names = timed(found, "keys_seconds", checkpoint.keys)
        timed(found, "get_shape_seconds", lambda: [checkpoint.get_shape(name) for name in names])
        timed(found, "get_dtype_seconds", lambda: [checkpoint.get_dtype(name) for name in names])
    return found | {"tensors": count}


def iter_tensors(folder: Path, **options: Any) -> dict[str, float]:
    """One after the other, each dropped."""
    import hoistway  # noqa: PLC0415
    import torch  # noqa: F401, PLC0415

    found: dict[str, float] = {}
    stream = None

    def take() -> int:
        nonlocal stream
        stream = hoistway.iter_tensors(folder, **options)
        return sum(1 for _ in stream)

    count = timed(found, "seconds", take)
    return found | {"engine_seconds": stream.report.total_seconds, "tensors": count}


def safetensors(folder: Path) -> dict[str, float]:
    """The reference: views of a mapping, whose bytes are not read."""
    import torch  # noqa: F401, PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    found: dict[str, float] = {}
    loaded = timed(found, "seconds", lambda: [load_file(path) for path in shards(folder)])
    return found | {"tensors": sum(map(len, loaded))}


def fastsafetensors(folder: Path) -> dict[str, float]:
    """Its loader for one process."""
    from loaders import LOADERS  # noqa: PLC0415

    load = LOADERS["fastsafetensors"].prepare(0)
    found: dict[str, float] = {}
    loaded = timed(found, "seconds", lambda: load([str(path) for path in shards(folder)]))
    return found | {"tensors": len(loaded) - 1}


def one_rank(folder: Path) -> dict[str, float]:
    """What one of several ranks loads: its experts, and what all have."""
    import hoistway  # noqa: PLC0415
    import torch  # noqa: F401, PLC0415

    def is_wanted(name: str) -> bool:
        _, _, expert = name.partition(".experts.")
        return not expert or int(expert.split(".", 1)[0]) % RANKS == 3

    found: dict[str, float] = {}
    loaded = timed(found, "seconds", lambda: hoistway.load_file(folder, select=is_wanted))
    report = loaded.report
    return found | {
        "engine_seconds": report.total_seconds,
        "tensors": report.tensors,
        "share_bytes": report.tensor_bytes,
        "read_bytes": report.read_bytes,
        "checkpoint_bytes": sum(path.stat().st_size for path in shards(folder)),
    }


def timed(found: dict[str, float], key: str, work: Callable[[], Any]) -> Any:
    """Does it, and notes the time."""
    started = time.perf_counter()
    result = work()
    found[key] = time.perf_counter() - started
    return result


MEASUREMENTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "load_file": load_file,
    "iter_tensors": iter_tensors,
    "bounded": lambda folder: iter_tensors(folder, order="file", max_in_flight="64MiB"),
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "filter": one_rank,
}
TITLES = {
    "load_file": "hoistway, `load_file`",
    "iter_tensors": "hoistway, `iter_tensors`",
    "bounded": "hoistway, `iter_tensors` in file order under 64 MiB",
    "safetensors": "safetensors {safetensors}, `load_file` of each file (reads no tensor)",
    "fastsafetensors": "fastsafetensors {fastsafetensors}, one process",
}


def report(document: dict[str, Any]) -> str:
    """The tables."""
    host, results = document["machine"], document["results"]

    def median(measurement: str, key: str) -> float | None:
        values = [result[key] for result in results if result["measurement"] == measurement and key in result]
        return statistics.median(values) if values else None

    count = median("load_file", "tensors")

    def each(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds / count * 1e6:.2f} µs"

    rows, shares = [], []
    for name, title in TITLES.items():
        if (seconds := median(name, "seconds")) is None:
            continue
        engine = median(name, "engine_seconds")
        of_python = None if engine is None else seconds - engine
        if of_python is not None:
            shares.append(of_python / count * 1e6)
        rows.append(
            f"| {title.format(**host['packages'])} | {seconds * 1000:.0f} ms | {each(seconds)} | {each(of_python)} |"
        )
    calls = ", ".join(
        f"`{call}` {each(median('load_file', call + '_seconds'))}"
        for call in ("keys", "get_shape", "get_dtype")
    )
    share, read = median("filter", "share_bytes"), median("filter", "read_bytes")
    whole = median("filter", "checkpoint_bytes")
    reached = "reached" if max(shares) <= GOAL_MICROSECONDS else "missed"
    kept = "kept" if abs(read / share - 1) <= GOAL_SHARE else "missed"
    lines = "\n".join(rows)
    return f"""# Checkpoints of many tensors

{int(count)} tensors in {SHARDS} files, {LAYERS} layers of {EXPERTS} experts, {SMALL_BYTES >> 10} KiB a tensor, cached.
Medians of {document["rounds"]} rounds, in turn, a process each that has imported what it needs. Made by
`just bench-many-tensors` on {host["date"]}: {host["processor"]}, {host["cores"]} processors, Linux {host["kernel"]},
Python {host["python"]}.

Python may take {GOAL_MICROSECONDS:.0f} µs of each tensor: {reached}, with {max(shares):.2f} µs at most.

| | open and load | of each tensor | thereof Python |
|---|---|---|---|
{lines}

What is not the engine's time by its own report is Python's: selecting, making tensors of the framework, handing them
out. For each tensor: {calls}.

## One rank of {RANKS}
Of experts of three times {LARGE_BYTES >> 10} KiB, in files of {whole / MIB:.0f} MiB in all, a rank selects its own and
what all ranks have by a predicate on names: {share / MIB:.1f} MiB. It may read 2 % more or less: {kept}, with
{read / MIB:.1f} MiB read, {100 * (read / share - 1):+.2f} %, in {median("filter", "seconds") * 1000:.0f} ms.
"""


if __name__ == "__main__":
    main()
