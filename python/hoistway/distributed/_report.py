"""Reports of loads by many ranks, with the reasons for the strategy, as one rank saw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hoistway._report import Refusal, Report
from hoistway._words import counted, in_words, preformatted

Strategy = Literal["own", "share"]


@dataclass(frozen=True, repr=False)
class DistributedReport:
    """The report of a load by many ranks.

    ``str(report)`` is for people; ``report.as_dict()`` has everything.
    """

    asked: str
    """The strategy that was asked for."""
    strategy: Strategy
    """``own``: each rank read what it wants. ``share``: each byte was read once per node and passed on."""
    reasons: tuple[str, ...]
    """Why this strategy."""
    estimated_seconds: Mapping[str, float]
    """The estimated time of each strategy; empty if nothing had to be measured."""
    storage_rates: tuple[float, ...]
    """Bytes per second that each rank read while all did; empty if not measured."""
    link_rate: float | None
    """Bytes per second that each rank of a node received while all sent; ``None`` if not measured."""
    rank: int
    ranks: int
    node_ranks: tuple[int, ...]
    """The ranks that share reads with this one."""
    tensors: int
    """Bytes that this rank wanted."""
    tensor_bytes: int
    """Theirs."""
    sent_bytes: int
    """Bytes of tensors that this rank has passed on; a broadcast counts once."""
    received_bytes: int
    """Bytes of tensors that others have passed on to this rank."""
    steps: int
    """Windows of tensors that the ranks took together so far."""
    seconds: float
    """Until the load ended, or so far."""
    reads: Report | None
    """The loads of this rank, measurements aside; ``None`` if it read nothing."""
    refused: tuple[Refusal, ...]
    """Refusals: what would have been considered and was not possible."""

    @property
    def read_bytes(self) -> int:
        """Bytes that this rank read, measurements aside."""
        return 0 if self.reads is None else self.reads.read_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        values = asdict(self)
        values["reads"] = None if self.reads is None else self.reads.as_dict()
        return values

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"rank {self.rank} of {self.ranks}: {counted(self.tensors, 'tensor')}, {in_words(self.tensor_bytes)} "
            f"in {self.seconds:.3f} s, strategy {self.strategy}",
            f"  exchange  read {in_words(self.read_bytes)}, received {in_words(self.received_bytes)}, "
            f"sent {in_words(self.sent_bytes)} in {counted(self.steps, 'step')}",
            *(f"  because   {reason}" for reason in self.reasons),
            *(f"  not used: {refusal.what}: {refusal.reason}; {refusal.fix}" for refusal in self.refused),
        ]
        if self.reads is not None:
            lines.extend(f"  {line}" for line in str(self.reads).splitlines())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<DistributedReport: {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))
