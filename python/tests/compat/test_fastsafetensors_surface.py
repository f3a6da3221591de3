"""The drop-in for fastsafetensors 0.5 has every name and every parameter."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
from pathlib import Path
from typing import Any

import hoistway.compat.fastsafetensors as ours
import pytest
from conftest import run, write_model

theirs = pytest.importorskip("fastsafetensors")

# What is not here, and why.
ABSENT = {
    "live_allocation_bytes": "memory belongs to tensors, not to a register of allocations",
    "live_allocation_count": "memory belongs to tensors, not to a register of allocations",
    "SafeTensorsMetadata.get_tensors": "takes buffers of their C++ library",
}


def public(library: Any) -> dict[str, Any]:
    names = [name for name in dir(library) if not name.startswith("_")]
    return {
        name: getattr(library, name)
        for name in names
        if not inspect.ismodule(getattr(library, name)) and getattr(library, name) is not theirs.version
        if name != "version"
    }


def methods(kind: type) -> list[str]:
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_") and callable(getattr(kind, name))
    ]


def parameters(function: Any) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in inspect.signature(function).parameters.values() if each.kind not in kinds]


def functions() -> list[tuple[str, Any, Any]]:
    """Everything that can be called, theirs and ours, by dotted name."""
    found = []
    for name, value in public(theirs).items():
        if name in ABSENT or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        own = getattr(ours, name)
        found.append((name, value, own))
        for method in methods(value) if inspect.isclass(value) else []:
            if f"{name}.{method}" not in ABSENT:
                found.append((f"{name}.{method}", getattr(value, method), getattr(own, method)))
    return found


def test_every_name_is_there() -> None:
    missing = sorted(name for name in public(theirs) if not hasattr(ours, name) and name not in ABSENT)
    assert not missing
    assert set(ours.__all__) == {name for name in public(ours) if name != "annotations"}


@pytest.mark.parametrize(
    ("name", "their", "own"), functions(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_parameter_is_there_with_its_default(name: str, their: Any, own: Any) -> None:
    expected, got = parameters(their), {each.name: each for each in parameters(own)}
    assert {each.name for each in expected} <= set(got), name
    positional = [each.name for each in expected if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(got)[: len(positional)] == positional, "the order of what is given by position"
    for each in expected:
        default, own_default = each.default, got[each.name].default
        if default is inspect.Parameter.empty:
            continue
        assert getattr(own_default, "value", own_default) == getattr(default, "value", default), each.name


def test_modules_that_cannot_be_changed_find_it_under_the_other_name() -> None:
    done = run(
        """
        import sys
        import hoistway.compat.fastsafetensors
        sys.modules["fastsafetensors"] = hoistway.compat.fastsafetensors
        from fastsafetensors import ParallelLoader, SingleGroup, __version__
        assert ParallelLoader.__module__.startswith("hoistway.")
        assert __version__.startswith("0.5")
        """
    )
    assert done.returncode == 0, done.stderr


def test_exceptions_are_caught_as_theirs_are() -> None:
    assert issubclass(ours.BudgetInfeasibleError, theirs.BudgetInfeasibleError.__bases__)


def test_frameworks_are_imported_when_they_are_needed() -> None:
    package = Path(ours.__file__).parent
    modules = sorted(package.glob("*.py"))
    assert modules
    for module in modules:
        for statement in ast.parse(module.read_text()).body:
            names = [alias.name for alias in getattr(statement, "names", [])]
            if isinstance(statement, ast.ImportFrom):
                names = [statement.module or ""]
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                assert not {name.partition(".")[0] for name in names} & {"torch", "numpy", "tqdm"}, (
                    module.name
                )


def test_importing_imports_no_framework() -> None:
    done = run(
        """
        import sys
        import hoistway.compat.fastsafetensors
        assert not {"torch", "numpy", "tqdm", "fastsafetensors"} & set(sys.modules)
        """
    )
    assert done.returncode == 0, done.stderr


MODULES = [
    "auto_loader", "common", "config", "copier", "copier.base", "copier.registry", "cpp", "ep_slice", "file_buffer",
    "frameworks", "loader", "parallel_loader", "saver", "st_types",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_names_of_theirs_alone(name: str) -> None:
    module, their = (importlib.import_module(f"{package.__name__}.{name}") for package in (ours, theirs))
    assert module.__all__
    assert all(hasattr(module, each) and hasattr(their, each) for each in module.__all__)


@pytest.mark.parametrize("name", ["cpp", "frameworks", "copier"])
def test_names_without_sense_say_what_to_use(name: str) -> None:
    module, their = (importlib.import_module(f"{package.__name__}.{name}") for package in (ours, theirs))
    absent = [
        each
        for each, value in vars(their).items()
        if not each.startswith("_") and each not in module.__all__ and not inspect.ismodule(value)
        if getattr(value, "__module__", "fastsafetensors").startswith("fastsafetensors")
    ]
    refused = 0
    for each in absent:
        # What they have imported of other modules of theirs is no name of this one.
        kinds = (ImportError, AttributeError) if name == "frameworks" else ImportError
        with pytest.raises(kinds) as caught:
            getattr(module, each)
        refused += f"no fastsafetensors.{name}.{each}: " in str(caught.value)
    assert refused >= (1 if name == "frameworks" else len(absent))
    assert not hasattr(module, "never_there")
    with pytest.raises(ImportError, match="__dlpack__"):
        importlib.import_module(f"{ours.__name__}.dlpack")


def test_modules_are_found_under_the_other_name() -> None:
    done = run(
        """
        import sys
        import hoistway.compat.fastsafetensors
        sys.modules["fastsafetensors"] = hoistway.compat.fastsafetensors
        from fastsafetensors.copier.base import CopierInterface, DummyDeviceBuffer
        from fastsafetensors.copier.registry import register_copier_constructor
        from fastsafetensors.cpp import gds_device_buffer, read_buffer
        from fastsafetensors.frameworks import TensorBase, get_framework_op
        from fastsafetensors.st_types import Device, DType
        from fastsafetensors.saver import WriteEntry
        assert isinstance(DummyDeviceBuffer(), DummyDeviceBuffer.__mro__[1])
        assert DType is hoistway.compat.fastsafetensors.DType
        try:
            from fastsafetensors.cpp import nogds_file_reader
        except ImportError as error:
            assert "SafeTensorsFileLoader" in str(error)
        else:
            raise AssertionError
        """
    )
    assert done.returncode == 0, done.stderr


def test_modules_are_there_after_the_import_of_the_package() -> None:
    modules = [name for name, value in vars(theirs).items() if inspect.ismodule(value)]
    expected = sorted({*modules} & {*MODULES})
    assert {"cpp", "frameworks", "saver"} <= {*expected}
    done = run(
        """
        import sys
        import hoistway.compat.fastsafetensors as ours
        for name in sys.argv[1:]:
            assert getattr(ours, name).__name__ == f"{ours.__name__}.{name}"
        assert not hasattr(ours, "never_there")
        """,
        *expected,
    )
    assert done.returncode == 0, done.stderr


def test_buffers_of_cpp_are_what_they_say() -> None:
    cpp = importlib.import_module("hoistway.compat.fastsafetensors.cpp")
    memory = ctypes.create_string_buffer(b"some bytes")
    buffer = cpp.gds_device_buffer(ctypes.addressof(memory), 10, False)
    assert cpp.read_buffer(buffer.get_base_address(), buffer.get_length()) == b"some bytes"


@pytest.mark.parametrize("name", ["file_handle", "file_reader", "stream_reader"])
def test_readers_by_directstorage_name_the_copier(name: str) -> None:
    cpp = importlib.import_module("hoistway.compat.fastsafetensors.cpp")
    with pytest.raises(ImportError, match=rf"cpp\.dstorage_{name}: .*copier_type='dstorage'"):
        getattr(cpp, f"dstorage_{name}")


def test_names_of_the_readme_are_there(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [3])})
    loader = ours.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: [str(path)]})
    assert loader.copy_file_to_device().get_tensor("a").shape == (3,)
    path.write_bytes(path.read_bytes() + b"more")
    with ours.fastsafe_open(str(path), lenient=True) as file:
        assert file.get_keys() == file.keys() == ["a"]
    with pytest.raises(ValueError, match="lenient"):
        ours.fastsafe_open(str(path))


@pytest.mark.parametrize("name", ["dstorage", "fgds", "gds", "nogds", "threefs", "unified"])
def test_modules_of_copiers_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=rf"no fastsafetensors\.copier\.{name}: .* copier_type="):
        importlib.import_module(f"hoistway.compat.fastsafetensors.copier.{name}")
