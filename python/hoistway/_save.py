"""Saving: `save_file` for one file, `save_sharded` for several and an index, `save` for bytes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hoistway import _native
from hoistway._arguments import path_text, shown, tensor_name, text_by_text
from hoistway._backing import numpy_shortfall, torch_shortfall
from hoistway._frameworks import device_name
from hoistway._options import StoreOptions, store_texts
from hoistway._report import Refusal
from hoistway._words import preformatted
from hoistway.errors import ArgumentError, OptionError, UnsupportedDtypeError

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    # torch packs two elements into one, ml_dtypes keeps each in a byte of its own.
    "float4_e2m1fn_x2": "F4",
    "float4_e2m1fn": "F4",
}
"""Types of safetensors by what torch, numpy and ml_dtypes call them."""

DirectIo = Literal["auto", "always", "never"]


@dataclass(frozen=True, repr=False)
class SaveReport:
    """The report of a save: how the bytes were written, and why a faster way was not used.

    ``str(report)`` is for people; ``report.as_dict()`` has everything.
    """

    paths: tuple[str, ...]
    """The files that hold tensors, and the index last if there is one."""
    removed: tuple[str, ...]
    """Files of earlier saves that were removed."""
    tensors: int
    tensor_bytes: int
    file_bytes: int
    """Bytes of the files that hold tensors: these and the headers."""
    uploaded_bytes: int
    """Bytes sent to an object store, the index among them."""
    parts: int
    """Parts that objects were sent in: one of an object that one request writes."""
    retries: int
    """Requests to the store that failed and were repeated."""
    checksum: str | None
    """The checksum by which the store compared all that was sent, such as ``"CRC-64/NVME"``; ``None`` if it did not."""
    direct_bytes: int
    """Bytes written past the page cache."""
    buffered_bytes: int
    """Bytes written through the page cache."""
    synced: bool
    """Whether the save was on the disk when it ended, or in its store."""
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    total_seconds: float
    _json: str = field(repr=False, compare=False)
    _text: str = field(repr=False, compare=False)

    @classmethod
    def _from_native(cls, told: tuple[str, str]) -> SaveReport:
        text, for_people = told
        values: dict[str, Any] = json.loads(text)
        return cls(
            paths=tuple(values["paths"]),
            removed=tuple(values["removed"]),
            tensors=values["tensors"],
            tensor_bytes=values["tensor_bytes"],
            file_bytes=values["file_bytes"],
            uploaded_bytes=values["uploaded_bytes"],
            parts=values["parts"],
            retries=values["retries"],
            checksum=values["checksum"],
            direct_bytes=values["direct_bytes"],
            buffered_bytes=values["buffered_bytes"],
            synced=values["synced"],
            refused=tuple(Refusal(**refusal) for refusal in values["refused"]),
            notes=tuple(values["notes"]),
            total_seconds=values["total_seconds"],
            _json=text,
            _text=for_people.rstrip("\n"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything."""
        values: dict[str, Any] = json.loads(self._json)
        return values

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<SaveReport: {self._text.partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return preformatted(self._text)


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    direct: DirectIo | None = "auto",
    sync: bool = True,
    alignment: int | str = 8,
    threads: int | None = None,
    in_flight: int | str | None = None,
    store: StoreOptions | None = None,
) -> SaveReport:
    """Saves tensors to a safetensors file, which takes its name once it is complete.

    Until then, and after any failure, an existing file of that name stays as it is. With the default alignment the file
    equals that of the package safetensors byte by byte, except that entries of the metadata are ordered by name. If
    ``path`` is a symbolic link, the file that it leads to is replaced.

    The file keeps the mode, owner and group of the file that it replaces, as far as the process may set them. The mode
    of a new file follows ``umask``.

    A tensor whose storage or array was resized or freed is an error, and nothing is written.

    Other threads must not change the tensors during a save: the file could hold a mix of old and new values. They must
    also not move the memory of the tensors, by ``resize_`` of torch for a tensor or its storage, or by
    ``resize(refcheck=False)`` of numpy: the file could then hold anything, and the process could crash. Giving a tensor
    other memory (``parameter.data = other``) is safe: the save writes the values that it had at first.

    Ctrl-C ends a save until it begins to rename the file. After that the save completes, and then
    ``KeyboardInterrupt`` is raised.

    An ``s3://``, ``gs://`` or ``az://`` URL names an object. It is sent in parts, several at a time, each with its
    checksum, and the store shows it when it is complete. A save that fails or is interrupted is aborted, within 10 s;
    Azure keeps what was sent, unseen, for a week, which the error, or after Ctrl-C the log, says. The error says so, or
    after Ctrl-C a ``RuntimeWarning``, if parts or an upload may stay in the store, or if the object may have been
    replaced all the same.

    Args:
        tensors: Contiguous tensors of torch (on the host or a device), numpy, jax and paddle (on the host), or
            hoistway.
        path: The file, or an ``s3://``, ``gs://`` or ``az://`` URL.
        metadata: Text by text to store in the file.
        direct: Whether writes bypass the page cache. With ``"auto"`` they do if the file system allows it and the save
            is large and synced.
        sync: Whether to wait until the file is on the disk, so that it survives a power failure. Without it the file
            still survives a crash of the program. But after a power failure the file may have the right length and
            wrong bytes, even if it replaced a complete file, and no error shows that. What is saved to a store is
            there in any case.
        alignment: A multiple of 8; the data begins at a multiple of it. With 4096, direct reads get whole blocks when
            the file is loaded.
        threads: Number of threads that write. Default: by cores; 8 to a store.
        in_flight: Limit of the bytes that are sent to a store at a time. At least one part of 8 MiB is. Default:
            64 MiB.
        store: Endpoint and credentials of the object store: see `StoreOptions`. An error for a path.

    Returns:
        The report of the save.
    """
    options: dict[str, Any] = {"direct": direct, "sync": sync, "alignment": alignment, "threads": threads}
    options |= {"in_flight": in_flight, "store": store_texts(store)}
    return save_described(_describe_all(tensors), path, metadata, **options)


def save_described(
    described: list[Described],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> SaveReport:
    """Saves tensors that were described before, as `save_file` does, with its options."""
    return SaveReport._from_native(
        _native.save_file(described, path_text(path), text_by_text(metadata), **options)
    )


def save_sharded(
    tensors: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    filename: str = "model.safetensors",
    metadata: Mapping[str, str] | None = None,
    direct: DirectIo | None = "auto",
    sync: bool = True,
    alignment: int | str = 8,
    threads: int | None = None,
    in_flight: int | str | None = None,
    store: StoreOptions | None = None,
) -> SaveReport:
    """Saves tensors to several safetensors files and an index, with the names and the order of Hugging Face.

    Tensors that fit in one file become ``model.safetensors``. Others become ``model-00001-of-00003.safetensors`` and so
    on, with ``model.safetensors.index.json``. At any time the index names complete files of a single save: if the plain
    names are taken, a save names its shards ``model-set2-00001-of-00003.safetensors``, replaces the index, and then
    removes all other shards of the name ``model``. Files that an index of another name lists belong to another
    checkpoint, and stay. Files of other names that the replaced index listed stay too; the report notes them.

    An ``s3://``, ``gs://`` or ``az://`` URL names a folder of a store. All parts of all shards are there before the
    first one is shown, and the index is replaced last. Earlier files stay there, and the report notes them; a single
    file has an index too if the folder has one. Saves to one folder at the same time are not kept apart.

    Args:
        tensors: As for `save_file`.
        directory: Where to put the files: a directory, or an ``s3://``, ``gs://`` or ``az://`` URL. A directory is
            created if it does not exist. A save needs up to two descriptors for each file: for many shards the limit
            (``ulimit -n``) may have to be raised.
        max_shard_size: Limit of the bytes of tensors in one file: a number, or text such as ``"5GB"``. A larger tensor
            gets a file to itself.
        filename: The name from which the names of the files are derived.
        metadata: Text by text to store in each file.
        direct: As for `save_file`.
        sync: As for `save_file`.
        alignment: As for `save_file`.
        threads: As for `save_file`.
        in_flight: As for `save_file`.
        store: As for `save_file`.

    Returns:
        The report of the save, with the names of the files.
    """
    described = _describe_all(tensors)
    options: dict[str, Any] = {"direct": direct, "sync": sync, "alignment": alignment, "threads": threads}
    options |= {"in_flight": in_flight, "store": store_texts(store)}
    return SaveReport._from_native(
        _native.save_sharded(
            described,
            path_text(directory),
            text_by_text(metadata),
            max_shard_size=max_shard_size,
            filename=filename,
            **options,
        )
    )


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of the file that `save_file` would write."""
    return _native.save_bytes(_describe_all(tensors), text_by_text(metadata))


class Described(NamedTuple):
    """A tensor as the native part sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int
    device: str
    owner: Any
    """What keeps the memory alive."""


def _describe_all(tensors: Mapping[str, Any]) -> list[Described]:
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"tensors cannot be {shown(tensors)}: pass a dictionary of tensors by name")
    return [describe(written_name(name), tensor) for name, tensor in tensors.items()]


def written_name(name: Any) -> str:
    """Returns the name of a tensor if a file can hold it."""
    text = tensor_name(name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refusal(text, "its name has half of a surrogate pair, which UTF-8 cannot hold") from None
    return text


def describe(name: str, tensor: Any) -> Described:
    """Describes a tensor of any framework, under the given name."""
    if isinstance(tensor, _native.Tensor):
        address, nbytes = tensor.data_ptr, tensor.nbytes
        return Described(name, tensor.dtype, tensor.shape, address, nbytes, tensor.device, tensor)
    # A tensor of a framework can only be there if the framework is.
    if (torch := sys.modules.get("torch")) is not None and isinstance(tensor, torch.Tensor):
        return _describe_torch(name, tensor)
    if (jax := sys.modules.get("jax")) is not None and isinstance(tensor, jax.Array):
        return _describe_numpy(name, _jax_on_host(name, tensor))
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(tensor, numpy.ndarray):
        return _describe_numpy(name, tensor)
    if (paddle := sys.modules.get("paddle")) is not None and isinstance(tensor, paddle.Tensor):
        return _describe_paddle(name, tensor)
    raise _refusal(
        name, f"{type(tensor).__qualname__} is not a tensor of torch, numpy, jax, paddle or hoistway"
    )


def _describe_torch(name: str, tensor: Any) -> Described:
    if str(tensor.layout) != "torch.strided":
        raise _refusal(name, f"its layout is {tensor.layout}; save tensor.to_dense()")
    if not tensor.is_contiguous():
        raise _refusal(name, "it is not contiguous; save tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise _refusal(name, "its values are still to be computed; save tensor.resolve_conj().resolve_neg()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise _refusal(name, f"it is on device {tensor.device}; save tensor.cpu()")
    dtype = _dtype(name, str(tensor.dtype).removeprefix("torch."))
    shape = tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise _refusal(name, "a scalar of type float4_e2m1fn_x2 holds two elements; give it a dimension")
        shape = (*shape[:-1], 2 * shape[-1])
    nbytes = tensor.numel() * tensor.element_size()
    if shortfall := torch_shortfall(tensor):
        raise _refusal(name, shortfall)
    # Its storage, so that the memory stays when the tensor is given other memory; and first, so that the address
    # is not older.
    storage = tensor.untyped_storage()
    address = tensor.data_ptr() if nbytes else 0
    if nbytes and not address:
        raise _refusal(name, f"a {type(tensor).__qualname__} has no memory that holds its values")
    return Described(name, dtype, shape, address, nbytes, device_name(tensor.device, "torch"), storage)


def _describe_numpy(name: str, array: Any) -> Described:
    import numpy as np  # noqa: PLC0415

    if not array.flags.c_contiguous:
        raise _refusal(name, "it is not contiguous; save numpy.ascontiguousarray(array)")
    dtype = _dtype(name, array.dtype.name)
    shape = array.shape
    if shortfall := numpy_shortfall(array):
        raise _refusal(name, shortfall)
    if not array.dtype.isnative:
        array = array.byteswap()
    if dtype == "F4":
        halves = array.reshape(-1).view(np.uint8)
        if halves.size % 2:
            raise _refusal(name, "its elements of half a byte do not fill whole bytes")
        array = (halves[::2] & 0x0F) | (halves[1::2] << 4)
    return Described(name, dtype, shape, array.ctypes.data, array.nbytes, "cpu", array)


def _describe_paddle(name: str, tensor: Any) -> Described:
    dtype = _dtype(name, str(tensor.dtype).removeprefix("paddle."))
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    if nbytes and not tensor._is_initialized():
        raise _refusal(name, "its memory was cleared")
    if not tensor.place.is_cpu_place():
        raise _refusal(name, f"it is in {tensor.place}; save tensor.cpu()")
    # Paddle says of tensors without elements that they are not contiguous.
    if nbytes and not tensor.is_contiguous():
        raise _refusal(name, "it is not contiguous; save tensor.contiguous()")
    if nbytes and tensor._offset() + nbytes > tensor._holder_size():
        raise _refusal(name, f"it needs {nbytes} bytes, more than its memory has")
    address = tensor.data_ptr() if nbytes else 0
    return Described(name, dtype, tuple(tensor.shape), address, nbytes, "cpu", tensor)


def _jax_on_host(name: str, array: Any) -> Any:
    import numpy as np  # noqa: PLC0415

    if array.is_deleted():
        raise _refusal(name, "its memory was deleted, or donated to a computation")
    if not array.is_fully_addressable or any(device.platform != "cpu" for device in array.devices()):
        raise _refusal(name, "it is not in the memory of this host; save jax.device_get(array)")
    return np.asarray(array)


def _dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        raise UnsupportedDtypeError(
            f"tensor {name!r} cannot be saved: safetensors files have no type {dtype}", tensor=name
        )
    return DTYPES[dtype]


def _refusal(name: str, reason: str) -> OptionError:
    return OptionError(f"tensor {name!r} cannot be saved: {reason}", tensor=name)
