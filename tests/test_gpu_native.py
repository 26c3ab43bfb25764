"""The native route on real engines on CUDA devices: graphs, both runners, windows, hybrids, sleep, tensor parallel.

Skipped elsewhere.

TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_native.py writes DIR/native-gpu.json, or native-2-gpus.json
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gpu_engine import GRAPHS  # noqa: E402

SCRIPT = Path(__file__).with_name("gpu_engine.py")
EAGER, GRAPH = {"enforce_eager": True}, {"compilation_config": GRAPHS}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
PAIR = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
BUSY = {"num_gpu_blocks_override": 152}  # one of them is vLLM's own, and the prompts take all 152


def case(model="llama", preset="k4v4", runner="0", sleep=False, **engine):
    return {"model": model, "preset": preset, "runner": runner, "sleep": sleep, "engine": engine}


CASES = {
    "native": case(preset=None, **EAGER),
    "v1-eager": case(**EAGER),
    "v1-graphs": case(**GRAPH),
    "v2-eager": case(runner="1", **EAGER),
    "v2-graphs": case(runner="1", **GRAPH),
    "compiled": case(runner="1"),  # as vLLM has it where nothing is asked: torch.compile, piecewise and full graphs
    "k3v2-graphs": case(preset="k3v2", **GRAPH),
    "auto-graphs": case(preset="auto:4.5", **GRAPH),
    "ngram-graphs": case(**GRAPH, **NGRAM),
    "full pool": case(**EAGER, **BUSY),
    "sleep": case(sleep=True, **GRAPH, enable_sleep_mode=True),
    "gemma3 native": case("gemma3", None, **EAGER),
    "gemma3": case("gemma3", **GRAPH),
    "granite native": case("granite", None, **EAGER),
    "granite": case("granite", **GRAPH),
}
if torch.cuda.device_count() > 1:
    CASES |= {"native, two devices": case(preset=None, **GRAPH, **PAIR), "two devices": case(**GRAPH, **PAIR)}
    CASES |= {"auto, two devices": case(preset="auto:4.5", **GRAPH, **PAIR)}
ONE_DEVICE = {"native, two devices": "native", "two devices": "v1-graphs"}
OURS = [name for name, made in CASES.items() if made["preset"]]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All engines at once, each a process with a GiB for its cache."""
    folder, running = tmp_path_factory.mktemp("engines"), {}
    for name, made in CASES.items():
        files = [folder / f"{name}.{kind}" for kind in ("case", "json", "log")]
        files[0].write_text(json.dumps(made))
        with files[2].open("w") as log:
            command = [sys.executable, str(SCRIPT), str(files[0]), str(files[1])]
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), files
    found = {}
    for name, (process, files) in running.items():
        process.wait(timeout=400)
        found[name] = json.loads(files[1].read_text()) if files[1].exists() else files[2].read_text()[-2500:]
    if out := os.environ.get("TURBOQUANT_RESULTS"):
        devices = torch.cuda.device_count()
        Path(out, f"native-{'gpu' if devices == 1 else f'{devices}-gpus'}.json").write_text(
            json.dumps(figures(found), indent=1) + "\n"
        )
    return found


def divergence(p, q):
    return sum(math.exp(p[k]) * (p[k] - q[k]) for k in p if k in q)


def distance(reference, tested):
    """(mean KLD as long as the tokens before are the same, steps compared)"""
    found = []
    for a, b in zip(reference, tested, strict=True):
        for (token, p), (other, q) in zip(a, b, strict=True):
            found.append(divergence(p, q))
            if token != other:
                break
    return sum(found) / len(found), len(found)


def native_of(name):
    if "two devices" in name:
        return "native, two devices"
    return f"{CASES[name]['model']} native" if CASES[name]["model"] != "llama" else "native"


def figures(found):
    rows = {}
    for name, result in found.items():
        if isinstance(result, str):
            rows[name] = {"failed": result.strip().splitlines()[-1:]}
            continue
        row = {"blocks": result["blocks"], "block_size": result["block_size"], "graphs": result["config"]}
        row |= {key: result[key] for key in ("compiled", "grown_bytes")}
        row |= {f"kld_{key}": distance(result["first"], result[key]) for key in ("again", "alone")}
        reference = found[native_of(name)]
        if name in OURS and isinstance(reference, dict):
            row["kld_native"] = distance(reference["first"], result["first"])
            row |= {key: result["stats"][key] for key in ("bytes_per_token_native", "bytes_per_token_compressed")}
        row |= {f"kld_{key}": distance(result["first"], result[key]) for key in result if key.startswith("slept")}
        if isinstance(one := found.get(ONE_DEVICE.get(name, "")), dict):
            row["kld_one_device"] = distance(one["first"], result["first"])
        rows[name] = row
    command = "TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_native.py"
    from turboquant.integration.compat import vllm_version

    device = torch.cuda.get_device_name()
    return {"command": command, "device": device, "vllm": vllm_version(), "torch": torch.__version__, "engines": rows}


@pytest.fixture
def result(results, request):
    found = results[request.param]
    assert isinstance(found, dict), found
    return found


def decoded(name):
    return {"indirect": True, "argvalues": [name] if isinstance(name, str) else name, "argnames": "result"}


@pytest.mark.parametrize(**decoded(OURS))
def test_outputs_do_not_depend_on_prefix_hits_and_company(result):
    """Chunk borders decide what is exact, so close and not equal."""
    for key in ("again", "alone"):
        kld, steps = distance(result["first"], result[key])
        assert steps >= 30 and kld <= 0.01, key


@pytest.mark.parametrize(**decoded(OURS))
def test_nothing_is_compiled_and_nothing_grows_once_the_engine_has_started(result):
    assert not [name for name in result["compiled"] if "turboquant" in name]
    assert result["grown_bytes"] <= 1 << 16


@pytest.mark.parametrize("name", OURS)
def test_outputs_are_close_to_the_native_cache(results, name):
    for needed in (name, native_of(name)):
        assert isinstance(results[needed], dict), results[needed]
    kld, steps = distance(results[native_of(name)]["first"], results[name]["first"])
    assert steps >= 20 and kld <= (0.03 if CASES[name]["preset"] == "k3v2" else 0.01)


def test_graphs_and_runners_change_nothing(results):
    first = results["v1-eager"]["first"]
    for name in ("v1-graphs", "v2-eager", "v2-graphs"):
        assert distance(first, results[name]["first"])[0] <= 1e-4, name
        if "graphs" in name:
            assert "FULL" in results[name]["config"]


def test_pool_counts_compressed_pages(results):
    native = results["native"]["blocks"] * results["native"]["block_size"]
    for name, ratio in (("v1-graphs", 3.87), ("k3v2-graphs", 6.09)):
        assert results[name]["blocks"] * results[name]["block_size"] >= ratio * native


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_answer_as_one(results):
    """Sums over devices round in another order; the native cache's own difference is the measure."""
    apart = {name: distance(results[one]["first"], results[name]["first"])[0] for name, one in ONE_DEVICE.items()}
    assert apart["two devices"] <= 1e-3, apart


@pytest.mark.parametrize(**decoded("full pool"))
def test_a_full_pool_preempts(result):
    assert result["metrics"]["vllm:num_preemptions"] > 0


@pytest.mark.parametrize(**decoded("sleep"))
def test_sleep_leaves_the_answers_alone(result):
    for level in (1, 2):
        assert distance(result["first"], result[f"slept_{level}"])[0] <= 0.01


@pytest.mark.parametrize(**decoded("gemma3"))
def test_sliding_windows_are_compressed(result):
    assert len(result["stats"]["layers"]) == 6 and not result["stats"]["skipped"]


@pytest.mark.parametrize(**decoded("granite"))
def test_attention_of_hybrid_models_is_compressed(result):
    assert len(result["stats"]["layers"]) == 2 and not result["stats"]["skipped"]
