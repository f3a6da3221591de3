"""Several ranks of a test: ``python fastsafetensors_ranks.py RANKS STORE FILE...``.

It ends with an error unless every tensor is, on every rank, what one rank alone would have cut out of the files.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fastsafetensors
import hoistway
import hoistway.compat.fastsafetensors as fst
import torch
import torch.distributed as dist
from hoistway.errors import DistributedError, SliceError, UnsupportedDtypeError


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Narrow floats as bytes: torch can compare and cut those."""
    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if narrow else tensor


def check(tensor: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert tensor.dtype == expected.dtype, what
    assert tensor.shape == expected.shape, f"{what}: {tensor.shape} instead of {expected.shape}"
    mine, other = plain(tensor).contiguous(), plain(expected).contiguous()
    assert mine.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8)), what


class Case:
    """The files in a buffer of all ranks, and what is in them."""

    def __init__(self, files: list[str]) -> None:
        self.group = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.files = files
        self.whole = hoistway.load_file(files)

    def loader(self, library: Any = fst, **options: Any) -> Any:
        loader = library.SafeTensorsFileLoader(self.group, "cpu", nogds=True, max_threads=2, **options)
        loader.add_filenames({rank: self.files[rank :: self.ranks] for rank in range(self.ranks)})
        return loader

    def buffer(self, library: Any = fst, **options: Any) -> Any:
        return self.loader(library, **options).copy_files_to_device()

    def part(self, name: str, dim: int, rank: int) -> torch.Tensor:
        """The rule: blocks of the size divided by the number of ranks, rounded up."""
        tensor = self.whole[name]
        block = -(-tensor.shape[dim] // self.ranks)
        cut = [slice(None)] * tensor.dim()
        cut[dim] = slice(rank * block, (rank + 1) * block)
        return plain(tensor)[tuple(cut)].view(tensor.dtype)

    def can_be_cut(self, name: str, dim: int) -> bool:
        tensor = self.whole[name]
        is_packed = tensor.dtype == torch.float4_e2m1fn_x2 and dim == tensor.dim() - 1
        return not is_packed or -(-tensor.shape[dim] * 2 // self.ranks) % 2 == 0


def whole_tensors_are_on_every_rank(case: Case) -> None:
    buffer = case.buffer()
    assert set(buffer.key_to_rank_lidx) == set(case.whole)
    for name, tensor in case.whole.items():
        check(buffer.get_tensor(name), tensor, name)
    owned = [name for name, (rank, _) in buffer.key_to_rank_lidx.items() if rank == case.rank]
    assert (buffer.report is not None) == bool(owned), "each rank loads its own files alone"
    assert buffer.report is None or buffer.report.tensors == len(owned)


def parts_follow_the_rule(case: Case) -> None:
    for dim in range(3):
        buffer = case.buffer()
        for name, tensor in case.whole.items():
            if dim >= tensor.dim():
                continue
            if case.can_be_cut(name, dim):
                check(buffer.get_sharded(name, dim), case.part(name, dim, case.rank), f"{name} {dim}")
            else:
                fails(SliceError, lambda name=name, dim=dim, buffer=buffer: buffer.get_sharded(name, dim))


def parts_are_joined(case: Case) -> None:
    for names in (["q", "k", "v"], ["v", "q"], ["k", "k"], ["q.e4m3", "k.e4m3"]):
        for dim in (0, 1):
            buffer = case.buffer()
            joined = buffer.get_multi_cols(names, dim)
            # Tensors of one file stay in order; files follow in that of ranks.
            order = sorted(names, key=buffer.key_to_rank_lidx.__getitem__)
            parts = [case.part(name, dim, case.rank) for name in order]
            expected = torch.cat([plain(part) for part in parts], dim).view(parts[0].dtype)
            check(joined.get_raw(), expected, f"{names} {dim}")


def dictionaries_mix_whole_and_parts(case: Case) -> None:
    found = case.buffer().as_dict({"q": 0, "k": 1, "v": -1, "scalar": -1})
    check(found["q"].get_raw(), case.part("q", 0, case.rank), "q")
    check(found["k"].get_raw(), case.part("k", 1, case.rank), "k")
    check(found["v"].get_raw(), case.whole["v"], "v")
    check(found["scalar"].get_raw(), case.whole["scalar"], "scalar")


def one_rank_gets_a_pushed_tensor(case: Case) -> None:
    buffer = case.buffer()
    for destination in range(case.ranks):
        for name, tensor in case.whole.items():
            pushed = buffer.push_tensor(name, destination)
            assert (pushed is not None) == (case.rank == destination or case.ranks == 1)
            if pushed is not None:
                check(pushed, tensor, name)


def files_are_released_once_taken(case: Case) -> None:
    loader = case.loader()
    buffer = loader.copy_files_to_device()
    kept = {name: buffer.get_tensor(name) for name in case.whole}
    assert (
        not any(file.tensors for files in buffer.rank_loaders.values() for file in files) or case.ranks == 1
    )
    if case.ranks > 1:
        # The error is the same on all ranks: no rank waits for another.
        fails(ValueError, lambda: buffer.get_tensor("q"))
    buffer.close()
    loader.close()
    fails(ValueError, lambda: buffer.get_tensor("q"))
    for name, tensor in case.whole.items():
        check(kept[name], tensor, name)


def a_cache_keeps_what_was_exchanged(case: Case) -> None:
    buffer = case.buffer(disable_cache=False)
    for name in case.whole:
        first = buffer.get_tensor(name)
        if case.ranks > 1:
            plain(first).zero_()
        check(buffer.get_tensor(name), case.whole[name], name)
    check(buffer.get_tensor("q"), case.whole["q"], "q, after its file was released")


def conversions_reach_all_ranks(case: Case) -> None:
    loader = case.loader()
    loader.set_tensor_filter(lambda name: name in ("q", "k", "v"))
    buffer = loader.copy_files_to_device(dtype=fst.DType.BF16)
    for name in ("q", "k", "v"):
        check(buffer.get_tensor(name), case.whole[name].to(torch.bfloat16), name)
    fails(UnsupportedDtypeError, lambda: loader.copy_files_to_device(dtype=fst.DType.F64))


def weights_come_in_the_order_of_the_files(case: Case) -> None:
    loader = fst.ParallelLoader(
        case.group, case.files, use_tqdm_on_load=False, max_batch_bytes=4096, nogds=True
    )
    weights = list(loader.iterate_weights())
    loader.close()
    assert [name for name, _ in weights] == hoistway.open(case.files).keys()
    for name, tensor in weights:
        check(tensor, case.whole[name], name)
    assert loader.report is not None
    if case.ranks > 1:
        fails(
            ValueError,
            lambda: fst.ParallelLoader(case.group, case.files, tensor_filter=lambda name: name == "q"),
        )
    alone = fst.ParallelLoader(
        case.group, case.files, use_tqdm_on_load=False, all_local=True, tensor_filter=lambda name: name == "q"
    )
    (only,) = alone.iterate_weights()
    check(only[1], case.whole["q"], "q")


def files_that_fail_on_one_rank_fail_on_all(case: Case) -> None:
    def load(files: list[str], **options: Any) -> None:
        fst.ParallelLoader(case.group, files, use_tqdm_on_load=False, **options)

    absent = [*case.files, "absent.safetensors"]
    # As if alone where all fail alike.
    fails(FileNotFoundError, lambda: load(absent))
    if case.ranks > 1:
        last = case.ranks - 1
        error = fails(DistributedError, lambda: load(absent if case.rank == last else case.files))
        assert "absent.safetensors" in str(error)
        assert error.rank == last
        budget = {} if case.rank else {"device_memory_budget": 1}
        assert "budget" in str(fails(DistributedError, lambda: load(case.files, **budget)))
    fails(ValueError, lambda: load(case.files, timeout=0))
    loader = fst.ParallelLoader(case.group, case.files, use_tqdm_on_load=False, timeout=30)
    assert len(list(loader.iterate_weights())) == len(case.whole)


def errors_are_alike_on_all_ranks(case: Case) -> None:
    buffer = case.buffer()
    fails(ValueError, lambda: buffer.get_tensor("absent"))
    if case.ranks > 1:
        fails(IndexError, lambda: buffer.get_sharded("q", 2))
        fails(IndexError, lambda: buffer.get_multi_cols(["q", "scalar"], 0))
        # In one file, and in two.
        fails(IndexError, lambda: buffer.get_multi_cols(["q", "q.e4m3"], 0))
        fails(IndexError, lambda: buffer.get_multi_cols(["k", "k.bf16"], 0))
        fails(IndexError, lambda: buffer.get_multi_cols(["q", "k.bf16"], 0))
        fails(RuntimeError, lambda: next(buffer.iter_local_tensors(["q"])))
        fails(ValueError, lambda: case.loader().copy_files_to_device(borrowed_tensors=True))
    check(buffer.get_tensor("q"), case.whole["q"], "q, after errors")


def fastsafetensors_gives_the_same(case: Case) -> None:
    # They part what divides evenly, of types that they and the backend know.
    case = Case(case.files[:2])
    for dim in (-1, 0, 1):
        mine, theirs = case.buffer(), case.buffer(fastsafetensors)
        assert mine.key_to_rank_lidx == theirs.key_to_rank_lidx
        for name in ("q", "k", "v"):
            check(mine.get_sharded(name, dim), theirs.get_sharded(name, dim), f"{name} {dim}")
    for dim in (0, 1):
        mine, theirs = case.buffer(), case.buffer(fastsafetensors)
        joined = [buffer.get_multi_cols(["v", "q", "k"], dim).get_raw() for buffer in (mine, theirs)]
        check(joined[0], joined[1], f"v, q, k {dim}")


def fails(kind: type[Exception], call: Callable[[], Any]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


CASES = (
    whole_tensors_are_on_every_rank,
    parts_follow_the_rule,
    parts_are_joined,
    dictionaries_mix_whole_and_parts,
    one_rank_gets_a_pushed_tensor,
    files_are_released_once_taken,
    a_cache_keeps_what_was_exchanged,
    conversions_reach_all_ranks,
    weights_come_in_the_order_of_the_files,
    files_that_fail_on_one_rank_fail_on_all,
    errors_are_alike_on_all_ranks,
    fastsafetensors_gives_the_same,
)


def run_rank(rank: int, ranks: int, store: str, files: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    # As in the tests of hoistway.distributed: a rank that ends before all are connected breaks the others' connections.
    dist.barrier()
    case = Case(files)
    for check_case in CASES:
        check_case(case)
        if rank == 0:
            print(check_case.__name__, flush=True)
    dist.destroy_process_group()


def main() -> None:
    ranks, store, *files = sys.argv[1:]
    # torch is imported once for all.
    children: list[int] = []
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, int(ranks), store, files)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            # The others would wait for it.
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(1)


if __name__ == "__main__":
    main()
