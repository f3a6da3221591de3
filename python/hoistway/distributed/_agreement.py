"""How ranks come to the same view: what they compare, and how the failure of one becomes the error of all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from hoistway.distributed._link import Link
from hoistway.errors import DistributedError, HoistwayError


class Stopped(Exception):  # noqa: N818  (what happened, not what is wrong)
    """The consumer of a rank's tensors has stopped."""


def confer(link: Link, note: Any, error: BaseException | None = None) -> list[Any]:
    """Every rank's note, by rank; fails on all ranks if one has an error instead."""
    sent = {"note": note} if error is None else {"error": _described(error)}
    answers = [json.loads(answer) for answer in link.gather_bytes(json.dumps(sent).encode())]
    failures = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failures:
        _fail(link, failures, error)
    return [answer["note"] for answer in answers]


def compare(notes: Sequence[dict[str, Any]]) -> None:
    """Fails if ranks differ in anything; the error says in what, and which ranks."""
    for subject, first in notes[0].items():
        if all(note[subject] == first for note in notes):
            continue
        by_value: dict[str, list[int]] = {}
        for rank, note in enumerate(notes):
            by_value.setdefault(_shortened(note[subject], [other[subject] for other in notes]), []).append(
                rank
            )
        views = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in by_value.items())
        raise DistributedError(f"the ranks differ in {subject}: {views}")


def compare_files(
    hosts: Sequence[str], identities: Sequence[Sequence[tuple[Sequence[str], str, bool]]]
) -> None:
    """Fails if ranks found different files in one place: one was replaced while they opened it.

    A path is a place of a host. An object is compared by its number among the files: a URL of a hub's branch leads to
    one commit on one rank and to the next one on another, and the URLs of two objects may differ in what is not shown.
    """
    seen: dict[tuple[str, str | int], tuple[int, str]] = {}
    for rank, (host, files) in enumerate(zip(hosts, identities, strict=True)):
        for number, (places, identity, is_global) in enumerate(files):
            place = places[0]
            keys: list[tuple[str, str | int]] = [("", number)] if is_global else [(host, at) for at in places]
            known = [seen.setdefault(key, (rank, identity)) for key in keys]
            first = next((rank for rank, other in known if other != identity), None)
            if first is not None:
                raise DistributedError(
                    f"the ranks differ in the file {place}: it was replaced or rewritten after rank {first} opened "
                    f"it or rank {rank} did",
                    path=place,
                )


def _shortened(value: Any, others: Sequence[Any]) -> str:
    """A value for people: of lists, the first entry in which they differ."""
    if not isinstance(value, list):
        return str(value)
    for place in range(max(map(len, others))):
        entries = [other[place] if place < len(other) else None for other in others]
        if any(entry != entries[0] for entry in entries):
            entry = value[place] if place < len(value) else None
            return f"{len(value)}, number {place + 1} is {entry if entry is not None else 'missing'}"
    return f"{len(value)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _described(error: BaseException) -> dict[str, Any]:
    """An error for other ranks. Never fails, whatever others made of their exceptions: ranks wait for it."""
    path = tensor = offset = None
    if isinstance(error, HoistwayError):
        path, tensor, offset = (vars(error).get(field) for field in ("path", "tensor", "offset"))
    elif isinstance(error, OSError):
        path = error.filename
    return {
        "kind": type(error).__name__,
        "message": _text(error) or "",
        "path": _text(path),
        "tensor": _text(tensor),
        "offset": int(offset) if isinstance(offset, int) else None,
    }


def _text(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return str(os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else value)
    except Exception as failure:
        return f"a {type(value).__name__} that cannot be shown: {type(failure).__name__}"


def _fail(link: Link, failures: Sequence[tuple[int, dict[str, Any]]], error: BaseException | None) -> None:
    # A failure that all ranks share is raised as if there were one rank; an interrupted rank raises its own.
    is_everywhere = len(failures) == link.size and all(failure == failures[0][1] for _, failure in failures)
    if error is not None and (is_everywhere or not isinstance(error, Exception)):
        raise error
    # Report the error itself, not the stops of other ranks that it caused.
    rank, failure = next(
        ((rank, failure) for rank, failure in failures if failure["kind"] != Stopped.__name__), failures[0]
    )
    others = (
        f" ({_ranks([other for other, _ in failures if other != rank])} failed too)"
        if len(failures) > 1
        else ""
    )
    raise DistributedError(
        f"rank {rank} failed: {failure['kind']}: {failure['message']}{others}",
        path=failure["path"],
        tensor=failure["tensor"],
        offset=failure["offset"],
        rank=rank,
        kind=failure["kind"],
    ) from error
