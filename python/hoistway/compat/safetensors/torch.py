"""Tensors and models of torch, in files and in bytes: what `safetensors.torch` has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hoistway._backing import torch_shortfall
from hoistway.compat.safetensors._bytes import check_backing, load_bytes, save_bytes, write_file
from hoistway.compat.safetensors._errors import SafetensorError
from hoistway.compat.safetensors._safe_open import safe_open

if TYPE_CHECKING:
    from os import PathLike


def load_file(
    filename: str | PathLike[str], device: str | int = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a file; the dictionary says how in its attribute ``report``."""
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        tensors: dict[str, torch.Tensor] = file.get_tensors()
        return tensors


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Loads all tensors from the bytes of a file."""
    return load_bytes(data, "torch")


def save_file(
    tensors: dict[str, torch.Tensor], filename: str | PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors to a file. The name has the old file, whole, until the new one is."""
    write_file(_checked(tensors), filename, metadata)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file of these tensors."""
    return save_bytes(_checked(tensors), metadata)


def save_model(
    model: torch.nn.Module,
    filename: str | PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Writes a model's tensors to a file: of those that share memory one, and who shares it in the metadata.

    Args:
        model: The model.
        filename: The file.
        metadata: What else the file should say about itself. It wins over the names of tensors that share memory.
        force_contiguous: Whether to write tensors in the order of their indices that lie otherwise in memory; an
            error if not.
    """
    state = dict(model.state_dict())
    strided = {name: tensor for name, tensor in state.items() if tensor.layout == torch.strided}
    check_backing(strided, torch_shortfall)
    aliases = {alias: kept for kept, removed in _remove_duplicate_names(state).items() for alias in removed}
    for alias in aliases:
        del state[alias]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    if aliases:
        metadata = {**aliases, **(metadata or {})}
    try:
        save_file(state, filename, metadata=metadata)
    except _NotContiguousError as error:
        raise ValueError(f"{error} Or use save_model(..., force_contiguous=True).") from None


def load_model(
    model: torch.nn.Module,
    filename: str | PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file into a model.

    Args:
        model: The model.
        filename: The file.
        strict: Whether names that only the model or only the file has are an error.
        device: Where to load the tensors before they are copied into the model.
        backend: As for `safe_open`.

    Returns:
        The names that only the model has, and those that only the file has.
    """
    state = load_file(filename, device=device, backend=backend)
    aliases = _remove_duplicate_names(dict(model.state_dict()), preferred_names=state)
    only_model, unexpected = model.load_state_dict(state, strict=False)
    missing = set(only_model)
    for alias in (alias for removed in aliases.values() for alias in removed):
        # Its memory was filled by the name that was kept.
        if alias in missing:
            missing.remove(alias)
        else:
            unexpected.append(alias)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {what} key(s) in state_dict: {quoted}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


class _NotContiguousError(ValueError):
    """A tensor's elements do not lie in the order of their indices."""


def _checked(tensors: Any) -> dict[str, torch.Tensor]:
    """The values of tensors that a file can hold, each of which has memory of its own."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise ValueError(f"tensors {sparse} are sparse, which files cannot hold: save their `.to_dense()`")
    check_backing(tensors, torch_shortfall)
    if shared := [sorted(names) for names in _find_shared_tensors(tensors) if len(names) > 1]:
        raise RuntimeError(
            f"Some tensors share memory: {shared}. A file would hold it more than once, and what is loaded from it "
            "would share it no more. Leave all but one of each out, or use save_model."
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise _NotContiguousError(
                f"tensor `{name}` is not contiguous: save its `.contiguous()`, or, if it is part of another, that one."
            )
    return {name: _readable(tensor.detach()) for name, tensor in tensors.items()}


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose bytes are its values, where hoistway can read them."""
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.to("cpu")
    return tensor.resolve_conj().resolve_neg()


def storage_ptr(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: torch.Tensor) -> int:
    """Size in bytes of the memory that a tensor lies in."""
    return tensor.untyped_storage().nbytes()


def _find_shared_tensors(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Names of the tensors, those together that have bytes in common."""
    storages: dict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) != 0 and storage_size(tensor) != 0:
            storages[tensor.device, storage_ptr(tensor), storage_size(tensor)].append(name)
    groups: list[set[str]] = []
    for names in storages.values():
        groups.extend([set(names)] if len(names) == 1 else _overlapping(tensors, names))
    return groups


def _overlapping(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[set[str]]:
    spans = sorted((tensors[name].data_ptr(), _end_ptr(tensors[name]), name) for name in names)
    groups: list[set[str]] = []
    end = 0
    for start, stop, name in spans:
        if groups and start < end:
            groups[-1].add(name)
        else:
            groups.append({name})
        end = max(end, stop)
    return groups


def _end_ptr(tensor: torch.Tensor) -> int:
    """Where the byte after a tensor's last one is."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = 0 if tensor.numel() == 0 else (last + 1) * tensor.element_size()
    return tensor.data_ptr() + length


def _is_complete(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of the memory that it lies in."""
    return tensor.data_ptr() == storage_ptr(
        tensor
    ) and tensor.numel() * tensor.element_size() == storage_size(tensor)


def _remove_duplicate_names(
    state_dict: dict[str, torch.Tensor],
    *,
    preferred_names: Collection[str] | None = None,
    discard_names: Collection[str] | None = None,
) -> dict[str, list[str]]:
    """Of tensors that share memory the name to keep, and with it the names to leave out."""
    removed: dict[str, list[str]] = {}
    for shared in _find_shared_tensors(state_dict):
        complete = {name for name in shared if _is_complete(state_dict[name])}
        if not complete:
            names = ", ".join(repr(name) for name in sorted(shared))
            raise RuntimeError(
                f"The memory of {names} is larger than any one of these tensors: a model of such views is neither "
                "saved nor loaded. Give each tensor memory of its own, for instance by clone()."
            )
        wanted = complete & set(preferred_names or ()) or complete - set(discard_names or ()) or complete
        kept = min(wanted)
        if others := sorted(shared - {kept}):
            removed[kept] = others
    return removed


__all__ = [
    "SafetensorError",
    "load",
    "load_file",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]
