"""The loader that vLLM is given: its default one, but for how the bytes are read."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import ModelConfig, get_current_vllm_config_or_none
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tp_group,
    get_world_group,
    model_parallel_is_initialized,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from hoistway._devices import of_torch
from hoistway.errors import FormatError, OptionError
from hoistway.plugins._versions import is_older
from hoistway.plugins._weights import Bar, Options, folder_url, weights

# vLLM before 0.31 reads all files with --mm-encoder-only, and before 0.32 a model cannot say what it does not use.
CHOOSES_FILES = not is_older("vllm", "0.31")
ASKS_MODEL = not is_older("vllm", "0.32")
if CHOOSES_FILES:
    from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files
if ASKS_MODEL and "is_unused_weight" not in DefaultModelLoader.Source.__dataclass_fields__:
    raise ImportError("DefaultModelLoader.Source has no is_unused_weight")

# Of vLLM's own hierarchy: what is logged elsewhere, vLLM does not show.
log = init_logger("vllm.plugins.hoistway")

# One line an update: bars that redraw themselves spoil the logs of many processes.
BAR = "{desc}: {percentage:3.0f}% | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n"
# The one key of the default loader's extra configuration that is not about how it reads.
HOST_KEYS = ("enable_weights_track",)


class HoistwayModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Finds and hands over weights as vLLM's default loader does, and reads them by hoistway."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        self.options = Options.parse(load_config.model_loader_extra_config, HOST_KEYS)
        self.load_config = load_config
        super().__init__(self._config("safetensors"))
        self.load_config = load_config
        self._stored: dict[str, str] = {}
        self._check_strategy()

    def _config(self, load_format: str) -> LoadConfig:
        """The configuration as vLLM's own loader takes it."""
        config = copy.copy(self.load_config)
        extra = config.model_loader_extra_config
        config.load_format = load_format
        config.model_loader_extra_config = {key: extra[key] for key in HOST_KEYS if key in extra}
        return config

    def _check_strategy(self) -> None:
        strategy = self.load_config.safetensors_load_strategy
        if strategy is not None:
            raise OptionError(
                f"safetensors_load_strategy cannot be {strategy!r} with load format hoistway: it is about how vLLM's "
                "own loader reads; leave it out, or use load format safetensors"
            )

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[Any, ...]:
        """The files, downloaded if need be, as vLLM finds them; of safetensors only, whatever the model allows."""
        if os.path.isfile(model_name_or_path):
            raise FormatError(
                f"{model_name_or_path} is a file, and load format hoistway takes directories and repositories; for "
                "GGUF install vllm-gguf-plugin",
                path=model_name_or_path,
            )
        consolidated = list_filtered_repo_files(
            model_name_or_path=model_name_or_path,
            allow_patterns=["consolidated*.safetensors"],
            revision=revision,
        )
        finder = copy.copy(self)
        finder.load_config = self._config("mistral" if consolidated else "safetensors")
        try:
            found: tuple[Any, ...] = DefaultModelLoader._prepare_weights(
                finder, model_name_or_path, subfolder, revision, False, allow_patterns_overrides
            )
        except RuntimeError as error:
            if "Cannot find any model weights" not in str(error):
                raise
            raise FormatError(
                f"{model_name_or_path} has no safetensors files: load it with --load-format auto, or convert it",
                path=model_name_or_path,
            ) from error
        return found

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights; those of a model in a store from its URL, where vLLM has the other files in a folder."""
        self._stored = {model_config.model: model_config.model_weights} if model_config.model_weights else {}
        yield from super().get_all_weights(model_config, model)

    def download_model(self, model_config: ModelConfig) -> None:
        """Downloads a model; one in a store is read from there when it is loaded."""
        if folder_url(model_config.model_weights or model_config.model) is None:
            super().download_model(model_config)

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
        # Asked again: the checkpoint's quantisation sets it when the load begins.
        self._check_strategy()
        url = folder_url(self._stored.get(source.model_or_path, source.model_or_path))
        if url is None:
            found = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if CHOOSES_FILES:
                folder, files, _, index_file = found
                files = self._of_encoders(files, folder, index_file)
            else:
                _, files, _ = found
            is_in_them = None
            if not files:
                raise OptionError(
                    f"mm_encoder_only leaves no file of {source.model_or_path}: all are of the language model alone"
                )
        else:
            files, is_in_them = [_place_in_store(url, source)], self._chosen_by_index(source.model_or_path)
        unused = source.is_unused_weight if ASKS_MODEL else None

        def wanted(name: str) -> bool:
            return (
                not should_skip_weight(name, self.local_expert_ids)
                and not (unused and unused(name))
                and (is_in_them is None or is_in_them(name))
            )

        device = self.options.device or self._device()
        loaded = weights(
            files,
            self.options,
            prefix=source.prefix,
            device=device,
            wanted=wanted,
            group=self._group(device),
            bar=Bar(enable_tqdm(self.load_config.use_tqdm_on_load), BAR),
            log=log,
        )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return loaded

    def _of_encoders(self, files: list[str], folder: str, index_file: str) -> list[str]:
        """The files without those of a language model that is not to be loaded."""
        if self._encoder_only_lm_prefixes is None:
            return files
        kept: list[str] = filter_mm_encoder_only_safetensors_files(
            files,
            folder,
            index_file,
            self._encoder_only_lm_prefixes,
            weights_mapper=self._encoder_only_weights_mapper,
        )
        return kept

    def _chosen_by_index(self, folder: str) -> Callable[[str], bool] | None:
        """Whether a weight lies in a file that is wanted, by the index that vLLM has pulled; ``None``: all do."""
        index = Path(folder, SAFE_WEIGHTS_INDEX_NAME)
        if not CHOOSES_FILES or self._encoder_only_lm_prefixes is None or not index.is_file():
            return None
        parts: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = [os.path.join(folder, part) for part in set(parts.values())]
        kept = set(self._of_encoders(files, folder, SAFE_WEIGHTS_INDEX_NAME))
        return lambda name: name not in parts or os.path.join(folder, parts[name]) in kept

    def _device(self) -> str:
        """Where the parameters are, if hoistway can put tensors there."""
        config = get_current_vllm_config_or_none()
        # Of vLLM 0.30 and later.
        engram = getattr(config, "engram_config", None)
        offloads = bool(engram and engram.cpu_offload)
        # Tables that are kept on the host may be larger than the device.
        computes_there = current_platform.is_cuda() or current_platform.is_rocm()
        if not computes_there or self.load_config.device == "cpu" or offloads:
            return "cpu"
        return of_torch(torch, "cuda", torch.cuda.current_device())

    def _group(self, device: str) -> Any:
        """The ranks that read together; ``None`` where this one reads alone."""
        share = self.options.share
        if share == "none" or not model_parallel_is_initialized():
            return None
        if share == "auto":
            # A stage of a pipeline may load a model of its own, a draft model say: not all ranks take part in that.
            share = "tp" if get_pp_group().world_size > 1 else "world"
        ranks = get_tp_group() if share == "tp" else get_world_group()
        if ranks.world_size == 1:
            return None
        return ranks.cpu_group if device == "cpu" else ranks.device_group


def _place_in_store(url: str, source: DefaultModelLoader.Source) -> str:
    """The URL of the folder or the file of a source."""
    names: list[str] | None = source.allow_patterns_overrides
    if source.subfolder is not None:
        url = f"{url}{source.subfolder}/"
    if names is None:
        return url
    if len(names) == 1 and not set("*?[") & set(names[0]):
        return url + names[0]
    raise OptionError(
        f"the weights of {url} are chosen by patterns, {', '.join(names)}, which work for directories only: copy the "
        "model to this machine"
    )
