"""Tensors with the types and devices of this interface, and what is done to them: those of torch.

`_paddle` has those of paddle.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hoistway.compat.fastsafetensors._devices import Device
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.errors import OptionError, SliceError, UnsupportedDtypeError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class TensorBase(ABC):
    """A tensor of a framework, and what it is called here."""

    device: Device
    dtype: DType
    real_tensor: Any

    def get_raw(self) -> Any:
        """The tensor of the framework."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """Its shape as files have it."""
        return list(self.real_tensor.shape)

    @abstractmethod
    def get_nbytes(self) -> int:
        """Bytes of its elements."""

    @abstractmethod
    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies its bytes, in the order of its indices."""

    @abstractmethod
    def contiguous(self) -> Self:
        """The same tensor in the order of its indices."""

    @abstractmethod
    def to(self, device: Any = None, dtype: DType = DType.AUTO) -> Self:
        """The same tensor elsewhere or of another type; itself if it is there and of that."""

    @abstractmethod
    def clone(self) -> Self:
        """A copy."""

    @abstractmethod
    def view(self, dtype: DType) -> Self:
        """The same bytes as elements of another type."""

    def detach(self) -> Self:
        """The same tensor without its history of gradients."""
        return self._with(self.real_tensor.detach())

    def reshape(self, shape: Sequence[int]) -> Self:
        """The same elements in another shape."""
        return self._with(self.real_tensor.reshape(shape))

    def data_ptr(self) -> int:
        """Address of its first element."""
        return int(self.real_tensor.data_ptr())

    def __getitem__(self, index: Any) -> Self:
        return self._with(self.real_tensor[index])

    def _with(self, tensor: Any) -> Self:
        return type(self)(self.device, self.dtype, tensor)


T = TypeVar("T", bound=TensorBase)


class FrameworkOpBase(ABC, Generic[T]):
    """The interface of a framework for loaders, copiers and collectives."""

    @abstractmethod
    def get_name(self) -> str:
        """Its name."""

    @abstractmethod
    def wrap_tensor(self, tensor: Any) -> T:
        """Wraps a tensor of the framework, without a copy."""

    @abstractmethod
    def wrap_loaded(self, tensor: Any, dtype: DType, device: Device) -> T:
        """Wraps a tensor whose type and device are known."""

    @abstractmethod
    def native_dtype(self, dtype: DType) -> Any:
        """The type that the framework has for an element type.

        Raises:
            UnsupportedDtypeError: It has none.
        """

    def native_shape(self, dtype: DType, shape: Sequence[int]) -> list[int]:
        """The shape that the framework has for one of a file."""
        del dtype
        return list(shape)

    def get_dtype_size(self, dtype: DType) -> float:
        """Bytes of one element, a fraction for types that are packed."""
        return dtype.bits / 8

    @abstractmethod
    def get_empty_tensor(self, shape: Sequence[int], dtype: DType, device: Device) -> T:
        """A tensor of this shape, as files have it, with no values yet."""

    @abstractmethod
    def concat_tensors(self, tensors: Sequence[T], dim: int) -> T:
        """One tensor of several, one after the other along a dimension; of several types, as promoted."""


class TorchTensor(TensorBase):
    """A tensor of torch, and what it is called here."""

    @classmethod
    def of(cls, tensor: Any) -> TorchTensor:
        """Wraps a tensor of torch, without a copy."""
        return cls(Device.of(tensor.device), DType.from_torch(tensor.dtype), tensor)

    def get_shape(self) -> list[int]:
        """Its shape as files have it: of pairs of F4 elements both are counted."""
        shape = list(self.real_tensor.shape)
        return [*shape[:-1], shape[-1] * 2] if self.dtype is DType.F4 else shape

    def get_nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.real_tensor.nbytes)

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies its bytes, in the order of its indices."""
        import torch  # noqa: PLC0415

        if self.get_nbytes():
            flat = as_bytes(plain(self.real_tensor).contiguous())
            torch.frombuffer(buf, dtype=torch.uint8, count=flat.numel()).copy_(flat)

    def contiguous(self) -> TorchTensor:
        """The same tensor in the order of its indices."""
        return self._with(_viewed(plain(self.real_tensor).contiguous(), self.real_tensor.dtype))

    def to(self, device: Any = None, dtype: DType = DType.AUTO) -> TorchTensor:
        """The same tensor elsewhere or of another type; itself if it is there and of that."""
        target = self.device if device is None else Device.of(device)
        wanted = self.dtype if dtype is DType.AUTO else dtype
        if target == self.device and wanted is self.dtype:
            return self
        moved = self.real_tensor.to(device=target.as_str(), dtype=wanted.to_torch())
        return TorchTensor(target, wanted, moved)

    def clone(self) -> TorchTensor:
        """A copy."""
        return self._with(_viewed(plain(self.real_tensor).clone(), self.real_tensor.dtype))

    def view(self, dtype: DType) -> TorchTensor:
        """The same bytes as elements of another type."""
        return TorchTensor(self.device, dtype, self.real_tensor.view(dtype.to_torch()))


class TorchFramework(FrameworkOpBase[TorchTensor]):
    """The interface of torch for loaders, copiers and collectives."""

    def get_name(self) -> str:
        """Its name."""
        return "pytorch"

    def wrap_tensor(self, tensor: Any) -> TorchTensor:
        """Wraps a tensor of torch, without a copy."""
        return TorchTensor.of(tensor)

    def wrap_loaded(self, tensor: Any, dtype: DType, device: Device) -> TorchTensor:
        """Wraps a tensor whose type and device are known."""
        return TorchTensor(device, dtype, tensor)

    def native_dtype(self, dtype: DType) -> Any:
        """The type that torch has for an element type."""
        return dtype.to_torch()

    def native_shape(self, dtype: DType, shape: Sequence[int]) -> list[int]:
        """The shape that torch has for one of a file: it counts pairs of F4 elements."""
        if dtype is not DType.F4:
            return list(shape)
        if not shape or shape[-1] % 2:
            raise SliceError(
                f"torch packs two F4 elements into one, but shape {list(shape)} has no even last dimension"
            )
        return [*shape[:-1], shape[-1] // 2]

    def get_empty_tensor(self, shape: Sequence[int], dtype: DType, device: Device) -> TorchTensor:
        """A tensor of this shape, as files have it, with no values yet."""
        import torch  # noqa: PLC0415

        stored = self.native_shape(dtype, shape)
        return TorchTensor(device, dtype, torch.empty(stored, dtype=dtype.to_torch(), device=device.as_str()))

    def concat_tensors(self, tensors: Sequence[TorchTensor], dim: int) -> TorchTensor:
        """One tensor of several, one after the other along a dimension; of several types, as torch promotes them."""
        import torch  # noqa: PLC0415

        first, raw = tensors[0], [tensor.real_tensor for tensor in tensors]
        if all(tensor.dtype == raw[0].dtype for tensor in raw):
            joined = _viewed(torch.cat([plain(tensor) for tensor in raw], dim=dim), raw[0].dtype)
            return TorchTensor(first.device, first.dtype, joined)
        try:
            joined = torch.cat(raw, dim=dim)
        except RuntimeError as error:
            names = ", ".join(dict.fromkeys(tensor.dtype.value for tensor in tensors))
            raise UnsupportedDtypeError(f"torch cannot join tensors of the types {names}: {error}") from error
        return TorchTensor(first.device, DType.from_torch(joined.dtype), joined)


def framework_of(name: str) -> FrameworkOpBase[Any]:
    """The framework of this name."""
    if name in ("pt", "pytorch", "torch"):
        return TorchFramework()
    if name == "paddle":
        from hoistway.compat.fastsafetensors._paddle import PaddleFramework  # noqa: PLC0415

        return PaddleFramework()
    raise OptionError(
        f"framework cannot be {name!r}: it must be pytorch or paddle; hoistway.load_file knows others"
    )


def narrowed(tensor: TorchTensor, dim: int, start: int, stop: int) -> TorchTensor:
    """The part from ``start`` to ``stop`` along a dimension, counted in elements as files have them."""
    if tensor.dtype is DType.F4 and dim == tensor.real_tensor.dim() - 1:
        if start % 2 or stop % 2:
            raise SliceError(
                f"elements {start}:{stop} would part pairs of F4 elements, which torch packs into one"
            )
        start, stop = start // 2, stop // 2
    raw = plain(tensor.real_tensor).narrow(dim, start, stop - start)
    return TorchTensor(tensor.device, tensor.dtype, _viewed(raw, tensor.real_tensor.dtype))


def plain(tensor: Any) -> Any:
    """Narrow floats as bytes of the same shape: torch copies and joins those of every type."""
    import torch  # noqa: PLC0415

    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if narrow else tensor


def as_bytes(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, as they lie."""
    import torch  # noqa: PLC0415

    return tensor.reshape(math.prod(tensor.shape)).view(torch.uint8)


def _viewed(tensor: Any, dtype: Any) -> Any:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
