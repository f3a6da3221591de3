"""Stores of experts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hoistway import _native
from hoistway._arguments import PathType, path_text, tensor_names
from hoistway._checkpoint import Checkpoint
from hoistway._devices import find_libraries
from hoistway._frameworks import Converter, Framework, check_framework, converter, device_name
from hoistway._options import ReaderOptions, StoreOptions
from hoistway._reader import opened, reader_options
from hoistway.errors import ClosedError
from hoistway.experts._arguments import number_of
from hoistway.experts._catalog import ExpertCatalog
from hoistway.experts._lease import Lease, LeasedTensors, Ticket, leased_tensors

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

Backing = Literal["host_slots", "host_sparse", "device_slots", "device_sparse"]


class ResidencyEvent(NamedTuple):
    """An expert, or a dense tensor, that became resident or was evicted."""

    change: str
    """``"resident"`` or ``"evicted"``."""
    layer: int | None
    expert: int | None
    tensor: str | None


class ExpertStore:
    """Experts and dense tensors of a model that come from storage as they are used, under a budget. Threads may share
    it; a child of ``fork`` opens its own. What takes numbers of a layer and experts raises `ExpertNotFoundError` for
    those that the model lacks.
    """

    def __init__(self, native: _native.ExpertStore, catalog: ExpertCatalog, convert: Converter) -> None:
        self._native: _native.ExpertStore | None = native
        self._catalog = catalog
        self._convert = convert

    @classmethod
    def open(
        cls,
        paths: PathType | Sequence[PathType] | Checkpoint,
        *,
        budget: int | str,
        policy: str = "ewma2",
        backing: Backing | None = None,
        device: Any = "cpu",
        framework: Framework = "torch",
        top_k: int | None = None,
        profile: str | os.PathLike[str] | None = None,
        pack: bool | str | os.PathLike[str] = True,
        batch: int | str | None = None,
        dense: int | str | None = None,
        host_level: int | str | None = None,
        pad: bool = False,
        timeout: float = 60.0,
        events: int = 0,
        lenient: bool | None = None,
        offset: int | None = None,
        store: StoreOptions | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Self:
        """Opens a store. Reads headers alone, and three experts if there are packed ones.

        Args:
            paths: What `hoistway.open` takes, or an open checkpoint.
            budget: Bytes that experts and tensors in memory may take, a number or text such as ``"8GiB"``. A request
                may exceed it by its own demand, one at a time.
            policy: What says which experts are evicted: one of `policies`.
            backing: Where experts lie: ``"host_slots"``, the default for the host; ``"host_sparse"``, at their place
                in the stacked tensor; ``"device_slots"``, the default for a device; ``"device_sparse"``, at their
                place in the stacked tensor on a CUDA device.
            device: ``"cpu"``, ``"cuda:1"``, ``"rocm:0"``, a number, or a device of torch's.
            framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"``.
            top_k: Experts that a token uses in each layer. By default what the model says.
            profile: The recorded trace of policy ``static-profile``. One whose layers have other numbers of experts is
                an error; one that visits fewer layers is not.
            pack: Whether to read experts from a file that ``hoistway moe pack`` wrote: by default if one is beside the
                model and of this model, which `stats` tells; or the path of one, which must be of this model.
            batch: With ``device_slots``: bytes beside the budget for the demand of one request.
            dense: With ``device_slots``: bytes of the budget for dense tensors.
            host_level: With ``device_slots``: bytes of pinned host memory beside the budget, which evicted experts
                stay in. One that is requested again is copied from there, rather than read.
            pad: With ``device_sparse``: whether slices of experts are padded to whole granules of the device, 2 MiB
                today. Each takes the padded length of the budget, and is `tensor_stride` bytes behind the one before.
                By default such slices are refused.
            timeout: Seconds that requests wait for room and for reads.
            events: Changes of residency that are kept for `take_events`.
            lenient: As in `hoistway.open`.
            offset: As in `hoistway.open`.
            store: As in `hoistway.open`.
            options: See `ReaderOptions`.

        Raises:
            MemoryBudgetError: The budget does not hold the largest expert.
            FormatError: The pack at the given path cannot be used.
        """
        name = device_name(device, framework)
        check_framework(framework, name)
        if name != "cpu":
            find_libraries()
        checkpoint = opened(paths, lenient, offset, store)
        catalog = _native.ExpertCatalog(
            checkpoint, top_k, pack if isinstance(pack, bool) else path_text(pack)
        )
        native = _native.ExpertStore(
            checkpoint,
            catalog,
            budget=budget,
            policy=policy,
            backing=backing,
            device=name,
            profile=None if profile is None else path_text(profile),
            batch=batch,
            dense=dense,
            host_level=host_level,
            pad=pad,
            timeout=timeout,
            events=events,
            **reader_options(options),
        )
        return cls(native, ExpertCatalog._of(catalog), converter(framework, name))

    @property
    def catalog(self) -> ExpertCatalog:
        """The catalog of the experts."""
        return self._catalog

    def ensure(self, layer: int, experts: Iterable[int]) -> Lease:
        """Makes experts of a layer resident, and waits for them as long as the store's time-out. What is missing is
        read at once, all experts side by side.

        Raises:
            ExpertNotFoundError: There is no such expert.
            MemoryBudgetError: Leases hold the room that the request needs, or it can never have it.
            WaitTimeoutError: The reads did not end in time.
            StorageError: An expert could not be read. Nothing is leased then.
        """
        return self.ensure_async(layer, experts).wait()

    def ensure_async(self, layer: int, experts: Iterable[int]) -> Ticket:
        """Like `ensure`, without waiting: the ticket says which experts are ready."""
        layer, listed = number_of("layer", layer), list(dict.fromkeys(_numbers(experts)))
        return Ticket(self._opened.ensure(layer, listed), layer, listed, self._convert)

    def ensure_tensors(self, names: str | Iterable[str]) -> LeasedTensors:
        """Makes dense tensors resident, and waits for them. They are evicted when told, or when no expert is left to
        evict.

        Raises:
            TensorNotFoundError: No dense tensor has this name.
        """
        listed = list(dict.fromkeys(tensor_names("names", names)))
        return leased_tensors(self._opened.ensure_tensors(listed), listed, self._convert)

    def observe(self, layer: int, experts: Iterable[tuple[int, float]]) -> None:
        """Tells the policy what the router of a layer chose, with its weights. Call it at each visit of the layer,
        before `ensure`: from the first call on, requests for this layer tell the policy nothing. The choices of several
        tokens, as of a prompt, follow one another in one call.
        """
        visit = [(number_of("expert", expert), weight) for expert, weight in experts]
        self._opened.observe(number_of("layer", layer), visit)

    def prefetch(self, layer: int, experts: Iterable[int], deadline: float | None = None) -> None:
        """Starts to read experts that will probably be requested. A hint, for which demand does not wait.

        Args:
            layer: The layer.
            experts: The experts.
            deadline: Seconds after which a read that has not begun is dropped.
        """
        self._opened.prefetch(number_of("layer", layer), _numbers(experts), deadline)

    def cancel_before(self, layer: int) -> None:
        """Drops prefetches of layers before this one that have not begun."""
        self._opened.cancel_before(number_of("layer", layer))

    def set_budget(self, budget: int | str) -> None:
        """Sets the budget, and evicts what exceeds it and is not leased.

        Raises:
            MemoryBudgetError: It does not hold the largest expert.
        """
        self._opened.set_budget(budget)

    def is_resident(self, layer: int, expert: int) -> bool:
        """Whether an expert is in memory."""
        return self._opened.is_resident(number_of("layer", layer), number_of("expert", expert))

    def is_tensor_resident(self, name: str) -> bool:
        """Whether a dense tensor is in memory."""
        return self._opened.is_tensor_resident(name)

    def evict(self, layer: int, experts: Iterable[int]) -> int:
        """Evicts experts that are in memory and not leased; says how many."""
        return self._opened.evict(number_of("layer", layer), _numbers(experts))

    def evict_tensors(self, names: str | Iterable[str]) -> int:
        """Evicts dense tensors that are in memory and not leased; says how many."""
        return self._opened.evict_tensors(tensor_names("names", names))

    def take_events(self) -> tuple[list[ResidencyEvent], int]:
        """Changes of residency since the last call, oldest first, and how many older ones were lost."""
        events, lost = self._opened.take_events()
        described = []
        for change, numbers, tensor in events:
            layer, expert = numbers or (None, None)
            described.append(ResidencyEvent(change, layer, expert, tensor))
        return described, lost

    def tensor_address(self, name: str) -> int | None:
        """With the backings ``host_sparse`` and ``device_sparse`` the address of a stacked tensor: expert ``e`` lies
        ``e`` times `tensor_stride` further. Only slices of leased experts may be read.
        """
        return self._opened.tensor_address(name)

    def tensor_stride(self, name: str) -> int | None:
        """With the same backings, the bytes from one expert of a stacked tensor to the next."""
        return self._opened.tensor_stride(name)

    def stats(self) -> dict[str, Any]:
        """Counts since the store was opened, and its contents."""
        stats: dict[str, Any] = json.loads(self._opened.stats())
        return stats

    def close(self) -> None:
        """Closes the store, and frees the memory of all experts and tensors that nothing holds.

        It waits for reads that are under way. Leases, tickets and tensors stay valid. Each keeps the experts of its
        request in memory, and frees them as it goes. No budget counts that memory any more: a store that is opened
        next takes its own budget beside it. To be sure that all is free, drop leases and tensors first. With
        ``device_slots`` all slots are one allocation, which is freed with the last of them.
        """
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _opened(self) -> _native.ExpertStore:
        if self._native is None:
            raise ClosedError("this store is closed")
        return self._native


def _numbers(experts: Iterable[int]) -> list[int]:
    return [number_of("expert", expert) for expert in experts]


def policies() -> dict[str, str]:
    """The policies that a store can have, the default first, and what each does."""
    return dict(_native.policies())
