"""Chooses the faster strategy from measurements, with the same answer on every rank. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hoistway._words import in_words, rate_in_words
from hoistway.distributed._catalog import Catalog
from hoistway.distributed._plan import OVERLAP_STEPS, is_shared, part_bytes
from hoistway.distributed._report import Strategy
from hoistway.distributed._wants import NOTHING, WHOLE, Wants

SMALL_BYTES = 64 << 20
"""Less than this is not worth measuring anything for."""
READ_THROUGH_BYTES = 64 << 10
"""Gaps up to this size are read rather than skipped."""


class Work(NamedTuple):
    """How much there is to do by each strategy."""

    own_bytes: tuple[int, ...]
    """What each rank reads by itself."""
    node_bytes: tuple[int, ...]
    """What each node reads if its ranks share."""
    received_bytes: tuple[int, ...]
    """The most that a rank of each node receives then."""
    repeated_bytes: int
    """What is read more than once on a node if its ranks do not share, at most."""


class Decision(NamedTuple):
    """A strategy and why."""

    strategy: Strategy
    reasons: tuple[str, ...]
    seconds: dict[str, float]


def work_of(catalog: Catalog, wants: Wants, nodes: Sequence[Sequence[int]]) -> Work:
    """How much there is to do."""
    own = [0] * wants.ranks
    by_node, received = [0] * len(nodes), [0] * len(nodes)
    repeated = 0
    for tensor, count in Counter(wants.alike).items():
        if not wants.is_wanted(tensor):
            continue
        nbytes = catalog.nbytes[tensor]
        for number, node in enumerate(nodes):
            parts = [_read_alone(catalog, wants, rank, tensor) for rank in node]
            for rank, part in zip(node, parts, strict=True):
                own[rank] += part * count
            if is_shared(catalog, wants, node, tensor):
                by_node[number] += nbytes * count
                largest = max(part_bytes(catalog, wants, rank, tensor) for rank in node)
                received[number] += largest * (len(node) - 1) // len(node) * count
                repeated += max(0, sum(parts) - nbytes) * count
            else:
                by_node[number] += sum(parts) * count
    return Work(tuple(own), tuple(by_node), tuple(received), repeated)


def decided_without_measuring(work: Work, refusal: str | None) -> Decision | None:
    """The decision, where rates do not matter."""
    if not work.repeated_bytes:
        return Decision("own", ("no two ranks of a node would read the same bytes",), {})
    if refusal is not None:
        return Decision("own", (f"tensors cannot be passed on: {refusal}",), {})
    if max(work.own_bytes) < SMALL_BYTES:
        return Decision("own", (f"{in_words(max(work.own_bytes))} a rank are too little to measure for",), {})
    return None


def decide(
    work: Work, nodes: Sequence[Sequence[int]], storage_rates: Sequence[float], link_rates: Sequence[float]
) -> Decision:
    """Weighs the strategies.

    Args:
        work: How much there is to do.
        nodes: The ranks of each node.
        storage_rates: Bytes per second that each rank read while all did.
        link_rates: Bytes per second that each rank received while all of its node sent.
    """
    own = max(nbytes / rate for nbytes, rate in zip(work.own_bytes, storage_rates, strict=True))
    reading, passing = 0.0, 0.0
    for number, node in enumerate(nodes):
        reading = max(reading, work.node_bytes[number] / sum(storage_rates[rank] for rank in node))
        if len(node) > 1:
            passing = max(passing, work.received_bytes[number] / min(link_rates[rank] for rank in node))
    # All but the first step's reading is while something is passed on.
    share = max(reading, passing) + min(reading, passing) / OVERLAP_STEPS
    reasons = (
        f"own: {in_words(max(work.own_bytes))} a rank at {rate_in_words(min(storage_rates))}, {own:.2f} s",
        f"share: {in_words(max(work.node_bytes))} a node read in {reading:.2f} s and passed on in {passing:.2f} s "
        f"at {rate_in_words(min(link_rates))}, which overlap: {share:.2f} s",
    )
    return Decision("own" if own <= share else "share", reasons, {"own": own, "share": share})


def _read_alone(catalog: Catalog, wants: Wants, rank: int, tensor: int) -> int:
    """What a rank reads of a tensor for its own part: also short gaps in it."""
    code = wants.code(rank, tensor)
    entry = catalog.entries[tensor]
    if code in (NOTHING, WHOLE) or code == entry.row_dim or not catalog.nbytes[tensor]:
        return part_bytes(catalog, wants, rank, tensor)
    part = wants.part(rank, tensor)
    assert part is not None
    nbytes = part_bytes(catalog, wants, rank, tensor)
    runs = 1
    for size in entry.shape[: part.dim]:
        runs *= size
    gap = (catalog.nbytes[tensor] - nbytes) // runs
    return catalog.nbytes[tensor] if nbytes and gap <= READ_THROUGH_BYTES else nbytes
