"""Reports as Python objects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hoistway import _native
from hoistway._words import preformatted


@dataclass(frozen=True)
class Carrier:
    """The share of one route in a load."""

    route: str
    access: str
    """``direct`` if it bypasses the page cache, ``buffered`` if not."""
    via: str | None
    """How bytes reach the device: ``staged`` if through pinned host memory."""
    tensor_bytes: int
    read_bytes: int
    reads: int


@dataclass(frozen=True)
class Refusal:
    """Something faster that was not possible, and why."""

    what: str
    path: str | None
    reason: str
    fix: str


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a load: the route of every byte, and why a faster route was not used.

    ``str(report)`` is for people; ``report.as_dict()`` has everything.
    """

    route: str
    """The route that was asked for."""
    files: int
    tensors: int
    tensor_bytes: int
    read_bytes: int
    staged_bytes: int
    carriers: tuple[Carrier, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    total_seconds: float
    _json: str = field(repr=False, compare=False)
    _text: str = field(repr=False, compare=False)

    @classmethod
    def _from_native(cls, native: _native.Report) -> Report:
        text = native.json()
        values: dict[str, Any] = json.loads(text)
        return cls(
            route=values["route"],
            files=values["files"],
            tensors=values["tensors"],
            tensor_bytes=values["tensor_bytes"],
            read_bytes=values["read_bytes"],
            staged_bytes=values["staged_bytes"],
            carriers=tuple(Carrier(**carrier) for carrier in values["carriers"]),
            refused=tuple(Refusal(**refusal) for refusal in values["refused"]),
            notes=tuple(values["notes"]),
            total_seconds=values["time"]["total_seconds"],
            _json=text,
            _text=native.text().rstrip("\n"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole report, as ``hoistway load --json`` prints it, less ``format_version``."""
        values: dict[str, Any] = json.loads(self._json)
        return values

    def shares(self) -> str:
        """The bytes by route, in one line: ``io_uring direct 51%, cached buffered 49%``."""
        return ", ".join(
            f"{' '.join(filter(None, (carrier.route, carrier.access, carrier.via)))} "
            f"{carrier.tensor_bytes / max(self.tensor_bytes, 1):.0%}"
            for carrier in self.carriers
        )

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Report: {self._text.partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return preformatted(self._text)
