"""Short, timed reads of the very files and messages over the very link."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hoistway.distributed._catalog import Catalog
from hoistway.distributed._link import Link

if TYPE_CHECKING:
    from hoistway._checkpoint import Checkpoint

SAMPLES = 4
SAMPLE_BYTES = 8 << 20
MESSAGE_BYTES = 4 << 20
ROUNDS = 4


def measure_storage(checkpoint: Checkpoint, catalog: Catalog, rank: int, ranks: int) -> float:
    """Bytes per second of reading a few places of the checkpoint, other ones on each rank.

    They are read as the load will read them, so what is cached counts as cached, and direct reads leave it so.
    """
    rows = {}
    for tensor in _places(catalog.nbytes, rank, ranks):
        entry = catalog.entries[tensor]
        size = catalog.nbytes[tensor]
        count = (
            max(1, SAMPLE_BYTES * entry.rows // size)
            if size > SAMPLE_BYTES and entry.can_be_cut
            else entry.rows
        )
        first = (entry.rows - count) * rank // ranks
        if not entry.is_scalar:
            rows[entry.name] = (*(slice(None),) * entry.row_dim, slice(first, first + count))
    loaded = checkpoint.load(select=list(rows), slices=rows)
    seconds: float = loaded.report.as_dict()["time"]["transfer_seconds"]
    return loaded.report.tensor_bytes / max(seconds, 1e-6)


def messages(link: Link) -> list[Any]:
    """Memory for `measure_link`, taken before ranks count on each other's messages."""
    import torch  # noqa: PLC0415

    return [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=link.device) for _ in range(link.size)]


def measure_link(link: Link, buffers: Sequence[Any]) -> float:
    """Bytes per second that arrive at each rank while every rank sends to all others."""
    import torch  # noqa: PLC0415

    best = float("inf")
    # The first round opens connections; of the others, the best is the least disturbed.
    for number in range(ROUNDS):
        started = time.perf_counter()
        works = [link.start_broadcast(buffer, root) for root, buffer in enumerate(buffers)]
        for work in works:
            link.wait_for_all(work, link.device)
        if link.device != "cpu":
            torch.cuda.synchronize(link.device)
        if number > 0:
            best = min(best, time.perf_counter() - started)
    return MESSAGE_BYTES * (link.size - 1) / max(best, 1e-6)


def _places(sizes: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Tensors that hold bytes spread evenly over the checkpoint, a rank's own places between those of others."""
    total = sum(sizes)
    targets = [total * (sample * ranks + rank) // (SAMPLES * ranks) for sample in range(SAMPLES)]
    places: list[int] = []
    position = 0
    for tensor, size in enumerate(sizes):
        position += size
        while targets and targets[0] < position:
            targets.pop(0)
            if not places or places[-1] != tensor:
                places.append(tensor)
    return places
