"""Loads from an object store beside raw sockets and peers: `python bench/objects.py FOLDER` with safetensors files.

A server of this repository (testkit/objectd) has the files in memory. Each load is a new process that has touched as
much memory as it will need; loaders run in turn, and each load is compared with the files. Another process for each
load has touched nothing: the most memory that it had, less what it had before and less the tensors, is what a load
takes beside them. Raw sockets read ranges into memory, some connections at a time, and are what the server and this
machine can do. It needs `cargo build --release --package objectd` and, for the peers, boto3, obstore,
runai-model-streamer-s3, and s3torchconnector. The case `cache` empties the page cache before each load, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import math
import mmap
import os
import resource
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host import machine

ROOT = Path(__file__).parents[1]
BUCKET = "models"
CERTIFICATE = ROOT / "testkit/objectd/certificates/root.pem"
# Of one request of a raw socket.
RAW_BYTES = 16 << 20
# In which a loop gets tensors.
ORDERS = ("arrival", "file")


def _hoistway(folder: str, **options: Any) -> Iterator[tuple[str, object]]:
    import hoistway  # noqa: PLC0415

    yield from hoistway.load_file(f"s3://{BUCKET}/{folder}/", **options).items()


def _runai(folder: str, names: list[str], concurrency: int | None) -> Iterator[tuple[str, object]]:
    if concurrency is not None:
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


def _ranges(
    names: list[str],
    length_of: Callable[[str], int],
    connections: int,
    read: Callable[[str, int, memoryview], None],
) -> Iterator[tuple[str, object]]:
    """Whole files, in ranges of which each thread reads one after the other by `read(name, start, into)`."""
    import torch  # noqa: PLC0415

    kept: dict[str, torch.Tensor] = {}
    ranges: list[tuple[str, int, memoryview]] = []
    for name in names:
        length = length_of(name)
        memory = memoryview(_huge(length))
        kept[name] = torch.frombuffer(memory, dtype=torch.uint8)
        ranges += [(name, start, memory[start : start + RAW_BYTES]) for start in range(0, length, RAW_BYTES)]
    with ThreadPoolExecutor(connections) as threads:
        list(threads.map(lambda one: read(*one), ranges))
    yield from kept.items()


def _fill(memory: memoryview, read_into: Callable[[memoryview], int | None]) -> None:
    """Reads until the memory is full."""
    at = 0
    while at < len(memory):
        got = read_into(memory[at:])
        if not got:
            raise SystemExit("an answer is short")
        at += got


def _raw(folder: str, names: list[str], connections: int) -> Iterator[tuple[str, object]]:
    scheme, host = os.environ["AWS_ENDPOINT_URL"].split("://")
    context = ssl.create_default_context(cafile=CERTIFICATE)
    each = threading.local()

    def ask(name: str, start: int, end: int) -> http.client.HTTPResponse:
        if not hasattr(each, "connection"):
            secure = scheme == "https"
            each.connection = (
                http.client.HTTPSConnection(host, context=context)
                if secure
                else http.client.HTTPConnection(host)
            )
        each.connection.request(
            "GET", f"/{BUCKET}/{folder}/{name}", headers={"Range": f"bytes={start}-{end - 1}"}
        )
        return each.connection.getresponse()

    def length_of(name: str) -> int:
        answer = ask(name, 0, 1)
        answer.read()
        return int(answer.headers["Content-Range"].split("/")[1])

    def read(name: str, start: int, into: memoryview) -> None:
        answer = ask(name, start, start + len(into))
        _fill(into, answer.readinto)
        answer.read()

    yield from _ranges(names, length_of, connections, read)


def _boto3(folder: str, names: list[str], connections: int) -> Iterator[tuple[str, object]]:
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    client = boto3.client(
        "s3", config=Config(max_pool_connections=connections, s3={"addressing_style": "path"})
    )

    def length_of(name: str) -> int:
        return int(client.head_object(Bucket=BUCKET, Key=f"{folder}/{name}")["ContentLength"])

    def read(name: str, start: int, into: memoryview) -> None:
        span = f"bytes={start}-{start + len(into) - 1}"
        _fill(into, client.get_object(Bucket=BUCKET, Key=f"{folder}/{name}", Range=span)["Body"].readinto)

    yield from _ranges(names, length_of, connections, read)


def _obstore(folder: str, names: list[str], connections: int) -> Iterator[tuple[str, object]]:
    import numpy as np  # noqa: PLC0415
    import obstore  # noqa: PLC0415
    from obstore.store import S3Store  # noqa: PLC0415

    store = S3Store(
        BUCKET,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def length_of(name: str) -> int:
        return int(obstore.head(store, f"{folder}/{name}")["size"])

    def read(name: str, start: int, into: memoryview) -> None:
        found = obstore.get_range(store, f"{folder}/{name}", start=start, length=len(into))
        # Other threads run meanwhile.
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(found, np.uint8))

    yield from _ranges(names, length_of, connections, read)


def _s3torch(folder: str, names: list[str]) -> Iterator[tuple[str, object]]:
    from s3torchconnector import S3Checkpoint, S3ClientConfig  # noqa: PLC0415
    from safetensors.torch import load  # noqa: PLC0415

    config = S3ClientConfig(force_path_style=True)
    checkpoint = S3Checkpoint(
        region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config
    )
    for name in names:
        with checkpoint.reader(f"s3://{BUCKET}/{folder}/{name}") as reader:
            yield from load(reader.read()).items()


def _from_folder(folder: Path) -> Iterator[tuple[str, object]]:
    import hoistway  # noqa: PLC0415

    yield from hoistway.load_file(folder).items()


def _first_tensor(folder: str, order: str) -> float:
    """Seconds from when the headers are there until a loop has its first tensor."""
    import hoistway  # noqa: PLC0415

    with hoistway.open(f"s3://{BUCKET}/{folder}/") as checkpoint:
        started = time.perf_counter()
        with checkpoint.iter_tensors(order=order) as tensors:
            next(tensors)
            return time.perf_counter() - started


LOADERS: dict[str, Callable[[Path, list[str]], Iterator[tuple[str, object]]]] = {
    "hoistway": lambda files, names: _hoistway(files.name),
    **{
        f"raw sockets, {count} connections": lambda files, names, count=count: _raw(files.name, names, count)
        for count in (4, 16, 32, 64, 128)
    },
    "runai-model-streamer, default": lambda files, names: _runai(files.name, names, None),
    **{
        f"runai-model-streamer, concurrency {count}": lambda files, names, count=count: _runai(
            files.name, names, count
        )
        for count in (4, 32)
    },
    **{
        f"boto3, {count} connections": lambda files, names, count=count: _boto3(files.name, names, count)
        for count in (16, 64)
    },
    **{
        f"obstore, {count} connections": lambda files, names, count=count: _obstore(files.name, names, count)
        for count in (16, 64)
    },
    "s3torchconnector": lambda files, names: _s3torch(files.name, names),
    "hoistway, and writes an empty cache": lambda files, names: _hoistway(files.name),
    "hoistway, from the cache": lambda files, names: _hoistway(files.name, route="node-cache"),
    "hoistway, the files in a folder": lambda files, names: _from_folder(files),
}


@dataclass(frozen=True)
class Case:
    """How the server answers, and who loads from it."""

    title: str
    loaders: tuple[str, ...]
    latency_ms: int = 0
    connection_mb_s: int = 0
    tls: bool = False
    cached: bool = False


CASES = {
    "near": Case(
        "Near, HTTP",
        (
            "hoistway",
            "raw sockets, 4 connections",
            "raw sockets, 16 connections",
            "runai-model-streamer, default",
            "runai-model-streamer, concurrency 4",
            "boto3, 16 connections",
            "obstore, 16 connections",
            "s3torchconnector",
        ),
    ),
    "tls": Case(
        "Near, TLS 1.3",
        ("hoistway", "raw sockets, 4 connections", "raw sockets, 16 connections", "boto3, 16 connections"),
        tls=True,
    ),
    "far": Case(
        "Far, HTTP",
        (
            "hoistway",
            "raw sockets, 32 connections",
            "raw sockets, 64 connections",
            "raw sockets, 128 connections",
            "runai-model-streamer, default",
            "runai-model-streamer, concurrency 4",
            "runai-model-streamer, concurrency 32",
            "boto3, 64 connections",
            "obstore, 64 connections",
        ),
        latency_ms=30,
        connection_mb_s=90,
    ),
    "cache": Case(
        "Near, HTTP, with the node's cache",
        (
            "hoistway",
            "hoistway, and writes an empty cache",
            "hoistway, from the cache",
            "hoistway, the files in a folder",
        ),
        cached=True,
    ),
}


def _status(name: str) -> int:
    """A size in `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure_memory(loader: str, files: Path, names: list[str], total: int) -> None:
    """One load; prints how much more memory than that of the tensors it took."""
    before = _status("VmRSS")
    # The most memory counts from now on.
    Path("/proc/self/clear_refs").write_text("5")
    kept = dict(LOADERS[loader](files, names))
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
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CA_BUNDLE=str(CERTIFICATE),
    )
    names = sorted(path.name for path in files.glob("*.safetensors"))
    total = sum((files / name).stat().st_size for name in names)
    for module in ("hoistway", "runai_model_streamer", "boto3", "obstore.store", "s3torchconnector"):
        if module.startswith(loader[:5]):
            importlib.import_module(module)
    if what == "memory":
        measure_memory(loader, files, names, total)
        return
    # A virtual machine may have to get pages from its host first: that time is not measured. Huge pages are others.
    torch.empty(2 * total, dtype=torch.uint8)[::4096] = 1
    torch.frombuffer(_huge(2 * total), dtype=torch.uint8)[::4096] = 1
    if what in ORDERS:
        print(json.dumps(_first_tensor(files.name, what)))
        return
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    kept = dict(LOADERS[loader](files, names))
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


def run(loader: str, case: Case, endpoint: str, files: Path, caches: Path) -> dict[str, float]:
    """The time of a load, and the memory of another."""
    found: dict[str, float] = {}
    environment = _environment()
    if "empty cache" in loader:
        environment["HOISTWAY_CACHE"] = str(caches / "empty")
    elif "from the cache" in loader:
        environment["HOISTWAY_CACHE"] = str(caches / "full")
    for what in ("time", "memory"):
        shutil.rmtree(caches / "empty", ignore_errors=True)
        if case.cached:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        command = [sys.executable, __file__, str(files), "--measure", loader, endpoint, what]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """That of this process, without options of the loaders but the size of the cache."""
    others = ("AWS_", "HOISTWAY_", "RUNAI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    # The cache may take what the files need, however full the drive is.
    return kept | {"HOISTWAY_CACHE_BYTES": str(16 << 30)}


def _fill_cache(endpoint: str, files: Path, cache: Path) -> None:
    """Has the cache of the node take all files."""
    environment = _environment()
    environment |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    environment |= {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    url = f"s3://{BUCKET}/{files.name}/"
    command = [sys.executable, "-m", "hoistway", "cache", "warm", "--cache", str(cache), url]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def first_tensors(case: Case, files: Path, server: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds until the first tensor of a loop by each order, `rounds` times in turn, each in a new process."""
    found: dict[str, list[float]] = {order: [] for order in ORDERS}
    with serving(case, files, server) as endpoint:
        for number in range(rounds):
            for order in ORDERS if number % 2 == 0 else reversed(ORDERS):
                command = [sys.executable, __file__, str(files), "--measure", "hoistway", endpoint, order]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, env=_environment()
                )
                found[order].append(json.loads(done.stdout.splitlines()[-1]))
    return found


@contextlib.contextmanager
def serving(case: Case, files: Path, server: Path) -> Iterator[str]:
    """The URL of a server with the files."""
    latency, rate = str(case.latency_ms), str(case.connection_mb_s)
    process = subprocess.Popen(
        [
            *(server, files, f"{BUCKET}/{files.name}/", latency, "s3", rate),
            *("none", "0", "whole", "none", "tls" if case.tls else "plain"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def loads_of(
    case: Case, files: Path, server: Path, rounds: int, caches: Path
) -> dict[str, list[dict[str, float]]]:
    """What the loaders of a case took, each `rounds` times, in turn."""
    order = list(case.loaders)
    found: dict[str, list[dict[str, float]]] = {loader: [] for loader in order}
    with serving(case, files, server) as endpoint:
        if case.cached:
            _fill_cache(endpoint, files, caches / "full")
        for number in range(rounds):
            for loader in order[number % len(order) :] + order[: number % len(order)]:
                found[loader].append(run(loader, case, endpoint, files, caches))
    return found


def main() -> None:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--server", type=Path, default=ROOT / "target/release/objectd")
    parser.add_argument("--output", type=Path, help="directory for objects.json and objects.md")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    files = arguments.folder.resolve()
    if arguments.measure:
        loader, endpoint, what = arguments.measure
        measure(loader, endpoint, files, what)
        return
    packages = ("hoistway", "boto3", "obstore", "runai-model-streamer", "s3torchconnector", "torch")
    results: dict[str, Any] = {
        "host": machine(files, packages),
        "bytes": sum(path.stat().st_size for path in files.glob("*.safetensors")),
        "cases": {},
        "first": {},
    }
    with tempfile.TemporaryDirectory(dir=files.parent, prefix="objects-cache-") as temporary:
        for name in arguments.cases:
            loads = loads_of(CASES[name], files, arguments.server, arguments.rounds, Path(temporary))
            results["cases"][name] = loads
            if CASES[name].latency_ms:
                first = first_tensors(CASES[name], files, arguments.server, arguments.rounds)
                results["first"][name] = first
    text = document(results)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "objects.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.output / "objects.md").write_text(text)


def document(results: dict[str, Any]) -> str:
    """Tells the results as a page."""
    host = results["host"]
    versions = ", ".join(
        f"{name} {version}" for name, version in host["packages"].items() if name != "hoistway"
    )
    rounds = len(next(iter(next(iter(results["cases"].values())).values())))
    text = (
        "# Loads from an object store, beside raw sockets and peers\n\n"
        f"{results['bytes'] / 1e9:.2f} GB from a server on the same machine. Each load is a new process; medians of "
        f"{rounds}, loaders in turn. Server and loader share the processor: {host['cores']} cores of "
        f"{host['processor']}, Linux {host['kernel']}, {host['file_system']}, {host['date']}, commit {host['commit']}, "
        f"{versions}. hoistway, runai-model-streamer and s3torchconnector deliver tensors, the "
        "others whole files. Memory beside the tensors is the most of a process during a load, less what it had before "
        "and less the tensors.\n"
    )
    for name, loads in results["cases"].items():
        text += section(CASES[name], loads)
        if name in results.get("first", {}):
            text += first_line(CASES[name], results["first"][name])
    return text


def first_line(case: Case, runs: dict[str, list[float]]) -> str:
    """A line for each order of a loop's tensors."""
    text = "\nhoistway's first tensor of a loop, from when the headers were there:\n\n"
    for order in ORDERS:
        each = sorted(seconds * 1000 for seconds in runs[order])
        waits = statistics.median(each) / case.latency_ms
        text += (
            f'* `order="{order}"`: {statistics.median(each):.0f} ms ({each[0]:.0f}–{each[-1]:.0f}), as long as '
            f"{waits:.1f} waits for an answer\n"
        )
    return text


def section(case: Case, loads: dict[str, list[dict[str, float]]]) -> str:
    """The table of a case."""
    rates = {loader: statistics.median(run["rate"] for run in runs) for loader, runs in loads.items()}
    limit = max((rate for loader, rate in rates.items() if loader.startswith("raw")), default=math.nan)
    text = f"\n## {case.title}\n"
    if case.connection_mb_s:
        text += (
            f"The server waits {case.latency_ms} ms before each answer, and sends {case.connection_mb_s} MB/s on a "
            "connection.\n"
        )
    if case.cached:
        text += (
            "The page cache is empty before each load. What is written to the cache after a load has returned is not "
            "in its time. The last line is a load of the files without a server.\n"
        )
    text += (
        "\n| loader | GB/s | of the best raw sockets | slowest and fastest | CPU s a GB | memory beside the tensors |\n"
        "|---|---|---|---|---|---|\n"
    )
    for loader, runs in loads.items():
        each = sorted(run["rate"] for run in runs)
        cpu = statistics.median(run["cpu"] for run in runs)
        extra = statistics.median(run["extra_bytes"] for run in runs) / (1 << 20)
        of_limit = "" if math.isnan(limit) else f"{rates[loader] / limit:.2f}"
        text += (
            f"| {loader} | {rates[loader]:.2f} | {of_limit} | {each[0]:.2f}–{each[-1]:.2f} | {cpu:.2f} "
            f"| {extra:.0f} MiB |\n"
        )
    return text


if __name__ == "__main__":
    main()
