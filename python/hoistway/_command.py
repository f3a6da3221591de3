"""The command ``hoistway`` of the package: it runs ``hoistway-cli`` in this process."""

from __future__ import annotations

import _signal
import os
import sys

from hoistway import _native
from hoistway._devices import find_libraries


def main() -> int:
    """Runs the command line of this process, and returns the exit code."""
    if sys.argv[1:2] == ["run"]:
        # The program takes the place of this process, with its signals and streams as they are.
        from hoistway import run  # noqa: PLC0415

        run.main(sys.argv[2:])
    # As in a program without Python: Ctrl-C ends the process at once, unless whatever started it ignores Ctrl-C.
    # The module `signal` would import `enum`, which takes longer than all of this.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _open_standard_streams()
    find_libraries()
    return _native.run_command([sys.executable, "-m", "hoistway"], sys.argv[1:])


def _open_standard_streams() -> None:
    """Opens standard streams that are closed: else the next opened file would take their number and be written to."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
