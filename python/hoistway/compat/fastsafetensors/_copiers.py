"""Copiers: the routes of hoistway that stand for those of fastsafetensors, and copiers of your own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hoistway import _native
from hoistway._options import LoadOptions
from hoistway.compat.fastsafetensors._devices import Device, DeviceType
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._framework import FrameworkOpBase, TensorBase
from hoistway.compat.fastsafetensors._ignored import warn_without_effect
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata
from hoistway.errors import OptionError, TensorNotFoundError, UnsupportedDtypeError

Constructor = Callable[[SafeTensorsMetadata, Device, Any], Any]
"""Makes the copier of one file."""

_registered: dict[str, Callable[..., Constructor]] = {}

# Arguments of `hoistway.Checkpoint` that are no options of loads.
_OF_CHECKPOINTS = {"allocator", "lenient"}
_REFUSED = {
    "fgds": "hoistway reaches devices past host memory by cuFile alone; choose gds or nogds",
}


def register_copier_constructor(
    copier_type: str, copier_class: type | None = None
) -> Callable[[Callable[..., Constructor]], Callable[..., Constructor]]:
    """Registers a copier of your own, under a new name or in place of a known one.

    Args:
        copier_type: Its name, which `SafeTensorsFileLoader` takes as ``copier_type=``.
        copier_class: What it makes. Nothing asks for it here.

    Returns:
        A decorator of a function that takes a device and options and returns one that takes a file's metadata, the
        device and the framework, and makes an object with ``submit_io`` and ``wait_io``.
    """
    del copier_class

    def register(factory: Callable[..., Constructor]) -> Callable[..., Constructor]:
        _registered[copier_type] = factory
        return factory

    return register


def registered(copier_type: str, device: Device, options: Mapping[str, Any]) -> Constructor | None:
    """The registered copier of this name."""
    factory = _registered.get(copier_type)
    return None if factory is None else factory(device, **options)


def load_options(
    copier_type: str, device: Device, max_threads: int | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of loads that a copier's name, the environment and further arguments ask for.

    Args:
        copier_type: The copier.
        device: Where tensors go.
        max_threads: Most threads, where the caller limits them.
        extra: Options of hoistway's own, which win.
    """
    unknown = set(extra) - set(LoadOptions.__annotations__) - _OF_CHECKPOINTS
    if unknown:
        names = ", ".join([*LoadOptions.__annotations__, *sorted(_OF_CHECKPOINTS)])
        raise OptionError(f"argument cannot be {min(unknown)!r}: further arguments are {names}")
    options = {"route": _route(copier_type, device), "direct": _direct(), "threads": max_threads, **extra}
    if device.type is not DeviceType.CPU and options["route"] != "unified":
        # Engines count on the weights' memory coming back to torch.
        options.setdefault("allocator", "torch")
    chosen = {name: value for name, value in options.items() if value is not None}
    checked = {name: value for name, value in chosen.items() if name not in _OF_CHECKPOINTS}
    _native.check_options(device=device.as_own(), **checked)
    return chosen


def options_of_3fs(given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The mount point that the files must be on, if any, and the options of hoistway's for those of a 3FS."""
    options = dict(given)
    mount_point = options.pop("mount_point", None)
    usual = {"entries": 64, "io_depth": 0}
    warn_without_effect({name: options.pop(name, value) for name, value in usual.items()}, usual)
    buffer_size = options.pop("buffer_size", None)
    if buffer_size is not None:
        options.setdefault("in_flight", buffer_size)
    return None if not mount_point else str(mount_point).strip() or None, options


def _route(copier_type: str, device: Device) -> str | None:
    on_device = device.type is not DeviceType.CPU
    if copier_type == "nogds" and on_device and os.environ.get("FASTSAFETENSORS_UNIFIED_MEM") == "1":
        return "unified"
    routes = {
        "gds": "gds" if on_device else None,
        "nogds": "staged" if on_device else None,
        "unified": "unified",
        "3fs": "usrbio",
        "dstorage": "directstorage",
    }
    folder = os.environ.get("FASTSAFETENSORS_DSTORAGE_DLL_DIR")
    if copier_type == "dstorage" and folder:
        os.environ.setdefault("HOISTWAY_DIRECTSTORAGE_DIR", folder)
    if copier_type in _REFUSED:
        raise OptionError(f"copier cannot be {copier_type!r}: {_REFUSED[copier_type]}")
    if copier_type not in routes:
        names = ", ".join([*routes, *_registered])
        raise OptionError(f"copier cannot be {copier_type!r}: it must be one of {names}")
    return routes[copier_type]


def _direct() -> str | None:
    return {"0": "never", "1": "always"}.get(os.environ.get("FASTSAFETENSORS_ODIRECT", ""))


def copy_with(
    construct: Constructor,
    metadata: SafeTensorsMetadata,
    device: Device,
    keep: Callable[[str], bool],
    *,
    framework: FrameworkOpBase[Any],
    dtype: DType,
    use_buf_register: bool,
    max_copy_block_size: int,
) -> dict[str, TensorBase]:
    """The tensors of one file by a registered copier, which must bring all that are wanted."""
    copier = construct(metadata, device, framework)
    wanted = [name for name in metadata.tensors if keep(name)]
    if len(wanted) < len(metadata.tensors) and hasattr(copier, "set_byte_ranges"):
        copier.set_byte_ranges(metadata.select_byte_ranges(keep))
    buffer = copier.submit_io(use_buf_register, max_copy_block_size)
    brought = copier.wait_io(buffer, dtype=dtype, noalign=False)
    tensors: dict[str, TensorBase] = {}
    for name in wanted:
        if name not in brought:
            raise TensorNotFoundError(
                f"{metadata.src}: the copier did not bring tensor {name!r}", path=metadata.src, tensor=name
            )
        tensors[name] = framework.wrap_tensor(brought[name].get_raw())
        frame = metadata.tensors[name]
        expected = frame.dtype if dtype is DType.AUTO else dtype
        if tensors[name].dtype is not expected or tensors[name].get_shape() != frame.shape:
            raise UnsupportedDtypeError(
                f"{metadata.src}: the copier brought tensor {name!r} as {tensors[name].dtype.value} "
                f"{tensors[name].get_shape()} instead of {expected.value} {frame.shape}",
                path=metadata.src,
                tensor=name,
            )
    return tensors
