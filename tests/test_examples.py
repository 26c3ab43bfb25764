"""The examples run.  Those that need a server are run by tests/test_engine_server.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.engine
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TURBOQUANT")},
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"), "1"),
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run(name, *arguments):
    command = [sys.executable, f"examples/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_described():
    described = set(re.findall(r"\]\(([\w/.]+)\)", (ROOT / "examples/README.md").read_text()))
    assert described == {path.name for path in (ROOT / "examples").glob("*.py")} | {"lm_eval"}


def test_offline():
    pytest.importorskip("vllm")
    text = run("offline.py", "--preset", "k3v2")
    assert "Paris" in text and "bytes_per_token_compressed: 3960" in text and "calibration: at the start" in text


def test_rollout():
    pytest.importorskip("vllm")
    text = run("rollout.py")
    assert re.search(r"capture_only: mean error of attention 0\.0\d+", text) and "full_tq: " in text
    assert float(re.search(r"freed ([\d.]+) MiB", text)[1]) > 0


def test_transformers():
    pytest.importorskip("transformers")
    text = run("transformers_generate.py")
    assert "Paris" in text and "'pages': " in text


def test_lm_eval():
    pytest.importorskip("vllm")
    pytest.importorskip("lm_eval")
    text = run("evaluate.py", "--preset", "k4v4")
    found = json.loads(text[text.index('{\n "preset"') :])["results"]["capitals"]
    assert found["exact_match,none"] >= 0.75 and found["sample_len"] == 8
