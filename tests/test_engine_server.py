"""vLLM's OpenAI server, started with nothing but the environment variable, and the official client."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from turboquant.demo import smollm2  # noqa: E402
from turboquant.integration.telemetry import METRICS  # noqa: E402

TIMEOUT = 180
ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def environment(preset):
    hidden = ("TRITON_INTERPRET", "VLLM_LOGGING_LEVEL")
    return {
        **{name: value for name, value in os.environ.items() if name not in hidden},
        "TURBOQUANT": preset,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, log): `vllm serve` with TURBOQUANT=k4v4."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = ["--served-model-name", "demo", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    options += ["--max-model-len", "1024", "--max-num-seqs", "16"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, str(smollm2()), *options], env=environment("k4v4"), stdout=file, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/health", process, log)
        yield address, log
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url, process, log):
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", timeout=TIMEOUT)


def test_the_log_names_layers_bytes_and_capacity(server):
    (line,) = [line for line in server[1].read_text().splitlines() if "turboquant k4v4:" in line]
    assert "30 layers compressed" in line and "tokens of capacity" in line and "6120 instead of 23040 bytes" in line


def test_completion_chat_and_streaming(client):
    text = client.completions.create(
        model="demo", prompt="The water cycle describes how water moves", max_tokens=8, temperature=0
    )
    assert text.choices[0].text.strip() and text.usage.completion_tokens == 8
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    chat = client.chat.completions.create(model="demo", messages=question, max_tokens=12, temperature=0)
    assert "Paris" in chat.choices[0].message.content
    stream = client.chat.completions.create(model="demo", messages=question, max_tokens=12, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 1 and "".join(pieces) == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("example", "package"),
    [("openai_client", "openai"), ("langchain_chat", "langchain_openai"), ("litellm_chat", "litellm")],
)
def test_examples_of_clients(server, example, package):
    """Each in a process of its own, as a user runs it."""
    pytest.importorskip(package)
    command = [sys.executable, ROOT / "examples" / f"{example}.py", "--url", f"{server[0]}/v1", "--model", "demo"]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    assert "Paris" in done.stdout, done.stderr[-2000:]


def test_many_clients_at_once(client):
    """32 requests for 16 places; each repeats its own number."""
    numbers = [str(1000 + 37 * i) for i in range(32)]

    def ask(number):
        prompt = f"Repeat: {number} {number} {number} " * 6
        return client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0).choices[0].text

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, numbers))
    for number, answer in zip(numbers, answers, strict=True):
        assert not [other for other in numbers if other != number and other in answer]
    assert sum(number in answer for number, answer in zip(numbers, answers, strict=True)) >= 28


def metrics(server):
    """Values of turboquant's metrics by name and labels, without those of the worker; the text of all."""
    text = urllib.request.urlopen(f"{server[0]}/metrics", timeout=30).read().decode()
    ours = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith("turboquant_") else ():
            assert sample.labels.pop("engine") == sample.labels.pop("rank") == "0"
            ours[sample.name, *(sample.labels[label] for label in METRICS[family.name].labels)] = sample.value
    return ours, text


def test_metrics_say_what_is_compressed(server, client):
    """The figures of the log, before and after requests; steps are counted one step late."""
    client.completions.create(model="demo", prompt="One more", max_tokens=2)
    found, text = metrics(server)
    assert "vllm:num_requests_running" in text and "vllm:kv_cache_usage_perc" in text
    assert found["turboquant_info", "k4v4", "native", "at the start"] == 1
    assert (found["turboquant_layers", "compressed"], found["turboquant_layers", "native"]) == (30, 0)
    assert (found["turboquant_token_bytes", "compressed"], found["turboquant_token_bytes", "native"]) == (6120, 23040)
    capacity = found["turboquant_capacity_tokens",]
    assert f"{capacity:.0f} tokens of capacity" in server[1].read_text()
    assert found["turboquant_memory_bytes", "pages"] == 6120 * capacity
    assert found["turboquant_exact_tokens", "request"] == 9 * 16 <= found["turboquant_exact_tokens", "engine"]
    assert found["turboquant_memory_bytes", "exact"] > 23040 * found["turboquant_exact_tokens", "engine"]
    assert {key[0].removesuffix("_total") for key in found} == set(METRICS) - {"turboquant_layer_error"}


def test_metrics_count_tokens(server, client):
    """300 tokens once, then 16 more, each of which reads 16 + 112 of those before it exactly."""
    group = "model.layers.0.self_attn.attn"

    def counters():
        """Behind a step of one token, by which those before it are written."""
        client.completions.create(model="demo", prompt=[1], max_tokens=1)
        found = metrics(server)[0]
        reads = (found["turboquant_tokens_read_total", group, kind] for kind in ("compressed", "exact"))
        return found["turboquant_tokens_encoded_total", group], *reads

    before = counters()
    client.completions.create(model="demo", prompt=list(range(1000, 1300)), max_tokens=17, temperature=0)
    encoded, compressed, exact = (after - was for after, was in zip(counters(), before, strict=True))
    assert encoded == 1 + 300 + 16 and exact == 16 * 128
    assert compressed == sum(range(300, 316)) - exact


def test_an_unknown_preset_does_not_start():
    done = subprocess.run(
        [*COMMAND, str(smollm2())], env=environment("k4v44"), capture_output=True, text=True, timeout=TIMEOUT
    )  # fmt: skip
    assert done.returncode != 0
    assert "unknown preset 'k4v44'" in done.stderr and "did you mean 'k4v4'?" in done.stderr
