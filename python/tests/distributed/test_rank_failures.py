"""An error on one rank is raised on all, with the same message and in time: no rank hangs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hoistway
import pytest
import torch
import torch.distributed as dist
from conftest import make_cold, serving, write_model
from hoistway import distributed as wd
from hoistway.distributed import _catalog, _delivery, _link, _load
from hoistway.distributed._delivery import Delivery
from hoistway.distributed._exchange import Exchange
from hoistway.distributed._link import Link
from hoistway.errors import DistributedError, ForkedError
from interrupting import interrupt_main_when
from ranks import Outcome, attempt, on_ranks, values

SHORT = 15.0
"""Seconds that ranks wait for each other where one is silent: so long that no other is late on a busy machine."""


def model(directory: Path, name: str = "m.safetensors", count: int = 24) -> str:
    directory.mkdir(exist_ok=True)
    return str(write_model(directory / name, {f"t{i:02}": ("BF16", [512, 1024]) for i in range(count)}))


def in_turn(rank: int, cases: list[list[dict[str, Any]]]) -> list[Outcome]:
    """Loads with each case's arguments for this rank. All must fail, and leave the group as good as it was."""
    outcomes = []
    for case in cases:
        arguments = dict(case[rank])
        hoistway.__version__ = arguments.pop("version", "1.2.3")
        outcomes.append(attempt(lambda arguments=arguments: wd.load_file(**{"timeout": 20, **arguments})))
        total = torch.tensor([rank])
        torch.distributed.all_reduce(total)
        assert total.item() == 1
        assert threading.active_count() == 1, threading.enumerate()
    return outcomes


def test_ranks_that_differ_get_one_error_that_says_in_what(tmp_path: Path) -> None:
    path, longer = model(tmp_path), model(tmp_path / "longer", count=25)
    renamed = model(tmp_path, "renamed.safetensors")
    wide = str(write_model(tmp_path / "n.safetensors", {"a": ("F32", [2, 3])}))
    (tmp_path / "other").mkdir()
    high = str(write_model(tmp_path / "other" / "n.safetensors", {"a": ("F32", [3, 2])}))
    same = {"paths": path}
    cases = [
        (
            [same, {"paths": longer}],
            r"the files: rank 0: 1, number 1 is m.safetensors of \d+ bytes; rank 1: 1, number",
        ),
        ([same, {"paths": renamed}], "the files: .*m.safetensors.*renamed.safetensors"),
        (
            [same, {"paths": [path, high]}],
            "the files: rank 0: 1, number 2 is missing; rank 1: 2, number 2 is n",
        ),
        (
            [{"paths": wide}, {"paths": high}],
            "the tensors of the files: rank 0: 1 with digest .*; rank 1: 1 with",
        ),
        ([same, same | {"version": "0.0.1"}], "version of hoistway: rank 0: 1.2.3; rank 1: 0.0.1"),
        ([same, same | {"strategy": "share"}], "option strategy: rank 0: auto; rank 1: share"),
        (
            [same, same | {"max_in_flight": "2GiB"}],
            "option max_in_flight: rank 0: 1073741824 bytes; rank 1: 2147483648 bytes",
        ),
    ]
    for first, second, (_, expected) in zip(
        *values(on_ranks(in_turn, 2, tmp_path, [arguments for arguments, _ in cases])), cases, strict=True
    ):
        assert first.error == second.error == "DistributedError", (first, second)
        assert first.message == second.message
        assert re.search(expected, first.message), first.message


def alike(rank: int, path: str) -> int:
    written: list[dict[str, Any]] = [
        {"timeout": 20, "max_in_flight": "1GiB"},
        {"timeout": 20.0, "max_in_flight": 1 << 30},
    ]
    return len(wd.load_file(path, **written[rank]))


def test_options_that_mean_the_same_may_be_written_differently(tmp_path: Path) -> None:
    assert values(on_ranks(alike, 2, tmp_path, model(tmp_path))) == [24, 24]
    assert {_load._dtype_name(dtype) for dtype in ("bfloat16", "BF16", torch.bfloat16)} == {"bf16"}
    assert _load._dtype_name(torch.float16) == _load._dtype_name("half") != _load._dtype_name("float32")
    assert _load._dtype_name(None) is None


def test_what_fails_alike_on_all_ranks_raises_as_it_would_on_one(tmp_path: Path) -> None:
    path = model(tmp_path)
    exotic = str(write_model(tmp_path / "n.safetensors", {"a": ("F6_E2M3", [4, 4])}))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"paths": path + "x"}, "CheckpointNotFoundError"),
        ({"paths": path, "select": "u*"}, "TensorNotFoundError"),
        ({"paths": path, "shards": {"u*": 0}}, "TensorNotFoundError"),
        ({"paths": path, "shards": {"t*": 2}}, "OptionError"),
        ({"paths": path, "shards": {"t*": -1}}, "OptionError"),
        ({"paths": path, "strategy": "both"}, "OptionError"),
        ({"paths": path, "max_in_flight": "a lot"}, "OptionError"),
        ({"paths": path, "max_in_flight": "3KiB", "strategy": "share"}, "OptionError"),
        ({"paths": path, "route": "warp"}, "OptionError"),
        ({"paths": path, "timeout": 0}, "OptionError"),
        ({"paths": exotic}, attempt(lambda: hoistway.load_file(exotic)).error),
    ]
    for first, second, (case, expected) in zip(
        *values(on_ranks(in_turn, 2, tmp_path, [[case, case] for case, _ in cases])), cases, strict=True
    ):
        assert first.error == second.error == expected, (case, first, second)


def failing(rank: int, path: str, own_path: str) -> dict[str, Outcome]:
    """Rank 1 fails in several ways; what both ranks see of it."""

    def broken(name: str) -> bool:
        return rank == 0 or 1 / 0 > 0

    def truncated(name: str) -> bool:
        # Asked after the file was opened.
        if rank == 1:
            os.truncate(own_path, 1000)
        return True

    def stream(**arguments: Any) -> None:
        for _ in wd.iter_tensors(own_path, max_in_flight="4MiB", timeout=20, **arguments):
            truncated("")

    outcomes = {"predicate": attempt(lambda: wd.load_file(path, select=broken, timeout=20))}
    outcomes["missing"] = attempt(lambda: wd.load_file(path + "x" * rank, timeout=20))
    contents = Path(own_path).read_bytes()

    def load(**arguments: Any) -> None:
        wd.load_file(own_path, select=truncated, timeout=20, **arguments)

    for strategy in ("own", "share"):
        for name, work in {"truncated": load, "truncated while streaming": stream}.items():
            Path(own_path).write_bytes(contents)
            torch.distributed.barrier()
            outcomes[f"{name}, {strategy}"] = attempt(partial(work, strategy=strategy))
            assert threading.active_count() == 1, threading.enumerate()
    return outcomes


class StrangeError(Exception):
    """As others make them: its fields are none that can be sent, and it has no words."""

    path = 3
    tensor = object()
    offset = b"o"

    def __str__(self) -> str:
        raise RuntimeError


def failing_strangely(rank: int, path: str) -> list[Outcome]:
    class Dtype:
        def __str__(self) -> str:
            raise StrangeError

    def select(name: str) -> bool:
        if rank == 1:
            raise StrangeError
        return True

    def wrong_fields(name: str) -> bool:
        if rank == 1:
            raise hoistway.HoistwayError("wrong fields", path=3, tensor=b"t", offset="o")  # type: ignore[arg-type]
        return True

    dtype = Dtype() if rank == 1 else None
    return [
        attempt(lambda: len(wd.load_file(path, select=select, timeout=20))),
        attempt(lambda: len(wd.load_file(path, select=wrong_fields, timeout=20))),
        attempt(lambda: len(wd.load_file(path, dtype=dtype, timeout=20))),
    ]


def test_errors_that_cannot_be_described_are_told_all_the_same(tmp_path: Path) -> None:
    first, second = values(on_ranks(failing_strangely, 2, tmp_path, model(tmp_path)))
    for seen, own in zip(first, second, strict=True):
        assert (seen.error, seen.rank) == ("DistributedError", 1), seen
        # Told by the other rank, rather than taken for lost.
        assert own.cause == seen.kind
    assert [seen.kind for seen in first[:2]] == ["StrangeError", "HoistwayError"]


def failing_with_own_copies(rank: int, path: str, copies: list[str]) -> dict[str, Outcome]:
    return failing(rank, path, copies[rank])


def test_the_failure_of_one_rank_is_the_error_of_all(tmp_path: Path) -> None:
    copies = [model(tmp_path / name) for name in ("a", "b")]
    first, second = values(on_ranks(failing_with_own_copies, 2, tmp_path, model(tmp_path), copies))
    causes = {"predicate": ["ZeroDivisionError"], "missing": ["CheckpointNotFoundError"]}
    assert len(first) == 6
    for name, seen in first.items():
        own = second[name]
        assert seen.error == own.error == "DistributedError", (name, seen, own)
        assert seen.message == own.message
        assert seen.rank == own.rank == 1
        assert own.cause == own.kind == seen.kind
        assert seen.kind in causes.get(name, ["TruncatedError", "FileChangedError"]), (name, seen)
        assert seen.message.startswith(f"rank 1 failed: {seen.kind}: ")
        if name.startswith("truncated"):
            assert "/b/m.safetensors" in seen.message


def replaced(rank: int, path: str, moment: str) -> Outcome:
    """Rank 0 puts another file of the same size and tensors, or a link to it, where ``path`` was, once that is open."""

    def replace() -> None:
        if rank == 0 and os.path.lexists(path + ".new"):
            os.replace(path + ".new", path)

    read_catalog = _load.read_catalog

    def read_catalog_of_replaced(*arguments: Any) -> Any:
        if moment == "opened":
            replace()
        catalog = read_catalog(*arguments)
        if moment == "compared":
            replace()
        return catalog

    _load.read_catalog = read_catalog_of_replaced
    if rank == 1:
        until(lambda: not os.path.lexists(path + ".new"))
    return attempt(lambda: wd.load_file(path, strategy="share", timeout=20))


@pytest.mark.parametrize("moment", ["opened", "compared"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_replaced_between_two_ranks_is_noticed(
    tmp_path: Path, moment: str, is_link: bool
) -> None:
    path, other = model(tmp_path), model(tmp_path, "m.safetensors.other")
    if is_link:
        os.rename(path, path + ".first")
        os.symlink(path + ".first", path)
        os.symlink(other, path + ".new")
    else:
        os.rename(other, path + ".new")
    for outcome in values(on_ranks(replaced, 2, tmp_path, path, moment)):
        assert outcome.error == "DistributedError"
        assert f"the ranks differ in the file {path}" in outcome.message


def of_its_own_store(rank: int, url: str, endpoints: list[str]) -> Outcome:
    # On different nodes, too: a URL means the same everywhere.
    _load._this_host = lambda: f"host {rank}"
    store = {"endpoint": endpoints[rank], "anonymous": True}
    return attempt(lambda: len(wd.load_file(url, store=store, timeout=20)))


def test_an_object_that_is_replaced_between_two_ranks_is_noticed(tmp_path: Path) -> None:
    for seed, name in enumerate(["before", "after"]):
        folder = tmp_path / name / "models"
        folder.mkdir(parents=True)
        write_model(folder / "m.safetensors", {"a": ("U8", [1000])}, seed=seed)
    url = "s3://models/m.safetensors"
    with serving(tmp_path / "before") as before, serving(tmp_path / "after") as after:
        for outcome in values(on_ranks(of_its_own_store, 2, tmp_path, url, [before, after])):
            assert outcome.error == "DistributedError"
            assert f"the ranks differ in the file {url}" in outcome.message
        same = values(on_ranks(of_its_own_store, 2, tmp_path, url, [before, before]))
        assert [outcome.error for outcome in same] == [None, None]


def on_another_host(rank: int, path: str) -> int:
    """Each rank has a disk of its own, with the file at the same path."""
    file = _catalog._file

    def file_of_this_host(*facts: Any) -> _catalog.File:
        found = file(*facts)
        places, identity, is_global = found.identity
        return found._replace(identity=(places, f"{identity} of {rank}", is_global))

    _catalog._file = file_of_this_host
    _load._this_node = lambda: f"host {rank}"
    return len(wd.load_file(path, node="all of them", strategy="share", timeout=20))


def test_hosts_that_share_reads_may_have_copies_of_their_own(tmp_path: Path) -> None:
    assert values(on_ranks(on_another_host, 2, tmp_path, model(tmp_path))) == [24, 24]


def stopping(rank: int, path: str) -> list[Outcome]:
    def take(most: int) -> None:
        with wd.iter_tensors(path, max_in_flight="4MiB", strategy="share", timeout=20) as tensors:
            for number, _ in enumerate(tensors, start=1):
                if number == most:
                    break

    def drop() -> None:
        tensors = wd.iter_tensors(path, max_in_flight="4MiB", strategy="own", timeout=20)
        next(tensors)
        if rank == 1:
            list(tensors)

    outcomes = [attempt(lambda: take(3 if rank == 0 else 100)), attempt(lambda: take(3)), attempt(drop)]
    assert threading.active_count() == 1, threading.enumerate()
    return outcomes


def test_who_stops_taking_tensors_ends_the_load_of_those_who_go_on(tmp_path: Path) -> None:
    first, second = values(on_ranks(stopping, 2, tmp_path, model(tmp_path)))
    assert [outcome.error for outcome in first] == [None] * 3
    assert [outcome.error for outcome in second] == ["DistributedError", None, "DistributedError"]
    for left in (second[0], second[2]):
        assert (left.rank, left.kind) == (0, "Stopped")


def under_a_limit(
    rank: int, path: str, control_group: str, available: int, cases: list[Any]
) -> list[Outcome]:
    """All ranks are in one control group, which has a limit of its own."""
    limit = hoistway.MemoryLimit(f"the cgroup limit {control_group}", available, available)
    hoistway.memory_limits = lambda: [limit]
    outcomes = []
    for function, strategy in cases:

        def load(function: str = function, strategy: str = strategy) -> int:
            loader = {
                "load_file": wd.load_file,
                "iter_tensors": lambda *a, **k: dict(wd.iter_tensors(*a, **k)),
            }
            return len(loader[function](path, strategy=strategy, max_in_flight="3MiB", timeout=20))

        outcomes.append(attempt(load))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    ("mebibytes", "expected"), [(60, [None, None, None]), (47, ["MemoryBudgetError"] * 2 + [None])]
)
def test_ranks_under_one_limit_add_up_what_they_allocate(
    mebibytes: int, expected: list[str | None], tmp_path: Path
) -> None:
    # 24 MiB for each of two ranks: each alone has room, both together have not. A stream keeps a step of it.
    cases = [("load_file", "own"), ("load_file", "share"), ("iter_tensors", "own")]
    arguments = model(tmp_path), str(tmp_path), mebibytes << 20, cases
    first, second = values(on_ranks(under_a_limit, 2, tmp_path, *arguments))
    assert [outcome.error for outcome in first] == [outcome.error for outcome in second] == expected
    for one, other in zip(first, second, strict=True):
        assert one.message == other.message
        if one.error is not None:
            assert re.search(
                r"the 2 ranks under the cgroup limit \S+ need .* MiB together, and it leaves 47.0 MiB: ",
                one.message,
            )


def under_limits_of_their_own(rank: int, path: str, control_groups: list[str]) -> int:
    limit = hoistway.MemoryLimit(f"the cgroup limit {control_groups[rank]}", 30 << 20, 30 << 20)
    hoistway.memory_limits = lambda: [limit]
    return len(wd.load_file(path, strategy="own", timeout=20))


def test_ranks_under_limits_of_their_own_are_not_added_up(tmp_path: Path) -> None:
    groups = [tmp_path / "a", tmp_path / "b"]
    for group in groups:
        group.mkdir()
    arguments = model(tmp_path), [str(group) for group in groups]
    assert values(on_ranks(under_limits_of_their_own, 2, tmp_path, *arguments)) == [24, 24]


def dying(rank: int, path: str, victim: int, strategy: str) -> Outcome:
    def take() -> None:
        for number, _ in enumerate(
            wd.iter_tensors(path, max_in_flight="4MiB", strategy=strategy, timeout=60)
        ):
            if rank == victim and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    return attempt(take)


@pytest.mark.parametrize(
    ("victim", "strategy", "ranks"), [(1, "share", 2), (1, "share", 3), (0, "own", 3), (2, "own", 5)]
)
def test_a_rank_that_is_killed_ends_all_others(
    victim: int, strategy: str, ranks: int, tmp_path: Path
) -> None:
    # Of five ranks two have no connection to the victim: gloo tells them nothing.
    outcomes = on_ranks(dying, ranks, tmp_path, model(tmp_path), victim, strategy, within=100)
    assert outcomes.pop(victim).error == "died"
    for outcome in outcomes:
        assert outcome.value.error == "DistributedError", outcome
        assert f"rank {victim} ended, or did not answer" in outcome.value.message
        assert outcome.value.rank == victim
        # Not by the timeout of the load.
        assert outcome.value.seconds < 50


def killed_before(rank: int, path: str) -> Outcome:
    def select(name: str) -> bool:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return attempt(lambda: wd.load_file(path, select=select, timeout=20))


def test_a_rank_that_dies_before_it_agrees_ends_all_others(tmp_path: Path) -> None:
    survivor, victim = on_ranks(killed_before, 2, tmp_path, model(tmp_path), within=30)
    assert victim.error == "died"
    assert (survivor.value.error, survivor.value.rank) == ("DistributedError", 1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def silent(rank: int, path: str, directory: str, whose_timeout: str) -> Outcome:
    marks = [Path(directory, f"{other} ended") for other in (0, 2)]
    group, timeout = None, SHORT
    if whose_timeout == "group":
        group, timeout = dist.new_group(timeout=timedelta(seconds=SHORT)), 300.0

    def take() -> None:
        for _ in wd.iter_tensors(path, max_in_flight="4MiB", strategy="share", group=group, timeout=timeout):
            if rank == 1:
                until(lambda: all(mark.exists() for mark in marks))

    outcome = attempt(take)
    if rank != 1:
        Path(directory, f"{rank} ended").touch()
    return outcome


@pytest.mark.parametrize("whose_timeout", ["load", "group"])
def test_a_rank_that_is_silent_is_taken_for_lost(whose_timeout: str, tmp_path: Path) -> None:
    outcomes = on_ranks(silent, 3, tmp_path, model(tmp_path), str(tmp_path), whose_timeout, within=100)
    first, waiting, third = values(outcomes)
    for outcome in (first, third):
        assert (outcome.error, outcome.rank) == ("DistributedError", 1), outcome
        assert f"rank 1 ended, or did not answer within {SHORT:g} s" in outcome.message
    # It finds the others gone, who are not lost.
    assert (waiting.error, waiting.rank) == ("DistributedError", None)


def interrupted(rank: int, path: str, mark: str) -> list[Outcome]:
    def take() -> None:
        for number, _ in enumerate(wd.iter_tensors(path, max_in_flight="4MiB", strategy="own", timeout=20)):
            if number == 0 and rank == 0:
                interrupt_main_when("_call", Path(mark).touch)
            if number == 0 and rank == 1:
                until(Path(mark).exists)

    def load() -> None:
        if rank == 0:
            interrupt_main_when("steps")
        # Reads so short and so few at a time that the load takes much longer than the interruption.
        wd.load_file(path, route="threads", direct="always", chunk="4KiB", threads=1, timeout=20)

    outcomes = [attempt(take), attempt(load)]
    until(lambda: threading.active_count() == 1)
    return outcomes


def test_ctrl_c_on_one_rank_ends_the_load_on_all(tmp_path: Path) -> None:
    path = model(tmp_path, count=128)
    make_cold(Path(path))
    first, second = values(on_ranks(interrupted, 2, tmp_path, path, str(tmp_path / "mark")))
    for pressed, seen in zip(first, second, strict=True):
        assert pressed.error == "KeyboardInterrupt", pressed
        assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen


def interrupted_between_calls(rank: int, path: str) -> Outcome:
    """Rank 0 is interrupted while its caller, and no other thread, has something to do."""
    steps = Delivery.steps

    def press_first(delivery: Delivery) -> Any:
        if rank == 0:
            signal.raise_signal(signal.SIGINT)
        return steps(delivery)

    Delivery.steps = press_first  # type: ignore[method-assign]
    outcome = attempt(lambda: wd.load_file(path, strategy="own", timeout=20))
    assert threading.active_count() == 1, threading.enumerate()
    return outcome


def test_ctrl_c_between_calls_is_told_to_other_ranks(tmp_path: Path) -> None:
    pressed, seen = values(on_ranks(interrupted_between_calls, 2, tmp_path, model(tmp_path)))
    assert pressed.error == "KeyboardInterrupt", pressed
    assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen


def interrupted_as_a_call_begins(rank: int, path: str, mark: str) -> Outcome:
    """Rank 0 is interrupted before it knows that its thread has the work. Rank 1 reads nothing until it has ended."""
    if rank == 0:
        submit = ThreadPoolExecutor.submit
        calls = itertools.count()

        def submit_and_press(executor: ThreadPoolExecutor, *work: Any) -> Any:
            future = submit(executor, *work)
            # The second call takes a step.
            if executor._thread_name_prefix == "hoistway-ranks" and next(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            return future

        ThreadPoolExecutor.submit = submit_and_press  # type: ignore[assignment, method-assign]
    else:
        read_after(mark)
    outcome = attempt(lambda: wd.load_file(path, strategy="own", timeout=20))
    if rank == 0:
        Path(mark).touch()
    assert threading.active_count() == 1, threading.enumerate()
    return outcome


def read_after(mark: str) -> None:
    """Has this rank read nothing until there is a file."""
    read = Delivery._read

    def read_late(delivery: Delivery, *what: Any) -> Any:
        until(Path(mark).exists)
        return read(delivery, *what)

    Delivery._read = read_late  # type: ignore[method-assign]


def interrupted_when_ready(rank: int, path: str, mark: str) -> Outcome:
    """Rank 0 has read at once, rank 1 not before rank 0's load has ended."""
    if rank == 0:
        gather = Link.gather_numbers

        def gather_and_press(link: Link, numbers: Any) -> Any:
            if len(numbers) == 3 and numbers[0] == _delivery.READY and not pressed:
                pressed.append(True)
                os.kill(os.getpid(), signal.SIGINT)
            return gather(link, numbers)

        pressed: list[bool] = []
        Link.gather_numbers = gather_and_press  # type: ignore[method-assign]
    else:
        read_after(mark)
    outcome = attempt(lambda: wd.load_file(path, strategy="own", timeout=20))
    if rank == 0:
        Path(mark).touch()
    return outcome


def interrupted_alone(rank: int, path: str, mark: str, presses: int) -> Outcome:
    """Rank 1 comes only after rank 0's load has ended."""
    if rank == 1:
        until(Path(mark).exists)
        return attempt(lambda: wd.load_file(path, timeout=20))
    _delivery.INTERRUPTED_SECONDS = 0.1 if presses == 1 else 1000.0
    result = Future.result

    def result_and_press(future: Future[Any], timeout: float | None = None) -> Any:
        if presses == 2 and timeout is not None and timeout > 1000:
            signal.raise_signal(signal.SIGINT)
        return result(future, timeout)

    Future.result = result_and_press  # type: ignore[assignment, method-assign]
    interrupt_main_when("result_and_press")
    outcome = attempt(lambda: wd.load_file(path, timeout=1000))
    Path(mark).touch()
    until(lambda: threading.active_count() == 1)
    return outcome


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_does_not_wait_for_a_rank_that_comes_much_later(tmp_path: Path, presses: int) -> None:
    outcomes = values(
        on_ranks(interrupted_alone, 2, tmp_path, model(tmp_path), str(tmp_path / "mark"), presses)
    )
    assert [outcome.error for outcome in outcomes] == ["KeyboardInterrupt", "DistributedError"], outcomes


def interrupted_without_looking(rank: int, path: str, mark: str) -> Outcome:
    """As with backends that only wait. Rank 1 comes once rank 0's load has ended, but for the thread that waits."""
    Link.wait_for_all = lambda link, work, *_, **__: link.wait(work)  # type: ignore[assignment, method-assign]
    if rank == 1:
        until(Path(mark).exists)
        return attempt(lambda: wd.load_file(path, strategy="own", timeout=40))
    _delivery.INTERRUPTED_SECONDS = _delivery.GIVING_UP_SECONDS = 0.05
    interrupt_main_when("result")
    outcome = attempt(lambda: wd.load_file(path, strategy="own", timeout=40))
    Path(mark).touch()
    until(lambda: threading.active_count() == 1)
    return outcome


def test_a_thread_that_its_rank_left_behind_tells_the_others(tmp_path: Path) -> None:
    outcomes = on_ranks(interrupted_without_looking, 2, tmp_path, model(tmp_path), str(tmp_path / "mark"))
    pressed, seen = values(outcomes)
    assert pressed.error == "KeyboardInterrupt", pressed
    assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen


def interrupted_between_steps(rank: int, path: str, mark: str) -> Outcome:
    """As before, but rank 0 has said that it is ready for the next step, and rank 1 comes to that later."""
    Link.wait_for_all = lambda link, work, *_, **__: link.wait(work)  # type: ignore[assignment, method-assign]
    tensors = wd.iter_tensors(path, max_in_flight="4MiB", strategy="share", timeout=40)
    next(tensors)
    if rank == 1:
        until(Path(mark).exists)
        return attempt(lambda: list(tensors))
    _delivery.INTERRUPTED_SECONDS = _delivery.GIVING_UP_SECONDS = 0.05
    interrupt_main_when("result")
    outcome = attempt(lambda: list(tensors))
    Path(mark).touch()
    until(lambda: threading.active_count() == 1)
    return outcome


def test_a_thread_that_is_left_behind_takes_the_step_that_it_has_promised(tmp_path: Path) -> None:
    outcomes = on_ranks(interrupted_between_steps, 2, tmp_path, model(tmp_path), str(tmp_path / "mark"))
    pressed, seen = values(outcomes)
    assert pressed.error == "KeyboardInterrupt", pressed
    assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen


def interrupted_while_tensors_come(rank: int, path: str, mark: str) -> tuple[Outcome, float]:
    """Rank 1 sends its tensors after rank 0's time to wait for ranks that are not there is over."""
    carry_out, is_broken = Exchange.carry_out, Link._is_broken

    def press_and_carry_out(exchange: Exchange, prepared: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return carry_out(exchange, prepared)

    def carry_out_late(exchange: Exchange, prepared: Any) -> Any:
        until(Path(mark).exists)
        return carry_out(exchange, prepared)

    def let_time_pass(link: Link) -> bool:
        if link._gives_up_at == 0.0:
            Path(mark).touch()
        elif link._gives_up_at < float("inf"):
            link._gives_up_at = 0.0
        return is_broken(link)

    if rank == 0:
        Link._is_broken = let_time_pass  # type: ignore[method-assign]
    Exchange.carry_out = press_and_carry_out if rank == 0 else carry_out_late  # type: ignore[method-assign]
    outcome = attempt(lambda: wd.load_file(path, strategy="share", timeout=40))
    Path(mark).touch()
    total = torch.ones(1)
    dist.all_reduce(total)
    return outcome, total.item()


def test_ctrl_c_while_tensors_come_leaves_the_group_usable(tmp_path: Path) -> None:
    outcomes = on_ranks(interrupted_while_tensors_come, 2, tmp_path, model(tmp_path), str(tmp_path / "mark"))
    (pressed, first), (seen, second) = values(outcomes)
    assert pressed.error == "KeyboardInterrupt", pressed
    assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen
    assert first == second == 2


def forked(_rank: int, path: str, what: str) -> tuple[int, int]:
    """How a child ends that uses an iterator of its parent, and how many tensors the parent gets after that."""
    tensors = wd.iter_tensors(path, max_in_flight="4MiB")
    next(tensors)
    child = os.fork()
    if child == 0:
        try:
            if what == "next":
                with pytest.raises(ForkedError):
                    next(tensors)
            elif what == "close":
                tensors.close()
            del tensors
            os._exit(0)
        finally:
            os._exit(1)
    status = None

    def has_ended() -> bool:
        nonlocal status
        ended, status = os.waitpid(child, os.WNOHANG)
        return ended == child

    try:
        until(has_ended)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert status is not None
    return os.waitstatus_to_exitcode(status), sum(1 for _ in tensors)


@pytest.mark.parametrize("what", ["next", "close", "drop"])
def test_a_child_of_fork_leaves_its_parents_iterator_alone(tmp_path: Path, what: str) -> None:
    assert values(on_ranks(forked, 1, tmp_path, model(tmp_path), what)) == [(0, 23)]


def test_a_store_that_does_not_answer_keeps_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "ROLL_CALL_SECONDS", 0.2)
    over, has_answered = threading.Event(), threading.Event()

    def answer(*_: Any) -> bool:
        # Long after the time-out.
        over.wait(60)
        has_answered.set()
        return True

    def wait(time_left: timedelta) -> None:
        time.sleep(time_left.total_seconds())
        raise RuntimeError("Operation timed out!")

    link = object.__new__(Link)
    link.rank, link.size, link.timeout = 0, 2, 1.5
    link._around, link._backends = link, {"cpu": "gloo"}
    link.name_roll("roll")
    monkeypatch.setattr(link, "_store", lambda: SimpleNamespace(check=answer, set=answer))
    with pytest.raises(DistributedError, match="rank 1 ended, or did not answer"):
        link.wait_for_all(SimpleNamespace(wait=wait, is_completed=lambda: False), "cpu")
    assert not has_answered.is_set()
    over.set()


def test_a_lack_of_threads_ends_no_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ends = iter([False, False, True])

    def wait(_: timedelta) -> None:
        if not next(ends):
            raise RuntimeError("Operation timed out!")

    link = object.__new__(Link)
    link.rank, link.size, link.timeout = 0, 2, 20.0
    link._around, link._backends = link, {"cpu": "gloo"}
    link.name_roll("roll")
    monkeypatch.setattr(_link.Thread, "start", fail)
    link.wait_for_all(SimpleNamespace(wait=wait, is_completed=lambda: False), "cpu")
    assert list(ends) == []
    # An error of the group is told all the same.
    with pytest.raises(DistributedError, match="rank 1 ended"):
        link.wait(SimpleNamespace(wait=lambda _: int("no number")))


@pytest.mark.parametrize("work", [interrupted_when_ready, interrupted_as_a_call_begins])
def test_ctrl_c_on_a_rank_that_waits_for_others_does_not_wait_for_them(
    work: Callable[..., Outcome], tmp_path: Path
) -> None:
    pressed, seen = values(on_ranks(work, 2, tmp_path, model(tmp_path), str(tmp_path / "mark")))
    assert pressed.error == "KeyboardInterrupt", pressed
    assert (seen.error, seen.rank, seen.kind) == ("DistributedError", 0, "KeyboardInterrupt"), seen
