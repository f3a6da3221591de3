"""Loading as with fastsafetensors: files to buffers, buffers to tensors."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.fastsafetensors as fst
import pytest
import torch
from conftest import BITS, run, same_bytes, write_model
from hoistway import errors


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    first = {
        "a": ("F32", [64, 32]),
        "layer.experts.0.w": ("BF16", [100]),
        "layer.experts.1.w": ("BF16", [100]),
    }
    second = {"q": ("F16", [6, 4]), "k": ("F16", [2, 4]), "scalar": ("I64", []), "empty": ("F32", [0, 3])}
    return [
        str(write_model(tmp_path / "one.safetensors", first, metadata={"format": "pt"})),
        str(write_model(tmp_path / "two.safetensors", second, seed=1)),
    ]


def loaded(files: list[str], *, keep: Any = None, dtype: fst.DType = fst.DType.AUTO, **options: Any) -> Any:
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), "cpu", nogds=True, **options)
    loader.set_tensor_filter(keep)
    loader.add_filenames({0: files})
    return loader.copy_files_to_device(dtype=dtype)


def descriptors() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{each}")
    }


def test_tensors_are_those_of_the_files(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None)
    loader.add_filenames({0: files})
    expected = hoistway.load_file(files)
    assert loader.get_keys() == hoistway.open(files).keys()
    assert loader.report is None
    buffer = loader.copy_files_to_device()
    for name, tensor in expected.items():
        assert same_bytes(buffer.get_tensor(name), tensor)
        assert loader.get_shape(name) == buffer.get_shape(name) == list(tensor.shape)
    assert buffer.get_filename("a") == files[0]
    assert buffer.get_filename("q") == files[1]
    assert isinstance(buffer.report, hoistway.Report)
    assert buffer.report == loader.report
    assert buffer.report.tensors == len(expected)


@pytest.mark.parametrize("is_named", [True, False])
def test_mapped_files_are_converted(
    files: list[str], monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    if not is_named:
        monkeypatch.setenv("HOISTWAY_ROUTE", "mapped")
    options = {"route": "mapped"} if is_named else {}
    buffer = loaded(files[:1], dtype=fst.DType.F16, **options)
    assert buffer.report.route == "mapped"
    assert same_bytes(buffer.get_tensor("a"), hoistway.load_file(files[:1], route="auto")["a"].half())


def test_reports_are_logged_where_that_is_asked_for(
    files: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="hoistway")
    loaded(files)
    assert not caplog.records
    loaded(files, debug_log=True)
    monkeypatch.setenv("FASTSAFETENSORS_DEBUG", "true")
    loaded(files)
    assert ["7 tensors" in record.getMessage() for record in caplog.records] == [True, True]


def test_on_the_host_direct_storage_is_not_asked_for(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=False)
    loader.add_filenames({0: files})
    assert loader.copy_files_to_device().report.route == "auto"


def test_tensors_outlive_buffer_and_loader(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(8)})
    expected = {name: tensor.clone() for name, tensor in hoistway.load_file(path).items()}
    loader = fst.SafeTensorsFileLoader(None, nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    kept = {name: buffer.get_tensor(name) for name in ("t1", "t6")}
    part = buffer.get_tensor("t3")[100:200]
    buffer.close()
    loader.close()
    del buffer, loader
    # Whatever was given back would be taken for these.
    filling = [torch.full((1 << 20,), 0xAA, dtype=torch.uint8) for _ in range(64)]
    assert all(same_bytes(tensor, expected[name]) for name, tensor in kept.items())
    assert same_bytes(part, expected["t3"][100:200])
    assert len(filling) == 64


def test_a_closed_buffer_says_so(files: list[str]) -> None:
    buffer = loaded(files)
    buffer.close()
    buffer.close()
    for call in (buffer.get_tensor, buffer.get_filename, buffer.get_shape):
        with pytest.raises(ValueError, match="closed"):
            call("a")


def test_no_descriptor_is_left_open(files: list[str]) -> None:
    before = descriptors()
    for _ in range(5):
        loader = fst.SafeTensorsFileLoader(None, nogds=True)
        loader.add_filenames({0: files})
        loader.copy_files_to_device().close()
        loader.close()
        parallel = fst.ParallelLoader(None, files, use_tqdm_on_load=False)
        next(parallel.iterate_weights())
        parallel.close()
        with fst.fastsafe_open(files) as opened:
            opened.get_tensor("a")
        with pytest.raises(errors.CheckpointNotFoundError):
            loader.add_filenames({0: [*files, "absent.safetensors"]})
    # Those that other tests left may be closed meanwhile.
    assert descriptors() <= before


def test_a_filter_reads_only_what_it_keeps(tmp_path: Path) -> None:
    tensors = {f"layer.experts.{i}.w": ("U8", [1 << 20]) for i in range(8)} | {"norm": ("F32", [16])}
    path = str(write_model(tmp_path / "m.safetensors", tensors))
    loader = fst.SafeTensorsFileLoader(None, nogds=True)
    loader.set_tensor_filter(fst.expert_parallel_filter(num_experts=8, ep_size=4, ep_rank=2))
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    assert (
        loader.get_keys()
        == list(buffer.key_to_rank_lidx)
        == [
            "layer.experts.4.w",
            "layer.experts.5.w",
            "norm",
        ]
    )
    assert buffer.report.read_bytes < 3 << 20
    for call in (buffer.get_tensor, buffer.get_filename, buffer.get_shape, loader.get_shape):
        with pytest.raises(ValueError, match=r"experts\.0"):
            call("layer.experts.0.w")
    loader.set_tensor_filter(lambda _: False)
    nothing = loader.copy_files_to_device()
    assert not nothing.key_to_rank_lidx
    assert nothing.report is None


@pytest.mark.parametrize("dtype", sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"}))
def test_all_types_that_torch_has(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": (dtype, [3, 8]), "b": (dtype, [2])})
    buffer = loaded([str(path)])
    for name, tensor in hoistway.load_file(path).items():
        wrapped = buffer.get_tensor_wrapped(name)
        assert same_bytes(wrapped.get_raw(), tensor) or dtype == "F4"
        assert wrapped.dtype is fst.DType[dtype]
        assert wrapped.get_shape() == buffer.get_shape(name)
        copied = bytearray(wrapped.get_nbytes())
        wrapped.copy_to_buffer(memoryview(copied))
        assert bytes(copied) == hoistway.load_file(path, framework="raw")[name].tobytes()
        assert wrapped.clone().contiguous().get_nbytes() == len(copied)


def test_pairs_of_f4_elements_halve_the_shape(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.safetensors", {"a": ("F4", [3, 8])}))
    buffer = loaded([path])
    assert buffer.get_tensor("a").shape == (3, 4)
    assert buffer.get_tensor("a").dtype == torch.float4_e2m1fn_x2
    assert buffer.get_shape("a") == [3, 8]
    joined = buffer.get_multi_cols(["a", "a"], 0)
    assert joined.get_shape() == [6, 8]


def test_types_that_torch_lacks_can_be_left_out(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.safetensors", {"a": ("F6_E2M3", [4]), "b": ("F32", [2])}))
    assert loaded([path], keep=lambda name: name == "b").get_tensor("b").shape == (2,)
    with pytest.raises(errors.UnsupportedDtypeError, match="F6_E2M3"):
        loaded([path])


def test_floats_are_narrowed_as_they_are_loaded(files: list[str]) -> None:
    expected = hoistway.load_file(files)
    narrow = loaded([files[0]], dtype=fst.DType.F8_E4M3)
    for name in ("a", "layer.experts.0.w"):
        tensor = narrow.get_tensor(name)
        assert tensor.dtype == torch.float8_e4m3fn
        assert same_bytes(tensor, expected[name].to(torch.float8_e4m3fn))
    assert narrow.get_tensor_wrapped("a").dtype is fst.DType.F8_E4M3
    with pytest.raises(errors.UnsupportedDtypeError, match=r"BF16 and cannot be converted to F32"):
        loaded([files[0]], dtype=fst.DType.F32)


def test_tensors_move_and_change_types_as_they_are_taken(files: list[str]) -> None:
    buffer = loaded(files)
    wide = buffer.get_tensor("q", dtype=fst.DType.F32)
    assert same_bytes(wide, buffer.get_tensor("q").to(torch.float32))
    assert buffer.get_tensor("q", device=fst.Device()) is buffer.get_tensor("q", device="cpu")
    assert buffer.get_tensor("q", device=torch.device("cpu")) is buffer.get_tensor("q")
    assert buffer.get_tensor("q", device=torch.device("cpu"), dtype=fst.DType.F16) is buffer.get_tensor("q")


def test_columns_of_several_files_are_joined(files: list[str], tmp_path: Path) -> None:
    other = str(write_model(tmp_path / "zzz.safetensors", {"v": ("F16", [2, 4])}, seed=5))
    buffer = loaded([other, *files])
    whole = hoistway.load_file([*files, other])
    joined = buffer.get_multi_cols(["v", "q", "k"], 0)
    assert joined.get_shape() == [10, 4]
    # Of one file in the order of the names, then the next file.
    assert same_bytes(joined.get_raw(), torch.cat([whole["q"], whole["k"], whole["v"]]))


def test_columns_of_several_types_are_promoted_or_refused(tmp_path: Path) -> None:
    types = {name: (name, [2, 4]) for name in ("BF16", "F32", "U8", "F8_E4M3", "F8_E5M2", "F4")}
    one = str(write_model(tmp_path / "one.safetensors", types))
    two = str(write_model(tmp_path / "two.safetensors", {"F16": ("F16", [2, 4])}))
    buffer = loaded([one, two])
    whole = hoistway.load_file([one, two])
    for names in (["BF16", "F32"], ["F32", "BF16"], ["U8", "F16"], ["BF16", "F16"]):
        joined = buffer.get_multi_cols(names, 0)
        assert joined.dtype is fst.DType.F32 or names == ["U8", "F16"]
        assert same_bytes(joined.get_raw(), torch.cat([whole[name] for name in names]))
        assert joined.dtype.to_torch() == joined.get_raw().dtype
    for names in (["BF16", "F8_E4M3"], ["F8_E4M3", "BF16"], ["U8", "F8_E4M3"], ["F8_E4M3", "U8"]):
        with pytest.raises(errors.UnsupportedDtypeError, match=", ".join(names)):
            buffer.get_multi_cols(names, 0)
    for names in (["F8_E4M3", "F8_E5M2"], ["F8_E4M3", "F4"], ["F8_E4M3", "F16"]):
        with pytest.raises((errors.UnsupportedDtypeError, errors.SliceError), match="F8_E4M3"):
            buffer.get_multi_cols(names, 0)


def test_a_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    paths = [str(write_model(tmp_path / f"{i}.safetensors", {"a": ("U8", [1])})) for i in range(2)]
    with pytest.raises(errors.FormatError, match="'a' is in both"):
        loaded(paths)


def test_files_of_ranks_that_are_not_there_are_known_but_not_loaded(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None)
    loader.add_filenames({0: files[:1], 1: files[1:]})
    assert "q" in loader.get_keys()
    buffer = loader.copy_files_to_device()
    assert buffer.get_shape("q") == [6, 4]
    assert buffer.report.tensors == 3
    with pytest.raises(KeyError, match="rank 1"):
        buffer.get_tensor("q")


@pytest.mark.parametrize("cut", [1, 1000, 5000])
def test_a_file_that_is_cut_short_is_an_error(cut: int, files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None, nogds=True)
    loader.add_filenames({0: files})
    os.truncate(files[0], os.path.getsize(files[0]) - cut)
    with pytest.raises(ValueError, match=r"one\.safetensors"):
        loader.copy_files_to_device()
    with pytest.raises(errors.FormatError):
        fst.SafeTensorsFileLoader(None).add_filenames({0: files})


def test_a_file_that_is_replaced_is_an_error(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None, nogds=True)
    loader.add_filenames({0: files})
    for shape, dtype in (([32, 64], "F32"), ([64, 32], "I32")):
        write_model(Path(files[0]), {"a": (dtype, shape), "other": ("U8", [9])})
        with pytest.raises(errors.FileChangedError, match="'a'"):
            loader.copy_files_to_device()
    loader.set_tensor_filter(lambda name: "experts.1" in name)
    with pytest.raises(errors.FileChangedError, match=r"'layer\.experts\.1\.w'"):
        loader.copy_files_to_device()


def test_malformed_headers_are_errors(tmp_path: Path) -> None:
    def metadata_of(header: Any, size: int) -> fst.SafeTensorsMetadata:
        text = header if isinstance(header, str) else json.dumps(header)
        file = (struct.pack("<Q", len(text)) + text.encode()).ljust(size, b"\0")
        memory = ctypes.create_string_buffer(file, len(file))
        return fst.SafeTensorsMetadata.from_buffer(ctypes.addressof(memory), len(file), "memory")

    good = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    length = len(json.dumps(good)) + 16
    assert metadata_of(good, length).tensors["a"].shape == [2]
    for header in (
        "no header",
        "[1]",
        {"a": {**good["a"], "shape": [-2]}},
        {"a": {**good["a"], "shape": [3]}},
        {"a": {**good["a"], "dtype": "F33"}},
        {"a": {**good["a"], "data_offsets": [8, 16]}},
        {"a": {"dtype": "F32"}},
    ):
        with pytest.raises(errors.FormatError, match="memory"):
            metadata_of(header, 1000)
    with pytest.raises(errors.TruncatedError, match="tensor 'a'"):
        metadata_of(good, length - 1)
    with pytest.raises(errors.FormatError, match="a header of 90 bytes in a file of 80"):
        fst.SafeTensorsMetadata("{}", 90, 80)
    for start in (b"", b"1234567", struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 1 << 40) + b"{}"):
        path = tmp_path / "m.safetensors"
        path.write_bytes(start)
        with pytest.raises(errors.FormatError):
            fst.SafeTensorsMetadata.from_file(str(path))


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    for call in ("SafeTensorsMetadata.from_file", "LoaderConfig.from_file"):
        # In a process of its own, which ends where the call waits.
        script = f"import sys, hoistway.compat.fastsafetensors as fst; fst.{call}(sys.argv[1])"
        ended = run(script, fifo)
        assert "it is a FIFO (a named pipe), not a regular file" in ended.stderr
        assert "FormatError" in ended.stderr
    path = tmp_path / "m.safetensors"
    write_model(path, {"a": ("F32", [2])})
    (tmp_path / "link").symlink_to(path)
    assert fst.SafeTensorsMetadata.from_file(str(tmp_path / "link")).tensors["a"].shape == [2]
    with pytest.raises(errors.FormatError, match="it is a directory"):
        fst.LoaderConfig.from_file(str(tmp_path))


def test_frameworks_are_known_by_their_names(files: list[str]) -> None:
    for name in ("pt", "pytorch", "torch"):
        assert fst.SafeTensorsFileLoader(None, framework=name).framework.get_name() == "pytorch"
    with pytest.raises(ValueError, match="framework cannot be 'tensorflow'"):
        fst.SafeTensorsFileLoader(None, framework="tensorflow")


def test_any_group_of_one_will_do(files: list[str]) -> None:
    class Alone:
        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    loader = fst.SafeTensorsFileLoader(Alone())
    loader.add_filenames({0: files})
    assert loader.copy_files_to_device().get_sharded("a", 1).shape == (64, 32)


def test_several_ranks_need_a_process_group() -> None:
    class Two:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    with pytest.raises(ValueError, match="ProcessGroup"):
        fst.SafeTensorsFileLoader(Two())


def test_options_of_hoistway_are_taken_and_unknown_ones_are_not(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None, route="threads", threads=1, direct="never")
    loader.add_filenames({0: files})
    assert loader.copy_files_to_device().report.route == "threads"
    with pytest.raises(errors.OptionError, match="use_shm"):
        fst.SafeTensorsFileLoader(None, use_shm=True)


def test_direct_storage_that_is_not_there_is_an_error_which_names_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [1 << 20])})
    script = """
        import sys
        import pytest
        from hoistway import errors
        from hoistway.compat import fastsafetensors as fst

        loader = fst.SafeTensorsFileLoader(None, "cuda:0", allocator="driver")
        loader.add_filenames({0: [sys.argv[1]]})
        with pytest.raises(RuntimeError, match="gds") as refused:
            loader.copy_files_to_device()
        assert isinstance(refused.value, errors.RouteUnavailableError)
        # Before the first tensor, as those who try again without it expect.
        parallel = fst.ParallelLoader(
            None, [sys.argv[1]], device="cuda:0", use_tqdm_on_load=False, allocator="driver"
        )
        with pytest.raises(RuntimeError, match="gds"):
            next(parallel.iterate_weights())
        """
    # A process of its own: the proof of a direct path holds for as long as a process lives.
    done = run(script, path, FAKE_CUDA_CUFILE_MODE="compat")
    assert done.returncode == 0, done.stderr
