"""Tensors of torch, numpy, jax and paddle that share memory with those of hoistway.

Frameworks are imported when first used; none of them is needed to import hoistway.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hoistway import _native
from hoistway._devices import of_number, of_text, to_torch, torch_kind
from hoistway.errors import MissingPackageError, OptionError, UnsupportedDtypeError

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch
    from typing_extensions import TypeVar

    from hoistway._native import Tensor

    TorchTensor = torch.Tensor
    NumpyArray = np.ndarray[Any, Any]
    JaxArray = jax.Array
    T = TypeVar("T", default=Any)
else:
    # A running program needs no default.
    from typing import TypeVar

    T = TypeVar("T")

Torch = Literal["torch", "pt"]
Numpy = Literal["numpy", "np"]
Jax = Literal["jax", "flax"]
Raw = Literal["raw"]
Framework = Torch | Numpy | Jax | Literal["paddle"] | Raw

_NARROW_TYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

ELEMENT_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F4": "float4_e2m1fn",
    **_NARROW_TYPES,
}
"""Names of element types in torch, numpy and ml_dtypes. Only torch packs pairs of F4, under another name."""

PADDLE_TYPES = {
    dtype: name
    for dtype, name in ELEMENT_TYPES.items()
    # Paddle takes 16-bit integers without a sign for bfloat16.
    if dtype not in ("U16", "F4", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
}
"""Names of the element types that paddle has."""

Converter = Callable[["Sequence[Tensor]", "dict[str, Any]"], None]
"""Adds tensors to a dictionary, by name."""


def check_framework(framework: str, device: str) -> None:
    """Fails if there is no such framework, or none for the device. Does not check that it is installed."""
    if framework not in _CONVERTERS:
        raise OptionError(f"framework cannot be {framework!r}: it must be one of {', '.join(_CONVERTERS)}")
    if framework in ("numpy", "np") and device != "cpu":
        raise OptionError(f"framework 'numpy' has arrays in host memory only, and the device is {device!r}")


def converter(framework: str, device: str = "cpu") -> Converter:
    """The converter to a framework's tensors, on a device."""
    check_framework(framework, device)
    return _CONVERTERS[framework]()


def is_torch(framework: str) -> bool:
    """Whether the framework is torch."""
    return framework in ("torch", "pt")


def device_name(device: Any, framework: str) -> str:
    """The name in hoistway of a device that is text, a number, or a `torch.device`."""
    if hasattr(device, "__index__") and not isinstance(device, bool):
        return of_number(device)
    if isinstance(device, str) and device in _CONVERTERS:
        raise OptionError(f"device cannot be {device!r}, which is a framework: pass framework={device!r}")
    torch: Any = sys.modules.get("torch")
    name = of_text(str(device))
    # Half imported, or replaced by a stub, it has no devices.
    if not all(hasattr(torch, part) for part in ("cuda", "device", "version")):
        return name
    # Text names a kind of devices; torch's own devices are those of its build, whatever it calls them.
    if isinstance(device, torch.device) and device.type == "cuda":
        name = torch_kind(torch) + name.removeprefix("cuda")
    if is_torch(framework) and name == torch_kind(torch):
        # As everywhere in torch, the current one.
        return f"{name}:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"
    return name


def cause_of(error: ImportError, package: str) -> ImportError | None:
    """The error of an import, unless it only says that the package is missing."""
    # One that is there and fails, for want of a library or of a name of its own, has its name in the error too.
    return None if isinstance(error, ModuleNotFoundError) and error.name == package else error


def torch_allocator(device: str) -> Callable[[int], tuple[int, int, Any]]:
    """A function that allocates with the caching allocator of torch, on the stream that is current now."""
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "allocator 'torch' needs torch; install it or leave the allocator out"
        ) from cause_of(error, "torch")

    on = to_torch(torch, device)
    stream = torch.cuda.current_stream(on)

    def allocate(size: int) -> tuple[int, int, Any]:
        # This runs on a thread of a load, whose current stream is the default one.
        with torch.cuda.stream(stream):
            memory = torch.empty(size, dtype=torch.uint8, device=on)
        return memory.data_ptr(), stream.cuda_stream, memory

    return allocate


def _to_raw(tensors: Sequence[Tensor], into: dict[str, Any]) -> None:
    into.update((tensor.name, tensor) for tensor in tensors)


@cache
def _torch() -> Converter:
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "framework 'torch' needs torch; install it or choose framework='numpy' or 'raw'"
        ) from cause_of(error, "torch")
    # Pairs of F4 are one element of torch's.
    names = {**ELEMENT_TYPES, "F4": "float4_e2m1fn_x2"}
    types = {dtype: getattr(torch, name) for dtype, name in names.items() if hasattr(torch, name)}

    def to_torch(tensors: Sequence[Tensor], into: dict[str, Any]) -> None:
        for tensor in tensors:
            if tensor.dtype == "F4" and (not tensor.shape or tensor.shape[-1] % 2 != 0):
                raise UnsupportedDtypeError(
                    f"torch packs two F4 elements into one, but the last dimension of tensor {tensor.name!r} "
                    f"of shape {list(tensor.shape)} is odd",
                    tensor=tensor.name,
                )
        _native.to_torch(list(tensors), torch.utils.dlpack.from_dlpack, types, True, into)

    return to_torch


@cache
def _numpy() -> Converter:
    try:
        import numpy as np  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "framework 'numpy' needs numpy; install it or choose another framework"
        ) from cause_of(error, "numpy")
    own = set(ELEMENT_TYPES) - {"BF16", "F4", *_NARROW_TYPES}
    dtypes = {dtype: np.dtype(ELEMENT_TYPES[dtype]) for dtype in own}

    def to_numpy(tensors: Sequence[Tensor], into: dict[str, Any]) -> None:
        for tensor in tensors:
            array = (
                np.asarray(tensor) if tensor.device == "cpu" else np.frombuffer(tensor.tobytes(), np.uint8)
            )
            if tensor.bytes_shape is not None:
                into[tensor.name] = array.reshape(tensor.bytes_shape)
                continue
            if tensor.dtype == "F4":
                array = _unpacked_f4(array)
            dtype = dtypes.get(tensor.dtype) or _ml_dtype(tensor)
            try:
                into[tensor.name] = array.view(dtype).reshape(tensor.shape)
            except ValueError as error:
                raise UnsupportedDtypeError(
                    f"numpy cannot hold tensor {tensor.name!r} of {len(tensor.shape)} dimensions: {error}; load it "
                    "with framework='raw'",
                    tensor=tensor.name,
                ) from error

    return to_numpy


def types_without_package(framework: str) -> Collection[str]:
    """Element types for which the framework needs a package that is not installed."""
    if framework not in ("numpy", "np") or importlib.util.find_spec("ml_dtypes"):
        return ()
    return ("BF16", "F4", *_NARROW_TYPES)


def check_packages(tensors: Iterable[tuple[str, str]], lacking: Collection[str]) -> None:
    """Fails for the first tensor whose type is in ``lacking``, as the framework lacks a package for it."""
    for name, dtype in tensors if lacking else ():
        if dtype in lacking:
            raise _no_package(name, dtype)


def _no_package(name: str, dtype: str) -> MissingPackageError:
    return MissingPackageError(
        f"tensor {name!r} is of type {dtype}: numpy needs ml_dtypes for that; install it, or choose another framework"
    )


def _ml_dtype(tensor: Tensor) -> Any:
    """The type of ml_dtypes for elements that numpy itself does not know."""
    try:
        import ml_dtypes  # noqa: PLC0415
    except ImportError as error:
        raise _no_package(tensor.name, tensor.dtype) from error
    dtype = getattr(ml_dtypes, ELEMENT_TYPES.get(tensor.dtype, ""), None)
    if dtype is None:
        raise UnsupportedDtypeError(
            f"numpy has no type for {tensor.dtype}, which tensor {tensor.name!r} is made of; "
            "load it with framework='raw'",
            tensor=tensor.name,
        )
    return dtype


def _unpacked_f4(packed: Any) -> Any:
    """Copies 4-bit elements into a byte each, as ml_dtypes keeps them, the lower half of a byte first."""
    import numpy as np  # noqa: PLC0415

    unpacked = np.empty((packed.size, 2), np.uint8)
    np.bitwise_and(packed, 0x0F, out=unpacked[:, 0])
    np.right_shift(packed, 4, out=unpacked[:, 1])
    return unpacked.reshape(-1)


@cache
def _jax() -> Converter:
    try:
        import jax  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "framework 'jax' needs jax; install it or choose another framework"
        ) from cause_of(error, "jax")
    shared = {"BOOL", "U8", "I8", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "C64"}
    to_numpy = _numpy()
    host = jax.devices("cpu")[0]

    def to_jax(tensors: Sequence[Tensor], into: dict[str, Any]) -> None:
        arrays: dict[str, Any] = {}
        for tensor in tensors:
            is_shared = tensor.dtype in shared or tensor.bytes_shape is not None
            if is_shared and tensor.nbytes > 0:
                into[tensor.name] = jax.dlpack.from_dlpack(tensor)
            else:
                # 64-bit types follow jax's own setting, and the narrow floats come through ml_dtypes: copies.
                to_numpy([tensor], arrays)
                into[tensor.name] = jax.device_put(arrays.pop(tensor.name), place(tensor))

    def place(tensor: Tensor) -> Any:
        kind, _, ordinal = tensor.device.partition(":")
        return host if kind == "cpu" else jax.devices(kind)[int(ordinal)]

    return to_jax


@cache
def _paddle() -> Converter:
    try:
        import paddle  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "framework 'paddle' needs paddle; install it or choose another framework"
        ) from cause_of(error, "paddle")
    views = {dtype: getattr(paddle, name) for dtype, name in _NARROW_TYPES.items() if dtype in PADDLE_TYPES}

    def to_paddle(tensors: Sequence[Tensor], into: dict[str, Any]) -> None:
        for tensor in tensors:
            if tensor.dtype not in PADDLE_TYPES and tensor.bytes_shape is None:
                raise UnsupportedDtypeError(
                    f"paddle has no type for {tensor.dtype}, which tensor {tensor.name!r} is made of; "
                    "load it with framework='raw'",
                    tensor=tensor.name,
                )
        _native.to_torch(list(tensors), paddle.utils.dlpack.from_dlpack, views, False, into)

    return to_paddle


_CONVERTERS: dict[str, Callable[[], Converter]] = {
    "torch": _torch,
    "pt": _torch,
    "numpy": _numpy,
    "np": _numpy,
    "jax": _jax,
    "flax": _jax,
    "paddle": _paddle,
    "raw": lambda: _to_raw,
}
