"""The limits on memory as Python objects."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hoistway import _native


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process."""

    name: str
    """What sets the limit: the machine, or the file of a control group. Equal for processes under the same limit."""
    available_bytes: int
    """Bytes that may still be allocated under the limit. Reclaimable page cache counts as free."""
    total_bytes: int
    """The limit itself in bytes."""


def memory_limits() -> list[MemoryLimit]:
    """Returns every readable limit on the memory of this process. A load that would exceed one is refused."""
    return [MemoryLimit(**limit) for limit in json.loads(_native.memory_limits())]
