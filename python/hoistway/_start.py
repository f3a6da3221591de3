"""What an import of the package starts: events of the engine, and totals."""

from __future__ import annotations

import atexit
import os
import sys

from hoistway import _native


def start() -> None:
    """Has the engine queue its events for ``logging``, and keeps totals if ``HOISTWAY_REPORT`` asks for them."""
    wanted = os.environ.get("HOISTWAY_LOG")
    if not wanted and is_command():
        # `logging` takes as long to import as all that the command needs: the first event brings it.
        _native.start_log(None)
        atexit.register(_native.stop_log)
    else:
        # Now: the program may name the level TRACE, and what it registers with `atexit` is called before the last
        # events are handed over, and may cause some.
        from hoistway import _logging  # noqa: PLC0415

        _logging.start(wanted)
    if sys.platform != "win32":
        os.register_at_fork(
            before=_native.pause_log, after_in_parent=_native.resume_log, after_in_child=_native.reset_log
        )
    if os.environ.get("HOISTWAY_REPORT", "") not in ("", "0"):
        from hoistway import _totals  # noqa: PLC0415

        _totals.start()


def is_command() -> bool:
    """Whether this process is the command, as its script or as ``python -m hoistway``."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if name == "-m":
        # As long as Python looks for the module, whose name is there alone.
        name = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return name in ("hoistway", "hoistway.exe")
