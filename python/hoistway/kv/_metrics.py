"""The metrics of stores for prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hoistway import _metrics, _native

if TYPE_CHECKING:
    from prometheus_client import Metric


class MetricsCollector(_metrics.MetricsCollector):
    """All metrics of one or more stores, as a collector for a registry of prometheus_client.

    Each sample has the directory of its store as label ``store``. Metrics are read when they are collected. A store
    that is closed, or that nothing else refers to, has none. `hoistway.MetricsCollector` has those of loads too.

    Examples:
        >>> import prometheus_client
        >>> with kv.Store("kv-store", capacity="1GiB") as store:  # doctest: +SKIP
        ...     prometheus_client.REGISTRY.register(kv.MetricsCollector(store))
        ...     prometheus_client.start_http_server(9090)
    """

    def collect(self) -> Iterator[Metric]:
        """The metrics of all stores: one of each name, with the samples of all."""
        yield from _metrics.families(_native.join_metrics(list(_metrics.texts(self._open()))))
