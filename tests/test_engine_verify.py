"""`turboquant verify` on a real engine."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant.demo import smollm2  # noqa: E402

COMMAND = [sys.executable, "-m", "turboquant.cli", "verify"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TURBOQUANT")}


def run(*arguments):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT)


def test_the_demo_model(tmp_path):
    """capture_only changes nothing; every layer has an error; stdout is JSON and nothing else."""
    done = run(smollm2(), "--preset", "k4v4", "--context", 320, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    (trial,) = found["trials"]
    assert found["calibration"] == "the package's text" and found["recommended"]["preset"] == "k4v4"
    assert trial["unchanged"] and trial["scored"] == 2 * (319 - 256)
    assert (trial["bytes_per_token"], trial["native_bytes_per_token"]) == (6120, 23040)
    assert 0 < trial["mean_kld"] < 0.01 and trial["top1"] > 0.9
    assert [layer["index"] for layer in trial["layers"]] == list(range(30))
    assert all(0 < layer["mean"] <= layer["worst"] < 0.3 for layer in trial["layers"])


@pytest.mark.parametrize(("context", "said"), [(256, "context=256 must be above 256"), (300, "300 are needed")])
def test_texts_that_are_too_short(tmp_path, context, said):
    (tmp_path / "short.txt").write_text("A few words.")
    done = run(smollm2(), "--preset", "k4v4", "--context", context, "--text", tmp_path / "short.txt")
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr.splitlines()[-1]
