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


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


KERNELS = results("h200-kernels")["rows"]
HEADS = [(32, 8, 128), (64, 8, 128), (16, 8, 128), (14, 2, 64), (32, 4, 256)]
SHAPES = {(row["batch"], row["length"]) for row in KERNELS}


def times(batch, length, heads=(32, 8, 128), q_rows=1):
    """Microseconds by contender."""
    place = (batch, length, *heads, q_rows)
    keys = ("batch", "length", "hq", "hkv", "d", "q_rows")
    return {row["contender"]: row["us"] for row in KERNELS if tuple(row[key] for key in keys) == place}


def over_native(us, preset="k4v4"):
    return f"{us['fa3-bf16'] / us[preset]:.2f}x, {us['fa3-fp8'] / us[preset]:.2f}x"


def kernel_row(batch, length):
    """The README's row of a decode shape: microseconds, and times over FlashAttention-3."""
    us = times(batch, length)
    cells = [f"{batch} x {length}", *(f"{us[name]:.0f}" for name in ("fa3-bf16", "fa3-fp8", "vllm-turboquant"))]
    cells += [f"{us[preset]:.0f} ({over_native(us, preset)})" for preset in ("k4v4", "k3v2", "k2v2")]
    return f"| {' | '.join(cells)} |"


def heads_row(heads, q_rows):
    """The README's row of other heads: `k4v4` over FlashAttention-3."""
    cells = [f"{heads[0]} on {heads[1]} of {heads[2]}, {q_rows}"]
    cells += [over_native(times(*shape, heads, q_rows)) for shape in ((1, 32768), (16, 32768), (64, 4096))]
    return f"| {' | '.join(cells)} |"


def test_kernel_tables_are_what_the_results_say():
    assert len(SHAPES) == 8
    rows = [kernel_row(*shape) for shape in SHAPES] + [heads_row(h, q) for h in HEADS for q in (1, 4)]
    assert set(rows) <= set(README.splitlines())
    assert all(row["rel_err"] < 5e-3 for row in KERNELS if row["preset"] and row["contender"] != "vllm-turboquant")


@pytest.mark.parametrize("name", ["h200-kernels", "h200-gqa", "h200-prefill"])
def test_commands_of_the_kernels_are_quoted(name):
    assert f"`{results(name)['command']}`" in README


def test_prefill_is_what_the_results_say():
    (row,) = (r for r in results("h200-prefill")["rows"] if r["preset"] == "k4v4" and r["cached"])
    assert f"{row['fa3_bf16_us'] / row['attend_us']:.2f} times FlashAttention-3's speed" in README
    assert f"in {row['attend_launch_us']:.0f} us of Python" in README


def test_linked_folders_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_test_command():
    assert README.count("<!-- test command -->") == 1
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
