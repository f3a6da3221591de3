"""`install` puts the drop-in where programs look for safetensors; `uninstall` takes it back."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hoistway import _native
from hoistway._checkpoint import check_names
from hoistway.compat.safetensors._errors import NotCarriedError
from hoistway.compat.safetensors._safe_open import _safe_open_handle, safe_open

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from hoistway._options import LoadOptions

HOSTS = ("safetensors", "transformers", "diffusers", "accelerate", "peft", "huggingface_hub", "comfy")
"""Packages whose modules may have bound the functions of safetensors to names of their own."""

_FUNCTIONS = {
    "torch": ("load_file", "load", "save_file", "save", "load_model", "save_model"),
    "numpy": ("load_file", "load", "save_file", "save"),
    "flax": ("load_file", "load", "save_file", "save"),
}


class PassedOn(NamedTuple):
    """A call that went to safetensors itself, and why."""

    function: str
    reason: str


class Installation:
    """The result of `install`. As a context manager it is undone at the end; of a second one, the options are."""

    def __init__(self, is_first: bool, options_before: Mapping[str, Any]) -> None:
        self._is_first = is_first
        self._options_before = options_before

    @property
    def passed_on(self) -> list[PassedOn]:
        """The last calls since the installation that went to safetensors itself."""
        return list(_passed_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_first:
            uninstall()
            return
        with _lock:
            if _replaced:
                safe_open._options = self._options_before


def install(*, packages: str | Iterable[str] = HOSTS, **options: Unpack[LoadOptions]) -> Installation:
    """Makes programs that load and save with safetensors do it with hoistway.

    The functions of safetensors are replaced in safetensors itself, and wherever loaded modules of ``packages`` have
    bound them. What is imported later finds the new ones. A call for a framework or a kind of device that hoistway
    does not know goes to safetensors as before, see `Installation.passed_on`.

    Args:
        packages: Names of packages that may have bound functions already, besides safetensors itself.
        options: Options of all loads by the drop-in until `uninstall`, for instance ``route``; see `LoadOptions`.
            Those of a second call take the place of the first's.
    """
    check_names(options)
    _native.check_options(**options)
    with _lock:
        is_first = not _replaced
        before = safe_open._options
        safe_open._options = dict(options)
        if is_first:
            _passed_on.clear()
            _replaced.extend(_replacements())
        roots = {"safetensors", *([packages] if isinstance(packages, str) else packages)}
        _swap(
            {id(original): replacement for original, replacement in _replaced},
            lambda module: module.partition(".")[0] in roots,
        )
        return Installation(is_first, before)


def uninstall() -> None:
    """Puts the functions of safetensors back wherever `install` or an import since has replaced them."""
    with _lock:
        # In all modules: any may have been imported since, and have bound what it found then.
        _swap({id(replacement): original for original, replacement in _replaced}, lambda _: True)
        _replaced.clear()
        safe_open._options = {}


_lock = RLock()
_replaced: list[tuple[Any, Any]] = []
"""Each with its replacement. Both stay alive here, so that their identities stay theirs."""
_passed_on: deque[PassedOn] = deque(maxlen=64)


class _InstalledOpen(safe_open):
    """`safe_open`, or that of safetensors for what hoistway does not know."""

    _original: ClassVar[Callable[..., Any]]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().__new__(cls, *arguments, **keywords)
        except NotCarriedError as reason:
            _passed_on.append(PassedOn("safe_open", str(reason)))
            return cls._original(*arguments, **keywords)


def _replacements() -> Iterator[tuple[Any, Any]]:
    """Functions of safetensors, and what takes their places."""
    import safetensors  # noqa: PLC0415

    for opener in (safe_open, _safe_open_handle):
        if (original := getattr(safetensors, opener.__name__, None)) is not None:
            body = {"_original": original, "__doc__": opener.__doc__}
            yield original, type(opener.__name__, (_InstalledOpen, opener), body)
    for name, functions in _FUNCTIONS.items():
        if not _is_of_use(name):
            continue
        theirs = importlib.import_module(f"safetensors.{name}")
        ours = importlib.import_module(f"hoistway.compat.safetensors.{name}")
        for function in functions:
            original = getattr(theirs, function)
            yield original, _or_original(getattr(ours, function), original, f"{name}.{function}")


def _is_of_use(framework: str) -> bool:
    """Whether to import the module for a framework: jax, which takes long, only where it is already."""
    if framework == "flax":
        return "jax" in sys.modules
    return importlib.util.find_spec(framework) is not None


def _or_original(ours: Callable[..., Any], original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(ours)
    def function(*arguments: Any, **keywords: Any) -> Any:
        try:
            return ours(*arguments, **keywords)
        except NotCarriedError as reason:
            _passed_on.append(PassedOn(name, str(reason)))
            return original(*arguments, **keywords)

    # Pickles name a function by its module, where this one stands for that of safetensors.
    function.__module__ = original.__module__
    return function


def _swap(new: Mapping[int, Any], is_meant: Callable[[str], bool]) -> None:
    """Binds names in loaded modules anew: those whose object's identity has a new object."""
    for name, module in list(sys.modules.items()):
        if not (is_meant(name) and isinstance(module, ModuleType)):
            continue
        # Not by dir and getattr, which would make modules that load lazily load everything.
        for attribute, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, attribute, new[id(value)])
