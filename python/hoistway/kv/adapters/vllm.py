"""A secondary tier of vLLM's `TieringOffloadingSpec`: chunks go from the CPU tier to storage, and come back.

Named in `kv_connector_extra_config` as ``{"type": "HoistwayTier", "module_path": "hoistway.kv.adapters.vllm", …}``.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hoistway.errors import MissingPackageError
from hoistway.kv import Addresses, Completion, Error, Ticket
from hoistway.kv._ending import abandon, settle_all, start_into, summary
from hoistway.kv.adapters._settings import Settings
from hoistway.kv.adapters._tickets import is_accepted, outcome
from hoistway.plugins._versions import is_older, lacking

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.logger import init_logger
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingMetricMetadata,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob

    # vLLM before 0.33 has no name for it.
    if not is_older("vllm", "0.33"):
        from vllm.v1.kv_offload.tiering.base import TIER_LABEL
    else:
        TIER_LABEL = "tier"
except ImportError as error:
    raise MissingPackageError(lacking("vllm", "the tier HoistwayTier", "0.31", error)) from error

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

# Of vLLM's own hierarchy: what is logged elsewhere, vLLM does not show.
log = init_logger("vllm.hoistway.kv")

FAILED_BLOCKS = "vllm:kv_offload_hoistway_failed_blocks"
USED_BYTES = "vllm:kv_offload_hoistway_used_bytes"
CAPACITY_BYTES = "vllm:kv_offload_hoistway_capacity_bytes"
EVICTED_BLOCKS = "vllm:kv_offload_hoistway_evicted_blocks"
CORRUPT_BLOCKS = "vllm:kv_offload_hoistway_corrupt_blocks"

# What a load says of a block that is gone: its users are told. An error of the drive says nothing of the block.
_GONE = frozenset({"miss", "expired", "corrupt", "mismatch"})
_STATS_EVERY_S = 1.0
# Chunks that events have told of, and that are remembered for when they are evicted.
_MOST_ANNOUNCED = 1 << 20
# Chunks that they have told are gone, and that are remembered for when they are found again.
_MOST_RECALLED = 1 << 16


@dataclass
class _Job:
    """A job of vLLM's under way."""

    job_id: JobId
    request: str
    keys: list[OffloadKey]
    """What the ticket is about, in its order."""
    is_load: bool
    ticket: Ticket | None
    """`None` if there is nothing to do, or if it could not begin."""
    has_begun: bool = True
    is_retired: bool = False
    """Whether it will stay unknown if its memory is free."""


class HoistwayTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks in a KV store.

    Only `drain_jobs` and `shutdown` wait for the drive. With layout ``files``, calls also wait for the file system to
    say what is there; with a far tier of that layout they do so for at most its ``lookup_timeout``.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        root_dir: str,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **options: Any,
    ) -> None:
        """Opens the store.

        Args:
            offloading_spec: Says which model, layout and parallelism the chunks are of.
            primary_kv_view: Memory of the CPU tier, a row for each chunk.
            tier_type: Name of this class.
            backpressure_detector: vLLM's own; stores that the drive is too slow for are left out.
            root_dir: Directory of the store.
            locality: ``LOCAL`` or ``REMOTE``, for the events.
            enable_kv_events: Whether events tell what was stored and what is gone.
            options: Those of `hoistway.kv.Store`, ``namespace``, and ``checkpoint``: where the weights are, if they
                are not where vLLM has the model from.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        elif enable_kv_events:
            log.warning(
                "enable_kv_events of tier %s does nothing: KV cache events are off in vLLM", tier_type
            )
        settings = Settings.parse(options, f"secondary tier {tier_type}")
        self._rows: np.ndarray | None = np.asarray(primary_kv_view)
        self._chunks = len(primary_kv_view)
        self._store, self._blocks = settings.open_both(
            root_dir,
            **_description(
                offloading_spec,
                self.block_size_bytes,
                settings.weights(offloading_spec.config.model.name, logger=log),
            ),
        )
        self._is_read_only = settings.is_read_only
        self._jobs: dict[JobId, _Job] = {}
        # Chunks whose store has not ended, and how often they are being stored.
        self._storing: Counter[OffloadKey] = Counter()
        # What a request could not load. It is not told of a hit again, or it would ask for ever.
        self._lost: dict[str, set[OffloadKey]] = {}
        # What events have told of, by the store's names.
        self._announced: OrderedDict[str, OffloadKey] = OrderedDict()
        # Of these they have told that they are gone. A far tier that is back, or another process, may have them.
        self._recalled: OrderedDict[str, None] = OrderedDict()
        self._is_closed = False
        self._failures: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._next_stats = 0.0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is there. Events tell of one that is not any more, and of one that is again."""
        if key in self._lost.get(req_context.req_id, ()):
            return LookupResult.MISS
        if self._blocks.lookup([key])[0]:
            if self._recalled and self._blocks.fingerprint(key) in self._recalled:
                self._tell_stored([key])
            return LookupResult.HIT
        if key in self._storing:
            return LookupResult.RETRY
        if self._announced and self._blocks.fingerprint(key) in self._announced:
            self._recall([key])
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Starts to store those chunks that are not there yet."""
        keys = list(job_metadata.keys)
        found = self._blocks.lookup(keys)
        self._blocks.touch([key for key, is_there in zip(keys, found, strict=True) if is_there])
        missing = [
            number
            for number, (key, is_there) in enumerate(zip(keys, found, strict=True))
            if not is_there and key not in self._storing and not self._is_read_only
        ]
        chunks = np.asarray(job_metadata.chunk_ids)[missing]
        self._begin(job_metadata, [keys[number] for number in missing], chunks, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Starts to load chunks."""
        self._begin(job_metadata, list(job_metadata.keys), np.asarray(job_metadata.chunk_ids), is_load=True)

    def _begin(self, job: TransferJob, keys: list[OffloadKey], chunks: np.ndarray, *, is_load: bool) -> None:
        entry = _Job(job.job_id, job.req_context.req_id, keys, is_load, None)
        begun: list[Ticket] = []
        try:
            if keys:
                start = self._blocks.load if is_load else self._blocks.store
                try:
                    start_into(begun, start, keys, self._addresses(chunks))
                except (Error, ValueError) as error:
                    log.error("job %d of tier %s cannot begin: %s", job.job_id, self.tier_type, error)
                    entry.has_begun = False
            self._jobs[job.job_id] = entry
            if begun:
                entry.ticket = begun[0]
                self._storing.update(() if is_load else keys)
        except BaseException:
            # vLLM takes the chunks back.
            self._jobs.pop(job.job_id, None)
            abandon(begun)
            raise

    def _addresses(self, chunks: np.ndarray) -> Addresses:
        if self._rows is None:
            raise ValueError("the tier was shut down")
        if np.any((chunks < 0) | (chunks >= self._chunks)):
            raise ValueError(f"there are {self._chunks} chunks, and these are asked for: {chunks.tolist()}")
        first = self._rows.__array_interface__["data"][0]
        addresses = chunks.astype(np.uint64) * np.uint64(self.block_size_bytes) + np.uint64(first)
        return Addresses(addresses, self.block_size_bytes, owner=self._rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended. One that ran out of time is not among them before its memory is free; one whose
        memory may be in use for ever never is, so that vLLM does not give its chunks to others.
        """
        results = []
        for job in list(self._jobs.values()):
            if job.ticket is None:
                results.append(self._idle(job))
            elif (completion := outcome(job.ticket)) is not None:
                results.append(self._result(job, completion))
            else:
                self._retire_if_lost(job, job.ticket)
                continue
            del self._jobs[job.job_id]
        return results

    def _retire_if_lost(self, job: _Job, ticket: Ticket) -> None:
        if job.is_retired or not ticket.lost():
            return
        job.is_retired = True
        if not job.is_load:
            self._storing -= Counter(job.keys)
        log.error(
            "job %d of tier %s: a ring or a device failed, and may use %d chunks of the CPU tier for ever; they are "
            "kept from vLLM until it is restarted",
            job.job_id,
            self.tier_type,
            len(job.keys),
        )

    def _idle(self, job: _Job) -> JobResult:
        """Of a job that moved nothing."""
        if not job.has_begun and job.is_load:
            self._lose(job.request, job.keys)
        return JobResult(job.job_id, success=job.has_begun, transfer_time=0.0, transfer_bytes=0)

    def _result(self, job: _Job, completion: Completion) -> JobResult:
        statuses = dict(zip(job.keys, completion.statuses, strict=True))
        good = [key for key, ok in zip(job.keys, completion.succeeded, strict=True) if ok]
        bad = [key for key in job.keys if not is_accepted(statuses[key])]
        if job.is_load:
            self._lose(job.request, bad)
            self._recall([key for key in bad if statuses[key] in _GONE])
        else:
            self._storing -= Counter(job.keys)
            self._announce(good)
        if bad:
            self._failures.update(statuses[key] for key in bad)
            what = "load" if job.is_load else "store"
            log.warning(
                "%s of tier %s (job %d): %s", what, self.tier_type, job.job_id, summary(completion.statuses)
            )
        return JobResult(
            job.job_id,
            success=not bad,
            successful_keys=tuple(good) if bad and good and job.is_load else None,
            transfer_time=completion.moving,
            transfer_bytes=completion.bytes,
        )

    def _announce(self, keys: list[OffloadKey]) -> None:
        """Tells of what can be loaded now: some was evicted again, or is only being stored elsewhere."""
        if self._events is None:
            return
        found = [key for key, is_there in zip(keys, self._blocks.lookup(keys), strict=True) if is_there]
        self._tell_stored(found)

    def _tell_stored(self, keys: list[OffloadKey]) -> None:
        for key in keys:
            name = self._blocks.fingerprint(key)
            self._recalled.pop(name, None)
            self._announced[name] = key
            if len(self._announced) > _MOST_ANNOUNCED:
                self._announced.popitem(last=False)
        self._tell(keys, removed=False)

    def _recall(self, keys: list[OffloadKey]) -> None:
        """Tells of what is gone."""
        if self._events is not None:
            for key in keys:
                name = self._blocks.fingerprint(key)
                if self._announced.pop(name, None) is not None:
                    self._recalled[name] = None
                    if len(self._recalled) > _MOST_RECALLED:
                        self._recalled.popitem(last=False)
            self._tell(keys, removed=True)

    def _recall_evicted(self) -> None:
        evicted, forgotten = self._store.evicted()
        # Whatever was announced may be among those that were forgotten.
        suspects = self._announced if forgotten else evicted
        keys = [self._announced[name] for name in suspects if name in self._announced]
        found = self._blocks.lookup(keys)
        # Others were stored again meanwhile.
        self._recall([key for key, is_there in zip(keys, found, strict=True) if not is_there])

    def _lose(self, request: str, keys: Collection[OffloadKey]) -> None:
        # A request that has finished asks no more.
        if keys and request:
            self._lost.setdefault(request, set()).update(keys)

    def _tell(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality)
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored, and what was evicted or turned out to be gone, since the last call."""
        if self._events is None:
            return ()
        if not self._is_closed:
            self._recall_evicted()
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Chunks that were used stay longer."""
        self._blocks.touch(list(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are taken as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The next request tries again what this one could not load."""
        self._lost.pop(req_context.req_id, None)
        for job in self._jobs.values():
            if job.request == req_context.req_id:
                job.request = ""

    def drain_jobs(self) -> None:
        """Waits until no job uses the memory of the CPU tier.

        Raises:
            MemoryLostError: That will never be known of a job's, so the CPU tier must not be used again.
        """
        settle_all(job.ticket for job in self._jobs.values() if job.ticket is not None)

    def shutdown(self) -> None:
        """Lets what is under way end, so that it is there after a restart, and lets go of the CPU tier's memory.

        Raises:
            MemoryLostError: Some of that memory may be in use for ever. vLLM does not unmap it then.
        """
        try:
            self.drain_jobs()
            self._jobs.clear()
        finally:
            self._is_closed = True
            try:
                self._store.close()
            except Error as error:
                # No job has memory by now, or vLLM is told.
                log.error("closing the store of tier %s: %s", self.tier_type, error)
            self._rows = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The metrics that vLLM does not have of every tier."""
        labels = (TIER_LABEL,)
        return {
            FAILED_BLOCKS: OffloadingCounterMetadata(
                documentation="Blocks that the KV store could not load or store, by tier and reason.",
                labelnames=(TIER_LABEL, "reason"),
            ),
            CORRUPT_BLOCKS: OffloadingCounterMetadata(
                documentation="Blocks that the KV store found damaged, and dropped.", labelnames=labels
            ),
            EVICTED_BLOCKS: OffloadingCounterMetadata(
                documentation="Blocks that the KV store evicted to make room.", labelnames=labels
            ),
            USED_BYTES: OffloadingGaugeMetadata(
                documentation="Bytes that the files of the KV store take, of all processes.",
                labelnames=labels,
            ),
            CAPACITY_BYTES: OffloadingGaugeMetadata(
                documentation="Most bytes that the files of the KV store may take.", labelnames=labels
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was observed since the last call."""
        # vLLM asks at every step.
        if not self._failures and time.monotonic() < self._next_stats:
            return None
        self._next_stats = time.monotonic() + _STATS_EVERY_S
        stats, store = OffloadingConnectorStats(), self._store.stats()
        failures, self._failures = self._failures, Counter()
        for reason, count in failures.items():
            stats.increase_counter(FAILED_BLOCKS, count, (self.tier_type, reason))
        for name, counter in ((CORRUPT_BLOCKS, "corrupt_blocks"), (EVICTED_BLOCKS, "evicted_blocks")):
            if (grown := store[counter] - self._seen[counter]) > 0:
                self._seen[counter] = store[counter]
                stats.increase_counter(name, grown, (self.tier_type,))
        stats.set_gauge(USED_BYTES, store["root_bytes"], (self.tier_type,))
        if store["capacity_bytes"] is not None:
            stats.set_gauge(CAPACITY_BYTES, store["capacity_bytes"], (self.tier_type,))
        return stats


def _description(spec: OffloadingSpec, row_bytes: int, weights: dict[str, str]) -> dict[str, Any]:
    """What chunks have to have in common to be exchanged. A row has the parts of all ranks, one after another."""
    config = spec.config
    parallel = config.parallel
    # Then a row has the same bytes however the work was shared.
    is_portable = parallel.is_parallelism_agnostic or config.replicated_layout
    ranks = {
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "prefill_context": parallel.pcp_size,
        "decode_context": parallel.dcp_size,
    }
    other = {
        "engine": "vllm",
        "row_bytes": row_bytes,
        "groups": json.dumps([[group.tokens_per_block, *group.layer_names] for group in config.groups]),
        "ranks": "any" if is_portable else json.dumps(ranks),
        "rank": 0 if is_portable else parallel.rank,
        "replicated": config.replicated_layout,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        **weights,
    }
    if config.canonical_layout and config.kv_cache_layout is not None:
        other["canonical_format"] = canonical_format_id(config.kv_cache_layout)
    return {
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "layout": f"rows of {config.kv_cache_layout or 'the backend'}",
        "block_tokens": config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        "key_algorithm": "vllm offload key",
        "other": other,
    }
