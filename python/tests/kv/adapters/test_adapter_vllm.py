"""vLLM's own specification, factory and manager of tiers, with ours as the secondary one."""

from __future__ import annotations

import itertools
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapter_hosts import (
    INTERRUPTS,
    SMALL,
    Held,
    examples,
    flip_bit,
    random_bytes,
    released_later,
    sharded_checkpoint,
    truncate,
    wait_until,
)
from plugin_hosts import HOST_WARNINGS, host_is_before, import_host, logged

import_host("vllm.v1.kv_offload.tiering.spec")

from hoistway.errors import MemoryLostError, OptionError, StorageError, StoreClosedError  # noqa: E402
from hoistway.kv.adapters.vllm import FAILED_BLOCKS, HoistwayTier  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402

pytestmark = HOST_WARNINGS

CHUNKS = 8
CHUNK = 64 * 1024
CONTEXT = ReqContext(req_id="request")
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
HIT, MISS = LookupResult.HIT, LookupResult.MISS

jobs = itertools.count(1)


def config_of(extra: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """What vLLM makes of its configuration, with some of it changed."""
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=changes.pop("is_parallelism_agnostic", False),
    )
    parallel = replace(parallel, **changes.pop("parallel", {}))
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=CHUNK // parallel.world_size,
        enable_kv_cache_events=changes.pop("events", False),
        extra_config=extra,
        # It names memory that all programs of the machine share.
        engine_id=str(uuid.uuid4()),
        model=OffloadingModelConfig(name="llama", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
    )
    return replace(config, **changes)


def lock_of(manager: Any) -> AbstractContextManager[Any]:
    """What callers of vLLM's manager have to hold; before 0.33 nothing."""
    return nullcontext() if host_is_before("vllm", "0.33") else manager.lock


@dataclass
class Engine:
    """vLLM's manager of tiers, and the memory of its first one."""

    manager: Any
    tier: HoistwayTier
    memory: np.ndarray

    def step(self) -> None:
        with lock_of(self.manager):
            self.manager.on_schedule_end(STEP)

    def put(self, contents: dict[OffloadKey, bytes], context: ReqContext = CONTEXT) -> None:
        """Chunks come from the device, and go on to the tier."""
        keys = list(contents)
        with lock_of(self.manager):
            self.manager.on_new_request(context)
            output = self.manager.prepare_store(keys, context)
            assert output is not None
            for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.memory[chunk] = np.frombuffer(contents[key], np.uint8)
            self.manager.complete_store(keys, context)
            self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        wait_until(lambda: self.step() or not self.manager.has_pending_work())

    def find(self, key: OffloadKey, context: ReqContext = CONTEXT) -> LookupResult:
        with lock_of(self.manager):
            return self.manager.lookup(key, context)

    def get(self, key: OffloadKey, context: ReqContext) -> bytes | None:
        """A chunk, from wherever it is, on its way to the device."""
        while (found := self.find(key, context)) is not MISS:
            if found is HIT:
                with lock_of(self.manager):
                    (chunk,) = self.manager.prepare_load([key], context).chunk_ids
                    content = self.memory[chunk].tobytes()
                    self.manager.complete_load([key], context)
                return content
            self.settle()
        return None

    def forget(self) -> None:
        """Empties vLLM's first tier."""
        with lock_of(self.manager):
            self.manager.reset_cache()
            if not host_is_before("vllm", "0.33"):
                self.manager.on_reset_flushed()
        self.memory[:] = 0

    def reached(self, job: TransferJob, *, load: bool) -> Any:
        """Hands a job to the tier, and waits for what comes of it."""
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == job.job_id
        return result

    def store(self, keys: list[OffloadKey], chunks: list[int]) -> Any:
        return self.reached(job_of(keys, chunks, is_promotion=False), load=False)

    def load(self, keys: list[OffloadKey], chunks: list[int], context: ReqContext = CONTEXT) -> Any:
        return self.reached(job_of(keys, chunks, is_promotion=True, context=context), load=True)


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def job_of(
    keys: list[OffloadKey], chunks: list[int], *, is_promotion: bool, context: ReqContext = CONTEXT
) -> TransferJob:
    return TransferJob(next(jobs), keys, np.array(chunks, dtype=np.int64), is_promotion, context)


@contextmanager
def engine(root: Path, changes: dict[str, Any] | None = None, **tier: Any) -> Iterator[Engine]:
    """An engine whose chunks go to a store."""
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": CHUNKS * CHUNK,
        "secondary_tiers": [
            {
                "type": "HoistwayTier",
                "module_path": "hoistway.kv.adapters.vllm",
                "root_dir": str(root),
                **SMALL,
                **tier,
            }
        ],
    }
    with opened(config_of(extra, **changes or {})) as engine:
        yield engine


@contextmanager
def opened(config: OffloadingConfig) -> Iterator[Engine]:
    spec = OffloadingSpecFactory.create_spec(config)
    assert type(spec) is TieringOffloadingSpec
    manager = spec.get_manager()
    (tier,) = manager.secondary_tiers
    assert type(tier) is HoistwayTier
    memory = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    engine = Engine(manager, tier, memory)
    del memory
    try:
        yield engine
    finally:
        # The new owner of the memory keeps vLLM from giving it back.
        engine.memory = None
        manager.shutdown()


@pytest.fixture
def vllm(tmp_path):
    with engine(tmp_path / "kv") as found:
        yield found


def test_documented_configurations_make_tiers_of_ours(tmp_path):
    for example in examples("vllm", tmp_path / "kv"):
        extra = KVTransferConfig(**example).kv_connector_extra_config
        assert extra["cpu_bytes_to_use"] >= 1 << 30
        with opened(config_of({**extra, "cpu_bytes_to_use": CHUNKS * CHUNK}, events=True)) as found:
            assert found.tier.medium is Medium.STORAGE
            found.put({key_of(1): random_bytes(CHUNK, 1)})
            assert found.tier.lookup(key_of(1), CONTEXT) is HIT


def test_chunks_go_out_by_vllms_first_tier_and_come_back(vllm):
    contents = {key_of(number): random_bytes(CHUNK, number) for number in range(4)}
    vllm.put(contents)
    vllm.forget()
    again = ReqContext(req_id="again")
    with lock_of(vllm.manager):
        vllm.manager.on_new_request(again)
    for key, content in contents.items():
        assert vllm.get(key, again) == content
        # vLLM before 0.32 does not ask where a hit comes from.
        if not host_is_before("vllm", "0.32"):
            from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415

            assert vllm.manager.get_load_source(key, again) is CacheHitSource.DISK
    assert vllm.get(key_of(99), again) is None


def test_more_chunks_than_memory_stay_available(vllm):
    contents = {key_of(number): random_bytes(CHUNK, number) for number in range(5 * CHUNKS)}
    for key, content in contents.items():
        vllm.put({key: content}, ReqContext(req_id=f"put {key.hex()}"))
    for key, content in contents.items():
        context = ReqContext(req_id=f"get {key.hex()}")
        with lock_of(vllm.manager):
            vllm.manager.on_new_request(context)
        assert vllm.get(key, context) == content


@pytest.mark.parametrize("batch", [0, 1, 2, 4])
def test_batches_of_any_size_keep_their_bytes(vllm, batch):
    expected = np.frombuffer(random_bytes(CHUNKS * CHUNK, batch), np.uint8).reshape(CHUNKS, CHUNK)
    vllm.memory[:] = expected
    keys = [key_of(number) for number in range(batch)]
    assert vllm.store(keys, list(range(batch))).success
    vllm.memory[:] = 0
    result = vllm.load(keys, list(range(CHUNKS - batch, CHUNKS)))
    assert result.success
    assert result.transfer_bytes == batch * CHUNK
    assert (vllm.memory[CHUNKS - batch :] == expected[:batch]).all()
    assert not vllm.memory[: CHUNKS - batch].any()


def test_chunks_that_are_there_are_not_stored_again(vllm):
    vllm.memory[0] = 1
    vllm.memory[1] = 2
    assert vllm.store([key_of(1)], [0]).transfer_bytes == CHUNK
    result = vllm.store([key_of(1), key_of(2)], [1, 1])
    assert result.success
    assert result.transfer_bytes == CHUNK
    assert vllm.load([key_of(1)], [3]).success
    assert (vllm.memory[3] == 1).all()


def test_what_admission_leaves_out_is_no_failure(tmp_path):
    with engine(tmp_path / "kv", {"events": True}, admission="second_touch", enable_kv_events=True) as vllm:
        assert vllm.store([key_of(1)], [0]).success
        assert list(vllm.tier.take_events()) == []
        # Asked for again, it is stored.
        assert vllm.store([key_of(1)], [0]).success
        assert vllm.tier.lookup(key_of(1), CONTEXT) is HIT
        assert [event.keys for event in vllm.tier.take_events()] == [[key_of(1)]]


def test_engines_share_what_they_store(tmp_path):
    root = tmp_path / "kv"
    with engine(root) as first, engine(root) as second:
        first.memory[0] = 7
        assert first.store([key_of(1)], [0]).success
        wait_until(lambda: second.tier.lookup(key_of(1), CONTEXT) is HIT)
        assert second.load([key_of(1)], [2]).success
        assert (second.memory[2] == 7).all()
        # Who stores it once more has nothing to do.
        assert second.store([key_of(1)], [0]).success


def test_chunks_are_there_after_a_restart(tmp_path):
    content = random_bytes(CHUNK, 1)
    with engine(tmp_path / "kv") as before:
        before.put({key_of(1): content})
    with engine(tmp_path / "kv") as after:
        context = ReqContext(req_id="after")
        with lock_of(after.manager):
            after.manager.on_new_request(context)
        assert after.get(key_of(1), context) == content


def test_jobs_are_told_apart(vllm):
    first, second = (job_of([key_of(number)], [number], is_promotion=False) for number in (1, 2))
    vllm.tier.submit_store(first)
    vllm.tier.submit_store(second)
    vllm.tier.drain_jobs()
    assert {result.job_id for result in vllm.tier.get_finished_jobs()} == {first.job_id, second.job_id}
    assert list(vllm.tier.get_finished_jobs()) == []


def test_a_missing_chunk_fails_alone(vllm):
    vllm.memory[0] = 1
    vllm.memory[1] = 2
    assert vllm.store([key_of(1), key_of(2)], [0, 1]).success
    result = vllm.load([key_of(1), key_of(99), key_of(2)], [4, 5, 6])
    assert not result.success
    assert set(result.successful_keys) == {key_of(1), key_of(2)}
    assert (vllm.memory[4] == 1).all()
    assert (vllm.memory[6] == 2).all()
    result = vllm.load([key_of(99)], [4])
    assert not result.success
    assert result.successful_keys is None


@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_a_damaged_chunk_is_a_miss_for_who_asked_and_for_the_next(tmp_path, damage):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        contents = [random_bytes(CHUNK, number) for number in range(2)]
        for number, content in enumerate(contents):
            vllm.memory[number] = np.frombuffer(content, np.uint8)
        keys = [key_of(1), key_of(2)]
        assert vllm.store(keys, [0, 1]).success
        list(vllm.tier.take_events())
        damage(tmp_path / "kv", contents[1])
        assert vllm.tier.lookup(key_of(2), CONTEXT) is HIT
        result = vllm.load(keys, [2, 3])
        assert not result.success
        assert result.successful_keys == (key_of(1),)
        assert vllm.memory[2].tobytes() == contents[0]
        assert vllm.tier.lookup(key_of(1), CONTEXT) is HIT
        assert vllm.tier.lookup(key_of(2), CONTEXT) is MISS
        assert vllm.tier.lookup(key_of(2), ReqContext(req_id="fresh")) is MISS
        (event,) = vllm.tier.take_events()
        assert event.removed
        assert event.keys == [key_of(2)]
        # It may be stored anew.
        assert vllm.store([key_of(2)], [1]).success
        vllm.tier.on_request_finished(CONTEXT)
        assert vllm.load([key_of(2)], [3]).success
        assert vllm.memory[3].tobytes() == contents[1]


class FailingOnce:
    """A namespace whose next load ends as a drive that fails has it."""

    def __init__(self, blocks: Any, status: str) -> None:
        self._blocks, self._status = blocks, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def load(self, keys: list[OffloadKey], memory: Any) -> Any:
        completion = SimpleNamespace(
            statuses=[self._status] * len(keys), succeeded=[False] * len(keys), ok=False, bytes=0, moving=0.0
        )
        self.load = self._blocks.load
        return SimpleNamespace(
            done=lambda: True, released=lambda: True, wait=lambda: completion, cancel=lambda: False
        )


@pytest.mark.parametrize("status", ["io:5", "timed_out"])
def test_a_failure_that_may_pass_leaves_the_chunk(vllm, monkeypatch, status):
    vllm.memory[0] = 9
    assert vllm.store([key_of(1)], [0]).success
    monkeypatch.setattr(vllm.tier, "_blocks", FailingOnce(vllm.tier._blocks, status))
    assert not vllm.load([key_of(1)], [1]).success
    # The request that saw it fail does not ask for ever; the next one tries again.
    assert vllm.tier.lookup(key_of(1), CONTEXT) is MISS
    assert vllm.tier.lookup(key_of(1), ReqContext(req_id="fresh")) is HIT
    vllm.tier.on_request_finished(CONTEXT)
    assert vllm.tier.lookup(key_of(1), CONTEXT) is HIT
    assert vllm.load([key_of(1)], [1]).success
    assert (vllm.memory[1] == 9).all()
    assert vllm.tier.get_stats().reduce()[f"{FAILED_BLOCKS}:('HoistwayTier', '{status}')"] == 1


def test_a_request_that_finished_before_its_load_failed_leaves_nothing(vllm):
    job = job_of([key_of(99)], [0], is_promotion=True)
    vllm.tier.submit_load(job)
    vllm.tier.on_request_finished(CONTEXT)
    vllm.tier.drain_jobs()
    assert [result.success for result in vllm.tier.get_finished_jobs()] == [False]
    assert vllm.tier._lost == {}


def test_vllm_recomputes_what_a_promotion_could_not_load(tmp_path):
    with engine(tmp_path / "kv") as vllm:
        content = random_bytes(CHUNK, 1)
        vllm.put({key_of(1): content})
        vllm.forget()
        flip_bit(tmp_path / "kv", content)
        context = ReqContext(req_id="again")
        with lock_of(vllm.manager):
            vllm.manager.on_new_request(context)
        assert vllm.get(key_of(1), context) is None


def test_chunks_beyond_the_memory_fail_the_job(vllm):
    assert not vllm.store([key_of(1)], [CHUNKS]).success
    assert vllm.store([key_of(2)], [0]).success
    assert not vllm.load([key_of(2)], [CHUNKS]).success
    assert not vllm.load([key_of(2)], [-1]).success
    assert vllm.tier.lookup(key_of(1), CONTEXT) is MISS


def test_a_chunk_that_is_being_stored_is_asked_for_again(vllm):
    # A batch that takes a while.
    keys = [key_of(number) for number in range(CHUNKS)]
    vllm.tier.submit_store(job_of(keys, list(range(CHUNKS)), is_promotion=False))
    seen = {vllm.tier.lookup(key, CONTEXT) for key in keys}
    assert seen <= {LookupResult.RETRY, HIT}
    vllm.tier.drain_jobs()
    assert all(result.success for result in vllm.tier.get_finished_jobs())
    assert {vllm.tier.lookup(key, CONTEXT) for key in keys} == {HIT}


@pytest.mark.parametrize(("locality", "expected"), [(None, None), ("REMOTE", Locality.REMOTE)])
def test_events_tell_what_was_stored(tmp_path, locality, expected):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True, locality=locality) as vllm:
        assert vllm.store([key_of(1), key_of(2)], [0, 1]).success
        (event,) = vllm.tier.take_events()
        assert (event.keys, event.medium, event.removed) == ([key_of(1), key_of(2)], Medium.STORAGE, False)
        assert event.locality is expected
        assert vllm.load([key_of(1)], [2]).success
        assert list(vllm.tier.take_events()) == []


def test_events_tell_what_went(tmp_path):
    options = {"enable_kv_events": True, "namespace": {"ttl": 1}}
    with engine(tmp_path / "kv", {"events": True}, **options) as vllm:
        for attempt in range(50):
            keys = [key_of(2 * attempt), key_of(2 * attempt + 1)]
            assert vllm.store(keys, [0, 1]).success
            # On a busy machine they can be gone before this tells that they are there.
            if [(event.keys, event.removed) for event in vllm.tier.take_events()] == [(keys, False)]:
                break
        wait_until(lambda: not any(vllm.tier._blocks.lookup(keys)))
        # This tells of one.
        assert vllm.tier.lookup(keys[0], CONTEXT) is MISS
        vllm.tier._store.maintain()
        events = list(vllm.tier.take_events())
        assert sorted(key for event in events for key in event.keys if key in keys) == keys
        assert {(event.medium, event.removed) for event in events} == {(Medium.STORAGE, True)}
        assert list(vllm.tier.take_events()) == []


def test_a_lookup_tells_that_a_chunk_was_removed(tmp_path):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        assert vllm.store([key_of(1)], [0]).success
        list(vllm.tier.take_events())
        vllm.tier._blocks.delete([key_of(1)])
        assert {vllm.tier.lookup(key, CONTEXT) for key in (key_of(1), key_of(1), key_of(2))} == {MISS}
        (event,) = vllm.tier.take_events()
        assert (event.keys, event.removed) == ([key_of(1)], True)


def test_a_chunk_that_comes_back_with_its_far_tier_is_told_of_again(tmp_path, monkeypatch):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        assert vllm.store([key_of(1)], [0]).success
        list(vllm.tier.take_events())
        # As lookups are while a far tier is down.
        blocks = vllm.tier._blocks
        absent = SimpleNamespace(lookup=lambda keys: [False] * len(keys), fingerprint=blocks.fingerprint)
        with monkeypatch.context() as far_is_down:
            far_is_down.setattr(vllm.tier, "_blocks", absent)
            assert vllm.tier.lookup(key_of(1), CONTEXT) is MISS
            (event,) = vllm.tier.take_events()
            assert (event.keys, event.removed) == ([key_of(1)], True)
        assert {vllm.tier.lookup(key_of(1), CONTEXT) for _ in range(2)} == {HIT}
        (event,) = vllm.tier.take_events()
        assert (event.keys, event.removed) == ([key_of(1)], False)
        vllm.tier._blocks.delete([key_of(1)])
        assert vllm.tier.lookup(key_of(1), CONTEXT) is MISS
        (event,) = vllm.tier.take_events()
        assert (event.keys, event.removed) == ([key_of(1)], True)


def test_events_remember_the_last_chunks_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("hoistway.kv.adapters.vllm._MOST_RECALLED", 4)
    keys = [key_of(number) for number in range(8)]
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        for key in keys:
            assert vllm.store([key], [0]).success
        vllm.tier._blocks.delete(keys)
        assert {vllm.tier.lookup(key, CONTEXT) for key in keys} == {MISS}
        list(vllm.tier.take_events())
        # As another process does.
        stores = [vllm.tier._blocks.store([key], [bytes(vllm.tier.block_size_bytes)]) for key in keys]
        assert all(ticket.wait(60).ok for ticket in stores)
        assert {vllm.tier.lookup(key, CONTEXT) for key in keys} == {HIT}
        assert [event.keys for event in vllm.tier.take_events()] == [[key] for key in keys[4:]]


def test_a_store_for_reading_takes_nothing_and_says_no_error(tmp_path):
    with engine(tmp_path / "kv") as before:
        before.memory[0] = 5
        assert before.store([key_of(1)], [0]).success
    with engine(tmp_path / "kv", access="read") as reader:
        result = reader.store([key_of(2)], [0])
        assert (result.success, result.transfer_bytes) == (True, 0)
        assert reader.tier.lookup(key_of(2), CONTEXT) is MISS
        assert reader.load([key_of(1)], [1]).success
        assert (reader.memory[1] == 5).all()


class NeverKnown(FailingOnce):
    """A namespace whose next load leaves in doubt whether the memory is still written."""

    def load(self, keys: list[OffloadKey], memory: Any) -> Any:
        ticket = super().load(keys, memory)
        ticket.released, ticket.lost = (lambda: False), (lambda: True)
        return ticket


def test_memory_in_doubt_is_never_given_back(vllm, monkeypatch):
    assert vllm.store([key_of(1)], [0]).success
    monkeypatch.setattr(vllm.tier, "_blocks", NeverKnown(vllm.tier._blocks, "io:5"))
    vllm.tier.submit_load(job_of([key_of(1)], [1], is_promotion=True))
    assert list(vllm.tier.get_finished_jobs()) == []
    assert list(vllm.tier.get_finished_jobs()) == []
    with pytest.raises(MemoryLostError, match="1 io:5"):
        vllm.tier.drain_jobs()
    for _ in range(2):
        with pytest.raises(MemoryLostError, match="1 io:5"):
            vllm.manager.shutdown()
    assert vllm.manager.primary_tier.get_kv_memoryview()[0, 0] == 0, "vLLM keeps it"
    with pytest.raises(StoreClosedError):
        vllm.tier._store.stats()
    vllm.tier._jobs.clear()


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_vllm_gets_its_chunks_back_when_a_job_cannot_begin(vllm, monkeypatch, interrupt):
    class Failing(dict):
        def __setitem__(self, *_: Any) -> None:
            raise interrupt("once the request has begun")

    ticket = Held("cancelled")
    blocks = SimpleNamespace(load=lambda *_: ticket)
    monkeypatch.setattr(vllm.tier, "_blocks", blocks)
    monkeypatch.setattr(vllm.tier, "_jobs", Failing())
    timer = released_later(ticket)
    with pytest.raises(interrupt, match="has begun"):
        vllm.tier.submit_load(job_of([key_of(1)], [1], is_promotion=True))
    assert ticket.is_cancelled
    assert ticket.is_released, "vLLM may use the chunk now"
    timer.join()
    monkeypatch.undo()


def test_a_store_that_cannot_be_closed_does_not_keep_vllm_from_its_memory(tmp_path, monkeypatch):
    def fail() -> None:
        raise StorageError("no room")

    with engine(tmp_path / "kv") as vllm:
        close = vllm.tier._store.close
        monkeypatch.setattr(vllm.tier._store, "close", fail)
        view = vllm.manager.primary_tier.get_kv_memoryview()
    close()
    with pytest.raises(ValueError, match="released"):
        view[0, 0]


def test_events_reach_vllms_manager(tmp_path):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        vllm.put({key_of(1): bytes(CHUNK)})
        events = [event for event in vllm.manager.take_events() if event.medium is Medium.STORAGE]
        assert [event.keys for event in events] == [[key_of(1)]]


@pytest.mark.parametrize(("globally", "here"), [(True, False), (False, True)])
def test_there_are_no_events_unless_both_want_them(tmp_path, globally, here):
    with engine(tmp_path / "kv", {"events": globally}, enable_kv_events=here) as vllm:
        assert vllm.store([key_of(1)], [0]).success
        assert list(vllm.tier.take_events()) == []


def test_only_what_was_stored_has_events(tmp_path):
    with engine(tmp_path / "kv", {"events": True}, enable_kv_events=True) as vllm:
        assert not vllm.store([key_of(1)], [CHUNKS]).success
        assert list(vllm.tier.take_events()) == []


def test_a_reset_waits_for_what_is_under_way(vllm):
    vllm.memory[:] = 3
    keys = [key_of(number) for number in range(CHUNKS)]
    with lock_of(vllm.manager):
        vllm.manager.on_new_request(CONTEXT)
        vllm.manager.prepare_store(keys, CONTEXT)
        vllm.manager.complete_store(keys, CONTEXT)
    vllm.forget()
    assert not vllm.manager.has_pending_work()
    assert vllm.load([key_of(5)], [0]).success
    assert (vllm.memory[0] == 3).all()


def test_a_shutdown_lets_stores_end_and_lets_go_of_vllms_memory(tmp_path):
    with engine(tmp_path / "kv") as vllm:
        keys = [key_of(number) for number in range(CHUNKS)]
        vllm.tier.submit_store(job_of(keys, list(range(CHUNKS)), is_promotion=False))
        view = vllm.manager.primary_tier.get_kv_memoryview()
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    with engine(tmp_path / "kv") as again:
        assert {again.tier.lookup(key, CONTEXT) for key in keys} == {HIT}


DIFFERENT = {
    "model": {"model": OffloadingModelConfig(name="other", dtype="bfloat16")},
    "dtype": {"model": OffloadingModelConfig(name="llama", dtype="fp8_e4m3")},
    "layout": {"kv_cache_layout": "LBHNC"},
    "hashed tokens": {"cache": OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1)},
    "ranks": {"parallel": {"tp_size": 2, "world_size": 2}},
    "layers": {"groups": (OffloadingGroupConfig(16, ("layers.0",), 0),)},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_chunks_of_another_layout_are_not_found(tmp_path, what):
    root = tmp_path / "kv"
    with engine(root) as ours:
        assert ours.store([key_of(1)], [0]).success
        with engine(root, DIFFERENT[what]) as other:
            other.tier._store.maintain()
            assert other.tier.lookup(key_of(1), CONTEXT) is MISS
        with engine(root) as same:
            same.tier._store.maintain()
            assert same.tier.lookup(key_of(1), CONTEXT) is HIT


def test_chunks_of_other_weights_at_the_same_path_are_not_found(tmp_path):
    path = tmp_path / "llama"
    changes = {"model": OffloadingModelConfig(name=str(path), dtype="bfloat16")}
    for seed, expected in ((0, MISS), (1, MISS), (0, HIT)):
        sharded_checkpoint(path, seed)
        with engine(tmp_path / "kv", changes) as vllm:
            assert vllm.tier.lookup(key_of(1), CONTEXT) is expected
            assert vllm.store([key_of(1)], [0]).success
        shutil.rmtree(path)


def test_a_model_whose_weights_are_not_found_is_a_warning(tmp_path):
    with logged("vllm.hoistway.kv") as messages, engine(tmp_path / "kv"):
        pass
    assert any("does not depend on the weights: llama is not a directory" in message for message in messages)


def test_chunks_with_one_copy_for_all_ranks_are_exchanged(tmp_path):
    def ranks(count: int) -> dict[str, Any]:
        parallel = {"tp_size": count, "world_size": count}
        return {"parallel": parallel, "replicated_layout": True, "worker_kv_bytes_per_block": CHUNK}

    with engine(tmp_path / "kv", ranks(2)) as writer:
        writer.memory[0] = 5
        assert writer.store([key_of(1)], [0]).success
        with engine(tmp_path / "kv", ranks(4)) as reader:
            wait_until(lambda: reader.tier.lookup(key_of(1), CONTEXT) is HIT)
            assert reader.load([key_of(1)], [1]).success
            assert (reader.memory[1] == 5).all()


def test_what_the_user_adds_tells_chunks_apart_too(tmp_path):
    root = tmp_path / "kv"
    with engine(root, namespace={"model": "llama@2", "salt": "tenant"}) as ours:
        assert ours.store([key_of(1)], [0]).success
    with engine(root, namespace={"model": "llama@3", "salt": "tenant"}) as other:
        assert other.tier.lookup(key_of(1), CONTEXT) is MISS
    with (
        pytest.raises(OptionError, match="the engine says that it is 'bfloat16'"),
        engine(root, namespace={"dtype": "fp8"}),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"capacty": "1GiB"}, OptionError, "'capacty' in secondary tier HoistwayTier means nothing"),
        ({"locality": "here"}, ValueError, "here"),
        ({"durability": "some"}, OptionError, "some"),
        ({"root_dir": "/dev/null/kv"}, OSError, "/dev/null"),
    ],
)
def test_what_cannot_be_is_said_when_the_engine_starts(tmp_path, options, error, message):
    with pytest.raises(error, match=message), engine(tmp_path / "kv", **options):
        pass


def test_metrics_are_those_that_vllm_was_told_of(tmp_path):
    with engine(tmp_path / "kv") as vllm:
        extra = vllm.tier._offloading_spec.extra_config
        known = TieringOffloadingSpec.build_metric_definitions(extra)
        vllm.put({key_of(1): bytes(CHUNK)})
        assert not vllm.load([key_of(99)], [0]).success
        stats = vllm.tier.get_stats()
        # vLLM before 0.33 has no name for both.
        before = host_is_before("vllm", "0.33")
        types, values = (stats._types, stats._values) if before else stats.metric_sections()
        assert values[FAILED_BLOCKS] == {("HoistwayTier", "miss"): 1}
        assert isinstance(known[FAILED_BLOCKS], OffloadingCounterMetadata)
        for name, series in values.items():
            for labels in series:
                assert len(labels) == len(known[name].labelnames), name
        assert types[FAILED_BLOCKS] == "counter"
        # Asked again at once, there is nothing new.
        assert vllm.tier.get_stats() is None


def test_backpressure_of_vllm_takes_effect(tmp_path):
    pressure = {"backpressure_cls": "vllm.v1.kv_offload.tiering.backpressure.EMABackpressureDetector"}
    with engine(tmp_path / "kv", backpressure=pressure) as vllm:
        vllm.put({key_of(1): bytes(CHUNK)})
        assert vllm.tier.bp_detector is not None
        assert vllm.tier.lookup(key_of(1), CONTEXT) is HIT


def test_threads_may_take_turns(vllm):
    """vLLM's thread that polls tiers calls with its lock held, as the scheduler's does."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            key, context = key_of(number), ReqContext(req_id=f"thread {number}")
            for _ in range(5):
                with lock_of(vllm.manager):
                    vllm.manager.on_new_request(context)
                    assert vllm.manager.lookup(key, context) in (MISS, HIT, LookupResult.HIT_PENDING)
                    vllm.manager.on_request_finished(context)
                vllm.step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
