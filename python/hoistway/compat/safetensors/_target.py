"""Which framework and device a file is opened for: what the reference library takes, and what hoistway can do of it."""

from __future__ import annotations

import operator
from typing import Any

from hoistway._devices import of_number, of_torchs_text
from hoistway._frameworks import Framework
from hoistway.compat.safetensors._errors import NotCarriedError, safetensor_error
from hoistway.errors import OptionError

_FRAMEWORKS: dict[str, Framework] = {
    "pt": "torch",
    "torch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "jax": "jax",
    "flax": "jax",
}
_OTHER_FRAMEWORKS = ("tf", "tensorflow", "mlx", "paddle")
_OTHER_DEVICES = ("mps", "xpu", "npu", "xla", "mlu", "hpu", "musa")
_BACKENDS = ("mmap", "pread")


def check_framework(framework: Any) -> Framework:
    """The framework of hoistway's by this name."""
    _check_text("framework", framework)
    if framework in _OTHER_FRAMEWORKS:
        raise NotCarriedError(
            f"hoistway.compat.safetensors loads no tensors of framework {framework!r}, only of torch, numpy and jax"
        )
    if framework not in _FRAMEWORKS:
        raise safetensor_error(OptionError, f"framework {framework} is invalid")
    return _FRAMEWORKS[framework]


def check_device(device: Any) -> str:
    """The device as hoistway names it. Without a number it is the first of its kind, not torch's current one."""
    if device is None or (isinstance(device, str) and device == "cpu"):
        return "cpu"
    if not isinstance(device, str):
        return of_number(_ordinal(device))
    kind, _, number = device.partition(":")
    if (kind != "cuda" and kind not in _OTHER_DEVICES) or ":" in number:
        raise safetensor_error(OptionError, f"device {device} is invalid")
    is_number = number.isascii() and number.removeprefix("+").isdigit() and int(number) < 1 << 64
    if device != kind and not is_number:
        raise ValueError(f"device {device} is invalid: {number!r} is not a number of a device")
    if kind in _OTHER_DEVICES:
        raise NotCarriedError(f"hoistway loads to cpu, cuda and rocm, not to device {device!r}")
    return of_torchs_text(kind, int(number or 0))


def check_backend(backend: Any) -> str:
    """A backend of the reference library; both are the routes of hoistway."""
    _check_text("backend", backend)
    if backend not in _BACKENDS:
        raise safetensor_error(
            OptionError, f'backend "{backend}" is invalid: it must be one of "mmap", "pread"'
        )
    return str(backend)


def check_place(framework: Framework, device: str) -> None:
    """Whether the framework's tensors can be there."""
    if framework != "torch" and device != "cpu":
        raise safetensor_error(OptionError, f"Device {device} is not supported for framework {framework}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"argument {name!r}: {value!r} is not an instance of 'str'")


def _ordinal(device: Any) -> int:
    try:
        ordinal = operator.index(device)
    except TypeError:
        ordinal = -1
    if not 0 <= ordinal < 1 << 32:
        raise safetensor_error(OptionError, f"device {device!r} is invalid")
    return ordinal
