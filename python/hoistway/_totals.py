"""With ``HOISTWAY_REPORT=1``: one line about all loads of the process, on standard error when it ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from threading import RLock

from hoistway import _native
from hoistway._report import Report
from hoistway._words import counted, in_words, rate_in_words


class _Totals:
    def __init__(self) -> None:
        self._pending: deque[tuple[_native.Report, bool]] = deque()
        self._lock = RLock()
        self._is_counting = False
        self._files = 0
        self._loads: _native.Report | None = None

    def add(self, report: _native.Report, *, is_first: bool) -> None:
        """Adds a load; the first from a checkpoint also counts its files."""
        self._pending.append((report, is_first))
        self._count()

    def _count(self) -> None:
        # Never waits: what holds the lock may be interrupted by a signal handler that waits for another thread's load.
        # What is added meanwhile is counted by the holder, which looks again after it let go. A handler that raises may
        # leave the lock held, by the main thread: that one can still take it, and makes the line.
        while self._pending:
            is_held = False
            try:
                is_held = self._lock.acquire(blocking=False)
                if not is_held or self._is_counting:
                    return
                self._count_pending()
            finally:
                if is_held:
                    self._lock.release()

    def _count_pending(self) -> None:
        # A signal handler or a `__del__` may load meanwhile, in this thread: what it adds is counted here.
        try:
            self._is_counting = True
            while self._pending:
                report, is_first = self._pending[0]
                files = self._files + (Report._from_native(report).files if is_first else 0)
                self._loads = report if self._loads is None else self._loads.merged(report)
                self._files = files
                self._pending.popleft()
        finally:
            self._is_counting = False

    def line(self) -> str:
        """The line."""
        with self._lock:
            self._count()
            return self._line()

    def _line(self) -> str:
        if self._loads is None:
            return "hoistway: no checkpoint was loaded"
        report = Report._from_native(self._loads)
        rate = rate_in_words(report.tensor_bytes / max(report.total_seconds, 1e-9))
        return (
            f"hoistway: {counted(report.tensors, 'tensor')}, {in_words(report.tensor_bytes)} "
            f"from {counted(self._files, 'file')} in {report.total_seconds:.2f} s of loading ({rate}): "
            f"{report.shares()}"
        )


_totals: _Totals | None = None
"""The totals, if they are wanted."""


def start() -> None:
    """Keeps totals and shows them at the end."""
    _begin()
    atexit.register(_show)
    # A child counts its loads and prints its line. It prints none if it ends by `os._exit`.
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_begin)


def note(report: _native.Report, *, is_first: bool) -> None:
    """Adds a load; the first from a checkpoint also counts its files."""
    if _totals is not None:
        _totals.add(report, is_first=is_first)


def _begin() -> None:
    global _totals  # noqa: PLW0603
    _totals = _Totals()


def _show() -> None:
    if _totals is not None and sys.stderr is not None:
        print(_totals.line(), file=sys.stderr)
