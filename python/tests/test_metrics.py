"""Metrics of loads, alone and beside those of KV stores, and the dashboard that shows them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import SMALL_STORE

DASHBOARD = Path(__file__).parents[2] / "packaging/grafana/hoistway.json"
# What Prometheus adds to each series it scrapes.
ADDED = {"instance", "job"}


def samples(text):
    prometheus_client = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = list(prometheus_client.text_string_to_metric_families(text))
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def summed(found, name, **labels):
    wanted = set(labels.items())
    return sum(value for (own, *has), value in found.items() if own == name and wanted <= set(has))


def save(path, count=2):
    hoistway.save_file({f"w{i}": np.ones(1 << 18, np.float32) for i in range(count)}, path)
    return path


def test_a_load_is_counted_when_it_ends(tmp_path):
    path = save(tmp_path / "model.safetensors")
    before = samples(hoistway.metrics())
    report = hoistway.load_file(path, framework="numpy", route="threads").report
    after = samples(hoistway.metrics())

    def more(name, **labels):
        return summed(after, name, **labels) - summed(before, name, **labels)

    assert more("hoistway_loads_total", outcome="ok") == 1
    assert more("hoistway_loads_total") == 1
    assert more("hoistway_load_tensors_total") == 2
    assert more("hoistway_load_bytes_total", route="threads", via="") == report.tensor_bytes == 2 << 20
    assert more("hoistway_load_read_bytes_total", route="threads") == report.read_bytes
    assert more("hoistway_load_reads_total") == sum(carrier.reads for carrier in report.carriers)
    assert more("hoistway_load_seconds_total") == pytest.approx(report.total_seconds, abs=1e-3)


def test_loads_that_fail_are_counted_apart(tmp_path):
    path = save(tmp_path / "model.safetensors", 8)
    before = samples(hoistway.metrics())
    with hoistway.open(path, framework="numpy") as checkpoint:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(hoistway.HoistwayError):
            checkpoint.load()
    after = samples(hoistway.metrics())
    failed = {"outcome": "failed"}
    assert (
        summed(after, "hoistway_loads_total", **failed) - summed(before, "hoistway_loads_total", **failed)
        == 1
    )
    ended = {"outcome": "ok"}
    assert summed(after, "hoistway_loads_total", **ended) == summed(before, "hoistway_loads_total", **ended)


def test_copies_into_memory_of_the_caller_are_loads(tmp_path):
    path = save(tmp_path / "model.safetensors")
    before = samples(hoistway.metrics())
    with hoistway.open(path, framework="numpy") as checkpoint:
        checkpoint.copy_into({"w0": np.zeros(1 << 18, np.float32)})
    after = samples(hoistway.metrics())
    for name, count in {"hoistway_loads_total": 1, "hoistway_load_bytes_total": 1 << 20}.items():
        assert summed(after, name) - summed(before, name) == count


@pytest.mark.skipif(sys.platform != "linux", reason="stores are for Linux")
def test_loads_and_several_stores_are_one_text(tmp_path):
    kv = hoistway.kv
    with kv.Store(tmp_path / "one", **SMALL_STORE) as one, kv.Store(tmp_path / "two", **SMALL_STORE) as two:
        for store in (one, two):
            blocks = store.namespace(model="llama@1", dtype="bfloat16", block_tokens=16)
            assert blocks.store([b"key"], [b"x" * 1000]).wait(30).ok
        text = hoistway.metrics(one, two, one)
        found = samples(text)
        two.close()
        assert two.root not in hoistway.metrics(one, two)
    assert re.findall("# (?:TYPE|EOF).*", text).count("# TYPE hoistway_kv_blocks gauge") == 1
    assert text.count("# EOF") == 1
    for store in (one, two):
        assert summed(found, "hoistway_kv_blocks", store=str(store.root)) == 1
    assert (
        summed(found, "hoistway_kv_namespace_info", model="llama@1", dtype="bfloat16", block_tokens="16") == 2
    )
    assert "# TYPE hoistway_loads counter" in text


@pytest.mark.skipif(sys.platform != "linux", reason="stores are for Linux")
def test_the_dashboard_asks_for_what_there_is(tmp_path):
    # In a process of its own, which has loaded something and had something refused.
    code = f"""
import hoistway, numpy
hoistway.save_file({{"w": numpy.ones(4)}}, {str(tmp_path / "m.safetensors")!r})
hoistway.load_file({str(tmp_path / "m.safetensors")!r}, framework="numpy")
far = dict(root={str(tmp_path / "far")!r}, capacity="64MiB", min_free=0)
with hoistway.kv.Store({str(tmp_path / "kv")!r}, **{SMALL_STORE!r}, far=far) as store:
    blocks = store.namespace(model="m")
    blocks.store([b"key"], [b"x" * 1000]).wait(30)
    print(hoistway.metrics(store), end="")
"""
    (tmp_path / "far").mkdir()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    labels: dict[str, set[str]] = {"hoistway_load_refusals_total": {"what"}}
    for name, *has in samples(result.stdout):
        labels.setdefault(name, set()).update(label for label, _ in has)
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    assert len(panels) == len({panel["id"] for panel in panels}) >= 15
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            names = re.findall(r"\bhoistway_\w+", query)
            assert names, query
            assert set(names) <= labels.keys(), query
            # A server loads once: the increase of a counter that begins with its full value is 0.
            rates = not any(name.startswith("hoistway_load") for name in names)
            assert ("rate(" in query) == (
                rates and any(name.endswith(("_total", "_bucket")) for name in names)
            )
            known = set().union(*(labels[name] for name in names)) | ADDED
            selected = re.findall(r"(\w+)=~?\"", query)
            listed = re.findall(r"(?:by|on|group_left) \(([^)]*)\)", query)
            grouped = [label.strip() for labels_of in listed for label in labels_of.split(",")]
            shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert {*selected, *grouped, *shown} <= known, query
            if "by (" in query:
                assert set(shown) <= set(grouped), query


def test_a_collector_has_loads_and_stores(tmp_path):
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    registry.register(hoistway.MetricsCollector())
    before = registry.get_sample_value("hoistway_loads_total", {"outcome": "ok"})
    hoistway.load_file(save(tmp_path / "model.safetensors"), framework="numpy")
    assert registry.get_sample_value("hoistway_loads_total", {"outcome": "ok"}) == before + 1
    assert b"# TYPE hoistway_load_bytes_total counter" in prometheus_client.generate_latest(registry)
