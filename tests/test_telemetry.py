"""The metrics: what a worker writes is what the endpoint's process shows, and the dashboard shows nothing else."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner
from helpers import normal

prometheus_client = pytest.importorskip("prometheus_client")

from turboquant.integration import compat, telemetry  # noqa: E402
from turboquant.integration.vllm import install_turboquant_hooks  # noqa: E402

ROOT = Path(__file__).parent.parent
FIGURES = telemetry.Figures("k4v4", "native", "none", 28, 2, 61.0, 230.0, 1000, 61000, 700, 80, 512, 192)
PLACE = {"engine": "0", "rank": "1"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where workers write."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(telemetry.METRICS_FOLDER, str(tmp_path / "metrics"))
    return str(tmp_path / "metrics")


def shown(folder):
    """Values by name and own labels."""
    found = {}
    for family in telemetry.FolderCollector(folder).collect():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in telemetry.LABELS]
            found[sample.name, *sorted(labels)] = sample.value
    return found


# ---- writing ---------------------------------------------------------------------------------------------------
def test_figures_arrive(folder):
    telemetry.write_figures(telemetry.Writer(PLACE), FIGURES)
    found = shown(folder)
    assert found["turboquant_layers", "compressed"] == 28 and found["turboquant_layers", "native"] == 2
    assert found["turboquant_info", "k4v4", "native", "none"] == 1
    assert found["turboquant_memory_bytes", "pages"] == 61000 and found["turboquant_capacity_tokens",] == 1000
    (family,) = (x for x in telemetry.FolderCollector(folder).collect() if x.name == "turboquant_capacity_tokens")
    assert family.samples[0].labels == PLACE and family.documentation == telemetry.METRICS[family.name].help


def test_the_newest_figure_counts_and_counters_add_up(folder):
    for engine in range(2):  # one after the other in a process
        writer = telemetry.Writer(PLACE)
        writer.write("turboquant_capacity_tokens", 100 + engine)
        telemetry.write_counters(writer, "layer", 10, 30, 20)
        telemetry.write_counters(writer, "layer", 11, 33, 22)
    found = shown(folder)
    assert found["turboquant_capacity_tokens",] == 101
    assert found["turboquant_tokens_encoded_total", "layer"] == 22
    assert found["turboquant_tokens_read_total", "exact", "layer"] == 44
    assert found["turboquant_tokens_read_total", "compressed", "layer"] == 22


def test_vllms_own_folder_comes_first(folder, monkeypatch, tmp_path):
    """Where several API servers share it, nothing else is read."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "vllm"))
    telemetry.Writer(PLACE).write("turboquant_capacity_tokens", 7)
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.multiprocess.MultiProcessCollector(registry)
    assert b'turboquant_capacity_tokens{engine="0",rank="1"} 7.0' in prometheus_client.generate_latest(registry)
    assert not os.path.exists(folder)


def test_without_an_endpoint_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv(telemetry.METRICS_FOLDER, raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    telemetry.write_figures(telemetry.Writer(PLACE), FIGURES)


def test_labels_that_do_not_belong_to_a_metric(folder):
    with pytest.raises(ValueError, match="zip"):
        telemetry.Writer(PLACE).write("turboquant_capacity_tokens", 7, "pages")


def test_the_meter_counts_exact_reads_a_step_late(folder):
    """As on a GPU, whose count is on its way while the next step is planned."""
    meter = telemetry.Meter(telemetry.Writer(PLACE), "layer", torch.device("cpu"))
    present = torch.zeros(3, 8, dtype=torch.bool)
    present[0, :5] = present[1, :2] = True
    for step in range(1, 4):
        meter.step([(0, 1, 9), (1, 4, 2), (5, 0, 100)], present)
        found = shown(folder)
        assert found["turboquant_tokens_encoded_total", "layer"] == 5 * (step - 1)
        assert found["turboquant_tokens_read_total", "exact", "layer"] == 7 * (step - 1)
        assert found["turboquant_tokens_read_total", "compressed", "layer"] == 4 * (step - 1)
    assert (meter.tokens_encoded, meter.tokens_read, meter.tokens_read_exact) == (15, 33, 21)


# ---- the endpoint's process ------------------------------------------------------------------------------------
OFFER = """
import os, sys
from turboquant.integration import activation, telemetry
telemetry.offer(); telemetry.offer()
folder = os.environ[activation.METRICS_FOLDER]
assert not os.path.exists(folder)
if os.fork() == 0:
    telemetry.Writer({"engine": "0", "rank": "0"}).write("turboquant_capacity_tokens", 5)
    sys.exit()
os.wait()
import prometheus_client
print(folder)
print(prometheus_client.generate_latest().decode())
activation.check_variables()
"""


def test_a_process_shows_what_its_children_write():
    done = subprocess.run([sys.executable, "-c", OFFER], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, *lines = done.stdout.splitlines()
    assert lines.count('turboquant_capacity_tokens{engine="0",rank="0"} 5.0') == 1
    assert not os.path.exists(folder)  # it is removed at the end, not by the child


def offers():
    telemetry.offer()
    return bool(telemetry._collectors)


def test_children_and_several_api_servers_offer_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(telemetry.METRICS_FOLDER, "the parent's")
    monkeypatch.setattr(telemetry, "_collectors", [])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert not pool.apply(offers)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert not offers() and os.environ[telemetry.METRICS_FOLDER] == "the parent's"


# ---- hooks -----------------------------------------------------------------------------------------------------
def test_the_hooks_report_errors_and_tokens(folder, monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")
    runner = FakeRunner({f"layers.{i}": FakeLayer() for i in range(2)})
    engine = FakeEngine(runner, monkeypatch)
    with install_turboquant_hooks(runner, mode="capture_only", shadow_interval=1, buffer_size=4, sink_size=0):
        rows = [normal(40, heads, 64, seed=heads) for heads in (4, 2, 2)]
        for start, end in ((0, 20), (20, 40)):
            engine.step([([3, 7, 5], end, *(x[start:end] for x in rows))])
    found = shown(folder)
    assert (
        found["turboquant_info", "hooks", "k4v4", "none"] == 1 or found["turboquant_info", "k4v4", "hooks", "none"] == 1
    )
    assert found["turboquant_tokens_encoded_total", "layers.0"] == 40
    assert not any(key[-1] == "layers.1" for key in found if key[0] != "turboquant_layer_error")
    for layer in ("layers.0", "layers.1"):
        assert 0 < found["turboquant_layer_error", layer] < 0.2


# ---- the dashboard ---------------------------------------------------------------------------------------------
def dashboard():
    return json.loads((ROOT / "dashboards/turboquant.json").read_text())


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def exported():
    return {f"{name}_total" if metric.kind == "counter" else name for name, metric in telemetry.METRICS.items()}


def test_the_dashboard_is_what_its_script_makes():
    before = (ROOT / "dashboards/turboquant.json").read_bytes()
    subprocess.run([sys.executable, "dashboards/make.py"], cwd=ROOT, check=True)
    assert (ROOT / "dashboards/turboquant.json").read_bytes() == before


def test_the_dashboard_uses_exported_metrics_and_all_of_them():
    used = {name for text in expressions() for name in re.findall(r"\bturboquant_\w+", text)}
    assert used == exported()


def test_the_dashboards_labels_exist():
    labels = {*telemetry.LABELS, *(label for metric in telemetry.METRICS.values() for label in metric.labels)}
    panels = dashboard()["panels"]
    legends = {label for p in panels for t in p["targets"] for label in re.findall(r"{{(\w+)}}", t["legendFormat"])}
    matched = {label for text in expressions() for label in re.findall(r"[{,](\w+)=", text)}
    grouped = {label for text in expressions() for label in re.findall(r"(?:by|ignoring) ?\((\w+)\)", text)}
    assert legends | matched | grouped <= labels


def test_the_dashboards_vllm_metrics_exist():
    loggers = pytest.importorskip("vllm.v1.metrics.loggers")
    source = Path(loggers.__file__).read_text()
    used = {name for text in expressions() for name in re.findall(r"\bvllm:\w+", text)}
    assert used and all(f'"{name.removesuffix("_total")}"' in source for name in used)
