"""`load_file` for all tensors of a rank, `iter_tensors` for one after the other."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Generator, Hashable, Iterable, Sequence
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from hoistway._arguments import PathType
from hoistway._checkpoint import Checkpoint, LoadedTensors
from hoistway._devices import to_torch
from hoistway._frameworks import cause_of, device_name
from hoistway._options import LoadOptions, StoreOptions
from hoistway.distributed._catalog import read_catalog, read_entries
from hoistway.distributed._delivery import Delivery, Request
from hoistway.distributed._filters import Select, Shards, shard_dims, wanted_names
from hoistway.distributed._link import Link
from hoistway.distributed._memory import running_kernel
from hoistway.distributed._report import DistributedReport
from hoistway.distributed._sizes import size_in_bytes
from hoistway.distributed._wants import codes_of
from hoistway.errors import MissingPackageError, OptionError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

StrategyName = Literal["auto", "own", "share"]

SECONDS = 300.0


class DistributedTensors(LoadedTensors):
    """A rank's tensors by name, and the report of how they were loaded."""

    def __init__(self, report: DistributedReport) -> None:
        super().__init__(report)  # type: ignore[arg-type]

    @property
    def report(self) -> DistributedReport:  # type: ignore[override]
        """The report of the load."""
        report: DistributedReport = self._report  # type: ignore[assignment]
        return report


def load_file(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    group: Any = None,
    shards: Shards | None = None,
    select: Select | None = None,
    exclude: str | Iterable[str] | None = None,
    strategy: StrategyName = "auto",
    max_in_flight: int | str = "1GiB",
    timeout: float = SECONDS,
    node: Hashable = None,
    allocator: Literal["driver", "torch"] = "driver",
    lenient: bool | None = None,
    offset: int | None = None,
    store: StoreOptions | None = None,
    cache: PathType | None = None,
    **options: Unpack[LoadOptions],
) -> DistributedTensors:
    """Loads a checkpoint on all ranks of a group together. Every rank calls it.

    Args:
        paths: A safetensors or GGUF file, an index, a directory, a glob pattern, a URL, or a list of these. Directories
            may differ among ranks, files and versions of objects must not.
        device: Where this rank wants its tensors: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a number, or a device of
            torch's. Default: ``HOISTWAY_DEVICE``, else ``"cpu"``.
        group: A group of `torch.distributed`'s. Default: all ranks.
        shards: Along which dimension tensors are cut, one part a rank: by name or glob pattern, or what a function says
            of a name and a shape. Parts are as long as the dimension divided by the ranks, rounded up; the last may be
            short or empty. ``None``, and tensors that are not mentioned: all of it on every rank.
        select: Names or glob patterns of the tensors that this rank wants, or a predicate on names. Default: all.
            Ranks may differ; see `expert_parallel` and `pipeline_range`.
        exclude: Names or glob patterns of tensors to leave out.
        strategy: ``"own"``: each rank reads what it wants. ``"share"``: each byte is read once per node, and passed on
            to the other ranks that want it. ``"auto"``: the faster, by short measurements.
        max_in_flight: The most bytes of memory that passing on takes a rank, tensors that it wants included. A
            tensor may be larger.
        timeout: Seconds to wait for a rank before it is taken for lost. A shorter time-out of the group counts instead.
        node: What ranks that share reads have in common, and no other ranks: anything with a ``str``. Default: the
            name of the host and its boot.
        allocator: Whose memory of the device to load into: the ``"driver"``'s, or that of ``"torch"``'s allocator.
        lenient: Whether to take files that break the specification where no harm comes of it: safetensors files with
            padding after the last tensor, and GGUF files.
        offset: Byte at which the GGUF begins in each file.
        store: Endpoint and credentials of the object store of a URL: see `hoistway.StoreOptions`. Default: the
            environment.
        cache: Directory on a drive of this machine that keeps what is read from object stores. Default:
            ``HOISTWAY_CACHE``, else none.
        options: Those of ``hoistway load``; see `LoadOptions`.

    Returns:
        A dictionary of this rank's tensors, with a `DistributedReport` as its attribute ``report``.

    Raises:
        DistributedError: On every rank, if ranks disagree or one of them fails. What fails on all of them in the same
            way raises as it would without the others.
    """
    delivery = _deliver(
        "load_file",
        paths,
        device,
        group=group,
        shards=shards,
        select=select,
        exclude=exclude,
        strategy=strategy,
        max_in_flight=max_in_flight,
        timeout=timeout,
        node=node,
        checkpoint_options={
            "allocator": allocator,
            "lenient": lenient,
            "offset": offset,
            "store": store,
            "cache": cache,
        },
        options=dict(options),
    )
    try:
        tensors = [named for step in delivery.steps() for named in step]
        loaded = DistributedTensors(delivery.report())
    finally:
        delivery.close()
    loaded.update(tensors)
    return loaded


def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    group: Any = None,
    shards: Shards | None = None,
    select: Select | None = None,
    exclude: str | Iterable[str] | None = None,
    strategy: StrategyName = "auto",
    max_in_flight: int | str = "1GiB",
    timeout: float = SECONDS,
    node: Hashable = None,
    allocator: Literal["driver", "torch"] = "driver",
    lenient: bool | None = None,
    offset: int | None = None,
    store: StoreOptions | None = None,
    cache: PathType | None = None,
    **options: Unpack[LoadOptions],
) -> TensorIterator:
    """Gives ``(name, tensor)`` of a checkpoint in its order, the same on every rank, while the rest is being read.

    Every rank calls it, and takes all tensors or closes the iterator: best in a ``with`` statement. Between two
    tensors the group is free for the caller's own messages.

    See `load_file` for the arguments. Here ``max_in_flight`` bounds the tensors that were not yet handed out, too.
    """
    return TensorIterator(
        _deliver(
            "iter_tensors",
            paths,
            device,
            group=group,
            shards=shards,
            select=select,
            exclude=exclude,
            strategy=strategy,
            max_in_flight=max_in_flight,
            timeout=timeout,
            node=node,
            checkpoint_options={
                "allocator": allocator,
                "lenient": lenient,
                "offset": offset,
                "store": store,
                "cache": cache,
            },
            options=dict(options),
        )
    )


class TensorIterator:
    """A load by many ranks that hands its tensors out one after the other."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._tensors = _one_by_one(delivery)

    @property
    def report(self) -> DistributedReport:
        """The report so far; complete once the last tensor was given."""
        return self._delivery.report()

    def files(self) -> list[str]:
        """The files, in order."""
        return self._delivery.files()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Any]:
        return next(self._tensors)

    def close(self) -> None:
        """Ends the load. If there are tensors left, it fails on ranks that go on."""
        self._tensors.close()
        self._delivery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not at the end of the process, which ends the threads and with them the others' wait.
        if not sys.is_finalizing():
            self.close()


def _one_by_one(delivery: Delivery) -> Generator[tuple[str, Any], None, None]:
    # No method: an iterator without references must end at once, and not at the next collection of cycles.
    try:
        for step in delivery.steps():
            step.reverse()
            while step:
                yield step.pop()
    finally:
        delivery.close()


def _deliver(
    caller: str,
    paths: PathType | Sequence[PathType],
    device: Any,
    *,
    group: Any,
    shards: Shards | None,
    select: Select | None,
    exclude: str | Iterable[str] | None,
    strategy: str,
    max_in_flight: int | str,
    timeout: float,
    node: Hashable,
    checkpoint_options: dict[str, Any],
    options: dict[str, Any],
) -> Delivery:
    name = device_name(os.environ.get("HOISTWAY_DEVICE", "cpu") if device is None else device, "torch")

    def prepare() -> Request:
        if strategy not in ("auto", "own", "share"):
            raise OptionError(f"strategy cannot be {strategy!r}: it must be one of auto, own, share")
        if not (isinstance(timeout, Real) and timeout > 0):
            raise OptionError(f"timeout cannot be {timeout!r}: it must be a number of seconds")
        most_bytes = size_in_bytes("max_in_flight", max_in_flight)
        checkpoint = Checkpoint(paths, device=name, **checkpoint_options, **options)
        entries = read_entries(checkpoint)
        names = [entry.name for entry in entries]
        shapes = [() if entry.is_scalar else entry.shape for entry in entries]
        wanted = wanted_names(names, select, exclude)
        return Request(
            checkpoint=checkpoint,
            catalog=read_catalog(checkpoint, entries, wanted),
            codes=codes_of(wanted, shard_dims(names, shapes, shards)),
            strategy=strategy,
            window_bytes=most_bytes // 3,
            is_one_step=caller == "load_file",
            host=_this_host(),
            node=_this_node() if node is None else str(node),
            shared_options={
                "device": name.partition(":")[0],
                "dtype": _dtype_name(options.get("dtype")),
                "strategy": strategy,
                "max_in_flight": f"{most_bytes} bytes",
                "timeout": f"{float(timeout)} s",
                "function": caller,
            },
        )

    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError("hoistway.distributed needs torch; install it") from cause_of(
            error, "torch"
        )

    on = to_torch(torch, name)
    seconds = timeout if isinstance(timeout, Real) and timeout > 0 else SECONDS
    return Delivery(Link(group, on, seconds), on, prepare)


def _dtype_name(dtype: Any) -> str | None:
    """One name of a type that has several."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.").lower()
    return {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}.get(
        name, name
    )


def _this_node() -> str:
    """The same for processes that run on one kernel since it started."""
    return f"{socket.gethostname()} {running_kernel()}"


def _this_host() -> str:
    """The same for processes to which a path is the same file: of one node, and of one view of its mounts."""
    if sys.platform == "win32":
        return _this_node()
    try:
        return f"{_this_node()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        # Ranks that do not know whether they see the same files are not compared.
        return f"{_this_node()} {os.getpid()}"
