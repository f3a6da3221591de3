"""The ends of requests: an engine may use its memory again only when nothing else does."""

from __future__ import annotations

from collections.abc import Callable

from hoistway.kv import Completion, MemoryLostError, Ticket
from hoistway.kv._ending import abandon, settle_all, start_into

# What was loaded, what is stored, and what the user's own policy leaves out, which is no failure.
_ACCEPTED = ("ok", "exists", "dropped:not_admitted")


def outcome(ticket: Ticket) -> Completion | None:
    """How a request ended; `None` if it has not, or if its memory is still in use. Does not wait."""
    if not ticket.done() or not ticket.released():
        return None
    return ticket.wait()


def complete(start: Callable[[], Ticket]) -> Completion:
    """Begins a request, waits until it has ended and its memory is free, and returns how it ended.

    An exception that interrupts the wait cancels the request. It is raised once the memory is free.

    Raises:
        MemoryLostError: The memory never becomes free.
    """
    begun: list[Ticket] = []
    try:
        start_into(begun, start)
        return settle_all(begun)[0]
    except MemoryLostError:
        raise
    except BaseException:
        abandon(begun)
        raise


def is_accepted(status: str) -> bool:
    """Whether an item needs no attention."""
    return status in _ACCEPTED
