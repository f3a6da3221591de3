"""Processes of the suite that answer with lines of JSON; and the time that is left for them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from gpu.environment import Environment


class Deadline:
    """When the suite has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, never less than none."""
        return max(0.0, self._end - time.monotonic())


class ChildError(Exception):
    """A process ended, or took too long, before it answered."""


class Child:
    """A module of this package that runs as a process, in a folder where it may leave what it likes."""

    def __init__(
        self, environment: Environment, work: Path, *command: str, variables: dict[str, str] | None = None
    ) -> None:
        # A file rather than a pipe: a pipe is not emptied while the process is busy.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._unread = b""
        self._process = subprocess.Popen(
            [environment.python, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=work,
            env={**os.environ, **environment.variables, **(variables or {})},
            start_new_session=True,
        )

    def say(self, line: str) -> None:
        """Sends a line."""
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended, which the next answer will say.

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next line.

        Raises:
            ChildError: There is none.
        """
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                raise ChildError(f"took longer than {timeout:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise ChildError(self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def end(self, patience: float = 0.0) -> None:
        """Waits so long for the process to end by itself, and ends it then."""
        if self._process.stdin.closed:
            return
        self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended with {how}" + (f": {' / '.join(lines[-3:])}" if lines else "")


def answers() -> TextIO:
    """Where a child writes its lines: what was its standard output. Whatever else is printed goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout.flush()
    os.dup2(2, 1)
    return lines


def tell(lines: TextIO, **values: Any) -> None:
    """Writes a line."""
    lines.write(json.dumps(values) + "\n")
    lines.flush()
