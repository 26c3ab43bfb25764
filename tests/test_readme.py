"""The README: its tables are what the result files say, its commands and paths exist."""

import re
import sys
from pathlib import Path

import pytest

from turboquant.config import PRESETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
sys.path.insert(0, str(ROOT / "benchmarks"))
from tables import QUALITY, results, with_tables  # noqa: E402


def test_tables_are_what_the_results_say():
    assert with_tables(README) == README
    assert all(row["rel_err"] < 5e-3 for row in results("h200-kernels")["rows"] if row["contender"] in PRESETS)


def test_a_missing_marker_is_named():
    with pytest.raises(ValueError, match="table: engine"):
        with_tables(README.replace("<!-- table: engine -->", ""))


@pytest.mark.parametrize("preset", ["k4v4", "k3v2"])
def test_commands_of_the_proof_are_quoted(preset):
    assert f"`{results(f'proof-cpu-{preset}')['command']}`" in README.replace("\n", " ")


@pytest.mark.parametrize("name", QUALITY)
def test_commands_of_the_quality_are_quoted(name):
    assert f"`{results(name)['command']}`" in README


@pytest.mark.parametrize("name", ["h200-engine", "h200-kernels", "h200-gqa", "h200-prefill"])
def test_commands_of_the_kernels_are_quoted(name):
    assert f"`{results(name)['command']}`" in README


def test_prefill_is_what_the_results_say():
    (row,) = (r for r in results("h200-prefill")["rows"] if r["preset"] == "k4v4" and r["cached"])
    assert f"{row['fa3_bf16_us'] / row['attend_us']:.2f} times FlashAttention-3's speed" in README
    assert f"in {row['attend_launch_us']:.0f} us of Python" in README


def test_linked_folders_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target.split("#")[0]).exists(), target


def test_ci_runs_the_test_command():
    assert README.count("<!-- test command -->") == 1
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
