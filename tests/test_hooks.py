"""The hooks on a fake runner: refusals, transcoding, freeing, undo; no vLLM needed."""

import functools
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner, causal_attention

from turboquant.integration import compat
from turboquant.integration import vllm as hooks
from turboquant.integration.vllm import HookError, NativeCacheFreedError, UnsupportedEngineError

BLOCKS = [[3, 7, 1, 9], [2, 8, 5, 4]]


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")


def make(num_layers=2, **layer_options):
    layers = {f"layers.{i}": FakeLayer(**layer_options) for i in range(num_layers)}
    return FakeRunner(layers)


def rows(seed, *lengths, heads=(4, 2), dim=64):
    """Query, key, value of requests with these lengths."""
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(n, h, dim, generator=g) for h in (heads[0], heads[1], heads[1])) for n in lengths]


def prefill(engine, requests):
    return engine.step([(BLOCKS[i], len(q), q, k, v) for i, (q, k, v) in enumerate(requests)])


def decode(engine, requests, new):
    return engine.step([(BLOCKS[i], len(r[0]) + 1, *n) for i, (r, n) in enumerate(zip(requests, new, strict=True))])


def exact(requests, new):
    """Outputs of the decode step by plain attention."""
    outputs = []
    for (_, k, v), (q1, k1, v1) in zip(requests, new, strict=True):
        outputs.append(causal_attention(q1, torch.cat([k, k1]), torch.cat([v, v1]), 64**-0.5))
    return torch.cat(outputs)


def rel(a, b):
    return float((a - b).norm() / b.norm())


def test_native_layout_is_found_by_probing():
    layer = make(1).layers["layers.0"]
    layer.kv_cache.fill_(3.0)
    layout = compat.native_layout(layer, layer.impl.do_kv_cache_update)
    (_, k, v), = rows(1, 16)  # fmt: skip
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.arange(16) + 5 * 16)
    keys, values = layout.read(layer.kv_cache, torch.tensor([5]))
    assert torch.equal(keys, k) and torch.equal(values, v)
    assert (layer.kv_cache[:5] == 3).all() and (layer.kv_cache[6:] == 3).all()


def test_layout_that_loses_values_is_refused():
    layer = make(1).layers["layers.0"]

    def lossy(layer, key, value, kv_cache, slots):
        kv_cache.view(1, -1)[:, : key.numel()] = key.flatten()

    with pytest.raises(RuntimeError, match="no plain copy"):
        compat.native_layout(layer, lossy)


@pytest.mark.parametrize("mode", ["hybrid", "full_tq"])
@pytest.mark.parametrize(("buffer_size", "sinks"), [(0, 0), (0, 4), (20, 4), (32, 0)])
def test_decode_reads_the_compressed_cache(monkeypatch, mode, buffer_size, sinks):
    runner = make()
    engine = FakeEngine(runner, monkeypatch)
    with hooks.install_turboquant_hooks(
        runner, buffer_size=buffer_size, sink_size=sinks, mode=mode, ring_share=1.0
    ) as handle:
        requests, new = rows(2, 40, 23), rows(3, 1, 1)
        prefill(engine, requests)
        outputs = decode(engine, requests, new)
        for output in outputs.values():
            assert 0 < rel(output, exact(requests, new)) < 0.2
        stats = handle.stats()
        assert stats["tokens_encoded"] == 40 + 23 + 2
        assert stats["tokens_read_exact"] == min(40, buffer_size + sinks) + min(23, buffer_size + sinks)
        assert stats["tokens_read_compressed"] == 63 - stats["tokens_read_exact"]


def test_prefill_in_hybrid_is_native_and_exact(monkeypatch):
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    (q, k, v), = rows(4, 50)  # fmt: skip
    with hooks.install_turboquant_hooks(runner, buffer_size=0, mode="hybrid"):
        engine.step([(BLOCKS[0], 30, q[:30], k[:30], v[:30])])
        output = engine.step([(BLOCKS[0], 50, q[30:], k[30:], v[30:])])["layers.0"]
    assert rel(output, causal_attention(q[30:], k, v, 64**-0.5)) < 1e-5


def test_mixed_batch_decode_compressed_prefill_native(monkeypatch):
    """One request decodes while another continues its prefill: each reads what the mode says."""
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    (qa, ka, va), (qb, kb, vb) = rows(5, 41, 47)
    with hooks.install_turboquant_hooks(runner, buffer_size=0, mode="hybrid"):
        engine.step([(BLOCKS[0], 40, qa[:40], ka[:40], va[:40]), (BLOCKS[1], 20, qb[:20], kb[:20], vb[:20])])
        output = engine.step([(BLOCKS[0], 41, qa[40:], ka[40:], va[40:]), (BLOCKS[1], 47, qb[20:], kb[20:], vb[20:])])
    assert 1e-3 < rel(output["layers.0"][:1], causal_attention(qa[40:], ka, va, 64**-0.5)) < 0.2
    assert rel(output["layers.0"][1:], causal_attention(qb[20:], kb, vb, 64**-0.5)) < 1e-5


def test_full_tq_never_touches_the_native_cache(monkeypatch):
    runner = make()
    engine = FakeEngine(runner, monkeypatch)
    with hooks.install_turboquant_hooks(runner, mode="full_tq") as handle:
        for hook in handle.values():
            hook.layer.kv_cache.fill_(float("nan"))
        requests, new = rows(6, 40, 23), rows(7, 1, 1)
        prefill(engine, requests)
        assert all(torch.isfinite(output).all() for output in decode(engine, requests, new).values())
        assert all(hook.layer.kv_cache.isnan().all() for hook in handle.values())
        for hook in handle.values():
            hook.layer.kv_cache.zero_()


def test_leaving_off_encodes_what_is_cached(monkeypatch):
    runner = make()
    engine = FakeEngine(runner, monkeypatch)
    requests, new = rows(8, 40, 23), rows(9, 1, 1)
    with hooks.install_turboquant_hooks(runner, buffer_size=0, mode="off") as handle:
        prefill(engine, requests)
        assert handle.stats()["tokens_encoded"] == 0
        handle.set_mode("full_tq")
        for output in decode(engine, requests, new).values():
            assert 1e-3 < rel(output, exact(requests, new)) < 0.2


def test_stale_ring_entries_do_not_survive_off(monkeypatch):
    """While off, blocks are rewritten natively; the exact ring must not answer with what it saw before."""
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    old, requests, new = rows(10, 40, 23), rows(11, 40, 23), rows(12, 1, 1)
    with hooks.install_turboquant_hooks(runner, buffer_size=64, mode="full_tq", ring_share=1.0) as handle:
        prefill(engine, old)
        handle.set_mode("off")
        prefill(engine, requests)
        handle.set_mode("hybrid")
        assert rel(decode(engine, requests, new)["layers.0"], exact(requests, new)) < 0.2


def test_returning_to_native_decodes_only_stale_tokens(monkeypatch):
    """Tokens written natively stay exact; tokens that only the store holds arrive quantised, or exact from the ring."""
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    layer = runner.layers["layers.0"]
    (q, k, v), = rows(13, 60)  # fmt: skip
    with hooks.install_turboquant_hooks(runner, buffer_size=16, mode="hybrid", ring_share=1.0) as handle:
        engine.step([(BLOCKS[0], 16, q[:16], k[:16], v[:16])])
        handle.set_mode("full_tq")
        engine.step([(BLOCKS[0], 60, q[16:], k[16:], v[16:])])
        handle.set_mode("off")
        keys, values = layer.impl.read(layer.kv_cache, BLOCKS[0], 60)
    assert torch.equal(keys[:16], k[:16]) and torch.equal(values[:16], v[:16])
    assert 1e-3 < rel(keys[16:32], k[16:32]) < 0.2 and 1e-3 < rel(values[16:32], v[16:32]) < 0.2
    assert torch.equal(keys[48:], k[48:]) and torch.equal(values[48:], v[48:])


def test_free_returns_the_bytes_and_native_modes_are_refused(monkeypatch):
    runner = make()
    engine = FakeEngine(runner, monkeypatch)
    requests, new = rows(14, 40, 23), rows(15, 1, 1)
    handle = hooks.install_turboquant_hooks(runner, buffer_size=0, mode="capture_only")
    with pytest.raises(HookError, match="capture_only"):
        hooks.free_kv_cache(runner)
    handle.set_mode("hybrid")
    prefill(engine, requests)
    native_bytes = sum(layer.kv_cache.nbytes for layer in runner.layers.values())
    assert hooks.free_kv_cache(runner) == native_bytes
    assert hooks.free_kv_cache(runner) == 0
    assert all(cache.untyped_storage().nbytes() == 4 for cache in runner.kv_caches)
    runner.kv_caches[0][3].zero_()  # vLLM zeroes the blocks it hands out
    for mode in ("off", "capture_only"):
        with pytest.raises(NativeCacheFreedError, match=mode):
            handle.set_mode(mode)
    for output in decode(engine, requests, new).values():
        assert 1e-3 < rel(output, exact(requests, new)) < 0.2
    handle.uninstall()
    layer = runner.layers["layers.0"]
    keys, _ = layer.impl.read(layer.kv_cache, BLOCKS[0], 41)
    assert 1e-3 < rel(keys, torch.cat([requests[0][1], new[0][1]])) < 0.2
    assert runner.kv_caches[0] is layer.kv_cache


def test_a_leaked_reference_is_not_counted_as_freed(monkeypatch):
    runner = make()
    with hooks.install_turboquant_hooks(runner, mode="full_tq"):
        leak = runner.kv_caches[0][2]
        assert hooks.free_kv_cache(runner) == 0
        assert leak.numel()


def test_free_is_refused_where_blocks_are_zeroed_by_address(monkeypatch):
    runner = make()
    runner._kv_block_zeroer = object()
    with hooks.install_turboquant_hooks(runner, mode="full_tq") as handle:
        with pytest.raises(UnsupportedEngineError, match="raw address"):
            handle.free_kv_cache()
        assert all(layer.kv_cache.untyped_storage().nbytes() > 4 for layer in runner.layers.values())


def test_uninstall_leaves_no_trace():
    runner = make()
    before = [dict(vars(layer.impl)) for layer in runner.layers.values()]
    handle = hooks.install_turboquant_hooks(runner)
    assert all("forward" in vars(layer.impl) for layer in runner.layers.values())
    with pytest.raises(HookError, match="already installed"):
        hooks.install_turboquant_hooks(runner)
    handle.uninstall()
    assert [list(vars(layer.impl)) for layer in runner.layers.values()] == [list(b) for b in before]
    with pytest.raises(HookError, match="uninstalled"):
        handle.set_mode("off")
    with pytest.raises(HookError, match="not installed"):
        hooks.get_stats(runner)


def test_uninstall_restores_an_earlier_patch():
    runner = make(1)
    impl = runner.layers["layers.0"].impl
    impl.forward = functools.wraps(impl.forward)(lambda *args, **kwargs: None)
    earlier = impl.forward
    hooks.install_turboquant_hooks(runner).uninstall()
    assert impl.forward is earlier and "do_kv_cache_update" not in vars(impl)


def test_a_discarded_engine_is_not_kept_alive():
    runner = make(1)
    gone = weakref.ref(runner)
    hooks.install_turboquant_hooks(runner)
    del runner
    gc.collect()
    assert gone() is None


def test_uninstall_refuses_if_somebody_patched_over_us():
    runner = make()
    handle = hooks.install_turboquant_hooks(runner)
    impl = runner.layers["layers.1"].impl
    impl.forward = lambda *args, **kwargs: None
    with pytest.raises(HookError, match=r"layers\.1: impl\.forward was replaced"):
        handle.uninstall()
    assert "forward" in vars(runner.layers["layers.0"].impl)
    impl.forward = handle["layers.1"].forward
    handle.uninstall()


def test_exception_inside_the_context_still_uninstalls():
    runner = make()
    with pytest.raises(ZeroDivisionError), hooks.install_turboquant_hooks(runner):
        raise ZeroDivisionError
    assert all("forward" not in vars(layer.impl) for layer in runner.layers.values())


def test_refusal_lists_every_reason_at_once():
    runner = make(3)
    runner.vllm_config.parallel_config.decode_context_parallel_size = 2
    runner.vllm_config.kv_transfer_config = object()
    runner.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs = lambda: True
    runner.vllm_config.speculative_config = SimpleNamespace(method="eagle")
    runner.layers["layers.1"].impl.alibi_slopes = torch.ones(4)
    for name in ("layers.1", "layers.2"):
        runner.layers[name].impl.sinks = torch.ones(4)
    with pytest.raises(UnsupportedEngineError) as caught:
        hooks.install_turboquant_hooks(runner)
    text = str(caught.value)
    for part in (
        "decode_context_parallel_size=2",
        "kv_transfer_config",
        "full graphs",
        "'eagle'",
        "ALiBi (in layers.1)",
        "attention sinks (in layers.1 and 1 more)",
        "0.0-fake",
    ):
        assert part in text
    assert all("forward" not in vars(layer.impl) for layer in runner.layers.values())


def test_layers_with_a_reason_can_be_skipped():
    runner = make(3)
    runner.layers["layers.1"].impl.sinks = torch.ones(4)
    with hooks.install_turboquant_hooks(runner, skip_layers=(1,)) as handle:
        assert list(handle) == ["layers.0", "layers.2"]


def test_other_layer_kinds_stay_native_and_are_logged_once(caplog):
    layers = {
        "mla.0": FakeLayer(mla=True),
        "mla.1": FakeLayer(mla=True),
        "linear.0": SimpleNamespace(kv_cache=[torch.zeros(2)]),
        "attn.0": FakeLayer(),
    }
    runner = FakeRunner(layers)
    with caplog.at_level(logging.INFO, logger="turboquant"), hooks.install_turboquant_hooks(runner) as handle:
        assert list(handle) == ["attn.0"]
        skipped = handle.stats()["layers_skipped"]
    assert set(skipped) == {"mla.0", "mla.1", "linear.0"} and handle.stats()["layers"] == 4
    summary = [r.getMessage() for r in caplog.records if "compresses" in r.getMessage()]
    assert len(summary) == 1 and summary[0].count("(MLA)") == 1 and "recurrent or linear" in summary[0]


def test_a_model_without_any_compressible_layer_is_refused():
    runner = FakeRunner({"mla.0": FakeLayer(mla=True)})
    with pytest.raises(UnsupportedEngineError, match="no attention layer can be compressed"):
        hooks.install_turboquant_hooks(runner)


def test_profiling_calls_pass_through():
    """Metadata None: vLLM profiles with whatever cache is bound."""
    runner = make(1)
    layer = runner.layers["layers.0"]
    with hooks.install_turboquant_hooks(runner, mode="full_tq"):
        output = torch.ones(3, 4, 64)
        layer.impl.forward(layer, output, None, None, torch.tensor([]), None, output=output)
    assert (output == 0).all()


def test_a_step_is_planned_once_for_all_layers(monkeypatch):
    runner = make(4)
    engine = FakeEngine(runner, monkeypatch)
    with hooks.install_turboquant_hooks(runner, mode="full_tq") as handle:
        planned = []
        original = handle.groups[0].engine.begin_step
        monkeypatch.setattr(handle.groups[0].engine, "begin_step", lambda b: planned.append(b) or original(b))
        prefill(engine, rows(16, 40, 23))
    assert len(planned) == 1


def test_padded_slots_change_nothing(monkeypatch):
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    (q, k, v), = rows(17, 20)  # fmt: skip
    with hooks.install_turboquant_hooks(runner, mode="full_tq") as handle:
        engine.step([(BLOCKS[0], 20, q, k, v)], padding=5)
        pages = next(iter(handle.values())).cache.store.pages
        touched = pages.flatten(1).any(1).nonzero().flatten().tolist()
        assert touched == sorted(BLOCKS[0][:2]) and handle.stats()["tokens_encoded"] == 20


@pytest.mark.parametrize("causal", [False, torch.tensor([True])])
def test_non_causal_steps_are_refused(monkeypatch, causal):
    runner = make(1)
    engine = FakeEngine(runner, monkeypatch)
    original = compat.batch_of

    def batch_of(metadata, block_size):
        metadata.causal = causal
        return original(metadata, block_size)

    monkeypatch.setattr(compat, "batch_of", batch_of)
    with hooks.install_turboquant_hooks(runner, mode="full_tq"), pytest.raises(RuntimeError, match="causal"):
        prefill(engine, rows(18, 20, 20))


def test_ring_is_limited_to_its_share(caplog):
    """24 blocks, a quarter of them: 6 entries; a window of 112 tokens and sinks need 9 blocks of 16, and 64 remain."""
    runner = make(1)
    with caplog.at_level(logging.WARNING, logger="turboquant"), hooks.install_turboquant_hooks(runner) as handle:
        assert handle.window == 64 and handle.groups[0].engine.ring.capacity == 6
    assert "buffer_size 112 does not fit" in caplog.text


def test_set_mode_without_runner_reaches_all_and_old_names_work():
    first, second = make(1), make(1)
    with hooks.install_turboquant_hooks(first, mode="off"), hooks.install_turboquant_hooks(second, mode="hybrid"):
        with pytest.raises(HookError, match="different modes"):
            hooks.get_mode()
        hooks.set_mode("active")
        assert hooks.get_mode() == hooks.get_mode(first) == "hybrid"
        hooks.set_mode("shadow", first)
        assert hooks.get_mode(first) == "capture_only" and hooks.get_mode(second) == "hybrid"
    assert hooks.get_mode() == "off"


def test_import_paths_of_the_prototype():
    from turboquant import vllm_attn_backend as old
    from turboquant.integration.vllm import install_hooks, set_mode

    assert old.install_turboquant_hooks is install_hooks and old.set_mode is set_mode
    assert (old.MODE_ACTIVE, old.MODE_SHADOW, old.MODE_ACCUMULATE) == ("hybrid", "capture_only", "capture_only")
    with pytest.raises(ValueError, match="did you mean 'k4v4'"):
        old.enable_no_alloc("k4v44")
