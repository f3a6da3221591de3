"""Loads from an object store beside runai-model-streamer[s3]: `python bench/objects.py FOLDER` with safetensors files.

A server of this repository (testkit/objectd) has the files in memory, waits `--latency` before each answer, and sends
`--rate` on a connection. Each load is a new process that has touched as much memory as it will need; loaders run in
turn, and each load is compared with the files. Prints a table of medians. Not a part of `just bench`: it needs `pip
install runai-model-streamer[s3]==0.17.0` and `cargo build --release --package objectd`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUCKET = "models"


def _hoistway(folder: str) -> Iterator[tuple[str, object]]:
    import hoistway  # noqa: PLC0415

    yield from hoistway.load_file(f"s3://{BUCKET}/{folder}/").items()


def _runai(folder: str, names: list[str], concurrency: int) -> Iterator[tuple[str, object]]:
    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(concurrency)
    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{BUCKET}/{folder}/{name}" for name in names])
        yield from streamer.get_tensors()


LOADERS = {
    "hoistway": lambda folder, names: _hoistway(folder),
    "runai, concurrency 4": lambda folder, names: _runai(folder, names, 4),
    "runai, default": lambda folder, names: _runai(folder, names, 8),
    "runai, concurrency 32": lambda folder, names: _runai(folder, names, 32),
}


def measure(loader: str, endpoint: str, files: Path) -> None:
    """One load; prints what it took."""
    import torch  # noqa: PLC0415
    from safetensors import safe_open  # noqa: PLC0415

    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    names = sorted(path.name for path in files.glob("*.safetensors"))
    total = sum((files / name).stat().st_size for name in names)
    # A virtual machine may have to get pages from its host first: that time is not measured.
    torch.empty(2 * total, dtype=torch.uint8)[::4096] = 1
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    kept = dict(LOADERS[loader](files.name, names))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    for name in names:
        with safe_open(files / name, "pt") as reference:
            for key in reference.keys():  # noqa: SIM118
                own, wanted = kept[key], reference.get_tensor(key)
                if not torch.equal(own.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)):
                    raise SystemExit(f"{loader}: tensor {key} differs")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"rate": total / 1e9 / seconds, "cpu": cpu * 1e9 / total}))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=int, default=0, help="milliseconds before each answer")
    parser.add_argument("--rate", type=int, default=0, help="MB/s of one connection; 0: as fast as it can")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    files = arguments.folder.resolve()
    if arguments.measure:
        measure(*arguments.measure, files)
        return
    server = subprocess.Popen(
        [
            ROOT / "target/release/objectd",
            files,
            f"{BUCKET}/{files.name}/",
            str(arguments.latency),
            "s3",
            str(arguments.rate),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    found: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for number in range(arguments.rounds):
        order = list(LOADERS)
        for loader in order[number % len(order) :] + order[: number % len(order)]:
            command = [sys.executable, __file__, str(files), "--measure", loader, endpoint]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[loader].append(json.loads(run.stdout.splitlines()[-1]))
    server.terminate()
    print("| loader | GB/s | CPU s a GB |\n|---|---|---|")
    for loader, runs in found.items():
        rate, cpu = (statistics.median(run[key] for run in runs) for key in ("rate", "cpu"))
        print(f"| {loader} | {rate:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
