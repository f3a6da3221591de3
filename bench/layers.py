"""How much of the wait for storage is hidden if the next layer streams while this one is computed with.

Both ways run in turn, a process each, from a cold file: read on demand, and prefetched. The compute stand-in keeps one
core busy; how long is a multiple of what reading a layer on demand takes, so that the result holds for other drives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

from cache import put_into_state
from host import machine
from limits import SLACK, refresh

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "target" / "release" / "examples" / "layer_stream"
GOAL = 0.9


def write(path: Path, layers: int, layer_bytes: int) -> None:
    """A safetensors file of layers of random bytes, unless it is there."""
    entries = {
        f"layers.{layer}.weight": {
            "dtype": "U8",
            "shape": [layer_bytes],
            "data_offsets": [layer * layer_bytes, (layer + 1) * layer_bytes],
        }
        for layer in range(layers)
    }
    header = json.dumps(entries).encode()
    if path.exists() and path.stat().st_size == 8 + len(header) + layers * layer_bytes:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers * layer_bytes >> 20):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())


def run(path: Path, compute_ms: float, mode: str) -> dict:
    """One pass over the file, which the page cache does not hold."""
    put_into_state([str(path)], "cold")
    # A virtual machine may have to get memory from its host first.
    refresh(SLACK)
    command = [PROGRAM, path, f"{compute_ms:.3f}", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layer-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "layers.md")
    arguments = parser.parse_args()
    layer_bytes = arguments.layer_mib << 20
    path = HERE / "data" / "layers" / "model.safetensors"
    write(path, arguments.layers, layer_bytes)

    # What one layer takes, for the lengths of computing.
    alone = [run(path, 0, "on-demand")["waited_seconds"] for _ in range(3)]
    layer_ms = 1e3 * statistics.median(alone) / arguments.layers
    rows = []
    reached = True
    for ratio in (0.5, 1.0, 2.0):
        samples: dict[str, list[dict]] = {"on-demand": [], "prefetch": []}
        for _ in range(arguments.rounds):
            for mode, results in samples.items():
                results.append(run(path, ratio * layer_ms, mode))
        sums = {sample["sum"] for results in samples.values() for sample in results}
        if len(sums) != 1:
            raise SystemExit(f"the passes read different bytes: {sums}")
        waited, total = (
            {mode: statistics.median(s[key] for s in results) for mode, results in samples.items()}
            for key in ("waited_seconds", "total_seconds")
        )
        hidden = 1 - waited["prefetch"] / waited["on-demand"]
        reached &= ratio < 1 or hidden >= GOAL
        rows.append(
            f"| {ratio:.1f} | {waited['on-demand']:.3f} s | {waited['prefetch']:.3f} s | {hidden:.0%} "
            f"| {total['on-demand']:.3f} s | {total['prefetch']:.3f} s |"
        )
    verdict = "reached" if reached else "missed"
    about = machine(path, ())
    text = f"""# Streaming layer by layer

{about["processor"]}, {about["cores"]} cores, Linux {about["kernel"]}, {about["file_system"]}, virtual machine:
{about["virtual_machine"]}. {about["date"]}, commit {about["commit"]}.

{arguments.layers} layers of {arguments.layer_mib} MiB, streamed by `LayerStream` from a cold file in one pass;
medians of {arguments.rounds} rounds, both ways in turn, a process each. Reading one layer on demand takes
{layer_ms:.1f} ms here. The compute stand-in keeps one core busy. The first layer
cannot be hidden, nor can more than about what the computing takes. The goal is {GOAL:.0%} where computing
takes as long as reading, or longer: {verdict}. Made by `just bench-layers`.

| computing, in reads | waited on demand | with prefetch | hidden | pass on demand | with prefetch |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
