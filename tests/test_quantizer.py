"""Row quantisers against the theory of the paper, hostile rows, and their bytes."""

import math

import numpy as np
import pytest
import torch
from helpers import FLOAT32_EPS, attention, build_codec, cosine, normal, planes_oracle, rel_l2, rng, scalar_bytes_oracle

from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.quantizer import (
    FP8Quantizer,
    GroupQuantizer,
    Quantized,
    TurboQuantMSE,
    TurboQuantProd,
    row_norm,
    scan_scales,
)
from turboquant.rotation import haar_rotation, make_rotation, qjl_matrix

# D per width for source variance 1.
DISTORTION = {
    64: (0.35839, 0.11453, 0.033391, 0.0091315),
    80: (0.35939, 0.11511, 0.033620, 0.0092045),
    128: (0.36089, 0.11600, 0.033966, 0.0093148),
    576: (0.36283, 0.11715, 0.034418, 0.0094594),
}
BF16_EPS = torch.finfo(torch.bfloat16).eps  # rounding moves a number by at most half of it


def mse(dim, bits, **options):
    return TurboQuantMSE(dim, bits, make_rotation("auto", dim, 11), **options)


def prod(dim, bits, seed=11):
    return TurboQuantProd(dim, bits, make_rotation("auto", dim, seed), qjl_matrix(dim, seed))


QUANTIZERS = {
    **{f"mse{bits}": lambda dim, bits=bits: mse(dim, bits, scale_candidates=5) for bits in (1, 2, 3, 4)},
    **{f"prod{bits}": lambda dim, bits=bits: prod(dim, bits) for bits in (2, 3, 4)},
    **{f"group{bits}": lambda dim, bits=bits: GroupQuantizer(dim, bits, 16) for bits in (2, 3, 4, 8)},
    "fp8": FP8Quantizer,
}
quantizers = pytest.mark.parametrize("make", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def through_bytes(quantizer, rows):
    return quantizer.dequantize(quantizer.from_bytes(quantizer.to_bytes(quantizer.quantize(rows))))


def distortion(quantizer, rows):
    """Mean of |x - x^|^2 / |x|^2 through the packed bytes, and its standard error."""
    errors = rel_l2(through_bytes(quantizer, rows), rows).square()
    return float(errors.mean()), float(errors.std() / math.sqrt(len(errors)))


# ---- distortion ------------------------------------------------------------------------------------------------
EXPECTED_OF_NORM = {
    "plain": lambda d: d,
    "corrected": lambda d: 2 - 2 * math.sqrt(1 - d),
    "unbiased": lambda d: d / (1 - d),
}


@pytest.mark.parametrize("norm", EXPECTED_OF_NORM)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", DISTORTION)
def test_distortion_is_the_theoretical_one(dim, bits, norm):
    """D, 2 - 2 sqrt(1-D), D / (1-D); Gaussian rows, whose directions are uniform.

    1 % for Jensen's gap of the last two: D varies from row to row.
    """
    rows = normal(1000, dim, seed=dim + bits)
    expected = EXPECTED_OF_NORM[norm](DISTORTION[dim][bits - 1])
    found, standard_error = distortion(mse(dim, bits, norm=norm), rows)
    assert abs(found - expected) < 4.5 * standard_error + 0.01 * expected


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_distortion_of_massive_channels(bits):
    """Rows that a quantiser without rotation cannot serve; one row per rotation."""
    errors = []
    for seed in range(80):
        row = normal(1, 64, seed=1000 + seed)
        row[0, rng(seed).integers(0, 64, 2)] *= 200
        quantizer = TurboQuantMSE(64, bits, haar_rotation(64, seed), norm="plain")
        errors.append(float(rel_l2(through_bytes(quantizer, row), row)) ** 2)
    expected = DISTORTION[64][bits - 1]
    assert abs(np.mean(errors) - expected) < 4.5 * np.std(errors) / math.sqrt(len(errors)) + 0.01 * expected


@pytest.mark.parametrize(("bits", "floor"), [(2, 0.935), (3, 0.980), (4, 0.994)])
def test_key_cosine(bits, floor):
    """A kernel that masks 3-bit codes with 3 reaches 0.068."""
    rows = normal(200, 128, seed=bits)
    assert cosine(through_bytes(mse(128, bits), rows), rows).mean() > floor


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(4, {1: 0.00912, 3: 0.00825, 5: 0.00801, 9: 0.00789}), (3, {1: 0.03385, 3: 0.03244, 5: 0.03219, 9: 0.03204})],
)
def test_scale_scan_gains_what_it_should(bits, expected):
    """The gain measured at d = 128."""
    rows = normal(2000, 128, seed=21)
    found = {n: distortion(mse(128, bits, scale_candidates=n), rows) for n in expected}
    for n, value in expected.items():
        assert abs(found[n][0] - value) < 4.5 * found[n][1] + 0.01 * value
    assert found[9][0] < found[5][0] < found[3][0] < found[1][0]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_scale_scan_never_hurts_a_row(bits):
    """The pre-scale 1 is among the candidates, so no row's cosine may fall."""
    rows = normal(500, 80, seed=22)
    before, after = (cosine(through_bytes(mse(80, bits, scale_candidates=n), rows), rows) for n in (1, 5))
    assert (after - before).min() > -4 * FLOAT32_EPS
    assert bits == 1 or (after > before).double().mean() > 0.3


def test_scan_scales():
    assert scan_scales(1) == [1.0]
    assert scan_scales(5) == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.2])
    for bad in (0, -1, 2, 4):
        with pytest.raises(ValueError, match=f"odd.*{bad}"):
            scan_scales(bad)


def test_unknown_norm_is_refused():
    with pytest.raises(ValueError, match=r"'l2'.*corrected.*plain.*unbiased"):
        mse(64, 2, norm="l2")


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_norm_corrected_scale_keeps_the_norm(bits):
    """tq_plus#15: keys of norm 10 to 800; only the bf16 rounding of the scale remains."""
    rows = normal(50, 64, seed=23) * torch.logspace(0, 2, 50)[:, None]
    ratio = through_bytes(mse(64, bits, scale_candidates=5), rows).norm(dim=-1) / rows.norm(dim=-1)
    assert (ratio - 1).abs().max() <= BF16_EPS / 2 + 16 * FLOAT32_EPS


# ---- hostile rows ----------------------------------------------------------------------------------------------
@quantizers
@pytest.mark.parametrize("exponent", [-100, -20, 1, 10, 17])
def test_powers_of_two_change_only_the_scalars(make, exponent):
    """2^-100 is 1e-30, 2^17 is 1e5; all arithmetic is exact under powers of two."""
    quantizer, rows = make(64), normal(20, 64, seed=31)
    one, other = quantizer.quantize(rows), quantizer.quantize(rows * 2.0**exponent)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scalars.float() * 2.0**exponent, other.scalars.float())


@quantizers
@pytest.mark.parametrize("size", [1e-30, 1e-6, 778.0, 1e5])
def test_direction_does_not_depend_on_the_size(make, size):
    """The sizes of the reports; the relative error is the same up to the bf16 rounding of the scalars."""
    quantizer, rows = make(80), normal(20, 80, seed=32)
    one, other = (rel_l2(through_bytes(quantizer, rows * s), rows * s) for s in (1.0, size))
    assert (one - other).abs().mean() < BF16_EPS


@quantizers
def test_zero_rows_decode_to_zero(make):
    """A zero key scores exactly 0, and its neighbours do not notice."""
    quantizer, rows = make(64), normal(5, 64, seed=33)
    rows[2] = 0
    decoded = through_bytes(quantizer, rows)
    assert torch.equal(decoded[2], torch.zeros(64))
    assert torch.equal(decoded[3], through_bytes(quantizer, rows[[0, 1, 3, 4]])[2])
    assert torch.isfinite(decoded).all()


@quantizers
def test_constant_rows(make):
    """Faiss#5381 divides by a range of 0; a constant is no harder than another row."""
    quantizer, rows = make(128), normal(50, 128, seed=34)
    constant = torch.tensor([[1.0], [-3.5], [1e-3], [778.0]]).expand(-1, 128)
    assert (
        rel_l2(through_bytes(quantizer, constant), constant).max()
        < 1.5 * rel_l2(through_bytes(quantizer, rows), rows).max()
    )


@quantizers
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_rows_stay_alone_and_visible(make, bad):
    """One NaN or Inf spoils its own row, does not become a plausible zero vector, and touches no other row."""
    quantizer, rows = make(64), normal(6, 64, seed=35)
    clean = quantizer.to_bytes(quantizer.quantize(rows))
    rows[3, 17] = bad
    raw = quantizer.to_bytes(quantizer.quantize(rows))
    others = [0, 1, 2, 4, 5]
    assert torch.equal(raw[others], clean[others])
    assert not torch.isfinite(quantizer.dequantize(quantizer.from_bytes(raw))[3]).all()


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1.0, 1e18, 1e19, 1e36])
def test_row_norm_neither_overflows_nor_underflows(size):
    """workglow#713: the sum of squares leaves the range long before the norm does."""
    rows = normal(7, 96, seed=36) * size
    expected = rows.double().norm(dim=-1, keepdim=True)
    rounding = 1.5e-45 if size < 1e-40 else 0.0  # subnormal numbers have absolute precision only
    assert ((row_norm(rows) - expected).abs() <= 8 * FLOAT32_EPS * expected + rounding).all()
    assert torch.equal(row_norm(torch.zeros(2, 8)), torch.zeros(2, 1))


@pytest.mark.parametrize("dim", [96, 192, 576])
@quantizers
def test_tail_of_the_head_is_kept(make, dim):
    """All energy in the last 64 coordinates of a head size that is no multiple of 128."""
    rows = torch.zeros(40, dim)
    rows[:, -64:] = normal(40, 64, seed=37)
    decoded, whole = through_bytes(make(dim), rows), through_bytes(make(dim), normal(40, dim, seed=38))
    usual = cosine(whole, normal(40, dim, seed=38)).mean()
    assert cosine(decoded, rows).mean() > usual - 0.01


@quantizers
def test_no_rows_and_any_leading_shape(make):
    quantizer, rows = make(64), normal(12, 64, seed=39)
    raw = quantizer.to_bytes(quantizer.quantize(rows))
    shaped = quantizer.to_bytes(quantizer.quantize(rows.view(2, 3, 2, 64)))
    assert torch.equal(shaped.view(12, -1), raw)
    assert quantizer.to_bytes(quantizer.quantize(rows[:0])).shape == (0, quantizer.row_bytes)


# ---- bytes -----------------------------------------------------------------------------------------------------
@quantizers
@pytest.mark.parametrize("dim", [64, 80, 112])
def test_row_bytes_are_the_documented_ones(make, dim):
    """C12, tq_plus#91: codes and *all* scalars are counted; the bytes are those of the hand-written packer."""
    quantizer, rows = make(dim), normal(9, dim, seed=41)
    quantized = quantizer.quantize(rows)
    raw = quantizer.to_bytes(quantized)
    expected = [*planes_oracle(quantized.codes.numpy(), quantizer.bits), scalar_bytes_oracle(quantized.scalars)]
    assert np.array_equal(raw.numpy(), np.concatenate(expected, axis=-1))
    assert raw.shape[-1] == quantizer.row_bytes == dim * quantizer.bits // 8 + 2 * quantizer.num_scalars
    back = quantizer.from_bytes(raw)
    assert torch.equal(back.codes, quantized.codes) and torch.equal(back.scalars, quantized.scalars)


def test_number_of_scalars():
    assert [make(64).num_scalars for make in (QUANTIZERS["mse4"], QUANTIZERS["prod4"], QUANTIZERS["fp8"])] == [1, 2, 1]
    assert GroupQuantizer(64, 4, 16).num_scalars == 8


@quantizers
def test_every_byte_is_load_bearing(make):
    """Habit 5: flipping the top bit of any stored byte moves the decoded row."""
    quantizer = make(64)
    raw = quantizer.to_bytes(quantizer.quantize(normal(1, 64, seed=42)))
    flipped = raw.repeat(raw.shape[-1], 1) ^ (torch.eye(raw.shape[-1], dtype=torch.uint8) << 7)
    changed = (
        quantizer.dequantize(quantizer.from_bytes(flipped)) != quantizer.dequantize(quantizer.from_bytes(raw))
    ).any(-1)
    assert changed.all()


# ---- Algorithm 2 -----------------------------------------------------------------------------------------------
def inner_product_errors(bits, disable_sketch=False):
    """Mean error of <q, x^> - <q, x> of unit x at <q, x> = 1/2, one per fresh rotation and sketch."""
    means = []
    for seed in range(60):
        quantizer = TurboQuantProd(64, bits, haar_rotation(64, seed), qjl_matrix(64, seed))
        x, noise = (normal(40, 64, seed=7000 + 2 * seed + i) for i in range(2))
        x /= x.norm(dim=-1, keepdim=True)
        noise -= (noise * x).sum(-1, keepdim=True) * x
        query = 0.5 * x + math.sqrt(0.75) * noise / noise.norm(dim=-1, keepdim=True)
        quantized = quantizer.from_bytes(quantizer.to_bytes(quantizer.quantize(x)))
        if disable_sketch:
            quantized = Quantized(quantized.codes, quantized.scalars * torch.tensor([1, 0]))
        means.append(float((query * (quantizer.dequantize(quantized) - x)).sum(-1).mean()))
    return np.array(means)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_is_unbiased_and_its_sketch_matters(bits):
    """|z| < 4.5 over fresh sketches; without the sketch the slope is 1 - D of bits - 1."""
    errors = inner_product_errors(bits)
    standard_error = errors.std(ddof=1) / math.sqrt(len(errors))
    assert abs(errors.mean()) < 4.5 * standard_error
    without = inner_product_errors(bits, disable_sketch=True)
    bias = -0.5 * DISTORTION[64][bits - 2]
    assert abs(without.mean() - bias) < 4.5 * without.std(ddof=1) / math.sqrt(len(without)) + 0.01 * abs(bias)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_variance_is_theorem_2(bits):
    """d Var = (pi/2) D(bits-1) for q orthogonal to x, within 4.5 standard errors and 1 %."""
    squares = []
    for seed in range(30):
        quantizer = TurboQuantProd(64, bits, haar_rotation(64, 100 + seed), qjl_matrix(64, 100 + seed))
        x, query = (normal(100, 64, seed=9000 + 2 * seed + i) for i in range(2))
        x /= x.norm(dim=-1, keepdim=True)
        query -= (query * x).sum(-1, keepdim=True) * x
        query /= query.norm(dim=-1, keepdim=True)
        squares.append(float(64 * (query * through_bytes(quantizer, x)).sum(-1).square().mean()))
    expected = math.pi / 2 * DISTORTION[64][bits - 2]
    assert abs(np.mean(squares) - expected) < 4.5 * np.std(squares, ddof=1) / math.sqrt(30) + 0.01 * expected


def test_prod_needs_two_bits():
    with pytest.raises(ValueError, match="at least 2 bits, got 1"):
        prod(64, 1)


# ---- group and fp8 ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [8, 16, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_group_error_is_half_a_step(bits, group):
    """Half a step, and the bf16 rounding of minimum and step, which the codes cannot undo at the ends."""
    rows = normal(60, 64, seed=51) * 3 + 2
    decoded = through_bytes(GroupQuantizer(64, bits, group), rows)
    parts = rows.unflatten(-1, (-1, group))
    span, low = parts.amax(-1) - parts.amin(-1), parts.amin(-1).abs()
    bound = span / (2**bits - 1) / 2 + BF16_EPS / 2 * (span + low)
    error = (decoded - rows).abs().unflatten(-1, (-1, group)).amax(-1)
    assert (error <= bound).all()
    assert (error > bound / 4).any()


def test_group_is_not_rotated_and_local():
    """An outlier coarsens its own group only."""
    rows = normal(10, 64, seed=52)
    spiked = rows.clone()
    spiked[:, 5] = 1000
    quantizer = GroupQuantizer(64, 4, 16)
    assert torch.equal(through_bytes(quantizer, rows)[:, 16:], through_bytes(quantizer, spiked)[:, 16:])
    assert rel_l2(through_bytes(quantizer, spiked)[:, :16], spiked[:, :16]).max() < 0.1


@pytest.mark.parametrize("group", [0, -16, 24, 128])
def test_group_must_divide_the_head(group):
    with pytest.raises(ValueError, match=f"group size {group} does not divide the head size 64"):
        GroupQuantizer(64, 4, group)


def test_fp8_error_is_half_a_unit():
    """e4m3 has 3 mantissa bits: half a unit is 2^-4 of the value, or 2^-10 of the scale when subnormal."""
    rows = normal(100, 64, seed=53) * torch.logspace(-3, 3, 100)[:, None]
    decoded = through_bytes(FP8Quantizer(64), rows)
    assert ((FP8Quantizer(64).quantize(rows).codes & 0x7F).amax(-1) == 0x7E).all()  # the largest finite number
    scale = rows.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(rows.abs() * 2**-4, scale * 2**-10) + BF16_EPS / 2 * rows.abs()
    assert ((decoded - rows).abs() <= bound).all()
    assert (decoded.abs().amax(-1) / rows.abs().amax(-1) - 1).abs().max() <= BF16_EPS / 2


# ---- the codec of a layer --------------------------------------------------------------------------------------
def test_widths_and_quantizers_of_a_layer():
    codec = KVCodec.build(TurboQuantConfig(key_bits=3, value_bits=2, initial_layers_count=2), 2, 2, 64)
    first = KVCodec.build(TurboQuantConfig(key_bits=3, value_bits=2, initial_layers_count=2), 1, 2, 64)
    assert (codec.key.bits, codec.value.bits, first.key.bits) == (3, 2, 8)
    assert isinstance(first.key, FP8Quantizer) and isinstance(codec.key, TurboQuantMSE)
    other = KVCodec.build(TurboQuantConfig(key_quantizer="prod", value_quantizer="group", value_group=32), 0, 2, 80)
    assert isinstance(other.key, TurboQuantProd) and isinstance(other.value, GroupQuantizer)
    assert other.value.group == 16


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("options", [{}, {"key_bits": 8}, {"key_quantizer": "prod"}], ids=["mse", "fp8", "prod"])
def test_scores_and_outputs_in_the_codecs_bases(options, dim):
    """<query, decoded> in the rotated basis is <q, k^> of the keys decoded to the original one, for each KV head."""
    gain = 0.5 + torch.rand(2, dim, generator=torch.Generator().manual_seed(1))
    transform = KeyTransform(normal(2, dim, seed=61), gain)
    codec = KVCodec.build(TurboQuantConfig(**options), 0, 2, dim, transform)
    keys, query = normal(20, 2, dim, seed=62), normal(5, 2, 3, dim, seed=63)
    rows = codec.key.decode(codec.encode_keys(keys))
    found = torch.einsum("thgd,nhd->thgn", codec.query(query), rows)
    decoded = codec.decode_keys(rows) - transform.center
    expected = torch.einsum("thgd,nhd->thgn", query.double(), decoded.double())
    assert (found - expected).abs().max() < FLOAT32_EPS * dim * expected.abs().max()
    values = codec.value.decode(codec.encode_values(keys))
    assert torch.equal(codec.output(values), codec.value.rotation.inverse(values))
    assert rel_l2(codec.output(values), keys).mean() < 0.12


def test_centre_and_gain_are_applied_before_the_rotation():
    """encode(k) = quantise(R (gain (k - center))), so a codec with a transform codes the transformed keys."""
    center, gain = normal(2, 64, seed=64) * 20, 0.5 + normal(2, 64, seed=65).abs()
    plain, codec = build_codec(2, 64), KVCodec.build(TurboQuantConfig(), 0, 2, 64, KeyTransform(center, gain))
    keys = normal(50, 2, 64, seed=66) + center
    ours, expected = codec.encode_keys(keys), plain.encode_keys(gain * (keys - center))
    different = (ours.codes != expected.codes).double().mean()
    assert different < 50 * FLOAT32_EPS * 605  # coordinates so close to a threshold that rounding decides
    assert rel_l2(codec.decode_keys(codec.key.decode(ours)) - center, keys - center).max() < 0.35


@pytest.mark.parametrize(
    ("center", "gain", "message"),
    [
        (torch.zeros(2, 64), torch.ones(2, 32), "must both be"),
        (torch.zeros(64), torch.ones(64), "must both be"),
        (torch.full((2, 64), torch.nan), torch.ones(2, 64), "finite center"),
        (torch.zeros(2, 64), torch.full((2, 64), torch.inf), "finite gain"),
        (torch.zeros(2, 64), torch.zeros(2, 64), "without zeros"),
    ],
)
def test_bad_transforms_are_refused(center, gain, message):
    with pytest.raises(ValueError, match=message):
        KeyTransform(center, gain)


def test_transform_of_another_geometry_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 64\), expected \(4, 64\)"):
        KVCodec.build(TurboQuantConfig(), 0, 4, 64, KeyTransform.identity(2, 64))


# ---- key bias (C13) --------------------------------------------------------------------------------------------
BIAS_CHANNELS = [3, 20, 41, 77, 90, 121]


def bias_fixture(rotary):
    """Six channels of +-247, |b| = 605, keys N(0, 1) + b, queries N(0, 1) / 2, position = N."""
    bias = torch.zeros(128)
    bias[BIAS_CHANNELS] = torch.tensor([247.0, -247.0, 247.0, 247.0, -247.0, -247.0])
    keys, queries = normal(256, 128, seed=71) + bias, normal(64, 128, seed=72) / 2
    if rotary:
        keys, queries = rope(keys, torch.arange(256)), rope(queries, torch.full((64,), 256))
    return keys, queries, normal(256, 128, seed=73)


def rope(x, positions):
    angle = positions[:, None] * 1e6 ** (-torch.arange(64) / 64)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()], dim=-1)


def output_cosine(keys, queries, values, center):
    transform = KeyTransform(center[None], torch.ones(1, 128))
    codec = KVCodec.build(TurboQuantConfig(key_bits=3), 0, 1, 128, transform)
    decoded = codec.decode_keys(codec.key.decode(codec.encode_keys(keys[:, None])))
    outputs = [attention(queries[:, None], k, values[:, None], 255, 128**-0.5) for k in (decoded, keys[:, None])]
    return float(cosine(*outputs).mean())


def test_centre_removes_a_constant_bias():
    """What a position-independent centre can do; without it the output is garbage."""
    keys, queries, values = bias_fixture(rotary=False)
    assert output_cosine(keys, queries, values, torch.zeros(128)) < 0.8
    assert output_cosine(keys, queries, values, keys.mean(0)) > 0.98


def test_constant_centre_cannot_follow_a_rotating_bias():
    """Under RoPE the bias turns with the position; the mean is not enough (0.291 to 0.380)."""
    keys, queries, values = bias_fixture(rotary=True)
    plain, centred = (output_cosine(keys, queries, values, c) for c in (torch.zeros(128), keys.mean(0)))
    assert plain < 0.8 and centred < 0.98


@pytest.mark.parametrize("bits", [3, 4])
def test_accuracy_does_not_depend_on_the_head_size(bits):
    """Relative error of attention at head sizes 192 and 576 at most 1.15 times that at 128."""
    errors = {}
    for dim in (128, 192, 576):
        codec = build_codec(1, dim, key_bits=bits, value_bits=bits)
        keys, values, queries = (normal(256, 1, dim, seed=80 + i) for i in range(3))
        decoded = codec.decode_keys(codec.key.decode(codec.encode_keys(keys)))
        summed = codec.output(codec.value.decode(codec.encode_values(values)))
        found = attention(queries, decoded, summed, 255, dim**-0.5)
        errors[dim] = float(rel_l2(found, attention(queries, keys, values, 255, dim**-0.5)).mean())
    assert max(errors[192], errors[576]) <= 1.15 * errors[128]
