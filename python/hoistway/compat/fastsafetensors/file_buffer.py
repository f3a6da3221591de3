"""Loaded files: what `fastsafetensors.file_buffer` has."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._files_buffer import FilesBufferOnDevice

__all__ = ["FilesBufferOnDevice"]
