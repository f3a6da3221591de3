"""Not offered: hoistway exports its tensors by DLPack itself."""

from __future__ import annotations

raise ImportError(
    "hoistway has no fastsafetensors.dlpack: use __dlpack__ of the tensors that hoistway.load_file gives with "
    "framework='raw'"
)
