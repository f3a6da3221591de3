"""A small model from the page cache: the drop-in for safetensors, copying and mapped, beside safetensors itself.

Each round is a process that has imported what it needs. It makes each call once before those that count, and calls
safetensors, the drop-in, and the drop-in with route ``mapped`` in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
GOAL = 1.0
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
    for _ in range(arguments.rounds):
        command = [sys.executable, __file__, "--measure", "--model", str(arguments.model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results += json.loads(done.stdout)
    # Not at the top: processes that are measured import no more than they need.
    from host import machine  # noqa: PLC0415

    about = machine(arguments.model, ("hoistway", "torch", "transformers", "safetensors"))
    document = {"machine": about, "rounds": arguments.rounds, "results": results}
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

    calls: dict[str, Callable[[], Any]] = {
        "load_file": lambda: safetensors.torch.load_file(file),
        "safe_open, each tensor": one_by_one,
        "from_pretrained": lambda: transformers.AutoModel.from_pretrained(model),
    }
    results = []
    for repeat in range(1 + REPEATS):
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
                    touched = time.perf_counter() - started
                    if repeat:
                        results.append(
                            {"way": way, "call": name, "seconds": seconds, "cpu_seconds": cpu}
                            | {"touched_seconds": touched, "sum": total}
                        )
    return results


def report(document: dict[str, Any]) -> str:
    """The table of a document."""
    about, results = document["machine"], document["results"]
    calls = list(dict.fromkeys(result["call"] for result in results))
    for call in calls:
        if len({result["sum"] for result in results if result["call"] == call}) != 1:
            raise SystemExit(f"{call}: the tensors differ")

    def median(call: str, way: str, key: str) -> float:
        return statistics.median(r[key] for r in results if (r["call"], r["way"]) == (call, way)) * 1000

    lines = [
        "# The drop-in for safetensors, and a small model in the page cache",
        "",
        f"all-MiniLM-L6-v2, 91 MB in one file, which the page cache holds. Medians of {document['rounds']} "
        f"processes with {REPEATS} calls of each kind, in turn; the first of each is not counted. "
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {about['kernel']}, {about['file_system']}, virtual machine: {about['virtual_machine']}, huge pages: "
        f"{about['transparent_huge_pages']}, Python {about['python']}. "
        f"{', '.join(f'{name} {version}' for name, version in about['packages'].items())}. "
        f"{about['date']}. Commit {about['commit']}. Made by `just bench-drop-in`.",
        "",
        "| call | | ms | of safetensors | CPU ms | ms until each byte was used |",
        "|---|---|---|---|---|---|",
    ]
    for call in calls:
        for way in WAYS:
            ms, base = median(call, way, "seconds"), median(call, "safetensors", "seconds")
            lines.append(
                f"| `{call}` | {way} | {ms:.1f} | {ms / base:.2f}× | {median(call, way, 'cpu_seconds'):.1f} "
                f"| {median(call, way, 'touched_seconds'):.1f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
