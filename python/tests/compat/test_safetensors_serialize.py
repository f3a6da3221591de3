"""Tensors by address: `TensorSpec`, `serialize`, `serialize_file` and `deserialize` beside the reference library."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hoistway.compat.safetensors as drop_in
import hoistway.compat.safetensors.numpy as drop_in_numpy
import numpy as np
import pytest
import safetensors as reference
from safetensors import SafetensorError
from test_safetensors_differential import compare, compares_interfaces, outcome

pytestmark = compares_interfaces
LIBRARIES = (drop_in, reference)
MEMORY = np.arange(240, dtype=np.uint8)
ADDRESS = MEMORY.ctypes.data
DTYPES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
GOOD = {"dtype": "float32", "shape": [2, 3], "data_ptr": ADDRESS, "data_len": 24}


def described(spec: Any) -> tuple[Any, ...]:
    return spec.dtype, spec.shape, spec.data_ptr, spec.data_len, repr(spec)


def compare_both(what: str, call: Callable[[Any], Any]) -> None:
    compare(what, *(outcome(call, library) for library in LIBRARIES))


@pytest.mark.parametrize(
    "changed",
    [{"dtype": name} for name in [*DTYPES, "complex128", "F32", "float4_e2m1fn", "float6_e2m3fn", "", 1, None]]
    + [{"shape": shape} for shape in ([], (2, 3), [0], np.array([2, 3]), [True], [-1], [1 << 64], ["a"], "ab", 3)]
    + [{"data_ptr": address} for address in (0, -1, 1 << 64, "a", 1.0, None)]
    + [{"data_len": length} for length in (0, -1, 1 << 64, "a", 1.0)]
    + [{"dtype": "float4_e2m1fn_x2", "shape": shape} for shape in ([], [3], [2, 3], [1 << 63])]
    + [{"more": 1}],
    ids=str,
)  # fmt: skip
def test_descriptions(changed: dict[str, Any]) -> None:
    compare_both(
        f"TensorSpec with {changed}", lambda library: described(library.TensorSpec(**{**GOOD, **changed}))
    )


def test_descriptions_are_given_by_name_and_do_not_change() -> None:
    for library in LIBRARIES:
        with pytest.raises(TypeError):
            library.TensorSpec("float32", [1], ADDRESS, 4)
        for name in [*GOOD, "other"]:
            with pytest.raises(AttributeError):
                setattr(library.TensorSpec(**GOOD), name, 1)


def test_signatures_are_theirs() -> None:
    for name in ("serialize", "serialize_file", "deserialize"):
        mine, theirs = (
            [
                (each.name, each.default)
                for each in inspect.signature(getattr(library, name)).parameters.values()
            ]
            for library in LIBRARIES
        )
        assert mine == theirs
    assert drop_in.__version__ == reference.__version__


def random_specs(generator: random.Random) -> dict[str, dict[str, Any]]:
    specs = {}
    for number in range(generator.randrange(6)):
        dtype = generator.choice(list(DTYPES))
        shape = [generator.randrange(4) for _ in range(generator.randrange(1, 4))]
        length = int(np.prod(shape)) * DTYPES[dtype]
        # Seldom a length that is not what type and shape make.
        length = generator.choice([length] * 20 + [length + 1, 0])
        if length > 200:
            continue
        offset = generator.randrange(40)
        specs[f"t{number}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_ptr": ADDRESS + offset,
            "data_len": length,
        }
    return specs


def specs_of(library: Any, specs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: library.TensorSpec(**spec) for name, spec in specs.items()}


def contents(library: Any, data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What a file holds. The reference library gives it in any order."""
    found = library.deserialize(data)
    assert all(type(tensor["data"]) is bytearray for _, tensor in found)
    return sorted(found, key=lambda item: item[0])


def test_random_descriptions_make_the_same_files(tmp_path: Path) -> None:
    generator = random.Random(31)
    for round_number in range(300):
        specs = random_specs(generator)
        metadata = generator.choice([None, {"format": "pt"}])
        compare_both(f"serialize of {specs}", lambda m: m.serialize(specs_of(m, specs), metadata))  # noqa: B023
        expected = outcome(lambda: reference.serialize(specs_of(reference, specs), metadata))  # noqa: B023
        if expected.error is not None:
            continue
        compare_both("deserialize", lambda m: contents(m, expected.value))  # noqa: B023
        if round_number % 20 == 0:
            assert drop_in.serialize_file(specs_of(drop_in, specs), tmp_path / "m", metadata) is None
            assert (tmp_path / "m").read_bytes() == expected.value


@pytest.mark.parametrize(
    "tensors",
    [{}, {"a": GOOD}, {1: GOOD}, {"a": {"dtype": "float32", "shape": [1], "data": b"1234"}}, {"a": None}, None,
     [("a", GOOD)], {"a": {**GOOD, "shape": [1 << 40, 1 << 40]}}, {"a": {**GOOD, "data_len": 23}},
     {"a": {**GOOD, "dtype": "float4_e2m1fn_x2", "shape": [], "data_len": 1}},
     {"a": {**GOOD, "shape": [0], "data_ptr": 0, "data_len": 0}}],
)  # fmt: skip
def test_what_can_be_serialized(tensors: Any) -> None:
    def serialized(library: Any) -> bytes:
        if not isinstance(tensors, dict):
            return library.serialize(tensors)
        made = {
            name: library.TensorSpec(**spec) if isinstance(spec, dict) and "data_ptr" in spec else spec
            for name, spec in tensors.items()
        }
        return library.serialize(made)

    compare_both(f"serialize of {tensors}", serialized)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, [1], "a"])
def test_metadata_is_text(metadata: Any) -> None:
    compare_both(f"metadata {metadata}", lambda m: m.serialize({"a": m.TensorSpec(**GOOD)}, metadata))


@pytest.mark.parametrize("path", ["none/m", "", b"m", 1], ids=str)
def test_where_a_file_cannot_be(tmp_path: Path, path: Any) -> None:
    at = str(tmp_path / path) if isinstance(path, str) else path
    compare_both(f"serialize_file to {at!r}", lambda m: m.serialize_file({"a": m.TensorSpec(**GOOD)}, at))


def test_bytes_that_are_no_file() -> None:
    data = reference.serialize({"a": reference.TensorSpec(**GOOD)})
    for wrong in (b"", data[:-1], data + b"x", bytearray(data), memoryview(data), 1):
        compare_both(f"deserialize of {wrong!r}", lambda m: m.deserialize(wrong))  # noqa: B023


@pytest.mark.parametrize("spec", [{"data_ptr": 0}, {"data_ptr": (1 << 64) - 8}])
def test_addresses_without_memory_are_refused(spec: dict[str, int]) -> None:
    # The reference library reads there, and crashes.
    with pytest.raises(SafetensorError, match="'a' has 24 bytes at address"):
        drop_in.serialize({"a": drop_in.TensorSpec(**{**GOOD, **spec})})


def test_urls_are_refused_with_what_saves_to_them() -> None:
    array = np.zeros(3, np.float32)
    url = "s3://models/a.safetensors"
    with pytest.raises(SafetensorError, match=r"hoistway\.save_file"):
        drop_in.serialize_file({"a": {"dtype": "float32", "shape": [3], "data": array.tobytes()}}, url)
    with pytest.raises(SafetensorError, match=r"hoistway\.save_file"):
        drop_in_numpy.save_file({"a": array}, url)
