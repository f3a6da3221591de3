"""Reports of the last files that the drop-in loaded."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from threading import RLock
from typing import NamedTuple

from hoistway import _native
from hoistway._report import Report
from hoistway._words import in_words, rate_in_words

logger = logging.getLogger("hoistway.files")

_REMEMBERED = 64

_adding = RLock()
"""Guards the sums of all files, for a moment. A signal handler that loads may interrupt its holder."""


def _begin_in_child() -> None:
    # A thread that the child lacks may hold it.
    global _adding  # noqa: PLW0603
    _adding = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


class FileReport(NamedTuple):
    """The report of all loads from one opened file."""

    path: str
    report: Report


class Account:
    """Adds up the loads from one opened file, also those of several threads at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._native: _native.Report | None = None
        _recent.append(self)

    def add(self, report: _native.Report) -> None:
        """Counts a load that was completed."""
        with _adding:
            self._native = report if self._native is None else self._native.merged(report)

    def close(self) -> None:
        """Logs how the file came, once nothing more is read from it."""
        if sys.is_finalizing() or not logger.isEnabledFor(logging.INFO):
            return
        if report := self.report:
            rate = rate_in_words(report.tensor_bytes / max(report.total_seconds, 1e-9))
            size = in_words(report.tensor_bytes)
            logger.info(
                "%s: %s in %.3f s (%s): %s", self.path, size, report.total_seconds, rate, report.shares()
            )

    @property
    def report(self) -> Report | None:
        """One report of the loads; ``None`` before the first."""
        native = self._native
        return None if native is None else Report._from_native(native)


_recent: deque[Account] = deque(maxlen=_REMEMBERED)


def reports() -> list[FileReport]:
    """How the last files that were opened came, as far as anything was loaded from them, oldest first."""
    return [
        FileReport(account.path, report)
        for account in list(_recent)
        if (report := account.report) is not None
    ]


def last_report() -> Report | None:
    """How the last of these files came; ``None`` if there is none."""
    return next((report for account in reversed(list(_recent)) if (report := account.report)), None)
