"""Streams: tensors one after the other, while the rest is still being loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol

from hoistway._frameworks import T
from hoistway._report import Report
from hoistway._words import counted
from hoistway.errors import CancelledError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from hoistway import _native
    from hoistway._frameworks import Converter
    from hoistway._slices import Part

Order = Literal["arrival", "file"]

BATCH = 256
"""Largest number of tensors that are converted at once, if nothing limits how many are in memory."""

PATIENCE = 0.001
"""Seconds to wait for one of two loads before polling the other."""

CANCELLED = "the stream was closed before its end"

PENDING: tuple[str, Any] = ("", None)
"""The object that iterators with patience yield while there is no tensor yet."""


class Source(Protocol):
    """A load, or another source of tensors for a stream."""

    def cancel(self) -> None:
        """Ends it early, and waits for its threads."""

    def report(self) -> _native.Report:
        """The report."""


class Tensors(Source, Protocol):
    """A source of tensors."""

    def next(self, most: int, patience: float | None = None) -> Sequence[_native.Tensor] | None:
        """Returns 1 to ``most`` tensors; none after the last; ``None`` if patience ran out."""


class Mapped:
    """Tensors that are mapped already."""

    def __init__(self, tensors: Sequence[_native.Tensor], report: _native.Report) -> None:
        self._tensors: deque[_native.Tensor] | None = deque(tensors)
        self._report = report

    def next(self, most: int, patience: float | None = None) -> list[_native.Tensor]:
        """The next tensors of the checkpoint."""
        tensors = self._tensors
        if tensors is None:
            raise CancelledError(CANCELLED)
        return [tensors.popleft() for _ in range(min(most, len(tensors)))]

    def cancel(self) -> None:
        """Drops the mapping."""
        self._tensors = None

    def report(self) -> _native.Report:
        """The report of the mapping."""
        return self._report


class TensorStream(Iterator[tuple[str, T]], Generic[T]):
    """Yields ``(name, tensor)`` for each tensor of a load, and has its `report`.

    Closing it early, as leaving a ``with`` block does, ends the load and waits for its threads. Delivered tensors stay
    valid. After an error there are no more tensors.
    """

    def __init__(
        self,
        tensors: Generator[tuple[str, T], None, None],
        sources: Sequence[Source],
        note: Callable[[_native.Report], None],
    ) -> None:
        self._sources = sources
        self._given = 0
        self._is_over = False
        # The thread that closed it before its end.
        self._closed_by: int | None = None
        # No method of this object: a cycle would keep a load that was left until the next collection.
        self._tensors = _until_end(tensors, sources, note)

    def __next__(self) -> tuple[str, T]:
        # No name here may hold a tensor that is given.
        self._given += 1
        try:
            return next(self._tensors)
        except StopIteration as end:
            self._given -= 1
            self._is_over = self._is_over or end.value is not None
            # A loop of another thread than that which closed it would seem to have had all tensors.
            if not self._is_over and self._closed_by not in (None, get_ident()):
                raise CancelledError(CANCELLED) from None
            raise
        except BaseException:
            self._given -= 1
            self._is_over = getgeneratorstate(self._tensors) == GEN_CLOSED
            raise

    def __repr__(self) -> str:
        return f"TensorStream({counted(self._given, 'tensor')} given)"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def report(self) -> Report:
        """The report so far; complete after the last tensor."""
        return Report._from_native(self.native_report())

    def native_report(self) -> _native.Report:
        """The native report so far, to be merged with others."""
        return _merged(self._sources)

    def close(self) -> None:
        """Ends the load, if it has not ended by itself. Any thread may do so: another that waits for a tensor, or asks
        for one later, gets `CancelledError`, even if it had the last one. In the thread that closes it, loops over the
        stream end.
        """
        if self._closed_by is None and getgeneratorstate(self._tensors) != GEN_CLOSED:
            self._closed_by = get_ident()
        for source in self._sources:
            source.cancel()
        while True:
            try:
                self._tensors.close()
                return
            except ValueError as error:
                if "already executing" not in str(error):
                    raise
            # What runs in another thread, or below a signal handler, ends by itself now.
            if getgeneratorstate(self._tensors) == GEN_RUNNING:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _until_end(
    tensors: Generator[tuple[str, Any], None, None],
    sources: Sequence[Source],
    note: Callable[[_native.Report], None],
) -> Generator[tuple[str, Any], None, bool]:
    """Returns whether there were all tensors; a generator that is closed returns nothing."""
    try:
        yield from tensors
        note(_merged(sources))
    finally:
        for source in sources:
            source.cancel()
    return True


def _merged(sources: Sequence[Source]) -> _native.Report:
    first, *others = [source.report() for source in sources]
    for report in others:
        first = first.merged(report)
    return first


def converted(
    source: Tensors,
    convert: Converter,
    parts: Mapping[str, Part],
    most: int,
    patience: float | None = None,
) -> Generator[tuple[str, Any], None, None]:
    """Converts the tensors of a source to those of a framework, at most ``most`` at once."""
    error: Exception | None = None
    while error is None:
        # No name here may hold a delivered tensor: the consumer decides how long it lives.
        loaded = source.next(most, patience)
        if loaded is None:
            yield PENDING
            continue
        tensors, error = _converted(loaded, convert, parts)
        del loaded
        if not tensors:
            break
        while tensors:
            yield tensors.popleft()
    if error is not None:
        raise error


def _converted(
    tensors: Sequence[_native.Tensor], convert: Converter, parts: Mapping[str, Part]
) -> tuple[deque[tuple[str, Any]], Exception | None]:
    """Converts tensors up to the first that the framework cannot have. Returns these, and that error."""
    converted: dict[str, Any] = {}
    failed = None
    try:
        convert(tensors, converted)
    except Exception as error:
        failed = error
        # Those before the one that is wrong, where they were refused together.
        with suppress(Exception):
            for tensor in tensors:
                if tensor.name not in converted:
                    convert([tensor], converted)
    for name in parts.keys() & converted.keys():
        converted[name] = parts[name].finish(converted[name])
    return deque(converted.items()), failed


def interleaved(
    filled: Iterator[tuple[str, Any]],
    others: Iterator[tuple[str, Any]],
    is_filled: Sequence[bool],
) -> Generator[tuple[str, Any], None, None]:
    """Merges two loads that run at the same time, into targets and without, in the order of the files."""
    for is_next in is_filled:
        yield from islice(filled if is_next else others, 1)
    # The end of both, which may be an error.
    yield from filled
    yield from others


def as_they_arrive(*loads: Iterator[tuple[str, Any]]) -> Generator[tuple[str, Any], None, None]:
    """Merges loads that run at the same time, as tensors arrive. Their iterators must have patience."""
    running = deque(loads)
    given: list[tuple[str, Any]] = []
    while running:
        load = running.popleft()
        given.extend(islice(load, 1))
        if not given:
            continue
        running.append(load)
        # No name here may hold a tensor that was given.
        if given[0] is PENDING:
            given.clear()
        else:
            yield given.pop()
