"""One measurement in a fresh process: prepares, says so, waits for a line, loads once, and says what it took.

Asked for that, it loads once more, and says how much memory was taken at once meanwhile. To find out takes locks that
loads need, so no clock runs then.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checksum
import numpy as np

from gpu.driver import Driver
from gpu.loaders import LOADERS, TORCH_DEVICE, UnavailableError
from gpu.process import answers, tell

POLL_SECONDS = 0.005


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("--torch", action="store_true", help="torch can use the device")
    parser.add_argument("--tiny", required=True, help="a small file to load before the clock starts")
    parser.add_argument("paths", nargs="+")
    arguments = parser.parse_args()
    lines = answers()
    try:
        if LOADERS[arguments.loader].needs_torch and not arguments.torch:
            raise UnavailableError("torch cannot use the device")
        device = Device(arguments.torch)
        load = LOADERS[arguments.loader].prepare(arguments.torch)
        before = Memory(device)
        load([arguments.tiny])
        device.synchronize()
        gc.collect()
    except Exception as error:
        reason = str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"
        tell(lines, ready=False, reason=reason)
        return
    tell(lines, ready=True)
    if sys.stdin.readline().strip() != "go":
        return
    try:
        tell(lines, **measured(load, arguments.paths, device, before))
        if sys.stdin.readline().strip() == "peaks":
            tell(lines, **peaks(load, arguments.paths, device, before))
    except Exception as error:
        tell(lines, error=f"{type(error).__name__}: {error}")
    # What lies on the device goes with the process; peers' threads are not waited for.
    os._exit(0)


def measured(load: Any, paths: list[str], device: Device, before: Memory) -> dict[str, Any]:
    """What one load took, and the checksum of what it delivered."""
    try:
        # The high-water mark begins again at what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        has_high_water = True
    except OSError:
        has_high_water = False
    device.synchronize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    read = disk_bytes()
    started = time.perf_counter()
    tensors = load(paths)
    device.synchronize()
    seconds = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_SELF)
    names = [name for name in tensors if not name.startswith("__")]
    result = {
        "seconds": seconds,
        "cpu_seconds": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "page_faults": now.ru_minflt + now.ru_majflt - used.ru_minflt - used.ru_majflt,
        # Since before the small load, in which some make the buffers that they keep.
        "rss_growth_bytes": status("VmHWM") - before.resident if has_high_water else None,
        "disk_bytes": None if read is None else disk_bytes() - read,
        "tensors": len(names),
    }
    report = getattr(tensors, "report", None)
    if report is not None:
        result["report"] = report.as_dict()
        result["report_text"] = str(report)
    result["checksum"] = device.checksum({name: tensors[name] for name in names})
    return result


def peaks(load: Any, paths: list[str], device: Device, before: Memory) -> dict[str, int]:
    """What a load takes at once of both memories, since before the small load."""
    gc.collect()
    with polled(device) as lowest:
        tensors = load(paths)
        device.synchronize()
    del tensors
    size = sum(os.path.getsize(path) for path in paths)
    return {
        "available_drop_bytes": max(0, before.available - lowest.available),
        "device_extra_bytes": before.device_free - lowest.device_free - size,
    }


class Device:
    """The device as torch sees it, or else the driver alone; in use when this has been made."""

    def __init__(self, has_torch: bool) -> None:
        self._torch = None
        if has_torch:
            import torch  # noqa: PLC0415

            torch.zeros(1, device=TORCH_DEVICE)
            self._torch = torch
        self.driver = Driver()
        self._weights = None

    def synchronize(self) -> None:
        """Waits for everything."""
        if self._torch is not None:
            self._torch.cuda.synchronize()
        else:
            self.driver.synchronize()

    def checksum(self, tensors: dict[str, Any]) -> int:
        """The number that `checksum.of_files` gives for these tensors."""
        if self._torch is None:
            return checksum.of_tensors(
                (name, tensor.shape, np.frombuffer(tensor.tobytes(), np.uint8))
                for name, tensor in tensors.items()
            )
        total = 0
        for name, tensor in tensors.items():
            # As `checksum.of_tensors` has it.
            key = checksum.zlib.crc32(f"{name} {list(tensor.shape)}".encode()) | 1
            data = tensor.contiguous().reshape(-1).view(self._torch.uint8)
            total = (total + self.sum_of(data) * key) % 2**64
        return total

    def sum_of(self, data: Any) -> int:
        """`checksum.of_bytes`, of bytes of torch's: whole blocks where they are, the rest on the host."""
        torch, block = self._torch, checksum.BLOCK
        if self._weights is None or self._weights.device != data.device:
            self._weights = torch.from_numpy(checksum.WEIGHTS.view(np.int64)).to(data.device)
        if data.data_ptr() % 8 or data.storage_offset() % 8:
            data = data.clone()
        count = len(data) // block
        value = len(data)
        for start in range(0, count, 256):
            piece = data[start * block : min(start + 256, count) * block].view(torch.int64)
            # Sums of 64-bit integers wrap, as they are meant to.
            for number in (piece.view(-1, block // 8) * self._weights).sum(dim=1).cpu().tolist():
                value = (value * 31 + number) % 2**64
        rest = data[count * block :].cpu().numpy()
        if len(rest):
            value = (value * 31 + checksum.of_bytes(rest) - 31 * len(rest)) % 2**64
        return value


class Memory:
    """What of the host's and the device's memory is in use."""

    def __init__(self, device: Device) -> None:
        self.resident = status("VmRSS")
        self.available = available_bytes()
        self.device_free = device.driver.memory()[0]


@contextmanager
def polled(device: Device) -> Iterator[Memory]:
    """The least that was free meanwhile, of both memories."""
    lowest = Memory(device)
    done = threading.Event()

    def poll() -> None:
        device.driver.enter()
        while not done.wait(POLL_SECONDS):
            lowest.available = min(lowest.available, available_bytes())
            lowest.device_free = min(lowest.device_free, device.driver.memory()[0])

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield lowest
    finally:
        done.set()
        thread.join()
    lowest.device_free = min(lowest.device_free, device.driver.memory()[0])


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) * 1024


def available_bytes() -> int:
    """Host memory that programs could have."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024


def disk_bytes() -> int | None:
    """Bytes that this process made the kernel read from storage."""
    try:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except OSError:
        return None


if __name__ == "__main__":
    main()
