"""The ends of requests: an engine may use its memory again only when nothing else does."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable

from windlass.errors import WindlassError
from windlass.kv import Completion, Ticket

log = logging.getLogger("windlass.kv")

# What was loaded, what is stored, and what the user's own policy leaves out, which is no failure.
_ACCEPTED = ("ok", "exists", "dropped:not_admitted")
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
_COMPLAINT_S = 30.0


class MemoryLostError(WindlassError):
    """Nobody will ever know that the storage is done with the memory of a request: it must not be used again."""


def outcome(ticket: Ticket) -> Completion | None:
    """How a request ended; `None` if it has not, or if its memory is still in use. Does not wait."""
    if not ticket.done() or not ticket.released():
        return None
    return ticket.wait()


def settle(ticket: Ticket) -> Completion:
    """Waits until a request has ended and its memory is let go, and says how it ended.

    Raises:
        MemoryLostError: The memory is never let go.
    """
    completion = ticket.wait()
    pause, complaint = _FIRST_PAUSE_S, time.monotonic() + _COMPLAINT_S
    while not ticket.released():
        if ticket.lost():
            raise MemoryLostError(
                "a ring or a device failed while it had the memory of a request, which it may use for ever: "
                f"{summary(completion.statuses)}"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if time.monotonic() >= complaint:
            complaint += _COMPLAINT_S
            log.warning(
                "the storage still has the memory of a request that ended: %s", summary(completion.statuses)
            )
    return completion


def settle_all(tickets: Iterable[Ticket]) -> list[Completion]:
    """Waits until all requests have ended and their memory is let go, as far as it ever is, and says how they ended.

    Raises:
        MemoryLostError: Memory of one or more is never let go.
    """
    completions: list[Completion] = []
    lost: MemoryLostError | None = None
    for ticket in tickets:
        try:
            completions.append(settle(ticket))
        except MemoryLostError as error:
            # The others are under way still.
            lost = error
    if lost is not None:
        raise lost
    return completions


def is_accepted(status: str) -> bool:
    """Whether an item needs nobody's attention."""
    return status in _ACCEPTED


def summary(statuses: list[str]) -> str:
    """How items ended, in a few words."""
    counts = Counter(statuses)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no items"
