"""Paths and names that callers pass, checked before the engine sees them."""

from __future__ import annotations

import os
import pathlib  # noqa: F401  (paths of the engine's errors are of its type)
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hoistway.errors import ArgumentError, CheckpointNotFoundError, OptionError, UnknownOptionError

PathType = str | os.PathLike[str]


def path_text(path: Any) -> str:
    """Returns the text of one path. Raises a `TypeError` that says what to pass for anything else.

    >>> path_text("model.safetensors")
    'model.safetensors'
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str):
            if not isinstance(path, str) and re.match(r"(s3|gs|az|abfss?|hf|https?):[/\\][^/]", text):
                raise OptionError(
                    f"a path cannot be {_without_secrets(text)!r}: a path has one slash where a URL has two; "
                    "pass the URL as text"
                )
            return text
        raise ArgumentError(
            f"a path cannot be {path!r}, a path of bytes: pass text, which os.fsdecode makes of bytes"
        )
    if isinstance(path, (bytes, bytearray, memoryview)):
        raise ArgumentError(
            f"a path cannot be {shown(path)}: pass text, which os.fsdecode makes of a path in bytes; "
            "hoistway.load takes the contents of a file"
        )
    if hasattr(path, "read"):
        raise ArgumentError(
            f"a path cannot be {shown(path)}: pass the name of the file; hoistway.load takes its contents"
        )
    raise ArgumentError(f"a path cannot be {shown(path)}: pass text or an os.PathLike such as pathlib.Path")


def _without_secrets(url: str) -> str:
    """Returns what may be shown of a URL whose slashes a path has changed: no user, password, query and fragment.

    >>> _without_secrets("https:/me:secret@host/a.safetensors?sig=secret")
    'https:/host/a.safetensors'
    """
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition(":")
    return f"{scheme}:{rest[0]}{rest[1:].rpartition('@')[2]}"


def is_url(path: str) -> bool:
    """Returns whether a name is a URL rather than a path. One letter is a drive of Windows.

    >>> is_url("s3://models/a.safetensors"), is_url("C://models"), is_url("./s3:/a")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def path_texts(paths: PathType | Sequence[PathType]) -> list[str]:
    """Returns the texts of one path or of several, at least one. Raises an error for what is no path."""
    if hasattr(paths, "get_tensor"):
        raise ArgumentError(f"a path cannot be {paths!r}: pass a path, or call load() of the checkpoint")
    if isinstance(paths, (str, os.PathLike)) or not _is_list(paths) or hasattr(paths, "read"):
        return _named([path_text(paths)])
    texts = [path_text(path) for path in paths]
    if not texts:
        raise OptionError(
            f"there is nothing to load: the list of paths is empty, {paths!r}; pass at least one path"
        )
    return _named(texts)


def _named(paths: list[str]) -> list[str]:
    """The paths, none of which is empty text."""
    if "" in paths:
        raise CheckpointNotFoundError("a path cannot be '': name a file, a folder or a URL", path="")
    return paths


def tensor_name(name: Any) -> str:
    """Returns the name of one tensor. Raises a `TypeError` for anything but text.

    >>> tensor_name("lm_head.weight")
    'lm_head.weight'
    """
    if not isinstance(name, str):
        raise ArgumentError(f"the name of a tensor cannot be {shown(name)}: pass text")
    return name


def tensor_names(argument: str, names: Any) -> list[str]:
    """Returns names or glob patterns as a list; a single one may be given as text."""
    if isinstance(names, str):
        return [names]
    if not _is_list(names):
        raise ArgumentError(
            f"{argument} cannot be {shown(names)}: pass the name of a tensor, a glob pattern, or a list of these"
        )
    return [tensor_name(name) for name in names]


def text_by_text(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Returns the metadata of a file as a dictionary of text to text, or ``None``."""
    if metadata is None:
        return None
    try:
        texts = dict(metadata)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"metadata cannot be {shown(metadata)}: pass a dictionary of text to text"
        ) from None
    for key, value in texts.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise ArgumentError(
                f"metadata cannot hold {shown(key)} with the value {shown(value)}: keys and values are text"
            )
    return texts


def refuse_unknown(
    given: Iterable[str],
    known: Sequence[str],
    *,
    elsewhere: Mapping[str, str] | None = None,
    near: Iterable[str] = (),
) -> None:
    """Fails for options that are not known, and names the one that is nearest.

    Args:
        given: Names of options.
        known: Those that there are.
        elsewhere: Names of options of other calls, and where they belong.
        near: Other names that a typo may mean.

    >>> refuse_unknown(["rout"], ["route", "layout"])
    Traceback (most recent call last):
    hoistway.errors.UnknownOptionError: option cannot be 'rout': did you mean 'route'? (the options are route, layout)
    """
    elsewhere = elsewhere or {}
    unknowns = sorted(set(given) - set(known))
    if not unknowns:
        return
    for unknown in unknowns:
        if unknown in elsewhere:
            hint = elsewhere[unknown]
        elif nearest := get_close_matches(unknown, [*known, *elsewhere, *near], n=1):
            hint = f"did you mean {nearest[0]!r}?"
        else:
            hint = "it has no such option"
        raise UnknownOptionError(f"option cannot be {unknown!r}: {hint} (the options are {', '.join(known)})")


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray, memoryview))


def shown(given: Any) -> str:
    """A value and its type, for an error."""
    if given is None:
        return "None"
    shown = repr(given)
    return f"{shown if len(shown) <= 60 else shown[:60] + '…'}, which is of type {type(given).__name__}"
