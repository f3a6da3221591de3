"""A client for LMCache's L2 adapter `native_plugin`, in its multi-process mode and without it.

Named as ``{"type": "native_plugin", "module_path": "hoistway.kv.adapters.lmcache", "class_name": "Client", …}``.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hoistway.kv import Completion, Error, MemoryLostError, Ticket
from hoistway.kv._ending import abandon, settle_all, start_into, summary
from hoistway.kv.adapters._metrics import Exported
from hoistway.kv.adapters._settings import Settings
from hoistway.kv.adapters._tickets import is_accepted

log = logging.getLogger("hoistway.kv")

Done = tuple[int, bool, str, list[bool] | None]
"""How an operation ended, as LMCache takes it: its number, whether all of it succeeded, why not, and what of it did."""

# How often memory is asked after that the kernel had when its request ran out of time.
_LEASE_CHECK_S = 0.05


@dataclass
class _Operation:
    """Loads or stores under way: a request for each length of memory."""

    number: int
    statuses: list[str]
    """Of each key."""
    open: int = 0
    """Requests that have not ended."""
    ended: list[Ticket] = field(default_factory=list)


class Client:
    """Objects of LMCache in a KV store. Threads may share it."""

    def __init__(self, root: str, **options: Any) -> None:
        """Opens the store.

        LMCache's keys tell models, ranks, tenants and tokens apart; what else blocks have to have in common is said by
        ``namespace``.

        Args:
            root: Directory of the store.
            options: Those of `hoistway.kv.Store`, ``namespace``, and ``checkpoint``: where the weights are.
        """
        settings = Settings.parse(options, "adapter_params")
        self._store, self._blocks = settings.open_both(
            root, key_algorithm="lmcache object key", other={"engine": "lmcache", **settings.weights()}
        )
        self._exported = Exported(self._store)
        self._is_read_only = settings.is_read_only
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[_Operation, Ticket, list[int]]] = {}
        self._leased: list[_Operation] = []
        # Requests whose memory is to become free, of operations that have other memory which never will.
        self._retired: list[Ticket] = []
        self._done: list[Done] = []
        # Whether a timer is to look at memory that is leased.
        self._is_to_wake = False
        self._is_closed = False

    def event_fd(self) -> int:
        """A descriptor that can be read while completions wait."""
        return self._store.event_fd()

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """Starts to load objects. Each is told of on its own: some may be missing."""
        return self._begin(self._blocks.load, keys, memoryviews)

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """Starts to store objects. It succeeds if all of them are there in the end, or were left out by `admission`, or
        as the store is for reading.
        """
        if self._is_read_only:
            return self._answer(lambda: [True] * len(keys))
        return self._begin(self._blocks.store, keys, memoryviews)

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Looks objects up."""
        return self._answer(lambda: self._blocks.lookup(keys))

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Removes objects, and tells of each whether it was there and is gone now."""

        def delete() -> list[bool]:
            before = self._blocks.lookup(keys)
            self._blocks.delete([key for key, is_there in zip(keys, before, strict=True) if is_there])
            after = self._blocks.lookup(keys)
            return [was and not is_there for was, is_there in zip(before, after, strict=True)]

        return self._answer(delete)

    def drain_completions(self) -> list[Done]:
        """What has ended since the last call."""
        with self._lock:
            if self._is_closed:
                return []
            for completion in self._store.drain_completions():
                self._end(completion)
            self._return_leased()
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Lets what is under way end, so that it is there after a restart, and closes the store."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._exported.close()
            tickets = [ticket for _, ticket, _ in self._open.values()]
            # Those that ended, of operations that have others under way, too.
            operations = [operation for operation, _, _ in self._open.values()] + self._leased
            tickets += [ticket for operation in operations for ticket in operation.ended]
            tickets += self._retired
        try:
            settle_all(tickets)
        except MemoryLostError as error:
            # The store keeps that memory for as long as the process lives.
            log.error("closing LMCache's client: %s", error)
        finally:
            try:
                self._store.close()
            except Error as error:
                # LMCache has other clients to close.
                log.error("closing LMCache's client: %s", error)

    def _begin(self, start: Callable[..., Ticket], keys: list[str], memoryviews: list[memoryview]) -> int:
        # Blocks of one request have room for its longest item each.
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for place, view in enumerate(memoryviews):
            by_length[memoryview(view).nbytes].append(place)
        begun: list[Ticket] = []
        try:
            # Locked meanwhile: a request may end before it is known here.
            with self._lock:
                operation = _Operation(next(self._numbers), [""] * len(keys))
                for places in by_length.values():
                    try:
                        start_into(
                            begun,
                            start,
                            [keys[place] for place in places],
                            [memoryviews[place] for place in places],
                            notify=True,
                        )
                    except (Error, ValueError, BufferError) as error:
                        # The others are under way, and have to end.
                        for place in places:
                            operation.statuses[place] = str(error)
                        continue
                    operation.open += 1
                    self._open[begun[-1].id] = operation, begun[-1], places
                if operation.open == 0:
                    self._tell(self._outcome(operation))
        except BaseException:
            # LMCache learns of no operation, and takes its memory back.
            try:
                abandon(begun)
            finally:
                self._forget(begun)
            raise
        return operation.number

    def _forget(self, tickets: list[Ticket]) -> None:
        """Drops the operation of these requests: LMCache was not told of its number."""
        with self._lock:
            for ticket in tickets:
                self._open.pop(ticket.id, None)
            self._leased = [
                operation
                for operation in self._leased
                if not any(ticket in operation.ended for ticket in tickets)
            ]

    def _answer(self, ask: Callable[[], list[bool]]) -> int:
        """An operation without transfers. Its end waits to be drained like all others."""
        found, error = None, ""
        try:
            found = ask()
        except (Error, ValueError) as failure:
            error = str(failure)
        with self._lock:
            number = next(self._numbers)
            self._tell((number, found is not None, error, found))
        return number

    def _end(self, completion: Completion) -> None:
        found = self._open.pop(completion.ticket, None)
        if found is None:
            # Of an operation that could not begin.
            return
        operation, ticket, places = found
        for place, status in zip(places, completion.statuses, strict=True):
            operation.statuses[place] = status
        operation.ended.append(ticket)
        operation.open -= 1
        if operation.open == 0:
            self._leased.append(operation)

    def _return_leased(self) -> None:
        """Tells of the operations whose memory is LMCache's again; never of those whose memory may be in use for ever,
        so that LMCache does not give that to others.
        """
        leased, self._leased = self._leased, []
        for operation in leased:
            if all(ticket.released() for ticket in operation.ended):
                self._done.append(self._outcome(operation))
            elif any(ticket.lost() for ticket in operation.ended):
                log.error(
                    "operation %d: a ring or a device failed, and may use its memory for ever; it is kept from "
                    "LMCache until that is restarted: %s",
                    operation.number,
                    summary(operation.statuses),
                )
                self._retired += [
                    ticket for ticket in operation.ended if not (ticket.lost() or ticket.released())
                ]
            else:
                self._leased.append(operation)
        if self._leased and not self._is_to_wake:
            self._is_to_wake = True
            # Nothing else tells when the kernel is done with it.
            timer = threading.Timer(_LEASE_CHECK_S, self._wake)
            timer.daemon = True
            timer.start()

    @staticmethod
    def _outcome(operation: _Operation) -> Done:
        succeeded = [is_accepted(status) for status in operation.statuses]
        error = "" if all(succeeded) else summary(operation.statuses)
        return operation.number, not error, error, succeeded

    def _tell(self, done: Done) -> None:
        self._done.append(done)
        self._signal()

    def _wake(self) -> None:
        with self._lock:
            self._is_to_wake = False
            if not self._is_closed:
                self._signal()

    def _signal(self) -> None:
        """Makes the descriptor readable, as the end of a request does: it is a counter of the kernel's."""
        os.eventfd_write(self._store.event_fd(), 1)
