"""The ends of requests: memory may be used again only when no request uses it any more."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Protocol, TypeVar

from hoistway._native import Completion
from hoistway.errors import ForkedError, MemoryLostError

log = logging.getLogger("hoistway.kv")

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
_COMPLAINT_S = 30.0


class Request(Protocol):
    """A request that has begun: `Ticket`, or the ticket below it."""

    def released(self) -> bool: ...
    def lost(self) -> bool: ...
    def cancel(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Completion: ...


R = TypeVar("R", bound=Request)


def start_into(begun: list[R], start: Callable[..., R], *arguments: Any, **options: Any) -> None:
    """Begins a request and adds it to a list, so that the handler of an exception finds it there.

    Between the call and the list there is no bytecode, so no handler of a signal can run there.
    """
    begun.extend(starmap(partial(start, *arguments, **options), [()]))


def settle_all(requests: Iterable[Request]) -> list[Completion]:
    """Waits until all requests have ended and their memory is free, and returns how they ended.

    An exception that interrupts the wait, such as `KeyboardInterrupt`, cancels the requests. It is raised once their
    memory is free.

    Raises:
        MemoryLostError: The memory of one or more requests never becomes free. That of the others is free.
    """
    requests = list(requests)
    try:
        completions = [request.wait() for request in requests]
        _await_release(requests)
    except MemoryLostError:
        raise
    except BaseException:
        abandon(requests)
        raise
    return completions


def abandon(requests: Iterable[Request]) -> None:
    """Cancels requests and waits until their memory is free.

    Exceptions do not end the wait. The last of them is raised after it.

    Raises:
        MemoryLostError: The memory of one or more requests never becomes free. That of the others is free.
    """
    requests = list(requests)
    interrupt: BaseException | None = None
    while True:
        try:
            for request in requests:
                request.cancel()
            _await_release(requests)
            break
        except (ForkedError, MemoryLostError):
            # In a child of `fork` the memory is a copy, which no request uses.
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def summary(statuses: list[str]) -> str:
    """Returns how items ended, in a few words."""
    counts = Counter(statuses)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no items"


def _await_release(requests: Sequence[Request]) -> None:
    """Waits until the memory of requests that have ended is free."""
    pause, complaint = _FIRST_PAUSE_S, time.monotonic() + _COMPLAINT_S
    while held := [request for request in requests if not request.released()]:
        lost = [request for request in held if request.lost()]
        if len(lost) == len(held):
            raise MemoryLostError(
                "a ring or a device failed while it had the memory of a request, which it may use for ever: "
                f"{_statuses(lost)}"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if time.monotonic() >= complaint:
            complaint += _COMPLAINT_S
            log.warning("the storage still has the memory of requests that ended: %s", _statuses(held))


def _statuses(requests: Sequence[Request]) -> str:
    return summary([status for request in requests for status in request.wait().statuses])
