"""The wants of every rank: for each tensor nothing, all of it, or its part along a dimension."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hoistway._lazy import lazy
from hoistway.distributed._catalog import Catalog

NOTHING, WHOLE = 255, 254
"""Smaller numbers are dimensions."""


class Part(NamedTuple):
    """A tensor's elements from ``start`` to ``stop`` along a dimension."""

    dim: int
    start: int
    stop: int


def codes_of(chosen: Sequence[bool], dims: Sequence[int | None]) -> bytes:
    """What one rank wants, a byte a tensor: it is compared, digested and sent."""
    return bytes(
        NOTHING if not keep else WHOLE if dim is None else dim for keep, dim in zip(chosen, dims, strict=True)
    )


def shard(size: int, unit: int, rank: int, ranks: int) -> tuple[int, int]:
    """A rank's part of a dimension: blocks rounded up, so the last ones may be short or empty.

    >>> [shard(10, 1, rank, 4) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    units = -(-size // unit)
    each = -(-units // ranks)
    start, stop = (min(bound * each, units) * unit for bound in (rank, rank + 1))
    return min(start, size), min(stop, size)


class Wants:
    """What each rank of a group wants of a checkpoint."""

    def __init__(self, catalog: Catalog, codes: Sequence[bytes]) -> None:
        self._entries = catalog.entries
        self._codes = codes
        self.is_uniform = all(code == codes[0] for code in codes)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._codes)

    def code(self, rank: int, tensor: int) -> int:
        """``NOTHING``, ``WHOLE`` or a dimension."""
        return self._codes[rank][tensor]

    def part(self, rank: int, tensor: int) -> Part | None:
        """Which part of a tensor that it wants a rank gets; ``None`` for all of it."""
        dim = self._codes[rank][tensor]
        if dim == WHOLE:
            return None
        entry = self._entries[tensor]
        unit = entry.unit if dim == len(entry.shape) - 1 else 1
        return Part(dim, *shard(entry.shape[dim], unit, rank, self.ranks))

    @lazy
    def alike(self) -> Sequence[int]:
        """For each tensor the first one of its type and shape that each rank wants as much of: what is found out about
        that one, which costs much more than looking it up, holds for all of them.
        """
        columns: Iterable[Any] = self._codes[0] if self.is_uniform else zip(*self._codes, strict=True)
        first: dict[Any, int] = {}
        return [
            first.setdefault((entry.dtype, entry.shape, column), tensor)
            for tensor, (entry, column) in enumerate(zip(self._entries, columns, strict=True))
        ]

    def is_wanted(self, tensor: int) -> bool:
        """Whether any rank wants any of a tensor."""
        return any(
            codes[tensor] != NOTHING for codes in (self._codes[:1] if self.is_uniform else self._codes)
        )

    def digest(self) -> str:
        """Of all that is wanted."""
        digest = hashlib.sha256()
        for code in self._codes:
            digest.update(code)
        return digest.hexdigest()
