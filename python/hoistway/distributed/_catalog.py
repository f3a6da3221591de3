"""The contents of a checkpoint, as planning needs them: plain data, equal on every rank that opened the same files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from hoistway._lazy import lazy
from hoistway.errors import SliceError, UnsupportedDtypeError

if TYPE_CHECKING:
    from hoistway._checkpoint import Checkpoint


class Entry(NamedTuple):
    """A tensor. Scalars have one dimension here, so that every tensor has rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: int
    """Elements along the last dimension that cannot be told apart: those of a block, or of a byte."""
    is_scalar: bool
    row_dim: int
    """The dimension whose parts are contiguous: the first that is longer than one."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.shape[self.row_dim]

    @property
    def can_be_cut(self) -> bool:
        """Whether any number of rows can be read by themselves."""
        return self.rows > 1 and (self.unit == 1 or self.row_dim < len(self.shape) - 1)


class File(NamedTuple):
    """A file of the checkpoint."""

    name: str
    """Without directories, in which ranks may differ."""
    nbytes: int
    identity: tuple[tuple[str, ...], str, bool]
    """Its path, also without links, or its URL; which file was opened; and whether these mean the same on all hosts."""


class Element(NamedTuple):
    """How loaded tensors hold the elements of a type."""

    torch_dtype: Any
    nbytes: int
    per: int
    """Elements in ``nbytes`` bytes."""


@dataclass(frozen=True)
class Catalog:
    """The tensors in the order of the checkpoint, and the files."""

    entries: tuple[Entry, ...]
    elements: Mapping[str, Element]
    files: tuple[File, ...]

    def bytes_shape(self, tensor: int, dim: int | None = None, size: int = 0) -> tuple[int, ...]:
        """Shape of a tensor's bytes, or of a part that has ``size`` elements along ``dim``."""
        entry = self.entries[tensor]
        element = self.elements[entry.dtype]
        shape = list(entry.shape)
        if dim is not None:
            shape[dim] = size
        shape[-1] = shape[-1] * element.nbytes // element.per
        return tuple(shape)

    def bytes_along(self, tensor: int, dim: int, elements: int) -> int:
        """Elements along a dimension, counted as `bytes_shape` counts that dimension."""
        entry = self.entries[tensor]
        if dim < len(entry.shape) - 1:
            return elements
        element = self.elements[entry.dtype]
        return elements * element.nbytes // element.per

    @lazy
    def whole_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor's bytes."""
        return tuple(self.bytes_shape(tensor) for tensor in range(len(self.entries)))

    @lazy
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(map(prod, self.whole_shapes))

    @lazy
    def digest(self) -> str:
        """Of names, types and shapes."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(f"{entry.name!r} {entry.dtype} {entry.is_scalar or entry.shape}\n".encode())
        return digest.hexdigest()


def read_entries(checkpoint: Checkpoint) -> tuple[Entry, ...]:
    """The tensors of an open checkpoint."""
    return tuple(_entry(name, *checkpoint._opened.info(name)) for name in checkpoint._opened.keys())  # noqa: SIM118


def read_catalog(checkpoint: Checkpoint, entries: tuple[Entry, ...], wanted: Sequence[bool]) -> Catalog:
    """The catalog of an open checkpoint, of whose tensors this rank wants some.

    Raises:
        UnsupportedDtypeError: A tensor that is wanted cannot be loaded.
    """
    return Catalog(
        entries,
        _elements(checkpoint, entries, wanted),
        tuple(_file(*facts) for facts in checkpoint._opened.file_facts()),
    )


def _file(path: str, nbytes: int, version: str | None, opened: tuple[int, int, int] | None) -> File:
    name = os.path.basename(path)
    if version is not None:
        # Paths of the hub have the commit; a file in its cache has no other version.
        return File(name, nbytes, ((path,), path if path.startswith("hf://") else version, True))
    # Another file may have taken the name by now: what was opened counts. Links may lead elsewhere on another rank.
    places = (os.path.abspath(path), os.path.realpath(path))
    return File(name, nbytes, (places, " ".join(map(str, opened or ())), False))


def _entry(name: str, dtype: str, shape: tuple[int, ...], block_len: int) -> Entry:
    unit = 2 if dtype == "F4" else block_len
    row_dim = next((dim for dim, size in enumerate(shape) if size > 1), max(len(shape) - 1, 0))
    return Entry(name, dtype, tuple(shape) or (1,), unit, not shape, row_dim)


def _elements(checkpoint: Checkpoint, entries: Sequence[Entry], wanted: Sequence[bool]) -> dict[str, Element]:
    """How the framework holds each type, learnt by loading as good as nothing of one tensor of each."""
    by_type: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=_worth, reverse=True):
        by_type.setdefault(entry.dtype, []).append(entry)
    # Whatever ranks want, they must take the same samples, as sizes decide the plan.
    with suppress(UnsupportedDtypeError, SliceError):
        return _sampled(checkpoint, [first for first, *_ in by_type.values()])
    wants = {entry.dtype: entry for entry, is_wanted in zip(entries, wanted, strict=True) if is_wanted}
    elements = {}
    for dtype, candidates in by_type.items():
        element = _first_sampled(checkpoint, candidates)
        if element is None and dtype in wants:
            element = _sampled(checkpoint, [wants[dtype]])[dtype]
        # If another rank wants one that cannot be loaded, it fails.
        elements[dtype] = element or Element(None, 0, 1)
    return elements


def _first_sampled(checkpoint: Checkpoint, candidates: Sequence[Entry]) -> Element | None:
    for entry in candidates:
        try:
            return _sampled(checkpoint, [entry])[entry.dtype]
        except SliceError:
            continue
        except UnsupportedDtypeError:
            # Files may differ in the order of bytes.
            if len(checkpoint.files()) == 1:
                return None
    return None


def _sampled(checkpoint: Checkpoint, samples: Sequence[Entry]) -> dict[str, Element]:
    if not samples:
        return {}
    slices = {entry.name: _sample(entry) for entry in samples if not entry.is_scalar}
    tensors = checkpoint.load(select=[entry.name for entry in samples], slices=slices)
    elements = {}
    for entry in samples:
        tensor = tensors[entry.name]
        size = tensor.element_size()
        is_sampled = entry.unit > 1 and entry.shape[-1] >= entry.unit
        elements[entry.dtype] = (
            Element(tensor.dtype, tensor.shape[-1] * size, entry.unit)
            if is_sampled
            else Element(tensor.dtype, size, 1)
        )
    return elements


def _worth(entry: Entry) -> tuple[bool, bool]:
    """Of which tensor the least must be read to learn of its type."""
    return entry.shape[-1] >= entry.unit, len(entry.shape) > 1


def _sample(entry: Entry) -> tuple[slice, ...]:
    last = entry.unit if entry.unit > 1 and entry.shape[-1] >= entry.unit else 0
    return (*(slice(0, 0) for _ in entry.shape[:-1]), slice(0, last))
