"""Azure's own stand-in, azurite, checks signatures: `just test-azurite`. `AZURITE` names its program."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import write_model
from hoistway import errors
from server_conformance import assert_loads_are_those_of_disk

AZURITE = os.environ.get("AZURITE")
ACCOUNT = "devstoreaccount1"
# It is the same for everybody: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
OTHER_KEY = base64.b64encode(b"another key").decode()
TENSORS = {"a": ("F32", [1000, 1003]), "b": ("U8", [5])}

pytestmark = pytest.mark.skipif(AZURITE is None, reason="AZURITE does not name the program azurite-blob")


def put(endpoint: str, target: str, body: bytes, headers: dict[str, str]) -> None:
    """Sends a signed PUT: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
    path, _, query = target.partition("?")
    headers = {**headers, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    own = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    length = str(len(body)) if body else ""
    resource = f"/{ACCOUNT}/{ACCOUNT}{path}" + "".join(
        f"\n{pair.replace('=', ':')}" for pair in sorted(filter(None, query.split("&")))
    )
    text = (
        "\n".join(("PUT", "", "", length, "", "application/octet-stream", *[""] * 6)) + "\n" + own + resource
    )
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Type"] = "application/octet-stream"
    request = urllib.request.Request(endpoint + target, data=body, headers=headers, method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The URL of an azurite that is empty."""
    assert AZURITE is not None
    command = [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", "0", "--location", str(tmp_path / "azurite")]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "successfully listens on" in line)
        yield f"{line.split()[-1]}/{ACCOUNT}"
        server.terminate()


def test_azurite_takes_what_is_signed_and_refuses_another_key(tmp_path: Path, endpoint: str) -> None:
    path = write_model(tmp_path / "model & co.safetensors", TENSORS)
    put(endpoint, "/models?restype=container", b"", {})
    blob = {"x-ms-blob-type": "BlockBlob"}
    put(endpoint, "/models/llama/model%20%26%20co.safetensors", path.read_bytes(), blob)
    store: hoistway.StoreOptions = {"endpoint": endpoint, "account": ACCOUNT, "account_key": KEY}
    expected = hoistway.load_file(path, framework="numpy")
    for url in ("az://models/llama/", "az://models/llama/model & co.safetensors"):
        loaded = hoistway.load_file(url, framework="numpy", store=store)
        assert all(
            np.array_equal(loaded[name].view(np.uint8), expected[name].view(np.uint8)) for name in TENSORS
        )
    with hoistway.open("az://models/llama/", framework="numpy", store=store) as checkpoint:
        put(endpoint, "/models/llama/model%20%26%20co.safetensors", path.read_bytes()[::-1], blob)
        with pytest.raises(errors.FileChangedError):
            checkpoint.get_tensor("a")
    with pytest.raises(PermissionError, match="denies access"):
        hoistway.load_file("az://models/llama/", framework="numpy", store={**store, "account_key": OTHER_KEY})


def test_loads_from_azurite_are_those_of_disk(tmp_path: Path, endpoint: str) -> None:
    put(endpoint, "/models?restype=container", b"", {})
    assert_loads_are_those_of_disk(
        tmp_path / "corpus",
        lambda name, data: put(endpoint, f"/models/{name}", data, {"x-ms-blob-type": "BlockBlob"}),
        "az://models/",
        {"endpoint": endpoint, "account": ACCOUNT, "account_key": KEY},
    )


def test_azurite_takes_saves_in_one_request_and_in_blocks(endpoint: str) -> None:
    put(endpoint, "/models?restype=container", b"", {})
    store: hoistway.StoreOptions = {"endpoint": endpoint, "account": ACCOUNT, "account_key": KEY}
    generator = np.random.default_rng(5)
    tensors = {name: generator.integers(0, 256, 5 << 20, np.uint8) for name in ("a", "b", "c", "d")}
    small = {"a": tensors["a"][:1000]}
    for saved, parts in ((small, 1), (tensors, 3)):
        url = f"az://models/saved & co/{parts}.safetensors"
        report = hoistway.save_file(saved, url, store=store)
        assert report.parts == parts
        # The emulator knows no CRC-64.
        assert report.checksum is None
        assert any("the store refuses checksums of uploads" in note for note in report.notes)
        loaded = hoistway.load_file(url, framework="numpy", store=store)
        assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
    for _ in range(2):
        hoistway.save_sharded(tensors, "az://models/set/", max_shard_size=11 << 20, store=store)
        loaded = hoistway.load_file("az://models/set/", framework="numpy", store=store)
        assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    other: hoistway.StoreOptions = {**store, "account_key": OTHER_KEY}
    with pytest.raises(PermissionError, match="denies access"):
        hoistway.save_file(small, "az://models/saved & co/1.safetensors", store=other)
