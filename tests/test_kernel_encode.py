"""The fused write path against its torch twin, byte for byte, in Triton's interpreter where there is no device."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from helpers import make_rotary, normal, page_owners

from turboquant.capture import KVCaptureEngine
from turboquant.codec import KeyTransform, KVCodec, layer_rotation
from turboquant.config import PRESETS, TurboQuantConfig
from turboquant.kernels import encode as kernel
from turboquant.quantizer import FP8Quantizer, TurboQuantMSE, TurboQuantProd, row_norm
from turboquant.rotation import identity_rotation, qjl_matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, FILL = 5, 0xA5
TILES = {"decode": (1, 1), "prefill": (8, 4)}
SLOTS = [33, -1, 2, 79, 17]  # blocks 2, 0, 4 and 1 of 16 tokens; padding between them


def layer_of(codec, heads, capacity, dtype=torch.float32, block_size=16):
    """An engine and its layer: poisoned pages, entries for blocks 2 and 4."""
    engine = KVCaptureEngine(BLOCKS, block_size, 8, capacity, DEVICE)
    layer = engine.add_layer("layer", codec, heads, dtype)
    layer.store.pages.fill_(FILL)
    engine.ring.number.copy_(torch.tensor([5, 3, 0, 2, 7]))  # of each block in its sequence
    if capacity:
        parts = engine.ring.parts  # of a block; of block 2 the first has an entry, of block 4 the last
        engine.ring.entry_of_part[torch.tensor([2 * parts, 5 * parts - 1])] = torch.tensor([1, 0], device=DEVICE)
    return engine, layer


def compare(codec, keys, values, slots=SLOTS, capacity=2, ring_dtype=None, block_size=16):
    """The kernel and the twin leave the same bytes in pages, ring and `written`."""
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    slots = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    engine, layer = layer_of(codec, keys.shape[1], capacity, ring_dtype or keys.dtype, block_size)
    other, found = layer_of(codec, keys.shape[1], capacity, ring_dtype or keys.dtype, block_size)
    engine.ingest(layer, keys, values, slots)
    kernel.encode(found, other.ring, keys, values, slots)
    assert torch.equal(found.store.pages, layer.store.pages)
    assert torch.equal(other.ring.written, engine.ring.written)
    for name in ("keys", "values"):
        mine, theirs = getattr(found.recent, name), getattr(layer.recent, name)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    return found, other


def codec_of(dim=64, heads=1, transform=None, **options):
    return KVCodec.build(TurboQuantConfig(**options), 1, heads, dim, transform, DEVICE)


def codec_from(key, value, heads=1):
    return KVCodec(key.to(DEVICE), value.to(DEVICE), KeyTransform.identity(heads, key.dim).to(DEVICE))


def rows(dim=64, heads=1, n=5, dtype=torch.float32):
    return (normal(n, heads, dim, seed=s).to(dtype) for s in (1, 2))


@pytest.fixture(params=["prefill", "decode"])
def tile(request, monkeypatch):
    monkeypatch.setattr(kernel, "tile", lambda *_: TILES[request.param])


@pytest.fixture
def prefill(monkeypatch):
    """One tile for all tokens, which the interpreter runs fastest."""
    monkeypatch.setattr(kernel, "tile", lambda *_: TILES["prefill"])


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(prefill, preset):
    compare(codec_of(**PRESETS[preset]), *rows(dtype=torch.bfloat16))


@pytest.mark.parametrize("preset", ["k4v3", "k8v4", "k2v2"])
def test_presets_a_token_at_a_time(preset):
    compare(codec_of(**PRESETS[preset]), *rows(n=2, dtype=torch.bfloat16), slots=[79, 33])


@pytest.mark.parametrize("dim", [80, 96, 112, 128, 192, 256])
def test_head_sizes(prefill, dim):
    compare(codec_of(dim, key_bits=4, value_bits=3), *rows(dim))
    compare(codec_of(dim, key_bits=3, value_bits=2, scale_candidates=1), *rows(dim))


@pytest.mark.parametrize("dim", [80, 128])
def test_head_sizes_of_a_single_token(dim):
    compare(codec_of(dim, heads=2, scale_candidates=1), *rows(dim, 2, 1), slots=[31])


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_other_quantizers_at_every_head_size(prefill, dim):
    compare(codec_of(dim, key_bits=8, value_quantizer="group", value_bits=2), *rows(dim))
    compare(codec_of(dim, key_bits=3, key_quantizer="prod", value_quantizer="group"), *rows(dim))


@pytest.mark.parametrize("bits", [2, 4])
def test_prod_keys(tile, bits):
    compare(codec_of(key_bits=bits, key_quantizer="prod", scale_candidates=1), *rows(), slots=SLOTS[:3])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [8, 64])
def test_group_values(prefill, bits, group):
    options = {"value_quantizer": "group", "value_bits": bits, "value_group": group}
    compare(codec_of(key_bits=8, **options), *rows())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("norm", ["corrected", "plain", "unbiased"])
def test_bits_and_norms(prefill, bits, norm):
    rotation = layer_rotation(TurboQuantConfig(), 0, 64, 1)
    key = TurboQuantMSE(64, bits, rotation, 3, norm)
    compare(codec_from(key, TurboQuantMSE(64, bits, identity_rotation(64), 1, norm)), *rows())


@pytest.mark.parametrize("candidates", [1, 3, 5, 9])
def test_scale_candidates(prefill, candidates):
    compare(codec_of(scale_candidates=candidates), *rows())


@pytest.mark.parametrize("rotation", ["hadamard", "haar", "identity"])
def test_rotations(tile, rotation):
    def made(stream):
        if rotation == "identity":
            return identity_rotation(64)
        return layer_rotation(TurboQuantConfig(rotation=rotation), 0, 64, stream)

    compare(codec_from(TurboQuantMSE(64, 4, made(1)), TurboQuantMSE(64, 3, made(2))), *rows(), slots=SLOTS[:3])
    prod = TurboQuantProd(64, 3, made(1), qjl_matrix(64, 5))
    compare(codec_from(prod, TurboQuantMSE(64, 2, made(2), 1, "unbiased")), *rows(), slots=SLOTS[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ring_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(prefill, dtype, ring_dtype):
    compare(codec_of(key_bits=8, scale_candidates=1), *rows(dtype=dtype), ring_dtype=ring_dtype)


def test_large_offsets_with_a_centre(tile):
    center = 30 * normal(2, 64, seed=5)
    gain = 1 + normal(2, 64, seed=6).abs()
    keys, values = rows(heads=2)
    for options in ({"scale_candidates": 3}, {"key_bits": 8, "scale_candidates": 1}):
        compare(
            codec_of(heads=2, transform=KeyTransform(center, gain), **options), keys + center, values, slots=SLOTS[:3]
        )


@pytest.mark.parametrize(
    ("dim", "heads", "rotary", "options"),
    [
        (64, 2, {}, {}),
        (80, 1, {"size": 40}, {"key_bits": 3}),
        (128, 1, {"interleaved": True}, {"key_bits": 8}),
        (64, 1, {"context": 40}, {"key_quantizer": "prod"}),
    ],
)
def test_turning_centres(tile, dim, heads, rotary, options):
    transform = KeyTransform(
        3 * normal(heads, dim, seed=5), 1 + normal(heads, dim, seed=6).abs(), make_rotary(dim, **rotary)
    )
    compare(codec_of(dim, heads, transform, scale_candidates=1, **options), *rows(dim, heads, n=3), slots=[2, 79, 33])


@pytest.mark.parametrize("options", [{}, {"key_bits": 8, "value_quantizer": "group"}, {"key_quantizer": "prod"}])
def test_rows_of_every_size(prefill, options):
    """Zero, huge and tiny rows, one-hot rows, and rows whose coordinates differ by many orders of magnitude."""
    keys, values = rows(n=8)
    for x in (keys, values):
        x[0], x[1, :, 3:] = 0, 0
        x[2] *= 1e30
        x[3] *= 1e-30
        x[4] = 1.5
        x[5] = -x[5].abs()
        x[6] *= torch.logspace(-30, 30, 64)
        x[7] *= 1e-38
    compare(codec_of(scale_candidates=3, **options), keys, values, slots=list(range(16, 24)))
    compare(codec_of(scale_candidates=3, **options), keys, values, slots=list(range(32, 40)), ring_dtype=torch.bfloat16)


def test_rows_on_thresholds_round_as_the_twin_does(prefill):
    """Unrotated rows of plus and minus a number have only |unit| = 1 and ties at 0."""
    signs = normal(5, 1, 64, seed=4).sign()
    signs[1, 0, ::2] = 0
    signs[3] *= torch.tensor([0.0, -0.0]).repeat(32)
    key = TurboQuantMSE(64, 4, identity_rotation(64), 9)
    book = TurboQuantMSE(64, 3, identity_rotation(64))
    on_threshold = torch.cat([book.thresholds, book.thresholds.flip(0) * -1]).repeat(5)[:64].expand(5, 1, 64)
    compare(codec_from(key, book), signs, on_threshold)


def test_codes_at_and_next_to_every_threshold(prefill):
    """A row of norm sqrt(d) = 8 keeps its coordinates: thresholds, the floats above them, and one for the norm."""
    book = TurboQuantMSE(64, 4, identity_rotation(64))
    above = torch.nextafter(book.thresholds, torch.tensor(9.0))
    above[7] = 1e-6  # the float above 0 is no multiple of 8
    row = torch.cat([book.thresholds, above, torch.zeros(34)])
    row[-1] = (64 - row.double().square().sum()).sqrt()
    while row_norm(row) != 8:
        row[-1] = torch.nextafter(row[-1], torch.tensor(9.0 if row_norm(row) < 8 else 0.0))
    expected = (row[:, None] > book.thresholds).sum(-1).to(torch.uint8)
    assert torch.equal(book.encode(row).codes, expected)
    values = torch.stack([row * 2.0**k for k in (-4, 0, 1, 3, 9)])[:, None]
    compare(codec_from(FP8Quantizer(64), book), values, values)


def test_fp8_rounds_to_nearest_even_at_every_code(prefill):
    """All float8 codes, midpoints between them and their neighbours, at a scale of exactly 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(limit)) for limit in (1e9, 0.0))
    x = torch.cat([codes, -codes, middle, -middle, up, down])
    x = torch.cat([x, torch.zeros(-len(x) % 63)]).view(-1, 1, 63)
    x = torch.cat([x, torch.full((len(x), 1, 1), 448.0)], -1)
    compare(codec_from(FP8Quantizer(64), FP8Quantizer(64)), x, x, slots=list(range(len(x))))


def test_scalars_and_ring_rows_between_two_bfloat16_round_to_even(prefill):
    """Minima of the groups and coordinates in the middle between neighbours, below the even and above it."""
    odd = 1 + torch.arange(1, 16, 2) / 256
    row = (torch.cat([odd, -odd]) * torch.tensor([1.0, 2.0**-130, 0.25, 2.0**40])[:, None]).flatten()
    values = row[torch.arange(64) + torch.arange(5)[:, None] & 63][:, None]  # every coordinate is some group's least
    compare(codec_of(value_quantizer="group", value_group=8), values, values, ring_dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"key_bits": 8, "value_quantizer": "group"}, {"key_quantizer": "prod"}])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_rows_that_are_not_finite_stay_in_their_slots(prefill, options):
    keys, values = rows()
    for x in (keys, values):
        x[0], x[1, 0, 0], x[3, 0, 0] = torch.nan, torch.inf, -torch.inf
    codec = codec_of(scale_candidates=3, **options)
    engine, layer = layer_of(codec, 1, 0)
    kernel.encode(layer, engine.ring, keys.to(DEVICE), values.to(DEVICE), torch.tensor(SLOTS, device=DEVICE))
    owners = page_owners(codec, 16)
    for block, page in enumerate(layer.store.pages[:, 0].cpu()):
        written = np.isin(owners, [slot % 16 for slot in SLOTS if slot >= 0 and slot // 16 == block])
        assert (page.numpy()[~written] == FILL).all()
    twin, expected = layer_of(codec, 1, 0)
    twin.ingest(expected, keys.to(DEVICE), values.to(DEVICE), torch.tensor(SLOTS, device=DEVICE))
    assert torch.equal(layer.store.pages[1], expected.store.pages[1])  # a finite row


def test_slices_of_a_fused_projection(tile):
    qkv = normal(5, 6 * 64 + 8, seed=3)
    keys = qkv[:, 128:256].view(5, 2, 64)
    values = qkv[:, 257:385].unflatten(1, (2, 64))  # not aligned to more than an element
    compare(codec_of(heads=2, scale_candidates=1), keys, values, slots=SLOTS[:3])
    keys = keys.transpose(0, 1).contiguous().transpose(0, 1)  # heads outside of tokens
    compare(codec_of(heads=2, key_bits=8, scale_candidates=1), keys, values, slots=SLOTS[:3])


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("block_size", [16, 24, 32])
def test_block_sizes(tile, capacity, block_size):
    slots = [block_size * 2 + 7, 1, -1, block_size * 4 + block_size - 1, block_size]
    compare(codec_of(scale_candidates=1), *rows(), slots=slots, capacity=capacity, block_size=block_size)


def test_more_tokens_than_a_tile(prefill):
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:37].tolist()
    compare(codec_of(key_bits=8, scale_candidates=1), *rows(n=37), slots=slots)


def test_lengths_of_rows_and_slots_may_differ(prefill):
    keys, values = rows()
    compare(codec_of(scale_candidates=1), keys, values, slots=SLOTS[:2])
    compare(codec_of(scale_candidates=1), keys[:3], values[:3], slots=SLOTS)
    compare(codec_of(scale_candidates=1), keys[:0], values[:0], slots=[])


def test_only_padding_changes_nothing(prefill):
    found, other = compare(codec_of(scale_candidates=1), *rows(), slots=[-1] * 5)
    assert (found.store.pages == FILL).all()
    assert not other.ring.written.any()


def test_tiles_by_the_amount_of_work():
    assert kernel.tile(1024, 128, False) == (1, 1)
    assert kernel.tile(262144, 128, False) == (16, 4)
    assert kernel.tile(262144, 256, False) == kernel.tile(262144, 128, True) == (8, 4)


def test_unknown_quantizers_are_refused():
    _, layer = layer_of(codec_of(), 1, 0)
    with pytest.raises(TypeError, match="no encoder for str"):
        kernel.side_constants("mse", layer.store.format, "key")
