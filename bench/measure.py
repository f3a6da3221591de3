"""One measurement in a fresh process: loads once, and prints what it took as a line of JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import checksum
import numpy as np
from limits import refresh
from loaders import LOADERS


def as_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a torch or numpy tensor as a flat array."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(np.uint8)
    import torch  # noqa: PLC0415

    return tensor.reshape(-1).view(torch.uint8).numpy()


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) * 1024


def disk_bytes() -> int:
    """Bytes that this process made the kernel read from storage."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("--touched-bytes", type=int, default=0)
    parser.add_argument("--refresh-bytes", type=int, default=0)
    parser.add_argument("paths", nargs="+")
    arguments = parser.parse_args()
    load = LOADERS[arguments.loader].prepare(arguments.touched_bytes)
    if arguments.refresh_bytes:
        refresh(arguments.refresh_bytes)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The high-water mark begins again at what is resident now.
    rss_before = status("VmRSS")
    before = resource.getrusage(resource.RUSAGE_SELF)
    disk_before = disk_bytes()
    started = time.perf_counter()
    tensors = load(arguments.paths)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "page_faults": after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt,
        "rss_growth_bytes": status("VmHWM") - rss_before,
        "disk_bytes": disk_bytes() - disk_before,
        "tensors": sum(not name.startswith("__") for name in tensors),
    }
    report = getattr(tensors, "report", None)
    if report is not None:
        result["report"] = report.as_dict()
    started = time.perf_counter()
    kept = ((name, tensor) for name, tensor in tensors.items() if not name.startswith("__"))
    result["checksum"] = checksum.of_tensors((name, tensor.shape, as_bytes(tensor)) for name, tensor in kept)
    result["touch_seconds"] = time.perf_counter() - started
    print(json.dumps(result))


if __name__ == "__main__":
    main()
