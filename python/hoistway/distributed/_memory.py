"""Whether ranks have the memory that they are about to allocate together."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import hoistway
from hoistway._words import in_words
from hoistway.distributed._catalog import Catalog
from hoistway.distributed._plan import Plan, part_bytes, piece_bytes
from hoistway.distributed._wants import Wants
from hoistway.errors import MemoryBudgetError

OVERHEAD_SHIFT = 6
"""Page tables, thread stacks and the like, as a part of what is allocated: one 64th, as in every load."""


def needed_bytes(
    catalog: Catalog, wants: Wants, plan: Plan, rank: int, reader: int, *, keeps_all: bool
) -> int:
    """Returns the most bytes of host memory that the tensors and messages of a rank take at a time.

    Args:
        catalog: The tensors.
        wants: What each rank wants.
        plan: The steps of the rank.
        rank: The rank.
        reader: Its number in its node.
        keeps_all: Whether tensors stay when their step has ended. Else those that the caller keeps are not counted.
    """
    arriving, ahead, passed = [], [], []
    for step in plan.steps:
        arriving.append(sum(part_bytes(catalog, wants, rank, tensor) for tensor in step.done))
        ahead.append(sum(part_bytes(catalog, wants, rank, tensor) for tensor in step.own))
        passed.append(
            sum(
                piece_bytes(catalog, piece)
                for parcel in step.parcels
                if parcel.reader == reader
                for piece in parcel.pieces
            )
        )
    # While a step's bytes and copies of them go out, those of the next are read.
    nexts = range(1, len(plan.steps) + 1)
    messages = max(
        (2 * now + sum(passed[then : then + 1]) for now, then in zip(passed, nexts, strict=True)), default=0
    )
    if keeps_all:
        return sum(arriving) + messages
    kept = max(
        (now + sum(ahead[then : then + 1]) for now, then in zip(arriving, nexts, strict=True)), default=0
    )
    return kept + messages


def memory_note(needed: int) -> dict[str, Any]:
    """What a rank tells the others: how much it is about to allocate, and what each limit on its memory leaves."""
    limits = {_place(limit.name): [limit.name, limit.available_bytes] for limit in hoistway.memory_limits()}
    return {"needed": needed, "limits": limits}


def check_memory(notes: Sequence[Mapping[str, Any]]) -> None:
    """Fails if ranks under one limit need more than it leaves. From the same notes, every rank comes to the same."""
    by_limit: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        for place in note["limits"]:
            by_limit.setdefault(place, []).append(rank)
    for place, ranks in by_limit.items():
        needed = sum(notes[rank]["needed"] for rank in ranks)
        needed += needed >> OVERHEAD_SHIFT
        name, available = min((notes[rank]["limits"][place] for rank in ranks), key=lambda limit: limit[1])
        if needed > available:
            raise MemoryBudgetError(
                f"the {len(ranks)} ranks under {name} need {in_words(needed)} together, and it leaves "
                f"{in_words(available)}: free memory, raise that limit, cut tensors with shards, lower max_in_flight, "
                "or run fewer ranks there"
            )


def _place(limit: str) -> str:
    """The same for all views of one limit. Names are not: containers call the files of theirs by the same path."""
    _, slash, path = limit.partition("/")
    kernel = running_kernel()
    if not slash:
        return f"{kernel} {limit}"
    try:
        status = os.stat(f"/{path}")
    except OSError:
        return f"{kernel} {path} {os.getpid()}"
    return f"{kernel} {status.st_dev}:{status.st_ino}"


def running_kernel() -> str:
    """The same for processes on one kernel, whatever they call their host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()
