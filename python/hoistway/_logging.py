"""Events of the engine, as records of the standard library's ``logging``.

Loggers are named after the parts of the engine, below ``hoistway``: ``hoistway.load.job``, ``hoistway.kv.store``.
"""

from __future__ import annotations

import atexit
import logging
import sys
import traceback
from threading import Thread
from typing import Any

from hoistway import _native

logger = logging.getLogger("hoistway")

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Stderr(logging.Handler):
    """Writes to standard error what ``HOISTWAY_LOG`` asks for, unless the program has handlers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or logger.handlers != [self] or sys.stderr is None:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


logging.addLevelName(5, "TRACE")
# After the import of `logging`, which registers what closes handlers: what is registered last runs first.
atexit.register(_native.stop_log)


def start(wanted: str | None) -> None:
    """Sends events to ``logging``: those that ``HOISTWAY_LOG`` names, else warnings."""
    if not wanted:
        _native.start_log(None)
        return
    try:
        _native.start_log(wanted)
    except ValueError as error:
        _native.start_log(None)
        logger.warning("HOISTWAY_LOG=%s is ignored: %s", wanted, error)
        return
    # The variable chooses: the logger lets through all that it names.
    logger.setLevel(1)
    logger.addHandler(_Stderr())


def hand_over_soon() -> None:
    """Called by the engine when events are queued. The thread is a daemon: a handler that hangs does not block exit."""
    Thread(target=_hand_over, name="hoistway-log", daemon=True).start()


def _hand_over() -> None:
    while (taken := _native.take_log()) is not None:
        records, dropped = taken
        emit(records, dropped)


def emit(records: list[tuple[int, str, str, float]], dropped: int) -> None:
    """Logs these events, and how many were left out before them."""
    if dropped:
        _log(logger, 30, f"{dropped} events came faster than they could be logged, and are left out")
    for level, name, text, created in records:
        times = {"created": created, "msecs": created % 1 * 1000}
        _log(logging.getLogger(_logger_name(name)), level, text, times)


def _log(target: logging.Logger, level: int, text: str, changes: dict[str, Any] | None = None) -> None:
    if not target.isEnabledFor(level):
        return
    record = target.makeRecord(target.name, level, "(hoistway)", 0, text, (), None)
    vars(record).update(changes or {})
    try:
        target.handle(record)
    except Exception:
        # A filter or a handler of the program failed: the other records are still logged.
        if logging.raiseExceptions and sys.stderr is not None:
            traceback.print_exc()


def _logger_name(target: str) -> str:
    """The logger of a part of the engine, below that of the package."""
    crate, _, module = target.partition(".")
    if crate.startswith("hoistway_"):
        crate = "hoistway." + crate.removeprefix("hoistway_")
    elif crate != "hoistway":
        crate = "hoistway." + crate
    return f"{crate}.{module}" if module else crate
