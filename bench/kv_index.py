"""A store of a million blocks: how long it takes to open, to look keys up, and how much memory it needs for each.

Each phase is a fresh process, so that nothing of the one before is in its memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hoistway.kv

BLOCK_BYTES = 512
# Blocks of one request, and keys of one lookup.
BATCH = 1000
LOOKUPS = 400


def keys_of(start: int, end: int) -> list[bytes]:
    """Keys as engines make them: digests."""
    return [hashlib.sha256(str(number).encode()).digest() for number in range(start, end)]


def opened(root: Path, count: int) -> tuple[hoistway.kv.Store, hoistway.kv.Namespace]:
    """The store, at its defaults."""
    store = hoistway.kv.Store(root, capacity=max(1 << 30, count * 10 << 10), min_free=0)
    return store, store.namespace(model="benchmark", dtype="uint8", layout="opaque")


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(root: Path, count: int) -> dict[str, Any]:
    """Stores the blocks, and ends without closing the store, as if it were killed."""
    _, blocks = opened(root, count)
    memory = bytearray(BLOCK_BYTES)
    started = time.perf_counter()
    for start in range(0, count, BATCH):
        keys = keys_of(start, min(start + BATCH, count))
        if not blocks.store(keys, [memory] * len(keys)).wait().ok:
            raise SystemExit("not all blocks were stored")
    return {"seconds": time.perf_counter() - started}


def look_up(root: Path, count: int) -> dict[str, Any]:
    """Opens the store, looks keys up and closes it."""
    before = resident()
    started = time.perf_counter()
    store, blocks = opened(root, count)
    opening = time.perf_counter() - started
    memory = resident() - before
    chance = random.Random(7)
    starts = [chance.randrange(count - BATCH) for _ in range(LOOKUPS)]
    result = {
        "opening": opening,
        "blocks": store.stats()["blocks"],
        "memory_bytes": memory,
        "hit_us": microseconds(blocks, [keys_of(start, start + BATCH) for start in starts], expected=True),
        "miss_us": microseconds(
            blocks, [keys_of(count + start, count + start + BATCH) for start in starts], expected=False
        ),
    }
    store.close()
    return result


def microseconds(
    blocks: hoistway.kv.Namespace, lookups: Sequence[Sequence[bytes]], *, expected: bool
) -> float:
    """What a key takes, in lookups of many."""
    started = time.perf_counter()
    found = [blocks.lookup(keys) for keys in lookups]
    seconds = time.perf_counter() - started
    if any(one is not expected for some in found for one in some):
        raise SystemExit("lookups said something else than what is there")
    return seconds / sum(map(len, lookups)) * 1e6


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["fill", "look_up"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    arguments = parser.parse_args()
    phase = {"fill": fill, "look_up": look_up}[arguments.phase]
    print(json.dumps(phase(arguments.root, arguments.count)))
    sys.stdout.flush()
    # Without a goodbye.
    os._exit(0)


if __name__ == "__main__":
    main()
