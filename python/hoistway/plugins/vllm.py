"""vLLM's plug-in: `vllm serve MODEL --load-format hoistway` loads the weights by hoistway."""

from __future__ import annotations

import logging
from functools import cache, wraps
from typing import Any

from hoistway.plugins._versions import unfit
from hoistway.plugins._weights import LOAD_FORMAT


@cache
def register() -> None:
    """Tells vLLM of the load format; vLLM calls it in each of its processes, by the entry point."""
    try:
        from vllm.config import VllmConfig  # noqa: PLC0415
        from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415

        from hoistway.plugins._vllm_loader import HoistwayModelLoader  # noqa: PLC0415

        verify = VllmConfig.try_verify_and_update_config
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.plugins.hoistway").warning("%s", unfit("vllm", LOAD_FORMAT, error))
        return
    register_model_loader(LOAD_FORMAT)(HoistwayModelLoader)

    @wraps(verify)
    def verify_with_urls(config: Any) -> None:
        """Verifies a model by URL as one of Run:ai's format: vLLM has a list of the formats that take URLs."""
        load = config.load_config
        if load.load_format != LOAD_FORMAT or not getattr(config.model_config, "model_weights", ""):
            verify(config)
            return
        load.load_format = "runai_streamer"
        try:
            verify(config)
        finally:
            load.load_format = LOAD_FORMAT

    VllmConfig.try_verify_and_update_config = verify_with_urls
