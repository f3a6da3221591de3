"""Requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from hoistway.kv._ending import abandon, start_into

if TYPE_CHECKING:
    from hoistway import _native
    from hoistway._native import Completion
    from hoistway.kv._waiting import Waiting


def begin(
    start: Callable[..., _native.KvTicket], waiting: Waiting, keys: Any, buffers: Any, **options: Any
) -> Ticket:
    """Begins a request. An exception that comes after that, such as `KeyboardInterrupt`, cancels the request, and is
    raised once its memory is free: the caller gets no ticket to ask.
    """
    notify = options["notify"]
    waiting.make_room(notify)
    begun: list[_native.KvTicket] = []
    try:
        start_into(begun, start, keys, buffers, **options)
        return Ticket(begun[0], waiting if notify else None)
    except BaseException:
        try:
            abandon(begun)
        finally:
            for native in begun if notify else ():
                waiting.forget(native)
        raise


class Ticket:
    """A request under way. Dropping it changes nothing: the request goes on, and keeps its memory until it is over.

    ``await ticket`` waits for its end in an event loop. Requests with ``notify=True`` are told of by the store's
    descriptor; others take a thread of the loop's executor meanwhile.
    """

    __slots__ = ("_completion", "_native", "_waiting")

    def __init__(self, native: _native.KvTicket, waiting: Waiting | None) -> None:
        self._native = native
        self._waiting = waiting
        self._completion: Completion | None = None

    @property
    def id(self) -> int:
        """Its number: what `Completion.ticket` says."""
        return self._native.id

    def done(self) -> bool:
        """Whether it has ended."""
        return self._native.poll() is not None

    def released(self) -> bool:
        """Whether nothing reads or writes its memory any more. After a time-out, or a cancellation, that may be later
        than the end.
        """
        return self._native.released()

    def lost(self) -> bool:
        """Whether its memory was not free when it ended, and may never be, because a ring or a device failed.

        The memory is kept, and must not be used, unless `released` becomes true once the device tells that it has ended
        its copies.
        """
        return self._native.lost()

    def cancel(self) -> bool:
        """Ends it now: items that have not ended are cancelled. Whether it had not ended before."""
        return self._native.cancel()

    def wait(self, timeout: float | None = None) -> Completion:
        """Waits for its end, and says how it ended; `WaitTimeoutError` after ``timeout`` seconds: it goes on then."""
        return self._native.wait(timeout)

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._ended().__await__()

    async def _ended(self) -> Completion:
        if self._completion is None:
            if self._waiting is not None:
                self._completion = await self._waiting.ended(self._native)
            elif (completion := self._native.poll()) is not None:
                self._completion = completion
            else:
                loop = asyncio.get_running_loop()
                self._completion = await loop.run_in_executor(None, self._native.wait)
        return self._completion

    def __repr__(self) -> str:
        completion = self._native.poll()
        return f"Ticket({self.id}, under way)" if completion is None else f"Ticket({completion!r})"
