"""`turboquant plan` agrees to 1 % with the blocks that vLLM has: in the committed file, and on one engine anew."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import blocks  # noqa: E402

ROWS = json.loads((ROOT / "benchmarks/results/blocks-cpu.json").read_text())["rows"]


def agrees(row):
    return row["planned_blocks"] == pytest.approx(row["vllm_blocks"], rel=0.01)


def test_the_file_has_every_model_and_cache():
    assert {(row["model"], row["cache"]) for row in ROWS} == {(m, c) for m in blocks.MODELS for c in blocks.CACHES}
    assert len(ROWS) == 3 * (1 + 3) and all(map(agrees, ROWS))


@pytest.mark.engine
@pytest.mark.parametrize(("model", "cache"), [("Gemma-3-270M", "k3v2")])
def test_an_engine_still_has_them(model, cache, monkeypatch):
    """Sliding windows and a head size of their own: the hardest of the three to plan."""
    pytest.importorskip("vllm")
    for name in ("TRITON_INTERPRET", "TURBOQUANT"):
        monkeypatch.delenv(name, raising=False)
    row = blocks.row(model, cache)
    assert agrees(row), row
    assert row in ROWS
