"""Devices by type and number, and the NUMA node that one is near to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hoistway._devices import of_number


class DeviceType(Enum):
    """Kinds of devices."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device: its kind, and its number if one is named."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """Its name as torch has it."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    def as_own(self) -> str:
        """Its name as hoistway has it: paddle says ``gpu``, and builds of torch for ROCm say ``cuda``."""
        if self.type is DeviceType.CPU:
            return self.as_str()
        kind = of_number(0).partition(":")[0]
        return kind if self.index is None else f"{kind}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """The device of a name such as ``cuda:1``."""
        kind, colon, index = s.partition(":")
        try:
            device_type = DeviceType(kind.lower())
        except ValueError as error:
            raise ValueError(f"device cannot be {s!r}: it must be cpu, cuda or cuda:N") from error
        if colon and not index.isdecimal():
            raise ValueError(f"device cannot be {s!r}: {index!r} is not a number of a device")
        return cls(device_type, int(index) if colon else None)

    @classmethod
    def of(cls, device: Any) -> Device:
        """The device of a name, a number, torch's or this package's own."""
        if isinstance(device, Device):
            return device
        if isinstance(device, int) and not isinstance(device, bool):
            return cls(DeviceType.CUDA, device)
        return cls.from_str(str(device))


def get_device_numa_node(device: int | None) -> int | None:
    """The NUMA node that a CUDA device is near to; `None` if there is no such device or its node is unknown."""
    if device is None:
        return None
    import torch  # noqa: PLC0415

    if not 0 <= device < torch.cuda.device_count():
        return None
    seen: Any = torch.cuda.get_device_properties(device)
    address = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
    try:
        return int(Path("/sys/bus/pci/devices", address, "numa_node").read_text())
    except OSError:
        return None
