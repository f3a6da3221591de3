"""Settings of `AutoLoader`, from a JSON file that the environment names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hoistway._regular import open_regular
from hoistway.errors import OptionError

# Groups whose entries are settings of their own, and what a loader's section has from them.
_GROUPS = ("parallel", "debug")
_COMMON = ("framework", "debug_log", "set_numa", "disable_cache")


@dataclass
class LoaderConfig:
    """The configuration of loaders. Sections of single loaders are in `get_extension_config`."""

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None
    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_producers(self.max_concurrent_producers)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoaderConfig:
        """The settings of a dictionary: groups are taken apart, other dictionaries are sections of loaders.

        Settings of other names are left out, as files are shared with other versions.
        """
        known = {each.name for each in fields(cls)} - {"_extensions"}
        settings: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in data.items():
            if key in _GROUPS and isinstance(value, dict):
                settings.update(value)
            elif isinstance(value, dict):
                sections[key] = dict(value)
            else:
                settings[key] = value
        chosen = {key: value for key, value in settings.items() if key in known}
        return cls(**chosen, _extensions=sections)

    @classmethod
    def from_file(cls, path: str) -> LoaderConfig:
        """The settings of a JSON file."""
        with open(open_regular(path), encoding="utf-8") as file:
            data = json.load(file)
        if not isinstance(data, dict):
            raise OptionError(f"{path}: settings are a JSON object", path=path)
        return cls.from_dict(data)

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """A loader's own section, without what all loaders have, which it may repeat but not contradict."""
        section = self._extensions.get(name, {})
        for key in _COMMON:
            value = getattr(self, key)
            if section.get(key, value) != value:
                raise OptionError(
                    f"{key} cannot be {section[key]!r} in section {name!r}: it is {value!r} for all loaders; set it "
                    "outside of the section"
                )
        return {key: value for key, value in section.items() if key not in _COMMON}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """The settings that are arguments of `ParallelLoader`."""
        memory = {
            "max_batch_bytes": self.max_batch_bytes,
            "use_chunk_budget_as_allocation_size": self.use_chunk_budget_as_allocation_size,
            "device_memory_budget": self.device_memory_budget,
        }
        if not self.use_pipeline:
            return {"queue_size": -1, **memory}
        return {
            "max_concurrent_producers": self.max_concurrent_producers,
            "queue_size": self.queue_size,
            "use_tqdm_on_load": self.use_tqdm_on_load,
            **memory,
        }


def load_config() -> LoaderConfig:
    """The settings in the file that ``FASTSAFETENSORS_CONFIG`` names, or else the defaults.

    What lies in the working directory is not looked at.
    """
    path = os.environ.get("FASTSAFETENSORS_CONFIG")
    return LoaderConfig() if path is None else LoaderConfig.from_file(path)


def check_producers(count: int) -> None:
    """Fails unless there is one: it has as many threads as it needs."""
    if count != 1:
        raise OptionError(f"max_concurrent_producers cannot be {count}: it must be 1")
