"""Runs the checks in a process of their own, which is replaced when one fails: a broken context breaks no other."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu.environment import Environment
from gpu.process import Child, ChildError, Deadline, answers, tell

CHECK_SECONDS = 120


class Checks:
    """The checks of a run, and the outcome of those that are done: `pass`, `fail`, or `skip` with a reason."""

    def __init__(
        self, environment: Environment, work: Path, folder: Path, deadline: Deadline, *, has_torch: bool
    ) -> None:
        self._start = lambda first: Child(
            environment,
            work,
            *("-m", "gpu.correctness", "--folder", str(folder), "--from", str(first)),
            *(["--torch"] if has_torch else []),
        )
        self._deadline = deadline
        self.done: list[dict[str, Any]] = []

    def run(self) -> None:
        """All checks, in order."""
        while self._run_until_failure():
            pass

    def _run_until_failure(self) -> bool:
        """Runs checks until one fails; whether there are others to be run after it."""
        child = self._start(len(self.done))
        current, names = "start", []
        try:
            names = child.answer(CHECK_SECONDS)["names"]
            while len(self.done) < len(names):
                current = names[len(self.done)]
                if self._deadline.left() < 1:
                    self._note(current, "skip", "no time is left")
                    continue
                child.say("next")
                result = child.answer(min(CHECK_SECONDS, max(self._deadline.left(), 1)))
                self._note(**result)
                if result["outcome"] == "fail":
                    break
        except ChildError as error:
            self._note(current, "fail", f"its process {error}")
        finally:
            child.end(patience=10)
        # Where not even the process starts, there are no names, and nothing to go on with.
        return len(self.done) < len(names)

    def _note(self, name: str, outcome: str, reason: str, seconds: float = 0.0) -> None:
        self.done.append({"name": name, "outcome": outcome, "reason": reason, "seconds": seconds})
        print(f"{outcome}  {name} ({seconds:.1f} s){'  ' if reason else ''}{reason}", flush=True)


def main() -> None:
    """Runs one check for each line on standard input, from the one that the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()
    lines = answers()
    # They need hoistway, which the process that starts this one may lack.
    from gpu import check_beside, check_bytes, check_conduct, check_uses  # noqa: PLC0415
    from gpu.subject import SkipError, Subject  # noqa: PLC0415

    checks = [*check_bytes.CHECKS, *check_conduct.CHECKS, *check_uses.CHECKS, *check_beside.CHECKS]
    subject = Subject(arguments.folder, arguments.torch)
    tell(lines, names=[check.__name__ for check in checks])
    for check in checks[arguments.first :]:
        if sys.stdin.readline().strip() != "next":
            return
        started = time.perf_counter()
        try:
            outcome, reason = "pass", check(subject) or ""
        except SkipError as error:
            outcome, reason = "skip", str(error)
        except Exception as error:
            traceback.print_exc()
            outcome, reason = "fail", f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
        tell(lines, name=check.__name__, outcome=outcome, reason=reason, seconds=seconds)
    # Whatever a broken context would say while it is taken down says nothing more.
    os._exit(0)


if __name__ == "__main__":
    main()
