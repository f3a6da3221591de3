"""Streams: tensors one after the other, while the rest is still being loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from windlass._report import Report

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from windlass import _native
    from windlass._frameworks import Converter

Order = Literal["arrival", "file"]

BATCH = 256
"""Tensors that are converted at once, at most, where nothing bounds how many are in memory."""


class Part(Protocol):
    """What is left to do with a tensor that was loaded in part."""

    def finish(self, tensor: Any) -> Any:
        """Drops the dimensions that were indexed with integers, and applies steps."""


class Source(Protocol):
    """Where a stream gets tensors from."""

    def next(self, most: int) -> Sequence[_native.Tensor]:
        """At least one tensor and at most so many; none once there are no more."""

    def cancel(self) -> None:
        """Ends it early, and waits for its threads."""

    def report(self) -> _native.Report:
        """What was done."""


class Mapped:
    """Tensors that are mapped already."""

    def __init__(self, tensors: Sequence[_native.Tensor], report: _native.Report) -> None:
        self._tensors = deque(tensors)
        self._report = report

    def next(self, most: int) -> list[_native.Tensor]:
        """The next tensors of the checkpoint."""
        return [self._tensors.popleft() for _ in range(min(most, len(self._tensors)))]

    def cancel(self) -> None:
        """Lets the mapping go."""
        self._tensors.clear()

    def report(self) -> _native.Report:
        """How they were mapped."""
        return self._report


class TensorStream(Iterator[tuple[str, Any]]):
    """Gives ``(name, tensor)`` for each tensor of a load, and has the `report` of it.

    Closing it early, as a context manager does, ends the load and waits for its threads. Tensors that were given
    stay valid. After an error there are no more tensors.
    """

    def __init__(
        self,
        source: Source,
        convert: Converter,
        parts: Mapping[str, Part],
        *,
        most: int,
        note: Callable[[_native.Report], None],
    ) -> None:
        self._source = source
        # Not a method of this object: a cycle would keep a load that was left until the next collection.
        self._tensors = _given(source, convert, parts, most, note)

    def __next__(self) -> tuple[str, Any]:
        return next(self._tensors)

    @property
    def report(self) -> Report:
        """What the load has done so far; the whole truth after the last tensor."""
        return Report._from_native(self._source.report())

    def close(self) -> None:
        """Ends the load, if it has not ended by itself."""
        self._tensors.close()
        self._source.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _given(
    source: Source,
    convert: Converter,
    parts: Mapping[str, Part],
    most: int,
    note: Callable[[_native.Report], None],
) -> Generator[tuple[str, Any], None, None]:
    error: Exception | None = None
    try:
        while error is None:
            # No name here may hold a tensor that was given: whoever takes it decides how long it lives.
            tensors, error = _converted(source.next(most), convert, parts)
            if not tensors:
                break
            while tensors:
                yield tensors.popleft()
        if error is not None:
            raise error
        note(source.report())
    finally:
        source.cancel()


def _converted(
    tensors: Sequence[_native.Tensor], convert: Converter, parts: Mapping[str, Part]
) -> tuple[deque[tuple[str, Any]], Exception | None]:
    """Tensors as those of the framework, as far as it can have them, and why not all."""
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
