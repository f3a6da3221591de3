"""The model that is loaded: where it lies, how it is made in parallel, and its copy in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import checksum
import model

from gpu import files

SHARDS = 4
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs"}
TINY_BYTES = 8 << 20


class Model:
    """Files that processes of their own write while the suite does something else."""

    def __init__(self, folder: Path, size: int) -> None:
        planned: list[tuple[Path, list, int]] = []
        # What the files are to hold is said by `model.transformer`; who writes them is our own matter.
        write, model.write_file = model.write_file, lambda *file: planned.append(file)
        try:
            self.paths = [str(path) for path in model.transformer(folder / f"model-{size}", size, SHARDS)]
        finally:
            model.write_file = write
        tensors = {f"tiny.{i}": ("BF16", [TINY_BYTES // 8]) for i in range(4)}
        self.tiny = str(files.write(folder / "tiny.safetensors", tensors))
        self._pool = ProcessPoolExecutor(min(SHARDS, len(os.sched_getaffinity(0))))
        plans = {str(path): (path, group, seed) for path, group, seed in planned}
        self._sums: list[Future[int]] = [
            self._pool.submit(_written_and_summed, path, plans.get(path)) for path in self.paths
        ]

    def checksum(self) -> int:
        """Waits until the files are there; the number that loaders must arrive at."""
        total = sum(future.result() for future in self._sums) % 2**64
        self._pool.shutdown()
        return total

    def bytes(self) -> int:
        """Size of the files."""
        return sum(os.path.getsize(path) for path in self.paths)


def sparse_model(folder: Path, size: int) -> list[str]:
    """Files of a model whose tensors are zeros without blocks on the drive: only the headers are written."""
    write, model.write_file = model.write_file, _write_sparse
    try:
        return [str(path) for path in model.transformer(folder, size, SHARDS)]
    finally:
        model.write_file = write


def _write_sparse(path: Path, tensors: list[tuple[str, str, list[int], int]], _seed: int) -> None:
    files.write_sparse(path, {name: (dtype, shape, size) for name, dtype, shape, size in tensors})


def _written_and_summed(path: str, plan: tuple[Path, list, int] | None) -> int:
    if plan is not None:
        model.write_file(*plan)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return checksum.of_files([path])


@dataclass
class Place:
    """A folder for files."""

    path: Path
    is_ours: bool
    """Whether it was made by the suite, and goes with it."""

    def remove(self) -> None:
        """Removes it, if it is ours."""
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)


def place(asked: Path | None, default: Path, needed: int) -> Place:
    """The folder asked for; else the default one or a new one, on the local file system with the most room."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        return Place(asked.resolve(), is_ours=False)
    default.parent.mkdir(parents=True, exist_ok=True)
    roots = [root for root in _mounts(LOCAL) if os.access(root, os.W_OK)]
    largest = max(roots, key=_free_bytes, default=default.parent)
    if os.stat(largest).st_dev == os.stat(default.parent).st_dev or _free_bytes(largest) < needed:
        default.mkdir(exist_ok=True)
        return Place(default, is_ours=False)
    return Place(Path(tempfile.mkdtemp(prefix="hoistway-gpu-", dir=largest)), is_ours=True)


def has_room_for(folder: Path, size: int, device_bytes: int) -> bool:
    """Whether another model of that size fits the disk, the page cache beside all others, and the device."""
    return _free_bytes(folder) > 2 * size and fits_memory(size, 3 * size, device_bytes)


def fits_memory(size: int, needed: int, device_bytes: int) -> bool:
    """Whether so many bytes of memory are available, and a model of that size fits the device."""
    return _memory_available() > needed and device_bytes > 1.2 * size


def copy_in_memory(model_paths: list[str], tiny: str, needed: int) -> tuple[Place | None, str]:
    """A copy of the files in a file system in memory; or none, and why."""
    available = _memory_available()
    if available < 3 * needed:
        return None, f"{available / 2**30:.0f} GiB of memory are too little beside a copy of the model"
    roots = [root for root in _mounts({"tmpfs"}) if os.access(root, os.W_OK) and _free_bytes(root) > needed]
    roots.sort(key=lambda root: root != "/dev/shm")
    if not roots:
        return None, "no tmpfs has room for the model"
    folder = Path(tempfile.mkdtemp(prefix="hoistway-gpu-", dir=roots[0]))
    with ProcessPoolExecutor(SHARDS) as pool:
        list(
            pool.map(
                shutil.copyfile, [*model_paths, tiny], [folder / Path(p).name for p in [*model_paths, tiny]]
            )
        )
    return Place(folder, is_ours=True), ""


def _mounts(kinds: set[str]) -> list[str]:
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [mount for _, mount, kind, *_ in lines if kind in kinds and os.path.isdir(mount)]


def _free_bytes(folder: str | Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _memory_available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024


def parsed_bytes(text: str) -> int:
    """Bytes of text such as `8GiB`."""
    for unit, factor in (
        ("GiB", 2**30),
        ("MiB", 2**20),
        ("KiB", 2**10),
        ("GB", 10**9),
        ("MB", 10**6),
        ("B", 1),
    ):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)
