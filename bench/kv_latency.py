"""How long a load of one block takes in our store, alone and while other threads store as much as they can."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import windlass.kv
from kv_engines import touched

BLOCK_BYTES = 64 << 10
STORED_BYTES = 1 << 20
# Blocks that are loaded; of others, as many are kept as there is room for.
BLOCKS = 4096
LOADS = 2000
STORERS = 2
# Blocks of one request of those who store.
BATCH = 16


class Storer(threading.Thread):
    """Stores blocks in the background, each under a key of its own, until it is stopped."""

    def __init__(self, blocks: windlass.kv.Namespace, name: str) -> None:
        super().__init__(name=name)
        self._blocks = blocks
        self._stopped = threading.Event()
        self.stored_bytes = 0

    def run(self) -> None:
        """Two requests under way at a time."""
        memory = touched(STORED_BYTES * BATCH)
        views = [memory[number * STORED_BYTES : (number + 1) * STORED_BYTES] for number in range(BATCH)]
        waiting: list[Any] = []
        number = 0
        while not self._stopped.is_set():
            keys = [f"{self.name} {number} {part}".encode() for part in range(BATCH)]
            waiting.append(self._blocks.store(keys, views, priority="background"))
            number += 1
            if len(waiting) == 2:
                self._count(waiting.pop(0))
        for ticket in waiting:
            self._count(ticket)

    def _count(self, ticket: Any) -> None:
        statuses = ticket.wait().statuses
        self.stored_bytes += STORED_BYTES * sum(status == "ok" for status in statuses)

    def stop(self) -> None:
        """Ends it."""
        self._stopped.set()
        self.join()


def measure(
    blocks: windlass.kv.Namespace, keys: Sequence[bytes], memory: memoryview, storers: Sequence[Storer]
) -> dict[str, float]:
    """Loads one block after the other, at random."""
    for storer in storers:
        storer.start()
    chance = random.Random(7)
    seconds = []
    started = time.perf_counter()
    for _ in range(LOADS):
        key = keys[chance.randrange(len(keys))]
        before = time.perf_counter()
        completion = blocks.load([key], [memory]).wait()
        seconds.append(time.perf_counter() - before)
        if not completion.ok:
            raise SystemExit(f"a block was not loaded: {completion.statuses}")
    for storer in storers:
        storer.stop()
    stored = sum(storer.stored_bytes for storer in storers) / (time.perf_counter() - started)
    return {
        "median_ms": statistics.median(seconds) * 1e3,
        "p99_ms": statistics.quantiles(seconds, n=100)[98] * 1e3,
        "stored_gb_per_s": stored / 1e9,
    }


def main() -> None:
    """Measures in a new store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    arguments = parser.parse_args()
    memory = touched(BLOCK_BYTES * BLOCKS)
    views = [memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] for number in range(BLOCKS)]
    keys = [f"block {number}".encode() for number in range(BLOCKS)]
    with windlass.kv.Store(arguments.root, capacity=8 << 30, min_free=0) as store:
        blocks = store.namespace(model="benchmark", dtype="uint8", layout="opaque")
        for start in range(0, BLOCKS, 256):
            if not blocks.store(keys[start : start + 256], views[start : start + 256]).wait().ok:
                raise SystemExit("not all blocks were stored")
        store.flush()
        pins = blocks.pin(keys)
        found = {
            "alone": measure(blocks, keys, views[0], ()),
            "beside stores": measure(
                blocks, keys, views[0], [Storer(blocks, f"storer {number}") for number in range(STORERS)]
            ),
        }
        del pins
    print(json.dumps(found))


if __name__ == "__main__":
    main()
