"""Ctrl-C where a test wants it, in this process or one that it has started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until something holds; fails if it does not."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come to hold"
        time.sleep(0.001)


def interrupt_main_when(inside: str, then: Callable[[], object] = lambda: None) -> None:
    """Sends Ctrl-C to this process once its main thread waits in a function of this name."""
    main = threading.main_thread()

    def functions() -> Iterator[str]:
        frame = sys._current_frames().get(main.ident or 0)
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    def is_asleep() -> bool:
        # If a signal comes just before the main thread waits for a lock, Python may not see it, or an error of the lock
        # may hide it. A thread that waits for the interpreter is not asleep in this sense: it wakes every 5 ms.
        before = _sleep_of(main.native_id)
        time.sleep(0.02)
        return before is not None and before == _sleep_of(main.native_id)

    def watch() -> None:
        wait_until(lambda: inside in functions() and is_asleep() and inside in functions())
        os.kill(os.getpid(), signal.SIGINT)
        then()

    threading.Thread(target=watch).start()


def _sleep_of(thread: int | None) -> list[str] | None:
    """How often a thread of this process has waited so far, if it waits now."""
    status = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    counts = [line for line in status if "ctxt_switches" in line]
    return counts if any(line.startswith("State:\tS") for line in status) else None


def threads_of(process: int) -> set[str]:
    """The names of a process's threads."""
    return {name for task in Path(f"/proc/{process}/task").iterdir() for name in _line_of(task / "comm")}


def open_links(process: int) -> set[str]:
    """What a process has open, as the system calls it."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        # It may be closed while it is looked at.
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return found


def _line_of(path: Path) -> list[str]:
    # The thread may end while it is looked at.
    with suppress(OSError):
        return [path.read_text().strip()]
    return []
