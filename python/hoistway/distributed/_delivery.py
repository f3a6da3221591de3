"""A load by many ranks, from agreement to the last step, on two threads: one reads ahead, one talks to the ranks.

All messages are sent by the second thread, which no signal interrupts, and only while the caller waits for it. So
ranks always know which message comes next, also when one of them fails, and the caller may use the group between
steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import hoistway
from hoistway._report import Refusal, Report
from hoistway.distributed import _cost
from hoistway.distributed._agreement import Stopped, compare, compare_files, confer
from hoistway.distributed._catalog import Catalog
from hoistway.distributed._exchange import Exchange, Prepared
from hoistway.distributed._link import Link
from hoistway.distributed._measure import measure_link, measure_storage, messages
from hoistway.distributed._memory import check_memory, memory_note, needed_bytes
from hoistway.distributed._plan import Plan, check_window, make_plan, overlapping, part_bytes
from hoistway.distributed._report import DistributedReport
from hoistway.distributed._wants import NOTHING, Wants
from hoistway.errors import CancelledError, DistributedError, ForkedError, OptionError, RouteUnavailableError

if TYPE_CHECKING:
    from hoistway import _native
    from hoistway._checkpoint import Checkpoint

T = TypeVar("T")

WAITING, READY, FAILED = range(3)

INTERRUPTED_SECONDS = 10.0
"""How long a rank waits after Ctrl-C for the others, to tell them of it. A second Ctrl-C ends that."""
GIVING_UP_SECONDS = 8.0
"""How long the thread that talks to the ranks may take to give up, if its backend lets it: a look and roll calls."""


class Request(NamedTuple):
    """What one rank asks for."""

    checkpoint: Checkpoint
    catalog: Catalog
    codes: bytes
    strategy: str
    window_bytes: int
    is_one_step: bool
    """Whether what a rank reads for itself may come in one step."""
    host: str
    """What ranks that see the same files in the same places have in common."""
    node: str
    """What ranks that share reads have in common."""
    shared_options: Mapping[str, Any]
    """Those in which ranks must not differ."""


class Delivery:
    """The steps of a load. To be closed, whatever happens."""

    def __init__(self, link: Link, device: str, prepare: Callable[[], Request]) -> None:
        self._link = link
        self._started = time.perf_counter()
        self._talker = ThreadPoolExecutor(1, "hoistway-ranks")
        self._reader = ThreadPoolExecutor(1, "hoistway-reads")
        self._interruption: BaseException | None = None
        self._wake = threading.Event()
        self._reading: Future[Mapping[str, Any]] | None = None
        self._loads: _native.Report | None = None
        self._node_link: Link | None = None
        self._next_step = 0
        self._is_over = False
        self._is_stuck = False
        self._process = os.getpid()
        self._seconds: float | None = None
        self._stream: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._asked: Request | None = None
        error: BaseException | None = None
        try:
            self._stream = _current_stream(device)
            self._asked = prepare()
        except BaseException as failure:
            error = failure
        self._hurry_after(error)
        try:
            self._call(lambda: self._agree(error))
        except BaseException:
            self.close()
            raise

    def steps(self) -> Iterator[list[tuple[str, Any]]]:
        """The tensors of each step."""
        while not self._is_over:
            yield self._call(self._advance)

    def files(self) -> list[str]:
        """The files of the checkpoint."""
        return self._request.checkpoint.files()

    def close(self) -> None:
        """Ends the load: if it is not over, for all ranks. In a child of ``fork``, for the child alone."""
        if self._process != os.getpid():
            # The threads and the connections to the other ranks are the parent's.
            self._is_over = True
            return
        try:
            if not (self._is_over or self._is_stuck):
                # Ctrl-C between two calls reaches the caller, who closes the load.
                error = sys.exc_info()[1]
                self._hurry_after(error)
                stopped = Stopped("no more tensors were taken")
                reason = error if isinstance(error, KeyboardInterrupt) else stopped
                with contextlib.suppress(DistributedError, Stopped, RuntimeError):
                    self._call(lambda: self._leave(reason))
        finally:
            # The reason is raised here once more if it is Ctrl-C: the threads end all the same.
            self._end_unless_stuck()
            self._interruption = self._interruption or Stopped()
            self._talker.shutdown(wait=not self._is_stuck)
            self._reader.shutdown()
            if self._asked is not None:
                self._asked.checkpoint.close()

    def report(self) -> DistributedReport:
        """What was done so far."""
        tensors = [t for t, code in enumerate(self._request.codes) if code != NOTHING]
        rank = self._link.rank
        return DistributedReport(
            asked=self._request.strategy,
            strategy=self._decision.strategy,
            reasons=self._decision.reasons,
            estimated_seconds=self._decision.seconds,
            storage_rates=self._storage_rates,
            link_rate=self._link_rate,
            rank=rank,
            ranks=self._link.size,
            node_ranks=tuple(self._node),
            tensors=len(tensors),
            tensor_bytes=sum(part_bytes(self._request.catalog, self._wants, rank, t) for t in tensors),
            sent_bytes=self._exchange.sent_bytes,
            received_bytes=self._exchange.received_bytes,
            steps=self._next_step,
            seconds=self._elapsed() if self._seconds is None else self._seconds,
            reads=None if self._loads is None else Report._from_native(self._loads),
            refused=self._refused,
        )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _end(self) -> None:
        if not self._is_over:
            self._seconds = self._elapsed()
        self._is_over = True

    # What follows runs on the thread that talks to the ranks, but for the two calls that hand it over.

    def _agree(self, error: BaseException | None) -> None:
        """Compares what the ranks ask for, decides, plans, and starts to read."""
        try:
            self._plan = self._agreed_plan(error)
        except BaseException:
            self._end()
            raise
        self._read_ahead()

    def _agreed_plan(self, error: BaseException | None) -> Plan:
        note = None
        try:
            note = self._note()
        except Exception as own:
            error = error or own
        notes = confer(self._link, note, error)
        self._link.name_roll(notes[0]["roll"])
        compare([{"their version of hoistway": note["version"]} for note in notes])
        compare([note["compared"] for note in notes])
        labels = [note["node"] for note in notes]
        compare_files([note["host"] for note in notes], [note["identities"] for note in notes])
        request = self._request
        codes = [request.codes] * self._link.size
        if any(note["wants"] != notes[0]["wants"] for note in notes):
            codes = [zlib.decompress(each) for each in self._link.gather_bytes(zlib.compress(request.codes))]
        self._wants = Wants(request.catalog, codes)
        nodes = [[rank for rank, its in enumerate(labels) if its == label] for label in dict.fromkeys(labels)]
        self._node = next(node for node in nodes if self._link.rank in node)
        self._decide(nodes, next((note["refusal"] for note in notes if note["refusal"]), None))
        shares = self._decision.strategy == "share"
        if not shares:
            nodes = [[rank] for rank in range(self._link.size)]
        window: int | None = request.window_bytes
        if shares:
            window = overlapping(request.catalog, request.window_bytes)
        elif request.is_one_step:
            window = None
        node = next(node for node in nodes if self._link.rank in node)
        failure = plan = memory = None
        try:
            plan = make_plan(request.catalog, self._wants, nodes, self._link.rank, window)
            memory = memory_note(self._needed_bytes(plan, node))
        except hoistway.HoistwayError as refused:
            failure = refused
        check_memory(confer(self._link, memory, failure))
        assert plan is not None
        self._exchange = Exchange(request.catalog, self._wants, self._link.rank, node, self._node_link)
        return plan

    def _needed_bytes(self, plan: Plan, node: list[int]) -> int:
        """The host memory that this rank takes."""
        request, rank = self._request, self._link.rank
        options = request.checkpoint._options
        huge_pages = options.get("huge_pages") or os.environ.get("HOISTWAY_HUGE_PAGES")
        has_memory = huge_pages == "reserved" or request.checkpoint._is_mapped(options)
        if self._link.device != "cpu" or (has_memory and len(node) == 1):
            return 0
        return needed_bytes(
            request.catalog, self._wants, plan, rank, node.index(rank), keeps_all=request.is_one_step
        )

    def _note(self) -> dict[str, Any] | None:
        """What ranks tell each other before they begin."""
        if self._asked is None:
            return None
        catalog = self._asked.catalog
        return {
            "version": hoistway.__version__,
            "roll": f"hoistway/{uuid.uuid4().hex}",
            "host": self._asked.host,
            "node": self._asked.node,
            "refusal": self._link.refusal,
            "wants": hashlib.sha256(self._asked.codes).hexdigest(),
            "identities": [file.identity for file in catalog.files],
            "compared": {
                "the files": [f"{file.name} of {file.nbytes} bytes" for file in catalog.files],
                "the tensors of the files": f"{len(catalog.entries)} with digest {catalog.digest[:16]}",
                **{f"the option {name}": str(value) for name, value in self._asked.shared_options.items()},
            },
        }

    def _decide(self, nodes: list[list[int]], refusal: str | None) -> None:
        request = self._request
        self._storage_rates: tuple[float, ...] = ()
        self._link_rate: float | None = None
        self._refused: tuple[Refusal, ...] = ()
        is_alone = all(len(node) == 1 for node in nodes)
        if refusal is not None and not is_alone:
            fix = "give the group a backend for the device: nccl for cuda, gloo for cpu"
            if request.strategy == "share":
                raise RouteUnavailableError(f"strategy 'share' cannot run: {refusal}; {fix}")
            self._refused = (Refusal("strategy share", None, refusal, fix),)
        if request.strategy != "auto":
            self._decision = _cost.Decision(request.strategy, ("it was asked for",), {})  # type: ignore[arg-type]
            if request.strategy == "share":
                self._join_node(nodes)
            return
        work = _cost.work_of(request.catalog, self._wants, nodes)
        decision = _cost.decided_without_measuring(work, refusal)
        if decision is None and (refused := self._too_small(nodes)) is not None:
            self._refused = (refused,)
            decision = _cost.Decision("own", (f"tensors cannot be shared: {refused.reason}",), {})
        if decision is None:
            self._join_node(nodes)
            decision = self._measured(work, nodes)
        self._decision = decision

    def _too_small(self, nodes: list[list[int]]) -> Refusal | None:
        """Why the memory does not do for sharing; every rank comes to the same."""
        try:
            check_window(self._request.catalog, self._wants, nodes, self._request.window_bytes)
        except OptionError as error:
            return Refusal("strategy share", None, str(error), "raise max_in_flight")
        return None

    def _measured(self, work: _cost.Work, nodes: list[list[int]]) -> _cost.Decision:
        request = self._request
        error = rate = None
        buffers: list[Any] = []
        try:
            if self._node_link is not None:
                buffers = messages(self._node_link)
            rate = measure_storage(request.checkpoint, request.catalog, self._link.rank, self._link.size)
        except Exception as failure:
            error = failure
        rates: list[float] = confer(self._link, rate, error)
        self._storage_rates = tuple(rates)
        link_rate = None if self._node_link is None else measure_link(self._node_link, buffers)
        link_rates = [rate or float("inf") for rate in confer(self._link, link_rate)]
        self._link_rate = link_rate
        return _cost.decide(work, nodes, rates, link_rates)

    def _join_node(self, nodes: list[list[int]]) -> None:
        if len(nodes) == 1:
            self._node_link = self._link
        elif len(self._node) > 1:
            self._node_link = self._link.subgroup(self._node)

    def _advance(self) -> list[tuple[str, Any]]:
        """Takes the next step with all other ranks; after the last, waits until all have taken it."""
        if not self._plan.steps:
            self._meet(None)
            return []
        prepared = self._meet(self._next_step)
        assert prepared is not None
        self._next_step += 1
        if self._interruption is None:
            self._read_ahead()
        try:
            tensors = self._exchange.carry_out(prepared)
        except DistributedError:
            self._end()
            raise
        except BaseException as error:
            # All messages have arrived: the ranks meet next, wherever they are.
            self._leave(error)
            raise
        if self._next_step == len(self._plan.steps):
            self._meet(None)
        return tensors

    def _meet(self, step: int | None) -> Prepared | None:
        """Returns once every rank is ready: has read what a step needs, or is done. Fails if one of them failed."""
        error: BaseException | None = None
        prepared = None
        state = READY if step is None else WAITING
        while True:
            try:
                if state == WAITING:
                    self._wake.wait(min(1.0, self._link.timeout / 4))
                # Also of ranks that are ready: they would wait for the slowest, which then succeeds alone.
                if self._interruption is not None:
                    raise self._interruption
                if state == WAITING:
                    assert self._reading is not None
                    assert step is not None
                    if self._reading.done():
                        prepared = self._exchange.prepare(self._plan.steps[step], self._reading.result())
                        state = READY
            except BaseException as failure:
                error, state = failure, FAILED
            if self._all_are_ready(state, step, error):
                if step is None:
                    self._end()
                # What was read is the caller's now.
                self._reading = None
                return prepared

    def _all_are_ready(self, state: int, step: int | None, error: BaseException | None) -> bool:
        place = -1 if step is None else step
        try:
            told = self._link.gather_numbers([state, place, self._plan.digest])
            if any(theirs[0] == FAILED for theirs in told):
                confer(self._link, None, error)
            if any(theirs[1:] != told[0][1:] for theirs in told):
                raise DistributedError("the ranks follow different plans: this is a fault of hoistway")
        except BaseException:
            self._end()
            raise
        return all(theirs[0] == READY for theirs in told)

    def _leave(self, error: BaseException) -> None:
        """Tells the others, when they meet next, that this rank is gone."""
        self._all_are_ready(FAILED, None if not self._plan.steps else self._next_step, error)

    def _read_ahead(self) -> None:
        """Starts to read for the next step."""
        if self._next_step == len(self._plan.steps):
            return
        names, slices = self._exchange.to_read(self._plan.steps[self._next_step])
        self._wake = wake = threading.Event()
        self._reading = self._reader.submit(self._read, names, slices)
        self._reading.add_done_callback(lambda _: wake.set())

    def _read(self, names: list[str], slices: dict[str, tuple[slice, ...]]) -> Mapping[str, Any]:
        if not names:
            return {}
        request = self._request
        loaded = request.checkpoint.load(select=names, slices=slices, progress=self._check_interruption)
        self._loads = loaded._report if self._loads is None else self._loads.merged(loaded._report)
        return loaded

    def _check_interruption(self, _done: int, _total: int) -> None:
        if self._interruption is not None:
            raise CancelledError("the load was cancelled")

    @property
    def _request(self) -> Request:
        assert self._asked is not None
        return self._asked

    def _call(self, work: Callable[[], T]) -> T:
        """Has the thread that talks do something, and waits for it. Ctrl-C meanwhile ends the load for all ranks."""
        if self._process != os.getpid():
            raise ForkedError(
                "this load began before fork(): it is its parent's; begin a load in this process"
            )
        future = None
        try:
            future = self._talker.submit(self._in_stream, work)
            return future.result()
        except BaseException as error:
            # Ctrl-C may come before it is known whether the thread has the work.
            if not future.done() if future is not None else isinstance(error, KeyboardInterrupt):
                self._interrupt(error)
            raise

    def _in_stream(self, work: Callable[[], T]) -> T:
        with self._stream():
            return work()

    def _interrupt(self, error: BaseException) -> None:
        self._interruption = error
        self._wake.set()
        self._hurry_after(error)
        told: Future[None] | None = None
        try:
            # After what it does now.
            told = self._talker.submit(self._leave_unless_over, error)
            told.result(INTERRUPTED_SECONDS + GIVING_UP_SECONDS)
        except KeyboardInterrupt:
            self._link.give_up_within(0)
            with contextlib.suppress(BaseException):
                assert told is not None
                told.result(GIVING_UP_SECONDS)
        except BaseException:
            # The error that is told is the caller's.
            pass
        self._is_stuck = told is not None and not told.done()
        self._end_unless_stuck()

    def _end_unless_stuck(self) -> None:
        """Ends the load, unless the thread that talks to the ranks is still to tell them of it."""
        if not self._is_stuck:
            self._end()

    def _hurry_after(self, error: BaseException | None) -> None:
        """Limits how long this rank waits for others, which may come much later, once its caller wants to end."""
        if isinstance(error, KeyboardInterrupt):
            self._link.give_up_within(INTERRUPTED_SECONDS)

    def _leave_unless_over(self, error: BaseException) -> None:
        if not self._is_over:
            self._leave(error)


def _current_stream(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What makes a thread use the stream of a device that its maker uses."""
    if device == "cpu":
        return contextlib.nullcontext
    import torch  # noqa: PLC0415

    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)
