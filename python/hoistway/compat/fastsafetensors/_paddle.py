"""Tensors of paddle with the types and devices of this interface, and what is done to them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from hoistway._frameworks import PADDLE_TYPES
from hoistway.compat.fastsafetensors._devices import Device, DeviceType
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._framework import FrameworkOpBase, TensorBase
from hoistway.errors import UnsupportedDtypeError

_DTYPES = {DType(name): paddle_name for name, paddle_name in PADDLE_TYPES.items()}
_NAMES = {paddle_name: dtype for dtype, paddle_name in _DTYPES.items()}
# Paddle joins and copies bytes, not these.
_NARROW = (DType.F8_E4M3, DType.F8_E5M2)


class PaddleTensor(TensorBase):
    """A tensor of paddle, and what it is called here."""

    @classmethod
    def of(cls, tensor: Any) -> PaddleTensor:
        """Wraps a tensor of paddle, without a copy."""
        place = tensor.place
        device = Device() if place.is_cpu_place() else Device(DeviceType.GPU, place.gpu_device_id())
        name = str(tensor.dtype).removeprefix("paddle.")
        if name not in _NAMES:
            raise UnsupportedDtypeError(f"safetensors has no type for paddle's {name}")
        return cls(device, _NAMES[name], tensor)

    def get_nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.get_shape()) * int(self.real_tensor.element_size())

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies its bytes, in the order of its indices."""
        on_host = self.contiguous().to("cpu")
        if nbytes := on_host.get_nbytes():
            buf[:] = (ctypes.c_char * nbytes).from_address(on_host.data_ptr()).raw

    def contiguous(self) -> PaddleTensor:
        """The same tensor in the order of its indices."""
        return self._with(_restored(_plain(self).contiguous(), self.dtype))

    def to(self, device: Any = None, dtype: DType = DType.AUTO) -> PaddleTensor:
        """The same tensor elsewhere or of another type; itself if it is there and of that."""
        target = self.device if device is None else Device.of(device)
        wanted = self.dtype if dtype is DType.AUTO else dtype
        moved = self.real_tensor
        if target != self.device:
            moved = moved.to(device=target.as_str().replace("cuda", "gpu"))
        if wanted is not self.dtype:
            moved = moved.cast(paddle_dtype(wanted))
        return self if moved is self.real_tensor else PaddleTensor(target, wanted, moved)

    def clone(self) -> PaddleTensor:
        """A copy."""
        return self._with(_restored(_plain(self).clone(), self.dtype))

    def view(self, dtype: DType) -> PaddleTensor:
        """The same bytes as elements of another type."""
        return PaddleTensor(self.device, dtype, self.real_tensor.view(paddle_dtype(dtype)))


class PaddleFramework(FrameworkOpBase[PaddleTensor]):
    """The interface of paddle for loaders and copiers."""

    def get_name(self) -> str:
        """Its name."""
        return "paddle"

    def wrap_tensor(self, tensor: Any) -> PaddleTensor:
        """Wraps a tensor of paddle, without a copy."""
        return PaddleTensor.of(tensor)

    def wrap_loaded(self, tensor: Any, dtype: DType, device: Device) -> PaddleTensor:
        """Wraps a tensor whose type and device are known."""
        return PaddleTensor(device, dtype, tensor)

    def native_dtype(self, dtype: DType) -> Any:
        """The type that paddle has for an element type."""
        return paddle_dtype(dtype)

    def get_empty_tensor(self, shape: Sequence[int], dtype: DType, device: Device) -> PaddleTensor:
        """A tensor of this shape with no values yet."""
        import paddle  # noqa: PLC0415

        return PaddleTensor(Device(), dtype, paddle.empty(list(shape), paddle_dtype(dtype))).to(device)

    def concat_tensors(self, tensors: Sequence[PaddleTensor], dim: int) -> PaddleTensor:
        """One tensor of several of one type, one after the other along a dimension."""
        import paddle  # noqa: PLC0415

        first = tensors[0]
        if names := {tensor.dtype.value for tensor in tensors} - {first.dtype.value}:
            raise UnsupportedDtypeError(
                f"tensors of the types {', '.join(sorted({first.dtype.value, *names}))} cannot be joined: paddle joins "
                "those of one type"
            )
        joined = paddle.concat([_plain(tensor) for tensor in tensors], axis=dim)
        return PaddleTensor(first.device, first.dtype, _restored(joined, first.dtype))


def paddle_dtype(dtype: DType) -> Any:
    """The type that paddle has for an element type."""
    import paddle  # noqa: PLC0415

    if dtype not in _DTYPES:
        raise UnsupportedDtypeError(f"paddle has no type for {dtype.value}")
    return getattr(paddle, _DTYPES[dtype])


def _plain(tensor: PaddleTensor) -> Any:
    return tensor.view(DType.U8).real_tensor if tensor.dtype in _NARROW else tensor.real_tensor


def _restored(tensor: Any, dtype: DType) -> Any:
    return tensor.view(paddle_dtype(dtype)) if dtype in _NARROW else tensor
