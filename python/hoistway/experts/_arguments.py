"""Numbers of layers and experts."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from hoistway.errors import ExpertNotFoundError


def number_of(what: str, number: SupportsIndex) -> int:
    """The number of a layer or an expert, as the engine takes it: what is negative or beyond 32 bits is none.

    Examples:
        >>> number_of("expert", 3)
        3
    """
    found = index(number)
    if not 0 <= found < 1 << 32:
        raise ExpertNotFoundError(f"there is no {what} {found}")
    return found
