"""Hostile rows, sizes, arguments and files: what is served stays right, and everything else is refused by name."""

import ast
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_vllm import FakeLayer, FakeRunner
from helpers import FLOAT32_EPS, Request, attention, build_codec, normal, plain_step, rel_l2, rng

import turboquant
from turboquant import PageFormat, TurboQuantConfig, TurboQuantKVCache, TurboQuantMSE, TurboQuantProd, codebook
from turboquant.batch import AttentionBatch
from turboquant.calibration import LayerTransforms
from turboquant.capture import ExactRing, KVCaptureEngine
from turboquant.codec import KeyTransform, KVCodec
from turboquant.integration import activation, compat, plugin
from turboquant.integration import vllm as hooks
from turboquant.quantizer import GroupQuantizer, Quantized
from turboquant.rotation import make_rotation, qjl_matrix
from turboquant.score import HybridScorer
from turboquant.store import CompressedBlockStore

PACKAGE = Path(turboquant.__file__).parent
HEADS, DIM, BLOCK, WINDOW, SINKS = 2, 64, 32, 40, 4
CODECS = [
    {},
    {"key_bits": 8, "value_bits": 4},
    {"key_bits": 3, "value_bits": 2},
    {"key_bits": 2, "value_bits": 2},
    {"key_quantizer": "prod"},
    {"value_quantizer": "group"},
    {"rotation": "haar"},
]


def refused(call, *parts):
    """The call raises ValueError or TypeError, whose message has all parts: the name or value, and what is allowed."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


def cases(*rows):
    """Parametrise over (name, thing, parts of the message)."""
    return pytest.mark.parametrize(("thing", "parts"), [row[1:] for row in rows], ids=[row[0] for row in rows])


# ---- rows ------------------------------------------------------------------------------------------------------
def rows(length, heads=HEADS, seed=1):
    return normal(1, heads, length, DIM, seed=seed)


class Facade:
    """A TurboQuantKVCache of one sequence beside the list of its tokens: exact ones, and what their codes say."""

    def __init__(self, window=WINDOW, sinks=SINKS, max_tokens=700, dtype=torch.float32, **options):
        config = TurboQuantConfig(buffer_size=window, sink_size=sinks, **options)
        self.codec, self.window, self.sinks = build_codec(HEADS, DIM, **options), window, sinks
        self.cache = TurboQuantKVCache(HEADS, DIM, max_tokens, config=config, block_size=BLOCK, dtype=dtype)
        self.keys, self.values = torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM)

    def append(self, keys, values):
        self.cache.append(keys, values)
        self._remember(keys, values)

    def attend(self, query, keys, values):
        """(found, expected, mean size of the values that are mixed) of the query's rows, all [T, H_q, d or 1]."""
        history = len(self.keys)
        found = self.cache.attend(query, keys, values)[0].transpose(0, 1)
        self._remember(keys, values)
        coded_keys, coded_values = self._decoded()
        position = torch.arange(len(self.keys))
        exact = (position >= history - self.window) | (position < self.sinks)
        all_keys = torch.where(exact[:, None, None], self.keys.double(), coded_keys)
        all_values = torch.where(exact[:, None, None], self.values.double(), coded_values)
        rows, scale = query[0].transpose(0, 1), DIM**-0.5
        expected = attention(rows, all_keys, all_values, history, scale)
        sizes = attention(rows, all_keys, all_values.norm(dim=-1, keepdim=True), history, scale)
        return found, expected, sizes

    def _remember(self, keys, values):
        self.keys = torch.cat([self.keys, keys[0].transpose(0, 1)])
        self.values = torch.cat([self.values, values[0].transpose(0, 1)])

    def _decoded(self):
        codec = self.codec
        keys = codec.key.decode(codec.encode_keys(self.keys)).double() @ codec.key.rotation.matrix.double()
        values = codec.value.decode(codec.encode_values(self.values)).double() @ codec.value.rotation.matrix.double()
        return keys, values


def served(keys, values, query=None, new=3, **options):
    """Cache all but the last `new` tokens, then attend with these; see `Facade.attend`."""
    facade = Facade(**options)
    facade.append(keys[:, :, :-new], values[:, :, :-new])
    query = rows(new, 2 * HEADS, seed=9) if query is None else query
    return facade.attend(query, keys[:, :, -new:], values[:, :, -new:])


def assert_close(found, expected, sizes, units=64):
    assert torch.isfinite(found).all()
    assert ((found - expected).norm(dim=-1, keepdim=True) <= units * FLOAT32_EPS * sizes + 1e-37).all()


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e-20, 1e-3, 1e4, 1e20, 1e36])
def test_values_of_any_size(options, size):
    """Zero, denormal and huge values, next to ordinary keys."""
    found, expected, sizes = served(rows(90), size * rows(90, seed=2), **options)
    assert torch.isfinite(found).all()
    if size == 0:
        assert (found == 0).all()
    elif size >= 1e-30:
        assert_close(found, expected, sizes)
    else:  # denormal numbers have fewer digits
        assert (found.double().norm(dim=-1, keepdim=True) <= 2 * sizes + 1e-40).all()


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-20, 1e-3])
def test_tiny_keys_weigh_all_tokens_alike(options, size):
    """Logits that are all but zero: the output is the mean of the values."""
    found, expected, sizes = served(size * rows(90), rows(90, seed=2), **options)
    assert_close(found, expected, sizes)


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("size", [1e3, 1e10, 1e30])
def test_huge_keys_stay_within_the_values(options, size):
    """The softmax is a choice of one token; whichever, nothing overflows and no output is larger than every value."""
    keys, values = size * rows(90), rows(90, seed=2)
    found, _, _ = served(keys, values, **options)
    assert torch.isfinite(found).all()
    assert found.norm(dim=-1).max() <= 1.3 * values.norm(dim=-1).max()


@pytest.mark.parametrize("options", CODECS, ids=str)
def test_one_giant_channel(options):
    keys = rows(90)
    keys[..., 5] = 778.0
    query = rows(3, 2 * HEADS, seed=9)
    query[..., 5] *= 1e-3
    assert_close(*served(keys, rows(90, seed=2), query, **options), units=1024)


@pytest.mark.parametrize("options", CODECS, ids=str)
def test_keys_that_are_all_equal(options):
    """A constant is quantised alike everywhere, so that the compressed tokens share their weight evenly."""
    keys = rows(1).expand(-1, -1, 90, -1)
    assert_close(*served(keys, rows(90, seed=2), **options))


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_a_broken_cached_token_stays_with_its_sequence(options, bad, side):
    """Two sequences in one cache; a number of the first one's history is broken, compressed and exact."""
    config = TurboQuantConfig(buffer_size=WINDOW, sink_size=SINKS, **options)
    outputs = []
    for position in (None, 2, 30, 80):
        cache = TurboQuantKVCache(HEADS, DIM, 100, batch_size=2, config=config, block_size=BLOCK)
        pair = [normal(2, HEADS, 90, DIM, seed=s) for s in (1, 2)]
        if position is not None:
            pair[side][0, 0, position, 7] = bad
        cache.append(*pair)
        one = [normal(2, heads, 1, DIM, seed=3) for heads in (2 * HEADS, HEADS, HEADS)]
        outputs.append(cache.attend(*one))
    assert all(torch.equal(output[1], outputs[0][1]) for output in outputs)
    assert all(torch.equal(output[0, 2:], outputs[0][0, 2:]) for output in outputs), "the other KV head"
    assert not any(torch.equal(output[0, :2], outputs[0][0, :2]) for output in outputs[1:]), "broken rows are visible"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_half_precision(dtype):
    most = torch.finfo(dtype).max if dtype == torch.float16 else 1e37
    values = (rows(90, seed=2).sign() * most).to(dtype)
    cache = TurboQuantKVCache(HEADS, DIM, 100, config=TurboQuantConfig(buffer_size=8), dtype=dtype)
    cache.append(rows(90).to(dtype), values)
    found = cache.attend(rows(1, 2 * HEADS, seed=3).to(dtype))
    assert torch.isfinite(found).all() and found.abs().max() > 0


# ---- sizes -----------------------------------------------------------------------------------------------------
BOUNDARIES = {
    "block": BLOCK,
    "blocks": 2 * BLOCK,
    "window": WINDOW,
    "sinks": SINKS,
    "both": WINDOW + SINKS,
    "chunk": 512,
}


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
@pytest.mark.parametrize("new", [1, 4])
def test_lengths_around_every_boundary(boundary, edge, new):
    length = boundary + edge + new
    assert_close(*served(rows(length), rows(length, seed=2), new=new))


@pytest.mark.parametrize("new", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, BLOCK, BLOCK + 1, 129])
def test_first_chunks_of_every_size(new):
    """A sequence without history, of one token and of more than the window."""
    facade = Facade()
    assert_close(*facade.attend(rows(new, 2 * HEADS, seed=9), rows(new), rows(new, seed=2)))
    assert_close(*facade.attend(rows(1, 2 * HEADS, seed=8), rows(1, seed=5), rows(1, seed=6)))


def test_a_sequence_of_one_token_is_its_value():
    value = rows(1, seed=2)
    found = TurboQuantKVCache(HEADS, DIM, 10).attend(rows(1, 2 * HEADS), rows(1), value)
    torch.testing.assert_close(found, value.repeat_interleave(2, 1))


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_batch_without_requests(window, sinks):
    """Nothing is written, read or assigned."""
    engine = KVCaptureEngine(6, BLOCK, window, 4, sinks=sinks)
    layer = engine.add_layer("layer", build_codec(HEADS, DIM), HEADS, torch.float32)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(torch.zeros(1, dtype=torch.int64), empty, empty.view(0, 3), BLOCK)
    before = layer.store.pages.clone()
    nothing, output = torch.zeros(0, HEADS, DIM), torch.zeros(0, 2 * HEADS, DIM)
    plan = engine.begin_step(batch)
    engine.ingest(layer, nothing, nothing, empty)
    HybridScorer(0.1).attend(layer, plan, output, (nothing, nothing), output)
    assert torch.equal(layer.store.pages, before) and batch.host_lens == [] and (engine.ring.owner == -1).all()


# ---- arguments: configuration and page format --------------------------------------------------------------------
WRONG_OPTIONS = [
    ("key_quantizer", ["mse"]), ("value_quantizer", ["lloyd"]), ("value_quantizer", {}), ("rotation", 3),
    ("ring_share", "0.5"), ("ring_share", [1]), ("ring_share", True), ("ring_share", float("nan")),
    ("skip_layers", 3), ("skip_layers", "0,1"), ("skip_layers", [1.5]), ("skip_layers", ["a"]),
    ("skip_layers", [None]), ("skip_layers", [True]), ("buffer_size", True), ("buffer_size", "128"), ("sink_size", [4]),
    ("seed", "0"), ("seed", 1.0), ("key_bits", True), ("value_bits", [4]), ("value_group", "32"),
    ("initial_layers_count", "1"), ("shadow_interval", 0.5), ("scale_candidates", "5"), ("scale_candidates", 10**9 + 1),
    ("calibration", ["a"]), ("calibration", 1),
]  # fmt: skip
OPTION_IDS = [f"{name}={value!r}" for name, value in WRONG_OPTIONS]


@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS, ids=OPTION_IDS)
def test_options_of_a_wrong_type(name, value):
    refused(lambda: TurboQuantConfig(**{name: value}), name)


@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS, ids=OPTION_IDS)
def test_json_with_options_of_a_wrong_type(name, value, monkeypatch):
    """As the environment variable and vLLM's additional configuration bring them."""
    monkeypatch.setenv(activation.PRESET, "k4v4")
    monkeypatch.setenv(activation.OPTIONS, json.dumps({name: value}))
    refused(activation.requested, name)
    refused(lambda: activation.requested({"turboquant": {"preset": "k4v4", name: value}}), name)


@pytest.mark.parametrize("preset", [3, ["k4v4"], {"a": 1}, True])
def test_presets_of_a_wrong_type(preset):
    refused(lambda: TurboQuantConfig.from_options(preset), "preset", "k4v4")
    refused(lambda: activation.requested({"turboquant": {"preset": preset}}), "preset", "k4v4")


@pytest.mark.parametrize("options", [{"skip_layers": {1}}, {"buffer_size": object()}, {"nothing": 1}], ids=str)
def test_a_refused_enable_no_alloc_leaves_no_variable(options, monkeypatch):
    """Half of the two variables would compress the next engine with other options than asked for."""
    for name in (activation.PRESET, activation.OPTIONS):
        monkeypatch.setenv(name, "")
    refused(lambda: turboquant.enable_no_alloc("k3v2", **options), *options)
    assert activation.requested() is None


@cases(
    ("float head size", (64.0, 16, 4, 4), ["64.0"]),
    ("text head size", ("64", 16, 4, 4), ["'64'"]),
    ("float block size", (64, 16.0, 4, 4), ["block_size=16.0"]),
    ("key bits", (64, 16, 5, 4), ["5", "4"]),
    ("bool key bits", (64, 16, True, 4), ["True"]),
    ("value bits", (64, 16, 4, None), ["None"]),
    ("negative key scalars", (64, 16, 4, 4, -1), ["key_scalars=-1"]),
    ("no value scalars", (64, 16, 4, 4, 1, 0), ["value_scalars=0"]),
)
def test_page_formats(thing, parts):
    refused(lambda: PageFormat(*thing), *parts)


@pytest.mark.parametrize("pages", [None, [1], np.zeros((2, 2112), np.uint8), torch.zeros((), dtype=torch.uint8)])
def test_pages_that_are_none(pages):
    refused(lambda: PageFormat(64, 32, 4, 4).check(pages), "uint8", "2176")


@pytest.mark.parametrize(("heads", "layers"), [(0, 1), (1, 0), (-1, 1), ("a", 1)])
def test_capacity_of_impossible_sizes(heads, layers):
    refused(lambda: PageFormat(64, 16, 4, 4).tokens_per_gib(heads, layers), "must be")


# ---- arguments: the framework-free cache -------------------------------------------------------------------------
@cases(
    ("float heads", {"num_kv_heads": 1.0}, ["num_kv_heads=1.0"]),
    ("bool heads", {"num_kv_heads": True}, ["num_kv_heads=True"]),
    ("text heads", {"num_kv_heads": "1"}, ["num_kv_heads='1'"]),
    ("float head size", {"head_dim": 64.0}, ["64.0"]),
    ("negative head size", {"head_dim": -64}, ["-64"]),
    ("float tokens", {"max_tokens": 10.5}, ["max_tokens=10.5"]),
    ("no tokens", {"max_tokens": None}, ["max_tokens=None"]),
    ("float batch", {"batch_size": 1.5}, ["batch_size=1.5"]),
    ("text block", {"block_size": "16"}, ["block_size='16'"]),
    ("preset as configuration", {"config": "k4v4"}, ["config", "TurboQuantConfig"]),
    ("dictionary as configuration", {"config": {"key_bits": 3}}, ["config", "TurboQuantConfig"]),
    ("empty dictionary", {"config": {}}, ["config", "TurboQuantConfig"]),
    ("negative layer", {"layer_index": -1}, ["layer_index=-1"]),
    ("float layer", {"layer_index": 1.5}, ["layer_index=1.5"]),
    ("text scale", {"scale": "a"}, ["scale='a'"]),
    ("nan scale", {"scale": float("nan")}, ["scale=nan"]),
    ("infinite scale", {"scale": float("inf")}, ["scale=inf"]),
    ("text dtype", {"dtype": "float32"}, ["dtype", "float32"]),
    ("integer dtype", {"dtype": torch.int8}, ["torch.int8"]),
    ("fp8 dtype", {"dtype": torch.float8_e4m3fn}, ["float8_e4m3fn"]),
    ("unknown device", {"device": "nodevice"}, ["nodevice"]),
    ("transform", {"transform": "x"}, ["transform", "KeyTransform"]),
)
def test_caches(thing, parts):
    refused(lambda: TurboQuantKVCache(**{"num_kv_heads": 1, "head_dim": 64, "max_tokens": 10, **thing}), *parts)


ROWS = [
    ("list", lambda x: x.tolist(), ["Tensor"]),
    ("none", lambda x: None, ["Tensor"]),
    ("numpy", lambda x: x.numpy(), ["Tensor"]),
    ("integers", lambda x: x.int(), ["torch.int32"]),
    ("bools", lambda x: x.bool(), ["torch.bool"]),
    ("complex", lambda x: x.to(torch.complex64), ["torch.complex64"]),
    ("other device", lambda x: x.to("meta"), ["meta", "cpu"]),
    ("sparse", lambda x: x.to_sparse(), ["sparse"]),
]


def snapshot(cache):
    ring = cache._engine.ring
    tensors = (cache._layer.store.pages, cache._layer.recent.keys, ring.entry_of_part, ring.owner, ring.written)
    return [x.clone() for x in tensors], len(cache)


def assert_unchanged(cache, before):
    tensors, length = snapshot(cache)
    assert length == before[1] and all(torch.equal(a, b) for a, b in zip(tensors, before[0], strict=True))


def filled_cache():
    facade = Facade(max_tokens=60)
    facade.append(rows(50), rows(50, seed=2))
    return facade.cache


@cases(*ROWS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_rows_that_are_no_rows_change_nothing(thing, parts, side):
    cache = filled_cache()
    before = snapshot(cache)
    pair = {"key": rows(3), "value": rows(3, seed=2)}
    refused(lambda: cache.append(**{**pair, side: thing(pair[side])}), side, *parts)
    assert_unchanged(cache, before)


@cases(*ROWS)
def test_queries_that_are_no_queries_change_nothing(thing, parts):
    cache = filled_cache()
    before = snapshot(cache)
    query = rows(3, 2 * HEADS, seed=3)
    refused(lambda: cache.attend(thing(query)), "query", *parts)
    refused(lambda: cache.attend(thing(query), rows(3), rows(3)), "query", *parts)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("strided", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: torch.cat([x, x], -1)[..., :DIM],
    lambda x: x.clone().requires_grad_(),
], ids=["tokens first", "coordinates first", "padded", "with gradient"])  # fmt: skip
def test_strides_do_not_matter(strided):
    query, pair = rows(3, 2 * HEADS, seed=3), (rows(3, seed=4), rows(3, seed=5))
    expected = filled_cache().attend(query, *pair)
    found = filled_cache().attend(strided(query), *(strided(x) for x in pair))
    assert rel_l2(found.detach(), expected).max() < 8 * FLOAT32_EPS


def test_expanded_rows_are_read_as_they_look():
    query, key, value = rows(3, 2 * HEADS, seed=3), rows(1, seed=4), rows(1, seed=5)
    pair = [x.expand(-1, -1, 3, -1) for x in (key, value)]
    assert torch.equal(filled_cache().attend(query, *pair), filled_cache().attend(query, *(x.clone() for x in pair)))


# ---- arguments: quantizers ---------------------------------------------------------------------------------------
ROTATION = make_rotation("auto", DIM, 0)


@cases(
    ("no rotation", lambda: TurboQuantMSE(DIM, 4, None), ["rotation"]),
    ("rotation of another size", lambda: TurboQuantMSE(80, 4, ROTATION), ["80", "64"]),
    ("float size", lambda: TurboQuantMSE(64.0, 4, ROTATION), ["64.0"]),
    ("bool bits", lambda: TurboQuantMSE(DIM, True, ROTATION), ["bits=True"]),
    ("text candidates", lambda: TurboQuantMSE(DIM, 4, ROTATION, "a"), ["scale_candidates", "'a'"]),
    ("no sketch", lambda: TurboQuantProd(DIM, 4, ROTATION, None), ["sketch"]),
    ("sketch of another size", lambda: TurboQuantProd(DIM, 4, ROTATION, torch.zeros(3, 3)), ["sketch", "(3, 3)"]),
    ("text bits", lambda: TurboQuantProd(DIM, "4", ROTATION, qjl_matrix(DIM, 1)), ["'4'"]),
    ("bits that no page holds", lambda: TurboQuantProd(DIM, 5, ROTATION, qjl_matrix(DIM, 1)), ["5"]),
    ("group bits", lambda: GroupQuantizer(DIM, 5), ["5"]),
    ("float group", lambda: GroupQuantizer(DIM, 4, 8.0), ["8.0"]),
)
def test_quantizers(thing, parts):
    refused(thing, *parts)


@cases(
    ("another size", lambda: normal(3, 80, seed=1), ["80", "64"]),
    ("no dimension", lambda: torch.tensor(1.0), ["64"]),
    *((name, lambda change=change: change(normal(3, DIM, seed=1)), parts) for name, change, parts in ROWS[:6]),
)
@pytest.mark.parametrize("quantizer", ["mse", "prod"])
def test_rows_that_a_quantizer_cannot_take(thing, parts, quantizer):
    refused(lambda: quantizer_of(quantizer).quantize(thing()), *parts)


def quantizer_of(name):
    if name == "mse":
        return TurboQuantMSE(DIM, 4, ROTATION)
    return TurboQuantProd(DIM, 4, ROTATION, qjl_matrix(DIM, 1))


@cases(
    ("nothing", lambda q: None, ["Quantized"]),
    ("a tuple", lambda q: (q.codes, q.scalars), ["Quantized"]),
    ("half of the codes", lambda q: Quantized(q.codes[:, :32], q.scalars), ["32", "64"]),
    ("wide codes", lambda q: Quantized(q.codes.long(), q.scalars), ["torch.int64", "uint8"]),
    ("float codes", lambda q: Quantized(q.codes.float(), q.scalars), ["torch.float32", "uint8"]),
    ("no scalars", lambda q: Quantized(q.codes, q.scalars[:, :0]), ["scalars"]),
    ("scalars of fewer rows", lambda q: Quantized(q.codes, q.scalars[:2]), ["scalars"]),
)
@pytest.mark.parametrize("method", ["dequantize", "to_bytes"])
def test_codes_that_a_quantizer_cannot_take(thing, parts, method):
    quantizer = quantizer_of("mse")
    quantized = thing(quantizer.quantize(normal(3, DIM, seed=1)))
    refused(lambda: getattr(quantizer, method)(quantized), *parts)


@cases(
    ("nothing", lambda raw: None, ["uint8"]),
    ("short", lambda raw: raw[:, :-1], ["33", "34"]),
    ("signed", lambda raw: raw.to(torch.int8), ["torch.int8", "uint8"]),
    ("float", lambda raw: raw.float(), ["torch.float32", "uint8"]),
)
def test_bytes_that_a_quantizer_cannot_take(thing, parts):
    quantizer = quantizer_of("mse")
    raw = quantizer.to_bytes(quantizer.quantize(normal(3, DIM, seed=1)))
    refused(lambda: quantizer.from_bytes(thing(raw)), *parts)


# ---- arguments: codec, store, capture and scorer -----------------------------------------------------------------
@cases(
    ("no configuration", (None, 0, HEADS, DIM), ["config", "TurboQuantConfig"]),
    ("no heads", (TurboQuantConfig(), 0, 0, DIM), ["num_kv_heads=0"]),
    ("negative heads", (TurboQuantConfig(), 0, -2, DIM), ["num_kv_heads=-2"]),
    ("negative layer", (TurboQuantConfig(), -1, HEADS, DIM), ["layer_index=-1"]),
    ("head size that no page holds", (TurboQuantConfig(), 0, HEADS, 20), ["20"]),
    ("transform", (TurboQuantConfig(), 0, HEADS, DIM, "x"), ["transform", "KeyTransform"]),
)
def test_codecs(thing, parts):
    refused(lambda: KVCodec.build(*thing), *parts)


@cases(
    ("lists", ([1.0], [1.0]), ["Tensor"]),
    ("nothing", (None, None), ["Tensor"]),
    ("integers", (torch.zeros(2, 64).int(), torch.ones(2, 64).int()), ["torch.int32"]),
    ("complex", (torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.complex64)), ["torch.complex64"]),
)
def test_key_transforms(thing, parts):
    refused(lambda: KeyTransform(*thing), *parts)


def make_store(**changed):
    arguments = {"codec": build_codec(HEADS, DIM), "num_blocks": 4, "num_kv_heads": HEADS, "block_size": 16}
    return CompressedBlockStore(**{**arguments, **changed})


@cases(
    ("negative blocks", {"num_blocks": -1}, ["num_blocks=-1"]),
    ("heads that the codec does not know", {"num_kv_heads": 3}, ["num_kv_heads=3", "2"]),
    ("no codec", {"codec": None}, ["codec"]),
    ("a list of pages", {"pages": [1]}, ["pages", "uint8"]),
    ("unknown device", {"device": "nodevice"}, ["nodevice"]),
)
def test_stores(thing, parts):
    refused(lambda: make_store(**thing), *parts)


def slots_and_rows(slots=(1, 2), heads=HEADS, dim=DIM, dtype=torch.int64):
    return (
        torch.tensor(slots, dtype=dtype),
        normal(len(slots), heads, dim, seed=1),
        normal(len(slots), heads, dim, seed=2),
    )


def with_values(values):
    return (*slots_and_rows()[:2], values)


WRITES = [
    ("list of slots", lambda: ([1, 2], *slots_and_rows()[1:]), ["slots", "Tensor"]),
    ("float slots", lambda: slots_and_rows(dtype=torch.float32), ["slots", "torch.float32"]),
    ("bool slots", lambda: slots_and_rows(dtype=torch.bool), ["slots", "torch.bool"]),
    ("slots in two dimensions", lambda: (torch.tensor([[1], [2]]), *slots_and_rows()[1:]), ["slots", "(2, 1)"]),
    ("more heads", lambda: slots_and_rows(heads=3), ["keys", "3"]),
    ("one head", lambda: slots_and_rows(heads=1), ["keys", "1"]),
    ("another head size", lambda: slots_and_rows(dim=80), ["keys", "80"]),
    ("flat rows", lambda: tuple(x.flatten(1) if x.dim() == 3 else x for x in slots_and_rows()), ["keys", "(2, 128)"]),
    ("fewer values", lambda: with_values(normal(1, HEADS, DIM, seed=2)), ["values", "(1, 2, 64)"]),
    ("more values", lambda: with_values(normal(3, HEADS, DIM, seed=2)), ["values", "(3, 2, 64)"]),
    ("values of one head", lambda: with_values(normal(2, 1, DIM, seed=2)), ["values", "(2, 1, 64)"]),
    ("integer values", lambda: with_values(torch.ones(2, HEADS, DIM).int()), ["values", "torch.int32"]),
    ("complex values", lambda: with_values(torch.ones(2, HEADS, DIM, dtype=torch.complex64)), ["values", "complex64"]),
    ("other device", lambda: with_values(torch.ones(2, HEADS, DIM, device="meta")), ["values", "meta", "cpu"]),
]


@cases(*WRITES)
def test_writes_that_no_store_takes_change_nothing(thing, parts):
    store = make_store()
    before = store.pages.clone()
    refused(lambda: store.write(*thing()), *parts)
    assert torch.equal(store.pages, before)


@cases(*WRITES)
def test_rows_that_no_capture_takes_change_nothing(thing, parts):
    engine, layer, _ = make_engine()
    slots, keys, values = thing()
    before = [x.clone() for x in (layer.store.pages, layer.recent.keys, engine.ring.written)]
    refused(lambda: engine.ingest(layer, keys, values, slots), *parts)
    after = (layer.store.pages, layer.recent.keys, engine.ring.written)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("slot", [64, 10**6])
def test_a_slot_beyond_the_pool_is_an_error(slot):
    """On the CPU; on a device nothing is checked, for that would wait for it."""
    with pytest.raises((ValueError, IndexError)):
        make_store().write(*slots_and_rows(slots=(1, slot)))


@cases(
    ("list", [1], ["Tensor"]),
    ("float", torch.tensor([1.0]), ["torch.float32"]),
)
@pytest.mark.parametrize("method", ["read", "read_slots"])
def test_reads_that_no_store_has(thing, parts, method):
    refused(lambda: getattr(make_store(), method)(thing), *parts)


@cases(
    ("text blocks", {"num_blocks": "4"}, ["num_blocks='4'"]),
    ("no block size", {"block_size": 0}, ["block_size=0"]),
    ("negative window", {"window": -1}, ["window=-1"]),
    ("float window", {"window": 8.5}, ["window=8.5"]),
    ("negative capacity", {"capacity": -1}, ["capacity=-1"]),
    ("negative sinks", {"sinks": -1}, ["sinks=-1"]),
)
@pytest.mark.parametrize("kind", [ExactRing, KVCaptureEngine])
def test_rings(thing, parts, kind):
    arguments = {"num_blocks": 4, "block_size": 16, "window": 8, "capacity": 4, **thing}
    refused(lambda: kind(**arguments), *parts)


def make_engine():
    """An engine with one layer, and a plan of two tokens of one request."""
    engine = KVCaptureEngine(4, 16, 8, 4)
    layer = engine.add_layer("layer", build_codec(HEADS, DIM), HEADS, torch.float32)
    return engine, layer, engine.begin_step(plain_step([(Request(0, blocks=[1]), 0, 2)], 16).batch)


@cases(
    ("the same name twice", {"name": "layer"}, ["'layer'"]),
    ("heads that the codec does not know", {"num_kv_heads": 3}, ["num_kv_heads=3"]),
    ("no codec", {"codec": None}, ["codec"]),
    ("text dtype", {"dtype": "float32"}, ["dtype"]),
    ("integer dtype", {"dtype": torch.int8}, ["torch.int8"]),
)
def test_layers(thing, parts):
    engine, _, _ = make_engine()
    layer = {"name": "new", "codec": build_codec(HEADS, DIM), "num_kv_heads": HEADS, "dtype": torch.float32}
    refused(lambda: engine.add_layer(**{**layer, **thing}), *parts)


@cases(
    ("starts of no request", {"query_start": torch.tensor([0])}, ["query_start"]),
    ("starts of two requests", {"query_start": torch.tensor([0, 2, 3])}, ["query_start"]),
    ("float starts", {"query_start": torch.tensor([0.0, 2.0])}, ["query_start", "torch.float32"]),
    ("list of starts", {"query_start": [0, 2]}, ["query_start", "Tensor"]),
    ("lengths of two requests", {"seq_lens": torch.tensor([2, 3])}, ["seq_lens"]),
    ("float lengths", {"seq_lens": torch.tensor([2.0])}, ["seq_lens", "torch.float32"]),
    ("flat table", {"block_table": torch.tensor([1])}, ["block_table", "(1,)"]),
    ("float table", {"block_table": torch.tensor([[1.5]])}, ["block_table", "torch.float32"]),
    ("no table", {"block_table": None}, ["block_table"]),
    ("no block size", {"block_size": 0}, ["block_size=0"]),
    ("another block size", {"block_size": 8}, ["block_size=8", "16"]),
)
def test_batches(thing, parts):
    batch = {"query_start": torch.tensor([0, 2]), "seq_lens": torch.tensor([2]), "block_table": torch.tensor([[1]])}
    engine, _, _ = make_engine()
    refused(lambda: engine.begin_step(AttentionBatch(**{**batch, "block_size": 16, **thing})), *parts)


@cases(
    ("text scale", ("a",), ["scale='a'"]),
    ("nan scale", (float("nan"),), ["scale=nan"]),
    ("negative window", (0.1, -1), ["window=-1"]),
    ("float window", (0.1, 1.5), ["window=1.5"]),
    ("negative softcap", (0.1, 0, -1.0), ["softcap=-1.0"]),
)
def test_scorers(thing, parts):
    refused(lambda: HybridScorer(*thing), *parts)


@cases(
    ("query heads", {"query": normal(2, 3, DIM, seed=1)}, ["query", "3"]),
    ("query size", {"query": normal(2, 4, 80, seed=1)}, ["query", "80"]),
    ("fewer queries", {"query": normal(1, 4, DIM, seed=1)}, ["query", "1"]),
    ("no query", {"query": None}, ["query", "Tensor"]),
    ("integer query", {"query": torch.ones(2, 4, DIM).int()}, ["query", "torch.int32"]),
    ("own size", {"own": (normal(2, HEADS, 80, seed=2),) * 2}, ["key", "80"]),
    ("one own head", {"own": (normal(2, 1, DIM, seed=2),) * 2}, ["key", "1"]),
    ("fewer own rows", {"own": (normal(1, HEADS, DIM, seed=2),) * 2}, ["key", "1"]),
    ("keys without values", {"own": (normal(2, HEADS, DIM, seed=2), None)}, ["value", "Tensor"]),
    ("output size", {"output": torch.zeros(2, 4, 32)}, ["output", "32"]),
    ("output heads", {"output": torch.zeros(2, 2, DIM)}, ["output", "2"]),
    ("fewer outputs", {"output": torch.zeros(1, 4, DIM)}, ["output", "1"]),
    ("integer output", {"output": torch.zeros(2, 4, DIM).int()}, ["output", "torch.int32"]),
)
def test_scored_rows(thing, parts):
    _, layer, plan = make_engine()
    own = (normal(2, HEADS, DIM, seed=2), normal(2, HEADS, DIM, seed=3))
    arguments = {"query": normal(2, 4, DIM, seed=1), "own": own, "output": torch.zeros(2, 4, DIM)}
    refused(lambda: HybridScorer(0.1).attend(layer, plan, **{**arguments, **thing}), *parts)


# ---- arguments: the hooks and the workers' methods ---------------------------------------------------------------
@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.0-fake")
    return FakeRunner({f"layers.{i}": FakeLayer() for i in range(2)})


@cases(
    ("text", {"key_transforms": "x"}, ["key_transforms"]),
    ("list", {"key_transforms": [1]}, ["key_transforms"]),
    ("no transform", {"key_transforms": {"layers.0": "x"}}, ["key_transforms", "layers.0"]),
    ("of other heads", {"key_transforms": {"layers.0": KeyTransform.identity(1, 64)}}, ["(1, 64)", "(2, 64)"]),
    ("of an unknown layer", {"key_transforms": {"layers.9": KeyTransform.identity(2, 64)}}, ["layers.9"]),
    ("skipped layers in text", {"skip_layers": "0"}, ["skip_layers"]),
    ("fractions of layers", {"skip_layers": [0.5]}, ["skip_layers"]),
)
def test_installations_that_are_refused_leave_no_trace(runner, thing, parts):
    refused(lambda: hooks.install_turboquant_hooks(runner, **thing), *parts)
    assert all("forward" not in vars(layer.impl) for layer in runner.layers.values())
    hooks.install_turboquant_hooks(runner).uninstall()


@pytest.mark.parametrize("nobody", [None, 3, "runner"])
def test_what_is_no_model_runner(nobody):
    refused(lambda: hooks.install_turboquant_hooks(nobody), "model_runner", repr(nobody))


@pytest.mark.parametrize("nobody", [None, object()], ids=["None", "object"])
def test_what_is_no_engine(nobody):
    refused(lambda: turboquant.attach(nobody), "llm", "collective_rpc")


@pytest.mark.parametrize("prompts", [[1, 2], "text", [None]], ids=str)
def test_prompts_that_are_none(prompts, tmp_path):
    pytest.importorskip("vllm")
    llm = types.SimpleNamespace()
    refused(lambda: turboquant.calibrate(llm, tmp_path / "c.safetensors", prompts), "prompts")


@pytest.fixture
def worker(runner):
    worker = types.SimpleNamespace(model_runner=runner)
    for method in plugin.WORKER_METHODS:
        setattr(worker, method.__name__, types.MethodType(method, worker))
    return worker


@pytest.mark.parametrize(
    "method",
    ["tq_nothing", "model_runner", "__init__", "__class__", "__setattr__", "execute_model", "tq_call", 3, None, ""],
)
def test_workers_call_their_own_methods_only(worker, method):
    """A refusal comes back as data, whatever the caller sent."""
    worker.execute_model = lambda *_: pytest.fail("called something else")
    status, message = worker.tq_call(method)
    assert status == "ValueError"
    assert str(method) in message and "tq_set_mode" in message


@cases(
    ("no mode", ("tq_set_mode",), ["mode"]),
    ("two modes", ("tq_set_mode", "off", "off"), ["tq_set_mode"]),
    ("stats of something", ("tq_stats", 1), ["tq_stats"]),
    ("free something", ("tq_free", "x"), ["tq_free"]),
    ("finish without start", ("tq_calibration_finish",), ["calibration"]),
)
def test_workers_refuse_other_arguments_as_data(worker, thing, parts):
    status, message = worker.tq_call(*thing)
    assert status in ("ValueError", "TypeError", "HookError")
    for part in parts:
        assert part in message


def test_a_second_calibration_leaves_no_trace(worker):
    """Started twice (a caller that lost the first answer): refused, or finished to the original methods."""
    impls = [layer.impl for layer in worker.model_runner.layers.values()]
    worker.tq_call("tq_calibration_start")
    worker.tq_call("tq_calibration_start")
    worker.tq_call("tq_calibration_finish")
    assert all("forward" not in vars(impl) for impl in impls)


# ---- files -----------------------------------------------------------------------------------------------------
@pytest.fixture
def book(tmp_path, monkeypatch):
    """A copy of a shipped codebook file, which `load_copy` reads."""
    path = tmp_path / "d64.json"
    path.write_text((codebook._repository_folder() / "d64.json").read_text())
    monkeypatch.setattr(codebook, "_repository_folder", lambda: tmp_path)
    return path


def load_copy(bits=4):
    return codebook.load.__wrapped__(64, bits)


def test_the_copy_is_what_is_loaded(book):
    assert load_copy() == codebook.load(64, 4)


@cases(
    ("empty", lambda text: "", []),
    ("truncated", lambda text: text[: len(text) // 2], []),
    ("a list", lambda text: "[1]", []),
    ("no books", lambda text: '{"dim": 64}', []),
    ("binary", lambda text: "\x00\x01", []),
)
def test_broken_codebook_files(book, thing, parts):
    book.write_text(thing(book.read_text()))
    refused(load_copy, str(book), *parts)


def negate(entry):
    entry["centroids"] = [-c for c in entry["centroids"]]


def change(entry, name, value):
    entry[name] = value


@cases(
    ("no centroids", lambda e: e.pop("centroids"), ["centroids"]),
    ("too few", lambda e: e["centroids"].pop(), ["15", "16"]),
    ("not ascending", negate, ["centroids"]),
    ("text", lambda e: change(e, "centroids", ["a"] * 16), ["centroids"]),
    ("not a number", lambda e: e["centroids"].__setitem__(0, float("nan")), ["centroids"]),
    ("one digit", lambda e: e["centroids"].__setitem__(3, e["centroids"][3] * 1.001), ["centroids"]),
    ("without distortion", lambda e: e.pop("mse"), ["mse"]),
)
def test_codebooks_that_are_not_what_was_shipped(book, thing, parts):
    """Pages decode to something else with other centroids: a changed file must not be used."""
    stored = json.loads(book.read_text())
    thing(stored["books"]["4"])
    book.write_text(json.dumps(stored))
    refused(load_copy, str(book), *parts)


def test_a_codebook_of_another_head_size(book):
    stored = json.loads(book.read_text())
    stored["dim"] = 128
    book.write_text(json.dumps(stored))
    refused(load_copy, str(book), "128", "64")


@pytest.fixture
def calibration(tmp_path):
    """(path, tensors): a calibration file; `rewrite` stores other tensors with a checksum of their own."""
    pytest.importorskip("safetensors")
    from turboquant.integration.calibration_file import save_transforms

    transform = KeyTransform(normal(HEADS, DIM, seed=1), normal(HEADS, DIM, seed=2).exp())
    path = save_transforms(tmp_path / "c.safetensors", {"layer": LayerTransforms(transform)})
    return path, {"layer.center": transform.center, "layer.gain": transform.gain}


def rewrite(path, tensors):
    from safetensors.torch import save_file

    from turboquant.integration.calibration_file import VERSION, checksum

    save_file(tensors, str(path), {"turboquant_calibration": str(VERSION), "sha256": checksum(tensors)})


def load_calibration(path):
    from turboquant.integration.calibration_file import load_transforms

    return load_transforms(path)


def test_a_truncated_calibration_file(calibration):
    path, _ = calibration
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(lambda: load_calibration(path), str(path))


def test_every_damaged_byte_of_the_tensors_is_noticed(calibration):
    path, _ = calibration
    whole = path.read_bytes()
    for position in rng(5).integers(len(whole) - 4 * 2 * HEADS * DIM, len(whole), 20).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        refused(lambda: load_calibration(path), str(path), "damaged")


def test_a_damaged_header_never_gives_another_transform(calibration):
    path, tensors = calibration
    whole = path.read_bytes()
    for position in range(8, len(whole) - 4 * 2 * HEADS * DIM):
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        try:
            loaded = load_calibration(path)
        except ValueError as error:
            assert str(path) in str(error)
            continue
        (layer,) = loaded.values()
        assert layer.turning is None
        assert torch.equal(layer.constant.center, tensors["layer.center"])
        assert torch.equal(layer.constant.gain, tensors["layer.gain"])


@cases(
    ("no gain", lambda t: {"layer.center": t["layer.center"]}, ["center"]),
    ("another name", lambda t: {"layer": t["layer.center"]}, ["layer"]),
    ("half a turning centre", lambda t: {**t, "layer.turning_gain": t["layer.gain"].clone()}, ["turning_center"]),
    ("a part too many", lambda t: {**t, "layer.scale": t["layer.gain"].clone()}, ["scale"]),
    ("shapes that differ", lambda t: {**t, "layer.gain": t["layer.gain"][:1].clone()}, ["(2, 64)", "(1, 64)"]),
    ("not finite", lambda t: {**t, "layer.gain": t["layer.gain"] * torch.inf}, ["finite"]),
    ("a gain of zero", lambda t: {**t, "layer.gain": t["layer.gain"] * 0}, ["zero"]),
    ("integers", lambda t: {**t, "layer.gain": t["layer.gain"].int() + 1}, ["int32"]),
    ("half precision", lambda t: {**t, "layer.gain": t["layer.gain"].bfloat16()}, ["torch.bfloat16"]),
    ("a number", lambda t: {**t, "layer.gain": torch.tensor(1.0)}, ["(2, 64)", "()"]),
)
def test_calibrations_with_a_checksum_of_their_own(calibration, thing, parts):
    path, tensors = calibration
    rewrite(path, thing(tensors))
    refused(lambda: load_calibration(path), str(path), *parts)


@cases(
    ("one number", torch.ones(1), ["expected two finite numbers"]),
    ("a scalar", torch.tensor(1.0), ["expected two finite numbers"]),
    ("a row each", torch.ones(2, 1), ["expected two finite numbers"]),
    ("integers", torch.ones(2, dtype=torch.int64), ["expected two finite numbers"]),
    ("not finite", torch.tensor([1.0, torch.nan]), ["nan", "expected two finite numbers"]),
)
def test_what_bits_cost_with_a_checksum_of_its_own(calibration, thing, parts):
    from turboquant.integration.calibration_file import load_damages

    path, tensors = calibration
    refused(lambda: load_damages(path), str(path), "does not say what few bits cost")
    rewrite(path, {**tensors, "layer.damage": thing})
    refused(lambda: load_damages(path), str(path), "layer.damage", *parts)
    rewrite(path, {**tensors, "layer.damage": torch.tensor([0.5, 0.25])})
    assert load_damages(path) == {"layer": {"keys": 0.5, "values": 0.25}}


# ---- no code in data ---------------------------------------------------------------------------------------------
CODE_LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
EVALUATING = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"}


def findings(tree):
    """What could run code that comes from data: (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in CODE_LOADERS)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_load = name == "torch.load" and options.get("weights_only") != "True"
            unsafe_option = "True" in (options.get("shell"), options.get("allow_pickle"))
            if name in EVALUATING or unsafe_load or unsafe_option:
                yield node.lineno, name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_of_the_package_runs_code_from_data(path):
    assert list(findings(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import torch; torch.load(f)", "torch.load(f, weights_only=False)",
    "eval(x)", "exec(x)", "np.load(f, allow_pickle=True)", "subprocess.run(x, shell=True)", "os.system(x)",
])  # fmt: skip
def test_the_scan_sees_what_it_should(text):
    assert list(findings(ast.parse(text)))


@pytest.mark.parametrize("text", ["model.eval()", "torch.load(f, weights_only=True)", "np.load(f)", "re.compile(x)"])
def test_the_scan_sees_nothing_else(text):
    assert not list(findings(ast.parse(text)))
