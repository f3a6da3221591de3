"""What each rank gets: the same as if it had cut its part out of the whole itself, however the bytes travelled."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import hoistway
import numpy as np
import pytest
import torch
from conftest import BITS, make_cold, same_bytes, serving, write_model
from hoistway import distributed as wd
from hoistway.distributed import TensorIterator, _cost
from ranks import attempt, on_ranks, values
from write import File, Tensor

WINDOWS = ["1GiB", "700KiB"]
STRATEGIES = ["own", "share"]


def every_dtype(path: Path) -> Path:
    """Tensors of every type torch has, of even and odd sizes; names begin with the dimension to cut, or ``w``."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for dtype in BITS:
        if dtype.startswith("F6"):
            continue
        pair = 2 if dtype == "F4" else 1
        tensors |= {
            f"w.{dtype}": (dtype, [5, 6 * pair]),
            f"0.{dtype}": (dtype, [7, 4]),
            f"1.{dtype}": (dtype, [3, 7 * pair]),
            f"0.{dtype}.fewer rows than ranks": (dtype, [2, 2]),
            f"1.{dtype}.one row": (dtype, [1, 10]),
            f"1.{dtype}.fewer columns than ranks": (dtype, [5, 3 * pair]),
        }
    tensors |= {
        "w.scalar": ("BF16", []),
        "w.only scalars have this": ("U64", []),
        "w.nothing": ("I8", [0, 7]),
        "1.nothing": ("I8", [0, 7]),
        "2.deep": ("BF16", [16, 33, 65]),
        "1.experts": ("F16", [4, 9, 70]),
        "1.longer than a window": ("F32", [701, 333]),
        "w.longer than a window": ("F32", [1001, 333]),
        "w.one dimension": ("U8", [1_300_001]),
        "0.one dimension": ("BF16", [130_001]),
    }
    return write_model(path, tensors)


def part(whole: torch.Tensor, name: str, rank: int, ranks: int) -> torch.Tensor:
    """What a rank shall get of a tensor, cut by the plain rule."""
    if name[0] == "w":
        return whole
    dim = int(name[0])
    block = -(-whole.shape[dim] // ranks)
    start, stop = (min(bound * block, whole.shape[dim]) for bound in (rank, rank + 1))
    return whole.narrow(dim, start, stop - start)


def dim_of(name: str, shape: tuple[int, ...]) -> int | None:
    return None if name[0] == "w" else int(name[0])


def compare_with_whole(rank: int, path: str, ranks: int, nodes: int) -> int:
    with hoistway.open(path) as checkpoint:
        order = checkpoint.keys()
        whole = checkpoint.load()
    compared = 0
    for strategy, window in itertools.product(STRATEGIES, WINDOWS):
        arguments: dict[str, Any] = {
            "shards": dim_of,
            "strategy": strategy,
            "max_in_flight": window,
            "timeout": 40,
            "node": rank * nodes // ranks,
        }
        loaded = wd.load_file(path, **arguments)
        assert loaded.report.strategy == strategy
        with wd.iter_tensors(path, **arguments) as tensors:
            streamed = list(tensors)
        assert list(loaded) == [name for name, _ in streamed] == order
        for name, tensor in [*loaded.items(), *streamed]:
            assert same_bytes(tensor, part(whole[name], name, rank, ranks)), (strategy, window, name)
            compared += 1
    return compared


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_every_type_and_size_is_cut_as_one_rank_would(ranks: int, nodes: int, tmp_path: Path) -> None:
    path = every_dtype(tmp_path / "m.safetensors")
    compared = values(on_ranks(compare_with_whole, ranks, tmp_path, str(path), ranks, nodes))
    assert compared == [len(hoistway.open(path)) * 8] * ranks


def gguf_parts(rank: int, path: str) -> None:
    whole = hoistway.load_file(path)
    for strategy in STRATEGIES:
        loaded = wd.load_file(path, shards={"rows": 0, "columns": 1}, strategy=strategy, timeout=40)
        halves = {
            "rows": (slice(5 * rank, 5 * rank + 5),),
            "columns": (slice(None), [slice(0, 36), slice(36, 54)][rank]),
        }
        for name, tensor in loaded.items():
            assert torch.equal(tensor, whole[name][halves.get(name, ...)]), (strategy, name)


def test_quantised_tensors_are_cut_between_blocks(tmp_path: Path) -> None:
    # Blocks of Q4_0 are 32 elements in 18 bytes: three in a row go two and one.
    tensors = [
        Tensor(name, shape, "Q4_0", data=np.random.default_rng(0).bytes(Tensor(name, shape, "Q4_0").size))
        for name, shape in {"rows": [10, 96], "columns": [10, 96], "whole": [3, 32]}.items()
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(File((), tensors).to_bytes())
    values(on_ranks(gguf_parts, 2, tmp_path, str(path)))


def irregular(rank: int, path: str) -> None:
    """Ranks that want different tensors, and different parts of the same one."""
    whole = hoistway.load_file(path)
    for strategy in STRATEGIES:
        loaded = wd.load_file(
            path,
            select=["0.*", "1.*", "w.*"][: rank + 1],
            exclude="*.BOOL",
            shards=(lambda name, shape: None) if rank == 2 else dim_of,
            strategy=strategy,
            max_in_flight="1MiB",
            timeout=40,
        )
        assert {name[0] for name in loaded} == set("01w"[: rank + 1])
        for name, tensor in loaded.items():
            expected = whole[name] if rank == 2 else part(whole[name], name, rank, 3)
            assert same_bytes(tensor, expected), (strategy, name)


def test_ranks_may_want_different_tensors_and_parts(tmp_path: Path) -> None:
    path = every_dtype(tmp_path / "m.safetensors")
    values(on_ranks(irregular, 3, tmp_path, str(path)))


def storage_bytes() -> int:
    """What this process has had read from drives."""
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def counted(rank: int, path: str, ranks: int, arguments: dict[str, Any]) -> tuple[int, int, int]:
    if "nodes" in arguments:
        arguments["node"] = rank * arguments.pop("nodes") // ranks
    before = storage_bytes()
    report = wd.load_file(path, direct="always", timeout=40, **arguments).report
    return report.read_bytes, storage_bytes() - before, report.received_bytes


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        ({"strategy": "share"}, 1),
        ({"strategy": "share", "nodes": 2}, 2),
        ({"strategy": "share", "shards": {"*": 1}}, 1),
        ({"strategy": "own"}, 4),
        ({"strategy": "own", "shards": {"*": 0}}, 1),
        ({"strategy": "share", "shards": {"*": 0}}, 1),
    ],
    ids=str,
)
def test_bytes_are_read_once_a_node_or_by_their_owner(
    arguments: dict[str, Any], times: int, tmp_path: Path
) -> None:
    path = write_model(
        tmp_path / "m.safetensors", {f"t{i}": ("BF16", [1024, 1024 + 64 * i]) for i in range(12)}
    )
    size = os.path.getsize(path)
    make_cold(path)
    counts = values(on_ranks(counted, 4, tmp_path, str(path), 4, arguments))
    reported, from_drive, received = map(sum, zip(*counts, strict=True))
    assert reported == pytest.approx(times * size, rel=0.02)
    # Python itself may read a module of its own meanwhile.
    assert 0.98 * times * size <= from_drive <= 1.02 * times * size + (4 << 20)
    shares = arguments["strategy"] == "share" and arguments.get("shards") != {"*": 0}
    assert (received > 0) == shares
    if shares:
        each = size * times / 4
        assert all(read == pytest.approx(each, rel=0.02) for read, *_ in counts)


def expert_bytes(rank: int, path: str, placement: str) -> tuple[int, list[str]]:
    keep = wd.expert_parallel(16, placement=placement)
    loaded = wd.load_file(path, select=keep, direct="always", timeout=40)
    return loaded.report.read_bytes, list(loaded)


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_a_rank_reads_its_experts_and_no_others(placement: str, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": ("BF16", [256, 1024])
        for layer in range(4)
        for expert in range(16)
    }
    path = write_model(tmp_path / "m.safetensors", {"model.norm.weight": ("BF16", [1024]), **tensors})
    outcomes = values(on_ranks(expert_bytes, 4, tmp_path, str(path), placement))
    assert [read for read, _ in outcomes] == [pytest.approx(os.path.getsize(path) / 4, rel=0.02)] * 4
    names = [name for _, kept in outcomes for name in kept]
    assert sorted(set(names)) == sorted([*tensors, "model.norm.weight"])
    assert len(names) == len(tensors) + 4


def peak_growth(rank: int, path: str) -> int:
    def peak() -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    small = path.replace("large", "small")
    for _ in wd.iter_tensors(small, strategy="share", timeout=40):
        pass
    before = peak()
    taken = 0
    for _, tensor in wd.iter_tensors(path, strategy="share", max_in_flight="24MiB", timeout=40):
        taken += tensor.nbytes
    assert taken == 208 << 20
    return peak() - before


def test_windows_bound_the_memory_of_a_stream(tmp_path: Path) -> None:
    write_model(tmp_path / "small.safetensors", {"t": ("BF16", [1024, 1024])})
    path = write_model(tmp_path / "large.safetensors", {f"t{i}": ("BF16", [1024, 2048]) for i in range(52)})
    growth = values(on_ranks(peak_growth, 2, tmp_path, str(path)))
    # The bound, and the staging of a load.
    assert max(growth) < (24 + 40) << 20, [each >> 20 for each in growth]


def with_own_messages(rank: int, path: str) -> bool:
    import torch.distributed as dist  # noqa: PLC0415

    taken = []
    for name, tensor in wd.iter_tensors(path, strategy="share", max_in_flight="1MiB", timeout=40):
        number = torch.tensor([len(taken) * (rank + 1)])
        dist.all_reduce(number)
        assert number.item() == 3 * len(taken)
        taken.append((name, tensor))
    return len(taken) == len(hoistway.open(path))


def test_between_tensors_the_group_is_the_callers(tmp_path: Path) -> None:
    path = every_dtype(tmp_path / "m.safetensors")
    assert values(on_ranks(with_own_messages, 2, tmp_path, str(path))) == [True, True]


def reports_of(rank: int, path: str, small: str) -> dict[str, Any]:
    auto = wd.load_file(path, timeout=40).report
    return {
        "auto": auto.as_dict() | {"text": str(auto)},
        "disjoint": wd.load_file(path, shards={"*": 0}, timeout=40).report.as_dict(),
        "small": wd.load_file(small, timeout=40).report.as_dict(),
        "asked": wd.load_file(small, strategy="share", timeout=40).report.as_dict(),
    }


def test_auto_weighs_measured_rates_and_says_so_on_every_rank_alike(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("BF16", [1024, 2048]) for i in range(24)})
    small = write_model(tmp_path / "small.safetensors", {"t": ("BF16", [1024, 1024])})
    first, second = values(on_ranks(reports_of, 2, tmp_path, str(path), str(small)))
    assert first["auto"]["reasons"] == second["auto"]["reasons"]
    auto = first["auto"]
    seconds = auto["estimated_seconds"]
    assert auto["strategy"] == min(seconds, key=seconds.get)
    assert len(auto["storage_rates"]) == 2
    assert auto["link_rate"] > 0
    assert all(reason in auto["text"] for reason in auto["reasons"])
    # Measurements are not counted among the reads.
    assert auto["reads"]["tensor_bytes"] == auto["tensor_bytes"] - auto["received_bytes"]
    assert "no two ranks" in first["disjoint"]["reasons"][0]
    assert "too little" in first["small"]["reasons"][0]
    assert first["asked"]["strategy"] == "share"
    assert first["asked"]["reasons"] == ("it was asked for",)


def outside(rank: int, path: str) -> list[Any]:
    import torch.distributed as dist  # noqa: PLC0415

    pair = dist.new_group([1, 2])
    if rank == 0:
        return [attempt(lambda: wd.load_file(path, group=pair)).message]
    loaded = wd.load_file(path, group=pair, shards={"t": 0}, timeout=40)
    return [loaded.report.rank, loaded.report.ranks, loaded["t"].shape[0]]


def with_types_left_out(rank: int, path: str, big: str, many: str) -> list[Any]:
    """Rank 1 wants nothing of type F32, of which rank 0 does."""
    outcomes = [
        attempt(lambda arguments=arguments: sorted(wd.load_file(path, timeout=40, **arguments)))
        for arguments in (
            {"exclude": ["f6", "f64"]},
            {"select": ["u8", "f32"] if rank == 0 else "u8", "strategy": "share"},
            {"select": "f6"},
        )
    ]
    outcomes.append(attempt(lambda: sorted(wd.load_file(big, select="bytes*", timeout=40))))
    outcomes.append(attempt(lambda: sorted(wd.load_file(big, timeout=40))))
    outcomes.append(attempt(lambda: wd.load_file(many, shards={"a": 254}, timeout=40)))
    outcomes.append(attempt(lambda: wd.load_file(path, timeout="5")))  # type: ignore[arg-type]
    return [outcome.value or (outcome.error, outcome.message) for outcome in outcomes]


def test_types_that_cannot_be_loaded_may_be_left_out(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.safetensors",
        {"f6": ("F6_E2M3", [4]), "u8": ("U8", [4]), "f32": ("F32", [1000, 1000]), "f64": ("F64", [4])},
    )
    big = tmp_path / "big.gguf"
    tensors = [Tensor("numbers", [8], "F32", data=bytes(32)), Tensor("bytes", [32], "I8", data=bytes(32))]
    big.write_bytes(File([], tensors, order=">").to_bytes())
    many = write_model(tmp_path / "many.safetensors", {"a": ("U8", [1] * 260 + [4])})
    for rank, outcomes in enumerate(
        values(on_ranks(with_types_left_out, 2, tmp_path, str(path), str(big), str(many)))
    ):
        excluded, selected, wanted, single_bytes, reversed_, dimension, timeout = outcomes
        assert excluded == ["f32", "u8"]
        assert selected == (["f32", "u8"] if rank == 0 else ["u8"])
        assert wanted[0] == "UnsupportedDtypeError"
        assert "'f6'" in wanted[1]
        assert single_bytes == ["bytes"]
        assert reversed_[0] == "UnsupportedDtypeError"
        assert "'numbers'" in reversed_[1]
        assert dimension[0] == "OptionError"
        assert "254" in dimension[1]
        assert timeout[0] == "OptionError"


def sizes_of_unlike_wants(rank: int, f4: str, mixed: list[str]) -> list[Any]:
    cases: list[tuple[Any, list[list[str]]]] = [
        (f4, [["e", "c"], ["f", "c"]]),
        (mixed, [["little", "bytes"], ["bytes"]]),
    ]
    arguments: dict[str, Any] = {"strategy": "share", "max_in_flight": "6MiB", "timeout": 40}
    outcomes = [
        attempt(lambda paths=paths, wants=wants: sorted(wd.load_file(paths, select=wants[rank], **arguments)))
        for paths, wants in cases
    ]
    return [outcome.value or (outcome.error, outcome.message) for outcome in outcomes]


def test_ranks_that_want_different_tensors_of_a_type_plan_alike(tmp_path: Path) -> None:
    # The empty tensor does not show how long a pair is, nor does the big-endian one how long a number is.
    shapes = {"e": ("F4", [0]), "f": ("F4", [2000, 2000]), "c": ("U8", [2000, 1000])}
    f4 = write_model(tmp_path / "m.safetensors", shapes)
    numbers = Tensor("little", [1000, 1000], "F32", data=bytes(4_000_000))
    single = Tensor("bytes", [4096], "I8", data=bytes(4096))
    mixed = [tmp_path / "big.gguf", tmp_path / "little.gguf"]
    mixed[0].write_bytes(File([], [Tensor("big", [8, 8], "F32", data=bytes(256))], order=">").to_bytes())
    mixed[1].write_bytes(File([], [numbers, single]).to_bytes())
    first, second = values(
        on_ranks(sizes_of_unlike_wants, 2, tmp_path, str(f4), [str(path) for path in mixed])
    )
    assert first == [["c", "e"], ["bytes", "little"]]
    assert second == [["c", "f"], ["bytes"]]


def test_a_group_may_be_a_part_of_the_ranks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"t": ("BF16", [9, 8])})
    apart, first, second = values(on_ranks(outside, 3, tmp_path, str(path)))
    assert "not in the group" in apart[0]
    assert [first, second] == [[0, 2, 5], [1, 2, 4]]


def test_without_a_group_the_error_says_what_to_call(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"t": ("BF16", [9, 8])})
    with pytest.raises(hoistway.errors.OptionError, match="init_process_group"):
        wd.load_file(path)


def test_the_iterator_is_one_of_the_packages_types() -> None:
    assert issubclass(wd.DistributedTensors, hoistway.LoadedTensors)
    assert TensorIterator in (getattr(wd, name) for name in wd.__all__)


def reports_on_the_way(rank: int, path: str) -> list[dict[str, Any]]:
    reports = []
    with wd.iter_tensors(path, strategy="share", max_in_flight="96KiB", timeout=40) as tensors:
        reports.append(tensors.report.as_dict())
        for _ in tensors:
            reports.append(tensors.report.as_dict())
    reports += [tensors.report.as_dict(), tensors.report.as_dict()]
    return reports


def test_a_report_has_what_was_done_and_no_more(tmp_path: Path) -> None:
    # Odd sizes, so that tensors do not lie side by side in a bundle.
    path = str(
        write_model(tmp_path / "m.safetensors", {f"t{number:02}": ("U8", [1001]) for number in range(64)})
    )
    for reports in values(on_ranks(reports_on_the_way, 2, tmp_path, path)):
        assert [reports[0][key] for key in ("steps", "sent_bytes", "received_bytes")] == [0, 0, 0]
        steps = [report["steps"] for report in reports]
        assert steps == sorted(steps)
        assert steps[1] == 1 < steps[-1]
        assert reports[-1]["received_bytes"] + reports[-1]["sent_bytes"] == 64 * 1001
        assert reports[-1]["seconds"] == reports[-2]["seconds"] >= reports[-3]["seconds"] > 0


def with_little_memory(rank: int, path: str) -> tuple[int, dict[str, Any]]:
    # So that sharing would be measured, and win.
    _cost.SMALL_BYTES = 0
    _cost.decide = lambda *_: _cost.Decision("share", ("it always wins",), {})
    loaded = wd.load_file(path, max_in_flight="3KiB", timeout=40)
    return len(loaded), loaded.report.as_dict()


def test_auto_reads_alone_where_memory_does_not_do_for_sharing(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("BF16", [8, 4096]), "b": ("BF16", [16])})
    for count, report in values(on_ranks(with_little_memory, 2, tmp_path, str(path))):
        assert (count, report["strategy"]) == (2, "own")
        (refusal,) = report["refused"]
        assert refusal["what"] == "strategy share"
        assert "max_in_flight is too small for tensor 'a'" in refusal["reason"]


def storages_of(rank: int, path: str) -> tuple[int, int]:
    loaded = wd.load_file(path, strategy="share", timeout=40, layout="tensor")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in loaded.values()}
    return len(storages), max(storage.nbytes() for storage in storages.values())


def test_small_tensors_that_travelled_together_share_no_storage(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{number}": ("BF16", [64, 16]) for number in range(32)})
    for storages, largest in values(on_ranks(storages_of, 2, tmp_path, str(path))):
        assert storages == 32
        assert largest < 4 * 64 * 16 * 2


def from_store(rank: int, path: str, endpoint: str, cache: str | None) -> None:
    whole = hoistway.load_file(path)
    store: hoistway.StoreOptions = {"endpoint": endpoint, "anonymous": True}
    for strategy in STRATEGIES:
        loaded = wd.load_file("s3://models/", strategy=strategy, store=store, cache=cache, timeout=30)
        assert loaded.keys() == whole.keys()
        assert all(same_bytes(loaded[name], whole[name]) for name in whole)
        reads = loaded.report.reads
        assert {carrier.route for carrier in reads.carriers} <= {"http", "node-cache"}
        all_bytes = sum(tensor.nbytes for tensor in whole.values())
        assert (reads.tensor_bytes < 0.9 * all_bytes) == (strategy == "share")


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_store_is_read_by_all_ranks_or_once_for_all(has_cache: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOISTWAY_CACHE_BYTES", "1GiB")
    folder = tmp_path / "store" / "models"
    folder.mkdir(parents=True)
    for part in (1, 2):
        write_model(
            folder / f"{part}.safetensors", {f"{part}.{n}": ("F32", [300, 1000]) for n in range(4)}, seed=part
        )
    cache = str(tmp_path / "cache") if has_cache else None
    with serving(tmp_path / "store") as endpoint:
        values(on_ranks(from_store, 2, tmp_path, str(folder), endpoint, cache))
