"""Cuts the power of a file system on which a writer stores blocks, hundreds of times, and checks what is left.

The file system lies in a file of another one, which can clone files (XFS with reflinks). A clone made at a random
moment is the disk as a power cut leaves it: with what was written to it, without what was only in the kernel's memory.
It says nothing of a drive that loses its own cache. Needs root, loop devices and xfsprogs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Unmounts a file system, as soon as nobody uses it: a process that was killed may take a moment to end."""
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


def trial(arguments: argparse.Namespace, kind: str, durability: str, clones: Path) -> dict[str, Any]:
    """All cuts of one file system and durability."""
    total: dict[str, Any] = {"file_system": kind, "durability": durability, "cuts": 0, "acknowledged": 0}
    image, inner = clones / "disk.img", clones.parent / "inner"
    chance = random.Random(f"{arguments.seed} {kind} {durability}")
    make = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}[kind]
    while total["cuts"] < arguments.cuts:
        image.unlink(missing_ok=True)
        with image.open("wb") as file:
            file.truncate(INNER_BYTES)
        call(*make, image)
        with mounted(image, inner) as at:
            options = ["--durability", durability, "--capacity", str(arguments.capacity)]
            options += ["--block-bytes", str(arguments.block_bytes), "--delete-one-in", "20"]
            snapshots: list[Cut] = []
            with contextlib.closing(Writer(arguments.program, at / "store", options)) as writer:
                for _ in range(min(CUTS_OF_ONE_WRITER, arguments.cuts - total["cuts"])):
                    time.sleep(chance.uniform(0.005, 0.4))
                    # What was said by now has to be on the disk; what is said while it is cloned may be.
                    said = writer.said()
                    cut = clones / f"cut-{len(snapshots)}.img"
                    call("cp", "--reflink=always", image, cut)
                    snapshots.append(Cut(cut, said, writer.said()))
                writer.check()
        for cut in snapshots:
            look_at(arguments, total, cut, clones.parent / "cut")
            cut.image.unlink()
        print(json.dumps(total), file=sys.stderr)
    image.unlink()
    return total


def look_at(arguments: argparse.Namespace, total: dict[str, Any], cut: Cut, at: Path) -> None:
    """Mounts what a cut left, and counts what the store makes of it."""
    numbers = [int(line.split()[1]) for line in cut.later.splitlines() if line.startswith("ack ")]
    # Deletions that began before the clone was whole may be in it.
    deleting = "".join(line for line in cut.later.splitlines(keepends=True) if line.startswith("deleting "))
    record = cut.image.with_suffix(".said")
    record.write_text(cut.said + deleting)
    # Without its UUID, as it is mounted beside its original.
    options = ["nouuid"] if total["file_system"] == "xfs" else []
    with mounted(cut.image, at, *options) as mount:
        command = [
            arguments.program,
            "check",
            mount / "store",
            "--said",
            record,
            "--capacity",
            arguments.capacity,
        ]
        command += ["--end", max(numbers, default=0) + 64, "--block-bytes", arguments.block_bytes]
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
    """Cuts as the arguments say; what was found after them, for each file system and durability."""
    directory = arguments.directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with outer(directory) as at:
        clones = at / "clones"
        clones.mkdir()
        return [
            trial(arguments, kind, durability, clones)
            for kind in arguments.file_systems
            for durability in arguments.durabilities
        ]
