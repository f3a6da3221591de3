"""Tickets for experts and dense tensors that are being read, and leases of those that are resident."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hoistway import _native
from hoistway._frameworks import Converter
from hoistway.errors import ClosedError, ExpertNotFoundError, TensorNotFoundError
from hoistway.experts._catalog import part_name

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class LeasedExpert(Mapping[str, Any]):
    """An expert in memory: its tensors by name, such as ``gate``, ``up`` and ``down``, or ``gate_up`` and ``down``.
    What is no weight has its component in its name, such as ``gate_up.scales``.

    The tensors show memory of the store's: do not write to them. Each keeps its whole request in memory while it lives.
    """

    def __init__(self, layer: int, expert: int, slot: int | None, tensors: dict[str, Any]) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        """The slot that it lies in, if the backing has slots."""
        self._tensors = tensors

    def __getitem__(self, part: str) -> Any:
        return self._tensors[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"LeasedExpert(expert {self.expert} of layer {self.layer}: {', '.join(self._tensors)})"


class Ticket:
    """Experts that are being read: those that are ready can be used while others are still on their way.

    Releasing it, or leaving it as a context manager, gives them up: reads that have not begun do not begin.
    """

    def __init__(
        self, native: _native.ExpertTicket, layer: int, experts: Sequence[int], convert: Converter
    ) -> None:
        self._native: _native.ExpertTicket | None = native
        self._layer = layer
        self._positions = {expert: position for position, expert in enumerate(experts)}
        self._convert = convert

    def is_ready(self, expert: int) -> bool:
        """Whether an expert is in memory."""
        return self._held.is_ready(self._position(expert))

    def expert(self, expert: int, timeout: float | None = None) -> LeasedExpert:
        """Waits for one expert, for ``timeout`` seconds or until the store's time-out.

        Raises:
            WaitTimeoutError: It was not read in time.
            MemoryBudgetError: Leases held the room that the request needs.
        """
        slot, parts = self._held.unit(self._position(expert), timeout)
        tensors: dict[str, Any] = {}
        converted: dict[str, Any] = {}
        for role, component, tensor in parts:
            self._convert([tensor], converted)
            tensors[part_name(role, component)] = converted.pop(tensor.name)
        return LeasedExpert(self._layer, expert, slot, tensors)

    def wait(self, timeout: float | None = None) -> Lease:
        """Waits for all experts, for ``timeout`` seconds or until the store's time-out. The lease replaces the
        ticket, which is released if the wait fails.

        Raises:
            WaitTimeoutError: They were not read in time.
            MemoryBudgetError: Leases held the room that the request needs.
        """
        try:
            self._held.wait(timeout)
            experts = {expert: self.expert(expert) for expert in self._positions}
            return Lease(experts)
        finally:
            # A traceback would keep the request.
            self.release()

    def release(self) -> None:
        """Gives the experts up. Tensors that are held stay valid."""
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def _held(self) -> _native.ExpertTicket:
        if self._native is None:
            raise ClosedError("this ticket was released")
        return self._native

    def _position(self, expert: int) -> int:
        position = self._positions.get(expert)
        if position is None:
            raise ExpertNotFoundError(f"expert {expert} is not among those that were asked for")
        return position


class Lease(Mapping[int, LeasedExpert]):
    """Experts of a layer in memory, by their number, in the order in which they were asked for.

    Releasing it, or leaving it as a context manager, lets the store evict them, but not those of which a tensor is
    held.
    """

    def __init__(self, experts: dict[int, LeasedExpert]) -> None:
        self._experts: dict[int, LeasedExpert] | None = experts

    def __getitem__(self, expert: int) -> LeasedExpert:
        found = self._held.get(expert)
        if found is None:
            raise ExpertNotFoundError(f"expert {expert} is not in this lease")
        return found

    def __contains__(self, expert: object) -> bool:
        return expert in self._held

    def get(self, expert: int, default: Any = None) -> Any:
        """The expert, or ``default`` if it is not in this lease."""
        return self._held.get(expert, default)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def release(self) -> None:
        """Gives the experts back. Tensors that are held stay valid."""
        self._experts = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def _held(self) -> dict[int, LeasedExpert]:
        if self._experts is None:
            raise ClosedError("this lease was released")
        return self._experts


class LeasedTensors(Mapping[str, Any]):
    """Dense tensors in memory, by name. As with `Lease`, those that are held stay, and nothing may write to them."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors: dict[str, Any] | None = tensors

    def __getitem__(self, name: str) -> Any:
        if name not in self._held:
            raise TensorNotFoundError(f"tensor {name!r} is not in this lease", tensor=name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def release(self) -> None:
        """Gives the tensors back. Those that are held stay valid."""
        self._tensors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def _held(self) -> dict[str, Any]:
        if self._tensors is None:
            raise ClosedError("this lease was released")
        return self._tensors


def leased_tensors(native: _native.ExpertTicket, names: Sequence[str], convert: Converter) -> LeasedTensors:
    """Waits for dense tensors."""
    try:
        native.wait()
        converted: dict[str, Any] = {}
        for position in range(len(names)):
            _, parts = native.unit(position)
            convert([tensor for _, _, tensor in parts], converted)
        return LeasedTensors(converted)
    finally:
        # A traceback would keep the request.
        del native
