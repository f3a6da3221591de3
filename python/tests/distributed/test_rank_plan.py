"""Plans, decisions and filters by themselves: no process, no file."""

from __future__ import annotations

import doctest
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hoistway
import pytest
from conftest import write_model
from hoistway import _native, _words
from hoistway import distributed as wd
from hoistway.distributed import _cost, _filters, _memory, _plan, _sizes, _wants
from hoistway.distributed._catalog import Catalog, Element, Entry
from hoistway.distributed._cost import decide, decided_without_measuring, work_of
from hoistway.distributed._link import refusal
from hoistway.distributed._memory import check_memory, needed_bytes
from hoistway.distributed._plan import BUNDLE_BYTES, CUT_BYTES, Plan, make_plan, part_bytes, piece_bytes
from hoistway.distributed._wants import NOTHING, WHOLE, Wants
from hoistway.errors import MemoryBudgetError, OptionError, TensorNotFoundError


def catalog_of(*shapes: Sequence[int], nbytes: int = 2) -> Catalog:
    """Tensors of elements of some bytes."""
    entries = tuple(
        Entry(
            f"t{i}",
            "T",
            tuple(shape),
            1,
            False,
            next((d for d, n in enumerate(shape) if n > 1), len(shape) - 1),
        )
        for i, shape in enumerate(shapes)
    )
    return Catalog(entries, {"T": Element(None, nbytes, 1)}, ())


def wants_of(catalog: Catalog, *codes: Sequence[int]) -> Wants:
    return Wants(catalog, [bytes(code) for code in codes])


def rows_wanted(catalog: Catalog, wants: Wants, rank: int, tensor: int) -> set[int]:
    """Rows of which a rank wants bytes."""
    if not part_bytes(catalog, wants, rank, tensor):
        return set()
    part = wants.part(rank, tensor)
    entry = catalog.entries[tensor]
    return set(
        range(entry.rows) if part is None or part.dim != entry.row_dim else range(part.start, part.stop)
    )


def check(catalog: Catalog, wants: Wants, nodes: list[list[int]], window: int) -> None:
    plans = [make_plan(catalog, wants, nodes, rank, window) for rank in range(wants.ranks)]
    assert len({(plan.digest, len(plan.steps)) for plan in plans}) == 1
    for node in nodes:
        reads: Counter[tuple[int, int]] = Counter()
        for rank in node:
            check_rank(catalog, wants, rank, plans[rank], window)
            assert [step.parcels for step in plans[rank].steps] == [
                step.parcels for step in plans[node[0]].steps
            ]
        for step in plans[node[0]].steps:
            for parcel in step.parcels:
                assert 0 <= parcel.reader < len(node)
                sizes = [piece_bytes(catalog, piece) for piece in parcel.pieces]
                assert len(sizes) == 1 or sum(sizes) <= BUNDLE_BYTES
                for piece in parcel.pieces:
                    reads.update((piece.tensor, row) for row in range(piece.start, piece.stop))
                    whole = all(wants.code(rank, piece.tensor) == WHOLE for rank in node)
                    assert parcel.is_for_all == whole
        assert not reads or max(reads.values()) == 1, "rows are read twice"


def check_rank(catalog: Catalog, wants: Wants, rank: int, plan: Plan, window: int) -> None:
    """It gets all that it wants, once, in order, and never holds more than the window but for one tensor."""
    got: dict[int, set[int]] = {}
    done: list[int] = []
    for step in plan.steps:
        for parcel in step.parcels:
            for piece in parcel.pieces:
                got.setdefault(piece.tensor, set()).update(range(piece.start, piece.stop))
        for tensor in step.own:
            assert tensor not in got
            got[tensor] = rows_wanted(catalog, wants, rank, tensor)
        held = sum(part_bytes(catalog, wants, rank, tensor) for tensor in step.own)
        held += sum(piece_bytes(catalog, piece) for parcel in step.parcels for piece in parcel.pieces)
        assert held <= window or (len(step.own) == 1 and not step.parcels)
        for tensor in step.done:
            assert rows_wanted(catalog, wants, rank, tensor) <= got[tensor]
        done += step.done
    wanted = [tensor for tensor in range(len(catalog.entries)) if wants.code(rank, tensor) != NOTHING]
    assert done == wanted


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_brings_each_rank_what_it_wants_and_reads_it_once(seed: int) -> None:
    generator = random.Random(seed)
    shapes = [
        [generator.choice([0, 1, 1, 2, 3, 7, 64, 500]) for _ in range(generator.randint(1, 3))]
        for _ in range(generator.randint(1, 30))
    ]
    catalog = catalog_of(*shapes, nbytes=generator.choice([1, 2, 4000]))
    ranks = generator.choice([1, 2, 3, 4, 8])
    alike = generator.random() < 0.5

    def codes() -> list[int]:
        choices = [WHOLE, WHOLE, *range(3)] + [NOTHING] * generator.randint(0, 3)
        return [
            min(code, len(shape) - 1) if (code := generator.choice(choices)) < 3 else code for shape in shapes
        ]

    first = codes()
    wants = wants_of(catalog, *(first if alike else codes() for _ in range(ranks)))
    cut = generator.randint(1, ranks)
    nodes = [node for node in (list(range(cut)), list(range(cut, ranks))) if node]
    largest_row = max(
        nbytes // max(entry.rows, 1) for nbytes, entry in zip(catalog.nbytes, catalog.entries, strict=True)
    )
    check(catalog, wants, nodes, generator.choice([largest_row + 1, 1 << 20, 1 << 40]))


@pytest.mark.parametrize("nodes", [[[0, 3], [1, 2]], [[1, 2], [0, 3]], [[0, 2], [1, 3]], [[3, 1], [2, 0]]])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nodes_whose_ranks_are_interleaved_keep_to_the_window(nodes: list[list[int]], size: int) -> None:
    # Of a dimension of three, the last of four ranks has nothing: its node shares nothing, the other does.
    catalog = catalog_of([64, size], [64, size], [64, size])
    wants = wants_of(catalog, *[[1, 1, 1]] * 4)
    check(catalog, wants, nodes, catalog.nbytes[0] * 3 // 2)
    check(catalog, wants, nodes, catalog.nbytes[0] // 2 + size)
    work = work_of(catalog, wants, nodes)
    for number, node in enumerate(nodes):
        readers = sum(rank < size for rank in node)
        expected = sum(catalog.nbytes) if readers > 1 else sum(work.own_bytes[rank] for rank in node)
        assert work.node_bytes[number] == expected


@pytest.mark.parametrize("kind", ["whole", "experts"])
def test_planning_asks_little_of_each_of_many_tensors(kind: str) -> None:
    # Calls rather than time, which other processes have a part in.
    count, ranks = 3000, 8
    catalog = catalog_of(*([768, 64 + number % 4] for number in range(count)))
    codes = [
        [WHOLE if kind == "whole" or number % ranks == rank else NOTHING for number in range(count)]
        for rank in range(ranks)
    ]
    wants, nodes = wants_of(catalog, *codes), [list(range(ranks))]
    assert catalog.nbytes
    calls = 0

    def count_calls(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        work_of(catalog, wants, nodes)
        make_plan(catalog, wants, nodes, 3, 64 << 20)
    finally:
        sys.setprofile(None)
    assert calls / count < 25


def test_shares_are_of_as_many_bytes() -> None:
    catalog = catalog_of(*([1000, 1000 + 300 * (i % 5)] for i in range(40)))
    wants = wants_of(catalog, *[[WHOLE] * 40] * 4)
    (step,) = make_plan(catalog, wants, [[0, 1, 2, 3]], 0, None).steps
    shares: Counter[int] = Counter()
    for parcel in step.parcels:
        shares[parcel.reader] += sum(piece_bytes(catalog, piece) for piece in parcel.pieces)
    assert sum(shares.values()) == sum(catalog.nbytes)
    assert max(shares.values()) - min(shares.values()) <= CUT_BYTES
    # Who reads next, reads on where the other ends: in all, each reads one run.
    readers = [parcel.reader for parcel in step.parcels]
    assert readers == sorted(readers)


def test_contiguous_parts_are_not_shared() -> None:
    catalog = catalog_of([8, 64], [1, 8, 64], [1, 8, 64])
    wants = wants_of(catalog, *[[0, 1, 2]] * 2)
    plans = [make_plan(catalog, wants, [[0, 1]], rank, None) for rank in range(2)]
    for plan in plans:
        (step,) = plan.steps
        assert step.own == (0, 1)
        assert [piece.tensor for parcel in step.parcels for piece in parcel.pieces] == [2]


def test_steps_are_small_enough_to_overlap_and_no_smaller() -> None:
    small, many, one = [1 << 10, 1 << 10], [[1 << 10, 1 << 14]] * 64, [[1 << 10, 1 << 18]]
    assert _plan.overlapping(catalog_of(small), 1 << 30) == _plan.STEP_BYTES
    assert _plan.overlapping(catalog_of(*many), 1 << 30) == (2 << 30) // _plan.OVERLAP_STEPS
    assert _plan.overlapping(catalog_of(*one), 1 << 30) == 1 << 29
    assert _plan.overlapping(catalog_of(*many), 1 << 20) == 1 << 20
    assert _plan.overlapping(catalog_of(), 1 << 30) == _plan.STEP_BYTES


def test_a_window_that_cannot_hold_a_row_is_an_error() -> None:
    catalog = catalog_of([10, 1000])
    with pytest.raises(OptionError, match=r"'t0'.*2000 bytes") as raised:
        make_plan(catalog, wants_of(catalog, [WHOLE], [WHOLE]), [[0, 1]], 0, 1999)
    assert raised.value.tensor == "t0"


def decision(rates: list[float], link: float, codes: Sequence[int] = (WHOLE,)) -> _cost.Decision:
    catalog = catalog_of([1 << 15, 1 << 15])
    wants = wants_of(catalog, *[codes] * len(rates))
    nodes = [list(range(len(rates)))]
    return decide(work_of(catalog, wants, nodes), nodes, rates, [link] * len(rates))


def test_a_fast_link_and_slow_storage_share_and_the_reverse_does_not() -> None:
    gigabyte = float(1 << 30)
    shared = decision([gigabyte] * 4, 100 * gigabyte)
    assert shared.strategy == "share"
    # Two gigabytes at four times one a second, or each all of it at one.
    assert shared.seconds == {"own": pytest.approx(2.0), "share": pytest.approx(0.5, rel=0.01)}
    assert decision([10 * gigabyte] * 4, gigabyte).strategy == "own"
    # Halves of rows are read through, so sharing saves half the reading there too.
    assert decision([gigabyte] * 2, 100 * gigabyte, [1]).seconds == {
        "own": pytest.approx(2.0),
        "share": pytest.approx(1.0, rel=0.01),
    }


def test_nothing_is_measured_where_rates_do_not_matter() -> None:
    large, small = catalog_of([1 << 15, 1 << 10]), catalog_of([10, 10])
    nodes = [[0, 1]]
    whole, rows = ([WHOLE], [WHOLE]), ([0], [0])
    for catalog, codes, refused, reason in [
        (large, rows, None, "no two ranks"),
        (small, whole, None, "too little"),
        (large, whole, "the group has no backend", "passed on: the group has no backend"),
    ]:
        decided = decided_without_measuring(work_of(catalog, wants_of(catalog, *codes), nodes), refused)
        assert decided is not None
        assert decided.strategy == "own"
        assert reason in decided.reasons[0]
    assert decided_without_measuring(work_of(large, wants_of(large, *whole), nodes), None) is None


def test_a_group_says_which_devices_it_cannot_serve() -> None:
    assert refusal({"cpu": "gloo", "cuda": "nccl"}, "cuda:1") is None
    assert refusal({"cpu": "gloo"}, "cpu") is None
    assert "no backend for tensors on cpu, only for cuda" in str(refusal({"cuda": "nccl"}, "cpu"))
    assert "gloo does not" in str(refusal({"cpu": "gloo", "cuda": "gloo"}, "cuda:0"))


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_every_expert_has_one_owner(placement: str) -> None:
    for experts, size in [(8, 4), (10, 4), (3, 8), (256, 32)]:
        keeps = [
            wd.expert_parallel(experts, rank=rank, size=size, placement=placement) for rank in range(size)
        ]
        for expert in range(experts):
            name = f"model.layers.3.mlp.experts.{expert}.down_proj.weight"
            assert sum(keep(name) for keep in keeps) == 1
        assert all(keep("model.layers.3.mlp.shared_experts.up_proj.weight") for keep in keeps)
        counts = [sum(keep(f"a.experts.{expert}.w") for expert in range(experts)) for keep in keeps]
        assert max(counts) - min(counts) <= 1


def test_filters_refuse_what_makes_no_sense() -> None:
    for wrong in (
        lambda: wd.expert_parallel(8, rank=4, size=4),
        lambda: wd.expert_parallel(8, rank=0, size=4, placement="random"),
        lambda: wd.expert_parallel(8, rank=0, size=4, pattern="experts"),
        lambda: wd.expert_parallel(8, rank=0, size=4)("layers.0.experts.8.w"),
        lambda: wd.pipeline_range(4, 3),
        lambda: _sizes.size_in_bytes("max_in_flight", "1 XB"),
    ):
        with pytest.raises(OptionError):
            wrong()


def test_layers_are_found_by_their_number_at_the_start_of_a_part_of_the_name() -> None:
    keep = wd.pipeline_range(1, 3)
    names = [
        "model.layers.0.a",
        "model.layers.2.a",
        "model.layers.12.a",
        "submodel.layers.9.a",
        "text.model.layers.7.b",
    ]
    assert [keep(name) for name in names] == [False, True, False, True, False]


def test_names_go_before_patterns_and_patterns_must_match() -> None:
    names = ["a[0]", "a0", "b"]
    assert _filters.wanted_names(names, "a[0]", None) == [True, False, False]
    assert _filters.wanted_names(names, ["a?", "b"], ["b", "c*"]) == [False, True, False]
    with pytest.raises(TensorNotFoundError):
        _filters.wanted_names(names, "c*", None)
    shapes = [(4, 4)] * 3
    assert _filters.shard_dims(names, shapes, {"b": None, "a[0]": 1, "*": 0}) == [1, 0, None]
    with pytest.raises(TensorNotFoundError):
        _filters.shard_dims(names, shapes, {"c*": 0})
    assert _filters.shard_dims(names, shapes, wd.tensor_parallel({"c*": 0, "b": 1})) == [None, None, 1]


@pytest.mark.parametrize(
    "size",
    [
        *("1.5", 1e9, 2.5, True, -1, " 1G ", "1e3", "1_000", "", "1,5M", None),
        *("1.5GiB", "1 gib", "0", 0, "1k", "1.MiB", ".5MiB", "1.5b", "1PiB"),
    ],
)
def test_sizes_are_those_of_every_load(size: Any) -> None:
    def accepts(take: Callable[[], object]) -> bool:
        try:
            take()
        except OptionError:
            return False
        return True

    engine = accepts(lambda: _native.check_options(in_flight=str(size)))
    assert accepts(lambda: _sizes.size_in_bytes("max_in_flight", size)) == engine


@pytest.mark.parametrize(
    ("pattern", "is_glob"),
    [
        *((pattern, False) for pattern in ("a**", "*[", "[]", "[!]", "a***", "a/**b")),
        *((pattern, True) for pattern in ("**", "[a]", "[!b]*", "[]a]", "?")),
    ],
)
def test_patterns_that_no_load_takes_are_refused(pattern: str, is_glob: bool, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [1])})
    for match in (
        lambda: list(hoistway.load_file(path, select=pattern, framework="numpy")),
        lambda: _filters.wanted_names(["a"], pattern, None),
        lambda: _filters.wanted_names(["a"], None, pattern),
        lambda: _filters.shard_dims(["a"], [(1,)], {pattern: 0}),
        lambda: wd.tensor_parallel({pattern: 0}),
    ):
        if is_glob:
            assert match()
        else:
            with pytest.raises(OptionError):
                match()


@pytest.mark.parametrize(
    "module", [_filters, _sizes, _wants, _plan, _words], ids=lambda module: module.__name__
)
def test_examples_in_docstrings_hold(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_the_memory_of_a_rank_is_its_tensors_and_what_it_passes_on() -> None:
    catalog = catalog_of(*[(1024, 1024)] * 8)
    wants = wants_of(catalog, [WHOLE] * 8, [WHOLE] * 8)
    apart, together = [[0], [1]], [[0, 1]]
    two = 2 << 20

    def needed(nodes: list[list[int]], window: int | None, *, keeps_all: bool) -> int:
        plan = make_plan(catalog, wants, nodes, 0, window)
        return needed_bytes(catalog, wants, plan, 0, 0, keeps_all=keeps_all)

    assert needed(apart, None, keeps_all=True) == 8 * two
    # A step that the caller takes, and one that is read meanwhile.
    assert needed(apart, two, keeps_all=False) == 2 * two
    # In each step it reads a half tensor, of which one copy goes out while the next half is read.
    assert needed(together, two, keeps_all=True) == 8 * two + 3 * two // 2
    assert needed(together, two, keeps_all=False) == two + 3 * two // 2


def test_each_limit_counts_the_ranks_under_it() -> None:
    def note(needed: int, **limits: int) -> dict[str, Any]:
        return {"needed": needed, "limits": {place: [place, left] for place, left in limits.items()}}

    check_memory([note(64, pod=200, machine=500), note(64, pod=190, machine=500), note(64, machine=500)])
    with pytest.raises(MemoryBudgetError, match=r"the 2 ranks under pod need 130 B together.* leaves 129 B"):
        check_memory([note(64, pod=200, machine=500), note(64, pod=129, machine=500), note(64, machine=500)])
    with pytest.raises(MemoryBudgetError, match="the 3 ranks under machine need 195 B"):
        check_memory([note(64, pod=200, machine=194), note(64, pod=200, machine=500), note(64, machine=500)])
    check_memory([note(0, machine=0), note(0)])


def test_a_limit_is_the_same_by_every_path(tmp_path: Path) -> None:
    for name in ("group", "other"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "group")
    places = [_memory._place(f"the cgroup limit {tmp_path / name}") for name in ("group", "link", "other")]
    assert places[0] == places[1] != places[2]
    note = _memory.memory_note(5)
    assert note["needed"] == 5
    assert all(left >= 0 for _, left in note["limits"].values())
    assert any(name == "the machine's free memory" for name, _ in note["limits"].values())
