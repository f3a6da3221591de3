"""Files that Python code reads by itself, opened as the engine opens them."""

from __future__ import annotations

import os
import stat
import sys

from hoistway.errors import FormatError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO (a named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file for reading and returns its descriptor. It never waits, as a plain `open` of a FIFO does.

    Raises:
        FormatError: The path leads to something else.
        OSError: The file cannot be opened.
    """
    # Before it is opened: opening a device may do something.
    _check(os.stat(path), path)
    descriptor = _open_without_waiting(path)
    try:
        _check(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_without_waiting(path: str | os.PathLike[str]) -> int:
    if sys.platform == "win32":
        # Pipes have paths of their own there, and no file becomes one.
        return os.open(path, os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT)
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        # It may have become a FIFO since.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        # A program has a lease of it, which only regular files have, and is given time to let it go.
        return os.open(path, flags)
    os.set_blocking(descriptor, True)
    return descriptor


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise FormatError(f"{os.fspath(path)}: it is {kind}, not a regular file", path=path)
