"""s3s-fs, a server of S3 that checks signatures: `just test-s3-servers`. `S3S_FS` names its program."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import write_model
from hoistway import errors
from server_conformance import assert_loads_are_those_of_disk

S3S_FS = os.environ.get("S3S_FS")
TENSORS = {"a": ("F32", [1000, 1003]), "b": ("U8", [5])}

pytestmark = pytest.mark.skipif(S3S_FS is None, reason="S3S_FS does not name the program s3s-fs")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """The folder of the bucket `models`."""
    path = tmp_path / "stored" / "models"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def store(tmp_path: Path, bucket: Path) -> Iterator[hoistway.StoreOptions]:
    """The options for a server of that bucket."""
    assert S3S_FS is not None
    log = tmp_path / "s3s-fs.log"
    command = [S3S_FS, "--access-key", "key", "--secret-key", "secret", "--host", "127.0.0.1", "--port", "0"]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, bucket.parent],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RUST_LOG": "s3s_fs=info"},
        ) as server,
    ):
        try:
            deadline = time.monotonic() + 60
            while (found := re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield {"endpoint": found[0], "access_key_id": "key", "secret_access_key": "secret"}
        finally:
            server.terminate()


def assert_same(loaded: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(loaded) == set(expected)
    assert all(np.array_equal(loaded[name].view(np.uint8), expected[name].view(np.uint8)) for name in loaded)


def test_objects_come_by_signed_requests_alone(store: hoistway.StoreOptions, bucket: Path) -> None:
    (bucket / "llama & co").mkdir()
    path = write_model(bucket / "llama & co" / "model+1.safetensors", TENSORS)
    expected = hoistway.load_file(path, framework="numpy")
    for url in ("s3://models/llama & co/", "s3://models/llama & co/model+1.safetensors"):
        assert_same(hoistway.load_file(url, framework="numpy", store=store), expected)
        refused: list[hoistway.StoreOptions] = [
            {**store, "secret_access_key": "another"},
            {"endpoint": store["endpoint"], "anonymous": True},
        ]
        for options in refused:
            with pytest.raises(PermissionError, match="denies access"):
                hoistway.load_file(url, framework="numpy", store=options)
    with pytest.raises(errors.CheckpointNotFoundError):
        hoistway.load_file("s3://models/none.safetensors", framework="numpy", store=store)


def test_loads_are_those_of_disk(tmp_path: Path, store: hoistway.StoreOptions, bucket: Path) -> None:
    def put(name: str, data: bytes) -> None:
        (bucket / name).parent.mkdir(exist_ok=True)
        (bucket / name).write_bytes(data)

    assert_loads_are_those_of_disk(tmp_path / "corpus", put, "s3://models/", store)


def test_an_object_that_is_replaced_is_noticed_without_preconditions(store: hoistway.StoreOptions) -> None:
    url = "s3://models/model.safetensors"
    generator = np.random.default_rng(5)
    first, second = ({"a": generator.integers(0, 256, 3 << 20, np.uint8)} for _ in range(2))
    hoistway.save_file(first, url, store=store)
    with hoistway.open(url, framework="numpy", store=store) as checkpoint:
        hoistway.save_file(second, url, store=store)
        with pytest.raises(errors.FileChangedError):
            checkpoint.get_tensor("a")
    assert_same(hoistway.load_file(url, framework="numpy", store=store), second)


def test_saves_come_in_one_request_and_in_parts(store: hoistway.StoreOptions) -> None:
    generator = np.random.default_rng(5)
    whole = {name: generator.integers(0, 256, 5 << 20, np.uint8) for name in ("a", "b", "c", "d")}
    for saved, parts in (({"a": whole["a"][:1000]}, 1), (whole, 3)):
        url = f"s3://models/saved & co+/{parts}.safetensors"
        assert hoistway.save_file(saved, url, store=store).parts == parts
        assert_same(hoistway.load_file(url, framework="numpy", store=store), saved)
    hoistway.save_sharded(whole, "s3://models/set/", max_shard_size=11 << 20, store=store)
    assert_same(hoistway.load_file("s3://models/set/", framework="numpy", store=store), whole)
