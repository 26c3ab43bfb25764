"""Bits per layer by what they cost, on real engines: measured at the start, from a calibration file, with the hooks."""

import pytest
from engine_helpers import alone, engine, prompts

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant import attach, calibrate  # noqa: E402
from turboquant.integration.calibration_file import load_damages  # noqa: E402

PRESET, BITS = "auto:3.5", 3.5
LIMITS = {"max_model_len": 512}
LENGTHS = [70, 130, 200]
NUMBERS = 2 * 30 * 3 * 64  # of a token in all layers


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(statistics, bits of every layer, outputs, file) of an engine that measures itself."""
    path = tmp_path_factory.mktemp("allocation") / "smollm2.safetensors"
    with engine(PRESET, **LIMITS) as llm:
        outputs = alone(llm, prompts(llm, LENGTHS), 8)
        stats, bits = (llm.collective_rpc(name)[0] for name in ("tq_stats", "tqtest_bits"))
        calibrate(llm, path)
    return stats, bits, outputs, path


def test_layers_differ_within_the_budget(measured):
    stats, bits, _, _ = measured
    assert stats["preset"] == PRESET and len(stats["formats"]) > 1 and sum(stats["formats"].values()) == 30
    assert 0.97 * BITS <= 8 * stats["bytes_per_token_compressed"] / NUMBERS <= BITS
    assert stats["page_bytes"] == stats["capacity_tokens"] * stats["bytes_per_token_compressed"]
    assert stats["formats"] == {name: bits.count(name) for name in set(bits)}


def test_a_file_says_the_same(measured):
    _, bits, outputs, path = measured
    assert len(load_damages(path)) == 30
    with engine(PRESET, {"calibration": str(path)}, **LIMITS) as llm:
        assert llm.collective_rpc("tqtest_bits")[0] == bits
        found = alone(llm, prompts(llm, LENGTHS), 8)
    assert [o.token_ids for o in found] == [o.token_ids for o in outputs]


def test_the_hooks_take_the_bits_of_a_file(measured):
    _, bits, _, path = measured
    with engine(**LIMITS) as llm:
        with pytest.raises(ValueError, match="from a calibration file"):
            attach(llm, preset=PRESET)
        with pytest.raises(ValueError, match=r"auto_bits=2 cannot be met: .* 2\.25 to 6\.25"):
            attach(llm, preset="auto:2", calibration=str(path))
        with attach(llm, preset=PRESET, mode="full_tq", calibration=str(path)) as handle:
            layers = handle.stats()[0]["per_layer"].values()
            assert [f"k{layer['key_bits']}v{layer['value_bits']}" for layer in layers] == bits
            assert all(len(output.token_ids) == 8 for output in alone(llm, prompts(llm, LENGTHS), 8))
