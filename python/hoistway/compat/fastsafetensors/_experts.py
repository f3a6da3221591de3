"""Expert parallelism: which tensors a rank keeps, by the numbers of experts in their names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The experts of a rank, from the first to before the last: blocks of consecutive ones.

    Where they cannot be shared out evenly, the first ranks have one more.
    """
    if ep_size < 1:
        raise ValueError(f"ep_size cannot be {ep_size}: it must be at least 1")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank cannot be {ep_rank}: it must be from 0 to {ep_size - 1}")
    each, more = divmod(num_experts, ep_size)
    first = each * ep_rank + min(ep_rank, more)
    return first, first + each + (ep_rank < more)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: re.Pattern[str] = _PATTERN
) -> Callable[[str], bool]:
    """A predicate on names: a rank keeps its own experts, and whatever belongs to none.

    Args:
        num_experts: How many routed experts there are.
        ep_size: How many ranks share them out.
        ep_rank: Which of these this is.
        pattern: Finds an expert's number, as its first group.
    """
    owned = range(*owned_expert_range(num_experts, ep_size, ep_rank))

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or int(found[1]) in owned

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """The predicate that the environment describes; `None` if it describes none, or a single rank.

    ``FASTSAFETENSORS_EP_SLICE=1`` asks for it, ``FASTSAFETENSORS_EP_NUM_EXPERTS`` says how many there are,
    ``FASTSAFETENSORS_EP_SIZE`` and ``FASTSAFETENSORS_EP_RANK`` whose they are: by default what torch.distributed says,
    if it is set up, else ``WORLD_SIZE`` and ``RANK``.
    """
    experts = _number("FASTSAFETENSORS_EP_NUM_EXPERTS", 0)
    if os.environ.get("FASTSAFETENSORS_EP_SLICE") != "1" or experts <= 0:
        return None
    world_size, world_rank = _world()
    size = _number("FASTSAFETENSORS_EP_SIZE", 0)
    rank = _number("FASTSAFETENSORS_EP_RANK", -1)
    size = size if size > 0 else world_size
    rank = rank if rank >= 0 else world_rank
    return expert_parallel_filter(experts, size, rank) if size > 1 else None


def _world() -> tuple[int, int]:
    # The code that set it up has imported it.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return _number("WORLD_SIZE", 1), _number("RANK", 0)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
