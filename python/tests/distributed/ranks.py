"""Runs functions on several ranks of gloo at once, each in a process of its own."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

# One process imports torch; those of the ranks are forked off it, before it has any thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "hoistway.distributed", "conftest"])

_stores = iter(range(1 << 30))


@dataclass
class Outcome:
    """How one rank ended."""

    value: Any = None
    """What the function returned."""
    error: str | None = None
    """Name of the exception's class, if it raised one; ``died`` if the process ended without a word."""
    message: str = ""
    rank: int | None = None
    """The rank that the exception names."""
    kind: str | None = None
    cause: str | None = None
    """Name of the class of what the exception was raised from."""
    trace: str = ""
    seconds: float = 0.0


def on_ranks(
    work: Callable[..., Any], size: int, directory: Path, *arguments: Any, within: float = 40
) -> list[Outcome]:
    """What ``work(rank, *arguments)`` did on each rank. Ranks that take longer than ``within`` fail the test."""
    store = directory / f"store-{os.getpid()}-{next(_stores)}"
    ranks = []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        call = partial(work, rank, *arguments)
        process = _CONTEXT.Process(target=_rank, args=(call, (rank, size), str(store), within, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + within
    outcomes = []
    try:
        for process, ours in ranks:
            try:
                outcome = ours.recv() if ours.poll(max(0.0, deadline - time.monotonic())) else None
            except EOFError:
                outcome = Outcome(error="died")
            if outcome is None:
                pytest.fail(f"rank {len(outcomes)} did not end within {within} s")
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode is None:
                pytest.fail(f"the process of rank {len(outcomes)} did not end within {within} s")
            outcomes.append(outcome)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails with the trace of one that did not."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace or outcome.error}"
    return [outcome.value for outcome in outcomes]


def attempt(call: Callable[[], Any]) -> Outcome:
    """How a call ends."""
    started = time.monotonic()
    try:
        outcome = Outcome(value=call())
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            message=str(error),
            rank=getattr(error, "rank", None),
            kind=getattr(error, "kind", None),
            cause=None if error.__cause__ is None else type(error.__cause__).__name__,
            trace=traceback.format_exc(),
        )
    outcome.seconds = time.monotonic() - started
    return outcome


def _rank(
    call: Callable[[], Any], place: tuple[int, int], store: str, within: float, out: Connection
) -> None:
    import torch.distributed as dist  # noqa: PLC0415
    from hoistway.distributed import _delivery  # noqa: PLC0415

    # Others come as late as the machine is busy.
    _delivery.INTERRUPTED_SECONDS = within
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=place[0],
        world_size=place[1],
        timeout=datetime.timedelta(seconds=50),
    )
    # A rank that ends before all others are connected breaks the connections that they are making.
    dist.barrier()
    # Programs in the background ignore Ctrl-C, and so do those that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(within - 2)
    outcome = attempt(call)
    out.send(outcome)
    dist.destroy_process_group()
