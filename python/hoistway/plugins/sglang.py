"""SGLang's plug-in: `--load-format hoistway` loads the weights by hoistway."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from hoistway.errors import MissingPackageError
from hoistway.plugins._versions import unfit
from hoistway.plugins._weights import LOAD_FORMAT

# Of the dataclass: it turns the name of a format into a member of an enumeration, which has none for formats of others.
HOOKED = "sglang.srt.configs.load_config.LoadConfig.__post_init__"


@cache
def register() -> None:
    """Tells SGLang of the load format; SGLang calls it in each of its processes, by the entry point."""
    try:
        # What nothing here uses is asked for by the loader: without it the format must not be registered.
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices  # noqa: PLC0415
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view  # noqa: F401, PLC0415
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook  # noqa: PLC0415
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415
        from sglang.srt.runtime_context import get_model, get_parallel  # noqa: F401, PLC0415
    except ImportError as error:
        logging.getLogger(__name__).warning("%s", unfit("sglang", LOAD_FORMAT, error))
        return
    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(HOOKED, name_to_class, HookType.AROUND)
    register_resolution_hook("handle_load_format")(keep_format)


def name_to_class(post_init: Callable[..., None], config: Any, *arguments: Any) -> None:
    """Puts the class where the format's name stands: SGLang makes its loader of a class that it finds there."""
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        config.load_format = _loader()
    post_init(config, *arguments)


def keep_format(server_args: Any, resolve: Callable[[Any], None]) -> None:
    """Keeps the format where the model is a URL: SGLang puts Run:ai's in its place, whatever the user chose."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view  # noqa: PLC0415

    chosen = resolving_view(server_args).load_format
    resolve(server_args)
    is_ours = (
        str(chosen).lower() == LOAD_FORMAT
        or getattr(chosen, "__module__", "") == "hoistway.plugins._sglang_loader"
    )
    if is_ours and resolving_view(server_args).load_format != chosen:
        declare_resolution(server_args, __name__, load_format=chosen)


def _loader() -> Any:
    """The class of the loader. It uses private parts of SGLang, which another version may lack."""
    try:
        from hoistway.plugins._sglang_loader import HoistwayModelLoader  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(unfit("sglang", LOAD_FORMAT, error)) from error
    return HoistwayModelLoader


def __getattr__(name: str) -> Any:
    # For the Python API: Engine(load_format=HoistwayModelLoader); not before SGLang is there.
    if name == "HoistwayModelLoader":
        return _loader()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
