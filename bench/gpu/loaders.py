"""Every way to load to a device that the benchmark compares: ours and the peers', each with its settings.

A loader imports what it needs before the clock starts, and returns tensors by name that own their memory. What keeps
them alive, where they do not, is under a name that begins with two underscores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu.driver import device

Load = Callable[[list[str]], dict[str, Any]]
# Whatever the vendor, torch and loaders that are built on it call its devices so.
TORCH_DEVICE = "cuda:0"


class UnavailableError(Exception):
    """A loader that cannot be measured here, and why."""


@dataclass(frozen=True)
class Loader:
    """One way to load."""

    name: str
    package: str
    setting: str
    prepare: Callable[[bool], Load]
    """Given whether torch can use the device, returns the function that is timed."""
    environment: dict[str, str] = field(default_factory=dict)
    needs_torch: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether it is hoistway."""
        return self.package == "hoistway"


def _hoistway(**options: Any) -> Callable[[bool], Load]:
    def prepare(has_torch: bool) -> Load:
        import hoistway  # noqa: PLC0415

        framework = "torch" if has_torch else "raw"
        return lambda paths: hoistway.load_file(paths, device=device(), framework=framework, **options)

    return prepare


def _safetensors(_has_torch: bool) -> Load:
    from safetensors.torch import load_file  # noqa: PLC0415

    def load(paths: list[str]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for path in paths:
            tensors.update(load_file(path, device=TORCH_DEVICE))
        return tensors

    return load


def _fastsafetensors(by_gds: bool) -> Callable[[bool], Load]:
    def prepare(_has_torch: bool) -> Load:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

        if by_gds and not os.path.exists("/dev/nvidia-fs0"):
            raise UnavailableError("there is no /dev/nvidia-fs0, without which it would not use GDS")

        def load(paths: list[str]) -> dict[str, Any]:
            loader = SafeTensorsFileLoader(SingleGroup(), device=TORCH_DEVICE, nogds=not by_gds)
            loader.add_filenames({0: list(paths)})
            files = loader.copy_files_to_device()
            tensors = {name: files.get_tensor(name) for name in loader.get_keys()}
            tensors["__keep_alive__"] = (loader, files)
            return tensors

        return load

    return prepare


def _runai(_has_torch: bool) -> Load:
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    def load(paths: list[str]) -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list(paths), device=TORCH_DEVICE)
            return dict(streamer.get_tensors())

    return load


def _instanttensor(_has_torch: bool) -> Load:
    from instanttensor import safe_open  # noqa: PLC0415

    def load(paths: list[str]) -> dict[str, Any]:
        # A list of its own, which is sorted in place; the device as a number, since text may lack one.
        with safe_open(list(paths), framework="pt", device=0) as file:
            return dict(file.tensors())

    return load


_QUIET = {"RUNAI_STREAMER_LOG_LEVEL": "ERROR", "RUNAI_STREAMER_LOG_TO_STDERR": "0"}

LOADERS = {
    loader.name: loader
    for loader in (
        Loader("hoistway", "hoistway", "default (auto)", _hoistway(), needs_torch=False),
        Loader("hoistway_staged", "hoistway", "route staged", _hoistway(route="staged"), needs_torch=False),
        Loader("hoistway_gds", "hoistway", "route gds", _hoistway(route="gds"), needs_torch=False),
        Loader("hoistway_torch", "hoistway", "allocator torch", _hoistway(allocator="torch")),
        Loader("safetensors", "safetensors", "load_file", _safetensors),
        Loader("fastsafetensors", "fastsafetensors", "nogds", _fastsafetensors(by_gds=False)),
        Loader(
            "fastsafetensors_buffered",
            "fastsafetensors",
            "nogds, FASTSAFETENSORS_ODIRECT=0",
            _fastsafetensors(by_gds=False),
            {"FASTSAFETENSORS_ODIRECT": "0"},
        ),
        Loader("fastsafetensors_gds", "fastsafetensors", "GDS", _fastsafetensors(by_gds=True)),
        Loader("runai", "runai-model-streamer", "default (O_DIRECT)", _runai, _QUIET),
        Loader(
            "runai_buffered",
            "runai-model-streamer",
            "FS_STRATEGY=io_uring_buffered,sync_buffered",
            _runai,
            {**_QUIET, "RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered"},
        ),
        Loader("instanttensor", "instanttensor", "default", _instanttensor),
        Loader(
            "instanttensor_buffered",
            "instanttensor",
            "BACKEND=BUFFERED",
            _instanttensor,
            {"INSTANTTENSOR_BACKEND": "BUFFERED"},
        ),
    )
}
