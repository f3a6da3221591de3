"""The limit on bytes in flight, from queues, batches and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hoistway.compat.fastsafetensors._errors import BudgetInfeasibleError
from hoistway.errors import OptionError

# The default bytes of one place in the queue: many reads' worth, and little beside the weights.
_BATCH = 512 << 20


def bytes_in_flight(
    sizes: Mapping[str, int],
    *,
    queue_size: int,
    max_batch_bytes: int | None,
    device_memory_budget: int | None,
    stays: Callable[[str], bool],
) -> int:
    """Bytes of tensors that may be loaded ahead of the consumer, with the one that it was given last.

    Args:
        sizes: Bytes of each tensor.
        queue_size: Batches that wait for the consumer; -1 for one batch in all.
        max_batch_bytes: Bytes of a batch.
        device_memory_budget: Bytes that all tensors which stay, and those on their way, may have together.
        stays: Whether the consumer keeps a tensor where it was loaded.
    """
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if max_batch_bytes is not None and largest is not None and sizes[largest] > max_batch_bytes:
        raise OptionError(
            f"max_batch_bytes cannot be {max_batch_bytes}: tensor {largest!r} has {sizes[largest]} bytes"
        )
    depth = 1 if queue_size < 0 else queue_size + 2
    in_flight = depth * (_BATCH if max_batch_bytes is None else max_batch_bytes)
    if device_memory_budget is None:
        return in_flight
    resident = sum(size for name, size in sizes.items() if stays(name))
    passing = max((size for name, size in sizes.items() if not stays(name)), default=0)
    # Of those that pass, the consumer has one while the next arrives.
    if resident + 2 * passing > device_memory_budget:
        raise BudgetInfeasibleError(
            f"device_memory_budget of {device_memory_budget} bytes is too small: {resident} bytes stay, and two "
            f"tensors of up to {passing} bytes are on their way at a time"
        )
    return min(in_flight, device_memory_budget - (resident if passing else 0))
