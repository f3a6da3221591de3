"""Targets of `copy_into`: memory of the caller's that tensors are read into, checked before anything is read."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hoistway._backing import buffer_shortfall, numpy_shortfall, torch_shortfall
from hoistway._devices import of_dlpack, of_torch
from hoistway._frameworks import ELEMENT_TYPES
from hoistway._stream import PENDING
from hoistway.errors import HoistwayError, TargetError, UnsupportedDtypeError

if TYPE_CHECKING:
    from hoistway import _native

CopyInto = Mapping[str, Any] | Callable[[str, str, tuple[int, ...]], Any]
"""Targets by name, or a function that gives the target of a tensor of this name, type and shape, or None."""


class Wanted(NamedTuple):
    """The properties that a target must have."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the elements."""
    bytes_shape: tuple[int, ...] | None
    """Of the bytes, if the elements are quantised."""
    nbytes: int

    @property
    def is_raw(self) -> bool:
        """Whether frameworks see bytes rather than elements."""
        return self.bytes_shape is not None


class Memory(NamedTuple):
    """The place of a target, and the object that keeps it there."""

    device: str
    address: int
    nbytes: int
    owner: object


class Target(NamedTuple):
    """A target of the caller's, and its memory."""

    given: Any
    memory: Memory


def chosen(copy_into: CopyInto, wanted: Mapping[str, Wanted]) -> dict[str, Target]:
    """The targets of those tensors that have one; an error if any cannot take its tensor."""
    targets = {}
    for name, want in wanted.items():
        target = copy_into(name, want.dtype, want.shape) if callable(copy_into) else copy_into.get(name)
        if target is not None:
            targets[name] = Target(target, memory_of(target, want))
    return targets


def memory_of(target: Any, wanted: Wanted) -> Memory:
    """The memory of a target that can hold a tensor as it is; an error for every other."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(target, torch.Tensor):
        return _memory_of_torch(torch, target, wanted)
    if numpy is not None and isinstance(target, numpy.ndarray):
        return _memory_of_numpy(target, wanted)
    if hasattr(target, "__cuda_array_interface__"):
        return _memory_on_device(target, wanted)
    return _memory_of_buffer(target, wanted)


def mark_as_written(targets: Mapping[str, Target]) -> None:
    """Has autograd see tensors of torch as changed in place, as their ``copy_`` does."""
    torch = sys.modules.get("torch")
    for target in targets.values():
        # Tensors of inference have no version.
        if torch is not None and isinstance(target.given, torch.Tensor) and not target.given.is_inference():
            torch.autograd.graph.increment_version(target.given)


def filled(
    filling: _native.Filling, targets: Mapping[str, Target], patience: float | None = None
) -> Generator[tuple[str, Any], None, None]:
    """Targets by name, each once it holds its tensor."""
    while True:
        try:
            names = filling.next(patience)
        except HoistwayError as error:
            error.args = (f"{error}; what lies in targets that were not given is undefined", *error.args[1:])
            raise
        if names is None:
            yield PENDING
            continue
        if not names:
            return
        for name in names:
            yield name, targets[name].given


def _memory_of_torch(torch: Any, target: Any, wanted: Wanted) -> Memory:
    element = "uint8" if wanted.is_raw else ELEMENT_TYPES.get(wanted.dtype, "")
    dtype = getattr(torch, "float4_e2m1fn_x2" if wanted.dtype == "F4" else element, None)
    if dtype is None:
        raise _unsupported("torch", wanted)
    shape = wanted.bytes_shape or wanted.shape
    if wanted.dtype == "F4":
        if not shape or shape[-1] % 2 != 0:
            raise UnsupportedDtypeError(
                f"torch packs two F4 elements into one, but the last dimension of tensor {wanted.name!r} "
                f"of shape {list(shape)} is odd",
                tensor=wanted.name,
            )
        shape = (*shape[:-1], shape[-1] // 2)
    kind = target.device.type
    if kind not in ("cpu", "cuda") or target.layout is not torch.strided:
        raise _refused(wanted, f"is a tensor of layout {target.layout} on device {target.device}")
    _check_type(wanted, target.dtype, dtype)
    _check_shape(wanted, target.shape, shape)
    if not target.is_contiguous() or target.is_conj() or target.is_neg():
        raise _refused(wanted, "is not contiguous")
    _check_backing(wanted, torch_shortfall(target))
    device = "cpu" if kind == "cpu" else of_torch(torch, kind, target.device.index)
    # Its storage, so that the memory stays when the tensor is given other memory.
    return Memory(device, target.data_ptr(), wanted.nbytes, target.untyped_storage())


def _memory_of_numpy(target: Any, wanted: Wanted) -> Memory:
    element = "uint8" if wanted.is_raw else ELEMENT_TYPES.get(wanted.dtype)
    if element is None or wanted.dtype == "F4":
        raise _unsupported("numpy", wanted)
    found = target.dtype.name if target.dtype.isnative else f"{target.dtype.name} in the other byte order"
    _check_type(wanted, found, element)
    _check_shape(wanted, target.shape, wanted.bytes_shape or wanted.shape)
    if not target.flags.c_contiguous:
        raise _refused(wanted, "is not contiguous")
    if not target.flags.writeable:
        raise _refused(wanted, "is read-only")
    _check_backing(wanted, numpy_shortfall(target))
    return Memory("cpu", target.ctypes.data, target.nbytes, target)


def _memory_on_device(target: Any, wanted: Wanted) -> Memory:
    interface = target.__cuda_array_interface__
    address, is_read_only = interface["data"]
    shape = tuple(interface["shape"])
    if not hasattr(target, "__dlpack_device__"):
        raise _refused(wanted, "does not say by __dlpack_device__ on which device it is")
    device = of_dlpack(target.__dlpack_device__())
    if device is None or device == "cpu":
        raise _refused(wanted, f"is on device {target.__dlpack_device__()} of DLPack's")
    if interface.get("strides") is not None:
        raise _refused(wanted, "is not contiguous")
    if is_read_only:
        raise _refused(wanted, "is read-only")
    _check_typed_memory(wanted, interface["typestr"], shape)
    return Memory(device, address or 0, wanted.nbytes, target)


def _memory_of_buffer(target: Any, wanted: Wanted) -> Memory:
    try:
        view = memoryview(target)
    except TypeError:
        kind = type(target).__name__
        raise _refused(
            wanted, f"is of type {kind}, neither a tensor nor memory that can be written"
        ) from None
    if not view.c_contiguous:
        raise _refused(wanted, "is not contiguous")
    if view.readonly:
        raise _refused(wanted, "is read-only")
    _check_typed_memory(wanted, view.format, view.shape or ())
    if view.nbytes == 0:
        return Memory("cpu", 0, 0, view)
    # Holds the buffer, so that a bytearray cannot be resized meanwhile.
    first = ctypes.c_char.from_buffer(view)
    address = ctypes.addressof(first)
    _check_backing(wanted, buffer_shortfall(view, address))
    return Memory("cpu", address, view.nbytes, (view, first))


_FORMATS = {
    "BOOL": ("?", "|b1"),
    "I8": ("b", "|i1"),
    "U8": ("B", "|u1"),
    "I16": ("h", "<i2"),
    "U16": ("H", "<u2"),
    "I32": ("i", "<i4"),
    "U32": ("I", "<u4"),
    "I64": ("q", "<i8"),
    "U64": ("Q", "<u8"),
    "F16": ("e", "<f2"),
    "F32": ("f", "<f4"),
    "F64": ("d", "<f8"),
    "C64": ("Zf", "<c8"),
}
"""Element types as formats of buffers and of the CUDA array interface."""


def _check_typed_memory(wanted: Wanted, found: str, shape: Sequence[int]) -> None:
    """Bytes in a row are good for every type; what has a type or a shape must have the right one."""
    is_plain = found in ("B", "b", "c", "|u1", "|i1") and tuple(shape) == (wanted.nbytes,)
    if is_plain:
        return
    expected = ("B", "|u1") if wanted.is_raw else _FORMATS.get(wanted.dtype, ())
    # The same size and meaning on the platforms that hoistway runs on.
    if {"l": "q", "L": "Q"}.get(found, found) not in expected:
        raise _refused(wanted, f"has elements of format {found!r}")
    _check_shape(wanted, shape, wanted.bytes_shape or wanted.shape)


def _check_type(wanted: Wanted, found: object, expected: object) -> None:
    if found != expected:
        raise _refused(wanted, f"is of type {found}, not {expected}")


def _check_shape(wanted: Wanted, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise _refused(wanted, f"is of shape {list(found)}, not {list(expected)}")


def _check_backing(wanted: Wanted, shortfall: str | None) -> None:
    if shortfall is not None:
        raise _refused(wanted, f"has no memory for it: {shortfall}")


def _refused(wanted: Wanted, why: str) -> TargetError:
    of = f"tensor {wanted.name!r} of type {wanted.dtype} and shape {list(wanted.shape)}"
    return TargetError(f"the target of {of} {why}", tensor=wanted.name)


def _unsupported(framework: str, wanted: Wanted) -> UnsupportedDtypeError:
    return UnsupportedDtypeError(
        f"{framework} has no type for {wanted.dtype}, which tensor {wanted.name!r} is made of",
        tensor=wanted.name,
    )
