"""With ``HOISTWAY_REPORT=1``: one line about all loads of the process, on standard error when it ends."""

from __future__ import annotations

import atexit
import os
import sys
from threading import Lock

from hoistway import _native
from hoistway._report import Report
from hoistway._words import counted, in_words, rate_in_words


class _Totals:
    def __init__(self) -> None:
        self.lock = Lock()
        self.files = 0
        self.loads: _native.Report | None = None

    def line(self) -> str:
        """The line."""
        with self.lock:
            if self.loads is None:
                return "hoistway: no checkpoint was loaded"
            report = Report._from_native(self.loads)
        rate = rate_in_words(report.tensor_bytes / max(report.total_seconds, 1e-9))
        return (
            f"hoistway: {counted(report.tensors, 'tensor')}, {in_words(report.tensor_bytes)} "
            f"from {counted(self.files, 'file')} in {report.total_seconds:.2f} s of loading ({rate}): {report.shares()}"
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
    if _totals is None:
        return
    with _totals.lock:
        _totals.files += Report._from_native(report).files if is_first else 0
        _totals.loads = report if _totals.loads is None else _totals.loads.merged(report)


def _begin() -> None:
    global _totals  # noqa: PLW0603
    _totals = _Totals()


def _show() -> None:
    if _totals is not None and sys.stderr is not None:
        print(_totals.line(), file=sys.stderr)
