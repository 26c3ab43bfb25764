"""`benchmark.py engine`: its arithmetic, and a run on the CPU engine."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from turboquant.integration import engine_benchmark as bench

SCRIPT = Path(__file__).parent.parent / "benchmark.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module
    spec.loader.exec_module(module)
    return module


LOAD = bench.Load(rate=2.0, requests=6, shared=20, own=10, output=4, sharing=2)


def test_requests_of_a_load_ask_about_documents_in_turn():
    documents, ids = ([p["prompt_token_ids"] for p in part] for part in LOAD.prompts(random.Random(0), 1000))
    assert len(ids) == 6 and {len(i) for i in ids} == {30}
    assert [i[:20] for i in ids] == documents * 2 and len(set(map(tuple, documents))) == 3
    assert len({tuple(i[20:]) for i in ids}) == 6


def test_requests_arrive_at_the_rate_asked_for():
    moments = bench.arrivals(bench.Load(50.0, 4000, 1, 1, 1), random.Random(0))
    assert moments == sorted(moments) and moments[0] == 0.0
    assert moments[-1] == pytest.approx(4000 / 50, rel=0.05)


class FakeEngine:
    """Produces a token per running request and step."""

    def __init__(self):
        self.running, self.batches = {}, []

    def add_request(self, name, prompt, params):
        self.running[name] = 0

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        from types import SimpleNamespace

        self.batches.append(len(self.running))
        outputs = []
        for name in list(self.running):
            self.running[name] += 1
            outputs.append(SimpleNamespace(
                request_id=name, outputs=[SimpleNamespace(token_ids=[0] * self.running[name])]))  # fmt: skip
            if self.running[name] == LOAD.output:
                del self.running[name]
        return outputs


def test_a_load_is_served_to_the_end(monkeypatch):
    monkeypatch.setattr(bench, "greedy", lambda count: count)
    engine = FakeEngine()
    llm = type("LLM", (), {"llm_engine": engine})
    requests = bench.serve(llm, LOAD, LOAD.prompts(random.Random(0), 100)[1], [0.0, 0.0, 0.01, 0.02, 0.03, 0.04])
    assert [request.tokens for request in requests] == [LOAD.output] * 6
    assert all(request.arrival <= request.first <= request.last for request in requests)
    assert max(engine.batches) >= 2


def test_percentiles_are_values_that_occurred():
    values = [float(v) for v in range(1, 101)]
    assert [bench.percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert bench.percentile([3.0], 0.99) == 3.0


def test_case_survives_the_way_to_its_process():
    case = bench.Case("k4v4", None, bench.Geometry(layers=2), ((2, 64),), (2, 6), 1, (LOAD,), {"seed": 3})
    assert bench.Case.from_json(case.to_json()) == case
    assert case.max_len == 64 + 6 + 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contenders", "bf16,k4v5"], "did you mean 'k4v4'"),
        (["--shapes", "4by4"], "BATCHxLENGTH"),
        (["--lengths", "9", "9"], r"lengths=\(9, 9\)"),
    ],
)
def test_bad_arguments_are_named(script, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "engine", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    import re

    assert re.search(said, capsys.readouterr().err)


def test_plot(script, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"contender": "bf16", "batch": b, "length": 64, "decode_ms_step": 2.0 * b} for b in (1, 4)]
    report = {"engines": {"bf16": {}, "k4v4": {}}, "rows": rows, "serving": []}
    script.plot_engines(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_pictures_of_the_readme(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(SCRIPT.parent / "benchmarks"))
    import plots

    plots.write(tmp_path)
    for name in plots.PLOTS:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG" and (SCRIPT.parent / "benchmarks" / name).is_file()


def test_starts_are_timed_without_compiled_kernels_and_again(script, monkeypatch):
    def run_case(case, environment):
        folder = Path(environment["TRITON_CACHE_DIR"])
        found = {"start_s": 2.0 if any(folder.iterdir()) else 9.0, "capacity_tokens": 1}
        (folder / "kernel").touch()
        assert case.shapes == case.loads == () and bench.engine_arguments(case)["max_model_len"] == 2 + 72 + 16
        yield "engine", found

    monkeypatch.setattr(script, "run_case", run_case)
    found = list(script.measure_starts(bench.Case("k4v4", shapes=((1, 2),), loads=(LOAD,))))
    assert found == [
        ("starts", {"contender": "k4v4", "cache": "empty", "start_s": 9.0}),
        ("starts", {"contender": "k4v4", "cache": "filled", "start_s": 2.0}),
    ]


@pytest.mark.engine
def test_engines_on_the_cpu(tmp_path):
    pytest.importorskip("vllm")
    from turboquant.demo import smollm2

    file = tmp_path / "engine.json"
    options = {"max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    command = [
        sys.executable, str(SCRIPT), "engine", "--model", str(smollm2()), "--contenders", "bf16,k4v4", "--shapes",
        "2x96,1000x1000", "--lengths", "2", "10", "--repeats", "1", "--rates", "4", "--load", "4", "64", "32", "4",
        "--engine", json.dumps(options), "--json", str(file),
    ]  # fmt: skip
    import os

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(file.read_text())
    assert not report["failed"]
    assert report["engines"]["k4v4"]["capacity_tokens"] > 3.7 * report["engines"]["bf16"]["capacity_tokens"]
    measured = [row for row in report["rows"] if "skipped" not in row]
    assert [(row["contender"], row["batch"], row["length"]) for row in measured] == [("bf16", 2, 96), ("k4v4", 2, 96)]
    assert all(row["prefill_tok_s"] > 0 and row["cached_prefix_s"] > 0 for row in measured)
    assert [row["requests"] for row in report["serving"]] == [4, 4] and "needs 1" in done.stdout
    assert all(row["output_tok_s"] > 0 for row in report["serving"])
