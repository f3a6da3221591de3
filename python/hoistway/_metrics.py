"""The metrics of loads, and of KV stores beside them, for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hoistway import _native
from hoistway._frameworks import cause_of
from hoistway.errors import MissingPackageError, StoreClosedError

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

    from hoistway.kv import Store
else:
    # A registry takes whatever has `collect`, and the package is optional.
    Collector = object


def metrics(*stores: Store) -> str:
    """The metrics of all loads of this process, and of these KV stores, as OpenMetrics text for Prometheus.

    Loads are counted once they end: by outcome, bytes and reads by route, seconds by step, refusals of faster routes.
    A child of ``fork`` starts from its parent's
    counts. Samples of a store have its directory as label ``store``. A closed store has none.

    Args:
        stores: Open stores.

    Examples:
        >>> import hoistway
        >>> hoistway.metrics().splitlines()[1]
        '# TYPE hoistway_loads counter'
    """
    loads = _native.load_metrics()
    of_stores = list(texts(stores))
    return _native.join_metrics([loads, *of_stores]) if of_stores else loads


def texts(stores: Iterable[Store]) -> Iterator[str]:
    """The metrics of the stores that are open."""
    for store in stores:
        try:
            yield store.metrics()
        except StoreClosedError:
            continue


# The second is for where the package is installed.
class MetricsCollector(Collector):  # type: ignore[misc, unused-ignore]
    """The metrics of `metrics`, as a collector for a registry of prometheus_client.

    Metrics are read when they are collected. The collector does not keep stores open.

    Examples:
        >>> import prometheus_client
        >>> prometheus_client.REGISTRY.register(hoistway.MetricsCollector())  # doctest: +SKIP
        >>> prometheus_client.start_http_server(9090)  # doctest: +SKIP
    """

    def __init__(self, *stores: Store) -> None:
        """Collects from the loads of this process, and from these stores.

        Args:
            stores: Open stores. `add` adds more.
        """
        try:
            import prometheus_client  # noqa: F401, PLC0415
        except ImportError as error:
            raise MissingPackageError(
                "MetricsCollector needs the package prometheus_client; install it"
            ) from cause_of(error, "prometheus_client")
        # A registry that lives as long as the process must not keep a store open.
        self._stores = [weakref.ref(store) for store in stores]

    def add(self, store: Store) -> None:
        """Collects from this store too."""
        self._stores = [known for known in self._stores if known() is not None] + [weakref.ref(store)]

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are is known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics: one of each name, with the samples of all stores."""
        yield from families(metrics(*self._open()))

    def _open(self) -> list[Store]:
        return [store for known in self._stores if (store := known()) is not None]


def families(text: str) -> Iterator[Metric]:
    """The metrics in an OpenMetrics text."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: PLC0415

    parsed: Iterator[Metric] = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    yield from parsed
