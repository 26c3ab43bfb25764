"""Twelve claims about the codec, each measured on rows that went through the real packed bytes.

The claims are those of TurboQuant (arXiv:2504.19874) with its rounded constants corrected: D_mse is 0.0340 at
3 bits (printed 0.03), d * D_prod is 0.0534 at 4 bits (printed 0.047), the constant of Theorem 1 is
sqrt(3) pi / 2, and the finite-d converse is the spherical-cap bound instead of 4^-b.

Data and rotations come from disjoint random streams, and every claim has streams of its own, so that it can
run alone.  Thresholds count standard errors or leave four standard deviations over seeds.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turboquant import codebook, packing, quantizer, rotation
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.page import PageFormat

DIM = 128
ALL_BITS = codebook.SHIPPED_BITS
PROD_BITS = (2, 3, 4)
THEOREM_1 = math.sqrt(3) * math.pi / 2  # D_mse < 2.7207 * 4^-b
THEOREM_2 = math.sqrt(3) * math.pi**2  # d * D_prod < 17.09 * 4^-b
DATA_STREAM = 0xDA7A

Array = NDArray[np.float64]
Verdict = tuple[str, str, bool]  # measured, required, holds


@dataclass(frozen=True)
class Claim:
    """A claim's measured values, the bound that they must meet, and whether they do."""

    name: str
    value: str
    bound: str
    ok: bool
    seconds: float


ClaimFunction = Callable[[int], Claim]
CLAIMS: list[ClaimFunction] = []


def run_claims(seed: int = 0) -> list[Claim]:
    """All claims in their order; `seed` moves the data, the rotations and the sketches."""
    return [claim(seed) for claim in CLAIMS]


def _claim(name: str) -> Callable[[Callable[[int], Verdict]], ClaimFunction]:
    """Register a measurement seed -> Verdict as a timed claim."""

    def register(measure: Callable[[int], Verdict]) -> ClaimFunction:
        def timed(seed: int) -> Claim:
            start = time.perf_counter()
            with _one_torch_thread():
                value, bound, ok = measure(seed)
            return Claim(name, value, bound, bool(ok), time.perf_counter() - start)

        CLAIMS.append(timed)
        return timed

    return register


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Torch and numpy each bring a thread pool; on a busy machine alternating between them costs 10x."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Random streams, rows and the way through the bytes.


def _data(seed: int, claim: int) -> np.random.Generator:
    return np.random.default_rng([DATA_STREAM, seed, claim])


def _haar(seed: int, claim: int, index: int = 0) -> rotation.Rotation:
    return rotation.haar_rotation(DIM, [seed, claim, index])


def _row_norms(rows: Array) -> Array:
    return np.linalg.norm(rows, axis=-1, keepdims=True)


def _unit(rows: Array) -> Array:
    return rows / _row_norms(rows)


def _orthogonal_to(rows: Array, rng: np.random.Generator) -> Array:
    """Random unit rows, each orthogonal to its unit row of `rows`."""
    other = rng.standard_normal(rows.shape)
    return _unit(other - (other * rows).sum(-1, keepdims=True) * rows)


def _one_hot(index: int) -> Array:
    return np.eye(DIM)[index]


def _stored(codec: quantizer.Quantizer, quantized: quantizer.Quantized) -> quantizer.Quantized:
    """What a reader finds in the bytes that the writer left."""
    return codec.from_bytes(codec.to_bytes(quantized))


def _through_bytes(codec: quantizer.Quantizer, rows: Array) -> Array:
    """Encode, pack, unpack and decode rows [..., DIM]."""
    return codec.dequantize(_stored(codec, codec.quantize(torch.from_numpy(rows)))).double().numpy()


def _distortion(rows: Array, decoded: Array) -> Array:
    """|x - x^|^2 / |x|^2 per row."""
    return np.square(rows - decoded).sum(-1) / np.square(rows).sum(-1)


def _per_bits(values: dict[int, str]) -> str:
    return "; ".join(f"{bits} b: {text}" for bits, text in values.items())


# 1. Codebooks.

CENTROID_TOLERANCE, MSE_TOLERANCE, CELL_NODES = 1e-4, 1e-3, 4000
MSE_128 = {1: 0.36089, 2: 0.11600, 3: 0.033966, 4: 0.0093148}


@_claim("1 codebooks are the exact Lloyd-Max of the Beta law")
def exact_codebooks(_seed: int) -> Verdict:
    """Every shipped book against sums over the Beta density that share nothing with the solver.

    The Beta density is log-concave, so a book that is stationary is the optimum.  Nothing here is random.
    """
    books = [codebook.load(dim, bits) for dim in codebook.SHIPPED_DIMS for bits in ALL_BITS]
    residual = max(_centroid_residual(book) for book in books)
    skew = max(_asymmetry(book) for book in books)
    mse = max(abs(book.mse / _measured_mse(book) - 1) for book in books)
    printed = max(abs(codebook.load(DIM, bits).mse / value - 1) for bits, value in MSE_128.items())
    ok = max(residual, skew) < CENTROID_TOLERANCE and max(mse, printed) < MSE_TOLERANCE
    value = f"{len(books)} books: |c - c*| sqrt(d) = {residual:.1e}, asymmetry {skew:g}, MSE off by {mse:.1e}"
    return value, f"|c - c*| sqrt(d) < {CENTROID_TOLERANCE:g}, symmetric, MSE within {MSE_TOLERANCE:.1%}", ok


def _asymmetry(book: codebook.Codebook) -> float:
    return max(abs(lo + hi) for lo, hi in zip(book.centroids, reversed(book.centroids), strict=True))


def _cell_nodes(book: codebook.Codebook) -> tuple[Array, Array]:
    """Midpoint-rule nodes z [cells, nodes] and their probability masses, which sum to 1."""
    edge = math.sqrt(book.dim)
    edges = np.array([-edge, *book.thresholds, edge])
    z = edges[:-1, None] + np.diff(edges)[:, None] * (np.arange(CELL_NODES) + 0.5) / CELL_NODES
    mass = (1 - z * z / book.dim) ** ((book.dim - 3) / 2) * np.diff(edges)[:, None]
    return z, mass / mass.sum()


def _centroid_residual(book: codebook.Codebook) -> float:
    z, mass = _cell_nodes(book)
    means = (z * mass).sum(1) / mass.sum(1)
    return float(np.abs(means - book.centroids).max())


def _measured_mse(book: codebook.Codebook) -> float:
    z, mass = _cell_nodes(book)
    return float((mass * (z - np.array(book.centroids)[:, None]) ** 2).sum())


# 2. Rotations.

ORTHOGONALITY, KS_ROTATIONS, KS_P_VALUE = 1e-5, 60, 1e-3


@_claim("2 the rotation is orthogonal and makes a one-hot vector Beta-distributed")
def rotation_law(seed: int) -> Verdict:
    """Kolmogorov-Smirnov over rotations of one one-hot vector; one Hadamard round must fail the same test."""
    matrix = _haar(seed, 2).matrix
    error = float((matrix @ matrix.T - torch.eye(DIM)).abs().max())
    repeats = torch.equal(matrix, _haar(seed, 2).matrix) and not torch.equal(matrix, _haar(seed, 2, 1).matrix)
    p_value = _one_hot_p_value(rotation.haar_rotation, seed)
    hadamard = _one_hot_p_value(rotation.hadamard_rotation, seed)
    ok = error < ORTHOGONALITY and repeats and p_value > KS_P_VALUE > hadamard
    value = f"|R R' - I| = {error:.1e}, KS p = {p_value:.3f}; one Hadamard round p = {hadamard:.0e}"
    return value, f"|R R' - I| < {ORTHOGONALITY:g}, deterministic, p > {KS_P_VALUE:g} (Hadamard below)", ok


def _one_hot_p_value(make: Callable[[int, Sequence[int]], rotation.Rotation], seed: int) -> float:
    hot = torch.from_numpy(_one_hot(17))
    columns = [make(DIM, [seed, 2, i]).forward(hot) for i in range(1, 1 + KS_ROTATIONS)]
    return _kolmogorov_p_value(torch.cat(columns).double().numpy())


def _kolmogorov_p_value(sample: Array) -> float:
    """p-value of the Kolmogorov-Smirnov distance to the Beta law: asymptotic, with Stephens' size factor."""
    size = len(sample)
    law, steps = _beta_cdf(np.sort(sample)), np.arange(size + 1) / size
    distance = max((steps[1:] - law).max(), (law - steps[:-1]).max())
    scaled = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * series))


def _beta_cdf(x: Array) -> Array:
    """P(coordinate of a uniform unit vector <= x), summed over the angle arcsin(x)."""
    edges = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    mass = np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (DIM - 2))
    return np.interp(np.arcsin(np.clip(x, -1, 1)), edges, np.append(0.0, mass / mass[-1]))


# 3. Theorem 1.

ROTATIONS, STANDARD_ERRORS, RELATIVE_SLACK = 300, 4.5, 0.004


@_claim("3 Theorem 1 holds on worst-case inputs")
def theorem_1(seed: int) -> Verdict:
    """Mean distortion over Haar rotations, one one-hot and one massive-channel vector for each."""
    draws = [_worst_case_distortions(seed, index) for index in range(ROTATIONS)]
    ok, text = True, {}
    for bits, values in zip(ALL_BITS, np.moveaxis(np.array(draws), 0, -1), strict=True):
        exact = codebook.load(DIM, bits).mse
        mean, error = values.mean(-1), values.std(-1) / math.sqrt(ROTATIONS)
        near = np.abs(mean - exact) < STANDARD_ERRORS * error + RELATIVE_SLACK * exact
        ok &= bool(near.all() and mean.max() < THEOREM_1 * 4.0**-bits)
        text[bits] = f"{mean[0]:.4f}, {mean[1]:.4f} (exact {exact:.4f}, bound {THEOREM_1 * 4.0**-bits:.4f})"
    return _per_bits(text), f"|D - D*| < {STANDARD_ERRORS} s.e. + 0.4 %, D < sqrt(3) pi/2 4^-b", ok


def _worst_case_distortions(seed: int, index: int) -> list[Array]:
    """D of [one-hot, massive channel] for every width, under the rotation of this index."""
    rng = np.random.default_rng([DATA_STREAM, seed, 3, index])
    massive = rng.standard_normal(DIM)
    massive[[3, 70]] += (60, -35)
    rows = np.stack([_one_hot(int(rng.integers(DIM))), massive * math.exp(rng.standard_normal())])
    turn = _haar(seed, 3, index)
    codecs = [quantizer.TurboQuantMSE(DIM, bits, turn, norm="plain") for bits in ALL_BITS]
    return [_distortion(rows, _through_bytes(codec, rows)) for codec in codecs]


# 4. Rate.


@_claim("4 the rate is honest and the converse holds")
def rate_and_converse(seed: int) -> Verdict:
    """Bytes on the wire, norm included, and the spherical-cap bound at exactly that rate."""
    rows, turn = _data(seed, 4).standard_normal((2000, DIM)), _haar(seed, 4)
    ok, text = True, {}
    for bits in ALL_BITS:
        codec = quantizer.TurboQuantMSE(DIM, bits, turn)
        raw = codec.to_bytes(codec.quantize(torch.from_numpy(rows)))
        size = raw.nbytes // len(rows)
        distortion = float(_distortion(rows, codec.dequantize(codec.from_bytes(raw)).double().numpy()).mean())
        bound = cap_bound(DIM, size * 8 / DIM)
        ok &= size == DIM * bits // 8 + 2 and distortion > bound
        text[bits] = f"{size} B, D = {distortion:.4f} (cap bound {bound:.4f})"
    return _per_bits(text), "d b / 8 + 2 bytes, D above the spherical-cap bound", ok


def cap_bound(dim: int, bits: float) -> float:
    """Least D that any code of 2^(bits dim) words can have on a uniform point of the unit sphere.

    A cell of given measure has its mean closest to the sphere when it is a cap (bathtub principle), so D is
    at least 1 - |mean of the cap of measure 2^(-bits dim)|^2.
    """
    target = -bits * dim * math.log(2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (low, angle) if _log_cap_measure(dim, angle) > target else (angle, high)
    log_moment = _log_sphere_constant(dim) + (dim - 1) * math.log(math.sin(low)) - math.log(dim - 1)
    return -math.expm1(2 * (log_moment - _log_cap_measure(dim, low)))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


def _log_cap_measure(dim: int, angle: float) -> float:
    """log P(angle to a fixed axis < angle): f(0) times the integral of sin^(d-2)."""
    ratio = np.sin(angle * (_NODES + 1) / 2) / math.sin(angle)
    integral = angle / 2 * float(ratio ** (dim - 2) @ _WEIGHTS)
    return _log_sphere_constant(dim) + (dim - 2) * math.log(math.sin(angle)) + math.log(integral)


def _log_sphere_constant(dim: int) -> float:
    """log of Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)), the density of a coordinate at 0."""
    return math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi) / 2


# 5. Packing.

PACKED_DIMS = (64, 80, 96, 128, 256)


@_claim("5 packing is bijective and every stored bit matters")
def packed_bits(seed: int) -> Verdict:
    """Random codes of every width and head size, and the flip of each single bit of a stored row."""
    rng, turn = _data(seed, 5), _haar(seed, 5)
    exact = all(_packs(rng, bits, dim) for bits in ALL_BITS for dim in PACKED_DIMS)
    silent = sum(_silent_bits(rng, quantizer.TurboQuantMSE(DIM, bits, turn)) for bits in ALL_BITS)
    value = f"round trips {'exact' if exact else 'differ'}, {silent} stored bits without effect"
    return value, f"exact for b = 1..4 and d in {PACKED_DIMS}; none", exact and silent == 0


def _packs(rng: np.random.Generator, bits: int, dim: int) -> bool:
    codes = torch.from_numpy(rng.integers(0, 2**bits, (64, dim), dtype=np.uint8))
    planes = packing.pack(codes, bits)
    size = sum(plane.shape[-1] for plane in planes)
    return size == dim * bits // 8 and torch.equal(packing.unpack(planes, bits), codes)


def _silent_bits(rng: np.random.Generator, codec: quantizer.Quantizer) -> int:
    """How many bits of one stored row can flip without a change of the decoded row."""
    raw = codec.to_bytes(codec.quantize(torch.from_numpy(rng.standard_normal(DIM))))
    bit = torch.arange(8 * codec.row_bytes)
    flipped = raw.repeat(len(bit), 1)
    flipped[bit, bit // 8] ^= (1 << bit % 8).to(torch.uint8)
    same = codec.dequantize(codec.from_bytes(flipped)) == codec.dequantize(codec.from_bytes(raw))
    return int(same.all(-1).sum())


# 6 and 7. Inner products.

PAIRS, PAIRS_PER_SKETCH, COSINE = 20_000, 100, 0.5
SLOPE_TOLERANCES = {"plain": 0.004, "corrected": 0.006, "unbiased": 0.006}
VARIANCE_TOLERANCE, RESCALE_GAIN = 0.06, 2.5


@_claim("6 Algorithm 2 is unbiased; Algorithm 1 shrinks by 1 - D, norm-corrected by sqrt(1 - D)")
def inner_product_bias(seed: int) -> Verdict:
    """Slopes of <y, x^> on <y, x> at cosine 0.5 between x and y."""
    rng = _data(seed, 6)
    x = _rows_of_random_length(rng)
    y = COSINE * _unit(x) + math.sqrt(1 - COSINE**2) * _orthogonal_to(_unit(x), rng)
    ok, text = True, {}
    for bits in ALL_BITS:
        slopes = {norm: _slope(y, _algorithm_1(seed, 6, bits, norm, x)) for norm in SLOPE_TOLERANCES}
        ok &= all(abs(slopes[n] - want) < SLOPE_TOLERANCES[n] for n, want in _slopes_in_theory(bits).items())
        text[bits] = "/".join(f"{slope:.4f}" for slope in slopes.values())
    for bits in PROD_BITS:
        score = _z_score((y * _algorithm_2(seed, 6, bits, x)).sum(-1), COSINE)
        ok &= abs(score) < STANDARD_ERRORS
        text[bits] += f", Alg. 2 z = {score:+.1f}"
    bound = f"plain 1 - D +- .004, corrected sqrt(1 - D) +- .006, unbiased 1 +- .006, |z| < {STANDARD_ERRORS}"
    return _per_bits(text), bound, ok


def _rows_of_random_length(rng: np.random.Generator) -> Array:
    """Isotropic rows [PAIRS, DIM]; rows of one length would share its bf16 rounding error, a bias."""
    return _unit(rng.standard_normal((PAIRS, DIM))) * np.exp(rng.standard_normal((PAIRS, 1)))


def _slope(y: Array, decoded: Array) -> float:
    return float((y * decoded).sum(-1).mean()) / COSINE


def _slopes_in_theory(bits: int) -> dict[str, float]:
    kept = 1 - codebook.load(DIM, bits).mse
    return {"plain": kept, "corrected": math.sqrt(kept), "unbiased": 1.0}


def _z_score(sample: Array, mean: float) -> float:
    return float((sample.mean() - mean) / (sample.std() / math.sqrt(len(sample))))


@_claim("7 Theorem 2 holds with its corrected constant")
def theorem_2(seed: int) -> Verdict:
    """d * variance of estimates of <z, x> = 0, against the unbiased rescale of Algorithm 1 at equal bits."""
    rng = _data(seed, 7)
    x = _rows_of_random_length(rng)
    z = _orthogonal_to(_unit(x), rng)
    ok, text = True, {}
    for bits in PROD_BITS:
        sketched = DIM * float((z * _algorithm_2(seed, 7, bits, x)).sum(-1).var())
        rescaled = DIM * float((z * _algorithm_1(seed, 7, bits, "unbiased", x)).sum(-1).var())
        theory = math.pi / 2 * codebook.load(DIM, bits - 1).mse
        ok &= abs(sketched / theory - 1) < VARIANCE_TOLERANCE and sketched < THEOREM_2 * 4.0**-bits
        ok &= rescaled * RESCALE_GAIN < sketched
        text[bits] = f"{sketched:.4f} (theory {theory:.4f}; rescale {rescaled:.4f})"
    return _per_bits(text), "within 6 % of pi/2 D(b-1), < sqrt(3) pi^2 4^-b, rescale 2.5x better", ok


def _algorithm_1(seed: int, claim: int, bits: int, norm: str, rows: Array) -> Array:
    """Rows decoded by Algorithm 1, in units of their original length."""
    codec = quantizer.TurboQuantMSE(DIM, bits, _haar(seed, claim), norm=norm)
    return _through_bytes(codec, rows) / _row_norms(rows)


def _algorithm_2(seed: int, claim: int, bits: int, rows: Array) -> Array:
    """Rows decoded by Algorithm 2, likewise; a fresh sketch every `PAIRS_PER_SKETCH` rows."""
    decoded, turn = np.empty_like(rows), _haar(seed, claim)
    for index, start in enumerate(range(0, len(rows), PAIRS_PER_SKETCH)):
        block = slice(start, start + PAIRS_PER_SKETCH)
        sketch = rotation.qjl_matrix(DIM, [seed, claim, bits, index])
        codec = quantizer.TurboQuantProd(DIM, bits, turn, sketch)
        decoded[block] = _through_bytes(codec, rows[block])
    return decoded / _row_norms(rows)


# 8. Norms.

SCALES = (1e-4, 1.0, 274.0, 921.0, 3e5)
DRIFT, NORM_ERROR = 5e-3, 4e-3


@_claim("8 norms survive: scale equivariance, |x^| = |x|, zero stays zero")
def norms(seed: int) -> Verdict:
    rows, turn = _data(seed, 8).standard_normal((500, DIM)), _haar(seed, 8)
    codecs = [quantizer.TurboQuantMSE(DIM, bits, turn) for bits in ALL_BITS]
    drift = max(_scale_drift(codec, rows) for codec in codecs)
    error = max(_norm_error(codec, rows) for codec in codecs)
    zero = max(float(np.abs(_through_bytes(codec, np.zeros((2, DIM)))).max()) for codec in codecs)
    ok = drift < DRIFT and error < NORM_ERROR and zero == 0
    value = f"D drifts by {drift:.1e}, norm off by {error:.1e}, zero decodes to {zero:g}"
    return value, f"drift < {DRIFT:g} over scales 1e-4..3e5, norm within {NORM_ERROR:g} (bf16), 0", ok


def _scale_drift(codec: quantizer.Quantizer, rows: Array) -> float:
    base = _distortion(rows, _through_bytes(codec, rows)).mean()
    scaled = [_distortion(rows * s, _through_bytes(codec, rows * s)).mean() for s in SCALES]
    return float(np.abs(np.array(scaled) / base - 1).max())


def _norm_error(codec: quantizer.Quantizer, rows: Array) -> float:
    return float(np.abs(_row_norms(_through_bytes(codec, rows)) / _row_norms(rows) - 1).max())


# 9. Attention.

TOKENS, QUERIES, SINKS, EXACT_SINKS = 4096, 96, 2, 4
BIAS_NORM, CONTENT_NORM, ROPE_BASE = 22.0, 12.0, 1e6
KL_LIMITS = {2: 0.075, 3: 0.019, 4: 0.0055}
OUTPUT_LIMITS = {2: 0.09, 3: 0.024, 4: 0.0065}
KL_CUT, SHIFT_TOLERANCE = 0.4, 1e-9


@dataclass(frozen=True)
class _Head:
    """One head: keys [N, d] after RoPE, queries [M, d], values [N, d], center [d] of the rotated key bias."""

    keys: Array
    queries: Array
    values: Array
    center: Array

    def attention(self, scores: Array) -> Array:
        return _softmax(scores / math.sqrt(DIM))


@_claim("9 attention with outlier keys and sinks: error falls with bits, removing the key bias cuts KL")
def attention(seed: int) -> Verdict:
    head = _attention_head(seed)
    exact = head.attention(head.queries @ head.keys.T)
    centred = head.attention(head.queries @ (head.keys - head.center).T)
    shift = float(np.abs(centred - exact).max())
    ok, text, outputs = shift < SHIFT_TOLERANCE, {}, []
    for bits, limit in KL_LIMITS.items():
        raw = _kl(exact, _compressed_attention(head, seed, bits, np.zeros(DIM))[0])
        weights, values = _compressed_attention(head, seed, bits, head.center)
        divergence = _kl(exact, weights)
        outputs.append(float(_distortion(exact @ head.values, weights @ values).mean()))
        ok &= divergence < min(limit, (1 - KL_CUT) * raw) and outputs[-1] < OUTPUT_LIMITS[bits]
        text[bits] = f"KL {raw:.4f} -> {divergence:.4f}, output {outputs[-1]:.4f}"
    ok &= outputs == sorted(outputs, reverse=True)
    bound = f"KL < {KL_LIMITS}, 40 % below raw; output < {OUTPUT_LIMITS}; shift < {SHIFT_TOLERANCE:g}"
    return f"{_per_bits(text)}; softmax shift {shift:.0e}", bound, ok


def _compressed_attention(head: _Head, seed: int, bits: int, center: Array) -> tuple[Array, Array]:
    """Attention weights [M, N] and values [N, d] from compressed pages, the first tokens exact.

    The decoded keys stay centred, and so must be the exact ones.
    """
    candidates = TurboQuantConfig().scale_candidates
    key = quantizer.TurboQuantMSE(DIM, bits, _haar(seed, 9, 0), candidates)
    value = quantizer.TurboQuantMSE(DIM, bits, _haar(seed, 9, 1), candidates)
    shift = torch.from_numpy(center).float()[None]
    codec = KVCodec(key, value, KeyTransform(shift, torch.ones_like(shift)))
    keys = key.decode(_stored(key, codec.encode_keys(torch.from_numpy(head.keys)[:, None])))[:, 0]
    queries = codec.query(torch.from_numpy(head.queries)[None])[0]
    scores = (queries.double() @ keys.double().T).numpy()
    scores[:, :EXACT_SINKS] = head.queries @ (head.keys[:EXACT_SINKS] - center).T
    return head.attention(scores), _through_bytes(value, head.values)


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _kl(exact: Array, other: Array) -> float:
    """Mean Kullback-Leibler divergence of attention rows, in nats."""
    return float((exact * np.log((exact + 1e-30) / (other + 1e-30))).sum(-1).mean())


def _attention_head(seed: int) -> _Head:
    """A synthetic head like a middle layer of Qwen2.5: a dominant key bias, sink tokens, topical drift."""
    rng, position = _data(seed, 9), np.arange(TOKENS)
    basis, spectrum = _random_basis(rng), _power_law(0.7)
    bias = _key_bias(rng)
    contents = _rope(_contents(rng, basis * np.sqrt(spectrum)), position)
    sink = contents[0] / np.linalg.norm(contents[0])
    contents[:SINKS] = 1.6 * CONTENT_NORM * sink + 0.2 * rng.standard_normal((SINKS, DIM))
    rotated_bias = _rope(np.tile(bias, (TOKENS, 1)), position)
    share = np.where(position < SINKS, 0.3, 1.0)[:, None]
    queries = _queries(rng, basis, spectrum, contents, sink)
    queries += _rope(1.5 / BIAS_NORM * bias[None], np.array([TOKENS]))
    return _Head(contents + share * rotated_bias, queries, _values(rng), rotated_bias.mean(0))


def _random_basis(rng: np.random.Generator) -> Array:
    return np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]


def _power_law(exponent: float) -> Array:
    """Variances k^-exponent [d] that sum to 1."""
    variance = np.arange(1, DIM + 1) ** -exponent
    return variance / variance.sum()


def _rope(rows: Array, position: NDArray[np.int64]) -> Array:
    """Rotary embedding [N, d] with coordinates i and i + d/2 as pairs."""
    phase = np.exp(1j * position[:, None] * ROPE_BASE ** (-np.arange(DIM // 2) / (DIM // 2)))
    pairs = (rows[:, : DIM // 2] + 1j * rows[:, DIM // 2 :]) * phase
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def _key_bias(rng: np.random.Generator) -> Array:
    """A k_proj-like bias [d]: a massive coordinate in each of three slow rotary pairs, a weak background."""
    bias = 0.03 * rng.standard_normal(DIM)
    pairs = rng.choice(np.arange(46, DIM // 2), 3, replace=False)
    bias[pairs + DIM // 2 * rng.integers(0, 2, 3)] += rng.choice([-1, 1], 3) * (1.0, 0.6, 0.35)
    return bias * BIAS_NORM / np.linalg.norm(bias)


def _contents(rng: np.random.Generator, mix: Array) -> Array:
    """Key content before RoPE [N, d]: 90 % independent, 10 % drift with a memory of 60 tokens."""
    memory = math.exp(-1 / 60)
    drift = rng.standard_normal((TOKENS, DIM))
    drift[1:] *= math.sqrt(1 - memory**2)
    for t in range(1, TOKENS):
        drift[t] += memory * drift[t - 1]
    rows = math.sqrt(0.9) * rng.standard_normal((TOKENS, DIM)) + math.sqrt(0.1) * drift
    return CONTENT_NORM * (rows @ mix.T) * np.exp(0.15 * rng.standard_normal((TOKENS, 1)))


def _queries(rng: np.random.Generator, basis: Array, spectrum: Array, contents: Array, sink: Array) -> Array:
    """Queries [M, d]: half diffuse, a quarter with eight targets, a quarter with one; all see the sinks."""
    logit = math.sqrt(DIM) / _row_norms(contents[8:]).mean()  # length that scores 1 against an aligned key
    spread = 0.88 * logit / math.sqrt(np.square(spectrum).sum())
    queries = spread * rng.standard_normal((QUERIES, DIM)) @ (basis * np.sqrt(spectrum)).T
    for index, query in enumerate(queries):
        if index % 4 >= 2:
            query *= 0.8
            query += logit * _target(rng, contents, *((8, 13.0) if index % 4 == 2 else (1, 11.0)))
    queries -= np.outer(queries @ sink, sink)
    strength = rng.normal(7.3, 0.8, (QUERIES, 1)) * math.sqrt(DIM) / (1.6 * CONTENT_NORM)
    return queries + strength * sink


def _target(rng: np.random.Generator, contents: Array, count: int, logit: float) -> Array:
    """Direction [d] towards `count` random keys."""
    keys = contents[rng.integers(64, TOKENS - 128, count)]
    return logit / math.sqrt(count) * (keys / _row_norms(keys)).sum(0)


def _values(rng: np.random.Generator) -> Array:
    """Values [N, d]: mild spectrum, two strong channels, a common mean, sinks near zero."""
    rows = rng.standard_normal((TOKENS, DIM)) * np.arange(1, DIM + 1) ** -0.25 @ _random_basis(rng)
    rows *= 2.6 / _row_norms(rows).mean()
    rows[:, :2] *= 4
    rows += 0.06 * rng.standard_normal(DIM)
    rows[:SINKS] *= 0.05
    return rows


# 10. Needles.

HAYSTACK, NEEDLES, QUERY_NOISE, FOUND = 32_768, 400, 1.6, 0.95
AGREEMENT = {2: 0.88, 3: 0.95, 4: 0.97}


@_claim("10 a needle among 32768 keys is found with a query that is no key")
def needles(seed: int) -> Verdict:
    """Agreement with the float64 argmax; the cosine of query and key is about 0.53."""
    rng = _data(seed, 10)
    keys = rng.standard_normal((HAYSTACK, DIM))
    target = rng.integers(0, HAYSTACK, NEEDLES)
    queries = keys[target] + QUERY_NOISE * rng.standard_normal((NEEDLES, DIM))
    best = (queries @ keys.T).argmax(-1)
    found = float((best == target).mean())
    ok, text = found > FOUND, {}
    for bits, least in AGREEMENT.items():
        codec = quantizer.TurboQuantMSE(DIM, bits, _haar(seed, 10), TurboQuantConfig().scale_candidates)
        agreement = float(((queries @ _through_bytes(codec, keys).T).argmax(-1) == best).mean())
        ok &= agreement >= least
        text[bits] = f"{agreement:.3f}"
    return f"{_per_bits(text)}; exact finds {found:.3f}", f"agreement >= {AGREEMENT}", ok


# 11. Entropy.

ENTROPY_BITS, ENTROPY, HUFFMAN = 4, 3.774, 3.820
ENTROPY_TOLERANCE, HUFFMAN_TOLERANCE = 0.01, 0.003


@_claim("11 entropy coding would save 4.5 % at 4 bits")
def entropy(seed: int) -> Verdict:
    codec = quantizer.TurboQuantMSE(DIM, ENTROPY_BITS, _haar(seed, 11))
    rows = torch.from_numpy(_data(seed, 11).standard_normal((4000, DIM)))
    counts = _stored(codec, codec.quantize(rows)).codes.flatten().bincount(minlength=2**ENTROPY_BITS)
    share = counts.double().numpy() / float(counts.sum())
    seen, huffman = -float(share @ np.log2(share)), _huffman_length(share.tolist())
    exact = codebook.load(DIM, ENTROPY_BITS).entropy
    ok = max(abs(seen - ENTROPY), abs(exact - ENTROPY)) < ENTROPY_TOLERANCE
    ok &= abs(huffman - HUFFMAN) < HUFFMAN_TOLERANCE
    saving = 1 - huffman / ENTROPY_BITS
    value = f"H = {seen:.4f} (exact {exact:.4f}), Huffman {huffman:.4f} saves {saving:.1%}"
    return value, f"H = {ENTROPY} +- {ENTROPY_TOLERANCE}, Huffman {HUFFMAN:.3f} +- {HUFFMAN_TOLERANCE}", ok


def _huffman_length(shares: Sequence[float]) -> float:
    """Mean code length: every merge adds one bit to all that it merges."""
    heap, length = list(shares), 0.0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        length += merged
        heapq.heappush(heap, merged)
    return length


# 12. Compression.

SLOTS = {(128, 4, 4): (132, 3.88), (64, 3, 3): (52, 4.92)}  # (d, key bits, value bits): bytes, ratio to bf16


@_claim("12 the compression ratio follows from real bytes")
def compression(seed: int) -> Verdict:
    """One key and one value through the packed bytes, against the page format and d (b_K + b_V) / 8 + 4."""
    rng, ok, text = _data(seed, 12), True, []
    for (dim, key_bits, value_bits), (size, ratio) in SLOTS.items():
        used = sum(_row_nbytes(rng, dim, bits) for bits in (key_bits, value_bits))
        formula = dim * (key_bits + value_bits) // 8 + 4
        ok &= used == formula == size == PageFormat(dim, 16, key_bits, value_bits).token_bytes
        ok &= round(4 * dim / used, 2) == ratio
        text.append(f"d{dim} K{key_bits}V{value_bits} {used} B = {4 * dim / used:.2f}x")
    return "; ".join(text), "132 B = 3.88x; 52 B = 4.92x", ok


def _row_nbytes(rng: np.random.Generator, dim: int, bits: int) -> int:
    codec = quantizer.TurboQuantMSE(dim, bits, rotation.identity_rotation(dim))
    return codec.to_bytes(codec.quantize(torch.from_numpy(rng.standard_normal(dim)))).nbytes
