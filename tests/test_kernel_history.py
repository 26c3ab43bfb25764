"""The portable history kernel against its torch twin, in Triton's interpreter where there is no device."""

from itertools import cycle, islice

import pytest
import torch

pytest.importorskip("triton")

from helpers import make_rotary, normal

from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import PRESETS, TurboQuantConfig
from turboquant.kernels import history
from turboquant.quantizer import TurboQuantMSE, TurboQuantProd
from turboquant.rotation import make_rotation, qjl_matrix
from turboquant.score import QueryGroup, tile_tokens, twin_history

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5  # float32 sums of a few hundred terms in another order
GARBAGE = 2**31 - 1  # in table entries that nobody may read

GROUPED = {"value_quantizer": "group"}
CODECS = {
    **PRESETS,
    "prod2-group2": {"key_quantizer": "prod", "key_bits": 2, "value_bits": 2, **GROUPED},
    "prod3-group3": {"key_quantizer": "prod", "key_bits": 3, "value_bits": 3, **GROUPED},
    "prod4-group4": {"key_quantizer": "prod", "key_bits": 4, "value_bits": 4, **GROUPED},
    "prod3-lloyd4": {"key_quantizer": "prod", "key_bits": 3, "value_bits": 4},
    "fp8-group3": {"key_bits": 8, "value_bits": 3, **GROUPED},
    "k4-group8": {"key_bits": 4, "value_bits": 8, **GROUPED},
}


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """Short histories in 32 splits are empty programs, which the interpreter runs one by one."""
    monkeypatch.setattr(history, "MAX_SPLITS", 3)


def shapes(*axes, count):
    """`count` combinations that walk through axes of coprime lengths together: all pairs with few cases."""
    return list(islice(zip(*map(cycle, axes), strict=False), count))


def make_codec(heads, dim, options, rotary=None):
    """A codec with a key transform, so that logits have a shift."""
    transform = KeyTransform(normal(heads, dim, seed=7) / 4, normal(heads, dim, seed=8).exp(), rotary)
    return KVCodec.build(TurboQuantConfig(**options), 1, heads, dim, transform, DEVICE)


def setup(lengths, codec, block_size=16, window=0, sinks=0):
    """A layer with these cached lengths in scattered pages; every other byte is 0xFF, and block 0 is nobody's."""
    heads, dim = codec.transform.center.shape
    blocks = max(1, -(-max(lengths) // block_size)) + 1
    engine = KVCaptureEngine(len(lengths) * blocks + 1, block_size, window, 64, DEVICE, sinks)
    layer = engine.add_layer("layer", codec, heads, torch.float32)
    layer.store.pages.fill_(0xFF)
    order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(3)) + 1
    table = order.int().view(len(lengths), -1).to(DEVICE)
    for i, length in enumerate(lengths):
        batch = AttentionBatch(torch.tensor([0, length], device=DEVICE), torch.tensor([length], device=DEVICE),
                               table[i : i + 1], block_size)  # fmt: skip
        keys, values = (normal(length, heads, dim, seed=10 * i + s).to(DEVICE) for s in (1, 2))
        engine.begin_step(batch)
        engine.ingest(layer, keys, values, slots_of(table[i], torch.arange(length, device=DEVICE), block_size))
        table[i, -(-length // block_size) + 1 :] = GARBAGE  # but for the block of the rows to come
    return engine, layer, table


def slots_of(table, positions, block_size):
    return table[positions // block_size].long() * block_size + positions % block_size


def poison(layer, planned, table):
    """Overwrite what no row may see: exact tokens, and tokens that have left every sliding window."""
    store, plan = layer.store, planned.plan
    for i, length in enumerate(planned.cached.tolist()):
        positions = torch.arange(length, device=DEVICE)
        hidden = plan.window.covers(plan.batch, planned.rows[i : i + 1], positions[None])[0]
        if planned.window:
            hidden |= positions <= length - planned.window
        slots = slots_of(table[i], positions[hidden], store.block_size)
        for plane in store.format.planes:
            store.format.view(store.pages, plane)[slots // store.block_size, :, slots % store.block_size] = 0xFF
        if planned.window:
            table[i, : max(0, length - planned.window + 1) // store.block_size] = 0  # vLLM's null block


def plan_step(lengths, engine, table, query_lens, sliding, heads, dim):
    """A group of all requests, padded to the longest; a request without query rows is padding."""
    query_lens = torch.tensor(query_lens, device=DEVICE)
    seq_lens = torch.where(query_lens > 0, torch.tensor(lengths, device=DEVICE) + query_lens, 0)
    starts = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    plan = engine.begin_step(AttentionBatch(starts, seq_lens, table, engine.block_size))
    length = int(query_lens.max())
    tile = tile_tokens(len(lengths), length, heads, dim)
    return QueryGroup(plan, range(len(lengths)), length, sliding, tile)


def compare(lengths, codec, group=3, query_lens=None, sliding=0, softcap=0.0, block_size=16, window=0, sinks=0):
    """Kernel and twin give the same outputs and the same lse."""
    engine, layer, table = setup(lengths, codec, block_size, window, sinks)
    heads, dim = codec.transform.center.shape
    planned = plan_step(lengths, engine, table, query_lens or [1] * len(lengths), sliding, heads * group, dim)
    poison(layer, planned, table)
    query = normal(len(lengths), heads, group, planned.length, dim, seed=99).to(DEVICE) * dim**-0.5 * 2
    rotated = codec.query(query.flatten(2, 3)).view(query.shape)
    waves = codec.waves(query.flatten(2, 3)).view(query.shape)
    found = history.history_kernel(layer, planned, rotated, waves, softcap)
    assert_same(found, twin_history(layer, planned, rotated, waves, softcap))


def assert_same(found, expected):
    """Relative L2 error of every output row, and error of every lse."""
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
    some = expected[1] > -torch.inf
    assert (found[0][~some] == 0).all()
    assert ((found[1] - expected[1]).abs()[some] <= TOLERANCE * expected[1].abs()[some].clamp(min=1)).all()
    error = (found[0] - expected[0]).norm(dim=-1)[some] / expected[0].norm(dim=-1)[some]
    assert (error < TOLERANCE).all(), error.max()


@pytest.mark.parametrize(
    ("name", "dim", "block_size", "group", "query_len"),
    shapes(CODECS, (64, 80, 128, 192, 64), (16, 32, 48), (1, 2, 7, 8), (1, 4, 4, 1, 1, 1, 4), count=2 * len(CODECS)),
)
def test_codecs_in_every_shape(name, dim, block_size, group, query_len):
    codec = make_codec(1 if dim > 80 else 2, dim, CODECS[name])
    compare([37, 5], codec, group, [query_len] * 2, block_size=block_size)


@pytest.mark.parametrize(
    ("name", "dim", "block_size", "rotary", "softcap"),
    [
        ("k4v4", 64, 16, {}, 0.0),
        ("k3v2", 80, 48, {"size": 40}, 2.0),
        ("k8v4", 64, 32, {"interleaved": True}, 0.0),
        ("prod3-group3", 64, 16, {"context": 64}, 0.0),  # shorter than the history: the last span goes on
    ],
)
def test_turning_centres(name, dim, block_size, rotary, softcap):
    codec = make_codec(2, dim, CODECS[name], make_rotary(dim, **rotary))
    compare([101, 5], codec, 3, [2, 1], softcap=softcap, block_size=block_size)
    compare([70, 32], codec, 1, softcap=softcap, block_size=block_size, window=9, sinks=5, sliding=40)


@pytest.mark.parametrize("name", ["k4v4", "prod3-group3"])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_sizes_are_padded_to_a_power_of_two(name, dim):
    compare([21], make_codec(1, dim, CODECS[name]), 2)


def test_latent_head_size():
    """Right, though not served: no common GPU has the shared memory."""
    compare([21], make_codec(1, 576, CODECS["k4v4"]), 1)


@pytest.mark.parametrize("block_size", [16, 24, 32])
def test_every_residue_of_the_length(monkeypatch, block_size):
    """With as many splits as there may be."""
    monkeypatch.setattr(history, "MAX_SPLITS", 32)
    codec = make_codec(1, 64, CODECS["k4v3"])
    compare(list(range(block_size - 2, block_size + 3)), codec, 1, block_size=block_size)


def test_one_bit_keys():
    """Which no configuration offers."""
    rotation = make_rotation("auto", 64, 5)
    codec = make_codec(2, 64, {})
    key = TurboQuantMSE(64, 1, rotation).to(DEVICE)
    compare([37, 5], KVCodec(key, codec.value, codec.transform))


@pytest.mark.parametrize("name", ["k8v4", "k3v2", "prod2-group2"])
@pytest.mark.parametrize("sliding", [1, 10, 33])
def test_sliding_window_over_recycled_blocks(name, sliding):
    """What has left the window of every row may have been overwritten, and its table entries with it."""
    compare([70, 9], make_codec(1, 64, CODECS[name]), 2, [4, 4], sliding=sliding)


@pytest.mark.parametrize("name", ["k8v4", "k4v4", "prod4-group4"])
@pytest.mark.parametrize(("window", "sinks"), [(12, 0), (12, 5), (0, 16)])
def test_exact_tokens_are_left_out(name, window, sinks):
    compare([40, 9], make_codec(2, 64, CODECS[name]), window=window, sinks=sinks)


@pytest.mark.parametrize("sliding", [30, 65])
def test_exact_tokens_within_a_sliding_window(sliding):
    compare([70, 9], make_codec(1, 64, CODECS["prod3-group3"]), 2, [1, 1], sliding=sliding, window=12, sinks=9)


@pytest.mark.parametrize("name", ["k8v4", "k2v2", "prod3-group3"])
def test_softcap_and_empty_history(name):
    compare([40, 0], make_codec(1, 64, CODECS[name]), softcap=2.0)


@pytest.mark.parametrize("name", ["k8v4", "k4v2", "prod4-group4"])
def test_padded_requests_and_padded_query_rows(name):
    """A padding request keeps a sequence length of 0, and its table holds garbage."""
    compare([33, 0, 40], make_codec(1, 64, CODECS[name]), 2, [4, 0, 3])


def test_long_query_tiles():
    """Rows beyond a tile go to further programs."""
    compare([37], make_codec(1, 64, CODECS["k4v4"]), 3, [50])


@pytest.mark.parametrize("name", CODECS)
def test_every_configured_codec_is_served(name):
    assert history.serves(make_layer(make_codec(1, 64, CODECS[name])))


def test_what_is_not_served():
    codec = make_codec(1, 64, {})
    value = TurboQuantProd(64, 3, codec.value.rotation, qjl_matrix(64, 1)).to(DEVICE)
    assert not history.serves(make_layer(KVCodec(codec.key, value, codec.transform)))
    assert not history.serves(make_layer(make_codec(1, 576, {})))


def make_layer(codec):
    return KVCaptureEngine(2, 16, 0, 0, DEVICE).add_layer("layer", codec, 1, torch.float32)


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("operands", [0, 1, 2])
def test_tiles_stay_within_their_room(dim, operands):
    """A tile is no larger than the rows need, and neither are its operands; Triton knows powers of two only."""
    for rows in (1, 16, 17, 64, 1000):
        tile = history.choose_tile(rows, dim, operands)
        assert 16 <= tile.rows <= max(16, 2 * rows) and tile.rows.bit_count() == 1
        assert tile.rows <= 32 and (tile.rows == 16 or tile.rows * dim <= 4096)
