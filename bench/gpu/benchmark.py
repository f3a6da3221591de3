"""Measures loaders in turn, with the hardware's limits between them: rounds of cases, each load a fresh process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import files
from gpu.data import Model, copy_in_memory, fits_memory, sparse_model
from gpu.environment import Environment
from gpu.loaders import LOADERS, UnavailableError
from gpu.process import Child, ChildError, Deadline
from gpu.uses import USES

PEERS = ("safetensors", "fastsafetensors", "runai", "instanttensor")
BUFFERED_PEERS = ("fastsafetensors_buffered", "runai_buffered", "instanttensor_buffered")
# What starting one takes at most: frameworks are large, and a dozen start at once.
START_SECONDS = 90
# The longest that a load or limit may take, and the least time left for which one is started.
LOAD_SECONDS = 100
LEAST_SECONDS = 12


@dataclass(frozen=True)
class Case:
    """One table of results."""

    name: str
    title: str
    state: str
    """`warm`, `cold`, or `memory` for files that lie in memory."""
    loaders: tuple[str, ...]
    limits: tuple[tuple[str, ...], ...]
    """Arguments of the limits that belong to it."""


COPIES = (("slots",), ("buffer",), ("cache",))
# In how many processes a use is measured, if the first time in a process is what counts.
PROCESSES = {"first_load": 3, "conversion": 2}
CASES = (
    Case(
        "warm",
        "Page cache to GPU",
        "warm",
        ("hoistway", "hoistway_staged", "hoistway_torch", *PEERS, *BUFFERED_PEERS),
        COPIES,
    ),
    Case(
        "memory",
        "tmpfs to GPU",
        "memory",
        ("hoistway", "hoistway_staged", "hoistway_torch", *PEERS),
        COPIES,
    ),
    Case(
        "cold",
        "Drive to GPU",
        "cold",
        (
            "hoistway",
            "hoistway_staged",
            "hoistway_gds",
            "hoistway_torch",
            *PEERS,
            "fastsafetensors_gds",
        ),
        (("drive", "--threads", "8"), ("drive", "--threads", "32"), ("gds",)),
    ),
)


class Benchmark:
    """The measurements of a run, and what of them is done."""

    def __init__(
        self,
        environment: Environment,
        work: Path,
        models: tuple[Model, Model | None],
        deadline: Deadline,
        why_no_torch: str | None,
        *,
        device_bytes: int,
    ) -> None:
        model, large = models
        self._environment = environment
        self._work = work
        self._deadline = deadline
        self._why_no_torch = why_no_torch
        self._device_bytes = device_bytes
        self._model, self._large = model, large
        self._paths = {"drive": (model.paths, model.tiny)}
        self._seconds: dict[tuple[str, str], float] = {}
        self.document: dict[str, Any] = {
            "checksum": model.checksum(),
            "bytes": model.bytes(),
            "cases": {case.name: case.title for case in CASES},
            "loaders": {
                loader.name: {
                    "package": loader.package,
                    "setting": loader.setting,
                    "is_ours": loader.is_ours,
                }
                for loader in LOADERS.values()
            },
            "results": [],
            "uses": {},
            "unavailable": {case.name: {} for case in CASES},
            "skipped": [],
        }
        self._memory, self._why_no_memory = copy_in_memory(model.paths, model.tiny, model.bytes())
        if self._memory is not None:
            folder = self._memory.path
            self._paths["memory"] = (
                [str(folder / Path(path).name) for path in model.paths],
                str(folder / Path(model.tiny).name),
            )

    def close(self) -> None:
        """Removes the copy in memory."""
        if self._memory is not None:
            self._memory.remove()

    def run(self, rounds: int, after_round: Callable[[], None]) -> None:
        """All rounds, as far as the time allows."""
        for turn in range(rounds):
            for case in CASES:
                if turn == 0 and case.state == "cold":
                    # Before what takes longest: where time ends, it is peers' loads from the drive that are missing.
                    for use in USES:
                        self._run_use(use)
                        after_round()
                self._run_case(case, turn)
                after_round()

    def failures(self) -> list[str]:
        """What hoistway did not load, or not rightly."""
        found = [
            f"{result['case']}: {result['loader']} delivered other bytes than the files hold"
            for result in self.document["results"]
            if result.get("is_right") is False and self.document["loaders"][result["loader"]]["is_ours"]
        ]
        found += [
            f"{use}: {told['error']}" for use, told in self.document["uses"].items() if told["is_failure"]
        ]
        for case, reasons in self.document["unavailable"].items():
            found += [
                f"{case}: {name}: {reason['reason']}"
                for name, reason in reasons.items()
                if reason["is_failure"] and name.startswith("hoistway")
            ]
        return found

    def _run_use(self, use: str) -> None:
        """Measures a use of hoistway beside what it is held against."""
        told: dict[str, Any] = {"sides": {}, "error": None, "is_failure": False}
        self.document["uses"][use] = told
        folder = Path(tempfile.mkdtemp(prefix="uses-", dir=Path(self._model.tiny).parent))
        try:
            paths = self._paths_for(use, folder)
            for _ in range(PROCESSES.get(use, 1)):
                if told["error"] is None:
                    self._run_in_process(use, paths, folder, told)
        except UnavailableError as error:
            told["error"] = str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for side, measured in told["sides"].items():
            speeds = ", ".join(f"{each['bytes'] / each['seconds'] / 1e9:.2f}" for each in measured)
            print(f"{use:<16} {side:<26} {speeds} GB/s", flush=True)
        if told["error"] is not None:
            print(f"{use:<16} not measured: {told['error']}", flush=True)

    def _paths_for(self, use: str, folder: Path) -> list[str]:
        """The files of a use's model: that of the run, or a larger one."""
        if use == "largest_model":
            size = 4 * self._model.bytes()
            # The page cache holds it once, beside what is there already.
            if not fits_memory(size, 2 * size, self._device_bytes):
                raise UnavailableError(
                    "memory, or that of the device, is too small for a model of four times the size"
                )
            return sparse_model(folder / "model", size)
        model = self._large if use == "large_model" else self._model
        if model is None:
            raise UnavailableError(
                "there is too little memory or room on the disk for a model of twice the size"
            )
        return model.paths

    def _run_in_process(self, use: str, paths: list[str], folder: Path, told: dict[str, Any]) -> None:
        if self._deadline.left() < LEAST_SECONDS:
            told["error"] = "no time was left"
            return
        files.make_warm(paths)
        own = Path(tempfile.mkdtemp(dir=folder))
        command = ["-m", "gpu.uses", use, "--folder", str(own)]
        command += [] if self._why_no_torch else ["--torch"]
        child = Child(self._environment, self._work, *command, *paths)
        try:
            answer = child.answer(min(LOAD_SECONDS, self._deadline.left()))
        except ChildError as error:
            answer = {"error": str(error), "is_failure": self._deadline.left() > 0}
        finally:
            child.end(patience=20)
            shutil.rmtree(own, ignore_errors=True)
        for side, measured in answer.pop("sides", {}).items():
            told["sides"].setdefault(side, []).extend(measured)
        told |= answer

    def _run_case(self, case: Case, turn: int) -> None:
        if case.state == "memory" and self._memory is None:
            for what in (*case.loaders, *(limit[0] for limit in case.limits)):
                self._refuse(case, what, self._why_no_memory)
            return
        if self._deadline.left() < LEAST_SECONDS + 20:
            self._skip(case, turn, "all loaders")
            return
        children = self._started(case, turn)
        try:
            for step in _order(case, turn):
                if isinstance(step, tuple):
                    self._limit(case, turn, step)
                elif step in children:
                    self._load(case, turn, step, children[step])
        finally:
            for child in children.values():
                child.end()

    def _started(self, case: Case, turn: int) -> dict[str, Child]:
        """Processes of all loaders that work here, started at once: that takes longer than what is measured."""
        paths, tiny = self._files(case)
        children = {}
        for name in case.loaders:
            loader = LOADERS[name]
            if name in self.document["unavailable"][case.name]:
                continue
            if loader.needs_torch and self._why_no_torch is not None:
                self._refuse(case, name, self._why_no_torch)
                continue
            command = [
                "-m",
                "gpu.measure",
                name,
                "--tiny",
                tiny,
                *([] if self._why_no_torch else ["--torch"]),
            ]
            children[name] = Child(
                self._environment, self._work, *command, *paths, variables=loader.environment
            )
        ready = {}
        for name, child in children.items():
            try:
                answer = child.answer(min(START_SECONDS, self._deadline.left()))
            except ChildError as error:
                answer = {"ready": False, "reason": str(error)}
                # What hangs or crashes before it loads anything costs no other case its time.
                for other in CASES if self._deadline.left() > 0 else ():
                    if name in other.loaders:
                        self._refuse(other, name, str(error), is_failure=True)
            if answer["ready"]:
                ready[name] = child
                continue
            child.end()
            if self._deadline.left() <= 0:
                self._skip(case, turn, name)
            else:
                # That a route or a package is missing is no failure, and whatever else a named route says neither.
                refused = answer["reason"].startswith("RouteUnavailableError") or name == "hoistway_gds"
                self._refuse(case, name, answer["reason"], is_failure=not refused)
        return ready

    def _load(self, case: Case, turn: int, name: str, child: Child) -> None:
        if not self._has_time(case, name):
            self._skip(case, turn, name)
            return
        cached = self._put_into_state(case)
        child.say("go")
        try:
            result = child.answer(min(LOAD_SECONDS, self._deadline.left()))
        except ChildError as error:
            result = {"error": str(error)}
        # What peers take of memory is much the same wherever the files are, and they read slowly from a drive.
        tells_peaks = turn == 0 and (case.state != "cold" or LOADERS[name].is_ours)
        if tells_peaks and "error" not in result:
            self._put_into_state(case)
            child.say("peaks")
            try:
                result |= child.answer(min(LOAD_SECONDS, self._deadline.left()))
            except ChildError as error:
                result = {"error": f"a second load: {error}"}
        # Only when it has ended are its memories free for the next one.
        child.end(patience=20)
        if "error" in result:
            if self._deadline.left() <= 0:
                self._skip(case, turn, name)
            else:
                self._refuse(case, name, result["error"], is_failure=True)
            return
        result["is_right"] = result["checksum"] == self.document["checksum"]
        self._note(case, turn, {"loader": name, "cached_before": cached, **result})

    def _limit(self, case: Case, turn: int, limit: tuple[str, ...]) -> None:
        paths, _ = self._files(case)
        name = " ".join((limit[0], *limit[2:]))
        if limit[0] in self.document["unavailable"][case.name]:
            return
        if limit[0] == "gds" and not self._is_gds_proven():
            self._refuse(case, "gds", "no load of hoistway proved that reads go straight to the device")
            return
        if not self._has_time(case, name):
            self._skip(case, turn, name)
            return
        self._put_into_state(case)
        if limit[0] == "cache":
            limit = ("cache", "--threads", str(len(os.sched_getaffinity(0))))
        if limit[0] == "gds" and "HOISTWAY_CUFILE" in os.environ:
            limit = ("gds", "--library", os.environ["HOISTWAY_CUFILE"])
        child = Child(self._environment, self._work, "-m", "gpu.limits", *limit, *paths)
        try:
            result = child.answer(min(LOAD_SECONDS, self._deadline.left()))
        except ChildError as error:
            result = {"error": str(error)}
        child.end(patience=20)
        if "error" in result:
            self._refuse(case, limit[0], result["error"])
            return
        self._note(case, turn, {**result, "limit": limit[0], "setting": name})

    def _is_gds_proven(self) -> bool:
        own = [result for result in self.document["results"] if result.get("loader") == "hoistway_gds"]
        return bool(own) and "hoistway_gds" not in self.document["unavailable"]["cold"]

    def _files(self, case: Case) -> tuple[list[str], str]:
        return self._paths["memory" if case.state == "memory" else "drive"]

    def _put_into_state(self, case: Case) -> float | None:
        """Makes the files cold or warm; how much of them is cached, if the kernel says so."""
        paths, _ = self._files(case)
        if case.state == "memory":
            return None
        if case.state == "cold":
            return files.make_cold(paths)
        cached = files.cached_part(paths)
        return cached if cached is not None and cached > 0.9999 else files.make_warm(paths)

    def _has_time(self, case: Case, name: str) -> bool:
        expected = 1.5 * self._seconds.get((case.name, name), 0.0)
        return self._deadline.left() > max(LEAST_SECONDS, expected)

    def _note(self, case: Case, turn: int, result: dict[str, Any]) -> None:
        self.document["results"].append({"case": case.name, "round": turn, **result})
        name = result.get("loader") or result["setting"]
        self._seconds[case.name, name] = result["seconds"]
        speed = result.get("bytes", self.document["bytes"]) / result["seconds"] / 1e9
        wrong = "" if result.get("is_right", True) else "  WRONG BYTES"
        kind = "" if "loader" in result else "limit "
        print(
            f"round {turn + 1}  {case.name:<7} {kind + name:<26} {result['seconds']:8.3f} s {speed:7.2f} GB/s{wrong}",
            flush=True,
        )

    def _refuse(self, case: Case, name: str, reason: str, is_failure: bool = False) -> None:
        if name not in self.document["unavailable"][case.name]:
            self.document["unavailable"][case.name][name] = {"reason": reason, "is_failure": is_failure}
            print(f"         {case.name:<7} {name:<26} not measured: {reason}", flush=True)

    def _skip(self, case: Case, turn: int, name: str) -> None:
        self.document["skipped"].append(
            {"case": case.name, "round": turn, "what": name, "reason": "deadline"}
        )
        print(f"round {turn + 1}  {case.name:<7} {name:<26} skipped: no time is left", flush=True)


def _order(case: Case, turn: int) -> list[str | tuple[str, ...]]:
    """The loaders, beginning with another one each round, and between them the limits, so that all see one drift."""
    first = turn % len(case.loaders)
    steps: list[str | tuple[str, ...]] = [*case.loaders[first:], *case.loaders[:first]]
    for number, limit in enumerate(case.limits):
        steps.insert(number * (len(case.loaders) // len(case.limits) + 1), limit)
    return steps
