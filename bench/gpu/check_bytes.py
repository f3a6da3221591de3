"""Checks that the right bytes arrive: of every type and size, by every route, in every layout, sliced, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hoistway
import numpy as np

from gpu import files
from gpu.subject import (
    BLOCK,
    DEVICE,
    TORCH_NAMES,
    Check,
    SkipError,
    Subject,
    carriers,
    must_raise,
    same_bytes,
)

LARGE_BYTES = (256 << 20) + 3
ROUTES = ("auto", "staged", "io_uring", "threads", "cached", "pinned-cache", "gds-compat", "gds")
FLOATS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8}
TARGETS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def every_dtype_arrives(subject: Subject) -> str | None:
    """All types that torch knows; others are named."""
    unknown = []
    for dtype in TORCH_NAMES:
        tensors = {"matrix": (dtype, [31, 46]), "vector": (dtype, [2]), "empty": (dtype, [0, 4])}
        path = files.write(subject.folder / f"{dtype}.safetensors", tensors)
        if subject.torch is not None and not hasattr(subject.torch, TORCH_NAMES[dtype]):
            unknown.append(dtype)
            continue
        subject.must_hold(subject.load(path), path)
    return f"torch has no {', '.join(unknown)}" if unknown else None


def odd_sizes_and_empty_tensors(subject: Subject) -> None:
    """Scalars, primes, many dimensions, and no elements at all."""
    tensors: dict[str, tuple[str, list[int]]] = {
        "scalar": ("F32", []),
        "nothing": ("BF16", [0]),
        "nothing.wide": ("F32", [3, 0, 5]),
        "one.byte": ("U8", [1]),
        "deep": ("I16", [1, 2, 3, 1, 5, 7]),
        **{f"bytes.{n}": ("U8", [n]) for n in (3, 511, 513, 4095, 4097, 65537, (4 << 20) - 1, (4 << 20) + 1)},
        "words": ("F64", [100003]),
    }
    path = files.write(subject.folder / "odd.safetensors", tensors)
    subject.must_hold(subject.load(path), path)
    only = files.write(subject.folder / "nothing.safetensors", {"nothing": ("F32", [0])})
    subject.must_hold(subject.load(only), only)


def any_length_of_header(subject: Subject) -> None:
    """Data that begins at any offset, so that no tensor of the file is aligned."""
    tensors = {"a": ("F32", [4097]), "b": ("U8", [13]), "c": ("BF16", [1000, 33]), "d": ("F64", [7])}
    for padding in range(16):
        path = files.write(subject.folder / f"padded{padding}.safetensors", tensors, padding=padding)
        subject.must_hold(subject.load(path), path)


def many_tiny_tensors(subject: Subject) -> None:
    """20,000 tensors of up to 64 elements."""
    lengths = np.random.default_rng(1).integers(0, 65, 20_000)
    tensors = {f"blocks.{i}.scale": ("F32" if i % 3 else "F16", [int(n)]) for i, n in enumerate(lengths)}
    path = files.write(subject.folder / "tiny.safetensors", tensors)
    subject.must_hold(subject.load(path), path)


def one_large_tensor(subject: Subject) -> str | None:
    """A tensor of many chunks, of an odd size, beside a small one; cold, half cached and cached."""
    tensors = {"small": ("U8", [5]), "large": ("U8", [LARGE_BYTES])}
    path = files.write(subject.folder / "large.safetensors", tensors)
    ways = []
    for part in (0.0, 0.5, 1.0):
        files.make_cold([str(path)])
        files.make_warm([str(path)], part)
        loaded = subject.load(path)
        ways.append(f"{part:.0%} cached: {carriers(loaded)}")
        subject.must_hold(loaded, path)
    return "; ".join(ways)


def several_files_as_one(subject: Subject) -> None:
    """A list of files."""
    paths = [
        files.write(subject.folder / f"part{i}.safetensors", {f"part{i}": ("BF16", [1000, 300 + i])}, seed=i)
        for i in range(3)
    ]
    tensors = subject.load(paths)
    for path in paths:
        name = path.stem
        subject.must_hold({name: tensors[name]}, path)


def route(name: str) -> Check:
    """A check of a named route: right bytes, by that route and no other."""

    def check(subject: Subject) -> str | None:
        path = _medium(subject)
        if name in ("cached", "pinned-cache"):
            files.make_warm([str(path)])
        else:
            files.make_cold([str(path)])
        tensors = subject.load_by(name, path)
        subject.must_hold(tensors, path)
        by_cufile = name in ("gds", "gds-compat")
        # The last block of the file, cut short, is no read of cuFile's.
        own = [
            carrier
            for carrier in tensors.report.carriers
            if not (by_cufile and carrier.route == "threads" and carrier.tensor_bytes < BLOCK)
        ]
        ways = {carrier.route for carrier in own}
        # Processors copy what has pieces of up to 64 KiB: a driver may do so itself, which a cut file would end.
        helpers = {"cached"} if name == "pinned-cache" else set()
        bytes_by = {route: sum(each.tensor_bytes for each in own if each.route == route) for route in ways}
        is_kept = ways <= {name} | helpers and 2 * bytes_by.get(name, 0) > sum(bytes_by.values())
        assert name in ("auto", "staged") or is_kept, f"route {name} was carried by {ways}"
        return carriers(tensors)

    check.__name__ = f"route_{name.replace('-', '_')}"
    return check


def layout(name: str) -> Check:
    """A check of a layout."""

    def check(subject: Subject) -> None:
        path = _medium(subject)
        # With data that no type is aligned in, too.
        odd = files.write(
            subject.folder / "odd_layout.safetensors", {"a": ("F64", [513]), "b": ("U8", [3])}, padding=3
        )
        for each in (path, odd):
            subject.must_hold(subject.load(each, layout=name), each)

    check.__name__ = f"layout_{name}"
    return check


def slices_of_rows_and_columns(subject: Subject) -> None:
    """Parts of tensors along either dimension and both, by each of the routes that stage."""
    tensors = {"matrix": ("BF16", [1537, 1026]), "cube": ("F32", [7, 130, 65]), "whole": ("U8", [99])}
    path = files.write(subject.folder / "sliced.safetensors", tensors, padding=8)
    stored = files.read(path)
    parts: list[dict[str, tuple[slice, ...]]] = [
        {"matrix": (slice(3, 1030),), "cube": (slice(2, 5),)},
        {"matrix": (slice(0, 1537), slice(5, 700)), "cube": (slice(0, 7), slice(1, 2), slice(0, 65))},
        {"matrix": (slice(511, 513), slice(1025, 1026)), "cube": (slice(1, 6), slice(9, 129), slice(3, 64))},
        {"matrix": (slice(4, 4),)},
    ]
    for index in parts:
        for name in ("auto", "threads"):
            loaded = subject.load(path, slices=index, route=name)
            for tensor, wanted in stored.items():
                data = wanted.sliced(index[tensor]) if tensor in index else wanted.data
                same_bytes(subject.bytes_of(loaded[tensor]), data, f"{tensor}{index.get(tensor, '')}")


def lazy_slices(subject: Subject) -> None:
    """`get_slice`, with integers and steps where the tensors are torch's."""
    path = _medium(subject)
    with hoistway.open(path, device=DEVICE, framework=subject.framework) as checkpoint:
        wanted = files.read(path)["layers.0.weight"]
        part = checkpoint.get_slice("layers.0.weight")[10:200, 7:1000]
        same_bytes(subject.bytes_of(part), wanted.sliced((slice(10, 200), slice(7, 1000))), "slice")
        if subject.torch is not None:
            part = checkpoint.get_slice("layers.0.weight")[3, 1:900:7]
            same_bytes(
                subject.bytes_of(part), wanted.sliced((slice(3, 4), slice(1, 900, 7))), "stepped slice"
            )


def conversion(source: str, target: str) -> Check:
    """A check of a conversion of every kind of number, against torch's on the device, or ml_dtypes'."""

    def check(subject: Subject) -> str | None:
        bits = _patterns(source)
        stored = {"values": files.Stored(source, bits.shape, bits.tobytes())}
        # At an odd offset too, where the device cannot load whole words.
        stored["odd"] = files.Stored("U8", (1,), b"\1")
        stored["again"] = files.Stored(source, bits.shape, bits.tobytes())
        path = files.write_stored(subject.folder / f"{source}.safetensors", stored)
        loaded = subject.load(path, dtype=target)
        converted, by = _converted(subject, bits, source, target)
        kind = FLOATS[TARGETS[target]]
        for name in ("values", "again"):
            dtype = str(loaded[name].dtype)
            assert dtype in (TARGETS[target], f"torch.{target}"), f"{name} is of type {dtype}"
            _same_numbers(np.frombuffer(subject.bytes_of(loaded[name]), kind), converted, TARGETS[target])
        same_bytes(subject.bytes_of(loaded["odd"]), b"\1", "what is no float")
        return f"as {by}"

    check.__name__ = f"convert_{source.lower()}_to_{target}"
    return check


def conversion_that_there_is_not(subject: Subject) -> str | None:
    """To integers."""
    path = _medium(subject)
    return str(must_raise(hoistway.errors.OptionError, lambda: subject.load(path, dtype="int8")))


def _medium(subject: Subject) -> Path:
    path = subject.folder / "medium.safetensors"
    if not path.exists():
        tensors: dict[str, tuple[str, list[int]]] = {"embed": ("F32", [4000, 640]), "ids": ("I64", [3, 5])}
        for layer in range(6):
            tensors[f"layers.{layer}.weight"] = ("BF16", [1024, 2048])
            tensors[f"layers.{layer}.bias"] = ("BF16", [2047])
        files.write(path, tensors)
    return path


def _patterns(dtype: str) -> np.ndarray:
    """All patterns of bits of a type; of float32 all upper halves, with ties and their neighbours below."""
    kind = FLOATS[dtype]
    if dtype != "F32":
        return np.arange(2 ** (8 * np.dtype(kind).itemsize), dtype=np.uint32).astype(kind)
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    # Ties of bfloat16 and of float16, and what is just beside them.
    lower = np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000], np.uint32)
    random = np.random.default_rng(7).integers(0, 2**32, 2**19, np.uint64).astype(np.uint32)
    return np.concatenate([(upper[:, None] | lower).reshape(-1), random])


def _converted(subject: Subject, bits: np.ndarray, source: str, target: str) -> tuple[np.ndarray, str]:
    """Bits of the numbers as another converts them."""
    kind = FLOATS[TARGETS[target]]
    if subject.torch is not None:
        torch = subject.torch
        values = torch.from_numpy(bits.view(np.uint8)).cuda().view(getattr(torch, TORCH_NAMES[source]))
        found: Any = values.to(getattr(torch, target)).view(torch.uint8).cpu().numpy()
        return found.view(kind), "torch converts on the device"
    try:
        import ml_dtypes  # noqa: PLC0415
    except ImportError as error:
        raise SkipError("there is neither torch nor ml_dtypes to compare with") from error
    own = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    own |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
    with np.errstate(all="ignore"):
        found = bits.view(own[source]).astype(np.float32).astype(own[TARGETS[target]])
    return found.view(kind), "ml_dtypes converts"


def _same_numbers(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    """Checks bits of numbers; whatever is not a number there must not be one here."""
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[dtype]
    sign = 1 << (8 * found.itemsize - 1)
    number = (found & (sign - 1)) <= infinity
    assert found.shape == wanted.shape, f"{found.size} elements are not {wanted.size}"
    assert np.array_equal(number, (wanted & (sign - 1)) <= infinity), "NaNs are not where they should be"
    differ = np.flatnonzero(number & (found != wanted))
    assert not len(differ), (
        f"{len(differ)} of {len(found)} differ, the first is {found[differ[0]]:#x} instead of {wanted[differ[0]]:#x}"
    )


CHECKS: list[Check] = [
    every_dtype_arrives,
    odd_sizes_and_empty_tensors,
    any_length_of_header,
    many_tiny_tensors,
    one_large_tensor,
    several_files_as_one,
    *(route(name) for name in ROUTES),
    *(layout(name) for name in ("file", "packed", "tensor")),
    slices_of_rows_and_columns,
    lazy_slices,
    *(conversion(source, target) for source in FLOATS for target in TARGETS),
    conversion_that_there_is_not,
]
