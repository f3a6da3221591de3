"""Whether the memory is there that a tensor claims: what it says of itself, checked against what it lies in.

Functions return what is wrong, in words that follow "tensor 'a' cannot be saved:", or ``None``.
"""

from __future__ import annotations

import sys
from typing import Any


def torch_shortfall(tensor: Any) -> str | None:
    """What a strided tensor of torch lacks of its storage, which may have been resized or freed since."""
    if tensor.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if needed <= found:
        return None
    return f"it needs {needed} bytes of a storage that has {found}, which was resized or freed"


def numpy_shortfall(array: Any) -> str | None:
    """What an array of numpy lacks of the memory that it is a view of, which may have been resized since."""
    if array.size == 0 or array.base is None:
        return None
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    address = array.ctypes.data
    start = address + sum(step for step in steps if step < 0)
    stop = address + sum(step for step in steps if step > 0) + array.itemsize
    return _outside(start, stop, array.base)


def buffer_shortfall(view: memoryview, address: int) -> str | None:
    """What a contiguous buffer lacks of the memory of the object that lets it be seen."""
    return _outside(address, address + view.nbytes, view.obj)


def _outside(start: int, stop: int, owner: Any) -> str | None:
    """How these addresses leave the memory of the object that owns it, if that is known."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # Views of numpy alone can be more than what they are made of: buffers that are seen keep their size.
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
    """What a view of numpy's, or of Python's own, shows the memory of; ``None`` if it is no view."""
    if isinstance(view, memoryview):
        return view.obj
    return view.base if hasattr(view, "__array_interface__") and hasattr(view, "base") else None
