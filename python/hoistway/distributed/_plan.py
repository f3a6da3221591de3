"""Plans which rank reads which bytes, and which ranks receive them, in steps common to all ranks. No I/O, no clock.

A tensor of which no two ranks of a node want the same byte is read by the ranks that want it. The others are shared:
their rows are divided among the ranks of the node, each of which reads its share and passes it on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from hoistway.distributed._catalog import Catalog
from hoistway.distributed._wants import NOTHING, WHOLE, Wants
from hoistway.errors import OptionError

BUNDLE_BYTES = 16 << 20
"""Small tensors travel together up to this many bytes."""
OVERLAP_STEPS = 8
"""Steps to take at least, as far as they are not small, so that reading and passing on overlap."""
STEP_BYTES = 32 << 20
"""A step that is small."""
CUT_BYTES = 1 << 20
"""Tensors below this size are read by one rank each."""


class Rows(NamedTuple):
    """Rows of a tensor, from ``start`` to ``stop``."""

    tensor: int
    start: int
    stop: int


class Parcel(NamedTuple):
    """What one rank reads and passes on at once."""

    reader: int
    pieces: tuple[Rows, ...]
    is_for_all: bool
    """Whether every rank of the node wants every byte of it."""


class Step(NamedTuple):
    """What happens between two meetings of the ranks, as one rank sees it."""

    own: tuple[int, ...]
    """Tensors that it reads for itself alone."""
    parcels: tuple[Parcel, ...]
    """All of its node's, in the order in which every rank of the node takes them."""
    done: tuple[int, ...]
    """Tensors that it has when the step ends, in the order of the checkpoint."""


class Plan(NamedTuple):
    """The steps of one rank."""

    steps: tuple[Step, ...]
    digest: int
    """The same on all ranks whose plans belong together; fits a signed integer of 64 bits."""


def make_plan(
    catalog: Catalog, wants: Wants, nodes: Sequence[Sequence[int]], rank: int, window_bytes: int | None
) -> Plan:
    """Plans for one rank.

    Args:
        catalog: What there is.
        wants: What each rank wants.
        nodes: The ranks that share what they read, in order. With one rank each, no rank shares.
        rank: Whose plan.
        window_bytes: The most that a rank holds for the others and itself in a step; ``None`` for one step.
    """
    cuts = _cut_into_steps(catalog, wants, nodes, window_bytes)
    node = next(node for node in nodes if rank in node)
    sharing = _Sharing(catalog, wants, node)
    digest = hashlib.sha256(repr(([list(node) for node in nodes], wants.digest())).encode())
    for rows in cuts:
        digest.update(array("q", (len(rows), *chain.from_iterable(rows))))
    return Plan(
        tuple(_step(catalog, wants, sharing, rank, rows) for rows in cuts),
        int.from_bytes(digest.digest()[:8], "big", signed=True),
    )


def overlapping(catalog: Catalog, window_bytes: int) -> int:
    """A window, or a smaller one if that lets reading and passing on overlap without cutting a tensor for it."""
    enough = max(sum(catalog.nbytes) // OVERLAP_STEPS, STEP_BYTES, *catalog.nbytes, 0)
    return min(window_bytes, enough)


def check_window(catalog: Catalog, wants: Wants, nodes: Sequence[Sequence[int]], window_bytes: int) -> None:
    """Fails if a window is too small for sharing."""
    for tensor in sorted(set(wants.alike)):
        nbytes = catalog.nbytes[tensor]
        if nbytes > window_bytes and any(is_shared(catalog, wants, node, tensor) for node in nodes):
            _rows_within(catalog, tensor, window_bytes)


def is_shared(catalog: Catalog, wants: Wants, node: Sequence[int], tensor: int) -> bool:
    """Whether ranks of a node want the same bytes of a tensor, or bytes that lie between each other's."""
    if len(node) == 1 or not catalog.nbytes[tensor]:
        return False
    if wants.is_uniform and wants.code(0, tensor) in (NOTHING, WHOLE):
        return wants.code(0, tensor) == WHOLE
    codes = set()
    wanting = 0
    for rank in node:
        if part_bytes(catalog, wants, rank, tensor):
            codes.add(wants.code(rank, tensor))
            wanting += 1
    return wanting > 1 and codes != {catalog.entries[tensor].row_dim}


def part_bytes(catalog: Catalog, wants: Wants, rank: int, tensor: int) -> int:
    """How many bytes of a tensor a rank wants."""
    if wants.code(rank, tensor) == NOTHING:
        return 0
    part = wants.part(rank, tensor)
    nbytes = catalog.nbytes[tensor]
    if part is None or not nbytes:
        return nbytes
    return nbytes * (part.stop - part.start) // catalog.entries[tensor].shape[part.dim]


class _Sharing:
    """What the ranks of a node share, found out once for tensors that are alike."""

    def __init__(self, catalog: Catalog, wants: Wants, node: Sequence[int]) -> None:
        self._catalog, self._wants, self.node = catalog, wants, node
        self._known: dict[int, tuple[bool, bool]] = {}

    def of(self, tensor: int) -> tuple[bool, bool]:
        """Whether a tensor is shared, and whether every rank wants every byte of it."""
        first = self._wants.alike[tensor]
        known = self._known.get(first)
        if known is None:
            ranks = self.node[:1] if self._wants.is_uniform else self.node
            known = self._known[first] = (
                is_shared(self._catalog, self._wants, self.node, first),
                all(self._wants.code(rank, first) == WHOLE for rank in ranks),
            )
        return known


class _Weight(NamedTuple):
    """What a tensor adds to a step."""

    is_shared: bool
    """By some node."""
    brought: dict[int, int]
    """Bytes that each rank holds of it; -1 stands for all ranks."""


class _Load:
    """How much each rank holds in a step; only ranks that differ are counted one by one."""

    def __init__(self, catalog: Catalog, wants: Wants, nodes: Sequence[Sequence[int]]) -> None:
        self._catalog, self._wants = catalog, wants
        # Where all want alike, lower ranks have parts if any have: a node shares if its second lowest rank has one.
        second = min(
            (node for node in nodes if len(node) > 1), key=lambda node: sorted(node)[1], default=nodes[0]
        )
        self._nodes = [second] if wants.is_uniform else nodes
        self._known: dict[int, _Weight | None] = {}
        self._common = 0
        self._by_rank: dict[int, int] = {}
        self._most = 0

    def of(self, tensor: int) -> _Weight | None:
        """What a tensor would add; ``None`` if no rank wants it."""
        first = self._wants.alike[tensor]
        if first not in self._known:
            self._known[first] = self._weight(first) if self._wants.is_wanted(first) else None
        return self._known[first]

    def _weight(self, tensor: int) -> _Weight:
        catalog, wants = self._catalog, self._wants
        nbytes = catalog.nbytes[tensor]
        if wants.is_uniform:
            if is_shared(catalog, wants, self._nodes[0], tensor):
                return _Weight(True, {-1: nbytes})
            return _Weight(False, {-1: part_bytes(catalog, wants, 0, tensor)})
        brought: dict[int, int] = {}
        some = False
        for node in self._nodes:
            shared = is_shared(catalog, wants, node, tensor)
            some |= shared
            for rank in node:
                brought[rank] = nbytes if shared else part_bytes(catalog, wants, rank, tensor)
        if len(set(brought.values())) == 1:
            return _Weight(some, {-1: next(iter(brought.values()))})
        return _Weight(some, {rank: more for rank, more in brought.items() if more})

    def with_more(self, brought: dict[int, int]) -> int:
        """The most that a rank would hold."""
        peak = self._most
        for rank, more in brought.items():
            if rank >= 0:
                peak = max(peak, self._by_rank.get(rank, 0) + more)
        return self._common + brought.get(-1, 0) + peak

    def add(self, brought: dict[int, int]) -> None:
        """Takes a tensor in."""
        for rank, more in brought.items():
            if rank < 0:
                self._common += more
            else:
                self._by_rank[rank] = self._by_rank.get(rank, 0) + more
                self._most = max(self._most, self._by_rank[rank])

    def clear(self) -> None:
        """Begins a step."""
        self._common = self._most = 0
        self._by_rank.clear()


def _rows_within(catalog: Catalog, tensor: int, window_bytes: int) -> int:
    """How many rows of a tensor, which exceeds it, a window holds."""
    entry, nbytes = catalog.entries[tensor], catalog.nbytes[tensor]
    rows = window_bytes * entry.rows // nbytes
    if not rows or not entry.can_be_cut:
        raise OptionError(
            f"max_in_flight is too small for tensor {entry.name!r}: a third of it must hold "
            f"{nbytes // entry.rows if entry.can_be_cut else nbytes} bytes that cannot be cut",
            tensor=entry.name,
        )
    return rows


def _cut_into_steps(
    catalog: Catalog, wants: Wants, nodes: Sequence[Sequence[int]], window_bytes: int | None
) -> list[list[Rows]]:
    """Rows of tensors by step, the same for all ranks. Shared tensors that exceed the window are cut by rows."""
    steps: list[list[Rows]] = []
    current: list[Rows] = []
    load = _Load(catalog, wants, nodes)
    for tensor, entry in enumerate(catalog.entries):
        weight = load.of(tensor)
        if weight is None:
            continue
        some_share, brought = weight
        if window_bytes is not None and current and load.with_more(brought) > window_bytes:
            steps.append(current)
            current = []
            load.clear()
        start = 0
        nbytes = catalog.nbytes[tensor]
        if window_bytes is not None and some_share and nbytes > window_bytes:
            rows = _rows_within(catalog, tensor, window_bytes)
            while entry.rows - start > rows:
                steps.append([Rows(tensor, start, start + rows)])
                start += rows
        current.append(Rows(tensor, start, entry.rows))
        load.add(brought)
    if current:
        steps.append(current)
    return steps


def _step(catalog: Catalog, wants: Wants, sharing: _Sharing, rank: int, rows: Sequence[Rows]) -> Step:
    own, shared, done = [], [], []
    for piece in rows:
        tensor = piece.tensor
        wanted = wants.code(rank, tensor) != NOTHING
        if sharing.of(tensor)[0]:
            shared.append(piece)
            is_done = piece.stop == catalog.entries[tensor].rows
        else:
            is_done = piece.start == 0
            if is_done and wanted:
                own.append(tensor)
        if is_done and wanted:
            done.append(tensor)
    return Step(tuple(own), tuple(_bundled(catalog, sharing, shared)), tuple(done))


def piece_bytes(catalog: Catalog, piece: Rows) -> int:
    """How many bytes some rows have."""
    return catalog.nbytes[piece.tensor] * (piece.stop - piece.start) // catalog.entries[piece.tensor].rows


def _bundled(catalog: Catalog, sharing: _Sharing, shared: Sequence[Rows]) -> list[Parcel]:
    """Neighbours that are small, have one reader and go the same way, as one parcel."""
    parcels: list[Parcel] = []
    bundle: list[Rows] = []
    way: tuple[int, bool] | None = None
    room = 0
    for reader, piece in _divided(catalog, len(sharing.node), shared):
        is_for_all = sharing.of(piece.tensor)[1]
        size = piece_bytes(catalog, piece)
        if way is not None and (way != (reader, is_for_all) or size > room):
            parcels.append(Parcel(way[0], tuple(bundle), way[1]))
            bundle = []
        if not bundle:
            way, room = (reader, is_for_all), BUNDLE_BYTES
        bundle.append(piece)
        room -= size
    if way is not None:
        parcels.append(Parcel(way[0], tuple(bundle), way[1]))
    return parcels


def _divided(catalog: Catalog, readers: int, shared: Sequence[Rows]) -> list[tuple[int, Rows]]:
    """Rows with their readers: a run of the checkpoint each, of about as many bytes."""
    sizes = [piece_bytes(catalog, piece) for piece in shared]
    total = sum(sizes)
    divided: list[tuple[int, Rows]] = []
    position = 0
    for piece, size in zip(shared, sizes, strict=True):
        if size < CUT_BYTES or not catalog.entries[piece.tensor].can_be_cut:
            divided.append((min((2 * position + size) * readers // (2 * total), readers - 1), piece))
        else:
            rows = piece.stop - piece.start
            start = piece.start
            for reader in range(readers):
                # The rows before the byte at which this reader's share ends.
                ahead = (total * (reader + 1) // readers - position) * rows // size
                stop = piece.stop if reader == readers - 1 else piece.start + min(max(ahead, 0), rows)
                if stop > start:
                    divided.append((reader, Rows(piece.tensor, start, stop)))
                    start = stop
        position += size
    return divided
