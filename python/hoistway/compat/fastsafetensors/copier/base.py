"""What a copier of your own is, as in `fastsafetensors.copier.base`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._framework import TensorBase
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata
from hoistway.compat.fastsafetensors.cpp import gds_device_buffer


class CopierInterface(ABC):
    """Brings the tensors of one file. `register_copier_constructor` registers what makes copiers."""

    metadata: SafeTensorsMetadata

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:  # noqa: B027
        """Restricts reads to these ranges of the file, where a copier can: by default it reads the whole file."""

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Begins to read, and returns what `wait_io` is given."""

    @abstractmethod
    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        """Waits until all is read, and returns the tensors by name."""


class DummyDeviceBuffer(gds_device_buffer):
    """A buffer of nothing, for copiers that need none."""

    def __init__(self) -> None:
        super().__init__(0, 0, False)


__all__ = ["CopierInterface", "DummyDeviceBuffer"]
