"""What the page cache holds of the files that are measured, and how it comes to that."""

from __future__ import annotations

import ctypes
import os
import time

SYS_CACHESTAT = 451
CHUNK = 8 << 20
# How long pages may stay, in seconds.
PATIENCE = 5.0


def cached_part(paths: list[str]) -> float | None:
    """How much of the files the page cache holds; `None` if the kernel does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        asked = (ctypes.c_uint64 * 2)(0, size)
        answer = (ctypes.c_uint64 * 5)()
        failed = libc.syscall(SYS_CACHESTAT, descriptor, asked, answer, 0)
        os.close(descriptor)
        if failed:
            return None
        cached += min(size, answer[0] * os.sysconf("SC_PAGE_SIZE"))
        total += size
    return cached / max(total, 1)


def put_into_state(paths: list[str], state: str) -> float | None:
    """Makes the files cold, warm or half warm; returns the cached part if the kernel says what it is."""
    expected = {"cold": 0.0, "half": 0.5, "warm": 1.0}[state]
    if expected > 0:
        for path in paths:
            read(path)
    until = time.monotonic() + PATIENCE
    while True:
        for path in paths:
            forget(path, expected)
        cached = cached_part(paths)
        if cached is None or abs(cached - expected) <= 0.02:
            return cached
        if time.monotonic() > until:
            raise SystemExit(f"{cached:.1%} of the files is cached, but they should be {state}")
        # Pages stay that the end of a process still unmaps.
        time.sleep(0.1)


def read(path: str) -> None:
    """Reads ahead, as programs do: the page cache then consists of large folios."""
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget(path: str, kept: float) -> None:
    """Puts all but this part of a file, its first, out of the page cache."""
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, int(os.fstat(descriptor).st_size * kept), 0, os.POSIX_FADV_DONTNEED)
