"""The store's metrics among those that a host exports with prometheus_client."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from hoistway._metrics import families
from hoistway.errors import HoistwayError
from hoistway.kv import Store

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge
    from prometheus_client.samples import Sample

log = logging.getLogger("hoistway.kv")

_EVERY_S = 5.0

# prometheus_client has one metric of each name in a process, whatever the number of stores.
_metrics: dict[str, Counter | Gauge] = {}
_lock = threading.Lock()


class Exported:
    """Counters and gauges of a store, by the names of `Store.metrics`, with the store's directory as label `store`.

    A thread copies them every few seconds into metrics of prometheus_client. These work where a host gathers the
    metrics of its processes, too. Histograms cannot be copied, and are left out.
    """

    def __init__(self, store: Store) -> None:
        """Starts to export, if the host has imported prometheus_client by the time that there is something to tell."""
        self._store = store
        self.root = store.root
        self._counted: dict[tuple[str, ...], float] = {}
        self._is_closed = threading.Event()
        # The thread must not keep a store whose adapter was dropped.
        threading.Thread(
            target=_repeat, args=(weakref.ref(self), self._is_closed), name="hoistway-kv-metrics", daemon=True
        ).start()

    def update(self) -> None:
        """Copies what the store has counted and measured."""
        if "prometheus_client" not in sys.modules or self._is_closed.is_set():
            return
        found = list(families(self._store.metrics()))
        with _lock:
            last, self._counted = self._counted, {}
            for family in found:
                if family.type in ("counter", "gauge"):
                    for sample in family.samples:
                        self._copy(family, sample, last)

    def close(self) -> None:
        """Ends it. What was exported stays as it is: a counter never goes back."""
        self._is_closed.set()

    def _copy(self, family: Any, sample: Sample, last: dict[tuple[str, ...], float]) -> None:
        if sample.name.endswith("_created"):
            return
        labels = sample.labels
        metric = _metrics.get(family.name) or _made(family, list(labels))
        series: Any = metric.labels(**labels)
        if family.type == "gauge":
            series.set(sample.value)
            return
        # Processes of the host may share the metric, so it is told what came since the last time.
        key = (family.name, *labels.values())
        counted = last.get(key, 0.0)
        # That of a namespace begins anew if it was closed meanwhile.
        series.inc(sample.value - (counted if counted <= sample.value else 0.0))
        self._counted[key] = sample.value


def _made(family: Any, labels: list[str]) -> Counter | Gauge:
    import prometheus_client  # noqa: PLC0415

    if family.type == "gauge":
        metric: Counter | Gauge = prometheus_client.Gauge(
            family.name, family.documentation, labels, multiprocess_mode="liveall"
        )
    else:
        metric = prometheus_client.Counter(family.name, family.documentation, labels)
    _metrics[family.name] = metric
    return metric


def _repeat(exported: weakref.ref[Exported], is_closed: threading.Event) -> None:
    while not is_closed.wait(_EVERY_S):
        own = exported()
        if own is None:
            return
        try:
            own.update()
        except (HoistwayError, ValueError) as error:
            if not is_closed.is_set():
                log.error("the metrics of %s are not exported any more: %s", own.root, error)
            return
        del own
