"""The Python package on Windows: loads, saves, drop-ins, and what it says that it lacks there.

Without numpy, which does not run in Wine 10: ``framework="raw"`` stands for all.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import hoistway
import pytest
import safetensors
from hoistway.compat import safetensors as drop_in

ROUTES = ("auto", "overlapped", "threads", "mapped")

Contents = dict[str, tuple[list[int], bytes]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of some chunks."""
    source = random.Random(38)
    shapes = {"matrix": ("F32", [300, 70], 300 * 70 * 4)}
    shapes |= {f"tensor.{size}": ("U8", [size], size) for size in (1, 513, 4097, 9_000_001)}
    header, end = {}, 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + source.randbytes(end))
    return path


def reference(path: Path) -> Contents:
    """What the reference library finds in a file."""
    return {
        name: (own["shape"], bytes(own["data"])) for name, own in safetensors.deserialize(path.read_bytes())
    }


def contents(loaded: Mapping[str, hoistway.Tensor]) -> Contents:
    return {name: (list(tensor.shape), tensor.tobytes()) for name, tensor in loaded.items()}


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_loads_what_the_reference_library_loads(model: Path, route: str) -> None:
    loaded = hoistway.load_file(model, framework="raw", route=route)
    assert contents(loaded) == reference(model)
    assert route == "auto" or {carrier.route for carrier in loaded.report.carriers} == {route}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_saved_is_loaded(model: Path, tmp_path: Path, route: str) -> None:
    tensors = dict(hoistway.load_file(model, framework="raw").items())
    saved, folder = tmp_path / "saved.safetensors", tmp_path / "shards"
    hoistway.save_file(tensors, saved)
    hoistway.save_sharded(tensors, folder, max_shard_size="1MB")
    assert reference(saved) == reference(model)
    for path in (saved, folder):
        assert contents(hoistway.load_file(path, framework="raw", route=route)) == reference(model)


def test_a_tensor_of_a_mapped_file_outlives_the_checkpoint(model: Path) -> None:
    tensor = hoistway.load_file(model, framework="raw", route="mapped")["matrix"]
    gc.collect()
    assert tensor.tobytes() == reference(model)["matrix"][1]


def test_another_thread_may_drop_tensors(model: Path) -> None:
    loaded = dict(hoistway.load_file(model, framework="raw").items())

    def drop() -> None:
        loaded.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert not loaded


def test_a_pool_keeps_memory(model: Path) -> None:
    pool = hoistway.MemoryPool("64MiB")
    for _ in range(3):
        assert contents(hoistway.load_file(model, framework="raw", pool=pool)) == reference(model)


def test_routes_of_linux_say_that_they_are_not_here(model: Path) -> None:
    for route in ("io_uring", "cached", "usrbio", "gds"):
        with pytest.raises(hoistway.HoistwayError) as raised:
            hoistway.load_file(model, framework="raw", route=route)
        assert str(raised.value)


def test_route_directstorage_needs_its_libraries(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hoistway.errors.RouteUnavailableError, match=r"dstorage\.dll is not in"):
        hoistway.load_file(model, framework="raw", route="directstorage")
    libraries = os.environ.get("HOISTWAY_TEST_DIRECTSTORAGE")
    if not libraries:
        pytest.skip("Microsoft's libraries are not there")
    monkeypatch.setenv("HOISTWAY_DIRECTSTORAGE_DIR", libraries)
    loaded = hoistway.load_file(model, framework="raw", route="directstorage")
    assert contents(loaded) == reference(model)
    assert [carrier.route for carrier in loaded.report.carriers] == ["directstorage"]


@pytest.mark.parametrize("name", ["hoistway.kv", "hoistway.compat.threefs"])
def test_what_is_of_linux_alone_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError, match="on Linux only"):
        importlib.import_module(name)


def test_the_drop_in_reads_and_writes_as_safetensors_does(model: Path) -> None:
    data = model.read_bytes()
    assert dict(drop_in.deserialize(data)) == dict(safetensors.deserialize(data))
    with drop_in.safe_open(model, framework="np") as opened:
        assert set(opened.keys()) == set(reference(model))


def test_an_open_file_that_was_replaced_is_not_taken_for_another(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(model.read_bytes())
    with other.open("rb") as file:
        stand_in = type("File", (), {"name": str(model), "fileno": file.fileno})()
        with pytest.raises(FileNotFoundError):
            drop_in._safe_open_handle(stand_in, framework="np")


def test_an_error_names_file_and_tensor(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors") as raised:
        hoistway.load_file(model, framework="raw")
    assert raised.value.tensor


def test_a_stream_gives_every_tensor(model: Path) -> None:
    assert contents(dict(hoistway.iter_tensors(model, framework="raw"))) == reference(model)


def hoistway_command(*arguments: object) -> str:
    command = [sys.executable, "-m", "hoistway", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_command_is_in_the_package(model: Path) -> None:
    assert hoistway_command("--version").strip() == f"hoistway {hoistway.__version__}"
    assert "overlapped" in hoistway_command("load", "--report", model)


def test_the_command_loads_what_was_saved_by_each_route(model: Path, tmp_path: Path) -> None:
    manifest, saved = tmp_path / "manifest.json", tmp_path / "saved.safetensors"
    hoistway_command("verify", "--save", manifest, model)
    hoistway.save_file(dict(hoistway.load_file(model, framework="raw").items()), saved)
    for route in ROUTES:
        report = hoistway_command("load", "--manifest", manifest, "--report", "--route", route, saved)
        assert "verified  5 tensors" in report, report


def test_a_program_is_run_with_the_drop_in_and_its_exit_code_is_kept(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "a program.py"
    program.write_text(
        "import sys, safetensors\n"
        "assert safetensors.safe_open.__module__.startswith('hoistway'), safetensors.safe_open\n"
        "with safetensors.safe_open(sys.argv[1], framework='np') as opened:\n"
        "    sys.exit(len(opened.keys()))\n"
    )
    command = [sys.executable, "-m", "hoistway.run", "--", str(program), str(model)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == len(reference(model)), done.stderr


def test_doctor_speaks_of_windows() -> None:
    checks = hoistway.doctor(os.getcwd())
    assert any(check["finding"].startswith("Windows 10.") for check in checks)
    text = repr(checks)
    for word in ("RWF_NOWAIT", "modprobe", "/dev/", "/proc", "ulimit", "Linux"):
        assert word not in text, text


def test_limits_of_memory_are_told() -> None:
    names = [limit.name for limit in hoistway.memory_limits()]
    assert "the machine's free memory" in names
    assert "the system's commit limit" in names
