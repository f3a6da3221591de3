"""What an import of the package starts. `logging` and totals, which most programs do not need then, come later."""

from __future__ import annotations

import atexit
import os
import sys

from hoistway import _native


def start() -> None:
    """Has the engine queue its events for ``logging``, and keeps totals if ``HOISTWAY_REPORT`` asks for them."""
    if wanted := os.environ.get("HOISTWAY_LOG"):
        from hoistway import _logging  # noqa: PLC0415

        _logging.start(wanted)
    else:
        # The engine imports `_logging` when there is an event.
        _native.start_log(None)
    atexit.register(_native.stop_log)
    if sys.platform != "win32":
        os.register_at_fork(
            before=_native.pause_log, after_in_parent=_native.resume_log, after_in_child=_native.reset_log
        )
    if os.environ.get("HOISTWAY_REPORT", "") not in ("", "0"):
        from hoistway import _totals  # noqa: PLC0415

        _totals.start()
