"""The interface of copiers of your own, as in `fastsafetensors.copier.base`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._framework import TensorBase
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata
from hoistway.compat.fastsafetensors.cpp import gds_device_buffer
from hoistway.errors import OptionError


class CopierInterface(ABC):
    """Brings the tensors of one file. `register_copier_constructor` registers what makes copiers."""

    metadata: SafeTensorsMetadata

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Restricts reads to these ranges of the file, where a copier can: by default it reads the whole file.

        Raises:
            ValueError: The ranges are not in order, overlap, or leave the file.
        """
        first, last = self.metadata.header_length, self.metadata.size_bytes
        end = first
        for pair in byte_ranges or ():
            start, stop = _range(pair)
            if not end <= start < stop <= last:
                raise OptionError(
                    f"byte_ranges cannot have {pair!r}: ranges are in order, do not overlap, and lie between "
                    f"bytes {first} and {last} of the file"
                )
            end = stop

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Begins to read, and returns what `wait_io` is given."""

    @abstractmethod
    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        """Waits until all is read, and returns the tensors by name."""


def _range(pair: Any) -> tuple[int, int]:
    try:
        start, stop = pair
        if not (isinstance(start, bool) or isinstance(stop, bool)):
            return operator.index(start), operator.index(stop)
    except (TypeError, ValueError):
        pass
    raise OptionError(f"byte_ranges cannot have {pair!r}: a range is two whole numbers")


class DummyDeviceBuffer(gds_device_buffer):
    """A buffer of nothing, for copiers that need none."""

    def __init__(self) -> None:
        super().__init__(0, 0, False)


__all__ = ["CopierInterface", "DummyDeviceBuffer"]
