"""KV of one checkpoint is not found with the weights of another, though these lie at the same path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_hosts import SMALL, random_bytes, sharded_checkpoint
from hoistway.errors import OptionError
from hoistway.kv.adapters import _weights
from hoistway.kv.adapters.lmcache import Client
from plugin_hosts import logged

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return sharded_checkpoint(tmp_path / "model")


def identity(model: Path | str, revision: str | None = None) -> str:
    files, _ = _weights.find(str(model), revision)
    return _weights.digest(files)


def trained_further(path: Path) -> None:
    """Other weights under the same header, in a file of the same size and age."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    # A tenth of the file.
    data[len(data) // 2 : len(data) // 2 + len(data) // 10] = random_bytes(len(data) // 10, 99)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_in(path: Path, old: str, new: str) -> None:
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))


def test_hidden_files_are_no_part_of_a_checkpoint(checkpoint: Path) -> None:
    before = identity(checkpoint)
    for name in ("._model-00001-of-00003.safetensors", "._model.safetensors.index.json"):
        (checkpoint / name).write_bytes(b"\0\x05\x16\x07")
    assert identity(checkpoint) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: trained_further(model / "model-00002-of-00003.safetensors"),
        lambda model: replaced_in(model / "model-00001-of-00003.safetensors", "layers.0", "layers.7"),
        lambda model: replaced_in(model / "model.safetensors.index.json", "layers.0", "layers.7"),
        lambda model: (model / "config.json").write_text('{"rope_theta": 1000000}'),
        lambda model: shutil.copy(
            model / "model-00003-of-00003.safetensors", model / "model-00004-of-00003.safetensors"
        ),
        lambda model: (model / "model-00003-of-00003.safetensors").unlink(),
    ],
    ids=["weights", "header", "index", "config", "a file more", "a file less"],
)
def test_another_checkpoint_at_the_same_path_has_another_identity(
    checkpoint: Path, change: Callable[[Path], object]
) -> None:
    before = identity(checkpoint)
    assert identity(checkpoint) == before
    change(checkpoint)
    assert identity(checkpoint) != before


def test_a_copy_elsewhere_has_the_same_identity(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    # What engines do not load does not count.
    (tmp_path / "copy" / "README.md").write_text("a copy")
    assert identity(tmp_path / "copy") == identity(checkpoint)


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.safetensors"])
def test_a_model_of_one_file_has_an_identity(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(random_bytes(3_000_000, 1))
    before = identity(path)
    trained_further(path)
    assert identity(path) != before


@pytest.mark.parametrize("size", [0, 1, 8, 5000])
def test_short_files_have_identities(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    found = set()
    for seed in range(3):
        path.write_bytes(random_bytes(size, seed))
        found.add(identity(path))
    assert len(found) == (3 if size else 1)


def hub(cache: Path, monkeypatch: pytest.MonkeyPatch, *commits: str) -> None:
    """A cache of the hub's with revisions of org/llama. The first is that of main."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    folder = cache / "models--org--llama"
    for seed, commit in enumerate(commits):
        sharded_checkpoint(folder / "snapshots" / commit, seed)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commits[0])


def test_a_repository_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(tmp_path, monkeypatch, COMMIT)
    snapshot = tmp_path / "models--org--llama" / "snapshots" / COMMIT
    assert identity("org/llama") == identity("org/llama", COMMIT) == identity(snapshot)
    assert _weights.find("org/other")[0] == []


def test_which_of_several_revisions_is_meant_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = COMMIT[::-1]
    hub(tmp_path, monkeypatch, COMMIT, other)
    assert identity("org/llama") == identity("org/llama", COMMIT) != identity("org/llama", other)
    assert _weights.find("org/llama", other)[1] == ""
    assert "2 revisions of org/llama" in _weights.find("org/llama")[1]


def test_lmcache_finds_no_objects_of_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    def client() -> Client:
        return Client(str(tmp_path / "kv"), **SMALL, checkpoint=str(checkpoint))

    first = client()
    first._blocks.store(["a"], [random_bytes(1000, 1)]).wait(20)
    first.close()
    second = client()
    assert second._blocks.lookup(["a"]) == [True]
    second.close()
    trained_further(checkpoint / "model-00001-of-00003.safetensors")
    third = client()
    assert third._blocks.lookup(["a"]) == [False]
    third.close()


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, why in ((tmp_path / "empty", "has no weights"), ("org/nothing", "is not a directory")):
        with pytest.raises(OptionError, match=f"checkpoint cannot be .*{why}"):
            Client(str(tmp_path / "kv"), **SMALL, checkpoint=str(path))
    with pytest.raises(OptionError, match="is the path of the weights, not 3"):
        Client(str(tmp_path / "kv"), **SMALL, checkpoint=3)


@pytest.mark.parametrize(("namespace", "warnings"), [({}, 1), ({"model": "llama@3"}, 0)])
def test_a_store_that_does_not_know_the_weights_says_so(
    tmp_path: Path, namespace: dict[str, str], warnings: int
) -> None:
    with logged("hoistway.kv") as messages:
        Client(str(tmp_path / "kv"), **SMALL, namespace=namespace).close()
    assert sum("does not depend on the weights" in message for message in messages) == warnings
