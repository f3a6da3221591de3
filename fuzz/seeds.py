"""Gives the fuzzers a start: the corpora that the tests share, and an index."""

import json
from math import prod
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
MAX_BYTES = 65_536


def text_of(header: str | list | dict) -> str:
    """A header of the corpus as text."""
    if isinstance(header, str):
        return header
    if isinstance(header, list):
        return "".join(text_of(part) for part in header)
    return header["repeat"] * header["times"]


def bytes_of(part: str | list) -> bytes:
    """A part of a file of the corpus of GGUF files, which may be repeated."""
    return bytes.fromhex(part) if isinstance(part, str) else bytes.fromhex(part[0]) * part[1]


def main() -> None:
    """Writes the seeds where `cargo fuzz` looks for them."""
    headers = FUZZ / "corpus" / "header"
    headers.mkdir(parents=True, exist_ok=True)
    cases = json.loads((FUZZ.parent / "testkit" / "corpus" / "headers.json").read_text())
    for number, case in enumerate(cases):
        if "file_hex" in case:
            continue
        raw = "header_hex" in case
        header = bytes.fromhex(case["header_hex"]) if raw else text_of(case["header"]).encode()
        if len(header) < MAX_BYTES and case["data_bytes"] < 2**16:
            # What the target takes: the length of the data, then the header.
            (headers / f"case-{number}").write_bytes(case["data_bytes"].to_bytes(2, "little") + header)
    ggufs = FUZZ / "corpus" / "gguf"
    ggufs.mkdir(parents=True, exist_ok=True)
    cases = json.loads((FUZZ.parent / "testkit" / "corpus" / "gguf.json").read_text())
    for number, case in enumerate(cases):
        offset = case.get("offset", 0)
        for name, parts in case["files"].items():
            file = b"".join(map(bytes_of, parts))
            if len(file) < MAX_BYTES and offset < 2**8:
                # What the target takes: whether it is lenient, the offset, then the file.
                is_lenient = case["error"] is not None
                (ggufs / f"case-{number}-{name}").write_bytes(bytes([is_lenient, offset]) + file)
    indexes = FUZZ / "corpus" / "index"
    indexes.mkdir(parents=True, exist_ok=True)
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 8}, "weight_map": weights}
    (indexes / "sharded").write_text(json.dumps(index))
    structures = FUZZ / "corpus" / "kv_format"
    structures.mkdir(parents=True, exist_ok=True)
    version = (1).to_bytes(4, "little")
    for magic in (b"WLKVSTOR", b"WLKVSEGM", b"WLKVLEAS", b"WLKVBLCK", b"WLKVCKPT"):
        # A page of each kind; the target makes its checksum.
        (structures / magic.decode()).write_bytes((magic + version).ljust(4096, b"\0"))
    objects = FUZZ / "corpus" / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(
        (
            "me:secret@host:80/a?b#c",
            "org/model@refs%2Fpr%2F1/sub/a.gguf",
            "models@account.dfs.core.windows.net/a",
            "bytes 5-9/100",
            "HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\n",
            "<ListBucketResult><Contents><Key>a</Key></Contents><IsTruncated>true</IsTruncated></ListBucketResult>",
            "<EnumerationResults><Blobs><Blob><Name>a</Name></Blob></Blobs><NextMarker/></EnumerationResults>",
        )
    ):
        (objects / str(number)).write_text(text)
    traces = FUZZ / "corpus" / "route_trace"
    traces.mkdir(parents=True, exist_ok=True)
    rows = [
        f"0,{step % 2},{step // 2},{layer},0,{step + layer},0.5,0,9"
        for step in range(4)
        for layer in range(3)
    ]
    names = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    described = "# route_trace v1\n# n_layer=3 n_expert=8 n_expert_used=2\n# layer=0 expert_bytes=9\n"
    (traces / "csv").write_text("\n".join([described + names, *rows]))
    layers = [{"layer": layer, "experts": 8, "expert_bytes": 9} for layer in range(3)]
    lines = [{"hoistway_trace": 1, "experts_per_token": 2, "layers": layers}]
    lines += [{"step": step, "layer": layer, "experts": [step, 7]} for step in range(3) for layer in range(3)]
    (traces / "json-lines").write_text("\n".join(map(json.dumps, lines)))
    experts = FUZZ / "corpus" / "experts"
    experts.mkdir(parents=True, exist_ok=True)
    models = {
        "stacked": {"gate_up_proj_blocks": [4, 3, 2], "gate_up_proj_scales": [4, 3], "down_proj": [4, 6]},
        "single": {
            f"{expert}.{role}_proj.weight": [2, 3] for expert in range(2) for role in ("gate", "up", "down")
        },
    }
    for name, shapes in models.items():
        end, header = 0, {}
        for tensor, shape in shapes.items():
            start, end = end, end + prod(shape)
            entry = {"dtype": "U8", "shape": shape, "data_offsets": [start, end]}
            header[f"model.layers.0.mlp.experts.{tensor}"] = entry
        # What the target takes: whether it is GGUF, the length of the data, then the header.
        (experts / name).write_bytes(bytes([False]) + end.to_bytes(2, "little") + json.dumps(header).encode())


if __name__ == "__main__":
    main()
