"""A small model from the page cache: the drop-in for safetensors, copying and mapped, beside safetensors itself.

Each round is a process that has imported what it needs. It makes each call once before those that count, and calls
safetensors, the drop-in, and the drop-in with route ``mapped`` in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPEATS = 5
# What no copy can be faster than.
COPY = "new huge pages and preadv, no library"
# As keyword arguments of `install`; safetensors itself is not replaced.
WAYS: dict[str, dict[str, Any] | None] = {
    "safetensors": None,
    "drop-in": {},
    "drop-in, mapped": {"route": "mapped"},
}


def main() -> None:
    """Measures what the command line says, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE.parent / ".demo" / "model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.model)))
        return
    results: list[dict[str, Any]] = []
    load = [os.getloadavg()[0]]
    for _ in range(arguments.rounds):
        command = [sys.executable, __file__, "--measure", "--model", str(arguments.model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results += json.loads(done.stdout)
    # Not at the top: processes that are measured import no more than they need.
    from host import machine  # noqa: PLC0415

    about = machine(arguments.model, ("hoistway", "torch", "transformers", "safetensors"))
    load.append(os.getloadavg()[0])
    document = {"machine": about, "rounds": arguments.rounds, "load_averages": load, "results": results}
    (arguments.output / "drop-in.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "drop-in.md").write_text(report(document))
    print(report(document))


def measured(model: Path) -> list[dict[str, Any]]:
    """What each call takes in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import hoistway.compat.safetensors as drop_in  # noqa: PLC0415
    import safetensors.torch  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    file = model / "model.safetensors"
    file.read_bytes()

    def one_by_one() -> dict[str, torch.Tensor]:
        with safetensors.safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)

    def from_pretrained() -> Any:
        return transformers.AutoModel.from_pretrained(model)

    def from_pretrained_and_summed() -> Any:
        loaded = from_pretrained()
        for parameter in loaded.parameters():
            parameter.detach().sum()
        return loaded

    calls: dict[str, Callable[[], Any]] = {
        "load_file": lambda: safetensors.torch.load_file(file),
        "safe_open, each tensor": one_by_one,
        "from_pretrained": from_pretrained,
        "from_pretrained, each tensor summed": from_pretrained_and_summed,
    }
    results: list[dict[str, Any]] = []
    for repeat in range(1 + REPEATS):
        started, cpu = time.perf_counter(), time.process_time()
        copy = copied(file)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        copy.close()
        if repeat:
            results.append(
                {"way": COPY, "call": "load_file", "seconds": seconds, "cpu_seconds": cpu, "sum": None}
            )
        for way, options in WAYS.items():
            installed = contextlib.nullcontext() if options is None else drop_in.install(**options)
            with installed:
                for name, call in calls.items():
                    started, cpu = time.perf_counter(), time.process_time()
                    loaded = call()
                    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
                    tensors = loaded if isinstance(loaded, dict) else loaded.state_dict()
                    total = sum(float(tensor.double().sum()) for tensor in tensors.values())
                    del loaded, tensors
                    if repeat:
                        results.append(
                            {"way": way, "call": name, "seconds": seconds, "cpu_seconds": cpu, "sum": total}
                        )
    return results


def copied(file: Path) -> mmap.mmap:
    """The bytes of a file in new memory."""
    size = file.stat().st_size
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with file.open("rb", buffering=0) as opened, memoryview(memory) as view:
        read = 0
        while read < size:
            read += os.preadv(opened.fileno(), [view[read:]], read)
    return memory


def report(document: dict[str, Any]) -> str:
    """The table of a document."""
    about, results = document["machine"], document["results"]
    calls = list(dict.fromkeys(result["call"] for result in results))
    for call in calls:
        sums = {result["sum"] for result in results if result["call"] == call and result["way"] != COPY}
        if len(sums) != 1:
            raise SystemExit(f"{call}: the tensors differ")

    def milliseconds(call: str, way: str, key: str) -> list[float]:
        return [result[key] * 1000 for result in results if (result["call"], result["way"]) == (call, way)]

    before, after = document["load_averages"]
    advice = (
        ": other programs kept the cores busy, so compare CPU times"
        if max(before, after) > about["cores"]
        else ""
    )
    lines = [
        "# The drop-in for safetensors, and a small model in the page cache",
        "",
        f"all-MiniLM-L6-v2, 91 MB in one file, which the page cache holds. Medians of {document['rounds']} "
        f"processes with {REPEATS} calls of each kind, in turn; the first of each is not counted. "
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {about['kernel']}, {about['file_system']}, virtual machine: {about['virtual_machine']}, huge pages: "
        f"{about['transparent_huge_pages']}, Python {about['python']}. "
        f"{', '.join(f'{name} {version}' for name, version in about['packages'].items())}. "
        f"{about['date']}. Commit {about['commit']}. Made by `bench/drop_in.py`. Load average {before:.1f} "
        f"before and {after:.1f} after{advice}.",
        "",
        "A mapping reads nothing: only the last call measures what its pages take when they are used.",
        "",
        "| call | | ms | least | CPU ms | ms, of safetensors | CPU, of safetensors |",
        "|---|---|---|---|---|---|---|",
    ]
    for call, way in itertools.product(calls, [*WAYS, COPY]):
        if milliseconds(call, way, "seconds"):
            wall, cpu = milliseconds(call, way, "seconds"), milliseconds(call, way, "cpu_seconds")
            ms, cpu_ms = statistics.median(wall), statistics.median(cpu)
            base = statistics.median(milliseconds(call, "safetensors", "seconds"))
            cpu_base = statistics.median(milliseconds(call, "safetensors", "cpu_seconds"))
            lines.append(
                f"| {call} | {way} | {ms:.1f} | {min(wall):.1f} | {cpu_ms:.1f} "
                f"| {ms / base:.2f}× | {cpu_ms / cpu_base:.2f}× |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
