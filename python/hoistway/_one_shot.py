"""Whole tasks in one call: streaming a checkpoint, and loading a file that is already in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from hoistway import _native
from hoistway._arguments import PathType, shown
from hoistway._checkpoint import Checkpoint, Select
from hoistway._frameworks import Framework, converter
from hoistway.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

    from hoistway._calls import IterTensorsArguments
    from hoistway._frameworks import Jax, JaxArray, Numpy, NumpyArray, Raw, Torch, TorchTensor
    from hoistway._options import LoadOptions, StoreOptions
    from hoistway._stream import Order, TensorStream
    from hoistway._targets import CopyInto


@overload
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Torch = ...,
    **arguments: Unpack[IterTensorsArguments],
) -> TensorStream[TorchTensor]: ...
@overload
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Numpy,
    **arguments: Unpack[IterTensorsArguments],
) -> TensorStream[NumpyArray]: ...
@overload
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Jax,
    **arguments: Unpack[IterTensorsArguments],
) -> TensorStream[JaxArray]: ...
@overload
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Raw,
    **arguments: Unpack[IterTensorsArguments],
) -> TensorStream[_native.Tensor]: ...
@overload
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Framework,
    **arguments: Unpack[IterTensorsArguments],
) -> TensorStream[Any]: ...
def iter_tensors(
    paths: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Framework = "torch",
    select: Select | None = None,
    exclude: str | Iterable[str] | None = None,
    slices: Mapping[str, Any] | None = None,
    order: Order = "arrival",
    max_in_flight: int | str | None = None,
    copy_into: CopyInto | None = None,
    pool: _native.MemoryPool | None = None,
    allocator: Literal["driver", "torch"] = "driver",
    lenient: bool | None = None,
    offset: int | None = None,
    store: StoreOptions | None = None,
    cache: PathType | None = None,
    **options: Unpack[LoadOptions],
) -> TensorStream[Any]:
    """Opens a checkpoint, and yields ``(name, tensor)`` while the other tensors are still being loaded.

    Args:
        paths: As in `load_file`.
        device: As in `load_file`.
        framework: As in `load_file`.
        select: As in `load_file`.
        exclude: As in `load_file`.
        slices: As in `load_file`.
        order: As in `Checkpoint.iter_tensors`.
        max_in_flight: As in `Checkpoint.iter_tensors`.
        copy_into: As in `Checkpoint.iter_tensors`.
        pool: As in `load_file`.
        allocator: As in `load_file`.
        lenient: As in `load_file`.
        offset: As in `load_file`.
        store: As in `load_file`.
        cache: As in `load_file`.
        options: As in `load_file`.

    Returns:
        An iterator with the attribute ``report``. After the last tensor, or when it is closed, no file stays open.
    """
    with Checkpoint(
        paths,
        device=device,
        framework=framework,
        allocator=allocator,
        lenient=lenient,
        offset=offset,
        store=store,
        cache=cache,
    ) as checkpoint:
        return checkpoint.iter_tensors(
            select=select,
            exclude=exclude,
            slices=slices,
            order=order,
            max_in_flight=max_in_flight,
            copy_into=copy_into,
            pool=pool,
            **options,
        )


@overload
def load(data: Buffer, *, framework: Torch = ...) -> dict[str, TorchTensor]: ...
@overload
def load(data: Buffer, *, framework: Numpy) -> dict[str, NumpyArray]: ...
@overload
def load(data: Buffer, *, framework: Jax) -> dict[str, JaxArray]: ...
@overload
def load(data: Buffer, *, framework: Raw) -> dict[str, _native.Tensor]: ...
@overload
def load(data: Buffer, *, framework: Framework) -> dict[str, Any]: ...
def load(data: Buffer, *, framework: Framework = "torch") -> dict[str, Any]:
    """Loads a safetensors or GGUF file that is already in memory.

    Args:
        data: The whole file. Anything but ``bytes`` is copied once more.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"`` for
            `hoistway.Tensor`.

    Returns:
        A dictionary of tensors in host memory, in the order of the file. They are copies of the data.
    """
    convert = converter(framework)
    if isinstance(data, str | os.PathLike):
        raise ArgumentError(
            f"data cannot be {data!r}: hoistway.load takes the bytes of a file, load_file its path"
        )
    try:
        contents = data if isinstance(data, bytes) else bytes(memoryview(data))
    except TypeError:
        raise ArgumentError(
            f"data cannot be {shown(data)}: pass the bytes of a file; for an open file, those of its read()"
        ) from None
    tensors: dict[str, Any] = {}
    convert(_native.load_bytes(contents), tensors)
    return tensors
