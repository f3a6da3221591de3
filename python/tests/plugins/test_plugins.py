"""Plug-ins without their hosts: they import, refuse what they do not know, and read what is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hoistway.errors import FormatError, OptionError, RouteUnavailableError, TruncatedError
from hoistway.plugins import _versions, sglang
from hoistway.plugins._versions import TESTED
from hoistway.plugins._weights import Bar, Options, weights
from plugin_hosts import entry_points, install, logged
from safetensors.torch import save_file

HOSTS = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}
log = logging.getLogger("hoistway.plugins.test")


def read(files, options=None, *, wanted=lambda _: True, prefix="", shown=False):
    return weights(
        [str(file) for file in files],
        options or Options({}),
        prefix=prefix,
        device="cpu",
        wanted=wanted,
        group=None,
        bar=Bar(shown),
        log=log,
    )


@pytest.fixture
def shards(tmp_path):
    """Eleven shards of a tensor each, more than one digit counts."""
    files = [tmp_path / f"model-{part}-of-11.safetensors" for part in range(1, 12)]
    for part, file in enumerate(files, 1):
        save_file({f"layer.{part}": torch.full((1024,), part, dtype=torch.bfloat16)}, file)
    return files


@pytest.mark.parametrize(("group", "host"), HOSTS.items())
def test_an_installation_has_the_entry_point_that_the_host_looks_for(tmp_path, monkeypatch, group, host):
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (point for point in importlib.metadata.entry_points(group=group) if point.name == "hoistway")
    assert found.value == entry_points()[group]["hoistway"]
    assert found.load() is importlib.import_module(f"hoistway.plugins.{host}").register


@pytest.mark.parametrize("host", HOSTS.values())
def test_without_its_host_a_plugin_imports_and_says_that_it_registered_nothing(host):
    script = f"""
import sys
sys.modules["{host}"] = None
import hoistway.plugins.{host} as plugin
plugin.register()
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    name, tested = TESTED[host]
    assert f"load format 'hoistway' is not registered, as this version of {name} (" in ran.stderr
    assert f"The format was tested with {name} {tested}: install that version, or use" in ran.stderr


def test_a_sglang_without_what_the_loader_is_made_of_is_a_clear_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "hoistway.plugins._sglang_loader", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.configs.load_config", None)
    named = types.SimpleNamespace(load_format="hoistway")
    with pytest.raises(ImportError, match=r"this version of SGLang \(.*load_config.*tested with SGLang"):
        sglang.name_to_class(lambda config: None, named)
    assert named.load_format == "hoistway"
    with pytest.raises(ImportError, match="tested with SGLang"):
        _ = sglang.HoistwayModelLoader
    other = types.SimpleNamespace(load_format="auto")
    sglang.name_to_class(lambda config: setattr(config, "is_checked", True), other)
    assert other.is_checked


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("0.30.2", "the tier HoistwayTier needs vLLM 0.31 or later, and this version of vLLM (0.30.2) lacks"),
        ("0.40.0", "the tier HoistwayTier needs vLLM, and this version of vLLM (0.40.0) lacks what it uses"),
    ],
)
def test_a_vllm_without_tiers_is_an_error_that_says_what_is_known(found, says):
    script = f"""
import importlib.metadata, sys
importlib.metadata.version = lambda package: "{found}"
sys.modules["vllm"] = None
try:
    import hoistway.kv.adapters.vllm
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(says)
    assert f"It was tested with vLLM {TESTED['vllm'][1]}: install that version" in ran.stdout


@pytest.mark.parametrize(
    ("found", "older"),
    [
        ("0.30.0", True),
        ("0.30.1rc2.dev3+g1234", True),
        ("0.31.0", False),
        ("0.31.0.dev5", False),
        ("1.0", False),
        # What did not run, and what says nothing.
        ("0.27.0", False),
        ("0.0.0.dev1", False),
        ("dev", False),
    ],
)
def test_only_a_version_that_ran_is_taken_for_older(monkeypatch, found, older):
    monkeypatch.setattr(_versions, "version", lambda package: found)
    assert _versions.is_older("vllm", "0.31") is older


def test_without_what_the_loader_asks_sglang_registers_nothing(monkeypatch):
    has = {
        "arg_groups.choices": ("LOAD_FORMAT_CHOICES", "add_load_format_choices"),
        "arg_groups.overrides": ("declare_resolution", "resolving_view"),
        "arg_groups.resolution_hooks": ("register_resolution_hook",),
        "plugins.hook_registry": ("HookRegistry", "HookType"),
        "runtime_context": ("get_parallel",),
    }
    for module, names in has.items():
        path = ["sglang", "srt", *module.split(".")]
        for end in range(1, len(path)):
            monkeypatch.setitem(sys.modules, ".".join(path[:end]), types.ModuleType(path[end - 1]))
        found = types.ModuleType(path[-1])
        vars(found).update(dict.fromkeys(names, None))
        monkeypatch.setitem(sys.modules, ".".join(path), found)
    with logged("hoistway.plugins.sglang") as lines:
        sglang.register.__wrapped__()
    (line,) = lines
    assert line.startswith("load format 'hoistway' is not registered, as this version of SGLang (")
    assert "cannot import name 'get_model'" in line


@pytest.mark.parametrize("host", TESTED)
def test_the_versions_that_messages_and_extras_name_are_those_that_tests_run(host):
    root = Path(__file__).parents[3]
    _, tested = TESTED[host]
    assert (root / "testkit/hosts" / f"{host}.txt").read_text().startswith(f"{host}=={tested} ")
    assert f"| {tested} |" in (root / "docs" / f"{host}.md").read_text()
    if host == "vllm":
        assert f'vllm = ["vllm>={tested}"]' in (root / "pyproject.toml").read_text()


def test_a_key_that_is_not_known_is_an_error_that_lists_those_that_are():
    with pytest.raises(
        OptionError, match=r"cannot have 'rout': its keys are .*max_in_flight.* route, .*threads"
    ):
        Options.parse({"rout": "auto"})
    with pytest.raises(OptionError, match="cannot have 'dtype'"):
        Options.parse({"dtype": "float16"})


@pytest.mark.parametrize("extra", [{"share": "everyone"}, {"progress": "yes"}, "route=auto"], ids=str)
def test_values_that_mean_nothing_are_errors(extra):
    with pytest.raises(OptionError, match="cannot be"):
        Options.parse(extra)


def test_keys_reach_the_load_or_those_who_share_it():
    options = Options.parse(
        {"route": "threads", "threads": 3, "strategy": "own", "timeout": 9, "max_in_flight": 5, "theirs": 1},
        ("theirs",),
    )
    assert options.load == {"route": "threads", "threads": 3}
    assert options.shared == {"strategy": "own", "timeout": 9}
    assert options.max_in_flight == 5


def test_weights_come_in_the_natural_order_of_their_files(shards):
    given = list(read(reversed(shards), prefix="model."))
    assert [name for name, _ in given] == [f"model.layer.{part}" for part in range(1, 12)]
    assert all((tensor == part).all() for part, (_, tensor) in enumerate(given, 1))


def test_a_line_of_the_log_says_how_they_came(shards):
    with logged(log.name) as lines:
        list(read(shards, Options({"route": "threads", "direct": "never"})))
    (line,) = lines
    assert line.startswith("hoistway: 11 tensors, 22.0 KiB to cpu in ")
    assert line.endswith(
        "; threads buffered 100%; not used: direct reads: switched off by the option direct=never"
    )


def test_what_is_not_wanted_is_not_read(shards):
    with logged(log.name) as lines:
        given = list(read(shards, wanted=lambda name: name.endswith(("1", "3"))))
    assert [name for name, _ in given] == ["layer.1", "layer.3", "layer.11"]
    assert lines[0].startswith("hoistway: 3 tensors, 6.0 KiB")


def test_an_empty_selection_yields_no_tensors(shards):
    assert list(read(shards, wanted=lambda _: False)) == []


def test_the_bar_counts_tensors_and_the_user_decides_whether_there_is_one(shards, capsys):
    list(read(shards, shown=True))
    assert "11/11" in capsys.readouterr().err
    list(read(shards, Options({}, progress=False), shown=True))
    assert capsys.readouterr().err == ""
    list(read(shards, Options({}, progress=True)))
    assert "11/11" in capsys.readouterr().err


def test_a_route_that_cannot_carry_them_is_an_error(shards):
    with pytest.raises((RouteUnavailableError, OptionError), match="gds"):
        list(read(shards, Options({"route": "gds"})))


def test_a_shard_that_was_cut_short_is_an_error_that_names_it(shards):
    shards[4].write_bytes(shards[4].read_bytes()[:-1])
    with pytest.raises(TruncatedError) as error:
        list(read(shards))
    assert str(shards[4]) in str(error.value)
    assert error.value.tensor == "layer.5"


@pytest.mark.parametrize(
    ("name", "advice"), [("pytorch_model.bin", "auto"), ("model.gguf", "vllm-gguf-plugin")]
)
def test_other_formats_are_errors_that_say_what_to_use(shards, name, advice):
    other = shards[0].with_name(name)
    with pytest.raises(FormatError, match=advice) as error:
        list(read([other]))
    assert error.value.path == str(other)
