"""Reads of tensors on request: now, ahead of use, or in the background."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from hoistway import _native
from hoistway._arguments import PathType, path_texts, tensor_names
from hoistway._checkpoint import Checkpoint, usrbio_directories
from hoistway._frameworks import (
    Converter,
    Framework,
    check_packages,
    converter,
    is_torch,
    types_without_package,
)
from hoistway._options import ReaderOptions, StoreOptions, store_texts
from hoistway._slices import Part
from hoistway._words import counted
from hoistway.errors import ClosedError, SliceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self, Unpack

Priority = Literal["demand", "prefetch", "background"]


class Reader:
    """Reads tensors of a checkpoint on request. It keeps its threads between requests.

    Tensors lie in memory as they do in blocks of the file. Where tensors of a file do not begin at multiples of
    their elements' size, as in early files, elements are not aligned; `load_file` aligns them.

    Examples:
        >>> with hoistway.Reader("model.safetensors") as reader:  # doctest: +SKIP
        ...     later = reader.prefetch(["layers.1.weight"])
        ...     now = reader.read(["layers.0.weight"])
        ...     then = later.wait()

    Reads with the priority demand come first, then prefetches, then background reads. Tensors stay valid after the
    reader is closed.

    Args:
        paths: What `hoistway.open` takes, or an open checkpoint.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"``.
        lenient: As in `hoistway.open`.
        offset: As in `hoistway.open`.
        store: As in `hoistway.open`.
        options: See `ReaderOptions`.
    """

    def __init__(
        self,
        paths: PathType | Sequence[PathType] | Checkpoint,
        *,
        framework: Framework = "torch",
        lenient: bool | None = None,
        offset: int | None = None,
        store: StoreOptions | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        self._convert = converter(framework)
        self._framework = framework
        self._lacking = types_without_package(framework)
        self._checkpoint = opened(paths, lenient, offset, store)
        self._native: _native.Reader | None = _native.Reader(self._checkpoint, **reader_options(options))

    def read(
        self,
        names: str | Iterable[str],
        *,
        slices: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Reads tensors and waits for them.

        Args:
            names: Names of tensors, without patterns.
            slices: For some tensors, by name, the part to read: a range of the first dimension.
            timeout: Seconds to wait, after which the reads are cancelled. Default: no limit.

        Returns:
            The tensors by name, in the order of the names.

        Raises:
            WaitTimeoutError: The tensors were not read within ``timeout``.
        """
        reading = self.submit(names, slices=slices)
        try:
            return reading.wait(timeout)
        except BaseException:
            # The traceback would keep it running, and its memory.
            reading.close()
            raise

    def prefetch(
        self,
        names: str | Iterable[str],
        *,
        slices: Mapping[str, Any] | None = None,
        begin_by: float | None = None,
    ) -> Reading:
        """Starts to read tensors that will be needed; see `submit`. Waiting for them gives them the priority demand."""
        return self.submit(names, slices=slices, priority="prefetch", begin_by=begin_by)

    def submit(
        self,
        names: str | Iterable[str],
        *,
        slices: Mapping[str, Any] | None = None,
        priority: Priority = "demand",
        begin_by: float | None = None,
    ) -> Reading:
        """Starts to read tensors.

        Args:
            names: As in `read`.
            slices: As in `read`.
            priority: ``"demand"``, ``"prefetch"`` or ``"background"``.
            begin_by: Seconds after which a read that has not begun is cancelled.
        """
        if self._native is None:
            raise ClosedError("this reader is closed")
        parts: dict[str, Part] = {}
        wanted: list[tuple[str, tuple[int, int] | None]] = []
        listed = dict.fromkeys(tensor_names("names", names))
        for name in listed:
            if slices is None or name not in slices:
                wanted.append((name, None))
                continue
            parts[name] = self._part(name, slices[name])
            wanted.append((name, parts[name].ranges[0] if parts[name].ranges else None))
        for name in slices or {}:
            if name not in listed:
                raise SliceError(f"there is a slice of tensor {name!r}, which is not read", tensor=name)
        # Before anything is read.
        check_packages(((name, self._checkpoint.info(name)[0]) for name in listed), self._lacking)
        return Reading(self._native.submit(wanted, priority, begin_by), self._convert, parts)

    def close(self) -> None:
        """Ends the threads of the reader, once no `Reading` is left."""
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

    def __repr__(self) -> str:
        return (
            "Reader(closed)"
            if self._native is None
            else f"Reader({counted(len(self._checkpoint), 'tensor')})"
        )

    def _part(self, name: str, index: Any) -> Part:
        info = self._checkpoint.info(name)
        part = Part(name, index, info, is_torch=is_torch(self._framework))
        part.check_framework(self._framework)
        whole = [(0, size) for size in info[1]]
        if part.ranges[1:] != whole[1 : len(part.ranges)]:
            raise SliceError(
                f"a reader reads ranges of the first dimension of tensor {name!r}; load other slices by "
                "Checkpoint.get_slice",
                tensor=name,
            )
        return part


class Reading(Iterator[tuple[str, Any]]):
    """Tensors that are being read. Iterating yields ``(name, tensor)`` as reads end.

    Each tensor is delivered once, by the iteration or by `wait`. Dropping the reading cancels the reads that have not
    begun, and waits for the others.
    """

    def __init__(self, native: _native.Reading, convert: Converter, parts: Mapping[str, Part]) -> None:
        self._native: _native.Reading | None = native
        self._convert = convert
        self._parts = parts
        # What was read, and could not be converted.
        self._kept: deque[_native.Tensor] = deque()

    def __len__(self) -> int:
        return len(self._opened)

    def __next__(self) -> tuple[str, Any]:
        tensor = next(self._taken(), None)
        if tensor is None:
            tensor = self._opened.next()
        if tensor is None:
            raise StopIteration
        (named,) = self._converted([tensor]).items()
        return named

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for all tensors, and returns those not yet delivered, in the order in which they were named.

        Raises:
            WaitTimeoutError: They were not read within ``timeout`` seconds. The reads go on.
            UnsupportedDtypeError: The framework has no type for one of them. Iterating gives the others.
        """
        read = self._opened.wait(timeout)
        tensors = [*self._taken(), *read]
        try:
            return self._converted(tensors)
        except BaseException:
            self._kept.extendleft(reversed(tensors))
            raise

    def done(self) -> bool:
        """Whether all reads have ended, with or without an error."""
        return self._opened.ended() == len(self._opened)

    def progress(self) -> tuple[int, int]:
        """The bytes that have been read, and their total."""
        return self._opened.progress()

    def promote(self) -> None:
        """Gives reads that have not begun the priority demand."""
        self._opened.promote()

    def cancel(self) -> None:
        """Cancels reads that have not begun: waiting for them raises `CancelledError`. Reads in flight complete."""
        self._opened.cancel()

    def report(self) -> dict[str, Any]:
        """The report so far: the route of every byte, and why a faster route was not used."""
        report: dict[str, Any] = json.loads(self._opened.report())
        return report

    def close(self) -> None:
        """Cancels reads that have not begun, and waits for the others. Delivered tensors stay valid."""
        self._native = None
        self._kept.clear()

    def __repr__(self) -> str:
        if self._native is None:
            return "Reading(closed)"
        return f"Reading({self._native.ended()} of {counted(len(self._native), 'tensor')} ended)"

    def _taken(self) -> Iterator[_native.Tensor]:
        """Takes what is kept, of which each tensor goes to one of the threads that ask."""
        with suppress(IndexError):
            while True:
                yield self._kept.popleft()

    @property
    def _opened(self) -> _native.Reading:
        if self._native is None:
            raise ClosedError("this reading is closed")
        return self._native

    def _converted(self, tensors: Sequence[_native.Tensor]) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        self._convert(tensors, converted)
        for name in self._parts.keys() & converted.keys():
            converted[name] = self._parts[name].finish(converted[name])
        return converted


def opened(
    paths: PathType | Sequence[PathType] | Checkpoint,
    lenient: bool | None = None,
    offset: int | None = None,
    store: StoreOptions | None = None,
) -> _native.Checkpoint:
    """The native checkpoint of an open one, or of paths that are opened."""
    if isinstance(paths, Checkpoint):
        return paths._opened
    return _native.Checkpoint(
        path_texts(paths), lenient=lenient, offset=offset or 0, store=store_texts(store)
    )


def reader_options(options: ReaderOptions) -> dict[str, Any]:
    """The options of a reader, with the folders of libraries that it may need."""
    return {**options, "usrbio_directories": usrbio_directories()}
