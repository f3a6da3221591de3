"""hoistway moves tensors from storage to memory at the speed of the hardware, and reports how.

Examples:
    >>> import hoistway
    >>> tensors = hoistway.load_file("model.safetensors")  # doctest: +SKIP
    >>> print(tensors.report)  # doctest: +SKIP
"""

from __future__ import annotations

from hoistway import _native, _start, errors
from hoistway.errors import HoistwayError

# As type checkers know it: the module `typing` is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hoistway._checkpoint import Checkpoint, LoadedTensors, TensorSlice, load_file
    from hoistway._doctor import Checks, doctor
    from hoistway._layers import Layer, LayerStream, stream_layers
    from hoistway._memory import MemoryLimit, memory_limits
    from hoistway._metadata import MetadataArray
    from hoistway._metrics import MetricsCollector, metrics
    from hoistway._native import MemoryPool, Tensor
    from hoistway._one_shot import iter_tensors, load
    from hoistway._options import LoadOptions, ReaderOptions, StoreOptions
    from hoistway._reader import Reader, Reading
    from hoistway._report import Carrier, Refusal, Report
    from hoistway._save import SaveReport, save, save_file, save_sharded
    from hoistway._stream import TensorStream
    from hoistway._trace import trace

    open = Checkpoint  # noqa: A001  (the name that people look for, as in gzip.open)

__version__: str = _native.version()

_start.start()

_SUBPACKAGES = ("compat", "distributed", "experts", "kv", "plugins")

_MODULES = {
    "_checkpoint": ("Checkpoint", "LoadedTensors", "TensorSlice", "load_file"),
    "_doctor": ("Checks", "doctor"),
    "_layers": ("Layer", "LayerStream", "stream_layers"),
    "_memory": ("MemoryLimit", "memory_limits"),
    "_metadata": ("MetadataArray",),
    "_metrics": ("MetricsCollector", "metrics"),
    "_native": ("MemoryPool", "Tensor"),
    "_one_shot": ("iter_tensors", "load"),
    "_options": ("LoadOptions", "ReaderOptions", "StoreOptions"),
    "_reader": ("Reader", "Reading"),
    "_report": ("Carrier", "Refusal", "Report"),
    "_save": ("SaveReport", "save", "save_file", "save_sharded"),
    "_stream": ("TensorStream",),
    "_trace": ("trace",),
}
"""The public names of each module. In the command's process, which uses none, it is imported when one is first used."""

_HOMES = {name: (module, name) for module, names in _MODULES.items() for name in names}
_HOMES["open"] = ("_checkpoint", "Checkpoint")


def __getattr__(name: str) -> Any:
    """Imports a subpackage when it is first used, as some need torch; in the command's process, public names too."""
    import importlib  # noqa: PLC0415  (not needed by the command)

    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        # On a thread of the caller: Python before 3.13 takes the thread that imports `threading` for the main one, and
        # the engine would import it on its own.
        importlib.import_module(f"{__name__}._logging")
        module, defined = _HOMES[name]
        value = getattr(importlib.import_module(f"{__name__}.{module}"), defined)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, *_SUBPACKAGES])


def release_devices() -> None:
    """Releases the devices that nothing uses, and the device memory that their contexts take.

    Without this call the process keeps each device that it used, because opening one takes up to half a second. A
    released device is opened again when it is needed.

    The call waits for a device that may still use hoistway's memory. After Ctrl-C the release goes on without the
    caller.
    """
    import threading  # noqa: F401, PLC0415  (before the engine imports it for an event; see `__getattr__`)

    _native.release_devices()


__all__ = [
    "Carrier",
    "Checkpoint",
    "Checks",
    "HoistwayError",
    "Layer",
    "LayerStream",
    "LoadOptions",
    "LoadedTensors",
    "MemoryLimit",
    "MemoryPool",
    "MetadataArray",
    "MetricsCollector",
    "Reader",
    "ReaderOptions",
    "Reading",
    "Refusal",
    "Report",
    "SaveReport",
    "StoreOptions",
    "Tensor",
    "TensorSlice",
    "TensorStream",
    "__version__",
    "doctor",
    "errors",
    "iter_tensors",
    "load",
    "load_file",
    "memory_limits",
    "metrics",
    "open",
    "release_devices",
    "save",
    "save_file",
    "save_sharded",
    "stream_layers",
    "trace",
]

if not _start.is_command():
    # At once: a program may give up the right to read these files, and a child that is forked while another thread
    # imports one of them could never import it.
    for _name in _HOMES:
        __getattr__(_name)
