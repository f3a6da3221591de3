"""Random requests: whatever is asked in which order, a lease has the bytes of the file, and the budget holds."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from pathlib import Path

import hoistway
import pytest
from expert_models import EXPERTS, LAYERS, SLOT_BYTES, expert_bytes, open_store, write_experts

ROUNDS = 150


def digest(parts: dict[str, bytes]) -> str:
    return hashlib.blake2b(b"".join(parts[name] for name in sorted(parts))).hexdigest()


def digest_of(tensors: Mapping[str, hoistway.Tensor]) -> str:
    return digest({part: tensor.tobytes() for part, tensor in tensors.items()})


def hint(store: hoistway.experts.ExpertStore, random_: random.Random, layer: int, experts: list[int]) -> None:
    """Does what leases nothing."""
    match random_.randrange(5):
        case 0:
            store.prefetch(layer, experts, random_.choice([None, 0.0, 1.0]))
        case 1:
            store.observe(layer, [(expert, random_.random()) for expert in experts])
        case 2:
            store.evict(layer, experts)
        case 3:
            store.cancel_before(layer)
        case 4:
            store.ensure_async(layer, experts).release()


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_keep_bytes_and_budget(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    model = write_experts(tmp_path / "model", stacked=random_.random() < 0.5, seed=seed)
    digests = {key: digest(parts) for key, parts in expert_bytes(model).items()}
    budget = random_.randint(2, 9) * SLOT_BYTES
    store = open_store(
        model,
        budget / SLOT_BYTES,
        backing=random_.choice(["host_slots", "host_sparse"]),
        policy=random_.choice(["ewma2", "lru", "slru", "lfu", "arc"]),
    )
    leases: list[hoistway.experts.Lease] = []
    tensors: list[tuple[tuple[int, int], dict[str, hoistway.Tensor]]] = []
    refused = 0
    for _ in range(ROUNDS):
        layer = random_.choice(LAYERS)
        experts = random_.sample(range(EXPERTS), random_.randint(1, 3))
        action = random_.randrange(10)
        if action == 0:
            budget = random_.randint(2, 9) * SLOT_BYTES
            store.set_budget(budget)
        elif action < 6:
            hint(store, random_, layer, experts)
        else:
            try:
                lease = store.ensure_async(layer, experts).wait(0.05 if leases or tensors else None)
            except (hoistway.errors.MemoryBudgetError, hoistway.errors.WaitTimeoutError):
                assert leases or tensors, "no lease holds the room"
                refused += 1
                leases.clear()
                tensors.clear()
                continue
            for expert, leased in lease.items():
                assert digest({part: leased[part].tobytes() for part in leased}) == digests[layer, expert]
                if random_.random() < 0.1:
                    tensors.append(((layer, expert), dict(leased)))
                del leased
            if random_.random() < 0.3:
                leases.append(lease)
            del lease
        while leases and random_.random() < 0.5:
            leases.pop(random_.randrange(len(leases))).release()
        # What is held stays as it is, whatever was evicted meanwhile.
        assert all(digest_of(parts) == digests[key] for key, parts in tensors)
        if len(tensors) > 2:
            tensors.pop(0)
        stats = store.stats()
        # A smaller budget holds once what was leased before is given back.
        most = 9 * SLOT_BYTES if leases or tensors else budget
        assert stats["held_bytes"] <= most + stats["largest_batch_bytes"]
    leases.clear()
    tensors.clear()
    store.set_budget(2 * SLOT_BYTES)
    # What nothing waits for any more is read to its end.
    deadline = time.monotonic() + 30
    while store.stats()["held_bytes"] > 2 * SLOT_BYTES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.stats()["peak_bytes"] <= 9 * SLOT_BYTES + store.stats()["largest_batch_bytes"]
    assert refused < ROUNDS
