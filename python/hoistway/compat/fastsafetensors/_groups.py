"""The ranks that load together, and how tensors travel between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hoistway.compat.fastsafetensors._framework import TorchTensor, as_bytes
from hoistway.errors import OptionError


class SingleGroup:
    """A group of one."""

    def size(self) -> int:
        """How many ranks there are."""
        return 1

    def rank(self) -> int:
        """Which of them this one is."""
        return 0


class Group:
    """A process group of torch's, or a group of one.

    Tensors travel as bytes: no backend carries all types, and none changes bytes.
    """

    def __init__(self, pg: Any) -> None:
        self._size: int = 1 if pg is None else pg.size()
        self._rank: int = 0 if pg is None else pg.rank()
        self._pg = pg
        if self._size > 1:
            import torch.distributed as dist  # noqa: PLC0415

            if not isinstance(pg, dist.ProcessGroup):
                raise OptionError(
                    f"pg cannot be {pg!r}: several ranks need a ProcessGroup of torch.distributed"
                )

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def rank(self) -> int:
        """Which of them this one is."""
        return self._rank

    def broadcast(self, tensor: TorchTensor, source: int) -> None:
        """Gives one rank's tensor to all. All have one of its shape, contiguous."""
        import torch.distributed as dist  # noqa: PLC0415

        if tensor.get_nbytes():
            dist.broadcast(as_bytes(tensor.real_tensor), self._global(source), group=self._pg)
            _finish(tensor)

    def scatter(
        self, tensor: TorchTensor, parts: Sequence[TorchTensor], part_nbytes: int, source: int
    ) -> None:
        """Gives each rank its part of what one rank has; none is longer than ``part_nbytes``."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        if not part_nbytes:
            return
        own = as_bytes(tensor.real_tensor)

        # Backends take parts of one length only.
        def padded(flat: Any) -> Any:
            if flat.numel() == part_nbytes:
                return flat
            longer = torch.empty(part_nbytes, dtype=torch.uint8, device=flat.device)
            longer[: flat.numel()] = flat
            return longer

        received = padded(own)
        sent = [padded(as_bytes(part.contiguous().real_tensor)) for part in parts] or None
        dist.scatter(received, sent, self._global(source), group=self._pg)
        if received is not own:
            own.copy_(received[: own.numel()])
        _finish(tensor)

    def send(self, tensor: TorchTensor, destination: int) -> None:
        """Gives a tensor to a rank that receives it."""
        import torch.distributed as dist  # noqa: PLC0415

        if tensor.get_nbytes():
            dist.send(as_bytes(tensor.contiguous().real_tensor), self._global(destination), group=self._pg)
            _finish(tensor)

    def receive(self, tensor: TorchTensor, source: int) -> None:
        """Fills a tensor with what a rank sends."""
        import torch.distributed as dist  # noqa: PLC0415

        if tensor.get_nbytes():
            dist.recv(as_bytes(tensor.real_tensor), self._global(source), group=self._pg)
            _finish(tensor)

    def _global(self, rank: int) -> int:
        import torch.distributed as dist  # noqa: PLC0415

        return dist.get_global_rank(self._pg, rank)


def _finish(tensor: TorchTensor) -> None:
    """Waits until a device is done with it: what was sent may be given back at once."""
    if tensor.real_tensor.is_cuda:
        import torch  # noqa: PLC0415

        torch.cuda.current_stream(tensor.real_tensor.device).synchronize()
