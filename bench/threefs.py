"""Reads from a stand-in of 3FS: hoistway beside fastsafetensor-3fs-reader, with the same memory, in turn.

The stand-in is a daemon of this machine that reads a local directory. Its speed says nothing about any 3FS: what is
measured is what the clients make of it.

It models storage behind a network by two numbers. Each read takes a delay, whatever its length and however many others
are under way; and the bytes of all reads together pass at a rate, one read after the other. The copy of the bytes to
shared memory is real, and made by as many threads as there are processors, which the clients share. Memory has all its
pages when it is registered, as InfiniBand demands, so no read waits for one. Both readers meet the same daemon.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chart import draw

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent / "target" / "release"
READERS = {"hoistway": "hoistway.compat.threefs", "fastsafetensor-3fs-reader": "fastsafetensor_3fs_reader"}
OURS, PEER = READERS
MIB = 1 << 20
GOAL = 1.5
# What the stand-in adds to its copies: microseconds to each read, and Gbit/s for all together (0 is no limit).
NETWORKS = [(0, 0), (1000, 0), (3000, 0), (1000, 25), (3000, 25)]
# Reads everything once, as loaders do: one call for each file, to memory that was touched before.
READ = """
import ctypes, hashlib, importlib, json, os, sys, time
module, mount, buffer_size, kept, check, *paths = sys.argv[1:]
threefs = importlib.import_module(module)
reader = threefs.ThreeFSFileReader(mount_point=mount, buffer_size=int(buffer_size))
lengths = [os.stat(path).st_size for path in paths]
memory = (ctypes.c_char * max(lengths)).from_buffer(bytearray(max(lengths))) if kept == "True" else None
address = ctypes.addressof(memory) if memory else 0

def fetch(path, length):
    if reader.read_chunked(path, address, 0, length) != length:
        raise SystemExit("a read came short")

fetch(paths[0], min(lengths[0], 1 << 20))
start = time.perf_counter()
for path, length in zip(paths, lengths):
    fetch(path, length)
seconds = time.perf_counter() - start
digest = hashlib.blake2b()
if check == "True":
    for path, length in zip(paths, lengths):
        fetch(path, length)
        digest.update(memoryview(memory)[:length])
print(json.dumps({"seconds": seconds, "digest": digest.hexdigest()}))
"""


def read(
    name: str,
    mount: Path,
    buffer_mib: int,
    paths: list[Path],
    *,
    kept: bool,
    check: bool,
    build: Path | None = None,
) -> dict[str, Any]:
    """All files once, by one reader in a fresh process, which imports the packages of `build` if that is given."""
    environment = {
        **os.environ,
        **({"PYTHONPATH": str(build)} if build else {}),
        "HF3FS_LIB_DIR": str(BUILT),
        "LD_LIBRARY_PATH": str(BUILT),
        "FASTSAFETENSORS_BACKEND": "cpp",
    }
    arguments = [READERS[name], mount, buffer_mib * MIB, kept, check, *paths]
    command = [sys.executable, "-c", READ, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr}")
    return json.loads(done.stdout)


@contextmanager
def daemon(root: Path, delay_us: int, gbits: int) -> Iterator[Path]:
    """The stand-in over a directory, behind such a network."""
    with tempfile.TemporaryDirectory() as mount:
        command = [BUILT / "usrbiod", root, mount]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise SystemExit("the stand-in cannot be mounted here: it needs /dev/fuse, and root")
            process.stdin.write(f"behave delay_us={delay_us} bytes_per_second={gbits * 10**9 // 8}\n")
            process.stdin.flush()
            process.stdout.readline()
            yield Path(mount)
        finally:
            process.stdin.close()
            process.wait()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases: for each, the seconds of each reader in each round."""
    data = HERE / "data" / "3fs"
    files = make(data, arguments.bytes, arguments.files)
    digest = hashlib.blake2b()
    for file in files:
        digest.update(file.read_bytes())
    expected, cases = digest.hexdigest(), []
    for delay_us, gbits in arguments.networks:
        with daemon(data, delay_us, gbits) as mount:
            paths = [mount / file.name for file in files]
            for kept in (False, True):
                for buffer_mib in arguments.buffers_mib:
                    seconds: dict[str, list[float]] = {name: [] for name in READERS}
                    digests = {expected} if kept else set()
                    for number in range(arguments.rounds + 1):
                        for name in READERS:
                            # The first round warms the page cache behind the daemon, and proves the bytes.
                            found = read(name, mount, buffer_mib, paths, kept=kept, check=kept and not number)
                            if number:
                                seconds[name].append(found["seconds"])
                            else:
                                digests.add(found["digest"])
                    if len(digests) != 1:
                        raise SystemExit("a reader delivered other bytes than the files hold")
                    case = {
                        "delay_us": delay_us,
                        "gbits": gbits,
                        "kept": kept,
                        "buffer_mib": buffer_mib,
                        "seconds": seconds,
                    }
                    print(case, file=sys.stderr)
                    cases.append(case)
    return cases


def make(data: Path, size: int, count: int) -> list[Path]:
    """So many files of random bytes in a directory, of this size together."""
    data.mkdir(parents=True, exist_ok=True)
    files = [data / f"{number}.bin" for number in range(count)]
    for file in files:
        if not file.exists() or file.stat().st_size != size // count:
            file.write_bytes(os.urandom(size // count))
    return files


def ratio(case: dict[str, Any]) -> float:
    """How many times as fast ours is: the median over rounds, each reader's seconds beside those of the same round."""
    seconds = case["seconds"]
    return statistics.median(peer / ours for ours, peer in zip(seconds[OURS], seconds[PEER], strict=True))


def bound(case: dict[str, Any]) -> float:
    """GB/s that no reader can exceed: a full buffer each delay, and the network's rate."""
    by_delay = case["buffer_mib"] * MIB / case["delay_us"] / 1e3 if case["delay_us"] else math.inf
    return min(by_delay, case["gbits"] / 8 or math.inf)


def network(case: dict[str, Any]) -> str:
    """The network of a case, in words."""
    delay = f"{case['delay_us'] / 1000:g} ms"
    return f"{delay}, {case['gbits']} Gbit/s" if case["gbits"] else delay


def table(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for case in document["cases"]:
        rate = {
            name: document["bytes"] / statistics.median(seconds) / 1e9
            for name, seconds in case["seconds"].items()
        }
        target = "host memory" if case["kept"] else "nowhere"
        reached = "reached" if ratio(case) >= GOAL else "missed"
        limit = f"{bound(case):.2f}" if math.isfinite(bound(case)) else "-"
        rows.append(
            f"| {network(case)} | {target} | {case['buffer_mib']} MiB | {rate[OURS]:.2f} | "
            f"{rate[PEER]:.2f} | {limit} | {ratio(case):.2f} ({reached}) |"
        )
    return f"""# Reading from a stand-in of 3FS

**A stand-in, not 3FS**: a daemon on the same machine that reads {document["files"]} local files of together
{document["bytes"] / (1 << 30):.1f} GiB out of the page cache. It says nothing about the speed of any 3FS. What it
shows is what a client makes of the same memory.

The network is two numbers. Each read takes the delay, whatever its length and however many others are under way. Where
a rate is given, the bytes of all reads pass at it, one read after the other; else they come as fast as the daemon
copies them. Those copies take the processors that the clients copy with, which those of a 3FS would not. "At most" is
what no reader can exceed: a full buffer each delay, and the rate. Reads to nowhere are not copied by the client: with
one long read in flight they take the network for all but its delay, so a large buffer leaves little to gain there.

One process, one call of `read_chunked` for each file, `buffer_size` as given; GB/s, medians of {document["rounds"]}
rounds in turn, a process each; {document["cores"]} cores. Both delivered the files' bytes. The goal is {GOAL} times the
peer's speed. Made by `just bench-3fs`.

| network | to | buffer | hoistway | fastsafetensor-3fs-reader {document["peer_version"]} | at most | ratio |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def chart(document: dict[str, Any], path: Path) -> None:
    """Throughput to host memory against the buffer's size, a panel for each network."""
    panels = []
    for title in dict.fromkeys(network(case) for case in document["cases"]):
        cases = [case for case in document["cases"] if network(case) == title and case["kept"]]
        lines = [
            {
                "label": name,
                "points": [
                    [case["buffer_mib"], document["bytes"] / statistics.median(case["seconds"][name]) / 1e9]
                    for case in cases
                ],
            }
            for name in READERS
        ]
        axes = {"size_name": "buffer, MiB", "value_name": "GB/s to host memory"}
        panels.append({"lines": {"title": title, **axes, "lines": lines}})
    draw(path, "A stand-in on the same machine, not 3FS", columns=2, scale="shared", panels=panels)


def main() -> None:
    """Measures what the command line says, and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--buffers-mib", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument(
        "--networks",
        type=lambda text: tuple(map(int, text.split(","))),
        nargs="+",
        default=NETWORKS,
        metavar="DELAY_US,GBITS",
    )
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    for name in ("usrbiod", "libhf3fs_api_shared.so", "hoistway"):
        if not (BUILT / name).exists():
            packages = "--package usrbiod --package hf3fs-abi --package hoistway-cli"
            raise SystemExit(f"{name} is missing: cargo build --release {packages}")
    from importlib.metadata import version  # noqa: PLC0415

    document = {
        "stand_in": "a daemon on the same machine, not 3FS",
        "bytes": arguments.bytes // arguments.files * arguments.files,
        "files": arguments.files,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        "peer_version": version(PEER),
        "cases": measure(arguments),
    }
    (arguments.output / "3fs.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "3fs.md").write_text(table(document))
    chart(document, arguments.output / "3fs.svg")
    print(table(document))


if __name__ == "__main__":
    main()
