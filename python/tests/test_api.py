"""The Python interface: options, selections, slices, reports, progress, pools."""

from __future__ import annotations

import ast
import copy
import html
import json
import os
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hoistway
import numpy as np
import pytest
import torch
from conftest import assert_threads_end, make_cold, run, same_bytes, thread_count, write_model
from hoistway import _checkpoint, _native
from hoistway._words import in_words
from hoistway.errors import (
    ClosedError,
    FormatError,
    MemoryBudgetError,
    MissingPackageError,
    OptionError,
    RouteUnavailableError,
    SliceError,
    TensorNotFoundError,
    UnsupportedDtypeError,
)


def test_the_report_accounts_for_every_byte(model: Path) -> None:
    make_cold(model)
    tensors = hoistway.load_file(model)
    report = tensors.report
    assert report.route == "auto"
    assert report.tensors == len(tensors) == 8
    assert sum(carrier.tensor_bytes for carrier in report.carriers) == report.tensor_bytes
    assert report.as_dict()["memory"]["arenas"] == 1
    assert "8 tensors" in str(report)
    named = hoistway.load_file(model, route="threads", direct="never")
    assert {(carrier.route, carrier.access) for carrier in named.report.carriers} == {("threads", "buffered")}


def test_selections(model: Path) -> None:
    def names(**how) -> set[str]:
        return set(hoistway.load_file(model, **how))

    assert names(select="layers.*.weight") == {"layers.0.weight", "layers.1.weight"}
    assert names(select=["ids", "scalar"]) == {"ids", "scalar"}
    assert names(select=lambda name: name.startswith("e")) == {"embed", "empty"}
    assert names(select=lambda _: False) == set()
    assert names(select="layers.*", exclude="*.bias") == {"layers.0.weight", "layers.1.weight"}
    assert names(exclude={"layers.*", "embed"}) == {"ids", "flags", "scalar", "empty"}
    assert len(names(exclude="nothing.*")) == 8
    with pytest.raises(TensorNotFoundError, match=r"did you mean 'embed'") as caught:
        hoistway.load_file(model, select="embedd")
    assert isinstance(caught.value, KeyError)


def test_slices_in_one_load(model: Path) -> None:
    whole = hoistway.load_file(model)
    parts = hoistway.load_file(
        model, slices={"embed": np.s_[10:20, ..., -1], "layers.0.weight": np.s_[:, 100:200:3], "ids": 2}
    )
    assert same_bytes(parts["embed"], whole["embed"][10:20, -1])
    assert same_bytes(parts["layers.0.weight"], whole["layers.0.weight"][:, 100:200:3])
    assert same_bytes(parts["ids"], whole["ids"][2])
    assert same_bytes(parts["flags"], whole["flags"])
    assert parts.report.tensor_bytes < whole.report.tensor_bytes


def test_items_are_in_the_order_of_the_checkpoint(model: Path) -> None:
    with hoistway.open(model) as checkpoint:
        items = dict(checkpoint.items())
        assert list(items) == checkpoint.keys()
        assert same_bytes(items["embed"], checkpoint["embed"])


def test_what_is_shown_says_what_it_is(model: Path) -> None:
    with hoistway.open(model) as checkpoint:
        part = checkpoint.get_slice("embed")
        assert repr(part) == "TensorSlice('embed', F32, [1000, 64])"
        assert part._repr_html_() == "<pre>TensorSlice(&#x27;embed&#x27;, F32, [1000, 64])</pre>"
        assert part.shape == (1000, 64)
        stream = checkpoint.iter_tensors()
        assert repr(stream) == "TensorStream(0 tensors given)"
        next(stream)
        assert repr(stream) == "TensorStream(1 tensor given)"
        assert sum(1 for _ in stream) == 7
        assert repr(stream) == "TensorStream(8 tensors given)"
        assert stream._repr_html_() == stream.report._repr_html_()
        assert repr(stream.report).startswith("<Report: 8 tensors, ")
    with hoistway.Reader(model) as reader:
        assert repr(reader) == "Reader(8 tensors)"
        reading = reader.submit(["ids"])
        reading.wait()
        assert repr(reading) == "Reading(1 of 1 tensor ended)"
    assert repr(reader) == "Reader(closed)"


def test_tensors_and_checkpoints_show_in_one_line_and_as_a_table(model: Path, tmp_path: Path) -> None:
    tensors = hoistway.load_file(model)
    size = in_words(tensors.report.tensor_bytes)
    assert repr(tensors) == str(tensors) == f"<LoadedTensors: 8 tensors, {size} loaded>"
    shown = tensors._repr_html_()
    assert shown.count("<tr>") == 1 + 8
    assert "<td>embed</td><td>float32</td><td>[1000, 64]</td>" in shown
    assert shown.endswith(tensors.report._repr_html_())
    many = {f"<{number}>": ("U8", [1]) for number in range(50)}
    folder = tmp_path / "many"
    folder.mkdir()
    write_model(folder / "a.safetensors", many)
    write_model(folder / "b.safetensors", {"b": ("U8", [2, 3])})
    with hoistway.open(folder) as checkpoint:
        assert (
            repr(checkpoint) == f"Checkpoint(51 tensors in 2 files, the first is {folder / 'a.safetensors'})"
        )
        shown = checkpoint._repr_html_()
        assert shown.count("<tr>") == 1 + 20
        assert "<td>&lt;0&gt;</td><td>U8</td><td>[1]</td>" in shown
        assert shown.endswith("<p>and 31 more tensors</p>")
    assert checkpoint._repr_html_() == "<pre>Checkpoint(closed)</pre>"


def test_reports_and_checks_show_in_notebooks(model: Path, tmp_path: Path) -> None:
    tensors = hoistway.load_file(model)
    saved = hoistway.save_file(tensors, tmp_path / "saved.safetensors")
    assert repr(saved).startswith("<SaveReport: 8 tensors")
    for report in (tensors.report, saved):
        assert report._repr_html_() == f"<pre>{html.escape(str(report))}</pre>"
    checks = hoistway.doctor(tmp_path)
    assert str(checks).startswith("ok      kernel: ")
    assert repr(checks) == str(checks)
    assert str(checks).splitlines()[-1] == f"verdict {checks.verdict}"
    assert checks.verdict.startswith("loads work here, ")
    assert checks._repr_html_().count("<tr>") == 1 + len(checks)
    assert checks._repr_html_().endswith(f"<p>{html.escape(checks.verdict)}</p>")
    statuses = ["ok", "slower", "broken", "broken"]
    judged = hoistway.Checks({"name": f"thing {at}", "status": status} for at, status in enumerate(statuses))
    assert judged.verdict == "loads fail here: thing 2, thing 3"
    assert hoistway.Checks(judged[:2]).verdict == "loads work here, slower than they could: thing 1"
    assert json.loads(json.dumps(checks)) == checks


def test_the_package_lists_what_is_meant_for_callers() -> None:
    names = dir(hoistway)
    assert {"load_file", "open", "kv", "experts", "distributed", "errors"} <= set(names)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    assert not {"annotations", "os", "json", "Any"} & set(names)


def test_the_stub_documents_what_is_compiled() -> None:
    stub = ast.parse(Path(hoistway.__file__).with_name("_native.pyi").read_text())
    documented = 0
    for shown in (node for node in stub.body if isinstance(node, ast.ClassDef) and ast.get_docstring(node)):
        compiled = getattr(_native, shown.name)
        assert ast.get_docstring(shown) == compiled.__doc__
        for member in (node for node in shown.body if isinstance(node, ast.FunctionDef)):
            if text := ast.get_docstring(member):
                assert text == getattr(compiled, member.name).__doc__, f"{shown.name}.{member.name}"
                documented += 1
    assert documented > 0


def test_metadata_may_follow_the_path_as_in_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    hoistway.save_file({"a": torch.zeros(2)}, path, {"format": "pt"})
    assert path.read_bytes() == hoistway.save({"a": torch.zeros(2)}, {"format": "pt"})
    with hoistway.open(path) as checkpoint:
        assert checkpoint.metadata() == {"format": "pt"}


def test_slices_that_do_not_fit(model: Path) -> None:
    with hoistway.open(model) as checkpoint:
        part = checkpoint.get_slice("embed")
        assert part.get_shape() == [1000, 64]
        assert part.get_dtype() == "F32"
        for index in (
            1000,
            -1001,
            slice(0, 1001),
            slice(2000, None),
            np.s_[:, :, 0],
            np.s_[..., ...],
            [1],
            "a",
            1.5,
            True,
            slice(1.5, None),
        ):
            with pytest.raises(SliceError) as caught:
                part[index]
            assert isinstance(caught.value, IndexError)
        with pytest.raises(SliceError, match="positive"):
            part[::-1]
        with pytest.raises(SliceError, match="cannot index"):
            part[::1.5]
        assert part[: np.int64(4) : np.int64(2)].shape == (2, 64)
        assert part[[]].shape == (0, 64)
        assert part[5:2].shape == (0, 64)
        assert part[()].shape == (1000, 64)


def test_one_tensor_at_a_time_and_the_merged_report(model: Path) -> None:
    checkpoint = hoistway.open(model)
    assert checkpoint.report is None
    assert len(checkpoint) == 8
    assert "embed" in checkpoint
    assert "missing" not in checkpoint
    first = checkpoint.get_tensor("embed")
    second = checkpoint.get_tensor("layers.1.weight")
    assert checkpoint.report.tensors == 2
    assert checkpoint.report.tensor_bytes == first.nbytes + second.nbytes
    with pytest.raises(TensorNotFoundError, match="did you mean 'embed'"):
        checkpoint.get_tensor("embedd")
    with pytest.raises(TensorNotFoundError):
        checkpoint.get_tensor("layers.*")
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.keys()
    assert repr(checkpoint) == "Checkpoint(closed)"
    one = hoistway.open(write_model(model.parent / "one.safetensors", {"a": ("U8", [4])}))
    assert repr(one) == f"Checkpoint(1 tensor in {model.parent / 'one.safetensors'})"
    one.close()
    assert first.shape == (1000, 64)


def test_iteration_gives_every_tensor_once(model: Path) -> None:
    whole = hoistway.load_file(model, framework="numpy")
    with hoistway.open(model, framework="numpy") as checkpoint:
        seen = {}
        for name, tensor in checkpoint:
            assert name not in seen
            seen[name] = tensor.tobytes()
        assert seen == {name: tensor.tobytes() for name, tensor in whole.items()}
        assert checkpoint.report.tensors == 8
        # Leaving early ends the load.
        for _ in checkpoint.iter_tensors(select="layers.*"):
            break


def test_progress_reaches_the_end(model: Path) -> None:
    calls = []
    tensors = hoistway.load_file(model, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (tensors.report.tensor_bytes, tensors.report.tensor_bytes)
    assert calls == sorted(calls)
    hoistway.load_file(model, progress=True)

    def failing(_done: int, _total: int) -> None:
        raise RuntimeError("the callback failed")

    before = thread_count()
    with pytest.raises(RuntimeError, match="the callback failed"):
        hoistway.load_file(model, progress=failing)
    assert_threads_end(before)


def test_an_error_that_is_kept_keeps_no_memory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(32)})
    pool = hoistway.MemoryPool("64MiB")

    def failing(done: int, _total: int) -> None:
        if done:
            raise RuntimeError("the callback failed")

    with pytest.raises(RuntimeError) as kept:
        hoistway.load_file(path, pool=pool, progress=failing, framework="raw")
    assert kept.value.__traceback__ is not None
    assert pool.free_bytes == pool.capacity_bytes


def test_options_of_a_checkpoint_are_those_of_its_loads(model: Path) -> None:
    pool = hoistway.MemoryPool("64MiB")
    with hoistway.open(model, pool=pool, route="threads", framework="numpy") as checkpoint:
        tensors = [checkpoint.load(), dict(checkpoint.iter_tensors()), checkpoint.get_tensor("embed")]
        assert pool.free_bytes < pool.capacity_bytes
        assert checkpoint.report.route == "threads"
        assert checkpoint.load(route="io_uring").report.route == "io_uring"
        assert dict(checkpoint).keys() == tensors[0].keys()
    del tensors
    for wrong in ({"rout": "auto"}, {"select": "a*"}, {"progress": True}, {"route": "warp"}):
        with pytest.raises(OptionError):
            hoistway.open(model, **wrong)


def test_results_can_be_copied_and_pickled(model: Path, tmp_path: Path) -> None:
    tensors = hoistway.load_file(model)
    for copied in (copy.deepcopy(tensors), pickle.loads(pickle.dumps(tensors))):
        assert type(copied) is OrderedDict
        assert all(same_bytes(copied[name], tensor) for name, tensor in tensors.items())
    torch.save(tensors, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt").keys() == tensors.keys()
    report = pickle.loads(pickle.dumps(tensors.report))
    assert report == tensors.report
    assert str(report) == str(tensors.report)


def test_paths_that_are_no_text(tmp_path: Path) -> None:
    path = write_model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.safetensors")), {"a": ("U8", [9])})
    tensors = hoistway.load_file(path, framework="raw", direct="never")
    assert tensors["a"].tobytes() == path.read_bytes()[-9:]
    assert tensors.report.tensors == 1


def test_pools_lend_their_memory_and_get_it_back(model: Path) -> None:
    pool = hoistway.MemoryPool("16MiB")
    assert pool.capacity_bytes == pool.free_bytes == 16 << 20
    tensors = hoistway.load_file(model, pool=pool)
    assert tensors.report.as_dict()["memory"]["pooled"]
    kept = tensors.pop("ids")
    expected = kept.clone()
    del tensors
    assert pool.free_bytes < pool.capacity_bytes
    assert same_bytes(kept, expected)
    del kept
    assert pool.free_bytes == pool.capacity_bytes
    with pytest.raises(MemoryBudgetError):
        hoistway.load_file(model, pool=hoistway.MemoryPool(1))


def test_options_are_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"route": "warp"},
        {"layout": "round"},
        {"threads": 0},
        {"chunk": "lots"},
        {"chunk": 1000},
    ):
        with pytest.raises((OptionError, SliceError)):
            hoistway.load_file(model, **options)
    with pytest.raises(OptionError, match="the options are route, "):
        hoistway.load_file(model, rout="auto")
    with pytest.raises(TypeError, match="did you mean 'coalesce_gap'"):
        hoistway.load_file(model, coalescegap="1MiB")
    with pytest.raises(TypeError, match="did you mean 'framework'"):
        hoistway.load_file(model, framwork="numpy")
    with pytest.raises(TypeError, match="did you mean 'select'"):
        hoistway.load_file(model, selct="*")
    with pytest.raises(OptionError, match="only iter_tensors"):
        hoistway.load_file(model, max_in_flight="1GiB")
    with pytest.raises(OptionError, match="framework"):
        hoistway.load_file(model, framework="tensorflow")
    with pytest.raises(OptionError, match="device"):
        hoistway.load_file(model, "cuda0")
    with pytest.raises(MemoryBudgetError) as caught:
        hoistway.load_file(model, memory_budget="1MiB")
    assert isinstance(caught.value, MemoryError)
    monkeypatch.setenv("HOISTWAY_ROUTE", "threads")
    assert hoistway.load_file(model).report.route == "threads"
    assert hoistway.load_file(model, route="io_uring").report.route == "io_uring"
    monkeypatch.setenv("HOISTWAY_ROUTE", "nonsense")
    with pytest.raises(OptionError, match="HOISTWAY_ROUTE"):
        hoistway.load_file(model)


def test_what_is_closed_says_so(model: Path) -> None:
    checkpoint = hoistway.open(model)
    checkpoint.close()
    for use in (checkpoint.keys, checkpoint.load, lambda: next(iter(checkpoint))):
        with pytest.raises(ClosedError, match="this checkpoint is closed") as caught:
            use()
        assert isinstance(caught.value, ValueError)


def test_a_missing_package_says_what_to_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    _checkpoint._bars.cache_clear()
    with pytest.raises(MissingPackageError, match="needs tqdm; install it") as caught:
        hoistway.load_file(model, progress=True)
    assert isinstance(caught.value, ImportError)


def test_a_copy_of_what_is_cached_names_the_mapping(tmp_path: Path) -> None:
    path = write_model(tmp_path / "large.safetensors", {"a": ("U8", [17 << 20])})
    hint = "route 'mapped' would use them there"
    assert hint in str(hoistway.load_file(path, route="cached", framework="numpy").report)
    pool = hoistway.MemoryPool("20MiB")
    assert hint not in str(hoistway.load_file(path, route="cached", framework="numpy", pool=pool).report)
    assert hint not in str(hoistway.load_file(path, route="threads", framework="numpy").report)


def test_named_routes_carry_the_data_or_fail(model: Path) -> None:
    make_cold(model)
    with pytest.raises(RouteUnavailableError) as caught:
        hoistway.load_file(model, route="cached")
    assert isinstance(caught.value, RuntimeError)
    mapped = hoistway.load_file(model, route="mapped")
    assert mapped.report.carriers[0].route == "mapped"
    assert same_bytes(mapped["embed"], hoistway.load_file(model)["embed"])
    with hoistway.open(model, route="mapped") as checkpoint:
        assert {name for name, _ in checkpoint} == set(checkpoint.keys())


@pytest.mark.parametrize(("option", "value"), [("layout", "packed"), ("numa", 0), ("huge_pages", "reserved")])
def test_options_for_memory_are_refused_by_mapped_only_where_the_route_was_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: object
) -> None:
    of_memory: dict[str, Any] = {option: value}
    refused = pytest.raises(OptionError, match=f"{option} cannot be '{value}': route mapped allocates no")
    with refused:
        hoistway.load_file(model, route="mapped", **of_memory)
    with refused, hoistway.open(model, route="mapped") as checkpoint:
        checkpoint.load(**of_memory)
    with refused, hoistway.open(model, route="mapped", **of_memory) as checkpoint:
        list(checkpoint)
    with hoistway.open(model, **of_memory) as checkpoint:
        assert checkpoint.load(route="mapped").report.route == "mapped"
        assert dict(checkpoint.iter_tensors(route="mapped")).keys() == set(checkpoint.keys())
    monkeypatch.setenv("HOISTWAY_ROUTE", "mapped")
    assert hoistway.load_file(model, **of_memory).report.route == "mapped"
    with hoistway.open(model, **of_memory) as checkpoint:
        assert checkpoint.load().report.route == "mapped"


def test_shards_by_index_directory_glob_and_list(tmp_path: Path) -> None:
    paths = [
        write_model(
            tmp_path / f"model-{i}.safetensors", {f"t{i}": ("F32", [i, 3])}, metadata={"shard": str(i)}
        )
        for i in range(1, 4)
    ]
    by_list = hoistway.load_file(paths)
    assert list(by_list) == ["t1", "t2", "t3"]
    assert list(hoistway.load_file(tmp_path)) == ["t1", "t2", "t3"]
    assert list(hoistway.load_file(tmp_path / "*-[23].safetensors")) == ["t2", "t3"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in (1, 3)}}))
    with hoistway.open(tmp_path) as checkpoint:
        assert checkpoint.keys() == ["t1", "t3"]
        assert checkpoint.files() == [str(paths[0]), str(paths[2])]
        assert checkpoint.metadata() == {"shard": "1"}


def test_manifest_warm_and_doctor(model: Path) -> None:
    with hoistway.open(model) as checkpoint:
        manifest = checkpoint.manifest()
        assert manifest["algorithm"] == "blake3"
        assert set(manifest["tensors"]) == set(checkpoint.keys())
        make_cold(model)
        warmed = checkpoint.warm()
        assert warmed["bytes"] == model.stat().st_size
        # Opening it may have brought some of it in.
        assert 0 < warmed["read_bytes"] <= warmed["bytes"]
    assert {check["status"] for check in hoistway.doctor(model.parent)} <= {"ok", "absent", "slower"}


def test_memory_limits_name_the_machine_and_its_control_groups() -> None:
    limits = hoistway.memory_limits()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = next(limit for limit in limits if limit.name == "the machine's free memory")
    assert machine.total_bytes == total
    assert all(0 <= limit.available_bytes <= limit.total_bytes for limit in limits)


def test_types_that_a_framework_lacks(tmp_path: Path) -> None:
    six = write_model(tmp_path / "six.safetensors", {"a": ("F6_E2M3", [4])})
    with pytest.raises(TypeError, match="raw"):
        hoistway.load_file(six)
    with pytest.raises(UnsupportedDtypeError, match="raw"):
        hoistway.load_file(six, framework="numpy")
    raw = hoistway.load_file(six, framework="raw")["a"]
    assert (raw.dtype, raw.shape, raw.nbytes) == ("F6_E2M3", (4,), 3)
    assert np.asarray(raw).tobytes() == six.read_bytes()[-3:]
    odd = write_model(tmp_path / "odd.safetensors", {"a": ("F4", [2, 3])})
    with pytest.raises(UnsupportedDtypeError, match="odd"):
        hoistway.load_file(odd)
    even = write_model(tmp_path / "even.safetensors", {"a": ("F4", [4, 8])})
    with hoistway.open(even) as checkpoint:
        assert checkpoint.get_slice("a")[::2, 2:6].shape == (2, 2)
        with pytest.raises(SliceError, match="pairs"):
            checkpoint.get_slice("a")[:, ::2]
    with hoistway.open(even, framework="numpy") as checkpoint:
        assert checkpoint.get_slice("a")[:, ::2].shape == (4, 4)


def test_a_file_without_permission_is_a_permission_error(model: Path) -> None:
    done = run(
        """
        import errno, os, sys
        import hoistway, hoistway.compat.safetensors
        path = sys.argv[1]
        os.chmod(path, 0)
        os.chmod(os.path.dirname(path), 0o500)
        if os.getuid() == 0:
            os.setuid(65534)
        tensors = hoistway.load(hoistway.save({}), framework="raw")
        for start in (
            lambda: hoistway.load_file(path, framework="raw"),
            lambda: hoistway.save_file(tensors, path + "2"),
            lambda: hoistway.compat.safetensors.safe_open(path, "np"),
        ):
            try:
                start()
            except PermissionError as error:
                print(isinstance(error, hoistway.errors.StorageError), error.errno == errno.EACCES)
        """,
        model,
    )
    model.parent.chmod(0o700)
    assert done.stdout.splitlines() == ["True True"] * 3, done.stderr


def test_an_empty_path_of_a_cache_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="cache cannot be '': name a directory"):
        hoistway.open(model, cache="")


def test_a_tilde_in_a_path_of_ours_is_the_home(model: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    done = run(
        """
        import os, sys
        import hoistway
        os.chdir(sys.argv[2])
        hoistway.open(sys.argv[1], cache="~/argument").close()
        hoistway.open(sys.argv[1]).close()
        """,
        model,
        folder,
        HOME=str(home),
        HOISTWAY_CACHE="~/variable",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(home)) == ["argument", "variable"]
    assert os.listdir(folder) == []


def test_what_is_not_read_has_no_slice(model: Path) -> None:
    with hoistway.open(model, framework="numpy") as checkpoint:
        for options in ({"select": "embed"}, {"exclude": "ids"}):
            with pytest.raises(SliceError, match="slice of tensor 'ids', which is not read"):
                checkpoint.load(slices={"ids": 0}, **options)


def test_a_report_says_once_what_was_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"t{i}": np.full(1, i, np.uint8) for i in range(100)}
    hoistway.save_file(tensors, folder / "a.safetensors")
    hoistway.save_file(tensors | {"x": np.ones(1)}, folder / "b.safetensors")
    (folder / "other.gguf").write_bytes(b"GGUF")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    notes = hoistway.load_file(folder, framework="raw").report.notes
    moved = [note for note in notes if "takes them from other files" in note]
    assert len(moved) == 1
    assert "100 tensors of" in moved[0]
    assert "the first is 't0', which is in 'a.safetensors'" in moved[0]
    assert "left out, as there are safetensors files: 1 GGUF file, the first is other.gguf" in notes


def test_a_message_shows_few_of_many_dimensions(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [1] * 10_000)})
    with pytest.raises(UnsupportedDtypeError, match="numpy cannot hold tensor 'a' of 10000 dimensions"):
        hoistway.load_file(path, framework="numpy")
    path.write_bytes(path.read_bytes().replace(b"[0, 1]", b"[0, 2]") + b"\0")
    with pytest.raises(FormatError, match=r"shape \[1, .* 10000 dimensions in all\] needs 1 bytes") as caught:
        hoistway.open(path)
    assert len(str(caught.value)) < 500
