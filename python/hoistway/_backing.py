"""Checks that a tensor lies within the memory that it is a view of.

The functions return what is wrong, in words that follow "tensor 'a' cannot be saved:", or ``None``.
"""

from __future__ import annotations

import sys
from typing import Any


def torch_shortfall(tensor: Any) -> str | None:
    """Whether a strided tensor of torch exceeds its storage, which may have been resized or freed."""
    if tensor.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if needed <= found:
        return None
    return f"it needs {needed} bytes of a storage that has {found}, which was resized or freed"


def numpy_shortfall(array: Any) -> str | None:
    """Whether an array of numpy exceeds the memory that it is a view of, which may have been resized."""
    if array.size == 0 or array.base is None:
        return None
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    address = array.ctypes.data
    start = address + sum(step for step in steps if step < 0)
    stop = address + sum(step for step in steps if step > 0) + array.itemsize
    return _outside(start, stop, array.base)


def buffer_shortfall(view: memoryview, address: int) -> str | None:
    """Whether a contiguous buffer exceeds the memory of the object that exports it."""
    return _outside(address, address + view.nbytes, view.obj)


def _outside(start: int, stop: int, owner: Any) -> str | None:
    """Says how a range of addresses exceeds the memory of its owner, if that memory is known."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # Only views of numpy can exceed what they show: an exported buffer keeps its size.
    if numpy is None:
        return None
    while (made_of := _made_of(owner)) is not None:
        owner = made_of
    if torch is not None and isinstance(owner, torch.Tensor):
        storage = owner.untyped_storage()
        first, length = storage.data_ptr(), storage.nbytes()
    elif isinstance(owner, (numpy.ndarray, bytes, bytearray)):
        bytes_of = owner if isinstance(owner, numpy.ndarray) else numpy.frombuffer(owner, numpy.uint8)
        first, length = bytes_of.ctypes.data, bytes_of.nbytes
    else:
        return None
    if first <= start and stop <= first + length:
        return None
    kind = type(owner).__name__
    return (
        f"it is a view that goes beyond the {length} bytes of its {kind}, which may have been resized since"
    )


def _made_of(view: Any) -> Any:
    """The object whose memory a view of numpy, or a `memoryview`, shows; ``None`` if it is no view."""
    if isinstance(view, memoryview):
        return view.obj
    return view.base if hasattr(view, "__array_interface__") and hasattr(view, "base") else None
