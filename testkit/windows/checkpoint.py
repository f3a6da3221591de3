"""Writes a checkpoint of 48 MiB whose tensors begin and end anywhere, into a folder. The same one each time.

With a second argument, leaves out tensors of more bytes.
"""

import json
import random
import struct
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
source = random.Random(38)
sizes = [1, 3, 511, 512, 513, 4095, 4096, 4097, 65537, 20 << 20, (24 << 20) + 5]
sizes += [source.randrange(1, 100_000) for _ in range(80)]
most = int(sys.argv[2]) if len(sys.argv) > 2 else max(sizes)
sizes = [size for size in sizes if size <= most]
for shard in (1, 2):
    header, end, parts = {}, 0, []
    for number, size in enumerate(sizes[shard - 1 :: 2]):
        header[f"tensor.{shard}.{number}"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [end, end + size],
        }
        parts.append(source.randbytes(size))
        end += size
    text = json.dumps(header).encode()
    path = folder / f"model-{shard}.safetensors"
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))
