"""Finds the reader that can be used here, and makes one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from hoistway import _native
from hoistway._checkpoint import usrbio_directories
from hoistway.compat.threefs._readers import MockFileReader, ThreeFSFileReader
from hoistway.errors import CheckpointNotFoundError, HoistwayError, RouteUnavailableError

_LIBRARY = "libhf3fs_api_shared.so"
_BACKENDS = ("cpp", "python", "mock", "auto")
_logger = logging.getLogger("hoistway.compat.threefs")


def is_available(mount_point: str | None = None) -> bool:
    """Whether a 3FS can be read from by USRBIO, now: its daemon was asked.

    Args:
        mount_point: Which one. Without it, that of the environment's ``THREEFS_MOUNT_POINT``; without that, any that is
            mounted.
    """
    given = mount_point or os.environ.get("THREEFS_MOUNT_POINT")
    return any(_can_be_read(point) for point in ([given] if given else _native.mount_points_of_3fs()))


def get_backend() -> str:
    """The reader that `create_reader` makes: ``cpp``, which is native code here too, or ``mock`` where no 3FS is.

    Raises:
        ValueError: ``FASTSAFETENSORS_BACKEND`` names none.
    """
    forced = _forced()
    if forced != "auto":
        return forced
    return "cpp" if is_available() else "mock"


def create_reader(backend: str = "auto", **options: Any) -> ThreeFSFileReader | MockFileReader:
    """Makes a reader.

    Args:
        backend: ``cpp`` or ``python`` for a reader of a 3FS, ``mock`` for one of any file system. ``auto`` is what the
            environment's ``FASTSAFETENSORS_BACKEND`` says; without it, a reader of a 3FS or, where there is none at the
            mount point, one of any file system, with a warning in the log that says why.
        options: The reader's arguments.

    Raises:
        ValueError: There is no such backend.
        hoistway.errors.RouteUnavailableError: A reader of a 3FS was asked for, and cannot be.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend cannot be '{backend}': it must be one of {', '.join(_BACKENDS)}")
    if backend == "auto":
        backend = _forced()
    if backend == "mock":
        return MockFileReader(**options)
    if backend != "auto":
        return ThreeFSFileReader(**options)
    try:
        return ThreeFSFileReader(**options)
    except (RouteUnavailableError, CheckpointNotFoundError) as error:
        _logger.warning("files are read without USRBIO: %s", error)
        return MockFileReader(**options)


def extract_mount_point(path: str | os.PathLike[str]) -> str:
    """Where the 3FS is mounted that a path lies on; empty if it lies elsewhere.

    Raises:
        hoistway.errors.CheckpointNotFoundError: There is nothing at the path, so that nothing tells where it would lie.
    """
    try:
        return os.fspath(_native.mount_point_of_3fs(os.fspath(path)))
    except RouteUnavailableError:
        return ""


def get_hf3fs_lib_path() -> str | None:
    """The vendor's library that this process has loaded, else one that it would find. None is needed."""
    if loaded := _loaded_library():
        return loaded
    named = os.environ.get("HF3FS_LIB_DIR", "")
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for directory in [named, *listed, *(usrbio_directories() or [])]:
        if directory:
            exact = Path(directory, _LIBRARY)
            found = [exact] if exact.is_file() else sorted(Path(directory).glob(f"{_LIBRARY}*"))
            if found:
                return str(found[0])
    return None


def _loaded_library() -> str | None:
    # Address, permissions, offset, device, inode, path.
    mappings = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    paths = (mapping.split(maxsplit=5)[-1] for mapping in mappings)
    return next((path for path in paths if os.path.basename(path).startswith(_LIBRARY)), None)


def _forced() -> str:
    forced = os.environ.get("FASTSAFETENSORS_BACKEND", "").strip().lower() or "auto"
    if forced not in _BACKENDS:
        choices = ", ".join(_BACKENDS)
        raise ValueError(f"FASTSAFETENSORS_BACKEND cannot be '{forced}': it must be one of {choices}")
    return forced


def _can_be_read(mount_point: str | os.PathLike[str]) -> bool:
    try:
        _native.probe_3fs(os.fspath(mount_point), "auto", usrbio_directories() or [])
    except HoistwayError as error:
        _logger.debug("the 3FS at %s cannot be read from: %s", mount_point, error)
        return False
    return True
