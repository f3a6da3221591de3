"""Writes a checkpoint into a folder, the same one each time: `checkpoint.py KIND FOLDER`.

``large`` is two files, of 48 MiB together, whose tensors begin and end anywhere, ``small`` the same without large
tensors, and ``many`` 300 files with tensors of each type that end around sectors and blocks.
"""

import json
import random
import struct
import sys
from pathlib import Path

EDGES = [1, 2, 511, 512, 513, 1023, 4095, 4096, 4097, 65537]
BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}

Tensor = tuple[str, str, int]


def write(path: Path, tensors: list[Tensor], source: random.Random) -> None:
    """Writes a file of tensors: their names, types and elements."""
    header, end = {}, 0
    for name, dtype, elements in tensors:
        begin, end = end, end + elements * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # As the reference library does, so that elements are aligned in a file that is mapped.
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + source.randbytes(end))


def of_sizes(most: int, source: random.Random) -> list[list[Tensor]]:
    """Two files with tensors of at most so many bytes."""
    sizes = [1, 3, 511, 512, 513, 4095, 4096, 4097, 65537, 20 << 20, (24 << 20) + 5]
    sizes += [source.randrange(1, 100_000) for _ in range(80)]
    sizes = [size for size in sizes if size <= most]
    return [
        [(f"{shard}.{size}.{at}", "U8", size) for at, size in enumerate(sizes[shard::2])] for shard in (0, 1)
    ]


def of_types() -> list[list[Tensor]]:
    """300 files. The last of their tensors ends anywhere, and those before it are aligned."""
    files: list[list[Tensor]] = []
    for number in range(300):
        dtype = list(BYTES)[number % len(BYTES)]
        edge = EDGES[number // len(BYTES) % len(EDGES)]
        files.append(
            [
                (f"{number}.edge", dtype, edge),
                (f"{number}.empty", dtype, 0),
                (f"{number}.few", dtype, number % 7 + 1),
                (f"{number}.odd", "U8", number + 1),
            ]
        )
    return files


kind, folder = sys.argv[1], Path(sys.argv[2])
source = random.Random(38)
files = of_types() if kind == "many" else of_sizes({"large": 1 << 30, "small": 100_000}[kind], source)
folder.mkdir(parents=True, exist_ok=True)
for number, tensors in enumerate(files, 1):
    write(folder / f"model-{number}.safetensors", tensors, source)
