"""The loader that SGLang is given: its default one, but for how the bytes are read."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.model_loader.weight_utils import _drop_file_cache_after_load, maybe_add_mtp_safetensors
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils import BAR_FORMAT
from sglang.srt.utils.runai_utils import ObjectStorageModel
from torch import nn

from hoistway._devices import of_torch
from hoistway.errors import FormatError, OptionError
from hoistway.plugins._versions import is_older
from hoistway.plugins._weights import Bar, Options, folder_url, is_url, weights

# SGLang before 0.5.22 does not say which ranks load a model together.
NAMES_RANKS = "load_group" in LoadConfig.__dataclass_fields__ or not is_older("sglang", "0.5.22")
if NAMES_RANKS:
    from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP as ALL_RANKS
else:
    ALL_RANKS = object()

log = logging.getLogger("hoistway.plugins.sglang")


class HoistwayModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Finds and hands over weights as SGLang's default loader does, and reads them by hoistway."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        self.options = Options.parse(load_config.model_loader_extra_config or {})
        self.load_config = load_config
        super().__init__(self._config(LoadFormat.SAFETENSORS))
        self.load_config = load_config
        self._stored: dict[str, str] = {}

    def _config(self, load_format: LoadFormat) -> LoadConfig:
        """The configuration as SGLang's own loaders take it."""
        config = copy.copy(self.load_config)
        config.load_format, config.model_loader_extra_config = load_format, {}
        return config

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Loads a model; one that has first to be quantised is not loaded by the weights' files alone."""
        native = get_model_loader(self._config(LoadFormat.AUTO), model_config)
        quantised = model_config._is_already_quantized() and not getattr(model_config, "modelopt_quant", None)
        if type(native) is not DefaultModelLoader and not quantised:
            raise OptionError(
                f"load format hoistway cannot quantise this model: that is the work of SGLang's "
                f"{type(native).__name__}; use load format auto, or a checkpoint that is quantised"
            )
        model: nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        return model

    def _prepare_weights(
        self,
        model_name_or_path: str,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None = None,
    ) -> tuple[str, list[str], bool]:
        """The files, downloaded if need be, as SGLang finds them; of safetensors only, whatever the model allows."""
        if os.path.isfile(model_name_or_path):
            raise FormatError(
                f"{model_name_or_path} is a file, and load format hoistway takes directories and repositories; for "
                "GGUF use load format gguf",
                path=model_name_or_path,
            )
        finder = copy.copy(self)
        finder.load_config = self._config(LoadFormat.SAFETENSORS)
        try:
            found: tuple[str, list[str], bool] = DefaultModelLoader._prepare_weights(
                finder, model_name_or_path, revision, False, allow_patterns_overrides
            )
        except RuntimeError as error:
            if "Cannot find any model weights" not in str(error):
                raise
            raise FormatError(
                f"{model_name_or_path} has no safetensors files: load it with --load-format auto, or convert it",
                path=model_name_or_path,
            ) from error
        return found

    def _get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights; those of a model in a store from its URL, where SGLang has the other files in a folder."""
        url = getattr(model_config, "model_weights", "")
        # When weights are updated, SGLang changes the path alone.
        self._stored = {ObjectStorageModel.get_path(url): url} if url else {}
        yield from super()._get_all_weights(model_config, model)

    def _get_weights_iterator(
        self,
        source: DefaultModelLoader.Source,
        *,
        resolved_source: DefaultModelLoader.ResolvedSource | None = None,
        **prefetch: bool,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if get_model().weight_loader_prefetch_checkpoints:
            raise OptionError(
                "weight_loader_prefetch_checkpoints cannot be set with load format hoistway: it is about how SGLang's "
                "own loader reads"
            )
        url = folder_url(self._stored.get(source.model_or_path, source.model_or_path))
        if url is not None:
            if source.allow_patterns_overrides is not None:
                raise OptionError(
                    f"the weights of {url} are chosen by patterns, {', '.join(source.allow_patterns_overrides)}, which "
                    "work for directories only: copy the model to this machine"
                )
            files = [url]
        elif resolved_source is None:
            folder, files, _ = self._prepare_weights(
                source.model_or_path,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if source.model_config is not None:
                files = maybe_add_mtp_safetensors(
                    files, folder, "model.safetensors.index.json", source.model_config.hf_config
                )
        else:
            files = list(resolved_source.weight_files)
        layer = self.load_config.draft_model_idx
        if layer is not None:
            renamed: Iterator[tuple[str, torch.Tensor]] = self._filter_mtp_weights(
                self._read(files, ""), source.prefix, layer
            )
            return renamed
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._read(files, source.prefix)

    def _read(self, files: list[str], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        layer = self.load_config.draft_model_idx

        def wanted(name: str) -> bool:
            match = None if layer is None else self._MTP_PATTERN.match(name)
            return match is None or int(match.group(1)) == layer

        device = self.options.device or self._device()
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        yield from weights(
            files,
            self.options,
            prefix=prefix,
            device=device,
            wanted=wanted,
            group=self._group(device),
            bar=Bar(first, BAR_FORMAT),
            log=log,
        )
        if get_model().weight_loader_drop_cache_after_load:
            for file in files:
                if not is_url(file):
                    _drop_file_cache_after_load(file)

    def _device(self) -> str:
        """Where SGLang computes, if hoistway can put tensors there."""
        if not (current_platform.is_cuda() or current_platform.is_rocm()):
            return "cpu"
        return of_torch(torch, "cuda", torch.cuda.current_device())

    def _group(self, device: str) -> Any:
        """The ranks that read together; ``None`` where this one reads alone."""
        share, ranks = self.options.share, self.load_config.load_group if NAMES_RANKS else ALL_RANKS
        if share == "none" or ranks is None or not torch.distributed.is_initialized():
            return None
        if share == "auto" and not NAMES_RANKS and get_parallel().pp_size > 1:
            # A stage of a pipeline may load a draft model of its own, in which not all ranks take part.
            return None
        if share == "tp":
            ranks = get_parallel().tp_group
        elif share == "world" or ranks is ALL_RANKS:
            ranks = get_parallel().world_group
        if ranks.world_size == 1:
            return None
        return ranks.cpu_group if device == "cpu" else ranks.device_group
