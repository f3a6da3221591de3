"""Traces of routing: which experts a model's routers chose, for ``hoistway moe replay``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from hoistway._arguments import path_text

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class TraceWriter:
    """Writes a trace as JSON lines: one for the model, then one for each token's visit of a layer.

    Args:
        path: The file. An older trace of that name is replaced, and no other file.
        experts_per_token: Experts that a token uses in each layer.
        layers: Number of experts, and bytes of one expert, of each layer that has experts.
        model: The name of the model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        experts_per_token: int,
        layers: Mapping[int, tuple[int, int]],
        model: str | None = None,
    ) -> None:
        header = {
            "hoistway_trace": 1,
            **({} if model is None else {"model": model}),
            "experts_per_token": experts_per_token,
            "layers": [
                {"layer": layer, "experts": experts, "expert_bytes": expert_bytes}
                for layer, (experts, expert_bytes) in sorted(layers.items())
            ],
        }
        _refuse_others(path_text(path))
        self._file = open(path_text(path), "w", encoding="utf-8")  # noqa: SIM115  (closed by `close`)
        self._write(header)

    def visit(
        self,
        layer: int,
        experts: Sequence[int],
        weights: Sequence[float],
        *,
        step: int,
        phase: Literal["prefill", "decode"] = "decode",
        turn: int = 0,
    ) -> None:
        """Adds what the router of a layer chose for one token.

        Args:
            layer: The layer.
            experts: The experts, each once.
            weights: The weight of each.
            step: The number of the token.
            phase: Whether the token is part of the prompt.
            turn: The number of the prompt and its answer in a conversation.
        """
        self._write(
            {
                "turn": turn,
                "phase": phase,
                "step": step,
                "layer": layer,
                "experts": list(experts),
                "weights": list(weights),
            }
        )

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, object]) -> None:
        # A trace has finite numbers alone.
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")


def _refuse_others(path: str) -> None:
    """Fails if a file is there that is no trace, such as a model."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        begins = file.read(64)
    if begins and not b"".join(begins.split()).startswith(
        (b'{"hoistway_trace":', b"#route_trace", b"turn,phase,")
    ):
        raise FileExistsError(
            errno.EEXIST, "it is there already, and is not a trace; choose another name", path
        )
