"""The register of copiers: what programs import of `fastsafetensors.copier.registry`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._copiers import register_copier_constructor

__all__ = ["register_copier_constructor"]
