"""Saving: the files of the reference library, byte by byte, and what goes wrong."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.safetensors.torch as as_reference
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from conftest import StandIn, run, same_bytes
from hoistway.errors import ArgumentError, FormatError, OptionError, StorageError, UnsupportedDtypeError

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every type in a random order, of random shapes."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for index in generator.permutation(2 * len(TORCH_DTYPES)):
        dtype = TORCH_DTYPES[index % len(TORCH_DTYPES)]
        shape = generator.integers(0 if index % 7 == 0 else 1, 9, generator.integers(1, 4)).tolist()
        size = int(np.prod(shape)) * dtype.itemsize
        data = torch.from_numpy(generator.integers(0, 2 if dtype == torch.bool else 256, size, np.uint8))
        # Without elements, torch cannot view bytes as something else.
        tensor = data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        tensors[f"{generator.integers(100)}.é{index}"] = tensor
    tensors["large"] = torch.from_numpy(generator.integers(0, 256, 5 << 20, np.uint8))
    return tensors


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_files_of_torch_are_those_of_the_reference(tmp_path: Path, seed: int, metadata) -> None:
    tensors = random_tensors(seed)
    own, reference = tmp_path / "own.safetensors", tmp_path / "reference.safetensors"
    report = hoistway.save_file(tensors, own, metadata=metadata, sync=seed % 2 == 0)
    safetensors.torch.save_file(tensors, reference, metadata=metadata)
    assert own.read_bytes() == reference.read_bytes()
    assert hoistway.save(tensors, metadata=metadata) == safetensors.torch.save(tensors, metadata=metadata)
    assert report.file_bytes == own.stat().st_size == report.direct_bytes + report.buffered_bytes
    loaded = hoistway.load_file(own)
    assert set(loaded) == set(tensors)
    assert all(same_bytes(loaded[name], tensors[name]) for name in tensors)


def test_files_of_numpy_are_those_of_the_reference(tmp_path: Path) -> None:
    names = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", ">i4", ">f8"]
    narrow = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]
    generator = np.random.default_rng(1)
    tensors = {}
    for dtype in [*map(np.dtype, names), *map(np.dtype, narrow)]:
        data = generator.integers(0, 2, 6 * dtype.itemsize, np.uint8)
        tensors[f"{dtype.str}.{dtype.name}"] = data.view(dtype).reshape(2, 3)
    tensors["scalar"] = np.array(3.0)
    hoistway.save_file(tensors, tmp_path / "own")
    safetensors.numpy.save_file(tensors, tmp_path / "reference")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "reference").read_bytes()
    assert hoistway.save(tensors) == safetensors.numpy.save(tensors)


def test_arrays_of_every_framework_come_back(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    packed = torch.randint(0, 256, (3, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tensors = {
        "jax": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "numpy": np.arange(4, dtype=np.uint16),
        "torch": torch.nn.Parameter(torch.arange(3.0)),
        "packed": packed,
    }
    hoistway.save_file(tensors, path)
    arrays = hoistway.load_file(path, framework="numpy")
    assert arrays["jax"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["packed"].shape == (3, 8)
    # The same again, from hoistway's own tensors and from what numpy has of them.
    again = [hoistway.load_file(path, framework="raw"), arrays]
    for loaded in again:
        assert hoistway.save(loaded) == path.read_bytes()


def test_tensors_on_a_device_are_saved(tmp_path: Path, stand_in: StandIn) -> None:
    tensors = random_tensors(3)
    hoistway.save_file(tensors, tmp_path / "host")
    loaded = hoistway.load_file(tmp_path / "host", device="cuda:0", framework="raw")
    hoistway.save_file(loaded, tmp_path / "device")
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()
    assert hoistway.save(loaded) == (tmp_path / "host").read_bytes()
    del loaded


def test_alignment_moves_the_data_and_nothing_else(tmp_path: Path) -> None:
    tensors = random_tensors(5)
    for alignment in [16, "4KiB"]:
        hoistway.save_file(tensors, tmp_path / "m", alignment=alignment)
        header = int.from_bytes((tmp_path / "m").read_bytes()[:8], "little")
        assert (header + 8) % (16 if alignment == 16 else 4096) == 0
        loaded = safetensors.torch.load_file(tmp_path / "m")
        assert all(same_bytes(loaded[name], tensors[name]) for name in tensors)


def test_shards_and_their_index_load_everywhere(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), i, dtype=torch.int32) for i in range(5)}
    report = hoistway.save_sharded(
        tensors, tmp_path / "model", max_shard_size="8KB", metadata={"format": "pt"}
    )
    assert [Path(path).name for path in report.paths] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    loaded = hoistway.load_file(tmp_path / "model")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert set(safetensors.torch.load_file(report.paths[0])) == {"t0", "t1"}
    report = hoistway.save_sharded(tensors, tmp_path / "model")
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert "5 tensors" in str(report)
    assert report.as_dict()["files"] == 1


def test_a_saved_file_keeps_the_mode_of_the_one_it_replaces(tmp_path: Path) -> None:
    tensors, module = {"a": torch.arange(6)}, torch.nn.Linear(3, 2)
    ways = {
        "one.safetensors": lambda path: hoistway.save_file(tensors, path),
        "model.safetensors": lambda path: hoistway.save_sharded(tensors, path.parent),
        "layer.safetensors": lambda path: as_reference.save_file(tensors, path),
        "module.safetensors": lambda path: as_reference.save_model(module, str(path)),
    }
    mask = os.umask(0o027)
    try:
        for name, save in ways.items():
            path = tmp_path / name.removesuffix(".safetensors") / name
            path.parent.mkdir()
            save(path)
            assert path.stat().st_mode & 0o7777 == 0o640, name
            path.chmod(0o600)
            save(path)
            assert path.stat().st_mode & 0o7777 == 0o600, name
    finally:
        os.umask(mask)


def test_a_file_is_replaced_while_its_tensors_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    hoistway.save_file({"a": torch.ones(1 << 20)}, path)
    mapped = safetensors.torch.load_file(path)
    hoistway.save_file({name: tensor.neg() for name, tensor in mapped.items()}, path)
    assert bool((mapped["a"] == 1).all())
    assert bool((hoistway.load_file(path)["a"] == -1).all())


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (lambda: torch.ones(4, 4).T, OptionError, "contiguous()"),
        (lambda: np.ones((4, 4)).T, OptionError, "ascontiguousarray"),
        (lambda: torch.ones(4, 4).to_sparse(), OptionError, "to_dense()"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), OptionError, "resolve_conj()"),
        (lambda: torch.ones(3, device="meta"), OptionError, "device meta"),
        (lambda: torch.ones(3, dtype=torch.complex128), UnsupportedDtypeError, "complex128"),
        (lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), OptionError, "scalar"),
        (lambda: np.array(["text"]), UnsupportedDtypeError, "no type str"),
        (lambda: np.zeros(3, ml_dtypes.float4_e2m1fn), OptionError, "whole bytes"),
        (lambda: [1.0, 2.0], OptionError, "list is not a tensor"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, tensor, error, said: str
) -> None:
    with pytest.raises(error, match="tensor 'bad' cannot be saved") as caught:
        hoistway.save_file({"good": torch.ones(2), "bad": tensor()}, tmp_path / "m")
    assert said in str(caught.value)
    assert caught.value.tensor == "bad"
    assert os.listdir(tmp_path) == []


def test_arguments_in_the_wrong_order_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"tensors cannot be 'm[.]safetensors'.*dictionary of tensors"):
        hoistway.save_file("m.safetensors", {"a": torch.ones(2)})
    with pytest.raises(ArgumentError, match="tensors cannot be"):
        hoistway.save("m.safetensors")


def cut(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor whose storage has fewer bytes than it needs."""
    tensor.untyped_storage().resize_(size)
    return tensor


def resized_below_its_view() -> np.ndarray:
    array = np.zeros(1000)
    view = array[10:]
    array.resize(20, refcheck=False)
    return view


def cleared() -> Any:
    paddle = pytest.importorskip("paddle")
    tensor = paddle.zeros([10])
    tensor._clear_data()
    return tensor


def deleted() -> Any:
    array = jnp.zeros(10)
    array.delete()
    return array


GONE = {
    "cut": lambda: cut(torch.zeros(1000), 400),
    "freed": lambda: cut(torch.zeros(1000), 0),
    "offset": lambda: cut(torch.zeros(1000)[500:], 3999),
    "two_dimensions": lambda: cut(torch.zeros(100, 10), 3999),
    "parameter": lambda: cut(torch.nn.Parameter(torch.zeros(1000)), 400),
    "one_byte": lambda: cut(torch.zeros(1000, dtype=torch.uint8), 999),
    "resized": resized_below_its_view,
    "part_of_resized": lambda: resized_below_its_view().reshape(10, 99)[5],
    "strided_past_the_end": lambda: np.lib.stride_tricks.as_strided(np.zeros(10), (1000,)),
    "past_the_end_of_bytes": lambda: np.lib.stride_tricks.as_strided(np.frombuffer(b"0123", "u1"), (1000,)),
    "cleared": cleared,
    "deleted": deleted,
}
"""Tensors whose memory is not there."""


@pytest.mark.parametrize("kind", GONE)
def test_memory_that_is_gone_is_not_saved(tmp_path: Path, kind: str) -> None:
    gone = GONE[kind]()
    tensors = {"good": torch.ones(2), "gone": gone}
    for save in (hoistway.save, lambda tensors: hoistway.save_file(tensors, tmp_path / "m")):
        with pytest.raises(OptionError, match="tensor 'gone' cannot be saved") as caught:
            save(tensors)
        assert caught.value.tensor == "gone"
    with pytest.raises(OptionError, match="tensor 'gone' cannot be saved"):
        hoistway.save_sharded(tensors, tmp_path)
    assert os.listdir(tmp_path) == []


def test_views_of_memory_that_is_there_are_saved() -> None:
    """What is a view of a part, or of what another library owns, is no view of what is gone."""
    tensor = torch.arange(1000.0)
    grown = torch.arange(4.0)
    grown.untyped_storage().resize_(4000)
    array = np.arange(1000.0)
    tensors = {
        "rows": tensor.view(10, 100)[3:7],
        "last": tensor[999:],
        "none": cut(torch.zeros(10), 0)[:0],
        "grown": grown,
        "array": array[3:],
        "of_array": torch.from_numpy(array[5:]),
        "of_torch": tensor.numpy()[7:],
        "of_jax": np.asarray(jnp.arange(7.0)),
        "of_bytes": np.frombuffer(bytearray(b"01234567"), np.uint32)[1:],
        "of_view": np.asarray(memoryview(array)[2:]),
        "of_map": np.frombuffer(mmap.mmap(-1, 4096), np.uint16)[9:],
        "strided": np.lib.stride_tricks.as_strided(array, (10, 10), (80, 8)),
        "swapped": array[::-1][::-1][:3],
        "record": np.zeros(3, [("a", "f4"), ("b", "f4")]).view("f4"),
    }
    assert len(safetensors.torch.load(hoistway.save(tensors))) == len(tensors)


def test_errors_are_those_that_python_expects(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3)}
    with pytest.raises(FormatError, match="keeps that name") as caught:
        hoistway.save_file({"__metadata__": np.ones(3)}, tmp_path / "m")
    assert caught.value.tensor == "__metadata__"
    with pytest.raises(OptionError, match="alignment cannot be '7'"):
        hoistway.save_file(tensors, tmp_path / "m", alignment=7)
    with pytest.raises(OptionError, match="filename"):
        hoistway.save_sharded(tensors, tmp_path, filename="model.bin")
    with pytest.raises(OptionError, match="max_shard_size"):
        hoistway.save_sharded(tensors, tmp_path, max_shard_size="big")
    with pytest.raises(TypeError):
        hoistway.save_file(tensors, tmp_path / "m", metadata={"a": 1})
    with pytest.raises(StorageError) as storage:
        hoistway.save_file(tensors, tmp_path / "missing" / "m")
    assert isinstance(storage.value, OSError)
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_no_text_is_called_that(tmp_path: Path) -> None:
    for save in (hoistway.save_file, lambda tensors, path: hoistway.save_sharded(tensors, path.parent)):
        with pytest.raises(OptionError, match="half of a surrogate pair") as caught:
            save({"\ud800": np.ones(3)}, tmp_path / "m")
        assert caught.value.tensor == "\ud800"
    assert os.listdir(tmp_path) == []


def test_saving_needs_no_framework_and_imports_none(tmp_path: Path) -> None:
    hoistway.save_file({"a": np.arange(3)}, tmp_path / "from")
    done = run(
        """
        import sys, hoistway
        loaded = hoistway.load_file(sys.argv[1], framework="raw")
        print(hoistway.save_file(loaded, sys.argv[2]))
        assert not {"torch", "numpy", "jax", "ml_dtypes"} & set(sys.modules)
        """,
        tmp_path / "from",
        tmp_path / "to",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to").read_bytes() == (tmp_path / "from").read_bytes()


def test_a_save_that_fails_takes_back_the_index_that_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hoistway.save_file({"a": np.ones(9)}, folder / "model.safetensors")
    script = """
        import resource, sys
        import numpy as np
        import hoistway
        tensors = {f"t{i:02}" + "x" * 100: np.ones(9) for i in range(50)}
        # No shard is as long as the index of all of them.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            hoistway.save_sharded(tensors, sys.argv[1], max_shard_size="500B")
        except hoistway.errors.StorageError as error:
            print(error)
    """
    done = run(script, folder)
    assert "model.safetensors.index.json" in done.stdout, (done.stdout, done.stderr)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert sorted(hoistway.load_file(folder, framework="numpy")) == ["a"]


QUOTA = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int close(int descriptor) {
    int (*closed)(int) = dlsym(RTLD_NEXT, "close");
    char link[64], path[4096] = "";
    struct stat found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int is_written = !fstat(descriptor, &found) && S_ISREG(found.st_mode) &&
                     (fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY &&
                     readlink(link, path, sizeof path - 1) > 0 && strstr(path, getenv("WITH_QUOTA"));
    int outcome = closed(descriptor);
    const char *below = getenv("BELOW");
    // The file that is being closed, without what it was before it had its length.
    if (is_written && (!below || (found.st_size && found.st_size < atoi(below)))) {
        errno = EDQUOT;
        return -1;
    }
    return outcome;
}
"""


@pytest.mark.parametrize("sync", [True, False])
def test_what_a_file_system_says_at_close_fails_the_save(tmp_path: Path, sync: bool) -> None:
    (tmp_path / "quota.c").write_text(QUOTA)
    library = tmp_path / "quota.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "quota.c", "-ldl"], check=True)
    folder = tmp_path / "with quota"
    folder.mkdir()
    hoistway.save_file({"a": np.zeros(9)}, folder / "model.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    script = """
        import sys
        import numpy as np
        import hoistway
        folder, sync = sys.argv[1], sys.argv[2] == "True"
        tensors = {"a": np.ones(5000), "b": np.ones(5000)}
        for save in (
            lambda: hoistway.save_file(tensors, f"{folder}/model.safetensors", sync=sync),
            lambda: hoistway.save_sharded(tensors, folder, sync=sync),
            lambda: hoistway.save_sharded(tensors, folder, max_shard_size="50KB", sync=sync),
        ):
            try:
                save()
            except hoistway.errors.StorageError as error:
                print(error)
    """
    done = run(script, folder, sync, LD_PRELOAD=str(library), WITH_QUOTA=folder.name)
    assert done.stdout.count("close failed on") == 3, (done.stdout, done.stderr)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
def test_an_index_that_a_quota_has_no_room_for_leaves_all_as_it_was(
    tmp_path: Path, sync: bool, has_index: bool
) -> None:
    (tmp_path / "quota.c").write_text(QUOTA)
    library = tmp_path / "quota.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "quota.c", "-ldl"], check=True)
    folder = tmp_path / "with quota"
    folder.mkdir()
    tensors = {"a": np.zeros(9000), "b": np.zeros(9000)}
    if has_index:
        hoistway.save_sharded(tensors, folder, max_shard_size="80KB")
    else:
        hoistway.save_file(tensors, folder / "model.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    script = """
        import sys
        import numpy as np
        import hoistway
        folder, sync = sys.argv[1], sys.argv[2] == "True"
        tensors = {"a": np.ones(5000), "b": np.ones(5000)}
        for size in ("50KB", "1GB"):
            try:
                hoistway.save_sharded(tensors, folder, max_shard_size=size, sync=sync)
            except hoistway.errors.StorageError as error:
                print(error)
    """
    done = run(script, folder, sync, LD_PRELOAD=str(library), WITH_QUOTA=folder.name, BELOW="4000")
    assert f"close failed on {folder}/model.safetensors.index.json" in done.stdout, done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_ctrl_c_ends_a_save_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    hoistway.save_file({"a": np.arange(3)}, path)
    old = path.read_bytes()
    script = """
        import os, signal, sys, numpy, hoistway
        # A shell that runs the tests in the background makes them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Always the same memory: a save of many gigabytes that needs little.
        part = numpy.zeros(64 << 20, numpy.uint8)
        tensors = {f"t{i}": part for i in range(64)}
        print("started", flush=True)
        try:
            hoistway.save_file(tensors, sys.argv[1], threads=1)
        except KeyboardInterrupt:
            print("interrupted")
        """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "started\n"
    # The file that it writes shows that it is under way.
    deadline = time.monotonic() + 30
    while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert output == "interrupted\n", errors
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == old


def test_tensors_that_get_other_memory_during_a_save_are_saved_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {f"p{i}": torch.nn.Parameter(torch.full((16_000,), 1.0)) for i in range(100)}
    write = hoistway._native.save_file

    def change_and_write(*arguments: Any, **options: Any) -> Any:
        # The tensors have been described.
        for parameter in parameters.values():
            parameter.data = torch.full((16_000,), 2.0)
        return write(*arguments, **options)

    monkeypatch.setattr(hoistway._native, "save_file", change_and_write)
    path = tmp_path / "m.safetensors"
    hoistway.save_file(parameters, path)
    assert all(bool((parameter == 2).all()) for parameter in parameters.values())
    loaded = hoistway.load_file(path)
    assert all(bool((tensor == 1).all()) for tensor in loaded.values())


def test_other_threads_run_during_a_save(tmp_path: Path) -> None:
    # The save waits for the lock of its folder, which another thread gives back once it sees what the save wrote.
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)

    is_over = threading.Event()

    def unlock() -> None:
        while not is_over.is_set() and not list(tmp_path.glob(".model*")):
            time.sleep(0.001)
        fcntl.flock(folder, fcntl.LOCK_UN)

    thread = threading.Thread(target=unlock, daemon=True)
    thread.start()
    try:
        report = hoistway.save_sharded({"a": np.arange(1000)}, tmp_path)
    finally:
        is_over.set()
        thread.join()
        os.close(folder)
    assert Path(report.paths[0]).name == "model.safetensors"
