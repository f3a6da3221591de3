"""The machine that figures are measured on."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from loaders import processor_count

HERE = Path(__file__).resolve().parent


def machine(path: Path, packages: tuple[str, ...]) -> dict[str, Any]:
    """What the figures were measured on."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    with open("/proc/meminfo") as file:
        memory = int(next(line.split()[1] for line in file if line.startswith("MemTotal"))) * 1024
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        huge_pages = file.read().split("[")[1].split("]")[0]
    mount = told_by("findmnt", "-no", "FSTYPE,SOURCE", "-T", str(path))
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": processor_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "transparent_huge_pages": huge_pages,
        "file_system": mount,
        "virtual_machine": told_by("systemd-detect-virt", "--vm"),
        "commit": told_by("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def told_by(*command: str) -> str:
    """What a program says about the machine, if the machine has it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return " ".join(done.stdout.split()) or "unknown"
