"""Cases of a serving engine: mixed batches, verify steps, reused blocks, memory, specs, and what is refused."""

import math
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner, causal_attention
from helpers import Scheduler, build_codec, normal, rel_l2
from lists import EXACT, FINE, Lists, assert_close, encode_kernel, exact_keys, exact_values
from test_score import LiveBytes

from turboquant import PRESETS, TurboQuantKVCache, score
from turboquant.batch import AttentionBatch
from turboquant.capture import ExactRing, ExactWindow, KVCaptureEngine
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat
from turboquant.integration.rehearsal import Limits, largest_steps, rehearse
from turboquant.integration.vllm import UnsupportedEngineError, install_turboquant_hooks
from turboquant.page import PageFormat
from turboquant.score import HybridScorer
from turboquant.store import CompressedBlockStore

paths = pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.interpreter)])
GIB = 2**30


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")


# ---- batches ---------------------------------------------------------------------------------------------------
MIXES = {
    "long first": [(0, 1000), (400, 100)],
    "long last": [(400, 100), (0, 1000)],
    "two long": [(0, 1000), (400, 100), (0, 700)],
    "one new token": [(0, 1000), (499, 1)],
    "all but one cached": [(0, 500), (499, 1)],
}


@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES.keys())
def test_s1_mixed_batch_keeps_the_cached_prefix(lengths):
    """The longest query is the longest sequence, and still somebody has a prefix."""
    lists = Lists(num_blocks=260)
    requests = {lists.prefilled(cached, room=new): (cached, new) for cached, new in lengths}
    lists.run({request: new for request, (_, new) in requests.items()})
    lists.assert_compressed(400)


@paths
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_s2_verify_rows_see_their_prefix_and_the_rows_before_them(kernels, drafts):
    """K + 1 rows of several requests; and the lengths of a captured dummy step, which go neither negative nor wrong."""
    lists = Lists(kernels=kernels, num_blocks=40)
    requests = [lists.prefilled(length, room=8) for length in (17, 40, 3)]
    lists.run(dict.fromkeys(requests, 1 + drafts))
    lists.assert_compressed(60)
    dummy = AttentionBatch(torch.tensor([0, 4, 8]), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=torch.int32), 16)
    assert dummy.history_lens.tolist() == [0, 0] and dummy.query_lens.tolist() == [1, 1]
    query, *own = lists.random_rows(8)
    output = torch.full_like(query, torch.nan)
    lists.engine.ingest(lists.layer, *own, torch.full((8,), -1))
    lists.scorer.attend(lists.layer, lists.engine.begin_step(dummy), query, own, output)
    assert_close(output[[0, 4]], own[1][[0, 4]].expand(2, 2, 64), EXACT)


class NoSync(torch.utils._python_dispatch.TorchDispatchMode):
    """Operations that make a device's host wait raise."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "unique", "_unique2", "masked_select", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.WAITING, f"{name} waits for the device"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask as an index waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
def test_s3_nothing_waits_for_the_device_where_graphs_are_captured():
    """Planning the ring and writing a decode, a mixed and a verify step; graphs are captured with these."""
    from turboquant.kernels import ring as ring_kernel

    engine = KVCaptureEngine(20, 16, 8, 6, sinks=2)
    layer = engine.add_layer("layer", build_codec(1, 64), 1, torch.float32)
    twin = ExactRing(20, 16, 8, 6, sinks=2)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    lines, index = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 10, dtype=torch.int64)
    cached = torch.tensor([20, 33])
    for new in ([1, 1], [1, 9], [4, 4]):
        starts = torch.tensor([0, *new]).cumsum(0)
        rows = [normal(int(starts[-1]), 1, 64, seed=i) for i in (1, 2)]
        counts = torch.tensor(new)
        slots = [int(table[r, p // 16]) * 16 + p % 16 for r in range(2) for p in range(cached[r], cached[r] + new[r])]
        slots, window = torch.tensor(slots), ExactWindow(index, torch.zeros_like(index, dtype=torch.bool), 2)
        with NoSync():
            batch = AttentionBatch(starts, torch.where(counts > 0, cached + counts, 0), table, 16, lines=lines)
            ring_kernel.plan(engine.ring, batch, lines, window)
            encode_kernel()(layer, engine.ring, *rows, slots)
        assert torch.equal(window.present, twin.plan(batch).present)
        twin.accept(slots)
        assert torch.equal(twin.written, engine.ring.written)
        cached += counts
    with pytest.raises(AssertionError, match="waits"), NoSync():
        twin.accept(slots)


@pytest.mark.parametrize(
    ("kernels", "drafts"), [(False, 1), (False, 3), pytest.param(True, 3, marks=pytest.mark.interpreter)]
)
def test_s4_late_prefill_joins_verify_steps(kernels, drafts):
    """Values tell the requests apart, and a step's own rows are attended to as they are."""
    lists = Lists(kernels=kernels, num_blocks=40, key_bits=4, value_bits=4)
    first, second, late = lists.prefilled(30), lists.prefilled(21), lists.request(40)
    new = 1 + drafts
    query, keys, values = lists.random_rows(2 * new + 6)
    values[new : new + 6] += 1000
    output = lists.run({first: new, late: 6, second: new}, (query, keys, values))
    own = lists.plain(query[new : new + 6], late.rows, 0)
    assert rel_l2(output[new : new + 6], own).max() < 1e-5
    assert output[:new].abs().max() < 10 and output[new + 6 :].abs().max() < 10
    lists.assert_compressed(50)


# ---- memory ----------------------------------------------------------------------------------------------------
def layer_of_codes(num_blocks, count=1, window=0, heads=1):
    """An engine with layers whose pages hold codes that nobody wrote."""
    engine = KVCaptureEngine(num_blocks, 16, window, 8 if window else 0)
    layers = [engine.add_layer(str(i), build_codec(heads, 64), heads, torch.float32) for i in range(count)]
    for layer in layers:
        layer.store.pages.fill_(0x35)
    return engine, layers


def transient_bytes(engine, layers, cached, new):
    """Peak of a step of requests with `cached` tokens, over all layers."""
    starts = torch.arange(len(cached) + 1) * new
    table = torch.arange(engine.num_blocks).expand(len(cached), -1)
    query, *own = (normal(new * len(cached), 1, 64, seed=i) for i in range(3))
    plan = engine.begin_step(AttentionBatch(starts, torch.tensor(cached) + new, table, 16))
    output, scorer = torch.empty_like(query), HybridScorer(0.125)
    with LiveBytes() as memory:
        for layer in layers:
            scorer.attend(layer, plan, query, own, output)
    assert torch.isfinite(output).all()
    return memory.peak


@pytest.mark.parametrize("new", [1, 129, 256])
def test_s5_no_step_takes_more_than_the_rehearsed_ones(monkeypatch, new):
    """The largest steps of an engine run before it serves; none needs more memory than they did."""
    monkeypatch.setattr(score, "TILE_ELEMENTS", 1 << 15)
    engine, layers = layer_of_codes(64)
    rows = normal(256, 1, 64, seed=1)
    with LiveBytes() as memory:
        steps = largest_steps(Limits(requests=4, tokens=256, context=1024))
        rehearse(layers[0], HybridScorer(0.125), engine.ring, (rows, (rows, rows)), steps)
    requests = min(4, 256 // new)
    assert transient_bytes(engine, layers, [1024 - new] * requests, new) <= memory.peak


def test_s6_all_memory_is_taken_at_the_start():
    """Bytes do not grow up to the last token, and one more is refused with the number that fits."""
    cache = TurboQuantKVCache(1, 64, 100, block_size=16, config=TurboQuantConfig(buffer_size=20, sink_size=4))
    before = cache.memory_bytes()
    for new in (60, 39, 1):
        cache.attend(*(normal(1, 1, new, 64, seed=i) for i in range(3)))
        assert cache.memory_bytes() == before
    with pytest.raises(ValueError, match="100 of max_tokens=100 are used"):
        cache.append(*(normal(1, 1, 1, 64, seed=i) for i in range(2)))
    assert before["total"] < 2 * 112 * 64 * 4 + before["recent"] + before["tables"]


def test_s7_scratch_does_not_grow_with_the_layers():
    """64 layers in a step take the transient memory of one, and what they keep is pages and small tables."""
    peaks = {}
    for count in (1, 64):
        engine, layers = layer_of_codes(16, count)
        peaks[count] = transient_bytes(engine, layers, [200, 30], 2)
        assert engine.nbytes <= count * (layers[0].store.nbytes + layers[0].codec.nbytes) + 4096
    assert peaks[64] <= 1.05 * peaks[1]


def test_s8_no_chunk_decodes_the_whole_context(monkeypatch):
    """16 times the cached tokens: the table and a mask grow, decoded rows do not."""
    monkeypatch.setattr(score, "TILE_ELEMENTS", 1 << 15)
    small, large = (transient_bytes(*layer_of_codes(cached // 16 + 2), [cached], 16) for cached in (512, 8192))
    decoded_bytes = (8192 - 512) * 2 * 64 * 4
    assert large - small < decoded_bytes / 50
    lists = Lists(num_blocks=120, group=1)
    lists.run({lists.prefilled(1500, room=100): 100})
    lists.assert_compressed(1500)


# ---- page sizes and specs --------------------------------------------------------------------------------------
STATES = (540_672, 2_134_016, 274_432)  # bytes of recurrent states in reports


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_s9_pages_beside_recurrent_states(state, ranks):
    """The scheduler counts block * heads * bytes of a token, for every block; padding up to a state moves no byte."""
    heads = 8 // ranks
    for preset in PRESETS.values():
        plain = build_codec(heads, 128, **preset).page_format(16)
        block = 16 * math.ceil(state / (16 * heads * plain.token_bytes))
        page = build_codec(heads, 128, **preset).page_format(block)
        assert page.page_bytes == block * page.token_bytes == block * plain.token_bytes
        assert state <= heads * page.page_bytes < state + 16 * heads * page.token_bytes
    block, padding = 1040, 4096

    def padded(shape):
        wide = torch.zeros(shape[0], shape[1] * shape[2] + padding, dtype=torch.uint8)
        return wide[:, :-padding].unflatten(1, shape[1:])

    lists = Lists(heads=heads, dim=64, group=1, block_size=block, num_blocks=4, pages=padded)
    lists.run({lists.prefilled(60): 2, lists.prefilled(9): 1})
    assert lists.layer.store.pages.stride(0) == heads * lists.layer.store.format.page_bytes + padding
    lists.assert_compressed(69)


def specs(head_size=128, heads=8, block=32):
    """vLLM's own specs of full and of windowed attention."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes = {"block_size": block, "num_kv_heads": heads, "head_size": head_size, "dtype": torch.bfloat16}
    return FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=512)


def packed(spec, token_bytes):
    return (compat.packed_spec if compat.packs_states() else compat.slotted_spec)(spec, token_bytes)


def test_s10_specs_answer_for_every_kind_of_layer():
    """No cache dtype is named anywhere: 'auto' stays 'auto', and the bytes of a token come with the spec."""
    for spec in specs():
        ours = packed(spec, 132)
        assert type(ours).__name__ == type(spec).__name__ or isinstance(ours, type(spec))
        assert ours.page_size_bytes == 32 * 8 * 132 < spec.page_size_bytes / 3
        assert spec.dtype is torch.bfloat16 and ours.dtype is torch.uint8
    arguments = {"alibi_slopes": None, "extra_impl_args": {}, "head_size": 128, "head_size_v": None}
    for dtype, refused in (("auto", False), ("bfloat16", False), ("fp8", True), ("turboquant_4bit_nc", True)):
        reasons = compat.arguments_objections(arguments | {"cache_config": SimpleNamespace(cache_dtype=dtype)})
        assert reasons == ([f"kv_cache_dtype={dtype!r}; use 'auto'"] if refused else [])


def test_s11_no_layer_speaks_for_the_others():
    """Layer 0 is skipped, head sizes alternate, first layers have wider keys: bytes are sums over layers."""
    dims = [64, 128, 64, 128]
    runner = FakeRunner({f"layers.{i}": FakeLayer(head_dim=dim) for i, dim in enumerate(dims)})
    for layer, dim in zip(runner.layers.values(), dims, strict=True):
        layer.kv_cache = torch.zeros(24, 2, 16, 2 * dim)
    options = {"skip_layers": (0,), "initial_layers_count": 1, "initial_layers_key_bits": 8}
    with install_turboquant_hooks(runner, **options) as handle:
        stats = handle.stats()
        assert list(handle) == ["layers.1", "layers.2", "layers.3"]
        per_layer = [2 * (128 + 64 + 4), 2 * (32 + 32 + 4), 2 * (64 + 64 + 4)]
        assert stats["bytes_per_token_compressed"] == sum(per_layer)
        assert stats["store_bytes"] == 24 * 16 * sum(per_layer)
        assert stats["bytes_per_token_native"] == sum(2 * 2 * dim * 4 for dim in dims[1:])


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_s12_what_is_allocated_is_what_is_viewed(head_size):
    """For both kinds of layer and every preset: bytes of the spec, elements of the shape, and bytes of the store."""
    kinds = specs(head_size)
    from turboquant.integration.backend import backend_of

    for name, preset in PRESETS.items():
        token = head_size * (preset["key_bits"] + preset["value_bits"]) // 8 + 4
        backend = backend_of(TurboQuantConfig.from_options(name), **preset)
        shape = backend.get_kv_cache_shape(3, 32, 8, head_size)
        store = CompressedBlockStore(build_codec(8, head_size, **preset), 3, 8, 32)
        assert backend.token_bytes(head_size) == token and math.prod(shape) == store.nbytes == 3 * 32 * 8 * token
        assert all(3 * packed(spec, token).page_size_bytes == store.nbytes for spec in kinds)


# ---- blocks that change hands ----------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_s13_full_pool_with_prefix_hits(seed):
    """A pool of little more than one request: prefixes are shared, evicted, and their blocks given to others."""
    lists = Lists(num_blocks=16, block_size=8, window=11, sinks=3)
    scheduler, events = Scheduler(seed, num_blocks=16, block_size=8), Counter()
    while min(events[e] for e in ("reused", "shared", "preempted", "rejected")) < 3:
        step = scheduler.step()
        lists.run_step(step)
        scheduler.commit(step)
        events = scheduler.events
    lists.assert_compressed(200)


def cold_and_hits(engine):
    """Outputs by layer of a prompt's last chunk: computed cold, behind two cached blocks, and behind four; and the
    expected one.
    """
    rows = [normal(80, 4, 64, seed=1), exact_keys(80, 2, 64, seed=2), exact_values(80, 2, 64, seed=3)]
    first, outputs = [3, 7, 1, 9, 2], []
    for blocks, chunks in ((first, (0, 32, 50, 65, 80)), ([3, 7, 12, 13, 14], (32, 50, 65, 80)), (first, (65, 80))):
        for start, end in pairwise(chunks):
            output = engine.step([(blocks, end, *(x[start:end] for x in rows))])
        outputs.append(output)
    return outputs, causal_attention(rows[0][65:].double(), rows[1].double(), rows[2].double(), 64**-0.5)


def test_s14_prefix_hits_answer_like_the_cold_run(monkeypatch):
    """Compressed layers and a skipped one agree about the prefix, cold, on a hit and on another."""
    runner = FakeRunner({f"layers.{i}": FakeLayer() for i in range(3)})
    options = {"mode": "full_tq", "buffer_size": 0, "sink_size": 0, "skip_layers": (-1,)}
    with install_turboquant_hooks(runner, **FINE, **options) as handle:
        outputs, expected = cold_and_hits(FakeEngine(runner, monkeypatch))
        assert handle.stats()["layers_skipped"] == {"layers.2": "is in skip_layers"}
        assert handle.stats()["tokens_read_compressed"] == (32 + 50 + 65) * 2 + 65
    for output in outputs:
        for found in output.values():
            assert_close(found, expected, EXACT)


def test_s15_preempted_and_aborted_requests():
    """Preempted with half a ring, recomputed elsewhere, and beside the blocks of a prompt that was aborted."""
    lists = Lists(num_blocks=16, window=12, capacity=4)
    request = lists.request(100)
    for new in (30, *[1] * 5):
        lists.run({request: new})
    tokens, blocks = list(request.rows), list(request.blocks)
    aborted = lists.request(64, blocks=blocks[:4])
    lists.run({aborted: 25})
    back = lists.request(100, blocks=[*blocks[2:], *[lists.free.pop() for _ in range(3)]])
    again = (lists.random_rows(35)[0], lists.keys[tokens], lists.values[tokens])
    lists.run({back: 35}, again)
    for _ in range(20):
        lists.run({back: 1})
    assert len(back.rows) == 55 and lists.read_exact > 0
    lists.assert_compressed(300)


def test_s16_prefix_hits_of_huge_blocks():
    """A block as large as those of hybrid models, shared by two requests in one step."""
    block = 1056
    lists = Lists(num_blocks=5, block_size=block, group=1)
    donor = lists.request(block + 50)
    lists.run({donor: block + 40})
    hit = lists.request(2 * block, blocks=[donor.blocks[0], lists.free.pop()])
    hit.rows = donor.rows[:block]
    lists.run({hit: 30, donor: 1})
    lists.assert_compressed(2 * block)


# ---- what the engine around asks for ---------------------------------------------------------------------------
def test_s17_connectors_are_refused_and_a_block_is_one_region():
    """Nothing moves pages behind our back; and the bytes of a block, copied to another pool, are the whole of it."""
    runner = FakeRunner({"layers.0": FakeLayer()})
    runner.vllm_config.kv_transfer_config = object()
    with pytest.raises(UnsupportedEngineError, match="kv_transfer_config is set"):
        install_turboquant_hooks(runner)
    nothing = {"speculative_config": None, "cache_config": None, "model_config": None}
    config = SimpleNamespace(parallel_config=SimpleNamespace(), kv_transfer_config=object(), **nothing)
    assert compat.config_objections(config)[0].startswith("kv_transfer_config is set")
    here, there = Lists(num_blocks=6), Lists(num_blocks=6, fill=0)
    request = here.prefilled(16)
    for block in request.blocks:
        there.layer.store.pages[block] = torch.frombuffer(
            bytearray(here.layer.store.pages[block].numpy().tobytes()), dtype=torch.uint8
        ).view(there.layer.store.pages[block].shape)
    there.keys, there.values = here.keys, here.values
    there.run({request: 1})
    there.assert_compressed(16)


def test_s18_drafters_are_named_or_refused(monkeypatch):
    """The hooks serve drafts that have no layers; compressed pages serve named drafters, and refuse others."""
    runner = FakeRunner({"layers.0": FakeLayer()})
    for method, served in (("ngram", True), ("eagle", False), ("mtp", False)):
        runner.vllm_config.speculative_config = SimpleNamespace(method=method, num_speculative_tokens=3)
        assert bool(compat.engine_objections(runner)) != served
    for method, served in (("ngram", True), ("eagle3", True), ("mtp", True), ("medusa", False)):
        speculative = SimpleNamespace(method=method)
        nothing = {"kv_transfer_config": None, "cache_config": None, "model_config": None}
        config = SimpleNamespace(parallel_config=SimpleNamespace(), speculative_config=speculative, **nothing)
        assert bool(compat.config_objections(config)) != served
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend

    monkeypatch.setattr(compat, "layer_place", lambda prefix: compat.LayerPlace(0, 12, draft=True))
    options = TurboQuantConfig(skip_layers=(0,), initial_layers_count=2, initial_layers_key_bits=8)
    arguments = {
        "head_size": 64, "head_size_v": None, "cache_config": None, "alibi_slopes": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "attn_backend": None, "per_layer_sliding_window": None,
        "extra_impl_args": {}, "prefix": "model.mtp.layers.0.self_attn.attn",
    }  # fmt: skip
    assert backend.backend_for(options, Attention, arguments).key_bits == options.key_bits == 4


@pytest.mark.parametrize("preset", PRESETS)
def test_s19_reported_tokens_are_the_allocated_bytes(preset):
    """For dense and windowed caches of odd sizes; options that make no sense are refused, not computed with."""
    config = TurboQuantConfig.from_options(preset, buffer_size=24, sink_size=3)
    for heads, dim, tokens, block in ((1, 64, 1, 16), (3, 80, 1000, 48), (8, 128, 513, 32)):
        cache = TurboQuantKVCache(heads, dim, tokens, block_size=block, config=config)
        per_token = PageFormat(dim, block, config.key_bits, config.value_bits).bytes_per_token(heads)
        pages = cache.memory_bytes()["pages"]
        assert pages == cache._layer.store.pages.untyped_storage().nbytes()
        assert 0 <= pages - tokens * per_token < block * per_token
        page = PageFormat(dim, block, config.key_bits, config.value_bits)
        fits = page.tokens_per_gib(heads, 7)
        assert fits * per_token * 7 <= GIB < (fits + 1) * per_token * 7
    for bad in ({"buffer_size": -1}, {"sink_size": -4}, {"ring_share": 0.0}, {"ring_share": 1.5}, {"key_bits": 5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TurboQuantConfig(**bad)


def test_s20_compressed_and_skipped_layers_are_all_layers():
    """A hybrid model: every layer is compressed, or skipped with a reason."""
    layers = {f"attn.{i}": FakeLayer() for i in range(4)}
    layers |= {"mla.0": FakeLayer(mla=True), "linear.0": SimpleNamespace(kv_cache=[torch.zeros(2)])}
    with install_turboquant_hooks(FakeRunner(layers), skip_layers=(0, -1)) as handle:
        stats = handle.stats()
        assert stats["layers_compressed"] + len(stats["layers_skipped"]) == stats["layers"] == len(layers)
        assert list(handle) == ["attn.1", "attn.2"]
        assert all(stats["layers_skipped"].values())
    with pytest.raises(UnsupportedEngineError, match="no attention layer can be compressed: linear"):
        install_turboquant_hooks(FakeRunner({"linear.0": layers["linear.0"], "mla.0": layers["mla.0"]}))


@paths
@pytest.mark.parametrize("block", [1, 8, 16, 24, 32, 48, 528, 784, 1056])
def test_s21_unusual_block_sizes(kernels, block):
    lists = Lists(kernels=kernels, block_size=block, num_blocks=4 + 140 // block, window=5)
    first, second = lists.prefilled(37, room=4), lists.prefilled(9, room=4)
    lists.run({first: 1, second: 3})
    lists.assert_compressed(36)


def test_s22_profiling_without_a_cache():
    """Metadata None, and a cache that is None or empty: the native method answers, and nothing is written."""
    runner = FakeRunner({"layers.0": FakeLayer()})
    layer = runner.layers["layers.0"]
    with install_turboquant_hooks(runner, mode="full_tq") as handle:
        pages = handle["layers.0"].cache.store.pages
        for cache in (None, torch.tensor([])):
            output = torch.ones(3, 4, 64)
            layer.impl.forward(layer, output, None, None, cache, None, output=output)
            assert (output == 0).all()
        assert not pages.any() and handle.stats()["tokens_encoded"] == 0
