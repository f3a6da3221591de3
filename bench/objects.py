"""Loads from an object store beside raw sockets and a peer: `python bench/objects.py FOLDER` with safetensors files.

A server of this repository (testkit/objectd) has the files in memory, waits `--latency` before each answer, and sends
`--rate` on a connection; with `--tls` it encrypts by TLS 1.3. Each load is a new process that has touched as much
memory as it will need; loaders run in turn, and each load is compared with the files. Another process for each load
has touched nothing: the most memory that it had, less what it had before and less the tensors, is what a load takes
beside them. Raw sockets read ranges into memory, some connections at a time, and are what the server and this machine
can do. It needs `cargo build --release --package objectd`, and for the peer runai-model-streamer-s3.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import math
import mmap
import os
import resource
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from host import machine

ROOT = Path(__file__).parents[1]
BUCKET = "models"
CERTIFICATE = ROOT / "testkit/objectd/certificates/root.pem"
# Of one request of a raw socket.
RAW_BYTES = 16 << 20


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


def _huge(length: int) -> mmap.mmap:
    """Memory in huge pages, as hoistway's is."""
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _raw(folder: str, names: list[str], connections: int) -> Iterator[tuple[str, object]]:
    """Whole files, in ranges of which each connection reads one after the other."""
    import torch  # noqa: PLC0415

    scheme, host = os.environ["AWS_ENDPOINT_URL"].split("://")
    if scheme == "https":
        context = ssl.create_default_context(cafile=CERTIFICATE)
        asked = [http.client.HTTPSConnection(host, context=context) for _ in range(connections)]
    else:
        asked = [http.client.HTTPConnection(host) for _ in range(connections)]
    kept: dict[str, torch.Tensor] = {}
    ranges: list[tuple[str, memoryview, int, int]] = []
    for name in names:
        asked[0].request("GET", f"/{BUCKET}/{folder}/{name}", headers={"Range": "bytes=0-0"})
        answer = asked[0].getresponse()
        answer.read()
        length = int(answer.headers["Content-Range"].split("/")[1])
        memory = memoryview(_huge(length))
        kept[name] = torch.frombuffer(memory, dtype=torch.uint8)
        starts = range(0, length, RAW_BYTES)
        ranges += [(name, memory, start, min(start + RAW_BYTES, length)) for start in starts]

    def work(number: int) -> None:
        for name, memory, start, end in ranges[number::connections]:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            asked[number].request("GET", f"/{BUCKET}/{folder}/{name}", headers=headers)
            answer = asked[number].getresponse()
            at = start
            while at < end:
                got = answer.readinto(memory[at:end])
                if not got:
                    raise SystemExit("an answer is short")
                at += got
            answer.read()

    with ThreadPoolExecutor(connections) as threads:
        list(threads.map(work, range(connections)))
    yield from kept.items()


LOADERS = {
    "hoistway": lambda folder, names: _hoistway(folder),
    "raw sockets, 16 connections": lambda folder, names: _raw(folder, names, 16),
    "raw sockets, 32 connections": lambda folder, names: _raw(folder, names, 32),
    "raw sockets, 64 connections": lambda folder, names: _raw(folder, names, 64),
    "runai, concurrency 4": lambda folder, names: _runai(folder, names, 4),
    "runai, default": lambda folder, names: _runai(folder, names, 8),
    "runai, concurrency 32": lambda folder, names: _runai(folder, names, 32),
}


def _status(name: str) -> int:
    """A size in `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure_memory(loader: str, files: Path, names: list[str], total: int) -> None:
    """One load; prints how much more memory than that of the tensors it took."""
    for module in ("hoistway", "runai_model_streamer"):
        if loader.startswith(module[:5]) and importlib.util.find_spec(module):
            importlib.import_module(module)
    before = _status("VmRSS")
    # The most memory counts from now on.
    Path("/proc/self/clear_refs").write_text("5")
    kept = dict(LOADERS[loader](files.name, names))
    print(json.dumps({"extra_bytes": _status("VmHWM") - before - total, "tensors": len(kept)}))


def measure(loader: str, endpoint: str, files: Path, what: str) -> None:
    """One load; prints what it took."""
    import torch  # noqa: PLC0415
    from safetensors import safe_open  # noqa: PLC0415

    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CA_BUNDLE=str(CERTIFICATE),
    )
    names = sorted(path.name for path in files.glob("*.safetensors"))
    total = sum((files / name).stat().st_size for name in names)
    if what == "memory":
        measure_memory(loader, files, names, total)
        return
    # A virtual machine may have to get pages from its host first: that time is not measured. Huge pages are others.
    torch.empty(2 * total, dtype=torch.uint8)[::4096] = 1
    torch.frombuffer(_huge(2 * total), dtype=torch.uint8)[::4096] = 1
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    kept = dict(LOADERS[loader](files.name, names))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    for name in names:
        if name in kept:
            whole = torch.from_file(str(files / name), size=(files / name).stat().st_size, dtype=torch.uint8)
            if not torch.equal(kept[name], whole):
                raise SystemExit(f"{loader}: file {name} differs")
            continue
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
    parser.add_argument("--tls", action="store_true", help="encrypt, by TLS 1.3")
    parser.add_argument("--server", type=Path, default=ROOT / "target/release/objectd")
    parser.add_argument("--loaders", nargs="*", help="beginnings of the names of loaders; all if left out")
    parser.add_argument(
        "--output", type=Path, help="directory for objects.json and objects.md, or objects-tls.…"
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    files = arguments.folder.resolve()
    if arguments.measure:
        loader, endpoint, what = arguments.measure
        measure(loader, endpoint, files, what)
        return
    server = subprocess.Popen(
        [
            arguments.server,
            files,
            f"{BUCKET}/{files.name}/",
            str(arguments.latency),
            "s3",
            str(arguments.rate),
            *("none", "0", "whole", "none", "tls" if arguments.tls else "plain"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    has_peer = importlib.util.find_spec("runai_model_streamer_s3") is not None
    chosen = tuple(arguments.loaders or LOADERS)
    order = [loader for loader in LOADERS if loader.startswith(chosen)]
    order = [loader for loader in order if has_peer or not loader.startswith("runai")]
    found: dict[str, list[dict[str, float]]] = {loader: [] for loader in order}
    for number in range(arguments.rounds):
        for loader in order[number % len(order) :] + order[: number % len(order)]:
            run = {}
            for what in ("time", "memory"):
                command = [sys.executable, __file__, str(files), "--measure", loader, endpoint, what]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                run |= json.loads(done.stdout.splitlines()[-1])
            found[loader].append(run)
    server.terminate()
    packages = ("hoistway", "runai-model-streamer", "torch") if has_peer else ("hoistway", "torch")
    results = {
        "host": machine(files, packages),
        "bytes": sum(path.stat().st_size for path in files.glob("*.safetensors")),
        "latency_ms": arguments.latency,
        "connection_mb_s": arguments.rate,
        "tls": arguments.tls,
        "loads": found,
    }
    text = document(results)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        name = "objects-tls" if arguments.tls else "objects"
        (arguments.output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.output / f"{name}.md").write_text(text)


def document(results: dict[str, Any]) -> str:
    """Tells the results as a page."""
    host, loads = results["host"], results["loads"]
    rates = {loader: statistics.median(run["rate"] for run in runs) for loader, runs in loads.items()}
    limit = max((rate for loader, rate in rates.items() if loader.startswith("raw")), default=math.nan)
    rate = f"{results['connection_mb_s']} MB/s" if results["connection_mb_s"] else "as fast as it can"
    protocol, rounds = "TLS 1.3" if results["tls"] else "HTTP", len(next(iter(loads.values())))
    case = f" at {results['latency_ms']} ms and {rate} a connection" if results["connection_mb_s"] else ""
    text = (
        f"# Loads from an object store{case}, beside raw sockets and a peer\n\n"
        f"{results['bytes'] / 1e9:.2f} GB over {protocol} from a server on the same machine, which waits "
        f"{results['latency_ms']} ms before each answer and sends {rate} on a connection. Each load is a new process; "
        f"medians of {rounds}, loaders in turn. Server and loader share the processor: {host['cores']} cores of "
        f"{host['processor']}, Linux {host['kernel']}, {host['date']}, commit {host['commit']}.\n\n"
        "| loader | GB/s | of the best raw sockets | slowest and fastest | CPU s a GB | memory beside the tensors |\n"
        "|---|---|---|---|---|---|\n"
    )
    for loader, runs in loads.items():
        each = sorted(run["rate"] for run in runs)
        cpu = statistics.median(run["cpu"] for run in runs)
        extra = statistics.median(run["extra_bytes"] for run in runs) / (1 << 20)
        text += (
            f"| {loader} | {rates[loader]:.2f} | {rates[loader] / limit:.2f} "
            f"| {each[0]:.2f}–{each[-1]:.2f} | {cpu:.2f} | {extra:.0f} MiB |\n"
        )
    return text


if __name__ == "__main__":
    main()
