"""Stores of experts: leases, budgets, policies, errors, and the process around them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import run, write_model
from expert_models import (
    BASE,
    EXPERT_BYTES,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    SLOT_BYTES,
    TOP_K,
    expert_bytes,
    open_store,
    write_experts,
)
from hoistway.errors import (
    ExpertNotFoundError,
    FormatError,
    MemoryBudgetError,
    OptionError,
    SliceError,
    TensorNotFoundError,
)
from hoistway.experts import ExpertCatalog, ExpertStore, ResidencyEvent, Rows, TraceWriter, policies
from interrupting import wait_until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_experts(tmp_path / "model")


@pytest.fixture
def stacked(tmp_path: Path) -> Path:
    return write_experts(tmp_path / "stacked", stacked=True)


def test_the_catalog_has_the_facts(model: Path, stacked: Path) -> None:
    catalog = ExpertCatalog.open(model)
    assert sorted(catalog.layers) == list(LAYERS)
    assert catalog.layers[2].experts == EXPERTS
    assert catalog.layers[2].expert_bytes == EXPERT_BYTES
    assert catalog.layers[2].demand_bytes == TOP_K * EXPERT_BYTES
    assert catalog.top_k == TOP_K
    assert catalog.token_cycle_bytes == len(LAYERS) * TOP_K * EXPERT_BYTES
    assert catalog.total_expert_bytes == len(LAYERS) * EXPERTS * EXPERT_BYTES
    assert "model.embed.weight" in catalog.dense
    assert catalog.parts(2, 5)["up"] == (
        "model.layers.2.mlp.experts.5.up_proj.weight",
        "BF16",
        (INNER, HIDDEN),
        EXPERT_BYTES // 3,
    )
    assert list(ExpertCatalog.open(stacked).parts(0, 0)) == ["gate_up", "down"]
    assert ExpertCatalog.open(model, top_k=4).top_k == 4


def packed(model: Path) -> Path:
    """Packs the experts of a model by the command, and returns the pack."""
    done = subprocess.run(
        [sys.executable, "-m", "hoistway", "moe", "pack", str(model)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "written and read again" in done.stdout
    return model.with_name(f"{model.name}.experts")


@pytest.mark.parametrize("backing", ["host_slots", "host_sparse"])
@pytest.mark.parametrize("kind", ["model", "stacked"])
def test_packed_experts_have_the_bytes_of_the_file(kind: str, backing, request) -> None:
    model = request.getfixturevalue(kind)
    expected = expert_bytes(model)
    pack = packed(model)
    with open_store(model, 4, backing=backing) as store:
        assert store.stats()["packing"] == {"state": "used", "path": str(pack)}
        with store.ensure(2, [5, 1]) as lease:
            for expert, parts in lease.items():
                assert {role: parts[role].tobytes() for role in parts} == expected[2, expert]
    with open_store(model, 4, backing=backing, pack=False) as store:
        assert store.stats()["packing"] == {"state": "none"}


def test_a_pack_of_a_model_that_changed_is_refused(model: Path) -> None:
    pack = packed(model)
    os.utime(model, (1, 1))
    with open_store(model, 4) as store:
        packing = store.stats()["packing"]
    assert packing["state"] == "refused"
    assert packing["path"] == str(pack)
    assert "changed or copied" in packing["reason"]
    with pytest.raises(FormatError, match="pack again") as refused:
        open_store(model, 4, pack=pack)
    assert refused.value.path == pack


@pytest.mark.parametrize("backing", ["host_slots", "host_sparse"])
@pytest.mark.parametrize("kind", ["model", "stacked"])
def test_a_lease_has_the_bytes_of_the_file(kind: str, backing, request) -> None:
    path = request.getfixturevalue(kind)
    expected = expert_bytes(path)
    store = open_store(path, 4, backing=backing)
    for layer in (*LAYERS, *LAYERS):
        for first in range(EXPERTS - 1):
            with store.ensure(layer, [first + 1, first, first + 1]) as lease:
                assert list(lease) == [first + 1, first]
                for expert, leased in lease.items():
                    assert {part: leased[part].tobytes() for part in leased} == expected[layer, expert]
                    assert (leased.slot is None) == (backing == "host_sparse")
    stats = store.stats()
    assert stats["backing"] == backing
    assert stats["hits"] + stats["misses"] == 4 * (EXPERTS - 1) * 2
    assert stats["peak_bytes"] <= 4 * SLOT_BYTES + stats["largest_batch_bytes"]


def test_quantised_experts_of_gguf_are_leased_as_bytes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint32("qwen3moe.expert_used_count", 2)
    generator = np.random.default_rng(0)
    expected = {}
    for role, rows, columns in (("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)):
        values = generator.standard_normal((4, rows, columns), np.float32)
        expected[role] = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        name = f"blk.0.ffn_{role}_exps.weight"
        writer.add_tensor(name, expected[role], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = ExpertStore.open(path, budget="64KiB", framework="numpy")
    assert store.catalog.top_k == 2
    with store.ensure(0, [3, 1]) as lease:
        for expert, leased in lease.items():
            for role, values in expected.items():
                assert np.array_equal(leased[role], values[expert])


def test_views_of_frameworks_show_the_bytes_and_keep_them(model: Path) -> None:
    torch = pytest.importorskip("torch")
    expected = expert_bytes(model)
    for framework in ("numpy", "torch"):
        store = open_store(model, 2, framework=framework)
        with store.ensure(0, [1]) as lease:
            gate = lease[1]["gate"]
        assert gate.shape == (INNER, HIDDEN)
        # The lease is gone, and the tensor holds the expert: nothing else fits beside it and a batch.
        for expert in range(2, EXPERTS):
            store.ensure(0, [expert]).release()
            raw = gate.view(torch.uint8).numpy() if framework == "torch" else gate
            assert raw.tobytes() == expected[0, 1]["gate"]
        assert store.is_resident(0, 1)
        assert store.evict(0, [1]) == 0
        store.close()
        del store, lease
        gc.collect()
        raw = gate.view(torch.uint8).numpy() if framework == "torch" else gate
        assert raw.tobytes() == expected[0, 1]["gate"]
        if framework == "numpy":
            with pytest.raises(ValueError, match="read-only"):
                gate[0] = 0


def test_released_leases_let_experts_go(model: Path) -> None:
    store = open_store(model, 2, events=100)
    lease = store.ensure(0, [1, 2])
    assert store.evict(0, [1, 2]) == 0
    lease.release()
    with pytest.raises(ValueError, match="released"):
        lease[1]
    assert store.is_resident(0, 1)
    assert store.evict(0, [1, 2, 3]) == 2
    assert not store.is_resident(0, 1)
    events, lost = store.take_events()
    assert lost == 0
    assert set(events[:2]) == {ResidencyEvent("resident", 0, expert, None) for expert in (1, 2)}
    assert set(events[2:]) == {ResidencyEvent("evicted", 0, expert, None) for expert in (1, 2)}
    assert len(events) == 4
    assert store.take_events() == ([], 0)


def test_a_ticket_tells_experts_that_are_ready(model: Path) -> None:
    expected = expert_bytes(model)
    store = open_store(model, 4)
    with store.ensure_async(2, [3, 4]) as ticket:
        assert ticket.expert(4)["down"].tobytes() == expected[2, 4]["down"]
        assert ticket.is_ready(4)
        with pytest.raises(ExpertNotFoundError):
            ticket.is_ready(5)
    with pytest.raises(ValueError, match="released"):
        ticket.expert(3)


def test_leases_that_hold_the_room_are_an_error_after_the_timeout(model: Path) -> None:
    # Longer than a read takes, also on a busy machine.
    store = open_store(model, 1.2, timeout=12)
    held = store.ensure(0, [1])
    other = store.ensure(0, [2])
    with pytest.raises(MemoryBudgetError, match="no room"):
        store.ensure(0, [3])
    other.release()
    del other
    held.release()
    assert list(store.ensure(0, [3])) == [3]


def test_prefetched_experts_are_used(model: Path) -> None:
    store = open_store(model, 16)
    store.prefetch(2, [5], deadline=300)
    wait_until(lambda: store.is_resident(2, 5))
    store.ensure(2, [5]).release()
    stats = store.stats()
    assert (stats["prefetches"], stats["useful_prefetches"], stats["misses"]) == (1, 1, 0)
    store.cancel_before(2)


def test_observed_layers_count_tokens(model: Path) -> None:
    store = open_store(model, 16)
    for _ in range(3):
        for layer in LAYERS:
            store.observe(layer, [(0, 0.75), (1, 0.25)])
            store.ensure(layer, [0]).release()
            store.ensure(layer, [1]).release()
    stats = store.stats()
    assert stats["tokens"] == 3
    assert stats["faults_per_token"] == pytest.approx(4 / 3)
    assert stats["hit_rate"] == pytest.approx(8 / 12)
    assert stats["stall_seconds"] >= 0


def test_dense_tensors_are_leased_by_name(model: Path) -> None:
    store = open_store(model, 8, framework="numpy")
    expected = hoistway.load_file(model, framework="numpy")
    name = "model.embed.weight"
    with store.ensure_tensors(name) as tensors:
        assert np.array_equal(tensors[name].view(np.uint8), expected[name].view(np.uint8))
        assert store.evict_tensors(name) == 0
    assert store.is_tensor_resident(name)
    del tensors
    assert store.evict_tensors([name]) == 1
    with pytest.raises(TensorNotFoundError):
        store.ensure_tensors("nothing")


def test_the_budget_can_change(model: Path) -> None:
    store = open_store(model, 16)
    for expert in range(EXPERTS):
        store.ensure(0, [expert]).release()
    store.set_budget(3 * SLOT_BYTES)
    stats = store.stats()
    assert stats["used_bytes"] <= stats["held_bytes"] <= 3 * SLOT_BYTES == stats["budget_bytes"]
    assert stats["is_below_token_cycle"]
    with pytest.raises(MemoryBudgetError, match="does not hold"):
        store.set_budget(4096)


def test_what_is_wrong_is_an_error(model: Path, tmp_path: Path) -> None:
    store = open_store(model, 4)
    with pytest.raises(ExpertNotFoundError, match="layer 1 has no experts"):
        store.ensure(1, [0])
    with pytest.raises(IndexError, match="there is no expert 8"):
        store.ensure(0, [8])
    with pytest.raises(MemoryBudgetError, match="does not hold"):
        ExpertStore.open(model, budget=4096, framework="raw")
    for number, reason in ((-1, "must not be negative"), (1 << 80, "is too large")):
        with pytest.raises(OptionError, match=f"top_k.*{reason}"):
            ExpertCatalog.open(model, top_k=number)
        with pytest.raises(OptionError, match=f"events.*{reason}"):
            open_store(model, 4, events=number)
    with pytest.raises(OptionError, match="'lur'"):
        open_store(model, 4, policy="lur")
    with pytest.raises(OptionError, match="profile"):
        open_store(model, 4, policy="static-profile")
    with pytest.raises(OptionError, match="backing"):
        open_store(model, 4, backing="device_slots")
    with pytest.raises(TypeError, match="'depth'"):
        open_store(model, 4, depth=1)
    (model.parent / "config.json").write_text("{")
    with pytest.raises(FormatError) as caught:
        open_store(model, 4)
    assert Path(caught.value.path) == model.parent / "config.json"


def test_a_file_that_shrinks_leases_nothing(model: Path) -> None:
    store = open_store(model, 4)
    store.ensure(0, [0]).release()
    with open(model, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(hoistway.HoistwayError, match="expert 1 of layer 2") as caught:
        store.ensure(2, [1])
    assert isinstance(caught.value, OSError | ValueError)
    assert Path(caught.value.path) == model
    assert "experts.1." in caught.value.tensor
    assert not store.is_resident(2, 1)


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 80])
def test_numbers_that_no_layer_or_expert_can_have_are_not_found(model: Path, number: int) -> None:
    store = open_store(model, 4)
    for ask in [
        lambda: store.ensure(number, [0]),
        lambda: store.ensure(0, [number]),
        lambda: store.prefetch(number, [0]),
        lambda: store.prefetch(0, [number]),
        lambda: store.observe(number, [(0, 1.0)]),
        lambda: store.observe(0, [(number, 1.0)]),
        lambda: store.evict(number, [0]),
        lambda: store.evict(0, [number]),
        lambda: store.is_resident(number, 0),
        lambda: store.is_resident(0, number),
        lambda: store.cancel_before(number),
        lambda: store.catalog.parts(number, 0),
        lambda: store.catalog.parts(0, number),
    ]:
        with pytest.raises(ExpertNotFoundError, match=f"{number}"):
            ask()


def test_a_model_without_experts_has_dense_tensors_alone(tmp_path: Path) -> None:
    path = write_model(tmp_path / "dense.safetensors", {"a": ("U8", [300]), "b": ("U8", [500])})
    with ExpertStore.open(path, budget="1MiB", framework="raw") as store:
        assert store.catalog.layers == {}
        with store.ensure_tensors(["a", "b"]) as lease:
            assert lease["b"].shape == (500,)
    trace = tmp_path / "trace.csv"
    trace.write_text("step,layer,expert\n0,0,0\n")
    with pytest.raises(OptionError, match="has no experts"):
        ExpertStore.open(path, budget="1MiB", policy="static-profile", profile=trace, framework="raw")


def test_policies_are_listed_and_a_profile_is_a_trace(model: Path, tmp_path: Path) -> None:
    assert next(iter(policies())) == "ewma2"
    trace = tmp_path / "trace.jsonl"
    layers = dict.fromkeys(LAYERS, (EXPERTS, EXPERT_BYTES))
    with TraceWriter(trace, experts_per_token=TOP_K, layers=layers, model="kit") as writer:
        for step in range(20):
            writer.visit(0, [3, 4], [0.5, 0.5], step=step)
    for policy in policies():
        if policy == "belady":
            continue
        has_profile = policy == "static-profile"
        if not has_profile:
            with pytest.raises(OptionError, match="has no use for it"):
                open_store(model, 4.5, policy=policy, profile=trace)
        store = open_store(model, 4.5, policy=policy, profile=trace if has_profile else None)
        assert store.stats()["policy"] == policy
        for expert in (3, 4, 0, 1, 2, 5, 6):
            store.ensure(0, [expert]).release()
        if has_profile:
            assert store.is_resident(0, 3)
            assert store.is_resident(0, 4)
    other = tmp_path / "other.jsonl"
    layers = dict.fromkeys(range(32), (EXPERTS, EXPERT_BYTES))
    with TraceWriter(other, experts_per_token=TOP_K, layers=layers, model="other") as writer:
        for layer in layers:
            writer.visit(layer, [3, 4], [0.5, 0.5], step=0)
    with pytest.raises(OptionError, match="another model"):
        open_store(model, 4, policy="static-profile", profile=other)
    with TraceWriter(other, experts_per_token=2, layers={0: (2, EXPERT_BYTES)}, model="smaller") as writer:
        writer.visit(0, [0, 1], [0.5, 0.5], step=0)
    with pytest.raises(OptionError, match="another model: layer 0 has 2 experts, not 8"):
        open_store(model, 4, policy="static-profile", profile=other)
    # One without a head need not have all experts.
    rows = tmp_path / "rows.csv"
    rows.write_text("step,layer,expert\n0,0,0\n0,0,1\n")
    open_store(model, 4, policy="static-profile", profile=rows).close()
    trace.write_text(trace.read_text() + '{"step": 99, "layer": 77, "experts": [1]}\n')
    with pytest.raises(FormatError, match="22"):
        open_store(model, 4, policy="static-profile", profile=trace)


def test_a_trace_replaces_no_other_file(model: Path) -> None:
    before = model.read_bytes()
    with pytest.raises(FileExistsError, match="is not a trace"):
        TraceWriter(model, experts_per_token=1, layers={})
    assert model.read_bytes() == before
    trace = model.with_name("trace.jsonl")
    for _ in range(2):
        TraceWriter(trace, experts_per_token=1, layers={}).close()


def test_rows_are_gathered_in_the_order_in_which_they_are_named(model: Path) -> None:
    expected = hoistway.load_file(model, framework="numpy")["model.embed.weight"].view(np.uint32)
    table = Rows(model, "model.embed.weight", framework="numpy")
    assert len(table) == 33
    assert table.row_bytes == HIDDEN * 4
    rows = [7, 0, 32, 7, 8]
    assert np.array_equal(table.gather(rows).view(np.uint32), expected[rows])
    assert table.gather([]).shape == (0, HIDDEN)
    with pytest.raises(SliceError, match="there is no row 33"):
        table.gather([33])
    with pytest.raises(SliceError, match="there is no row -1"):
        table.gather([-1])
    with pytest.raises(TypeError):
        table.gather([1.7])  # type: ignore[list-item]
    with pytest.raises(TensorNotFoundError):
        Rows(model, "nothing", framework="numpy")


def test_threads_share_a_store(model: Path) -> None:
    expected = expert_bytes(model)
    store = open_store(model, 5)
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for _ in range(60):
                layer = int(generator.choice(LAYERS))
                with store.ensure(layer, [int(generator.integers(EXPERTS))]) as lease:
                    for expert, leased in lease.items():
                        if {part: leased[part].tobytes() for part in leased} != expected[layer, expert]:
                            wrong.append((layer, expert))
                    del leased
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_child_of_fork_is_told_and_keeps_its_views(model: Path) -> None:
    done = run(
        """
        import os, sys, hoistway
        from hoistway.experts import ExpertStore
        store = ExpertStore.open(sys.argv[1], budget="1MiB", framework="numpy")
        lease = store.ensure(0, [1])
        held = lease[1]["gate"]
        before = held.tobytes()
        child = os.fork()
        if child == 0:
            assert held.tobytes() == before
            try:
                store.ensure(0, [2])
            except hoistway.errors.ForkedError as error:
                assert "open it again" in str(error)
                del lease, held, store
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert list(store.ensure(0, [2])) == [2]
        """,
        model,
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_wait_for_room(model: Path) -> None:
    script = """
        import signal, sys, time
        from hoistway.experts import ExpertStore
        sys.path.insert(0, sys.argv[2])
        from interrupting import interrupt_main_when
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store = ExpertStore.open(sys.argv[1], budget=70000, framework="raw")
        held = [store.ensure(0, [1]), store.ensure(0, [2])]
        start = time.monotonic()
        interrupt_main_when("ensure")
        try:
            store.ensure(0, [3])
        except KeyboardInterrupt:
            print("interrupted")
        assert time.monotonic() - start < 30
        held.clear()
        print(len(store.ensure(0, [3, 4])))
        """
    done = run(script, model, Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted", "2"]


def test_a_closed_store_frees_what_no_tensor_holds(tmp_path: Path) -> None:
    tensors = {}
    for expert in range(EXPERTS):
        for part in ("gate", "up", "down"):
            tensors[f"{BASE.format(layer=0)}.{expert}.{part}_proj.weight"] = ("U8", [1 << 10, 2 << 10])
    model = write_model(tmp_path / "model.safetensors", tensors)
    done = run(
        """
        import sys
        from hoistway.experts import ExpertStore

        def resident_bytes():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))

        store = ExpertStore.open(sys.argv[1], budget="1GiB", framework="numpy")
        with store.ensure(0, [3]) as lease:
            held = lease[3]["up"]
        del lease
        before = held.tobytes()
        start = resident_bytes()
        store.ensure(0, [0, 1, 2, 4, 5, 6, 7]).release()
        full = resident_bytes()
        store.close()
        closed = resident_bytes()
        assert held.tobytes() == before
        # Seven experts of 6 MiB.
        assert full - start > 36 << 20, (start, full)
        assert full - closed > 36 << 20, (full, closed)
        """,
        model,
    )
    assert done.returncode == 0, done.stderr


def test_tensors_may_end_in_a_thread_without_python(model: Path) -> None:
    done = run(
        """
        import ctypes, sys
        from hoistway.experts import ExpertStore

        class Managed(ctypes.Structure):  # DLManagedTensor: a tensor of 48 bytes, the owner, and the deleter.
            _fields_ = [("tensor", ctypes.c_byte * 48), ("owner", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

        class Time(ctypes.Structure):
            _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

        store = ExpertStore.open(sys.argv[1], budget="1MiB", framework="raw")
        with store.ensure(0, [1]) as lease:
            capsule = lease[1]["gate"].__dlpack__()
        del lease
        assert store.evict(0, [1]) == 0, "the capsule holds it"
        python = ctypes.PyDLL(None)
        python.PyCapsule_GetPointer.restype = ctypes.c_void_p
        python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
        address = python.PyCapsule_GetPointer(capsule, b"dltensor")
        used = b"used_dltensor"
        assert python.PyCapsule_SetName(capsule, used) == 0
        deleter = Managed.from_address(address).deleter
        thread = ctypes.c_ulong()
        python.pthread_create.argtypes = [ctypes.c_void_p] * 4
        assert python.pthread_create(ctypes.addressof(thread), None, deleter, address) == 0
        # This thread keeps the interpreter while it waits: the other one must not need it.
        end = Time()
        assert python.clock_gettime(0, ctypes.byref(end)) == 0
        end.seconds += 60
        python.pthread_timedjoin_np.argtypes = [ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]
        assert python.pthread_timedjoin_np(thread.value, None, ctypes.addressof(end)) == 0
        assert store.evict(0, [1]) == 1
        """,
        model,
    )
    assert done.returncode == 0, done.stderr


def test_leases_may_outlive_the_interpreter(model: Path) -> None:
    done = run(
        """
        import sys, threading
        from hoistway.experts import ExpertStore
        store = ExpertStore.open(sys.argv[1], budget="1MiB", framework="numpy")
        lease = store.ensure(0, [1, 2])
        ticket = store.ensure_async(2, [3, 4])
        held = lease[1]["gate"]
        cycle = [lease, ticket, held]
        cycle.append(cycle)
        sys.held = (store.ensure(2, [5]), store.ensure_async(2, [6]))

        def work():
            while True:
                store.ensure(0, [7]).release()

        threading.Thread(target=work, daemon=True).start()
        """,
        model,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_evicted_experts_of_a_device_stay_in_host_memory(model: Path, stand_in) -> None:
    expected = expert_bytes(model)
    store = open_store(model, 4, device="cuda:0", host_level="64MiB")
    for turn in range(2):
        for layer in LAYERS:
            for expert in range(EXPERTS):
                with store.ensure(layer, [expert]) as lease:
                    leased = lease[expert]
                    assert {part: leased[part].tobytes() for part in leased} == expected[layer, expert]
                    del leased
        if turn == 0:
            bytes_read = store.stats()["bytes_read"]
    stats = store.stats()
    level = stats["host_level"]
    assert (stats["bytes_read"], level["hits"]) == (bytes_read, len(expected))
    assert level["held_bytes"] <= 64 << 20
    assert level["failed"] == 0
    store.close()
    with pytest.raises(OptionError, match="host_level"):
        open_store(model, 4, host_level="64MiB")


@pytest.mark.parametrize("pad", [False, True])
def test_a_device_has_stacked_tensors_in_address_space(pad: bool, tmp_path: Path, stand_in) -> None:
    granule = 2 << 20
    slice_bytes = granule - 7 if pad else granule
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.down_proj"
    weights = np.random.default_rng(0).integers(0, 256, (3, slice_bytes), dtype=np.uint8)
    gate_up = np.zeros((3, granule), dtype=np.uint8)
    hoistway.save_file({name: weights, "model.layers.0.mlp.experts.gate_up_proj": gate_up}, path)
    options = {"budget": 2 * 2 * granule, "backing": "device_sparse", "framework": "raw"}
    if pad:
        with pytest.raises(
            OptionError, match=f"{slice_bytes} bytes of tensor .* granules of {granule} bytes"
        ):
            ExpertStore.open(path, device="cuda:0", **options)
    with ExpertStore.open(path, device="cuda:0", pad=pad, **options) as store:
        base = store.tensor_address(name)
        assert store.tensor_stride(name) == granule
        for expert in (0, 1, 2, 0):
            with store.ensure(0, [expert]) as lease:
                leased = lease[expert]["down"]
                assert leased.data_ptr == base + expert * granule
                assert leased.tobytes() == weights[expert].tobytes()
                del leased
        stats = store.stats()
        assert stats["backing"] == "device_sparse"
        assert stats["held_bytes"] <= 2 * 2 * granule
    with pytest.raises(OptionError, match="memory of a device"):
        ExpertStore.open(path, **options)
    del store, lease
    gc.collect()


@pytest.mark.parametrize("backing", ["device_slots", "device_sparse"])
def test_a_child_of_fork_lets_memory_of_a_device_alone(backing: str, model: Path, stand_in) -> None:
    done = run(
        """
        import gc, os, sys
        from hoistway.experts import ExpertStore
        pad = sys.argv[2] == "device_sparse"
        options = {"device": "cuda:0", "framework": "raw", "backing": sys.argv[2], "pad": pad}
        store = ExpertStore.open(sys.argv[1], budget="24MiB", **options)
        store.ensure(0, [2]).release()
        # What was evicted has its memory still.
        assert store.evict(0, [2]) == 1
        lease = store.ensure(0, [1])
        before = lease[1]["gate"].tobytes()
        store.ensure_tensors(["model.embed.weight"]).release()
        assert store.evict_tensors(["model.embed.weight"]) == 1
        child = os.fork()
        if child == 0:
            del lease, store
            gc.collect()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert lease[1]["gate"].tobytes() == before
        lease.release()
        assert list(store.ensure(0, [2])) == [2]
        """,
        model,
        backing,
    )
    assert done.returncode == 0, done.stderr
    # The child has nothing to say: it asks the driver for nothing.
    assert [line for line in done.stderr.splitlines() if "padded to granules" not in line] == []


def test_a_device_has_slots(model: Path, stand_in) -> None:
    expected = expert_bytes(model)
    store = open_store(model, 4, device="cuda:0")
    for layer in LAYERS:
        for expert in range(EXPERTS):
            with store.ensure(layer, [expert]) as lease:
                leased = lease[expert]
                assert leased["down"].device == "cuda:0"
                assert {part: leased[part].tobytes() for part in leased} == expected[layer, expert]
                del leased
    assert store.stats()["backing"] == "device_slots"
    store.close()
    del store, lease
    gc.collect()
