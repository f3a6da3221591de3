"""The experts of a checkpoint, from its headers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoistway import _native
from hoistway._arguments import PathType
from hoistway._checkpoint import Checkpoint
from hoistway._options import StoreOptions
from hoistway._reader import opened
from hoistway.experts._arguments import number_of

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer."""

    layer: int
    experts: int
    expert_bytes: int
    """Bytes of the largest expert."""
    demand_bytes: int | None
    """Bytes of the experts that one token uses, if it is known how many these are."""


@dataclass(frozen=True)
class ExpertCatalog:
    """The experts of a checkpoint and its dense tensors."""

    layers: dict[int, ExpertLayer]
    """The layers that have experts, by their number."""
    top_k: int | None
    """Experts that a token uses in each layer, if that is known."""
    token_cycle_bytes: int | None
    """Bytes of the experts that one token uses in all layers, if it is known how many these are."""
    total_expert_bytes: int
    total_dense_bytes: int
    dense: tuple[str, ...]
    """Names of the tensors that are no experts."""
    resident: tuple[str, ...]
    """Biases and small scales of experts, which are dense tensors too."""
    _handle: _native.ExpertCatalog = field(repr=False, compare=False)

    @classmethod
    def open(
        cls,
        paths: PathType | Sequence[PathType] | Checkpoint,
        *,
        top_k: int | None = None,
        lenient: bool | None = None,
        offset: int | None = None,
        store: StoreOptions | None = None,
    ) -> Self:
        """Finds the experts of a checkpoint.

        Args:
            paths: What `hoistway.open` takes, or an open checkpoint.
            top_k: Experts that a token uses in each layer. By default what a GGUF file, or a ``config.json`` beside the
                files, says.
            lenient: As in `hoistway.open`.
            offset: As in `hoistway.open`.
            store: As in `hoistway.open`.
        """
        return cls._of(_native.ExpertCatalog(opened(paths, lenient, offset, store), top_k))

    @classmethod
    def _of(cls, native: _native.ExpertCatalog) -> Self:
        facts: dict[str, Any] = json.loads(native.facts())
        layers = (ExpertLayer(**layer) for layer in facts.pop("layers"))
        dense, resident = tuple(facts.pop("dense")), tuple(facts.pop("resident"))
        return cls(
            layers={layer.layer: layer for layer in layers},
            dense=dense,
            resident=resident,
            _handle=native,
            **facts,
        )

    def parts(self, layer: int, expert: int) -> dict[str, tuple[str, str, tuple[int, ...], int]]:
        """The parts of an expert by name: its tensor, element type, shape, and size in bytes.

        Raises:
            ExpertNotFoundError: There is no such expert.
        """
        parts = self._handle.parts(number_of("layer", layer), number_of("expert", expert))
        return {
            part_name(role, component): (tensor, dtype, tuple(shape), size)
            for role, component, tensor, dtype, shape, size in parts
        }


def part_name(role: str, component: str) -> str:
    """The name of a part: its role, such as ``gate``, and its component if that is not the weight.

    Examples:
        >>> part_name("gate_up", "weight"), part_name("gate_up", "scales")
        ('gate_up', 'gate_up.scales')
    """
    return role if component in ("", "weight") else f"{role}.{component}"
