"""Completions on their way to who waits for them: event loops, and callers of `drain_completions`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from hoistway.errors import RequestError

if TYPE_CHECKING:
    from hoistway import _native
    from hoistway._native import Completion

MOST_UNDRAINED = 1 << 16
"""Completions that are kept for `drain_completions` while event loops drain the store."""

PATIENCE = 0.02
"""Seconds in which the completion of a request that has ended is drained, unless it was before."""


class Waiting:
    """The waiters for requests of a store with ``notify=True``. Each event loop watches the store's descriptor while a
    ticket is awaited in it; the task that drains the store tells all the others.
    """

    def __init__(self, native: _native.KvStore) -> None:
        self._native = native
        # A signal handler may interrupt a thread that has it.
        self._lock = threading.RLock()
        self._awaited: dict[int, list[asyncio.Future[Completion]]] = {}
        self._watching: Counter[asyncio.AbstractEventLoop] = Counter()
        self._undrained: dict[int, Completion] = {}
        # Tickets whose waiter has gone: their completions will not be asked for.
        self._given_up: set[int] = set()
        # Those that had ended by then, and when their completions are here at the latest; another task may have drained
        # them before.
        self._settled: deque[tuple[float, int]] = deque()

    def make_room(self, notify: bool) -> None:
        """Fails where one completion more would be one too many."""
        if not notify:
            return
        if self._given_up:
            # No event loop may watch any more.
            with self._guarded():
                self._take()
        if len(self._undrained) >= MOST_UNDRAINED:
            raise RequestError(
                f"{MOST_UNDRAINED} completions were not drained, the most that a store keeps: call drain_completions"
            )

    def drain(self) -> list[Completion]:
        """Completions that are not awaited."""
        with self._guarded():
            self._take()
            undrained, self._undrained = self._undrained, {}
        return list(undrained.values())

    async def ended(self, ticket: _native.KvTicket) -> Completion:
        """How a request ended, once it has."""
        loop = asyncio.get_running_loop()
        number = ticket.id
        with self._guarded():
            self._given_up.discard(number)
            self._take()
            if (completion := self._undrained.pop(number, None)) is not None:
                return completion
            future: asyncio.Future[Completion] = loop.create_future()
            self._awaited.setdefault(number, []).append(future)
            if (completion := ticket.poll()) is not None:
                # On its way here; or another task has drained it.
                loop.call_later(PATIENCE, _tell, future, completion)
            if self._watching[loop] == 0:
                loop.add_reader(self._native.event_fd(), self._readable)
            self._watching[loop] += 1
        try:
            return await future
        finally:
            with self._guarded():
                futures = self._awaited.get(number, [])
                if future in futures:
                    futures.remove(future)
                if not futures and self._awaited.pop(number, None) is not None:
                    self._give_up(ticket)
                self._watching[loop] -= 1
                if self._watching[loop] == 0:
                    del self._watching[loop]
                    loop.remove_reader(self._native.event_fd())

    def forget(self, ticket: _native.KvTicket) -> None:
        """Drops the completion of a request whose ticket the caller never got."""
        with self._guarded():
            if self._undrained.pop(ticket.id, None) is None:
                self._give_up(ticket)

    def _give_up(self, ticket: _native.KvTicket) -> None:
        self._given_up.add(ticket.id)
        if ticket.poll() is not None:
            self._settled.append((time.monotonic() + PATIENCE, ticket.id))

    def _guarded(self) -> threading.RLock:
        # A child of fork is refused the store, and not left to wait for a thread that it lacks.
        self._native.event_fd()
        return self._lock

    def _readable(self) -> None:
        with self._guarded():
            self._take()

    def _take(self) -> None:
        now = time.monotonic()
        for completion in self._native.drain_completions():
            futures = self._awaited.pop(completion.ticket, None)
            if futures is None:
                if completion.ticket in self._given_up:
                    self._given_up.remove(completion.ticket)
                else:
                    self._undrained[completion.ticket] = completion
                continue
            for future in futures:
                try:
                    future.get_loop().call_soon_threadsafe(_tell, future, completion)
                except RuntimeError:
                    # Its loop was closed: no task waits any more.
                    continue
        while self._settled and self._settled[0][0] <= now:
            self._given_up.discard(self._settled.popleft()[1])


def _tell(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)
