"""Every tensor and every slice is what the reference library returns, on files of all kinds."""

from __future__ import annotations

import random
from pathlib import Path

import hoistway
import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from conftest import BITS, make_cold, same_bytes, write_model

FILES = 300
TORCH_DTYPES = [dtype for dtype in BITS if not dtype.startswith("F6")]
NUMPY_DTYPES = ["BOOL", "U8", "I8", "U16", "I16", "F16", "U32", "I32", "F32", "U64", "I64", "F64", "C64"]


def random_model(path: Path, seed: int) -> Path:
    """A file of up to 20 tensors of random types, shapes and names."""
    generator = random.Random(seed)
    tensors = {}
    for i in range(generator.randrange(20)):
        dtype = generator.choice(TORCH_DTYPES)
        shape = [generator.choice([0, 1, 2, 3, 5, 8, 16, 33, 64]) for _ in range(generator.randrange(4))]
        if dtype == "F4":
            shape.append(2 * generator.randrange(1, 40))
        name = generator.choice(["layer.{}.weight", "{}", "a b/{}", "ü{}", "x[{}]", "*{}?"]).format(i)
        tensors[name] = (dtype, shape)
    metadata = generator.choice([None, {}, {"format": "pt"}, {"a": "b", "c": "d"}])
    # Some headers are not padded as the writer of the reference library pads them: everything is misaligned then.
    return write_model(path, tensors, padding=generator.choice([0, 0, 8, 1, 3]), metadata=metadata, seed=seed)


def assert_equal(ours: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    assert same_bytes(ours, reference), what


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Hundreds of files."""
    directory = tmp_path_factory.mktemp("corpus")
    return [random_model(directory / f"{seed:03}.safetensors", seed) for seed in range(FILES)]


def reference_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What the reference library reads; it cannot view misaligned tensors, so their bytes are copied first."""
    from safetensors.torch import _getdtype  # noqa: PLC0415

    data = path.read_bytes()
    views = dict(safetensors.deserialize(data))
    tensors = {}
    for name, view in views.items():
        special = {"F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2}
        dtype = special.get(view["dtype"]) or _getdtype(view["dtype"])
        shape = list(view["shape"])
        if view["dtype"] == "F4":
            shape[-1] //= 2
        if view["data"]:
            tensors[name] = (
                torch.frombuffer(bytearray(view["data"]), dtype=torch.uint8).view(dtype).reshape(shape)
            )
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
    return tensors


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"route": "io_uring"},
        {"route": "threads", "direct": "always"},
        {"route": "threads", "direct": "never"},
        {"layout": "packed"},
        {"layout": "tensor", "chunk": "4KiB"},
    ],
    ids=lambda options: "-".join(options.values()) or "default",
)
def test_every_tensor_is_that_of_the_reference(corpus: list[Path], options: dict[str, str]) -> None:
    for path in corpus:
        if "route" in options:
            make_cold(path)
        ours = hoistway.load_file(path, **options)
        reference = reference_tensors(path)
        assert ours.keys() == reference.keys()
        for name, tensor in ours.items():
            assert_equal(tensor, reference[name], f"{path.name}: {name}")


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a torch tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"route": "staged", "chunk": "4KiB"},
        {"route": "threads"},
        {"layout": "packed"},
        {"layout": "tensor"},
    ],
    ids=lambda options: "-".join(options.values()) or "default",
)
def test_every_tensor_on_a_device_is_that_of_the_reference(
    corpus: list[Path], options: dict[str, str]
) -> None:
    for path in corpus:
        ours = hoistway.load_file(path, device="cuda", framework="raw", **options)
        reference = reference_tensors(path)
        assert ours.keys() == reference.keys()
        for name, tensor in ours.items():
            assert tensor.tobytes() == as_bytes(reference[name]), f"{path.name}: {name}"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_conversions_are_those_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    sources = ["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]
    tensors = {source: (source, [70_000]) for source in sources} | {
        "I32": ("I32", [9]),
        "BOOL": ("BOOL", [3]),
    }
    # Every second header puts all elements at odd addresses.
    for padding in (0, 1):
        path = write_model(tmp_path / "m.safetensors", tensors, padding=padding)
        ours = hoistway.load_file(path, "cuda", framework="raw", dtype=dtype, chunk="64KiB")
        for name, reference in reference_tensors(path).items():
            expected = reference.to(dtype) if name in sources else reference
            found = torch.frombuffer(bytearray(ours[name].tobytes()), dtype=expected.dtype)
            nans = expected.isnan() if name in sources else torch.zeros_like(expected, dtype=torch.bool)
            assert (found.isnan() == nans).all() if name in sources else True
            assert same_bytes(found[~nans], expected[~nans]), name


def test_names_metadata_and_shapes_are_those_of_the_reference(corpus: list[Path]) -> None:
    for path in corpus:
        with hoistway.open(path) as ours, safetensors.safe_open(path, "pt") as reference:
            assert sorted(ours.keys()) == reference.keys()
            # Tensors without bytes share their offset with a neighbour: the order among them is free.
            in_order = reference.offset_keys()
            sized = {name for name in in_order if 0 not in reference.get_slice(name).get_shape()}
            ordered = [name for name in ours.keys() if name in sized]  # noqa: SIM118
            assert ordered == [name for name in in_order if name in sized]
            assert ours.metadata() == reference.metadata()
            for name in ours.keys():  # noqa: SIM118
                part = reference.get_slice(name)
                assert ours.get_shape(name) == part.get_shape()
                assert ours.get_dtype(name) == part.get_dtype()


def random_index(generator: random.Random, shape: list[int], dtype: str):
    """An index that the reference library takes too, and that cuts packed types at bytes."""
    items = []
    for size in shape[: generator.randrange(len(shape) + 1)]:
        kind = generator.randrange(4)
        if kind == 0 and size > 0 and dtype != "F4":
            items.append(generator.randrange(size))
        elif kind == 1:
            items.append(slice(None))
        else:
            step = 2 if dtype == "F4" else 1
            start = generator.randrange(0, size + 1, step)
            items.append(slice(start, generator.randrange(start, size + 1, step)))
    return tuple(items)


def test_every_slice_is_that_of_the_reference(corpus: list[Path]) -> None:
    generator = random.Random(0)
    compared = 0
    for path in corpus:
        reference = reference_tensors(path)
        with hoistway.open(path) as ours:
            for name in ours.keys():  # noqa: SIM118
                dtype = ours.get_dtype(name)
                if dtype == "F4":
                    # Torch counts pairs of elements; see the numpy test for slices of packed types.
                    continue
                for _ in range(4):
                    index = random_index(generator, ours.get_shape(name), dtype)
                    assert_equal(
                        ours.get_slice(name)[index], reference[name][index], f"{path.name}: {name}{index}"
                    )
                    compared += 1
    assert compared > 5000


def test_slices_of_the_reference_itself(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [6, 7, 8]), "b": ("BF16", [40])})
    generator = random.Random(1)
    with hoistway.open(path) as ours, safetensors.safe_open(path, "pt") as reference:
        for name in ("a", "b"):
            for _ in range(200):
                index = random_index(generator, ours.get_shape(name), "F32")
                assert_equal(ours.get_slice(name)[index], reference.get_slice(name)[index], f"{name}{index}")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_is_that_of_the_reference(tmp_path: Path, dtype: str) -> None:
    from safetensors.numpy import load_file  # noqa: PLC0415

    path = write_model(
        tmp_path / "m.safetensors", {"a": (dtype, [3, 4]), "s": (dtype, []), "e": (dtype, [0, 2])}
    )
    ours = hoistway.load_file(path, framework="numpy")
    for name, reference in load_file(path).items():
        assert ours[name].dtype == reference.dtype
        assert ours[name].shape == reference.shape
        assert ours[name].tobytes() == reference.tobytes()
        assert ours[name].flags.writeable


def test_packed_types_are_sliced_at_bytes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F4", [4, 6])})
    with hoistway.open(path, framework="numpy") as checkpoint:
        whole = checkpoint.get_tensor("a")
        assert whole.dtype == ml_dtypes.float4_e2m1fn
        packed = np.frombuffer(path.read_bytes()[-12:], np.uint8).reshape(4, 3)
        assert (whole.view(np.uint8)[:, 0::2] == packed & 15).all()
        assert (whole.view(np.uint8)[:, 1::2] == packed >> 4).all()
        part = checkpoint.get_slice("a")[1:3, 2:4]
        assert (part.view(np.uint8) == whole[1:3, 2:4].view(np.uint8)).all()
        with pytest.raises(hoistway.errors.SliceError, match="whole bytes"):
            checkpoint.get_slice("a")[:, 1:3]
