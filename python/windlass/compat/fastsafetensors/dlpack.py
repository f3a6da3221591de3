"""Not offered: windlass exports its tensors by DLPack itself."""

from __future__ import annotations

raise ImportError(
    "windlass has no fastsafetensors.dlpack: use __dlpack__ of the tensors that windlass.load_file gives with "
    "framework='raw'"
)
