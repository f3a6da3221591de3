"""Mixture-of-experts models that do not fit in memory: experts come from storage as a router chooses them.

>>> from windlass.experts import ExpertStore
>>> store = ExpertStore.open("models/qwen3-30b-a3b", budget="8GiB")  # doctest: +SKIP
>>> store.observe(0, [(3, 0.6), (17, 0.4)])  # doctest: +SKIP
>>> with store.ensure(0, [3, 17]) as lease:  # doctest: +SKIP
...     compute(lease[3]["gate"], lease[3]["up"], lease[3]["down"])

`windlass.experts.transformers` runs models of transformers this way; `TraceWriter` records what routers choose, for
``windlass moe replay``.
"""

from __future__ import annotations

from windlass.errors import ExpertNotFoundError
from windlass.experts._catalog import ExpertCatalog, ExpertLayer
from windlass.experts._lease import Lease, LeasedExpert, LeasedTensors, Ticket
from windlass.experts._rows import Rows
from windlass.experts._store import ExpertStore, ResidencyEvent, policies
from windlass.experts._trace import TraceWriter

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
