"""The drop-in on one file: what is read, how long it stays valid, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.safetensors as drop_in
import hoistway.compat.safetensors.flax
import hoistway.compat.safetensors.numpy
import hoistway.compat.safetensors.torch
import numpy as np
import pytest
import safetensors
import torch
from conftest import make_cold, same_bytes, write_model
from hoistway import errors
from hoistway.compat.safetensors import SafetensorError, safe_open


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A tensor of 16 MiB, in rows of 4 KiB."""
    return write_model(tmp_path / "wide.safetensors", {"w": ("F32", [4096, 1024])})


def open_files() -> list[str]:
    """Names of the files that this process has open."""
    names = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry.path))
    return names


def test_the_error_class_is_that_of_safetensors() -> None:
    assert SafetensorError is safetensors.SafetensorError


def test_opening_and_looking_reads_no_tensor(wide: Path) -> None:
    with safe_open(wide, "pt") as file:
        part = file.get_slice("w")
        assert (part.get_shape(), part.get_dtype()) == ([4096, 1024], "F32")
        assert str(wide) not in [path for path, _ in drop_in.reports()]
        file.get_tensor("w")
    assert str(wide) == drop_in.reports()[-1].path


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("index", "rows"),
    [((slice(7, 9),), 2), (5, 1), ((slice(100, 110), slice(0, 1024, 7)), 10), ((3, ...), 1)],
)
def test_only_the_bytes_of_a_slice_are_read(wide: Path, backend: str, index: Any, rows: int) -> None:
    make_cold(wide)
    whole = hoistway.load_file(wide)["w"]
    make_cold(wide)
    with safe_open(wide, "pt", backend=backend) as file:
        part = file.get_slice("w")[index]
    assert same_bytes(part, whole[index])
    report = drop_in.last_report()
    assert report.tensor_bytes == rows * 4096
    # Direct reads are of whole blocks.
    assert report.read_bytes <= (rows + 2) * 4096


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize(
    "index",
    [
        (slice(None, None, 64), slice(None, None, 64)),
        # In order already, and yet a small part of what is read.
        slice(0, 4096, 4096),
        (0, slice(0, 1024, 1024)),
    ],
)
def test_a_slice_has_no_more_memory_than_it_needs(index: Any, backend: str, wide: Path) -> None:
    with safe_open(wide, "pt", backend=backend) as file:
        part = file.get_slice("w")[index]
        assert part.untyped_storage().nbytes() == part.nbytes > 0
        assert same_bytes(part, file.get_tensor("w")[index])
    with safe_open(wide, "np", backend=backend) as file:
        part = file.get_slice("w")[index]
        assert part.base is None or part.base.nbytes == part.nbytes
        assert part.tobytes() == file.get_tensor("w")[index].tobytes()


def test_slices_go_on_reading_after_the_file_is_closed_and_tensors_stay(model: Path) -> None:
    with safe_open(model, "pt") as file:
        part = file.get_slice("embed")
        tensor = file.get_tensor("embed")
    model.unlink()
    assert same_bytes(part[3:5], tensor[3:5])
    del part
    assert not [name for name in open_files() if "model.safetensors" in name]


def test_each_tensor_has_memory_of_its_own(model: Path) -> None:
    with safe_open(model, "pt") as file:
        first, second = file.get_tensor("embed"), file.get_tensor("embed")
    first.zero_()
    assert second.any()


def test_many_threads_read_from_one_file(model: Path) -> None:
    whole = hoistway.load_file(model)
    with safe_open(model, "pt") as file, ThreadPoolExecutor(8) as pool:
        names = file.keys() * 20
        for name, tensor in zip(names, pool.map(lambda name: file.get_slice(name)[...], names), strict=True):
            assert same_bytes(tensor, whole[name])
    report = drop_in.last_report()
    assert report.tensors == len(names), "a load went uncounted"
    assert report.tensor_bytes == 20 * sum(tensor.nbytes for tensor in whole.values())


def test_load_file_reports(model: Path) -> None:
    for load in (drop_in.torch.load_file, drop_in.numpy.load_file, drop_in.flax.load_file):
        if load is not drop_in.torch.load_file:
            pytest.importorskip("jax")
        tensors = load(model)
        assert type(pickle.loads(pickle.dumps(dict(tensors)))) is dict
        assert tensors.report.tensors == 8
        assert drop_in.reports()[-1] == (str(model), tensors.report)


def test_a_handle_is_read_even_if_its_file_has_no_name_any_more(model: Path) -> None:
    expected = hoistway.load_file(model)["ids"]
    with model.open("rb") as handle:
        handle.seek(5)
        with drop_in._safe_open_handle(handle, "pt") as file:
            assert torch.equal(file.get_tensor("ids"), expected)
        model.unlink()
        file = drop_in._safe_open_handle(handle, framework="pt", device="cpu")
        assert handle.tell() == 5
    assert torch.equal(file.get_tensor("ids"), expected)


def test_truncated_behind_its_back(wide: Path) -> None:
    with safe_open(wide, "pt") as file:
        os.truncate(wide, 1 << 20)
        with pytest.raises(SafetensorError) as caught:
            file.get_tensor("w")
        with pytest.raises(SafetensorError):
            file.get_slice("w")[4000:]
        with pytest.raises(SafetensorError):
            file.get_tensors()
    error = caught.value
    assert isinstance(error, (errors.TruncatedError, errors.FileChangedError))
    assert (str(error.path), error.tensor) == (str(wide), "w")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_errors_are_of_both_libraries(model: Path, tmp_path: Path) -> None:
    with safe_open(model, "pt") as file:
        with pytest.raises(errors.TensorNotFoundError, match="none") as missing:
            file.get_tensor("none")
        with pytest.raises(errors.SliceError) as outside:
            file.get_slice("embed")[1000]
    with safe_open(model, "np") as file, pytest.raises(errors.SliceError) as refused:
        file.get_slice("embed")[1000]
    short = tmp_path / "short"
    short.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(errors.TruncatedError) as truncated:
        safe_open(short, "pt")
    for caught, tensor in ((missing, "none"), (outside, "embed"), (refused, "embed"), (truncated, None)):
        assert isinstance(caught.value, SafetensorError)
        assert str(caught.value.path) in (str(model), str(short))
        assert tensor in (None, caught.value.tensor)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*none") as absent:
        safe_open(tmp_path / "none", "pt")
    assert isinstance(absent.value, errors.CheckpointNotFoundError)
    assert not isinstance(absent.value, SafetensorError)


def test_one_file_and_nothing_else(model: Path) -> None:
    """hoistway itself opens all of these."""
    index = model.parent / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"embed": "model.safetensors"}}')
    with pytest.raises(SafetensorError, match="index"):
        safe_open(index, "pt")
    with pytest.raises(OSError, match="directory"):
        safe_open(model.parent, "pt")
    with pytest.raises(FileNotFoundError):
        safe_open(str(model.parent / "*.safetensors"), "pt")
    gguf = model.parent / "model.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    with pytest.raises(SafetensorError):
        safe_open(gguf, "pt")


def test_a_device_that_is_not_there_is_an_error_that_names_it(model: Path) -> None:
    for device in ("cuda:63", 63):
        with (
            safe_open(model, "pt", device) as file,
            pytest.raises(SafetensorError, match="cuda:63") as caught,
        ):
            file.get_tensor("embed")
        assert isinstance(caught.value, errors.DeviceUnavailableError)


def test_f4_comes_in_pairs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"t": ("F4", [4, 8]), "odd": ("F4", [2, 3])})
    whole = hoistway.load_file(path, select="t", framework="raw")["t"].tobytes()
    pairs = np.frombuffer(whole, np.uint8).reshape(4, 4)
    for backend in ("mmap", "pread"):
        with safe_open(path, "pt", backend=backend) as file:
            part = file.get_slice("t")
            assert part.get_shape() == [4, 8]
            for index in (np.s_[1:3], np.s_[:, 1:3], np.s_[2, 3], np.s_[..., 0], np.s_[:, ::2]):
                assert part[index].dtype == torch.float4_e2m1fn_x2
                assert np.array_equal(part[index].view(torch.uint8).numpy(), pairs[index])
            with pytest.raises(SafetensorError, match="odd"):
                file.get_tensor("odd")


@pytest.mark.parametrize("name", ["tensorflow", "mlx", "paddle"])
def test_frameworks_that_hoistway_lacks_cannot_be_imported(name: str) -> None:
    with pytest.raises(ImportError, match=f"no module for {name}"):
        __import__(f"hoistway.compat.safetensors.{name}")


def test_safetensors_itself_is_not_needed(model: Path) -> None:
    script = """
        import sys
        sys.modules["safetensors"] = None
        from hoistway.compat.safetensors import SafetensorError, safe_open
        with safe_open(sys.argv[1], "np") as file:
            assert file.get_tensor("ids").shape == (3, 5)
            try:
                file.get_tensor("none")
            except SafetensorError as error:
                print(type(error).__name__, "torch" in sys.modules)
        """
    command = [sys.executable, "-c", textwrap.dedent(script), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TensorNotFoundError", "False"]
