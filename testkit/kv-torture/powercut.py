"""Cuts the power of a file system on which a writer stores blocks, hundreds of times, and checks what is left.

There are two kinds of disks. One is a file of a file system that can clone files (XFS with reflinks): a clone made at a
random moment has everything that was written to the disk, and nothing that was only in the kernel's memory. The other
records its writes (`kv-torture disk`): a cut leaves what was flushed, and of later writes all, none, some, or some of
their sectors, as a drive does that loses its cache. Needs root, loop devices, FUSE and xfsprogs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

OUTER_BYTES = 24 << 30
INNER_BYTES = 3 << 30
# Writers run so long at most; then the file system is made anew.
CUTS_OF_ONE_WRITER = 10


def call(*command: object) -> None:
    """Runs a command that has to succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(image: Path, at: Path, *options: str) -> Iterator[Path]:
    """A file system in a file, mounted."""
    at.mkdir(parents=True, exist_ok=True)
    call("mount", "-o", ",".join(("loop", *options)), image, at)
    try:
        yield at
    finally:
        unmount(at)


def unmount(at: Path) -> None:
    """Unmounts a file system, as soon as no process uses it: a process that was killed may take a moment to end."""
    for _ in range(100):
        done = subprocess.run(["umount", str(at)], capture_output=True, text=True, check=False)
        if not done.returncode:
            return
        time.sleep(0.1)
    raise SystemExit(f"umount {at}: {done.stderr.strip()}")


@contextlib.contextmanager
def outer(directory: Path) -> Iterator[Path]:
    """A file system that can clone files."""
    image = directory / "outer.img"
    with image.open("wb") as file:
        file.truncate(OUTER_BYTES)
    call("mkfs.xfs", "-q", "-f", "-m", "reflink=1", image)
    try:
        with mounted(image, directory / "outer") as at:
            yield at
    finally:
        image.unlink()


class Disk(Protocol):
    """A disk in a file, whose power can be cut at any moment."""

    image: Path

    def cut(self, number: int) -> Path:
        """The disk as a power cut leaves it now."""

    def forget(self, image: Path) -> None:
        """Removes what a cut left."""


class Clones:
    """A disk that is cloned: a cut leaves everything that was written to it."""

    def __init__(self, directory: Path) -> None:
        self.image = directory / "disk.img"
        with self.image.open("wb") as file:
            file.truncate(INNER_BYTES)

    def cut(self, number: int) -> Path:
        """A clone."""
        image = self.image.with_name(f"cut-{number}.img")
        call("cp", "--reflink=always", self.image, image)
        return image

    def forget(self, image: Path) -> None:
        """Removes a clone."""
        image.unlink()

    def close(self) -> None:
        """Removes the disk."""
        self.image.unlink()


class Recorded:
    """A disk that records its writes: a cut leaves what was flushed, and some of the rest."""

    def __init__(self, directory: Path, program: Path, seed: int) -> None:
        self._at = directory / "recorded"
        self._at.mkdir(exist_ok=True)
        self._seed = seed
        command = [str(program), "disk", str(self._at), "--bytes", str(INNER_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self.image = self._at / "disk"
        # What was left of the writes since the last flush, in words, with how often.
        self.kinds: Counter[str] = Counter()

    def cut(self, number: int) -> Path:
        """What was flushed, and some of the rest."""
        seed = self._seed + number
        kind, writes, _, _ = self._ask(f"cut {seed}").split()
        self.kinds[kind if int(writes) else "nothing unflushed"] += 1
        return self._at / f"cut-{seed}"

    def forget(self, image: Path) -> None:
        """Removes what a cut left."""
        self._ask(f"forget {image.name.removeprefix('cut-')}")

    def close(self) -> None:
        """Unmounts the disk."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(60):
            raise SystemExit("the recording disk failed")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the recording disk ended by itself")
        return answer


@dataclass
class Cut:
    """The disk as a power cut leaves it."""

    image: Path
    # What the writer had said before it, and soon after.
    said: str
    later: str


class Writer:
    """A process that stores blocks, and what it has said so far."""

    def __init__(self, program: Path, root: Path, arguments: list[str]) -> None:
        command = [str(program), "write", str(root), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        if not self._ready.wait(60):
            self.close()
            raise SystemExit("the writer does not begin")

    def close(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            self._ready.set()
        self._ready.set()

    def said(self) -> str:
        """Everything up to now."""
        return "".join(list(self._lines))

    def check(self) -> None:
        """Whether it still runs."""
        if self._process.poll() is not None:
            raise SystemExit(f"the writer ended by itself, with {self._process.returncode}")


@dataclass(frozen=True)
class Trial:
    """What the cuts of a row have in common."""

    disk: str
    file_system: str
    layout: str
    durability: str
    verify: bool


def trial(arguments: argparse.Namespace, what: Trial, cuts: int, directory: Path) -> dict[str, Any]:
    """All cuts of one disk, file system, layout, durability and verification."""
    total: dict[str, Any] = {**asdict(what), "cuts": 0, "acknowledged": 0, "kinds": {}}
    chance = random.Random(f"{arguments.seed} {what}")
    make = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}[what.file_system]
    while total["cuts"] < cuts:
        disk: Clones | Recorded
        if what.disk == "cloned":
            disk = Clones(directory)
        else:
            disk = Recorded(directory, arguments.program, chance.randrange(1 << 40))
        with contextlib.closing(disk):
            call(*make, disk.image)
            for cut in cuts_of(arguments, what, disk, chance, min(CUTS_OF_ONE_WRITER, cuts - total["cuts"])):
                look_at(arguments, total, cut, directory)
                disk.forget(cut.image)
            if isinstance(disk, Recorded):
                total["kinds"] = dict(Counter(total["kinds"]) + disk.kinds)
        print(json.dumps(total), file=sys.stderr)
    return total


def cuts_of(
    arguments: argparse.Namespace, what: Trial, disk: Disk, chance: random.Random, count: int
) -> list[Cut]:
    """Cuts under one writer."""
    cuts: list[Cut] = []
    with mounted(disk.image, arguments.directory.resolve() / "inner") as at:
        options = ["--layout", what.layout, "--durability", what.durability]
        options += ["--capacity", str(arguments.capacity)]
        options += ["--block-bytes", str(arguments.block_bytes), "--delete-one-in", "20"]
        with contextlib.closing(Writer(arguments.program, at / "store", options)) as writer:
            for number in range(count):
                time.sleep(chance.uniform(0.005, 0.4))
                # What was said by now has to be on the disk; what is said while it is cut may be.
                said = writer.said()
                cuts.append(Cut(disk.cut(number), said, writer.said()))
            writer.check()
    return cuts


def look_at(arguments: argparse.Namespace, total: dict[str, Any], cut: Cut, directory: Path) -> None:
    """Mounts what a cut left, and counts what the store makes of it."""
    numbers = [int(line.split()[1]) for line in cut.later.splitlines() if line.startswith("ack ")]
    # Deletions that began before the cut was whole may be in it.
    deleting = "".join(line for line in cut.later.splitlines(keepends=True) if line.startswith("deleting "))
    record = directory / "said"
    record.write_text(cut.said + deleting)
    # Without its UUID, as it is mounted beside its original.
    options = ["nouuid"] if total["file_system"] == "xfs" else []
    with mounted(cut.image, arguments.directory.resolve() / "cut", *options) as mount:
        command = [arguments.program, "check", mount / "store", "--said", record]
        command += ["--capacity", arguments.capacity, "--block-bytes", arguments.block_bytes]
        command += ["--end", max(numbers, default=0) + 64]
        if not total["verify"]:
            command.append("--no-verify")
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"the store could not be opened after a cut: {done.stderr}")
    found = json.loads(done.stdout)
    total["cuts"] += 1
    total["acknowledged"] += sum(line.startswith("ack ") for line in cut.said.splitlines())
    for name in ("whole", "wrong", "damaged", "missing", "lost"):
        total[name] = total.get(name, 0) + found[name]
    total["slowest_recovery_ms"] = max(total.get("slowest_recovery_ms", 0), round(found["recovery_ms"], 1))


def cut_power(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Cuts as the arguments say; what was found after those of each kind of disk, store and load."""
    directory = arguments.directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rows = list(
        itertools.product(arguments.file_systems, arguments.layouts, arguments.durabilities, (True, False))
    )
    found = []
    if arguments.cuts:
        with outer(directory) as at:
            found += [trial(arguments, Trial("cloned", *row), arguments.cuts, at) for row in rows]
    if arguments.recorded_cuts:
        found += [
            trial(arguments, Trial("recorded", *row), arguments.recorded_cuts, directory) for row in rows
        ]
    return found
