"""What the page cache holds of the files that are measured, and how it comes to that."""

from __future__ import annotations

import ctypes
import os

SYS_CACHESTAT = 451
CHUNK = 8 << 20


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
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if state != "cold":
                # Reading ahead, as programs do: the page cache then consists of large folios.
                buffer = bytearray(CHUNK)
                while os.readv(descriptor, [buffer]) > 0:
                    pass
            kept = {"cold": 0, "half": size // 2, "warm": size}[state]
            if kept < size:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, kept, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    cached = cached_part(paths)
    expected = {"cold": 0.0, "half": 0.5, "warm": 1.0}[state]
    if cached is not None and abs(cached - expected) > 0.02:
        raise SystemExit(f"{cached:.1%} of the files is cached, but they should be {state}")
    return cached
