"""Rows of tables larger than memory, such as embeddings of n-grams."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hoistway import _native
from hoistway._arguments import PathType, tensor_name
from hoistway._checkpoint import Checkpoint
from hoistway._frameworks import Framework, check_packages, converter, types_without_package
from hoistway._options import ReaderOptions, StoreOptions
from hoistway._reader import opened, reader_options
from hoistway.errors import SliceError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Rows:
    """A table in a checkpoint, of which only the rows that are asked for are read.

    Args:
        paths: What `hoistway.open` takes, or an open checkpoint.
        table: The name of the tensor. A row is what lies under one index of its first dimension.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"``.
        lenient: As in `hoistway.open`.
        offset: As in `hoistway.open`.
        store: As in `hoistway.open`.
        options: See `ReaderOptions`. By default 64 reads are in flight.
    """

    def __init__(
        self,
        paths: PathType | Sequence[PathType] | Checkpoint,
        table: str,
        *,
        framework: Framework = "torch",
        lenient: bool | None = None,
        offset: int | None = None,
        store: StoreOptions | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        self._convert = converter(framework)
        checkpoint = opened(paths, lenient, offset, store)
        table = tensor_name(table)
        check_packages([(table, checkpoint.info(table)[0])], types_without_package(framework))
        self._native = _native.Rows(checkpoint, table, **reader_options(options))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._native)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._native.row_bytes

    def gather(self, rows: Iterable[int]) -> Any:
        """Reads rows, each once however often it is named, and neighbours together.

        Returns:
            A tensor whose first dimension counts the rows as they were named.

        Raises:
            SliceError: The table has no such row.
        """
        numbers = [operator.index(row) for row in rows]
        if numbers and min(numbers) < 0:
            raise SliceError(f"there is no row {min(numbers)}: rows are counted from 0")
        tensor = self._native.gather(numbers)
        converted: dict[str, Any] = {}
        self._convert([tensor], converted)
        return converted.pop(tensor.name)
