"""Loading on many ranks together, over `torch.distributed`.

Examples:
    >>> from hoistway import distributed
    >>> tensors = distributed.load_file("models/llama", shards={"*.q_proj.weight": 0})  # doctest: +SKIP
    >>> print(tensors.report)  # doctest: +SKIP
"""

from __future__ import annotations

from hoistway.distributed._filters import expert_parallel, pipeline_range, tensor_parallel
from hoistway.distributed._load import DistributedTensors, TensorIterator, iter_tensors, load_file
from hoistway.distributed._report import DistributedReport

__all__ = [
    "DistributedReport",
    "DistributedTensors",
    "TensorIterator",
    "expert_parallel",
    "iter_tensors",
    "load_file",
    "pipeline_range",
    "tensor_parallel",
]
