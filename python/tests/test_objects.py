"""Checkpoints in an object store: a server of the tests that fails on demand stands for it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hoistway
import numpy as np
import pytest
from conftest import serving, write_model
from hoistway import errors
from interrupting import open_links, wait_until

TENSORS = {"a": ("F32", [1000, 1003]), "b": ("U8", [5]), "c": ("F16", [2000, 2001])}


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hoistway.StoreOptions]:
    """A store with a model in a folder, and a damaged file."""
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    write_model(folder / "model.safetensors", TENSORS)
    (tmp_path / "models" / "bad.safetensors").write_bytes(b"not a model" * 9)
    with serving(tmp_path) as endpoint:
        yield {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "canary"}


def test_objects_are_loaded_opened_and_streamed(store: hoistway.StoreOptions, tmp_path: Path) -> None:
    expected = hoistway.load_file(tmp_path / "models" / "llama", framework="numpy")
    loaded = hoistway.load_file("s3://models/llama/", framework="numpy", store=store)
    streamed = hoistway.iter_tensors("s3://models/llama/", framework="numpy", store=store)
    with hoistway.open("s3://models/llama/model.safetensors", framework="numpy", store=store) as checkpoint:
        part = checkpoint.get_slice("a")[7:9]
        assert checkpoint.files() == ["s3://models/llama/model.safetensors"]
    assert np.array_equal(part.view(np.uint8), expected["a"][7:9].view(np.uint8))
    for tensors in (loaded, dict(streamed)):
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.tobytes() == expected[name].tobytes()
    assert [carrier.route for carrier in loaded.report.carriers] == ["http"]
    assert "canary" not in str(loaded.report)


def test_doctor_asks_the_store_that_the_options_name(store: hoistway.StoreOptions) -> None:
    checks = hoistway.doctor("s3://models/llama/", store=store)
    found = {check["name"].removeprefix("s3://models/llama/: "): check for check in checks}
    for name in ("server", "clock", "credentials", "access", "version", "speed"):
        assert found[name]["status"] == "ok", str(checks)
    assert store["endpoint"] in found["server"]["finding"]
    assert found["credentials"]["finding"] == "an access key of the store options"
    assert "canary" not in str(checks)
    missing = hoistway.doctor("s3://models/none", store=store)
    assert "s3://models/none: access" in missing.verdict


def test_a_second_load_comes_from_the_cache_of_the_node(
    store: hoistway.StoreOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hoistway.load_file(tmp_path / "models" / "llama", framework="numpy")
    cache = tmp_path / "cache"
    # However full the drive is.
    monkeypatch.setenv("HOISTWAY_CACHE_BYTES", "1GiB")
    hoistway.load_file("s3://models/llama/", framework="numpy", store=store, cache=cache)
    # The end of a load waits for writes to the cache, but not for long.
    for _ in range(10):
        again = hoistway.load_file("s3://models/llama/", framework="numpy", store=store, cache=cache)
        if [carrier.route for carrier in again.report.carriers] == ["node-cache"]:
            break
    monkeypatch.setenv("HOISTWAY_CACHE", str(cache))
    streamed = hoistway.iter_tensors("s3://models/llama/", framework="numpy", store=store, route="node-cache")
    for tensors in (again, dict(streamed)):
        assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {
            name: tensor.tobytes() for name, tensor in expected.items()
        }
    assert [carrier.route for carrier in again.report.carriers] == ["node-cache"]
    with pytest.raises(errors.OptionError, match="cache cannot be"):
        hoistway.load_file("s3://models/llama/", framework="numpy", store=store, cache=tmp_path / "models")
    monkeypatch.setenv("HOISTWAY_CACHE_BYTES", "many")
    with pytest.raises(errors.OptionError, match="HOISTWAY_CACHE_BYTES"):
        hoistway.load_file("s3://models/llama/", framework="numpy", store=store)


def test_the_environment_names_the_store(
    store: hoistway.StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    assert hoistway.load_file("s3://models/llama/", framework="raw").keys() == TENSORS.keys()


def test_errors_are_those_of_files_and_hold_no_secret(store: hoistway.StoreOptions) -> None:
    url = f"{store['endpoint']}/models/none.safetensors?X-Amz-Signature=canary"
    with pytest.raises(FileNotFoundError, match="no such object") as missing:
        hoistway.load_file(url, framework="raw")
    with pytest.raises(errors.FormatError) as bad:
        hoistway.load_file("s3://models/bad.safetensors", framework="raw", store=store)
    with pytest.raises(errors.OptionError, match="store cannot be 'colour'") as option:
        hoistway.load_file("s3://models/llama/", framework="raw", store={"colour": "canary"})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(errors.OptionError, match=r"no such option \(did you mean 'endpoint'\?\)"):
        hoistway.load_file("s3://models/llama/", framework="raw", store={"endpiont": "canary"})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(errors.RouteUnavailableError) as route:
        hoistway.load_file("s3://models/llama/", framework="raw", store=store, route="cached")
    for error in (missing, bad, option, route):
        assert "canary" not in str(error.value) + repr(error.value)
    with pytest.raises(errors.OptionError, match="pass the URL as text"):
        hoistway.load_file(Path("s3://models/llama"), framework="raw", store=store)
    assert bad.value.path == "s3://models/bad.safetensors"  # type: ignore[attr-defined]


def test_a_bit_that_changes_on_the_way_is_an_error_that_names_the_object(
    store: hoistway.StoreOptions, tmp_path: Path
) -> None:
    def load(store: hoistway.StoreOptions) -> Any:
        # No load waits for what the store says: the first ones may not be compared.
        while True:
            loaded = hoistway.load_file("s3://models/llama/", framework="raw", store=store)
            found = loaded.report.as_dict()["checksums"]
            if all("had not said" not in own["reason"] for own in found["uncompared"]):
                return found

    found = load(store)
    assert (found["objects"], found["algorithms"], found["uncompared"]) == (1, ["CRC-64/NVME"], [])
    with serving(tmp_path, "", "0", "s3", "0", "flip") as endpoint:
        flipping: hoistway.StoreOptions = {"endpoint": endpoint, "anonymous": True}
        with pytest.raises(errors.DigestMismatchError, match=r"CRC-64/NVME.*checksums=off") as error:
            load(flipping)
    assert error.value.path == "s3://models/llama/model.safetensors"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dialect", "url", "credentials"),
    [
        ("google", "gs://models/llama/", {"anonymous": True}),
        ("azure", "az://models/llama/", {"account": "me", "account_key": "Y2FuYXJ5"}),
        ("azure", "abfs://models@me.dfs.core.windows.net/llama/", {"sas_token": "sig=canary"}),
    ],
)
def test_other_stores_have_their_own_urls_and_credentials(
    tmp_path: Path, dialect: str, url: str, credentials: dict[str, str]
) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    expected = write_model(folder / "model.safetensors", TENSORS)
    with serving(tmp_path, "", "0", dialect) as endpoint:
        store: hoistway.StoreOptions = {"endpoint": endpoint, **credentials}  # type: ignore[typeddict-item]
        loaded = hoistway.load_file(url, framework="numpy", store=store)
    same = hoistway.load_file(expected, framework="numpy")
    assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
        name: tensor.tobytes() for name, tensor in same.items()
    }
    assert [carrier.route for carrier in loaded.report.carriers] == ["http"]
    assert "canary" not in str(loaded.report) + repr(loaded.report)


def test_a_model_of_the_hub_is_one_commit_and_its_cached_files_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    first = write_model(model / "model-00001-of-00002.safetensors", {"a": TENSORS["a"]})
    write_model(model / "model-00002-of-00002.safetensors", {"b": TENSORS["b"]})
    weight_map = {"a": first.name, "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = hoistway.load_file(model, framework="numpy")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "canary")
    # Tests of other packages set it for the process.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving(model, "", "0", "hub") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        for cached in ({"http"}, {"http", "threads"}):
            with hoistway.open("hf://org/model", framework="numpy", route="auto") as checkpoint:
                assert [Path(file).name for file in checkpoint.files()] == list(weight_map.values())
                assert all(file.startswith(f"hf://org/model@{COMMIT}/") for file in checkpoint.files())
            loaded = hoistway.load_file("hf://org/model", framework="numpy")
            assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
                name: tensor.tobytes() for name, tensor in expected.items()
            }
            routes = {carrier.route for carrier in loaded.report.carriers}
            assert len(routes) == len(cached)
            assert "http" in routes
            assert "canary" not in str(loaded.report)
            # As the hub's own client keeps files: the second time one of them is not asked for.
            snapshot = cache / "models--org--model" / "snapshots" / COMMIT
            snapshot.mkdir(parents=True, exist_ok=True)
            shutil.copy(first, snapshot)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (cache / "models--org--model" / "refs").mkdir()
    (cache / "models--org--model" / "refs" / "main").write_text(COMMIT)
    offline = hoistway.load_file(f"hf://org/model/{first.name}", framework="numpy")
    assert offline["a"].tobytes() == expected["a"].tobytes()
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        hoistway.load_file("hf://org/model/model.safetensors.index.json", framework="numpy")


def test_ctrl_c_ends_an_opening_that_waits_for_a_server(tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors", TENSORS)
    script = """
        import os, signal, sys, time, hoistway
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threads = len(os.listdir("/proc/self/task"))
        try:
            print("started", flush=True)
            hoistway.open(sys.argv[1], framework="raw")
        except KeyboardInterrupt:
            # A thread that was joined may be listed for a moment more.
            for _ in range(3000):
                if len(os.listdir("/proc/self/task")) <= threads:
                    break
                time.sleep(0.01)
            else:
                raise SystemExit("threads of the opening are left") from None
            print("interrupted")
        """
    with serving(tmp_path, "", "60000") as endpoint:
        command = [sys.executable, "-c", textwrap.dedent(script), f"{endpoint}/model.safetensors"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "started\n"
            # It has no other socket than that to the server, which does not answer.
            wait_until(lambda: any(link.startswith("socket:") for link in open_links(child.pid)))
            child.send_signal(signal.SIGINT)
            output, error = child.communicate(timeout=40)
    assert child.returncode == 0, error
    assert output == "interrupted\n"


def test_what_is_saved_to_a_store_is_loaded_from_it(tmp_path: Path) -> None:
    tensors = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.ones((5, 7), np.float16)}
    with serving(tmp_path) as endpoint:
        store: hoistway.StoreOptions = {
            "endpoint": endpoint,
            "access_key_id": "key",
            "secret_access_key": "canary",
        }
        saved = hoistway.save_file(tensors, "s3://models/one.safetensors", {"format": "np"}, store=store)
        expected = hoistway.save_file(tensors, tmp_path / "local.safetensors", {"format": "np"})
        with hoistway.open("s3://models/one.safetensors", framework="numpy", store=store) as one:
            assert one.metadata() == {"format": "np"}
        sharded = hoistway.save_sharded(tensors, "s3://models/many", max_shard_size="1MB", store=store)
        for url in ("s3://models/one.safetensors", "s3://models/many/"):
            loaded = hoistway.load_file(url, framework="numpy", store=store)
            assert loaded.keys() == tensors.keys()
            for name, tensor in loaded.items():
                assert np.array_equal(tensor, tensors[name])
    assert saved.file_bytes == saved.uploaded_bytes == expected.file_bytes
    assert (saved.parts, saved.retries, saved.checksum) == (2, 0, "CRC-64/NVME")
    assert saved.synced
    assert sharded.paths[-1] == "s3://models/many/model.safetensors.index.json"
    assert "canary" not in str(saved) + repr(saved)


def test_a_save_that_the_store_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(3 << 20, np.float32)}
    arguments = ("", "0", "s3", "0", "none", "none", "none", "part:403")
    with serving(tmp_path, *arguments) as endpoint:
        store: hoistway.StoreOptions = {"endpoint": endpoint, "anonymous": True}
        with pytest.raises(PermissionError, match="status 403, AccessDenied") as error:
            hoistway.save_file(tensors, "s3://models/m.safetensors", store=store)
        assert uploads(endpoint) == []
    assert error.value.path == "s3://models/m.safetensors"  # type: ignore[attr-defined]
    for url, match in [
        ("https://host/m.safetensors", "web servers are only read"),
        ("hf://org/model/m.safetensors", "the hub is only read"),
    ]:
        with pytest.raises(errors.OptionError, match=match):
            hoistway.save_file(tensors, url)


def test_ctrl_c_ends_a_save_that_waits_for_a_store_and_aborts_its_upload(tmp_path: Path) -> None:
    script = """
        import signal, sys, hoistway, numpy
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            tensors = {"a": numpy.zeros(3 << 20, numpy.float32)}
            store = {"endpoint": sys.argv[1], "anonymous": True}
            hoistway.save_file(tensors, "s3://models/m.safetensors", store=store)
        except KeyboardInterrupt:
            print("interrupted")
        """
    arguments = ("", "0", "s3", "0", "none", "none", "none", "part:stall")
    with serving(tmp_path, *arguments) as endpoint:
        command = [sys.executable, "-c", textwrap.dedent(script), endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            wait_until(lambda: uploads(endpoint) == ["m.safetensors"])
            begun = time.monotonic()
            child.send_signal(signal.SIGINT)
            output, error = child.communicate(timeout=60)
        assert (child.returncode, output) == (0, "interrupted\n"), error
        # The cleanup has ten seconds, and this machine may have been away for them.
        assert uploads(endpoint) == [] or time.monotonic() - begun >= 9


def test_ctrl_c_warns_of_an_upload_that_stays_open(tmp_path: Path) -> None:
    script = """
        import signal, sys, warnings, hoistway, numpy
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with warnings.catch_warnings(record=True) as caught:
            try:
                tensors = {"a": numpy.zeros(3 << 20, numpy.float32)}
                store = {"endpoint": sys.argv[1], "anonymous": True}
                hoistway.save_file(tensors, "s3://models/m.safetensors", store=store)
            except KeyboardInterrupt:
                print("interrupted")
        for one in caught:
            print(one.category.__name__, one.message)
        """
    arguments = ("", "0", "s3", "0", "none", "none", "none", "part:stall,abort:403")
    with serving(tmp_path, *arguments) as endpoint:
        command = [sys.executable, "-c", textwrap.dedent(script), endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            wait_until(lambda: uploads(endpoint) == ["m.safetensors"])
            begun = time.monotonic()
            child.send_signal(signal.SIGINT)
            output, error = child.communicate(timeout=60)
            waited = time.monotonic() - begun
        assert uploads(endpoint) == ["m.safetensors"]
    assert child.returncode == 0, error
    first, second = output.splitlines()
    assert first == "interrupted"
    assert second.startswith("RuntimeWarning after the interrupt: ")
    assert "could not be removed (" in second
    # The cleanup has ten seconds, and this machine may have been away for them.
    assert "the server denies access" in second or waited >= 9


def test_options_of_a_store_are_an_error_for_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for save in (hoistway.save_file, hoistway.save_sharded):
        with pytest.raises(errors.OptionError, match="store"):
            save({"a": np.zeros(3, np.float32)}, path, store={"endpoint": "http://127.0.0.1:1"})
    assert not path.exists()


def uploads(endpoint: str) -> list[str]:
    """The keys of the uploads that are open in the bucket ``models``."""
    with urllib.request.urlopen(f"{endpoint}/models?uploads", timeout=60) as answer:
        return re.findall("<Key>(.*?)</Key>", answer.read().decode())
