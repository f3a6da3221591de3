"""Settings of `AutoLoader`: what `fastsafetensors.config` has."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._config import LoaderConfig, load_config

__all__ = ["LoaderConfig", "load_config"]
