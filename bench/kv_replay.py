"""Replays traces of KV blocks on a full store, beside a model of its policy that has no segments.

A trace is lines of JSON with `hash_ids`, the blocks of a prompt in order, as Mooncake publishes them
(https://github.com/kvcache-ai/Mooncake, FAST25-release/traces). Each prompt looks its longest prefix up, uses that, and
stores the rest. The models count a block by the bytes that it takes in the store, and have the store's capacity.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from host import machine

KIB, MIB = 1 << 10, 1 << 20
HEADER_BYTES = 4 * KIB
# Bytes of the blocks of each model that is served.
MODELS: dict[str, tuple[int, ...]] = {"12 KiB": (12 * KIB,), "12 and 60 KiB": (12 * KIB, 60 * KIB)}
PARTS = (0.05, 0.1, 0.25, 0.5)
# Part of the bytes that blocks have which were used once.
SMALL_PART = 0.1
MOST_USES = 3

Block = tuple[int, int]


class Cache(Protocol):
    """What blocks are kept in."""

    def prefix(self, blocks: list[Block]) -> int:
        """How many of the first blocks are there. They count as used."""

    def add(self, blocks: list[Block]) -> None:
        """Stores blocks that are not there."""


class Lru:
    """The least recently used block goes first."""

    def __init__(self, capacity: int, sizes: tuple[int, ...]) -> None:
        self._left = capacity
        self._sizes = sizes
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def prefix(self, blocks: list[Block]) -> int:
        """As the protocol says."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            count += 1
        return count

    def add(self, blocks: list[Block]) -> None:
        """As the protocol says."""
        for block in blocks:
            if block in self._blocks:
                self._blocks.move_to_end(block)
                continue
            self._blocks[block] = None
            self._left -= self._sizes[block[0]]
            while self._left < 0:
                gone, _ = self._blocks.popitem(last=False)
                self._left += self._sizes[gone[0]]


class S3Fifo:
    """Blocks that are used again while they are in a small queue get into a large one, where use lets them stay."""

    def __init__(self, capacity: int, sizes: tuple[int, ...]) -> None:
        self._capacity = capacity
        self._sizes = sizes
        self._uses: dict[Block, int] = {}
        self._small: deque[Block] = deque()
        self._main: deque[Block] = deque()
        self._bytes = {"small": 0, "main": 0}
        self._gone: OrderedDict[Block, None] = OrderedDict()

    def prefix(self, blocks: list[Block]) -> int:
        """As the protocol says."""
        count = 0
        for block in blocks:
            if block not in self._uses:
                break
            self._uses[block] = min(self._uses[block] + 1, MOST_USES)
            count += 1
        return count

    def add(self, blocks: list[Block]) -> None:
        """As the protocol says."""
        for block in blocks:
            if block in self._uses:
                continue
            size = self._sizes[block[0]]
            while sum(self._bytes.values()) + size > self._capacity:
                self._evict()
            self._uses[block] = 0
            if block in self._gone:
                del self._gone[block]
                self._to_main(block)
            else:
                self._small.append(block)
                self._bytes["small"] += size

    def _to_main(self, block: Block) -> None:
        self._main.append(block)
        self._bytes["main"] += self._sizes[block[0]]

    def _evict(self) -> None:
        is_small = self._bytes["small"] > SMALL_PART * self._capacity or not self._main
        if is_small and self._small:
            block = self._small.popleft()
            self._bytes["small"] -= self._sizes[block[0]]
            if self._uses[block] > 0:
                self._uses[block] = 0
                return self._to_main(block)
            self._gone[block] = None
            while len(self._gone) > len(self._main) + len(self._small):
                self._gone.popitem(last=False)
        else:
            block = self._main.popleft()
            self._bytes["main"] -= self._sizes[block[0]]
            if self._uses[block] > 0:
                self._uses[block] -= 1
                return self._to_main(block)
        del self._uses[block]
        return None


class Stored:
    """A store of this project."""

    def __init__(self, root: Path, capacity: int, sizes: tuple[int, ...]) -> None:
        import hoistway.kv  # noqa: PLC0415

        shutil.rmtree(root, ignore_errors=True)
        self._root = root
        self._store = hoistway.kv.Store(root, capacity=capacity, min_free=0, durability="none")
        self._blocks = self._store.namespace(model="replay", dtype="uint8", layout="opaque")
        self._memory = [bytes(size - HEADER_BYTES) for size in sizes]
        self.refused = 0

    def prefix(self, blocks: list[Block]) -> int:
        """As the protocol says."""
        keys = [f"{model}/{block}" for model, block in blocks]
        count = self._blocks.lookup_prefix(keys)
        self._blocks.touch(keys[:count])
        return count

    def add(self, blocks: list[Block]) -> None:
        """As the protocol says."""
        keys = [f"{model}/{block}" for model, block in blocks]
        statuses = self._blocks.store(keys, [self._memory[model] for model, _ in blocks]).wait().statuses
        self.refused += sum(status not in ("ok", "exists") for status in statuses)

    def close(self) -> None:
        """Removes the store."""
        self._store.close()
        shutil.rmtree(self._root)


def prompts(trace: Path, models: int) -> Iterator[list[Block]]:
    """The blocks of each prompt. Which model is asked is the same for all prompts of one conversation."""
    with trace.open() as lines:
        for line in lines:
            blocks = json.loads(line)["hash_ids"]
            model = blocks[min(1, len(blocks) - 1)] % models
            yield [(model, block) for block in blocks]


def hit_rate(cache: Cache, trace: Path, models: int) -> float:
    """Part of all blocks that were found."""
    found = asked = 0
    for blocks in prompts(trace, models):
        count = cache.prefix(blocks)
        if count < len(blocks):
            cache.add(blocks[count:])
        found, asked = found + count, asked + len(blocks)
    return found / asked


def replay(trace: Path, root: Path, name: str, part: float) -> dict[str, Any]:
    """The rates of the store and of the models, at a capacity of this part of all blocks."""
    sizes = tuple(payload + HEADER_BYTES for payload in MODELS[name])
    everything = sum(
        sizes[model] for model, _ in {block for blocks in prompts(trace, len(sizes)) for block in blocks}
    )
    capacity = int(everything * part)
    store = Stored(root, capacity, sizes)
    rates = {
        "store": hit_rate(store, trace, len(sizes)),
        "s3fifo": hit_rate(S3Fifo(capacity, sizes), trace, len(sizes)),
        "lru": hit_rate(Lru(capacity, sizes), trace, len(sizes)),
    }
    store.close()
    return {
        "trace": trace.stem,
        "blocks": name,
        "part": part,
        "capacity": capacity,
        "refused": store.refused,
        **rates,
    }


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    host = results["host"]
    lines = [
        f"| {case['trace']} | {case['blocks']} | {case['capacity'] / MIB:.0f} MiB, {case['part']:.0%} | "
        f"{case['store']:.3f} | {case['s3fifo']:.3f} | {case['lru']:.3f} | {case['refused']} |"
        for case in results["cases"]
    ]
    table = "\n".join(lines)
    return f"""# Hits of the KV store

Prompts of published traces of KV blocks (Mooncake, FAST '25) in order: each uses the longest prefix that is there, and
stores the rest. *Hits* is the part of all blocks that was found. *Capacity* is that of the store's files, also as a
part of all blocks of the trace. The models have the same capacity in bytes of blocks and headers, and lose none to
logs or places: S3-FIFO is the policy of the store, LRU the usual one. The machine matters little: the store evicts some
blocks ahead of need, by time.
Made by `just bench-kv-replay`.

{host["date"]}, commit {host["commit"]}.

| trace | blocks of | capacity | hits of the store | of S3-FIFO | of LRU | refused |
|---|---|---|---|---|---|---|
{table}
"""


def main() -> None:
    """Replays what the command line says, and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="for the store; memory will do, such as /dev/shm")
    parser.add_argument("traces", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--parts", nargs="*", type=float, default=list(PARTS))
    parser.add_argument("--blocks", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="directory for kv-replay.json and kv-replay.md")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"host": machine(arguments.directory, ("hoistway",)), "cases": []}
    for trace in arguments.traces:
        for name in arguments.blocks:
            for part in arguments.parts:
                case = replay(trace, arguments.directory / "kv-replay", name, part)
                results["cases"].append(case)
                print(json.dumps(case), file=sys.stderr)
    text = document(results)
    print(text)
    if arguments.output:
        (arguments.output / "kv-replay.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.output / "kv-replay.md").write_text(text)


if __name__ == "__main__":
    main()
