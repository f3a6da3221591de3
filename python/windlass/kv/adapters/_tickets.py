"""The ends of requests: an engine may use its memory again only when nothing else does."""

from __future__ import annotations

import logging
import time
from collections import Counter

from windlass.kv import Completion, Ticket

log = logging.getLogger("windlass.kv")

# A request that ended in one of these ways may still have transfers under way. All others ended with their transfers.
_INTERRUPTED = ("timed_out", "cancelled")
# What was loaded, what is stored, and what the user's own policy leaves out, which is no failure.
_ACCEPTED = ("ok", "exists", "dropped:not_admitted")
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
_COMPLAINT_S = 30.0


def is_free(ticket: Ticket, completion: Completion) -> bool:
    """Whether the memory of a request that has ended is its owner's again."""
    return ticket.released() or not any(status in completion.statuses for status in _INTERRUPTED)


def outcome(ticket: Ticket) -> Completion | None:
    """How a request ended; `None` if it has not, or if its memory is still in use. Does not wait."""
    if not ticket.done():
        return None
    completion = ticket.wait()
    return completion if is_free(ticket, completion) else None


def settle(ticket: Ticket) -> Completion:
    """Waits until a request has ended and its memory is let go, and says how it ended."""
    completion = ticket.wait()
    pause, complaint = _FIRST_PAUSE_S, time.monotonic() + _COMPLAINT_S
    while not ticket.released():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if time.monotonic() >= complaint:
            complaint += _COMPLAINT_S
            log.warning(
                "the storage still has the memory of a request that ended: %s", summary(completion.statuses)
            )
    return completion


def is_accepted(status: str) -> bool:
    """Whether an item needs nobody's attention."""
    return status in _ACCEPTED


def summary(statuses: list[str]) -> str:
    """How items ended, in a few words."""
    counts = Counter(statuses)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no items"
