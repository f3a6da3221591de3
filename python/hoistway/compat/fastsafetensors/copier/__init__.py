"""Copiers of your own: what programs import of `fastsafetensors.copier`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._absent import absent
from hoistway.compat.fastsafetensors._copiers import register_copier_constructor
from hoistway.compat.fastsafetensors.copier.base import CopierInterface

_ROUTE = "what its copiers do is done by the engine; name one as copier_type= of a loader"

__getattr__ = absent(
    "fastsafetensors.copier",
    dict.fromkeys(
        [
            "CopierConstructFunc",
            "CopierType",
            "FgdsFileCopier",
            "GdsFileCopier",
            "NoGdsFileCopier",
            "ThreeFSFileCopier",
            "UnifiedMemCopier",
            "copier_class_of",
            "create_copier_constructor",
            "get_copier_class",
        ],
        _ROUTE,
    ),
)

__all__ = ["CopierInterface", "register_copier_constructor"]
