"""The parts of each rank: tensor-parallel dimensions, experts, layers, and names that match patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from hoistway._arguments import tensor_names
from hoistway.distributed._wants import WHOLE
from hoistway.errors import OptionError, TensorNotFoundError

Shards = Mapping[str, int | None] | Callable[[str, tuple[int, ...]], int | None]
Select = str | Iterable[str] | Callable[[str], bool]

_CLASS = re.compile(r"\[(?:!.|[^!])[^\]]*\]", re.DOTALL)
_PART_OF_A_COMPONENT = re.compile(r"\*{3}|[^/*]\*\*|\*\*[^/*]")


def tensor_parallel(dims: Mapping[str, int | None]) -> Callable[[str, tuple[int, ...]], int | None]:
    """Dimensions by name or glob pattern, for models of a family: patterns may match nothing.

    The first that matches decides; tensors that none matches go to every rank whole. A mapping given as ``shards``
    itself is stricter: there, a pattern that matches nothing is an error.

    Examples:
        >>> dim = tensor_parallel({"*.q_proj.weight": 0, "*.o_proj.weight": 1})
        >>> dim("model.layers.0.self_attn.o_proj.weight", (4096, 4096))
        1
    """
    patterns = [(_glob(pattern), dim) for pattern, dim in dims.items()]

    def dim_of(name: str, _shape: tuple[int, ...]) -> int | None:
        if name in dims:
            return dims[name]
        return next((dim for pattern, dim in patterns if pattern.match(name)), None)

    return dim_of


def expert_parallel(
    num_experts: int,
    *,
    rank: int | None = None,
    size: int | None = None,
    group: Any = None,
    placement: Literal["contiguous", "round_robin"] = "contiguous",
    pattern: str = ".experts.{}.",
) -> Callable[[str], bool]:
    """A predicate for ``select``: the experts that a rank owns, and all that is no expert.

    Args:
        num_experts: How many experts a layer has.
        rank: Whose experts. Default: this rank of ``group``.
        size: Among how many ranks. Default: those of ``group``.
        group: The ranks that share the experts. Default: all.
        placement: ``"contiguous"``: runs of experts, the first ranks one more where they do not divide;
            ``"round_robin"``: each ``size``-th.
        pattern: The part of a name that holds the number of the expert, as ``{}``.

    Examples:
        >>> keep = expert_parallel(8, rank=1, size=4)
        >>> keep("model.layers.0.mlp.experts.2.up_proj.weight"), keep("model.layers.0.mlp.experts.4.up_proj.weight")
        (True, False)
    """
    number_in = _numbered(pattern)
    if rank is None or size is None:
        from hoistway.distributed._link import rank_and_size  # noqa: PLC0415

        rank, size = rank_and_size(group)
    if not 0 <= rank < size:
        raise OptionError(f"rank cannot be {rank}: there are {size}")
    if placement == "contiguous":
        each, more = divmod(num_experts, size)
        first = rank * each + min(rank, more)
        owned = range(first, first + each + (rank < more))
    elif placement == "round_robin":
        owned = range(rank, num_experts, size)
    else:
        raise OptionError(f"placement cannot be {placement!r}: it must be one of contiguous, round_robin")

    def keep(name: str) -> bool:
        number = number_in(name)
        if number is None:
            return True
        if number >= num_experts:
            raise OptionError(f"num_experts cannot be {num_experts}: there is a tensor {name!r}")
        return number in owned

    return keep


def pipeline_range(start: int, stop: int, *, pattern: str = "model.layers.{}.") -> Callable[[str], bool]:
    """A predicate for ``select``: the layers from ``start`` up to but not including ``stop``, and all that is no layer.

    Examples:
        >>> keep = pipeline_range(0, 16)
        >>> keep("model.layers.15.norm.weight"), keep("model.layers.16.norm.weight"), keep("lm_head.weight")
        (True, False, True)
    """
    if not 0 <= start <= stop:
        raise OptionError(f"layers cannot be {start} to {stop}")
    number_in = _numbered(pattern)

    def keep(name: str) -> bool:
        number = number_in(name)
        return number is None or start <= number < stop

    return keep


def wanted_names(
    names: Sequence[str], select: Select | None, exclude: str | Iterable[str] | None
) -> list[bool]:
    """For each name whether it is selected, by the rules of every load."""
    if select is None:
        chosen = [True] * len(names)
    elif callable(select):
        chosen = [bool(select(name)) for name in names]
    else:
        matched = _matching(names, tensor_names("select", select), must_match=True)
        chosen = [name in matched for name in names]
    if exclude is not None:
        out = _matching(names, tensor_names("exclude", exclude), must_match=False)
        chosen = [keep and name not in out for keep, name in zip(chosen, names, strict=True)]
    return chosen


def shard_dims(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], shards: Shards | None
) -> list[int | None]:
    """For each tensor the dimension along which it is cut, ``None`` for tensors that stay whole."""
    if shards is None:
        return [None] * len(names)
    if callable(shards):
        dims = [shards(name, shape) for name, shape in zip(names, shapes, strict=True)]
    else:
        _matching(names, tensor_names("shards", shards), must_match=True)
        known = set(names)
        exact = {name: dim for name, dim in shards.items() if name in known}
        others = tensor_parallel({pattern: dim for pattern, dim in shards.items() if pattern not in known})
        dims = [
            exact[name] if name in exact else others(name, shape)
            for name, shape in zip(names, shapes, strict=True)
        ]
    for name, shape, shard in zip(names, shapes, dims, strict=True):
        if shard is not None and not (isinstance(shard, int) and 0 <= shard < len(shape)):
            raise OptionError(
                f"tensor {name!r} of shape {list(shape)} cannot be cut along dimension {shard!r}: dimensions are "
                "counted from 0, and None leaves a tensor whole",
                tensor=name,
            )
        if shard is not None and shard >= WHOLE:
            raise OptionError(
                f"tensor {name!r} cannot be cut along dimension {shard}: only the first {WHOLE} can be",
                tensor=name,
            )
    return dims


def _matching(names: Sequence[str], patterns: Iterable[str], *, must_match: bool) -> set[str]:
    """Names, and names that match glob patterns. A name goes before a pattern: names may hold its characters."""
    known = set(names)
    matched = set()
    for pattern in patterns:
        if pattern in known:
            matched.add(pattern)
            continue
        matches = _glob(pattern).match
        found = {name for name in names if matches(name)}
        if must_match and not found:
            raise TensorNotFoundError(
                f"no tensor has the name {pattern!r}, or a name that matches it", tensor=pattern
            )
        matched |= found
    return matched


def _glob(pattern: str) -> re.Pattern[str]:
    """A glob pattern; an error for what no load takes for one."""
    plain = _CLASS.sub("-", pattern)
    wrong = None
    if "[" in plain:
        wrong = "a '[' has no ']' after at least one character"
    elif _PART_OF_A_COMPONENT.search(plain):
        wrong = "'**' stands alone between slashes, else '*' does"
    if wrong is not None:
        raise OptionError(f"{pattern!r} is neither the name of a tensor nor a glob pattern: {wrong}")
    return re.compile(fnmatch.translate(pattern))


def _numbered(pattern: str) -> Callable[[str], int | None]:
    """What finds the number in names that a pattern with one ``{}`` describes a part of."""
    before, braces, after = pattern.partition("{}")
    if not braces or "{}" in after:
        raise OptionError(f"pattern cannot be {pattern!r}: '{{}}' stands once in it, for the number")
    start = "" if before.startswith(".") else r"(?:^|\.)"
    search = re.compile(start + re.escape(before) + r"(\d+)" + re.escape(after)).search

    def number_in(name: str) -> int | None:
        found = search(name)
        return int(found[1]) if found else None

    return number_in
