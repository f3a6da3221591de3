"""What the machine has: a line of JSON. Runs as a process, since frameworks are imported to see what works."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu.driver import Driver, DriverError, NoGpuError, vendor
from gpu.process import answers, tell

PACKAGES = (
    "hoistway",
    "numpy",
    "torch",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
    "instanttensor",
    "nvidia-cufile",
    "jax",
    "cupy-cuda13x",
    "ml_dtypes",
)


def main() -> None:
    """Describes the machine, and the file systems of the folders on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="the first device alone")
    parser.add_argument("folders", nargs="*")
    arguments = parser.parse_args()
    folders = arguments.folders
    lines = answers()
    if arguments.gpu:
        tell(lines, **_gpu())
        return
    tell(
        lines,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        processor=_first_of("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int((_first_of("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024,
        kernel=platform.release(),
        virtual_machine=told_by("systemd-detect-virt", "--vm"),
        file_systems={folder: told_by("findmnt", "-no", "FSTYPE,SOURCE", "-T", folder) for folder in folders},
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        gpu=_gpu(),
        torch=_torch(),
        hoistway=_hoistway(folders),
    )


def _gpu() -> dict[str, Any]:
    try:
        driver = Driver()
    except (NoGpuError, DriverError) as error:
        return {"missing": str(error)}
    wanted = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    link = told_by("nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader", "--id=0")
    return {
        "name": driver.name(),
        "devices": driver.device_count(),
        "memory_bytes": driver.memory()[1],
        "vendor": driver.vendor.title,
        "version": driver.version(),
        "driver, PCIe generation, lanes": link,
        "nvidia_fs": Path("/proc/driver/nvidia-fs").exists(),
        "loadable_modules": Path("/proc/modules").exists(),
        "kernel_driver": _first_line("/proc/driver/nvidia/version"),
    }


def _torch() -> str | None:
    """Why torch cannot be used with the device; `None` if it can."""
    if vendor().variable in os.environ:
        return "torch does not know the stand-in driver"
    try:
        import torch  # noqa: PLC0415

        torch.zeros(1, device="cuda:0")
    except Exception as error:
        return f"torch: {type(error).__name__}: {error}"
    return None


def _hoistway(folders: list[str]) -> dict[str, Any]:
    try:
        import hoistway  # noqa: PLC0415

        return {"version": hoistway.__version__, "doctor": hoistway.doctor(*folders)}
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def told_by(*command: str) -> str:
    """What a program says about the machine, if the machine has it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return " ".join(done.stdout.split()) or "unknown"


def _first_of(path: str, key: str) -> str | None:
    lines = Path(path).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
