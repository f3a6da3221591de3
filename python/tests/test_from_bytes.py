"""`hoistway.load`: files that are in memory already."""

from __future__ import annotations

import mmap
from pathlib import Path

import hoistway
import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import BITS, gguf_cases, header_cases, same_bytes, write_model
from hoistway.errors import FormatError, OptionError, TruncatedError, UnsupportedDtypeError
from test_differential import reference_tensors

CASES = list(header_cases())


@pytest.mark.parametrize(("file", "error"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bytes_are_refused_for_the_same_reason_as_files(
    tmp_path: Path, file: bytes, error: str | None
) -> None:
    path = tmp_path / "case.safetensors"
    path.write_bytes(file)
    if error is None:
        from_file = hoistway.load_file(path, framework="raw")
        from_bytes = hoistway.load(file, framework="raw")
        assert list(from_bytes) == hoistway.open(path).keys()
        assert all(from_bytes[name].tobytes() == tensor.tobytes() for name, tensor in from_file.items())
        return
    with pytest.raises(FormatError) as by_file:
        hoistway.load_file(path)
    with pytest.raises(FormatError) as by_bytes:
        hoistway.load(file)
    assert type(by_bytes.value) is type(by_file.value)
    assert str(by_bytes.value) == str(by_file.value).replace(str(path), "<bytes>")
    assert (by_bytes.value.tensor, by_bytes.value.offset) == (by_file.value.tensor, by_file.value.offset)


def test_every_type_is_that_of_the_reference(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}-{rows}": (dtype, [rows, 8])
        for dtype in BITS
        if not dtype.startswith("F6")
        for rows in (3, 0, 64)
    }
    path = write_model(tmp_path / "m.safetensors", tensors, padding=3)
    ours = hoistway.load(path.read_bytes())
    reference = reference_tensors(path)
    assert ours.keys() == reference.keys()
    for name, tensor in ours.items():
        assert same_bytes(tensor, reference[name]), name


def test_a_type_that_the_framework_lacks_is_an_error(tmp_path: Path) -> None:
    data = write_model(tmp_path / "m.safetensors", {"six": ("F6_E2M3", [4, 4])}).read_bytes()
    assert hoistway.load(data, framework="raw")["six"].nbytes == 12
    with pytest.raises(UnsupportedDtypeError, match="six"):
        hoistway.load(data, framework="numpy")
    with pytest.raises(OptionError, match="framework"):
        hoistway.load(data, framework="tensorflow")


def test_the_tensors_are_copies(model: Path) -> None:
    data = bytearray(model.read_bytes())
    expected = safetensors.torch.load(bytes(data))
    tensors = hoistway.load(data)
    data[:] = bytes(len(data))
    del data
    assert all(same_bytes(tensors[name], tensor) for name, tensor in expected.items())
    tensors["layers.1.weight"].fill_(1)
    assert same_bytes(tensors["embed"], expected["embed"])


def test_whatever_holds_bytes_is_taken(model: Path) -> None:
    data = model.read_bytes()
    expected = hoistway.load_file(model)
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for form in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8), mapped):
            tensors = hoistway.load(form)
            assert tensors.keys() == expected.keys()
            assert all(same_bytes(tensors[name], tensor) for name, tensor in expected.items())
    for wrong in ("text", 7, None, [1, 2]):
        with pytest.raises(TypeError):
            hoistway.load(wrong)


def test_elements_that_are_misaligned_in_the_file_are_aligned_in_memory(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.safetensors", {"odd": ("U8", [3]), "wide": ("F64", [1 << 16])}, padding=1
    )
    tensors = hoistway.load(path.read_bytes())
    assert tensors["wide"].data_ptr() % 8 == 0
    assert same_bytes(tensors["wide"], hoistway.load_file(path)["wide"])


def test_gguf_files_are_taken_too() -> None:
    case = next(
        case for case in gguf_cases() if case.errors[False] is None and case.tensors and not case.offset
    )
    data = case.files[case.open]
    assert list(hoistway.load(data, framework="raw")) == [tensor[0] for tensor in case.tensors]
    with pytest.raises(FormatError):
        hoistway.load(data[:20])


def test_a_file_that_is_cut_names_the_tensor(model: Path) -> None:
    data = model.read_bytes()
    with pytest.raises(TruncatedError) as caught:
        hoistway.load(data[:-1])
    assert caught.value.tensor == "flags"
    assert caught.value.offset == len(data) - 1


def test_torch_may_write_what_was_loaded(model: Path) -> None:
    tensors = hoistway.load(model.read_bytes())
    tensors["embed"].fill_(2)
    assert torch.equal(tensors["embed"], torch.full((1000, 64), 2.0))
