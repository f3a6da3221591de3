"""Names of devices. Builds of torch for ROCm call their devices ``cuda``, and so do engines that are built on torch.

This module translates between names of torch and names of hoistway.
"""

from __future__ import annotations

import os
import sys

from hoistway import _native
from hoistway.errors import OptionError

# As type checkers know it: the command starts sooner without the module `typing`, and without others.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KINDS = {1: "cpu", 2: "cuda", 10: "rocm", 13: "cuda"}
"""Kinds of devices by their numbers in DLPack. The last is managed memory of CUDA."""


def package_directories(name: str) -> list[str]:
    """The folder of an installed package, imported or not."""
    if name in sys.modules:
        spec = getattr(sys.modules[name], "__spec__", None)
    else:
        # As importlib.util.find_spec, whose import takes longer than this.
        finders = (find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)))
        try:
            spec = next(filter(None, (find(name, None) for find in finders)), None)
        except ValueError:
            # A finder may raise it for a module that does not say where it is from.
            return []
    return list(spec.submodule_search_locations or []) if spec else []


def torch_kind(torch: Any) -> str:
    """The name in hoistway of the devices that a build of torch calls ``cuda``."""
    return "rocm" if getattr(torch.version, "hip", None) else "cuda"


def of_torch(torch: Any, kind: str, ordinal: int) -> str:
    """A device that torch names, such as ``cuda`` and 1."""
    return f"{torch_kind(torch) if kind == 'cuda' else kind}:{ordinal}"


def of_number(number: Any) -> str:
    """The device of a number alone: of the kind that torch is built for, imported or not; else of CUDA."""
    import operator  # noqa: PLC0415

    return f"{_kind()}:{operator.index(number)}"


def _kind() -> str:
    torch = sys.modules.get("torch")
    return torch_kind(torch) if hasattr(torch, "version") else _installed_kind()


_installed: str | None = None
"""What `_installed_kind` has found."""


def _installed_kind() -> str:
    """As `torch_kind`, for the installed torch, from its version file."""
    global _installed  # noqa: PLW0603
    if _installed is None:
        _installed = "rocm" if any(map(_is_for_rocm, package_directories("torch"))) else "cuda"
    return _installed


def _is_for_rocm(torch: str) -> bool:
    try:
        with open(os.path.join(torch, "version.py"), encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return False
    # One is `hip: Optional[str] = '7.0'`, or has `None`.
    assignments = (line.partition("=") for line in lines)
    return any(
        name.partition(":")[0].strip() == "hip" and value.lstrip()[:1] in ("'", '"')
        for name, _, value in assignments
    )


def of_torchs_text(kind: str, ordinal: int) -> str:
    """A device that text names, where names of torch are accepted."""
    return of_number(ordinal) if kind == "cuda" else f"{kind}:{ordinal}"


def of_text(name: str) -> str:
    """A device that text names; ``hip`` means ``rocm``."""
    kind, colon, ordinal = name.partition(":")
    return "rocm" + colon + ordinal if kind == "hip" else name


def of_dlpack(device: tuple[int, int]) -> str | None:
    """The device of a ``__dlpack_device__``; ``None`` if hoistway does not support its kind."""
    kind, ordinal = device
    name = _KINDS.get(int(kind))
    return name if name in (None, "cpu") else f"{name}:{int(ordinal)}"


def dlpack_kind(name: str) -> int:
    """DLPack's number of the kind of a device."""
    kind = name.partition(":")[0]
    return next(number for number, known in _KINDS.items() if known == kind)


def to_torch(torch: Any, name: str) -> str:
    """The name in torch of a device of hoistway. Fails if torch is built for other devices."""
    kind, colon, ordinal = name.partition(":")
    if kind == "cpu":
        return name
    if kind != torch_kind(torch):
        raise OptionError(
            f"device {name!r} cannot be used by this torch, which is built for {torch_kind(torch)}: choose one of "
            "its devices, or install a build for this one"
        )
    return "cuda" + colon + ordinal


_has_told = False
"""Whether `find_libraries` was called."""


def find_libraries() -> None:
    """Tells the engine where Python packages keep the libraries of device vendors, once."""
    global _has_told  # noqa: PLW0603
    if _has_told:
        return
    packages = {"nvidia": ("cu13/lib", "cufile/lib"), "_rocm_sdk_core": ("lib",)}
    if _kind() == "rocm":
        packages["torch"] = ("lib",)
    for package, directories in packages.items():
        for root in package_directories(package):
            for directory in directories:
                _native.search_libraries_in(os.path.join(root, directory))
    _has_told = True
