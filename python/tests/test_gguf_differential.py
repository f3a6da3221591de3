"""Thousands of GGUF files are to hoistway what they are to ggml's own parser and to the package `gguf`."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import hoistway
import numpy as np
import oracles
import pytest
from conftest import gguf_cases
from write import KINDS, TYPES, Array, File, Tensor

FILES = 2000
NAMES = {kind.number: name for name, kind in TYPES.items()}
NUMBERS = [kind for kind, (_, code) in KINDS.items() if code]
# Types that one of the others does not know, or takes for something else.
UNKNOWN_TO_GGUF = {"Q8_1", "Q2_0"}
UNKNOWN_TO_GGML = set() if "HOISTWAY_GGML_LIBRARY" in os.environ else {"Q2_0"}
VOCABULARIES = sorted(Path(os.environ.get("HOISTWAY_GGUF_VOCAB", "/nonexistent")).glob("*.gguf"))

needs_ggml = pytest.mark.skipif(
    oracles.ggml_library() is None,
    reason="there is no ggml: install pywhispercpp, or set HOISTWAY_GGML_LIBRARY",
)
ORACLES = [pytest.param("ggml", marks=needs_ggml), "gguf"]


def random_number(generator: random.Random, kind: str) -> Any:
    """A number of a kind, often at its limits."""
    if kind == "bool":
        return generator.random() < 0.5
    if kind in ("f32", "f64"):
        number = generator.choice([0.0, -0.0, 1.5, float("inf"), float("nan"), generator.gauss(0, 1e6)])
        return float(np.float32(number)) if kind == "f32" else number
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return generator.choice([low, high, 0, generator.randint(low, high)])


def random_text(generator: random.Random) -> str:
    """Text without a NUL, at which ggml's functions end it."""
    alphabet = generator.choice(["abc._", "äßж語𝄞", "\n\t\"'\\ ", "a" * 50])
    return "".join(generator.choices(alphabet, k=generator.randrange(12)))


def random_value(generator: random.Random) -> tuple[str, Any]:
    """A kind and a value of it."""
    kind = generator.choice([*NUMBERS, "string", "array", "array"])
    if kind == "string":
        return kind, random_text(generator)
    if kind != "array":
        return kind, random_number(generator, kind)
    element = generator.choice([*NUMBERS, "string", "string"])
    count = generator.choice([0, 1, 2, 30])
    if element == "string":
        return kind, Array(element, [random_text(generator) for _ in range(count)])
    return kind, Array(element, [random_number(generator, element) for _ in range(count)])


def random_tensor(generator: random.Random, name: str, *, known: list[str]) -> Tensor:
    """A tensor of random bytes, of up to a few thousand elements."""
    kind = generator.choice(known)
    shape = [generator.choice([1, 2, 3, 5, 8, 33]) for _ in range(generator.randrange(3))]
    shape.append(TYPES[kind].elements * generator.randrange(1, 5))
    return Tensor(name, shape, kind, data=generator.randbytes(Tensor(name, shape, kind).size))


def random_file(seed: int, unknown: set[str], **options: Any) -> File:
    """A file of up to ten tensors and ten keys."""
    generator = random.Random(seed)
    alignment = generator.choice([32, 32, 8, 64, 4096])
    metadata: list[Any] = [
        (f"{random_text(generator)}.{i}", *random_value(generator)) for i in range(generator.randrange(10))
    ]
    if alignment != 32 or generator.random() < 0.5:
        metadata.insert(generator.randrange(len(metadata) + 1), ("general.alignment", "u32", alignment))
    known = [name for name in TYPES if name not in unknown]
    tensors = [
        random_tensor(generator, f"{random_text(generator)}{i}", known=known)
        for i in range(generator.randrange(10))
    ]
    return File(metadata, tensors, version=generator.choice([2, 3, 3]), alignment=alignment, **options)


def with_gaps(file: File, seed: int) -> File:
    """The file with its tensors in another order, with gaps between them."""
    generator = random.Random(seed)
    order = list(file.tensors)
    generator.shuffle(order)
    end = 0
    for tensor in order:
        tensor.offset = end + file.alignment * generator.randrange(3)
        end = tensor.offset + tensor.size + -tensor.size % file.alignment
    file.data = bytearray(end)
    for tensor in order:
        file.data[tensor.offset : tensor.offset + tensor.size] = tensor.data
    return file


def exact(value: Any) -> Any:
    """A value that is only equal to one of the same bits."""
    if isinstance(value, (list, hoistway.MetadataArray)):
        return [exact(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def ours(path: Path, *, is_big_endian: bool = False) -> dict[str, Any]:
    """What hoistway makes of a file: its metadata and its tensors."""
    with hoistway.open(path, framework="raw") as checkpoint:
        metadata = checkpoint.metadata()
        tensors = {} if is_big_endian else checkpoint.load()
        return {
            "metadata": [[key, exact(value)] for key, value in metadata.items()],
            "tensors": {
                name: [checkpoint.get_dtype(name), checkpoint.get_shape(name), digest(tensors.get(name))]
                for name in checkpoint.keys()  # noqa: SIM118
            },
        }


def digest(tensor: hoistway.Tensor | None) -> str | None:
    """What the other parsers' processes compute of a tensor's bytes."""
    return None if tensor is None else hashlib.blake2b(tensor.tobytes(), digest_size=16).hexdigest()


def theirs(found: oracles.Found, *, is_big_endian: bool = False) -> dict[str, Any]:
    """What another parser makes of a file, in the same form."""
    assert found["verdict"] == "accept", found
    return {
        "metadata": [[key, value] for key, _, value in found["metadata"]],
        "tensors": {
            name: [NAMES[number], shape, None if is_big_endian else data]
            for name, number, shape, _, _, data in found["tensors"]
        },
    }


def alike(description: dict[str, Any], dimensions: int | None) -> dict[str, Any]:
    """With shapes of as many dimensions, as ggml has them."""
    if dimensions is None:
        return description
    padded = {
        name: [dtype, [1] * (dimensions - len(shape)) + shape, data]
        for name, (dtype, shape, data) in description["tensors"].items()
    }
    return {**description, "tensors": padded}


def compare(oracle: oracles.Oracle, paths: list[Path], *, is_big_endian: bool = False) -> None:
    """Compares what both make of each file."""
    dimensions = 4 if oracle == "ggml" else None
    for path, found in zip(paths, oracles.describe(oracle, paths), strict=True):
        expected = theirs(found, is_big_endian=is_big_endian)
        assert alike(ours(path, is_big_endian=is_big_endian), dimensions) == expected, path.name


def written(directory: Path, files: int, make: Callable[[int], File]) -> list[Path]:
    """Writes random files."""
    paths = [directory / f"{seed:04}.gguf" for seed in range(files)]
    for seed, path in enumerate(paths):
        path.write_bytes(make(seed).to_bytes())
    return paths


@needs_ggml
def test_files_are_what_they_are_to_ggml(tmp_path: Path) -> None:
    compare("ggml", written(tmp_path, FILES, lambda seed: random_file(seed, UNKNOWN_TO_GGML)))


def test_files_are_what_they_are_to_the_package(tmp_path: Path) -> None:
    compare("gguf", written(tmp_path, FILES, lambda seed: random_file(seed, UNKNOWN_TO_GGUF)))


def test_files_with_gaps_are_what_they_are_to_the_package(tmp_path: Path) -> None:
    paths = written(tmp_path, FILES // 5, lambda seed: with_gaps(random_file(seed, UNKNOWN_TO_GGUF), seed))
    compare("gguf", paths)


def test_big_endian_files_are_what_they_are_to_the_package(tmp_path: Path) -> None:
    paths = written(tmp_path, FILES // 5, lambda seed: random_file(seed, UNKNOWN_TO_GGUF, order=">"))
    compare("gguf", paths, is_big_endian=True)


@pytest.mark.parametrize("oracle", ORACLES)
def test_verdicts_on_the_corpus_are_those_it_lists(tmp_path: Path, oracle: oracles.Oracle) -> None:
    if oracle == "ggml" and "HOISTWAY_GGML_LIBRARY" in os.environ:
        pytest.skip("the corpus lists the verdicts of one version of ggml")
    paths, expected = [], []
    for number, case in enumerate(gguf_cases()):
        verdict = "accept" if case.errors[False] is None else "reject"
        other = case.others.get(oracle, {"verdict": verdict, "why": ""})
        assert other["verdict"] != verdict or not other["why"], (
            f"{case.name}: there is no difference to explain"
        )
        # Split models and embedded files are not for parsers of single files; and some cases take forever.
        if (
            len(case.files) == 1
            and case.open == "case.gguf"
            and not case.offset
            and other["verdict"] != "hang"
        ):
            paths.append(case.write(tmp_path / str(number)))
            expected.append((case.name, other["verdict"]))
    assert len(expected) > 200
    found = [described["verdict"] for described in oracles.describe(oracle, paths)]
    assert [(name, verdict) for (name, _), verdict in zip(expected, found, strict=True)] == expected


@pytest.mark.parametrize("limits", [{"split_max_tensors": 7}, {"split_max_size": 8_000}], ids=str)
@pytest.mark.parametrize("with_tensors_in_first", [True, False])
def test_split_models_of_the_package_are_whole(
    tmp_path: Path, limits: dict[str, int], with_tensors_in_first: bool
) -> None:
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(
        tmp_path / "model.gguf", "llama", small_first_shard=not with_tensors_in_first, **limits
    )
    writer.add_name("split")
    writer.add_token_list(["a", "b"])
    expected = {}
    for i in range(30):
        kind = gguf.GGMLQuantizationType[["F32", "F16", "Q8_0", "Q4_K", "MXFP4"][i % 5]]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        shape = [int(generator.integers(1, 20)), 2 * elements]
        array = generator.integers(0, 256, [shape[0], 2 * size], np.uint8)
        if elements == 1:
            array = array.view(np.float32 if kind.name == "F32" else np.float16)
            writer.add_tensor(f"blk.{i}.weight", array)
        else:
            writer.add_tensor(f"blk.{i}.weight", array, raw_dtype=kind)
        expected[f"blk.{i}.weight"] = (kind.name, shape, array.tobytes())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 3
    for path in (paths[0], paths[-1], tmp_path):
        with hoistway.open(path, framework="raw") as checkpoint:
            assert checkpoint.files() == [str(path) for path in paths]
            assert checkpoint.metadata()["general.name"] == "split"
            assert checkpoint.metadata()["tokenizer.ggml.tokens"] == ["a", "b"]
            loaded = checkpoint.load()
            found = {
                name: (checkpoint.get_dtype(name), checkpoint.get_shape(name), tensor.tobytes())
                for name, tensor in loaded.items()
            }
        assert found == expected


@needs_ggml
@pytest.mark.skipif(
    not VOCABULARIES,
    reason="HOISTWAY_GGUF_VOCAB names no directory of vocabularies: see just test-gguf-vocab",
)
def test_vocabularies_are_what_they_are_to_ggml() -> None:
    compare("ggml", VOCABULARIES)


@pytest.mark.skipif(
    not VOCABULARIES,
    reason="HOISTWAY_GGUF_VOCAB names no directory of vocabularies: see just test-gguf-vocab",
)
def test_small_vocabularies_are_what_they_are_to_the_package() -> None:
    compare("gguf", sorted(VOCABULARIES, key=lambda path: path.stat().st_size)[:3])


def test_the_package_gguf_makes_floats_of_what_is_loaded(tmp_path: Path) -> None:
    """As README says: quantised tensors as they are, bfloat16 by its bytes."""
    path = tmp_path / "m.gguf"
    data = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_0"]
    writer = gguf.GGUFWriter(path, "test")
    for kind in kinds:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(data, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = hoistway.load_file(path, framework="numpy")
    for kind in kinds:
        seen = loaded[kind].view(np.uint8) if kind == "BF16" else loaded[kind]
        floats = gguf.quants.dequantize(seen, gguf.GGMLQuantizationType[kind])
        assert floats.shape == data.shape
        assert np.abs(floats - data).max() < 0.5
        if kind == "BF16":
            assert np.array_equal(floats, loaded[kind].astype(np.float32))
