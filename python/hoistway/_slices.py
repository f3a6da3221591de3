"""Parts of tensors, as Python indexes them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from hoistway.errors import OptionError, SliceError


class Part:
    """An index into a tensor: the ranges to read, and the steps to apply to the result."""

    def __init__(
        self, name: str, index: Any, info: tuple[str, Sequence[int], int], *, is_torch: bool
    ) -> None:
        """``info`` is the type of the tensor, its shape, and the length of its blocks."""
        dtype, shape, block_len = info
        packing = None
        if block_len > 1:
            packing = f"its elements lie in blocks of {block_len}"
        elif dtype == "F4" and is_torch:
            packing = "torch packs pairs of F4 elements"
        self._name = name
        # Of a packed type one sees bytes, or pairs of elements: steps would take those.
        self._unit_steps = None if packing is None else (len(shape) - 1, packing)
        if isinstance(index, list):
            if index:
                raise SliceError(f"tensor {name!r} cannot be indexed with a list; use slices", tensor=name)
            index = slice(0, 0)
        items = list(index) if isinstance(index, tuple) else [index]
        ellipses = sum(item is Ellipsis for item in items)
        if ellipses > 1:
            raise SliceError(f"tensor {name!r} is indexed with more than one ellipsis", tensor=name)
        if len(items) - ellipses > len(shape):
            raise SliceError(
                f"tensor {name!r} of shape {list(shape)} is indexed with {len(items) - ellipses} dimensions",
                tensor=name,
            )
        if ellipses:
            position = next(i for i, item in enumerate(items) if item is Ellipsis)
            items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
        self.ranges: list[tuple[int, int]] = []
        self._then: list[Any] = []
        for dimension, (item, size) in enumerate(zip(items, shape, strict=False)):
            self._add(name, dimension, item, size)

    def _add(self, name: str, dimension: int, item: Any, size: int) -> None:
        where = f"dimension {dimension} of tensor {name!r}, which has size {size}"
        if isinstance(item, slice):
            try:
                step = 1 if item.step is None else operator.index(item.step)
                start = 0 if item.start is None else operator.index(item.start)
                stop = size if item.stop is None else operator.index(item.stop)
            except TypeError as error:
                raise SliceError(f"{item} cannot index {where}: {error}", tensor=name) from error
            if step < 1:
                raise SliceError(f"step {step} for {where}: steps must be positive", tensor=name)
            if step != 1 and self._unit_steps is not None and dimension == self._unit_steps[0]:
                raise SliceError(f"step {step} for {where}: {self._unit_steps[1]}", tensor=name)
            start, stop = (bound + size if bound < 0 else bound for bound in (start, stop))
            if not 0 <= start <= size or not 0 <= stop <= size:
                raise SliceError(f"slice {item.start}:{item.stop} goes beyond {where}", tensor=name)
            self.ranges.append((start, max(start, stop)))
            self._then.append(slice(None, None, step))
        elif hasattr(item, "__index__") and not isinstance(item, bool):
            position = item.__index__()
            if not -size <= position < size:
                raise SliceError(f"index {position} is outside {where}", tensor=name)
            position %= size
            self.ranges.append((position, position + 1))
            self._then.append(0)
        else:
            raise SliceError(f"{item!r} cannot index {where}: use integers, slices and '...'", tensor=name)

    def kept(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of a shape that were not indexed with integers."""
        if any(isinstance(item, slice) and item.step not in (None, 1) for item in self._then):
            raise SliceError(
                f"a slice of tensor {self._name!r} has a step: such a slice cannot be read into memory of the caller",
                tensor=self._name,
            )
        then = [*self._then, *[slice(None)] * (len(shape) - len(self._then))]
        return tuple(size for size, item in zip(shape, then, strict=True) if item != 0)

    def check_framework(self, framework: str) -> None:
        """Fails if tensors of the framework cannot be indexed, and `finish` would have to."""
        if framework == "raw" and not self._is_range:
            raise OptionError("framework 'raw' takes slices of step 1 only, no integers")

    def finish(self, tensor: Any) -> Any:
        """Drops the dimensions that were indexed with integers, and applies steps."""
        return tensor if self._is_range else tensor[tuple(self._then)]

    @property
    def _is_range(self) -> bool:
        return all(item == slice(None, None, 1) for item in self._then)
