"""Cases of wrong numbers: packing, rotations, norms, hostile memory, windows, and what is refused instead."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner, causal_attention
from helpers import (
    attention,
    build_codec,
    cosine,
    make_rotary,
    normal,
    page_owners,
    plain_step,
    planes_oracle,
    rel_l2,
    rng,
)
from lists import (
    EXACT,
    FINE,
    Lists,
    assert_close,
    decoded_page,
    encode_kernel,
    exact_keys,
    exact_values,
    page_planes,
    unpacked,
)

from turboquant import TurboQuantKVCache
from turboquant.batch import AttentionBatch
from turboquant.calibration import Moments
from turboquant.capture import KVCaptureEngine
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat
from turboquant.integration.vllm import UnsupportedEngineError, install_turboquant_hooks
from turboquant.packing import pack, unpack
from turboquant.rotary import SPAN
from turboquant.score import HybridScorer

paths = pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.interpreter)])


def on_both_paths(names, everywhere, interpreted):
    """Parameters for torch, and the fewer for the interpreted kernels, with `kernels` as the first name."""
    torch_only = [(False, *values) for values in everywhere]
    with_kernels = [pytest.param(True, *values, marks=pytest.mark.interpreter) for values in interpreted]
    return pytest.mark.parametrize(("kernels", *names), torch_only + with_kernels)


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")


def written_store(keys, values, *, block_size=16, kernels=False, fill=0xFF, **options):
    """A layer whose slots 0, 1, ... hold rows [n, H_kv, d]."""
    n, heads, dim = keys.shape
    engine = KVCaptureEngine(-(-n // block_size), block_size, 0, 0)
    layer = engine.add_layer("layer", build_codec(heads, dim, **options), heads, torch.float32)
    layer.store.pages.fill_(fill)
    layer.encode = encode_kernel() if kernels else None
    engine.ingest(layer, keys, values, torch.arange(n))
    return layer.store


def decoded(store, count, kernels=False):
    """Keys and values [n, H_kv, d] of the slots 0, 1, ..., in the original basis."""
    if not kernels:
        return store.read_slots(torch.arange(count))
    from turboquant.kernels.transcode import decode_rows

    return decode_rows(store, torch.arange(count), torch.float32, rotated=False)


def key_codes(store):
    """Codes [token, d] of the first page's keys, from its bytes alone."""
    planes, _ = page_planes(np.asarray(store.pages[0, 0]), store.codec, store.block_size)["key"]
    return unpacked(planes, store.codec.key.bits, store.codec.key.dim)


@on_both_paths(("bits", "floor"), [(2, 0.935), (3, 0.980), (4, 0.994)], [(3, 0.980)])
def test_c1_every_key_width_is_read_with_its_own_mask(kernels, bits, floor):
    """Codes of 3 bits that are masked to 2 would have a cosine below 0.2."""
    keys, values = normal(32, 1, 128, seed=1), normal(32, 1, 128, seed=2)
    store = written_store(keys, values, kernels=kernels, key_bits=bits)
    found = decoded(store, 32, kernels)[0]
    assert cosine(found, keys).mean() >= floor
    by_hand = decoded_page(store.pages[0, 0], store.codec, 16)[0]
    assert rel_l2(found[:16, 0], by_hand).max() < 1e-5
    if bits == 3:
        book = store.codec.key.centroids.double()
        masked = book[key_codes(store) & 3] @ store.codec.key.rotation.matrix.double()
        assert cosine(masked, keys[:16, 0]).mean() < 0.2
    assert store.format.token_bytes == 128 * bits // 8 + 64 + 4 < 2 * 2 * 128


@pytest.mark.parametrize("dim", [64, 72, 80, 96, 112, 128, 160, 192, 256, 512])
def test_c2_head_sizes_that_are_no_power_of_two(dim):
    """The rotation is orthonormal, all coordinates are stored, and attention is that of the plain rows."""
    lists = Lists(dim=dim, num_blocks=10, key_bits=3, value_bits=4, value_quantizer="group")
    matrix = lists.layer.codec.key.rotation.matrix.double()
    assert (matrix @ matrix.T - torch.eye(dim)).abs().max() < 1e-5
    request = lists.prefilled(40)
    lists.run({request: 3})
    store = lists.layer.store
    assert cosine(store.read_slots(torch.tensor([request.blocks[0] * 16]))[0], lists.keys[:1]).min() > 0.97
    assert store.format.token_bytes == dim * 3 // 8 + 2 + dim * 4 // 8 + 4 * dim // math.gcd(32, dim)
    lists.assert_compressed(40)


@on_both_paths(("dim",), [(96,), (192,)], [(192,)])
def test_c3_the_tail_of_a_head_is_stored(kernels, dim):
    """Keys that are zero except in their last third come back, whatever the size of a group is."""
    keys = normal(8, 1, dim, seed=dim)
    keys[..., : dim - dim // 3] = 0
    store = written_store(keys, keys, kernels=kernels, key_bits=3, value_bits=4)
    for rows in decoded(store, 8, kernels):
        assert cosine(rows[..., -(dim // 3) :], keys[..., -(dim // 3) :]).min() > 0.97
        assert cosine(rows, keys).mean() >= 0.98


def error_and_store(dim):
    """Mean relative error of 64 rows that attend to 256 compressed tokens."""
    lists = Lists(dim=dim, group=1, num_blocks=40, key_bits=3, value_bits=4, value_quantizer="group")
    request = lists.prefilled(256, room=64)
    query, keys, values = lists.random_rows(64)
    output = lists.run({request: 64}, (query, keys, values), check=False)
    lists.assert_compressed(256)
    return rel_l2(output, lists.plain(query, request.rows, 256)).mean(), lists.layer.store


@pytest.mark.parametrize("dim", [192, 576])
def test_c4_large_heads_lose_no_more_and_are_counted_as_they_are_stored(dim):
    error, store = error_and_store(dim)
    assert error <= 1.15 * error_and_store(128)[0]
    per_token = dim * 3 // 8 + 2 + dim * 4 // 8 + 4 * dim // 32
    assert store.format.bytes_per_token(1) == store.format.token_bytes == per_token
    assert store.pages.untyped_storage().nbytes() == store.nbytes == store.num_blocks * 16 * per_token


@on_both_paths(("bits", "dim"), itertools.product((2, 3, 4), (64, 80, 128)), [(2, 64), (3, 80), (4, 64)])
def test_c5_a_single_token_gives_its_value_element_by_element(kernels, bits, dim):
    """A ramp, so that a wrong stride shows in every coordinate."""
    lists = Lists(dim=dim, kernels=kernels, num_blocks=6, key_bits=4, value_bits=bits)
    query, keys, _ = lists.random_rows(1)
    ramp = torch.arange(float(dim)).expand(1, 1, -1)
    request = lists.request(20)
    lists.run({request: 1}, (query, keys, ramp), check=False)
    batch = AttentionBatch(torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([request.blocks]), 16)
    output = torch.empty_like(query)
    lists.scorer.attend(lists.layer, lists.engine.begin_step(batch), query, None, output)
    by_hand = decoded_page(lists.layer.store.pages[request.blocks[0], 0], lists.layer.codec, 16)[1][0]
    assert (output - by_hand).abs().max() < 1e-4 * dim
    assert (output - ramp).abs().max() < dim * {2: 0.8, 3: 0.45, 4: 0.25}[bits]
    assert rel_l2(output, ramp.expand_as(output)).max() < {2: 0.4, 3: 0.22, 4: 0.12}[bits]


GOLDEN = {
    2: (np.arange(16) % 4, ["0055aaff"]),
    3: (np.arange(16) % 8, ["0055aaff", "cccc"]),
    4: (np.arange(16), ["8091a2b3c4d5e6f7"]),
}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_c6_packing_is_the_documented_one_for_every_byte(bits):
    """Every byte of every plane takes all 256 values; the golden bytes make a change of layout deliberate."""
    codes, golden = GOLDEN[bits]
    assert [plane.numpy().tobytes().hex() for plane in pack(torch.from_numpy(codes.astype(np.uint8)), bits)] == golden
    for dim in (8, 16, 64, 80, 96, 128):
        widths = {2: (2,), 3: (2, 1), 4: (4,)}[bits]
        planes = [np.arange(256)[:, None] * (3 + 4 * i) + 37 * np.arange(dim * w // 8) for i, w in enumerate(widths)]
        planes = [(plane % 256).astype(np.uint8) for plane in planes]
        codes = unpacked(planes, bits, dim)
        packed = pack(torch.from_numpy(codes.astype(np.uint8)), bits)
        assert all(np.array_equal(a, b) for a, b in zip(packed, planes_oracle(codes, bits), strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(packed, planes, strict=True))
        assert np.array_equal(unpack(packed, bits), codes)


SIZES = (0, 1e-30, 1e-6, 1, 778, 1e5, torch.nan, torch.inf)


def outputs_beside_a_broken_token(kernels, bad):
    """Outputs of a later step of two requests, of which the first got a key and a value with a number `bad`."""
    lists = Lists(kernels=kernels, num_blocks=12)
    broken, other = lists.request(64), lists.request(64)
    rows, later = lists.random_rows(20, seed=1), lists.random_rows(4, seed=2)
    rows[1][2, 0, 7], rows[2][5, 0, 9] = bad, bad
    lists.run({broken: 10, other: 10}, rows, check=False)
    found = lists.run({broken: 1, other: 3}, later, check=False)
    assert_close(found[1:], lists.plain(later[0][1:], other.rows, 10), EXACT)
    return found


@on_both_paths(("size",), [(size,) for size in SIZES], [(0,), (1e5,), (torch.nan,)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_c7_norms_of_every_size(kernels, size):
    """The cosine does not depend on the norm, a zero key scores exactly 0, and a broken token stays its own."""
    if not math.isfinite(size):
        clean, spoilt = (outputs_beside_a_broken_token(kernels, number) for number in (0.5, size))
        assert torch.equal(clean[1:], spoilt[1:]) and not torch.equal(clean[0], spoilt[0])
        return
    plain = normal(16, 1, 64, seed=5)
    plain[3] = 1.0  # constant: no range for a scale made of minimum and maximum
    keys = plain * size
    found, _ = decoded(written_store(keys, plain, kernels=kernels), 16, kernels)
    if size:
        assert cosine(found, keys).min() > 0.98 and rel_l2(found, keys).max() < 0.2
    else:
        assert (found == 0).all()


@paths
@pytest.mark.parametrize("fill", [0xFF, 0x46])  # NaN, and 1e4 as bfloat16
def test_c8_stale_bytes_never_reach_an_output(kernels, fill):
    """Bit-equal to the same steps over a zeroed pool."""
    outputs = []
    for byte in (0, fill):
        lists = Lists(kernels=kernels, num_blocks=12, fill=byte, window=5, sinks=2, sliding=30)
        for ring_data in (lists.layer.recent.keys, lists.layer.recent.values):
            ring_data.view(torch.uint8).fill_(byte)
        first, second = lists.prefilled(37, room=16), lists.prefilled(3)
        outputs.append(lists.run({first: 1, second: 2}))
        lists.assert_compressed(1)
    assert torch.equal(*outputs)


@paths
def test_c9_strides_are_not_those_that_the_shapes_suggest(kernels):
    """Pages inside larger ones, a block table that is a view of a wider one, and expanded lengths."""
    wide = []

    def padded(shape):
        wide.append(torch.zeros(shape[0], shape[1] + 1, shape[2] + 48, dtype=torch.uint8))
        return wide[0][:, :-1, 16:-32]

    lists = Lists(kernels=kernels, num_blocks=14, heads=2, pages=padded)
    requests = [lists.prefilled(20, room=4) for _ in range(3)]
    parts = lists.parts(dict.fromkeys(requests, 1))
    table = torch.full((3, 9), 2**31 - 1, dtype=torch.int32)
    table[:, 4:6] = torch.tensor([request.blocks for request in requests])
    batch = AttentionBatch(torch.arange(4), torch.tensor([21]).expand(3), table[:, 4:6], 16)
    step, rows = plain_step(parts, 16, len(lists.keys)), lists.random_rows(3)
    output = lists.compute(step, rows, batch)
    lists.run_step(step, rows)
    assert_close(output, lists.expected(plain_step(parts, 16, step.first_row), rows[0]), EXACT)
    assert (wide[0][:, -1] == 0).all() and (wide[0][..., :16] == 0).all() and (wide[0][..., -32:] == 0).all()
    lists.assert_compressed(60)


@paths
def test_c10_slot_minus_one_is_no_slot(kernels):
    """Flooring would write the last slot of the last block, truncation slot -1 of block 0."""
    store = written_store(*(normal(48, 1, 64, seed=s) for s in (1, 2)))
    layer = KVCaptureEngine(3, 16, 0, 0).add_layer("layer", store.codec, 1, torch.float32)
    layer.store.pages.copy_(store.pages)
    layer.encode = encode_kernel() if kernels else None
    slots = torch.tensor([-1, 21, -1, -1])
    layer.ingest(KVCaptureEngine(3, 16, 0, 0).ring, *(normal(4, 1, 64, seed=s) for s in (3, 4)), slots)
    changed = (layer.store.pages != store.pages)[:, 0].numpy()
    owners = page_owners(store.codec, 16)
    assert changed[1][owners == 5].any()
    changed[1][owners == 5] = False
    assert not changed.any()


def far_pages(shape, stride=3 << 29):
    """Pages whose blocks lie `stride` bytes apart, in address space that is hardly ever touched."""
    size = (shape[0] - 1) * stride + shape[1] * shape[2]
    return torch.empty(size, dtype=torch.uint8).as_strided(shape, (stride, shape[2], 1))


@paths
def test_c11_offsets_beyond_two_gigabytes(kernels):
    """Block 2 begins 3 GiB into the pool, and a slot number is one of 2^31 and more elements away."""
    lists = Lists(kernels=kernels, num_blocks=3, pages=far_pages)
    assert lists.layer.store.pages.stride(0) * 2 > 2**31
    request = lists.request(32, blocks=[2, 1])
    lists.run({request: 20})
    lists.run({request: 1})
    lists.assert_compressed(20)


def logit_error(key_quantizer):
    """Mean error of q.k in units of its standard deviation, for keys like their queries, over 50 seeds."""
    errors = []
    for seed in range(50):
        codec = KVCodec.build(TurboQuantConfig(key_bits=2, key_quantizer=key_quantizer, seed=seed), 0, 1, 64)
        keys = normal(2000, 1, 64, seed=1)
        query = keys + normal(2000, 1, 64, seed=2) / 2
        found = codec.decode_keys(codec.key.decode(codec.encode_keys(keys)))
        errors.append(((found - keys) * query).sum(-1).double())
    errors = torch.cat(errors)
    return errors.mean() / errors.std()


def test_c12_the_sketch_removes_the_bias_and_costs_its_bytes():
    """Without the signs of the residual, 2-bit keys shrink every logit of a matching query."""
    assert abs(logit_error("prod")) < 0.01
    stores, keys = [], normal(16, 1, 64, seed=3)
    for options in ({}, {"key_quantizer": "prod"}):
        stores.append(written_store(keys, keys, key_bits=2, **options))
    plain, sketched = stores
    assert not torch.equal(decoded(plain, 16)[0], decoded(sketched, 16)[0])
    assert (plain.format.token_bytes, sketched.format.token_bytes) == (16 + 32 + 4, 16 + 32 + 6)
    assert sketched.nbytes == sketched.pages.untyped_storage().nbytes()
    cache = TurboQuantKVCache(1, 64, 64, config=TurboQuantConfig(key_bits=2, key_quantizer="prod"))
    assert cache.memory_bytes()["pages"] == 64 * 54
    coarse = sketched.codec.key.mse
    shrunk = coarse.decode(coarse.encode(coarse.rotation.forward(keys)))
    assert (shrunk * coarse.rotation.forward(keys)).sum() < 0.8 * keys.square().sum()


# ---- large key biases ------------------------------------------------------------------------------------------
def rope(x, positions, base=1e6):
    """Rotary embedding of x [n, d] at positions [n], halves rotated against each other."""
    half = x.shape[1] // 2
    angle = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)


ROPE_BASE = 1e6
# Pairs of 128 coordinates that turn by less than a radian within a span, and one that turns by 13.
SLOW, FAST = [j for j in range(64) if SPAN * ROPE_BASE ** (-j / 64) < 1], 4


def rope_of(context):
    return make_rotary(128, context, base=ROPE_BASE, fastest=1.0)


def biased_rows(seed, pairs, count, dim=128):
    """Keys with a channel of +-247 in each pair and queries behind them, both float64 [n, 1, d] after RoPE."""
    bias = np.zeros(dim)
    bias[pairs + 64 * rng(13).integers(0, 2, len(pairs))] = rng(14).choice([-1, 1], len(pairs)) * 247.0
    keys = rope(normal(count, dim, seed=seed).double() + torch.from_numpy(bias), torch.arange(count))
    query = rope(normal(64, dim, seed=seed + 1).double() / 2, torch.full((64,), count))
    return keys[:, None], query[:, None]


def biased_transform(pairs, count, rotary=None):
    """Calibrated on other rows of the same kind."""
    moments, (keys, query) = Moments.empty(1, 128, rotary), biased_rows(7, pairs, count)
    moments.add(keys, query.repeat(count // 64, 1, 1), torch.arange(count))
    return replace(moments.transform(), rotary=rotary)


def biased_cosine(pairs, count, transform, key_bits):
    """Mean output cosine of 64 queries over `count` compressed tokens."""
    lists = Lists(dim=128, group=1, num_blocks=count // 16 + 4, transform=transform, key_bits=key_bits, value_bits=4)
    (keys, query), values = biased_rows(3, pairs, count), normal(count, 1, 128, seed=9)
    table = torch.arange(count // 16 + 4)[None]
    lists.engine.begin_step(AttentionBatch(torch.tensor([0, count]), torch.tensor([count]), table, 16))
    lists.engine.ingest(lists.layer, keys.float(), values, torch.arange(count))
    batch = AttentionBatch(torch.tensor([0, 64]), torch.tensor([count + 64]), table, 16)
    output = torch.empty_like(query, dtype=torch.float32)
    lists.scorer.attend(lists.layer, lists.engine.begin_step(batch), query.float(), None, output)
    assert lists.is_smaller_than_bfloat16
    return cosine(output, attention(query, keys, values, count, 128**-0.5)).mean()


gap = pytest.mark.xfail(
    strict=True, reason="a pair that turns by radians within a span has no centre: 0.97 with 4 bits, 0.92 with 3"
)
SIX_SLOW, ONE_FAST = rng(15).choice(SLOW, 6, replace=False).tolist(), [57, 45, 50, FAST, 30, 48]


@pytest.mark.parametrize(
    ("pairs", "count", "key_bits"),
    [
        (SIX_SLOW, 4096, 4),
        (SIX_SLOW, 4096, 3),
        (ONE_FAST, 256, 8),
        pytest.param(ONE_FAST, 256, 4, marks=gap),
        pytest.param(ONE_FAST, 256, 3, marks=gap),
    ],
)
def test_c13_biased_keys_are_calibrated(pairs, count, key_bits):
    """A key bias of norm 605 under RoPE, also over many turns of some pairs, where one centre is too little."""
    constant, turning = (biased_transform(pairs, count, rotary) for rotary in (None, rope_of(count + 64)))
    plain, centred, turned = (biased_cosine(pairs, count, x, key_bits) for x in (None, constant, turning))
    assert plain < centred and plain < 0.98 <= turned
    assert centred < 0.98 or pairs != SIX_SLOW


# ---- what attention layers ask for -------------------------------------------------------------------------------
def refusal(layers, **options):
    with pytest.raises(UnsupportedEngineError) as caught:
        install_turboquant_hooks(FakeRunner(layers), **options)
    assert all("forward" not in vars(layer.impl) for layer in layers.values() if hasattr(layer, "impl"))
    return str(caught.value)


def test_c14_attention_sinks_are_refused():
    """By both routes, by name: without its sink a head's output is only rescaled, which no cosine shows."""
    layers = {f"layers.{i}": FakeLayer() for i in range(3)}
    layers["layers.1"].impl.sinks = torch.full((4,), 8.0)
    assert "attention sinks (in layers.1)" in refusal(layers)
    arguments = {"cache_config": None, "alibi_slopes": None, "head_size": 64, "head_size_v": None}
    for sinks, reasons in ((torch.zeros(4), ["attention sinks"]), (None, [])):
        assert compat.arguments_objections(arguments | {"extra_impl_args": {"sinks": sinks}}) == reasons


SHORT, LONG = (30, 30, 1, 30, 4, 1), (150,) * 8


@on_both_paths(
    ("sliding", "ring", "steps"),
    [*((sliding, 32, SHORT) for sliding in (1, 32, 33)), (512, 112, LONG)],
    [(33, 32, SHORT)],
)
def test_c15_sliding_windows_over_a_ring_that_wraps(kernels, sliding, ring, steps):
    """Windows of one token, of the ring and of one more; blocks that left the window belong to others by now."""
    lists = Lists(kernels=kernels, num_blocks=80, sliding=sliding, window=ring, capacity=ring // 16 + 1)
    request = lists.request(sum(steps))
    for new in steps:
        lists.run({request: new})
        left = max(0, len(request.rows) - sliding - max(steps)) // 16
        lists.layer.store.pages[request.blocks[:left]] = 0xFF
        request.blocks[:left] = [0] * left
    assert lists.read_exact > 0
    lists.assert_compressed()


def test_c16_layers_of_other_sizes_and_layers_that_share():
    """Layers 4 and 5 read the caches of 1 and 2 with their rotation; every token is written once per cache."""
    dims, donors = [256, 256, 512, 256, 256, 512], {4: 1, 5: 2}
    engine = KVCaptureEngine(8, 16, 5, 8)
    layers = [engine.add_layer(str(i), build_codec(1, d, **FINE), 1, torch.float32) for i, d in enumerate(dims[:4])]
    layers += [layers[donor] for donor in donors.values()]
    makers = (normal, exact_keys, exact_values)
    rows = [{n: [make(n, 1, d, seed=40 * i + n) for make in makers] for n in (30, 4)} for i, d in enumerate(dims)]
    for first, new in ((0, 30), (30, 4)):
        batch = AttentionBatch(torch.tensor([0, new]), torch.tensor([first + new]), torch.tensor([[5, 2, 7]]), 16)
        slots = torch.tensor([[5, 2, 7][p // 16] * 16 + p % 16 for p in range(first, first + new)])
        plan = engine.begin_step(batch)
        for i, layer in enumerate(layers):
            source = rows[donors.get(i, i)]
            own = source[new][1:]
            if i not in donors:
                engine.ingest(layer, *own, slots)
            query, output = rows[i][new][0], torch.empty(new, 1, dims[i])
            HybridScorer(dims[i] ** -0.5).attend(layer, plan, query, own, output)
            keys, values = (torch.cat([source[30][j], source[4][j]])[: first + new] for j in (1, 2))
            assert_close(output, attention(query, keys, values, first, dims[i] ** -0.5), EXACT)
    assert len(engine.layers) == 4
    shared = {"layers.0": FakeLayer(), "layers.1": FakeLayer()}
    shared["layers.1"].kv_sharing_target_layer_name = "layers.0"
    assert "shares the cache of layers.0 (in layers.1)" in refusal(shared)


def test_c17_latent_attention_stays_native_or_is_refused():
    """Latents are never taken for keys: MLA layers are left alone, with a reason, and MLA models refused."""
    with install_turboquant_hooks(FakeRunner({"mla.0": FakeLayer(mla=True), "attn.0": FakeLayer()})) as handle:
        assert list(handle) == ["attn.0"]
        assert handle.stats()["layers_skipped"] == {"mla.0": "is multi-head latent attention (MLA)"}
    assert "no attention layer can be compressed" in refusal({"mla.0": FakeLayer(mla=True)})
    parallel, nothing = SimpleNamespace(), {"kv_transfer_config": None, "speculative_config": None}
    model = SimpleNamespace(use_mla=True)
    config = SimpleNamespace(parallel_config=parallel, cache_config=None, model_config=model, **nothing)
    assert compat.config_objections(config) == ["the model has multi-head latent attention (MLA)"]


@paths
def test_c18_soft_cap_at_large_logits(kernels):
    """At logits of 80 and more the cap decides, and leaving it out would be an error of more than a tenth."""
    lists = Lists(kernels=kernels, num_blocks=10, softcap=50.0, gain=40.0, sinks=3, window=4)
    request = lists.prefilled(40)
    rows = lists.random_rows(2, seed=77)
    found = lists.run({request: 2}, rows)
    logits = torch.einsum("thd,nd->thn", rows[0], lists.keys[:, 0]) * lists.scorer.scale
    assert 80 < logits.abs().max() < 300
    lists.assert_compressed(30)
    uncapped = attention(rows[0], lists.keys[request.rows], lists.values[request.rows], 40, lists.scorer.scale)
    assert rel_l2(uncapped, found).mean() > 0.1


def test_c19_the_baseline_is_native_and_the_other_arm_is_not(monkeypatch):
    """Off runs no codec at all and equals plain attention; full_tq counts its tokens and differs a little."""
    rows = [normal(40, heads, 64, seed=heads + 20) for heads in (4, 2)]
    query, keys, values = rows[0], rows[1], normal(40, 2, 64, seed=30)
    expected = causal_attention(query[39:], keys, values, 64**-0.5)
    errors = {}
    for mode in ("off", "full_tq"):
        runner = FakeRunner({"layers.0": FakeLayer()})
        engine = FakeEngine(runner, monkeypatch)
        with install_turboquant_hooks(runner, mode=mode, buffer_size=0, sink_size=0) as handle:
            for start, end in ((0, 39), (39, 40)):
                part = (x[start:end] for x in (query, keys, values))
                output = engine.step([([3, 7, 1], end, *part)])["layers.0"]
            stats, pages = handle.stats(), next(iter(handle.values())).cache.store.pages
            assert stats["bytes_per_token_compressed"] < stats["bytes_per_token_native"] / 3
        errors[mode] = rel_l2(output.flatten(), expected.flatten())
        compressed = mode == "full_tq"
        assert (stats["tokens_encoded"], stats["tokens_read_compressed"]) == ((40, 39) if compressed else (0, 0))
        assert bool(pages.any()) == compressed
    assert errors["off"] < 1e-6 < 1e-3 < errors["full_tq"] < 0.2
