"""A server of S3 that checks signatures, moto: `just test-s3-servers`. `MOTO_SERVER` names its program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import hoistway
import numpy as np
import pytest
from hoistway import errors
from server_conformance import assert_loads_are_those_of_disk

MOTO = os.environ.get("MOTO_SERVER")
REGION = "us-east-1"
# Requests that are not checked: the user, the key, the policy and the bucket are made by them.
UNCHECKED = 4
POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:*", "Resource": "*"},
        {"Effect": "Deny", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::models/denied/*index.json"},
    ],
}

pytestmark = pytest.mark.skipif(MOTO is None, reason="MOTO_SERVER does not name the program moto_server")


def ask(url: str, service: str, method: str, body: bytes | None = None, **fields: str) -> str:
    """Sends a request without a signature that counts."""
    scope = f"Credential=none/20260101/{REGION}/{service}/aws4_request"
    headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=none"}
    if body is not None:
        headers["Content-Type"] = "application/octet-stream"
    elif fields:
        body = urllib.parse.urlencode({**fields, "Version": "2010-05-08"}).encode()
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hoistway.StoreOptions]:
    """The options for a bucket that is empty, `models`."""
    assert MOTO is not None
    log = tmp_path / "moto.log"
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(UNCHECKED), "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as output,
        subprocess.Popen(
            [MOTO, "-H", "127.0.0.1", "-p", "0"], stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as server,
    ):
        try:
            deadline = time.monotonic() + 60
            while (found := re.search(r"Running on (http://\S+)", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            endpoint = found[1]
            ask(endpoint, "iam", "POST", Action="CreateUser", UserName="me")
            made = ask(endpoint, "iam", "POST", Action="CreateAccessKey", UserName="me")
            policy = {"PolicyName": "all", "PolicyDocument": json.dumps(POLICY)}
            ask(endpoint, "iam", "POST", Action="PutUserPolicy", UserName="me", **policy)
            ask(f"{endpoint}/models", "s3", "PUT")
            key, secret = (
                re.findall(f"<{name}>(.*)</{name}>", made)[0] for name in ("AccessKeyId", "SecretAccessKey")
            )
            yield {"endpoint": endpoint, "region": REGION, "access_key_id": key, "secret_access_key": secret}
        finally:
            server.terminate()


def tensors() -> dict[str, np.ndarray]:
    """Four tensors of 5 MiB."""
    generator = np.random.default_rng(5)
    return {name: generator.integers(0, 256, 5 << 20, np.uint8) for name in ("a", "b", "c", "d")}


def assert_same(loaded: dict[str, np.ndarray], saved: dict[str, np.ndarray]) -> None:
    assert set(loaded) == set(saved)
    assert all(np.array_equal(loaded[name], saved[name]) for name in saved)


def test_moto_takes_what_is_signed_and_has_it_again(store: hoistway.StoreOptions) -> None:
    whole = tensors()
    for saved, parts in (({"a": whole["a"][:1000]}, 1), (whole, 3)):
        url = f"s3://models/saved & co+/{parts}.safetensors"
        assert hoistway.save_file(saved, url, store=store).parts == parts
        assert_same(hoistway.load_file(url, framework="numpy", store=store), saved)
    for _ in range(2):
        hoistway.save_sharded(whole, "s3://models/set/", max_shard_size=11 << 20, store=store)
        assert_same(hoistway.load_file("s3://models/set/", framework="numpy", store=store), whole)


def test_loads_from_moto_are_those_of_disk(tmp_path: Path, store: hoistway.StoreOptions) -> None:
    def put(name: str, data: bytes) -> None:
        # So many requests are not checked.
        for url, method, body in (
            ("moto-api/reset-auth", "POST", b"inf"),
            (f"models/{name}", "PUT", data),
            ("moto-api/reset-auth", "POST", b"0"),
        ):
            ask(f"{store['endpoint']}/{url}", "s3", method, body)

    assert_loads_are_those_of_disk(tmp_path / "corpus", put, "s3://models/", store)


def test_moto_refuses_another_key_and_a_save_that_it_denies_leaves_nothing(
    store: hoistway.StoreOptions,
) -> None:
    other: hoistway.StoreOptions = {**store, "secret_access_key": "another"}
    with pytest.raises(PermissionError, match="SignatureDoesNotMatch"):
        hoistway.save_file({"a": tensors()["a"]}, "s3://models/a.safetensors", store=other)
    with pytest.raises(PermissionError, match="AccessDenied"):
        hoistway.save_sharded(tensors(), "s3://models/denied/", max_shard_size=11 << 20, store=store)
    with pytest.raises(errors.CheckpointNotFoundError, match="holds no"):
        hoistway.load_file("s3://models/denied/", framework="numpy", store=store)
