"""Mixture-of-experts models that do not fit in memory: experts come from storage as a router chooses them.

Examples:
    >>> from hoistway.experts import ExpertStore
    >>> store = ExpertStore.open("models/qwen3-30b-a3b", budget="8GiB")  # doctest: +SKIP
    >>> store.observe(0, [(3, 0.6), (17, 0.4)])  # doctest: +SKIP
    >>> with store.ensure(0, [3, 17]) as lease:  # doctest: +SKIP
    ...     compute(lease[3]["gate"], lease[3]["up"], lease[3]["down"])

`hoistway.experts.transformers` runs models of transformers this way; `TraceWriter` records what routers choose, for
``hoistway moe replay``.
"""

from __future__ import annotations

from hoistway.errors import ExpertNotFoundError
from hoistway.experts._catalog import ExpertCatalog, ExpertLayer
from hoistway.experts._lease import Lease, LeasedExpert, LeasedTensors, Ticket
from hoistway.experts._rows import Rows
from hoistway.experts._store import ExpertStore, ResidencyEvent, policies
from hoistway.experts._trace import TraceWriter

__all__ = [
    "ExpertCatalog",
    "ExpertLayer",
    "ExpertNotFoundError",
    "ExpertStore",
    "Lease",
    "LeasedExpert",
    "LeasedTensors",
    "ResidencyEvent",
    "Rows",
    "Ticket",
    "TraceWriter",
    "policies",
]
