"""Cases of users left alone: verdicts, refusals, signatures, patches that do nothing, numbers; and other hardware."""

import logging
import re
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner
from helpers import build_codec, normal, rel_l2
from lists import Lists, encode_kernel, exact_keys, exact_values

from turboquant import PRESETS, TurboQuantConfig
from turboquant.capture import KVCaptureEngine
from turboquant.config import DEFAULT_PRESET
from turboquant.integration import compat
from turboquant.integration.vllm import UnsupportedEngineError, install_turboquant_hooks
from turboquant.kernels import choose_kernels, gluon_objection

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
paths = pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.interpreter)])


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")


def test_u1_the_verdict_on_every_layer_is_logged(caplog):
    """How many layers are compressed, why the others are not, and what it saves, in one line."""
    layers = {"attn.0": FakeLayer(), "attn.1": FakeLayer(), "mla.0": FakeLayer(mla=True)}
    logged = caplog.at_level(logging.INFO, logger="turboquant")
    with logged, install_turboquant_hooks(FakeRunner(layers), skip_layers=(0,)) as handle:
        assert list(handle) == ["attn.1"]
    (line,) = (record.getMessage() for record in caplog.records if "compresses" in record.getMessage())
    for part in ("k4v4 compresses 1 of 3 layers", "is in skip_layers", "(MLA)", "136 instead of 1024 B per token"):
        assert part in line


def test_u2_all_reasons_are_named_at_once():
    """Five gates, one message; a wrong name comes with the nearest right one."""
    layers = {f"layers.{i}": FakeLayer() for i in range(3)}
    layers["layers.0"].impl.alibi_slopes = layers["layers.1"].impl.sinks = torch.ones(4)
    runner = FakeRunner(layers)
    layers["layers.2"].kv_cache = layers["layers.2"].kv_cache.to(torch.uint8)
    runner.vllm_config.parallel_config.decode_context_parallel_size = 2
    runner.vllm_config.kv_transfer_config = object()
    with pytest.raises(UnsupportedEngineError) as caught:
        install_turboquant_hooks(runner)
    reasons = (
        "ALiBi",
        "attention sinks",
        "kv_cache_dtype torch.uint8",
        "context_parallel_size=2",
        "kv_transfer_config",
    )
    assert all(reason in str(caught.value) for reason in reasons)
    with pytest.raises(ValueError, match=r"unknown preset 'k4v5'.*did you mean 'k4v"):
        TurboQuantConfig.from_options("k4v5")


def test_u3_another_signature_is_refused_with_the_version():
    """A later keyword is passed on; a parameter that moved is not guessed at."""
    layer = FakeLayer()
    original = type(layer.impl).forward
    moved = FakeLayer()
    moved.impl.forward = lambda query, layer, key, value, kv_cache, attn_metadata, output: output
    with pytest.raises(UnsupportedEngineError, match=r"forward\('query', 'layer'.* of vLLM 0\.0-fake; expected"):
        install_turboquant_hooks(FakeRunner({"layers.0": layer, "layers.1": moved}))
    assert "forward" not in vars(layer.impl) and type(layer.impl).forward is original
    with install_turboquant_hooks(FakeRunner({"layers.0": layer}), mode="full_tq"):
        output = torch.ones(2, 4, 64)
        layer.impl.forward(layer, output, None, None, None, None, output=output, output_block_scale=None)
        with pytest.raises(RuntimeError, match="fused output quantisation"):
            layer.impl.forward(layer, output, None, None, None, object(), output=output, output_scale=torch.ones(1))


def test_u4_a_patch_that_does_nothing_is_seen(monkeypatch):
    """Through the engine's own reference: the counters move, the originals are not called, and undo is complete."""
    runner = FakeRunner({f"layers.{i}": FakeLayer() for i in range(2)})
    engine = FakeEngine(runner, monkeypatch)
    impls = [layer.impl for layer in runner.layers.values()]
    with install_turboquant_hooks(runner, mode="full_tq", buffer_size=0, sink_size=0) as handle:
        before = [dict(impl.calls) for impl in impls]
        rows = [normal(21, heads, 64, seed=heads) for heads in (4, 2, 2)]
        for start, end in ((0, 20), (20, 21)):
            engine.step([([3, 7], end, *(x[start:end] for x in rows))])
        assert [impl.calls for impl in impls] == before
        for counters in handle.stats()["per_layer"].values():
            assert (counters["tokens_encoded"], counters["tokens_read_compressed"]) == (21, 20)
    assert not any(name in vars(impl) for impl in impls for name in ("forward", "do_kv_cache_update"))


def test_u5_numbers_and_the_recommended_preset_come_first():
    """Accuracy and speed, with what is slower, before how it is used; the default is the preset that is named."""
    order = [README.index(f"## {title}") for title in ("Measured", "Use it", "Limits")]
    assert order == sorted(order)
    options = (ROOT / "docs/options.md").read_text()
    assert f"| `preset` | `{DEFAULT_PRESET}` |" in options and TurboQuantConfig().name == DEFAULT_PRESET
    assert f"--preset {DEFAULT_PRESET}" in README[: order[0]]
    measured = README[order[0] : order[1]]
    assert re.search(rf"`{DEFAULT_PRESET}` \| [\d,]+ \([\d.]+x\) (\| [\d.]+ ){{3}}(\| 0\.\d{{4}} ){{2}}\|", measured)
    assert re.search(r"\b0\.\d\dx", measured), "no shape that is slower is named"


# ---- hardware --------------------------------------------------------------------------------------------------
@paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_h1_fp8_keys_from_every_dtype(kernels, dtype):
    """Codes are made and read with integer arithmetic in the portable kernels: no cast that older GPUs lack."""
    engine = KVCaptureEngine(1, 16, 0, 0)
    layer = engine.add_layer("layer", build_codec(1, 64, key_bits=8), 1, dtype)
    layer.encode = encode_kernel() if kernels else None
    keys, values = exact_keys(16, 1, 64, seed=1), exact_values(16, 1, 64, seed=2)
    engine.ingest(layer, keys.to(dtype), values.to(dtype), torch.arange(16))
    found = layer.store.read_slots(torch.arange(16))[0]
    assert torch.equal(found, keys) and layer.store.format.token_bytes < 2 * 2 * 64
    if kernels:
        from turboquant.kernels.transcode import decode_rows

        assert torch.equal(decode_rows(layer.store, torch.arange(16), torch.float32, rotated=False)[0], keys)


def test_h2_devices_without_the_fast_decode():
    """Intel GPUs take the portable kernels, heads of 512 torch; the reason is kept."""
    assert gluon_objection(torch.device("xpu")) == "it needs an NVIDIA GPU of compute capability 8.0"
    lists = Lists(dim=512, num_blocks=8)
    kernels = choose_kernels(lists.layer, lists.engine.ring)
    assert kernels.reason == "the cache is on the CPU" and not kernels.fused
    lists.run({lists.prefilled(40): 2})
    lists.assert_compressed(40)


@pytest.mark.parametrize(
    ("preset", "kernels"),
    [*((preset, False) for preset in PRESETS), pytest.param("k8v4", True, marks=pytest.mark.interpreter)],
)
def test_h3_every_preset_runs_on_portable_code(preset, kernels):
    """fp8 keys too, which other stacks refuse outside CUDA."""
    assert gluon_objection(torch.device("privateuseone")) is not None
    lists = Lists(kernels=kernels, num_blocks=8, **PRESETS[preset])
    request, rows = lists.prefilled(24), lists.random_rows(1)
    errors = rel_l2(lists.run({request: 1}, rows, check=False), lists.plain(rows[0], request.rows, 24))
    assert errors.max() < 2.2 * 2.0 ** -min(PRESETS[preset].values())
    lists.assert_compressed(24)
