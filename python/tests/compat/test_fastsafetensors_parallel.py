"""One tensor after the other, and the settings that say how."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.fastsafetensors as fst
import pytest
import torch
from conftest import Daemon, run, same_bytes, write_model
from hoistway import errors
from hoistway.compat.fastsafetensors import _copiers, _ignored, _parallel
from hoistway.compat.fastsafetensors._budget import bytes_in_flight


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        str(write_model(tmp_path / f"{file}.safetensors", {f"{file}.{i}": ("F32", [256]) for i in range(4)}))
        for file in ("b", "a")
    ]


def parallel(files: list[str], **options: Any) -> fst.ParallelLoader:
    return fst.ParallelLoader(None, files, use_tqdm_on_load=False, **options)


def test_weights_come_in_the_order_of_the_files(files: list[str]) -> None:
    expected = hoistway.load_file(files)
    loader = parallel(files)
    assert loader.report is None
    weights = list(loader.iterate_weights())
    assert [name for name, _ in weights] == [f"{file}.{i}" for file in ("b", "a") for i in range(4)]
    assert loader.report.tensors == 8
    loader.close()
    loader.close()
    # Not views of a buffer that is used again.
    assert all(same_bytes(tensor, expected[name]) for name, tensor in weights)


def test_a_name_in_several_files_comes_from_each(tmp_path: Path) -> None:
    paths = [
        str(
            write_model(
                tmp_path / f"{seed}.safetensors", {"x": ("F32", [256]), f"y{seed}": ("U8", [9])}, seed=seed
            )
        )
        for seed in range(3)
    ]
    of_each = [hoistway.load_file(path) for path in paths]

    def weights(**options: Any) -> list[tuple[str, torch.Tensor]]:
        loader = parallel(paths, **options)
        for _ in range(2):
            given = list(loader.iterate_weights())
        assert loader.report.tensors == len(given)
        assert loader.report.tensor_bytes == sum(tensor.nbytes for _, tensor in given)
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(loader.iterate_weights())
        return given

    given = weights(queue_size=-1)
    assert [name for name, _ in given] == ["x", "y0", "x", "y1", "x", "y2"]
    expected = [tensor for loaded in of_each for tensor in loaded.values()]
    assert all(same_bytes(tensor, other) for (_, tensor), other in zip(given, expected, strict=True))
    theirs = pytest.importorskip("fastsafetensors")
    others = theirs.ParallelLoader(None, paths, use_tqdm_on_load=False, nogds=True, framework="pytorch")
    assert sorted(name for name, _ in others.iterate_weights()) == sorted(name for name, _ in given)
    others.close()
    # Also where the filter drops the very name.
    given = weights(tensor_filter=lambda name: name != "x")
    assert [name for name, _ in given] == ["y0", "y1", "y2"]
    # What is wrong for another reason stays wrong.
    Path(paths[1]).write_bytes(b"\0" * 8)
    with pytest.raises(errors.FormatError, match=r"1\.safetensors"):
        parallel(paths)


def test_ranges_of_copiers_are_checked(files: list[str]) -> None:
    base = pytest.importorskip("fastsafetensors.copier.base")
    framework = fst.frameworks.get_framework_op("pytorch")
    metadata = fst.SafeTensorsMetadata.from_file(files[0], framework)
    first, last = metadata.header_length, metadata.size_bytes

    class Copier(fst.copier.base.CopierInterface):
        def submit_io(self, *_arguments: Any) -> Any: ...

        def wait_io(self, *_arguments: Any, **_keywords: Any) -> Any: ...

    copier = Copier()
    copier.metadata = metadata
    for ranges, is_valid in [
        (None, True),
        ([], True),
        ([(first, last)], True),
        ([(first, first + 4), (first + 4, last)], True),
        ([[first, first + 4]], True),
        ([(0, last)], False),
        ([(first, last + 1)], False),
        ([(first, first)], False),
        ([(first + 4, first)], False),
        ([(first + 4, last), (first, first + 4)], False),
        ([(first, first + 8), (first + 4, last)], False),
        ([(first, True)], False),
        ([(float(first), last)], False),
        ([first], False),
        ([(first, last, last)], False),
    ]:
        outcomes = []
        for check in (copier.set_byte_ranges, lambda ranges: base.validated_byte_ranges(metadata, ranges)):
            try:
                check(ranges)
                outcomes.append(True)
            except ValueError:
                outcomes.append(False)
        assert outcomes == [is_valid, is_valid], ranges


def test_weights_can_be_iterated_again_and_ended_early(files: list[str]) -> None:
    loader = parallel(files)
    weights = loader.iterate_weights()
    name, tensor = next(weights)
    weights.close()
    assert name == "b.0"
    assert same_bytes(tensor, hoistway.load_file(files)["b.0"])
    assert len(list(loader.iterate_weights())) == 8
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader.iterate_weights())


class TwoRanks:
    """A group as far as a loader asks it."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.usefixtures("stand_in")
def test_several_ranks_load_to_what_torch_means_by_cuda(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    # Torch has no device here, whose current stream is asked for.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    loader = parallel(files, device="cuda:0")
    monkeypatch.setattr(loader.loader, "pg", TwoRanks())
    monkeypatch.setattr(_parallel.distributed, "iter_tensors", lambda *_, **options: asked.update(options))
    for version, name in (("6.3.42134", "rocm:0"), (None, "cuda:0")):
        monkeypatch.setattr(torch.version, "hip", version)
        loader._of_all_ranks()
        assert asked["device"] == name
    loader.close()


def test_memory_is_bounded_by_the_batch(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [4 << 20]) for i in range(32)})
    done = run(
        """
        import resource, sys
        import torch
        import hoistway.compat.fastsafetensors as fst

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

        loader = fst.ParallelLoader(
            None, sys.argv[1:], queue_size=-1, max_batch_bytes=16 << 20, use_tqdm_on_load=False,
            max_threads=1, huge_pages="never",
        )
        weights = loader.iterate_weights()
        next(weights)
        before, total = peak(), 0
        for name, tensor in weights:
            total += tensor.nbytes
            del tensor
        assert total == 31 * 4 << 20
        assert peak() - before < 64, f"{before} MiB, then {peak()} MiB, and 128 MiB were loaded"
        """,
        path,
    )
    assert done.returncode == 0, done.stderr


def test_a_filter_needs_a_rank_that_loads_for_itself(files: list[str]) -> None:
    class Two:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    def keep(name: str) -> bool:
        return name.endswith("1")

    loader = fst.ParallelLoader(Two(), files, use_tqdm_on_load=False, tensor_filter=keep, all_local=True)
    assert [name for name, _ in loader.iterate_weights()] == ["b.1", "a.1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrent_producers": 2}, "max_concurrent_producers"),
        ({"use_chunk_budget_as_allocation_size": True}, "max_batch_bytes"),
        ({"accumulate_resident": False, "resident_tensor": bool}, "accumulate_resident"),
        ({"borrowed_tensors": True}, "accumulate_resident"),
        ({"broadcast_run_bytes": -1}, "negative"),
        ({"max_batch_bytes": 1023}, "'b.0' has 1024 bytes"),
        ({"device_memory_budget": 8191}, "8192 bytes stay"),
        ({"device_memory_budget": 2047, "accumulate_resident": False}, "1024 bytes are on their way"),
        ({"use_fgds": True}, "cuFile"),
        ({"use_fgds": True, "copier_type": "fgds"}, "cuFile"),
        ({"nogds": True, "copier_type": "gds"}, "nogds=True contradicts"),
        ({"use_fgds": True, "copier_type": "nogds"}, "use_fgds=True contradicts"),
        ({"copier_type": "warp"}, "warp"),
    ],
)
def test_arguments_that_contradict_are_errors(
    options: dict[str, Any], message: str, files: list[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        parallel(files, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="DirectStorage may be there")
def test_copier_dstorage_is_never_another_route(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOISTWAY_DIRECTSTORAGE_DIR", raising=False)
    with pytest.raises(errors.RouteUnavailableError, match="directstorage is an interface of Windows"):
        list(parallel(files, copier_type="dstorage").iterate_weights())
    loader = fst.SafeTensorsFileLoader(None, "cpu", copier_type="dstorage")
    loader.add_filenames({0: files})
    with pytest.raises(errors.RouteUnavailableError, match="directstorage is an interface of Windows"):
        loader.copy_files_to_device()


def test_budgets_that_suffice_are_kept(files: list[str]) -> None:
    for options in (
        {"device_memory_budget": 8192},
        {"device_memory_budget": 2048, "accumulate_resident": False, "borrowed_tensors": True},
        {"device_memory_budget": 4096, "resident_tensor": lambda name: name in ("a.0", "b.3")},
        {"max_batch_bytes": 1024, "use_chunk_budget_as_allocation_size": True},
    ):
        assert len(list(parallel(files, **options).iterate_weights())) == 8


def test_bytes_in_flight_follow_queue_batch_and_budget() -> None:
    def in_flight(**changed: Any) -> int:
        options = {
            "queue_size": 0,
            "max_batch_bytes": None,
            "device_memory_budget": None,
            "stays": lambda _: True,
        }
        return bytes_in_flight({"a": 100, "b": 50}, **{**options, **changed})

    assert in_flight() == 1 << 30
    assert in_flight(queue_size=-1) == 512 << 20
    assert in_flight(queue_size=3, max_batch_bytes=200) == 1000
    assert in_flight(device_memory_budget=400) == 400
    assert in_flight(device_memory_budget=400, stays=lambda name: name == "b") == 350
    assert in_flight(device_memory_budget=400, max_batch_bytes=100, stays=lambda _: False) == 200
    with pytest.raises(fst.BudgetInfeasibleError) as infeasible:
        in_flight(device_memory_budget=149)
    assert isinstance(infeasible.value, MemoryError)
    assert isinstance(infeasible.value, errors.HoistwayError)


def test_a_file_that_is_cut_short_ends_the_weights(files: list[str]) -> None:
    loader = parallel(files, direct="never")
    with open(files[1], "r+b") as file:
        file.truncate(Path(files[1]).stat().st_size - 8)
    given = []
    with pytest.raises((errors.TruncatedError, errors.FileChangedError), match=r"a\.safetensors"):
        given.extend(name for name, _ in loader.iterate_weights())
    assert "a.3" not in given


def test_progress_is_shown_where_it_is_asked_for(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    assert len(list(fst.ParallelLoader(None, files).iterate_weights())) == 8
    assert "8/8" in capsys.readouterr().err
    list(parallel(files).iterate_weights())
    assert not capsys.readouterr().err


def test_settings_come_from_the_file_that_the_environment_names(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "loader": "base",
                "unknown": 1,
                "base": {"copier_type": "nogds", "max_threads": 2, "framework": "pytorch"},
                "parallel": {"use_pipeline": True, "queue_size": 1, "use_tqdm_on_load": False},
                "debug": {"debug_log": True},
                "max_batch_bytes": 2048,
            }
        )
    )
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(settings))
    config = fst.load_config()
    assert config.get_extension_config("base") == {"copier_type": "nogds", "max_threads": 2}
    assert config.create_parallel_kwargs() == {
        "max_concurrent_producers": 1,
        "queue_size": 1,
        "use_tqdm_on_load": False,
        "max_batch_bytes": 2048,
        "use_chunk_budget_as_allocation_size": False,
        "device_memory_budget": None,
    }
    loader = fst.AutoLoader(None, files)
    assert loader.config == config
    assert len(list(loader.iterate_weights())) == 8
    assert loader.report.tensors == 8
    loader.close()


def test_settings_in_the_working_directory_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastsafetensors.json").write_text('{"loader": "3fs"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTSAFETENSORS_CONFIG", raising=False)
    assert fst.load_config() == fst.LoaderConfig()
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", "absent.json")
    with pytest.raises(FileNotFoundError):
        fst.load_config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loader": "s3"}, "s3"),
        ({"base": {"nogds": True, "copier_type": "gds"}}, "nogds=True contradicts"),
        ({"base": {"nogds": False, "copier_type": "nogds"}}, "nogds: false contradicts"),
        ({"base": {"mount_point": "/"}}, "mount_point"),
        ({"base": {"framework": "paddle"}}, "framework cannot be 'paddle' in section 'base'"),
        ({"debug_log": True, "base": {"debug_log": False}}, "debug_log"),
        ({"loader": "3fs", "3fs": {"mount_point": "/absent"}}, "/absent"),
        ({"loader": "3fs", "3fs": {"copier_type": "gds"}}, "3fs"),
        ({"loader": "3fs", "3fs": {"warp": 9}}, "warp"),
        ({"parallel": {"max_concurrent_producers": 2}}, "max_concurrent_producers"),
        ([], "object"),
    ],
)
def test_settings_that_cannot_be_followed_are_errors(
    settings: Any, message: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(path))
    with pytest.raises(ValueError, match=message):
        fst.AutoLoader(None, files)


def test_settings_of_the_section_are_followed(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load_options = _copiers.load_options

    def recorded(copier: str, *arguments: Any) -> dict[str, Any]:
        asked.append((copier, arguments[1], arguments[2]))
        return load_options("nogds", *arguments)

    monkeypatch.setattr(_copiers, "load_options", recorded)
    path = tmp_path / "settings.json"
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(path))
    for settings in (
        {"base": {"nogds": True}},
        {"base": {"nogds": False}},
        {"base": {"copier_type": "unified", "nogds": True}},
        {"loader": "3fs", "3fs": {"mount_point": str(tmp_path), "max_threads": 3, "direct": "never"}},
        {"loader": "3fs", "3fs": {"buffer_size": 8 << 20, "entries": 64, "io_depth": 0, "mount_point": ""}},
    ):
        path.write_text(json.dumps(settings))
        fst.AutoLoader(None, files).close()
    assert asked == [
        ("nogds", None, {}),
        ("gds", None, {}),
        ("unified", None, {}),
        ("3fs", 3, {"direct": "never"}),
        ("3fs", None, {"in_flight": 8 << 20}),
    ]


def test_arguments_without_effect_warn_once(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ignored, "_warned", set())
    path = tmp_path / "settings.json"
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(path))
    path.write_text(json.dumps({"set_numa": False, "base": {"nogds": True, "bbuf_size_kb": 64}}))
    for expected in ({"set_numa", "bbuf_size_kb"}, set()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fst.AutoLoader(None, files).close()
            fst.SafeTensorsFileLoader(None, nogds=True, bbuf_size_kb=1)
        assert {str(warning.message).partition("=")[0] for warning in caught} == expected
        assert {warning.filename for warning in caught} <= {__file__}
    path.write_text(json.dumps({"loader": "3fs", "3fs": {"entries": 8, "io_depth": 4}}))
    with pytest.warns(_ignored.NoEffectWarning) as told:
        fst.AutoLoader(None, files).close()
    assert {str(warning.message).partition("=")[0] for warning in told} == {"entries", "io_depth"}
    assert {warning.filename for warning in told} == {__file__}
    for options in ({"overlap_io": False}, {"broadcast_run_bytes": 1}, {"broadcast_run_tensors": 1}):
        with pytest.warns(_ignored.NoEffectWarning, match=f"{min(options)}="):
            parallel(files, **options).close()
    monkeypatch.setattr(_ignored, "_warned", set())
    with pytest.warns(_ignored.NoEffectWarning, match="numa=") as told:
        fst.SafeTensorsFileLoader(None).init_numa()
    assert [warning.filename for warning in told] == [__file__]


def test_a_loader_checks_its_mount_point(files: list[str], tmp_path: Path) -> None:
    fst.SafeTensorsFileLoader(None, copier_type="3fs", mount_point=str(tmp_path)).add_filenames({0: files})
    loader = fst.SafeTensorsFileLoader(None, copier_type="3fs", mount_point="/absent")
    with pytest.raises(ValueError, match="/absent"):
        loader.add_filenames({0: files})
    with pytest.raises(ValueError, match="mount_point"):
        fst.SafeTensorsFileLoader(None, nogds=True, mount_point=str(tmp_path))


def test_files_that_are_not_on_a_3fs_are_an_error(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"loader": "3fs"}')
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(path))
    for loader in (parallel(files, copier_type="3fs"), fst.AutoLoader(None, files)):
        with pytest.raises(errors.RouteUnavailableError, match="not on a 3FS"):
            list(loader.iterate_weights())
        loader.close()


def test_files_that_are_on_a_3fs_come_by_usrbio(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{number}": ("F32", [number + 1, 300_000]) for number in range(3)}
    expected = hoistway.load_file(write_model(daemon.root / "model.safetensors", tensors))
    files = [str(daemon.mount / "model.safetensors")]
    path = tmp_path / "settings.json"
    section = {"mount_point": str(daemon.mount), "buffer_size": 4 << 20}
    path.write_text(json.dumps({"loader": "3fs", "3fs": section}))
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(path))
    for loader in (parallel(files, copier_type="3fs"), fst.AutoLoader(None, files)):
        weights = dict(loader.iterate_weights())
        assert {carrier.route for carrier in loader.report.carriers} == {"usrbio"}
        assert weights.keys() == expected.keys()
        assert all(same_bytes(tensor, expected[name]) for name, tensor in weights.items())
        loader.close()


def test_experts_are_those_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fst.owned_expert_range(10, 4, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    for size, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match="ep_"):
            fst.owned_expert_range(10, size, rank)
    for variable in ("SLICE", "NUM_EXPERTS", "SIZE", "RANK"):
        monkeypatch.delenv(f"FASTSAFETENSORS_EP_{variable}", raising=False)
    assert fst.expert_parallel_filter_from_env() is None
    monkeypatch.setenv("FASTSAFETENSORS_EP_SLICE", "1")
    assert fst.expert_parallel_filter_from_env() is None
    monkeypatch.setenv("FASTSAFETENSORS_EP_NUM_EXPERTS", "8")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    kept = fst.expert_parallel_filter_from_env()
    assert kept is not None
    assert [number for number in range(8) if kept(f"l.experts.{number}.w")] == [2, 3]
    assert kept("l.norm")
    monkeypatch.setenv("FASTSAFETENSORS_EP_RANK", "3")
    kept = fst.expert_parallel_filter_from_env()
    assert kept is not None
    assert kept("l.experts.7.w")
    monkeypatch.setenv("FASTSAFETENSORS_EP_SIZE", "1")
    assert fst.expert_parallel_filter_from_env() is None, "one rank has all experts"


def test_experts_agree_with_fastsafetensors() -> None:
    theirs = pytest.importorskip("fastsafetensors")
    for experts in (1, 7, 64):
        for size in (1, 3, 8):
            for rank in range(size):
                assert fst.owned_expert_range(experts, size, rank) == theirs.owned_expert_range(
                    experts, size, rank
                )


def test_a_copier_of_ones_own_brings_the_tensors(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoistway.compat.fastsafetensors._copiers._registered", {})
    asked: list[Any] = []

    class Copier:
        def __init__(self, metadata: fst.SafeTensorsMetadata, framework: Any) -> None:
            self.metadata, self.framework = metadata, framework

        def set_byte_ranges(self, ranges: list[tuple[int, int]]) -> None:
            asked.append(ranges)

        def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> str:
            return f"buffer of {self.metadata.src}"

        def wait_io(self, gbuf: str, dtype: fst.DType, noalign: bool) -> dict[str, Any]:
            assert gbuf.endswith(self.metadata.src)
            frames = self.metadata.tensors.items()
            return {
                name: self.framework.wrap_tensor(torch.full(frame.shape, 7.0))
                for name, frame in frames
                if name != lost
            }

    @fst.register_copier_constructor("sevens", Copier)
    def _sevens(device: fst.Device, **options: Any) -> Any:
        asked.append((device, options))
        return lambda metadata, device, framework: Copier(metadata, framework)

    lost = ""
    loader = fst.SafeTensorsFileLoader(None, copier_type="sevens", depth=3)
    loader.set_tensor_filter(lambda name: name != "a.1")
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    assert asked[0] == (fst.Device(), {"depth": 3})
    assert len(asked) == 2, "one of the files is read in part"
    assert buffer.get_tensor("a.0").eq(7).all()
    assert buffer.report is None
    weights = dict(parallel(files, copier_type="sevens").iterate_weights())
    assert len(weights) == 8
    assert weights["b.3"].eq(7).all()
    lost = "b.2"
    with pytest.raises(errors.TensorNotFoundError, match=r"b\.2"):
        loader.copy_files_to_device()


def test_copiers_are_routes() -> None:
    def options(copier: str, device: str, **extra: Any) -> dict[str, Any]:
        return _copiers.load_options(copier, fst.Device.from_str(device), None, extra)

    assert options("gds", "cuda:0") == {"route": "gds", "allocator": "torch"}
    assert options("nogds", "cuda:0", allocator="driver") == {"route": "staged", "allocator": "driver"}
    assert options("unified", "cuda:0")["route"] == "unified"
    assert options("gds", "cpu") == options("nogds", "cpu") == {}
    assert options("nogds", "cpu", route="threads") == {"route": "threads"}


def test_the_environment_chooses_direct_reads_and_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "0")
    assert _copiers.load_options("nogds", fst.Device(), None, {}) == {"direct": "never"}
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "1")
    assert _copiers.load_options("nogds", fst.Device(), 2, {}) == {"direct": "always", "threads": 2}
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "auto")
    assert _copiers.load_options("nogds", fst.Device(), None, {}) == {}
    monkeypatch.setenv("FASTSAFETENSORS_UNIFIED_MEM", "1")
    assert _copiers.load_options("nogds", fst.Device.of(0), None, {})["route"] == "unified"
    assert fst.get_device_numa_node(None) is None
    assert fst.get_device_numa_node(99) is None
