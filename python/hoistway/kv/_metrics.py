"""The metrics of stores for prometheus_client."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hoistway.errors import MissingPackageError, StoreClosedError
from hoistway.kv._store import Store

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector
else:
    # A registry takes whatever has `collect`, and the package is optional.
    Collector = object


# The second is for where the package is installed.
class MetricsCollector(Collector):  # type: ignore[misc, unused-ignore]
    """All metrics of one or more stores, as a collector for a registry of prometheus_client.

    Each sample has the directory of its store as label ``store``. Metrics are read when they are collected. A store
    that is closed, or that nothing else refers to, has none.

    Examples:
        >>> import prometheus_client
        >>> with kv.Store("kv-store", capacity="1GiB") as store:  # doctest: +SKIP
        ...     prometheus_client.REGISTRY.register(kv.MetricsCollector(store))
        ...     prometheus_client.start_http_server(9090)
    """

    def __init__(self, *stores: Store) -> None:
        """Collects from these stores.

        Args:
            stores: Open stores. `add` adds more.
        """
        try:
            import prometheus_client  # noqa: F401, PLC0415
        except ImportError as error:
            raise MissingPackageError(
                "MetricsCollector needs the package prometheus_client; install it"
            ) from error
        # A registry that lives as long as the process must not keep a store open.
        self._stores = [weakref.ref(store) for store in stores]

    def add(self, store: Store) -> None:
        """Collects from this store too."""
        self._stores = [known for known in self._stores if known() is not None] + [weakref.ref(store)]

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are is known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all stores: one of each name, with the samples of all."""
        found: dict[str, Metric] = {}
        for known in self._stores:
            store = known()
            if store is None:
                continue
            try:
                of_store = list(families(store))
            except StoreClosedError:
                continue
            for family in of_store:
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()


def families(store: Store) -> Iterator[Metric]:
    """The metrics of a store, each sample with the store's directory as label ``store``."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: PLC0415

    parsed: Iterator[Metric] = text_string_to_metric_families(store.metrics())  # type: ignore[no-untyped-call]
    for family in parsed:
        family.samples = [
            sample._replace(labels={"store": store.root, **sample.labels}) for sample in family.samples
        ]
        yield family
