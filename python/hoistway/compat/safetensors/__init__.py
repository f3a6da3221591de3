"""hoistway behind the interface of safetensors.

Examples:
    >>> from hoistway.compat.safetensors import safe_open
    >>> from hoistway.compat.safetensors.torch import load_file, save_file
    >>> import hoistway.compat.safetensors
    >>> hoistway.compat.safetensors.install()  # doctest: +SKIP
"""

from hoistway.compat.safetensors._errors import NotCarriedError, SafetensorError
from hoistway.compat.safetensors._install import Installation, PassedOn, install, uninstall
from hoistway.compat.safetensors._reports import FileReport, last_report, reports
from hoistway.compat.safetensors._safe_open import PySafeSlice, _safe_open_handle, safe_open
from hoistway.compat.safetensors._serialize import TensorSpec, deserialize, serialize, serialize_file

__version__ = "0.8.0"  # of the interface

__all__ = [
    "FileReport",
    "Installation",
    "NotCarriedError",
    "PassedOn",
    "PySafeSlice",
    "SafetensorError",
    "TensorSpec",
    "_safe_open_handle",
    "deserialize",
    "install",
    "last_report",
    "reports",
    "safe_open",
    "serialize",
    "serialize_file",
    "uninstall",
]

if globals().pop("_is_awaited", False):
    # Safetensors was imported on the way, in a program of `hoistway run`.
    install()
