"""`install` puts the drop-in in the place of safetensors, everywhere, and `uninstall` puts everything back."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hoistway.compat.safetensors as drop_in
import hoistway.compat.safetensors.torch
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from conftest import run, write_model
from hoistway.errors import OptionError

ORIGINALS = {
    (module.__name__, name): value
    for module in (safetensors, safetensors.torch)
    for name, value in vars(module).items()
    if callable(value)
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every name of safetensors has its own object again after each test."""
    yield
    drop_in.uninstall()
    for (module, name), value in ORIGINALS.items():
        assert getattr(sys.modules[module], name) is value


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a program that was loaded before, under names of its own."""
    module = ModuleType("comfy.utils")
    module.opener = safetensors.safe_open
    module.read = safetensors.torch.load_file
    module.other = len
    monkeypatch.setitem(sys.modules, "comfy.utils", module)
    return module


def is_replaced(function: object) -> bool:
    return function is not None and function not in ORIGINALS.values()


def test_functions_are_pickled_by_reference(model: Path) -> None:
    names = [
        (module, name)
        for module in (safetensors.torch, safetensors.numpy)
        for name in ("load_file", "load", "save_file", "save", "load_model", "save_model")
        if hasattr(module, name)
    ]
    assert len(names) == 10
    with drop_in.install():
        for module, name in names:
            function = getattr(module, name)
            assert is_replaced(function)
            assert pickle.loads(pickle.dumps(function)) is function
        pickled = pickle.dumps(safetensors.torch.load_file)
    # As in a process without it, where the name has the function of safetensors.
    assert pickle.loads(pickled) is safetensors.torch.load_file


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_of_processes_take_functions(tmp_path: Path, method: str) -> None:
    # Processes that are started anew load by safetensors itself, whose numpy has no bfloat16.
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [3])})
    done = run(
        """
        import multiprocessing, sys
        from concurrent.futures import ProcessPoolExecutor
        import hoistway.compat.safetensors, safetensors.numpy
        hoistway.compat.safetensors.install()
        context = multiprocessing.get_context(sys.argv[1])
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            loaded, = pool.map(safetensors.numpy.load_file, sys.argv[2:])
        print(list(loaded))
        """,
        method,
        path,
    )
    assert done.stdout == "['a']\n", done.stderr


def test_names_are_replaced_where_they_were_bound_and_where_they_come_from(
    model: Path, host: ModuleType
) -> None:
    with drop_in.install():
        assert host.opener is safetensors.safe_open
        assert issubclass(host.opener, drop_in.safe_open)
        assert is_replaced(host.read)
        assert host.other is len
        with safetensors.safe_open(model, "pt") as file:
            assert isinstance(file, safetensors.safe_open)
            assert isinstance(file, drop_in.safe_open)
        assert host.read(model).report.tensors == 8
        assert drop_in.reports()[-1].path == str(model)
    assert host.opener is ORIGINALS["safetensors", "safe_open"]
    assert host.read is ORIGINALS["safetensors.torch", "load_file"]


def test_what_was_bound_after_the_installation_is_put_back_too(host: ModuleType) -> None:
    drop_in.install()
    host.late = safetensors.torch.load_file
    drop_in.uninstall()
    assert host.late is ORIGINALS["safetensors.torch", "load_file"]


def test_modules_of_other_packages_keep_theirs_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    module.opener = safetensors.safe_open
    monkeypatch.setitem(sys.modules, "mine", module)
    with drop_in.install():
        assert module.opener is ORIGINALS["safetensors", "safe_open"]
        with drop_in.install(packages=("mine",)):
            assert module.opener is safetensors.safe_open
    assert module.opener is ORIGINALS["safetensors", "safe_open"]


def test_what_was_imported_after_the_installation_is_put_back_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("mine.late")
    monkeypatch.setitem(sys.modules, "mine.late", module)
    with drop_in.install():
        module.opener, module.read = safetensors.safe_open, safetensors.torch.load_file
        assert is_replaced(module.read)
    assert module.opener is ORIGINALS["safetensors", "safe_open"]
    assert module.read is ORIGINALS["safetensors.torch", "load_file"]


def test_the_end_of_an_inner_block_brings_the_options_of_the_outer_back(model: Path) -> None:
    def route() -> str:
        return safetensors.torch.load_file(model).report.route

    with drop_in.install(route="mapped"):
        with drop_in.install(route="threads"):
            assert route() == "threads"
        assert route() == "mapped"


@pytest.mark.parametrize("packages", [(), ("mine",), "mine"])
def test_safetensors_itself_is_replaced_whatever_is_named(
    packages: str | tuple[str, ...], model: Path
) -> None:
    with drop_in.install(packages=packages):
        assert issubclass(safetensors.safe_open, drop_in.safe_open)
        assert safetensors.torch.load_file(model).report.tensors == 8


def test_again_is_once() -> None:
    first = drop_in.install()
    replaced = safetensors.safe_open
    with drop_in.install():
        assert safetensors.safe_open is replaced
    assert safetensors.safe_open is replaced, "an installation inside another undid it"
    with first:
        pass
    assert safetensors.safe_open is ORIGINALS["safetensors", "safe_open"]
    drop_in.uninstall()


def test_many_threads_install_and_uninstall(model: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                with drop_in.install():
                    assert safetensors.torch.load_file(model)["ids"].shape == (3, 5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_options_are_those_of_all_loads(model: Path) -> None:
    with drop_in.install(route="threads", direct="never"):
        report = safetensors.torch.load_file(model).report
        assert [(carrier.route, carrier.access) for carrier in report.carriers] == [("threads", "buffered")]
        drop_in.install(route="mapped")
        assert safetensors.torch.load_file(model).report.route == "mapped"
    assert hoistway.compat.safetensors.torch.load_file(model).report.route == "auto"
    with pytest.raises(OptionError, match="rote"):
        drop_in.install(rote="threads")
    with pytest.raises(OptionError, match="route"):
        drop_in.install(route="fast")
    assert safetensors.safe_open is ORIGINALS["safetensors", "safe_open"]


def test_what_hoistway_does_not_know_goes_to_safetensors_and_is_listed(model: Path) -> None:
    with drop_in.install() as installation:
        file = safetensors.safe_open(model, "tf")
        assert type(file) is ORIGINALS["safetensors", "safe_open"]
        assert "embed" in file.keys()  # noqa: SIM118  (a list, and no mapping)
        with pytest.raises(RuntimeError, match="mps"):
            safetensors.torch.load_file(model, device="mps")
        calls = installation.passed_on[-3:]
        assert [call.function for call in calls] == ["safe_open", "torch.load_file", "safe_open"]
        assert "'tf'" in calls[0].reason
        assert "'mps'" in calls[1].reason
    with pytest.raises(drop_in.NotCarriedError, match="'mps'"):
        drop_in.safe_open(model, "pt", "mps")


def test_a_file_that_is_wrong_does_not_go_to_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with drop_in.install() as installation:
        before = installation.passed_on
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(path)
        assert installation.passed_on == before


def test_saving_is_hoistway_too(tmp_path: Path) -> None:
    with drop_in.install():
        assert is_replaced(safetensors.torch.save_file)
        safetensors.torch.save_file({"a": torch.arange(3)}, tmp_path / "m")
        assert safetensors.torch.load(safetensors.torch.save({"a": torch.arange(3)}))["a"].tolist() == [
            0,
            1,
            2,
        ]
    assert safetensors.torch.load_file(tmp_path / "m")["a"].tolist() == [0, 1, 2]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_mapped_files_are_loaded_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {f"t{number}": torch.full((1024, 4096), float(number)) for number in range(4)}
    safetensors.torch.save_file(tensors, path)
    grown = {}
    for route in ("mapped", "auto"):
        with drop_in.install(route=route), safetensors.safe_open(path, "pt") as file:
            before = anonymous_bytes()
            loaded = {name: file.get_slice(name)[...] for name in file.keys()}  # noqa: SIM118
            for name, tensor in loaded.items():
                assert torch.equal(tensor, tensors[name])
            grown[route] = anonymous_bytes() - before
            del loaded, tensor
    report = drop_in.reports()[-2].report
    assert (report.route, report.read_bytes) == ("mapped", 0)
    assert grown["mapped"] < 16 << 20 < 48 << 20 < grown["auto"]
