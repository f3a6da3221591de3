"""Messages among the ranks of a group by `torch.distributed`, none of which waits longer than a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

from hoistway.errors import DistributedError, OptionError

Rank = int

ROLL_CALL_SECONDS = 2.0
"""How long ranks whose group broke wait to hear of each other."""
LOOK_SECONDS = 0.5
"""How often a rank that waits for the others looks whether one of them said that the group broke."""

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
        timeout: Seconds that a rank waits for the others, before it takes one of them for lost. A shorter time-out of
            the group itself counts.
        around: The link of the group that this one is a part of, whose ranks errors name.
    """

    _patience = _gives_up_at = float("inf")

    def __init__(self, group: Any, device: str, timeout: float, around: Link | None = None) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        self.rank, self.size = rank_and_size(group)
        self.device = device
        self._group: Any = dist.group.WORLD if group is None else group
        self._around = self if around is None else around
        self._roll: str | None = None
        self.timeout = min(timeout, _own_timeout(self._group))
        self._backends = backends = dict(
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

    def wait_for_all(self, work: Any, device: str, gives_up: bool = False) -> None:
        """Waits until a collective on a device is done, or any rank says that the group broke.

        gloo tells of a lost rank only those that have a connection to it. NCCL ends work that is waited for in vain.
        """
        if self._backends.get(device.partition(":")[0]) == "gloo":
            self._guarded(lambda: self._wait_and_look(work, gives_up))
        else:
            self.wait(work)

    def give_up_within(self, seconds: float) -> None:
        """Lets this rank wait no longer than that for others to gather, where the backend lets it look: with gloo.

        Tensors take as long as they take: their ranks are there.
        """
        self._patience = min(self._patience, seconds)
        self._gives_up_at = min(self._gives_up_at, time.monotonic() + seconds)

    def name_roll(self, roll: str) -> None:
        """Sets the name under which ranks call the roll: the same on all of them, and not used before."""
        self._roll = roll

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
        return Link(known[members], self.device, self.timeout, self)

    def _gather(self, mine: Any) -> list[Any]:
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        if self.size == 1:
            return [mine]
        gathered = [mine.new_empty(mine.shape) for _ in range(self.size)]
        options: Any = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=self.timeout)
        self.wait_for_all(
            self._guarded(lambda: self._group.allgather([gathered], [mine], options)),
            self._notes_device,
            gives_up=True,
        )
        return gathered

    def _guarded(self, call: Any) -> Any:
        """Calls torch, whose errors about lost ranks are plain ones."""
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            lost = self._around._lost_rank()
            named = "a rank of the group" if lost is None else f"rank {lost}"
            raise DistributedError(
                f"{named} ended, or did not answer within {self.timeout:g} s: {error}", rank=lost
            ) from error

    def _wait_and_look(self, work: Any, gives_up: bool) -> None:
        started = time.monotonic()
        deadline = started + self.timeout
        while (left := min(deadline, self._giving_up(started, gives_up)) - time.monotonic()) > LOOK_SECONDS:
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
            except RuntimeError:
                # The time was over, unless the work is.
                if work.is_completed():
                    break
            else:
                return
            if self._around._is_broken():
                raise RuntimeError("another rank found the group broken")
        if self._giving_up(started, gives_up) < deadline and not work.is_completed():
            self._abort()
        work.wait(timedelta(seconds=max(left, 0.001)))

    def _giving_up(self, started: float, gives_up: bool) -> float:
        """When a wait ends early. One that begins later has all of the time too: tensors may have come in between."""
        link = self._around
        return max(link._gives_up_at, started + link._patience) if gives_up else float("inf")

    def _abort(self) -> None:
        """Closes the connections of gloo, if this torch can: other ranks shall fail rather than wait for this one."""
        import torch  # noqa: PLC0415

        abort = getattr(self._group._get_backend(torch.device("cpu")), "abort", None)
        if abort is not None:
            abort()

    def _is_broken(self) -> bool:
        """Whether any rank said so."""
        if self._roll is None:
            return False
        answers: list[bool] = []
        _aside(ROLL_CALL_SECONDS, self._look, self._roll, answers)
        if not answers:
            # The store is gone with the process or the host that kept it: nothing will be said there.
            self._roll = None
        return any(answers)

    def _look(self, roll: str, answers: list[bool]) -> None:
        """Adds whether any rank said in the group's store that the group broke, if the store answers."""
        try:
            answers.append(bool(self._store().check([f"{roll}/broken"])))
        except (RuntimeError, ValueError):
            return

    def _lost_rank(self) -> Rank | None:
        """The rank that is lost, if it is known: the only one that does not answer in the group's store."""
        silent = set(range(self.size)) - {self.rank}
        if self._roll is not None:
            _aside(2 * ROLL_CALL_SECONDS, self._call_the_roll, self._roll, silent)
        lost = list(silent)
        return lost[0] if len(lost) == 1 else None

    def _call_the_roll(self, roll: str, silent: set[Rank]) -> None:
        """Says in the group's store that this rank is there, and takes those from ``silent`` that say so too."""
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        try:
            store = self._store()
            for what in (self.rank, "broken"):
                store.set(f"{roll}/{what}", "yes")
            while silent and time.monotonic() < deadline:
                for rank in sorted(silent):
                    if store.check([f"{roll}/{rank}"]):
                        silent.discard(rank)
                time.sleep(0.02)
        except (RuntimeError, ValueError):
            # Those that were not heard of stay silent.
            return

    def _store(self) -> Any:
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        return distributed_c10d._get_process_group_store(self._group)


def _aside(seconds: float, call: Callable[..., None], *arguments: Any) -> None:
    """Calls a function on a thread and waits for it that long: a store whose host is gone may take any time."""
    caller = Thread(target=call, args=arguments, daemon=True)
    try:
        caller.start()
    except RuntimeError:
        # The system gives no thread, so the store is not asked.
        return
    caller.join(seconds)


def _own_timeout(group: Any) -> float:
    """Seconds that a group itself waits, the shortest of its backends' times."""
    options = (getattr(group._get_backend(kind), "options", None) for kind in group._device_types)
    times = (getattr(option, "_timeout", None) for option in options)
    return min((known.total_seconds() for known in times if known is not None), default=float("inf"))
