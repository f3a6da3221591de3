"""The digest of a model's weights: KV of other weights must not be found, even if these lie at the same path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hoistway._regular import open_regular
from hoistway.errors import FormatError, OptionError

# Weights by the ending of their files. Engines load the first of these that a checkpoint has.
_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
# Pieces of all files of a checkpoint that are read, and of one file at least: weights that were trained further have
# the same headers.
_SAMPLES, _FEWEST = 2048, 16
_SAMPLE_BYTES = 4096
# Of files without a header of known length. A file of torch's has the checksums of its tensors at its end.
_EDGE_BYTES = 64 * 1024
_LONGEST_HEADER = 100_000_000
_THREADS = 8


def find(model: str, revision: str | None = None) -> tuple[list[Path], str]:
    """Returns the files of a model that its KV depends on, or none and why not.

    Args:
        model: A directory, a file, or a repository in the cache of the Hugging Face hub.
        revision: Which one of the repository, if the engine says.
    """
    path = Path(model)
    if path.is_file():
        return [path], ""
    note = ""
    if not path.is_dir():
        snapshot, note = _snapshot(model, revision)
        if snapshot is None:
            return [], note
        path = snapshot
    weights: list[Path] = []
    for ending in _ENDINGS:
        weights = _shown(path, f"*{ending}")
        if weights:
            break
    else:
        return [], f"{path} has no weights"
    described = [*_shown(path, "config.json"), *_shown(path, "*.index.json")]
    return [*described, *weights], note


def _shown(folder: Path, pattern: str) -> list[Path]:
    """Files that match, without hidden ones: those are no part of a checkpoint."""
    return [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(".") and file.is_file()]


def digest(files: Sequence[Path]) -> str:
    """Returns a digest of the files' names, sizes, headers and of samples of their bytes. It takes 8 MiB of reads for a
    checkpoint of some files.

    Raises:
        FormatError: A file is no regular one.
        OSError: A file cannot be read.
    """
    samples = max(_SAMPLES // len(files), _FEWEST)
    total = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_THREADS) as threads:
        for file, part in zip(files, threads.map(partial(_file_digest, samples), files), strict=True):
            total.update(hashlib.blake2b(file.name.encode()).digest())
            total.update(part)
    return total.hexdigest()


def _file_digest(samples: int, path: Path) -> bytes:
    found = hashlib.blake2b()
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found.update(size.to_bytes(8, "little"))

        def add(offset: int, length: int) -> None:
            while length > 0 and (piece := os.pread(file.fileno(), min(length, 1 << 20), offset)):
                found.update(piece)
                offset, length = offset + len(piece), length - len(piece)

        if path.suffix == ".json":
            add(0, size)
            return found.digest()
        add(0, _header_bytes(path, os.pread(file.fileno(), 8, 0), size))
        add(max(size - _EDGE_BYTES, 0), _EDGE_BYTES)
        for number in range(samples):
            add(size * number // samples, _SAMPLE_BYTES)
    return found.digest()


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    if path.suffix != ".safetensors":
        return min(_EDGE_BYTES, size)
    return min(8 + int.from_bytes(prefix, "little"), size, _LONGEST_HEADER)


def _snapshot(model: str, revision: str | None) -> tuple[Path | None, str]:
    """The directory that the hub's cache has a repository in. Nothing is downloaded."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415
    except ImportError:
        return None, f"{model} is not a directory, and huggingface_hub is not installed"
    try:
        found = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        return None, f"{model} is not a directory, nor is it in the cache of the Hugging Face hub: {error}"
    others = sum(1 for _ in found.parent.iterdir()) - 1
    if revision is None and others:
        return (
            found,
            f"the hub's cache has {others + 1} revisions of {model}, and {found.name} is taken for the one",
        )
    return found, ""


def checkpoint_digest(checkpoint: str) -> str:
    """Returns the digest of a checkpoint that a user names.

    Raises:
        OptionError: There is none that can be read.
    """
    files, why = find(checkpoint)
    if not files:
        raise OptionError(f"checkpoint cannot be {checkpoint!r}: {why}")
    try:
        return digest(files)
    except (FormatError, OSError) as error:
        raise OptionError(f"checkpoint cannot be {checkpoint!r}: {error}") from error
