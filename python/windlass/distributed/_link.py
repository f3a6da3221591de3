"""Messages among the ranks of a group by `torch.distributed`, none of which waits longer than a timeout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from windlass.errors import DistributedError, OptionError

Rank = int

_subgroups: WeakKeyDictionary[Any, dict[tuple[Rank, ...], Any]] = WeakKeyDictionary()


def rank_and_size(group: Any) -> tuple[Rank, int]:
    """This process's rank in a group, and how many there are."""
    import torch.distributed as dist  # noqa: PLC0415

    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            "torch.distributed has no group yet: call torch.distributed.init_process_group first"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise OptionError("this process is not in the group that was named")
    return rank, dist.get_world_size(group)


def refusal(backends: Mapping[str, str], device: str) -> str | None:
    """Why a group with these backends, by kind of device, cannot carry tensors on a device; ``None`` if it can."""
    kind = device.partition(":")[0]
    if kind not in backends:
        return f"the group has no backend for tensors on {kind}, only for {', '.join(backends)}"
    return "gloo does not send tensors on devices" if kind != "cpu" and backends[kind] == "gloo" else None


class Link:
    """A group, as its ranks talk to each other.

    Args:
        group: A group of `torch.distributed`'s; ``None`` for all ranks.
        device: Where tensors are that shall travel.
        timeout: Seconds that a rank waits for the others, before it takes one of them for lost.
    """

    def __init__(self, group: Any, device: str, timeout: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        self.rank, self.size = rank_and_size(group)
        self.device = device
        self.timeout = timeout
        self._group: Any = dist.group.WORLD if group is None else group
        backends = dict(
            entry.split(":") for entry in str(dist.get_backend_config(self._group)).split(",") if ":" in entry
        )
        self.refusal = refusal(backends, device)
        """Why tensors on the device cannot travel; ``None`` if they can."""
        # Notes are read on the host; where nothing carries host memory, they travel by a device.
        self._notes_device = (
            "cpu" if "cpu" in backends else device if self.refusal is None else next(iter(backends))
        )

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank; all have as many."""
        import torch  # noqa: PLC0415

        mine = torch.tensor(numbers, dtype=torch.int64, device=self._notes_device)
        return [theirs.tolist() for theirs in self._gather(mine)]

    def gather_bytes(self, note: bytes) -> list[bytes]:
        """Every rank's note, by rank."""
        import torch  # noqa: PLC0415

        lengths = [length for (length,) in self.gather_numbers([len(note)])]
        if not max(lengths):
            return [b""] * self.size
        padded = bytearray(note.ljust(max(lengths), b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._notes_device)
        gathered = self._gather(mine)
        return [bytes(theirs[:length].tolist()) for theirs, length in zip(gathered, lengths, strict=True)]

    def start_broadcast(self, buffer: Any, root: Rank) -> Any:
        """Starts to bring the root's bytes to all; returns what to wait for."""
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        options = distributed_c10d.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=self.timeout)
        return self._guarded(lambda: self._group.broadcast([buffer], options))

    def start_exchange(
        self, sends: Sequence[tuple[int, Rank, Any]], receives: Sequence[tuple[int, Rank, Any]]
    ) -> list[Any]:
        """Starts to send and receive (number, rank, bytes), numbered alike on both ends."""
        import torch.distributed as dist  # noqa: PLC0415

        operations = [
            dist.P2POp(function, buffer, dist.get_global_rank(self._group, rank), self._group, number)
            for function, list_ in ((dist.isend, sends), (dist.irecv, receives))
            for number, rank, buffer in list_
        ]
        if not operations:
            return []
        started: list[Any] = self._guarded(lambda: dist.batch_isend_irecv(operations))
        return started

    def wait(self, work: Any) -> None:
        """Waits until something that was started is done."""
        self._guarded(lambda: work.wait(timedelta(seconds=self.timeout)))

    def subgroup(self, ranks: Sequence[Rank]) -> Link:
        """A group of some of the ranks, this one among them. It lives as long as the group itself."""
        import torch.distributed as dist  # noqa: PLC0415

        # Kept, since torch gives a group of the same ranks the same name, under which it would find the ports of one
        # that was destroyed.
        known = _subgroups.setdefault(self._group, {})
        members = tuple(dist.get_global_rank(self._group, rank) for rank in ranks)
        if members not in known:
            known[members] = self._guarded(
                lambda: dist.new_group(
                    members,
                    timeout=timedelta(seconds=self.timeout),
                    backend=dist.get_backend(self._group),
                    use_local_synchronization=True,
                )
            )
        return Link(known[members], self.device, self.timeout)

    def _gather(self, mine: Any) -> list[Any]:
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        if self.size == 1:
            return [mine]
        gathered = [mine.new_empty(mine.shape) for _ in range(self.size)]
        options: Any = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=self.timeout)
        self.wait(self._guarded(lambda: self._group.allgather([gathered], [mine], options)))
        return gathered

    def _guarded(self, call: Any) -> Any:
        """Calls torch, whose errors about lost ranks are plain ones."""
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                f"a rank of the group ended, or did not answer within {self.timeout:g} s: {error}"
            ) from error
