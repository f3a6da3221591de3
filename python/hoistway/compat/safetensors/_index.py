"""What an index takes of a tensor: the ranges to read, and how to index what was read.

The reference library has two manners. Mapped tensors of torch are indexed as torch indexes any tensor. Everything else
is cut out of the file by rules of its own: integers, slices that stay inside, one ellipsis.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from hoistway.compat.safetensors._errors import safetensor_error
from hoistway.errors import SliceError

_WHOLE = slice(None)


class Cut(NamedTuple):
    """The ranges of each dimension to read, and the index into that which gives what was asked for."""

    ranges: list[tuple[int, int]]
    then: tuple[Any, ...]

    @property
    def is_done(self) -> bool:
        """Whether what was read is what was asked for."""
        return all(isinstance(item, slice) and item.step in (None, 1) for item in self.then)


def torch_cut(index: Any, shape: Sequence[int]) -> Cut | None:
    """Of an index by integers, slices, ``None`` and an ellipsis, all as torch takes them; ``None`` of any other."""
    items = list(index) if isinstance(index, tuple) else [index]
    # By identity: an index may hold tensors, which compare by elements.
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    dimensions = sum(item is not None for item in items) - len(ellipses)
    if len(ellipses) > 1 or dimensions > len(shape):
        return None
    position = ellipses[0] if ellipses else len(items)
    items[position : position + 1] = [_WHOLE] * (len(shape) - dimensions)
    ranges: list[tuple[int, int]] = []
    then: list[Any] = []
    for item in items:
        if item is None:
            then.append(None)
            continue
        size = shape[len(ranges)]
        if isinstance(item, slice):
            if not all(_is_bound(bound) for bound in (item.start, item.stop, item.step)):
                return None
            if item.step is not None and item.step < 1:
                return None
            start, stop, step = item.indices(size)
            ranges.append((start, max(start, stop)))
            then.append(slice(None, None, step))
        elif isinstance(item, numbers.Integral) and not isinstance(item, bool) and -size <= int(item) < size:
            start = int(item) % size
            ranges.append((start, start + 1))
            then.append(0)
        else:
            return None
    return Cut(ranges, tuple(then))


def is_plain(index: Any) -> bool:
    """Whether an index copies nothing and depends on no values: integers, slices, ``None`` and ellipses."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, numbers.Integral) and not isinstance(item, bool))
        for item in items
    )


def strict_cut(index: Any, shape: Sequence[int], tensor: str) -> Cut:
    """Of an index as the reference library takes it, in whose words the errors are."""
    items = _strict_items(index, len(shape), tensor)
    cuts = [_strict_item(item, position, shape, tensor) for position, item in enumerate(items)]
    if len(cuts) > len(shape):
        raise _outside(items, shape, "more slicing indexes than dimensions in tensor", tensor)
    for dimension, ((start, stop, item), size) in enumerate(zip(cuts, shape, strict=False)):
        last = max(start, stop - 1)
        # An empty dimension has no element for a slice to begin at; all of it is a slice of it nevertheless.
        if last >= size and not (size == start == stop == 0 and item != 0):
            problem = f"index {last} out of bounds for tensor dimension #{dimension} of size {size}"
            raise _outside(items, shape, problem, tensor)
    rest = shape[len(cuts) :]
    return Cut(
        [(start, max(start, stop)) for start, stop, _ in cuts] + [(0, size) for size in rest],
        tuple(item for _, _, item in cuts),
    )


def _strict_items(index: Any, dimensions: int, tensor: str) -> list[Any]:
    if isinstance(index, list):
        if index:
            raise _refused("Non empty lists are not implemented", tensor)
        return [slice(0, 0)]
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise _refused("Only one ellipsis (...) is allowed in slice index", tensor)
    for position in ellipses:
        items[position : position + 1] = [_WHOLE] * (dimensions - len(items) + 1)
    return items


def _strict_item(item: Any, dimension: int, shape: Sequence[int], tensor: str) -> tuple[int, int, Any]:
    size = shape[dimension] if dimension < len(shape) else 0
    if isinstance(item, slice):
        start = 0 if item.start is None else operator.index(item.start)
        stop = size if item.stop is None else operator.index(item.stop)
        step = 1 if item.step is None else operator.index(item.step)
        if not 0 <= min(start, stop) <= max(start, stop, step) < 1 << 64:
            raise OverflowError(f"{item} of tensor {tensor!r}: bounds are counted from the front, in 64 bits")
        if step < 1:
            raise _refused(f"Slice step must be a positive integer, got {step}", tensor)
        return start, stop, slice(None, None, step)
    try:
        position = operator.index(item)
    except TypeError:
        position = None
    if position is None or abs(position) >> 63:
        message = f"Unsupported slice index at position {dimension}: expected slice, int, or ellipsis"
        raise _refused(message, tensor)
    if position < -size:
        raise _refused(f"Invalid index {position} for dimension {dimension} of size {size}", tensor)
    position += size if position < 0 else 0
    return position, position + 1, 0


def _outside(items: Sequence[Any], shape: Sequence[int], problem: str, tensor: str) -> Exception:
    """The error of an index that leaves the tensor."""

    def text(item: Any) -> str:
        if not isinstance(item, slice):
            return str(item)
        bounds = [item.start, item.stop] if item.step is None else [item.start, item.stop, item.step]
        return ":".join("" if bound is None else str(bound) for bound in bounds)

    index = ", ".join(map(text, items))
    return _refused(f"Error during slicing [{index}] with shape {list(shape)}: {problem}", tensor)


def _is_bound(bound: Any) -> bool:
    return bound is None or isinstance(bound, numbers.Integral)


def _refused(message: str, tensor: str) -> Exception:
    return safetensor_error(SliceError, message, tensor=tensor)
