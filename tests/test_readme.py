"""The README: its table is what the result files say, its commands and paths exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = [ROOT / "benchmarks" / "results" / f"proof-cpu-{preset}.json" for preset in ("k4v4", "k3v2")]


def table_row(path):
    """The README's row of a result file."""
    engine = json.loads(path.read_text())["engine"]
    native, compressed = engine["bytes_per_token_native"], engine["bytes_per_token_compressed"]
    cells = [f"`{engine['preset']}`", f"{compressed:.0f} of {native:.0f}", f"{native / compressed:.2f}x"]
    for quality in engine["quality"]:
        cells += [f"{quality['mean_kld']:.4f}", f"{100 * quality['top1_agreement']:.1f} %"]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_table_is_what_the_results_say(path):
    assert table_row(path) in README.splitlines()
    command = json.loads(path.read_text())["command"]
    assert command.endswith(f"--json {path.relative_to(ROOT)}") and command.startswith("python proof.py")


KERNELS = json.loads((ROOT / "benchmarks" / "results" / "h200-kernels.json").read_text())


def kernel_row(batch, length):
    """The README's row of a decode shape: microseconds, and times over FlashAttention-3."""
    us = {row["contender"]: row["us"] for row in KERNELS["rows"] if (row["batch"], row["length"]) == (batch, length)}
    cells = [f"{batch} x {length}", f"{us['fa3-bf16']:.0f}", f"{us['fa3-fp8']:.0f}"]
    for preset in ("k4v4", "k3v2", "k2v2"):
        cells.append(f"{us[preset]:.0f} ({us['fa3-bf16'] / us[preset]:.2f}x, {us['fa3-fp8'] / us[preset]:.2f}x)")
    return f"| {' | '.join(cells)} |"


def test_kernel_table_is_what_the_results_say():
    shapes = {(row["batch"], row["length"]) for row in KERNELS["rows"]}
    assert len(shapes) == 8
    for shape in shapes:
        assert kernel_row(*shape) in README.splitlines()
    assert all(row["rel_err"] < 5e-3 for row in KERNELS["rows"] if row["preset"])


def test_linked_folders_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_test_command():
    assert README.count("<!-- test command -->") == 1
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
