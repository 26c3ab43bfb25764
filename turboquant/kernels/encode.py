"""The write path of a layer in one plain Triton launch: transform, rotate, encode, pack, scatter, keep exactly.

The twin is `KVCaptureEngine.ingest`, and the bytes are the twin's: every float32 operation is the twin's in the
twin's order, divisions and roots are rounded to nearest, and products are not contracted into sums.  A program takes
a tile of tokens of one KV head, either the keys or the values.

A tile is float32 [tokens, P] with P the head size padded to a power of two.  Rows are loaded so that a row lies in few
lanes and its upper coordinate bits in registers: there a tree sum folds most of a row without a shuffle.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from turboquant.capture import ExactRing, LayerCache
from turboquant.kernels import gluon_objection
from turboquant.kernels.launch import Launch, Operand, Operands, kind_of, power_of_2
from turboquant.page import PageFormat
from turboquant.quantizer import (
    NORMS,
    SCAN_RADIUS,
    FP8Quantizer,
    GroupQuantizer,
    Quantizer,
    TurboQuantMSE,
    TurboQuantProd,
)
from turboquant.rotary import SPAN as SPAN_TOKENS
from turboquant.store import CompressedBlockStore

MSE, PROD, FP8, GROUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
IDENTITY, HADAMARD, HAAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CORRECTED, PLAIN, UNBIASED = (tl.constexpr(i) for i in range(3))
RADIUS = tl.constexpr(SCAN_RADIUS)
SPAN = tl.constexpr(SPAN_TOKENS)
FP8_MAX = tl.constexpr(448.0)
ROUND = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds |x| < 2^22 to the nearest even integer
CHUNK = tl.constexpr(4)  # matrix columns per step: 16 bytes of a row
ROTATIONS = {"identity": IDENTITY, "hadamard": HADAMARD, "haar": HAAR}
_SIDES: "WeakKeyDictionary[CompressedBlockStore, Sides]" = WeakKeyDictionary()
SMALL_ROWS = 4096  # rows (of all heads and sides) that a current GPU runs at once with a warp for each
LANES = 32
STEP_TENSORS = ("keys", "values", "slots")
_OPERANDS: "WeakKeyDictionary[CompressedBlockStore, LayerOperands]" = WeakKeyDictionary()
_LAST: dict[int, tuple[Hashable, Launch]] = {}  # by kind of layers, what the last one to encode launched


# ---- numbers ---------------------------------------------------------------------------------------------------
@triton.jit
def _to_bits(x):
    """The bits of float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(x):
    """Inverse of `_to_bits`."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _to_float(x):
    """Any float -> float32.  bfloat16 goes by its bits: the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        x = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        x = _from_bits(x)
    return x.to(tl.float32)


@triton.jit
def _bfloat16(x):
    """float32 -> the bits of bfloat16 in int32, to nearest even.  The interpreter's cast truncates."""
    bits = _to_bits(x)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x == x, bits, 0x7FC0)


@triton.jit
def _widen(bits):
    """Bits of bfloat16 in int32 -> float32."""
    return _from_bits(bits << 16)


@triton.jit
def _float8(x):
    """float32 within +-448 -> the byte of float8_e4m3fn in int32, to nearest even."""
    bits = _to_bits(x)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 codes are multiples of 2^-9, the last bit of a float32 in [2^14, 2^15).
    small = _to_bits(_from_bits(size) + 16384.0) - 0x46800000
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size < (121 << 23), small, normal)
    return tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def _tree_sum(x, T: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):
    """float32 [T, P] -> [T], folded half on half; every fold adds two numbers, so its order is known."""
    for level in tl.static_range(LOG - 1):
        x = tl.sum(tl.reshape(x, [T, 2, P >> (level + 1)]), 1)
    return tl.sum(x, 1)


@triton.jit
def _row_norm(rows, T: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):
    """Euclidean norms [T] that neither overflow nor underflow."""
    peak = tl.max(tl.abs(rows), 1)
    scaled = tl.math.div_rn(rows, tl.broadcast_to(tl.where(peak > 0, peak, 1.0)[:, None], [T, P]))
    return tl.math.sqrt_rn(_tree_sum(scaled * scaled, T, P, LOG)) * peak


# ---- bases -----------------------------------------------------------------------------------------------------
@triton.jit
def _butterflies(x, T: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of float32 [T, P]."""
    upper = tl.arange(0, 2)[None, None, :, None] == 1
    for level in tl.static_range(LOG):
        pairs = tl.reshape(x, [T, P >> (level + 1), 2, 1 << level])
        bits = _to_bits(pairs)
        other = _from_bits(tl.sum(bits, 2, keep_dims=True) - bits)  # one shuffle, and integers wrap around
        x = tl.reshape(other + tl.where(upper, -pairs, pairs), [T, P])
    return x


@triton.jit
def _columns(x, N: tl.constexpr):
    """The four columns of [N, 4] as float64."""
    even, odd = tl.split(tl.reshape(x.to(tl.float64), [N, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _add_outer(total, x, w):
    """total [T, P] + x [T] times w [P]."""
    return tl.fma(tl.broadcast_to(x[:, None], total.shape), tl.broadcast_to(w[None, :], total.shape), total)


@triton.jit
def _product(x, matrix, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """x @ matrix.T for float32 [T, P] and [D, D] in float32, summed in float64 (where the products are exact)."""
    row = tl.arange(0, P)
    column = tl.arange(0, CHUNK)
    total = tl.zeros([T, P], tl.float64)
    for first in range(0, D, CHUNK):
        weights = tl.load(matrix + row[:, None] * D + first + column[None, :], mask=(row < D)[:, None], other=0.0)
        some = tl.gather(x, tl.broadcast_to((first + column)[None, :], [T, CHUNK]), 1)
        w0, w1, w2, w3 = _columns(weights, P)
        x0, x1, x2, x3 = _columns(some, T)
        total = _add_outer(total, x0, w0)
        total = _add_outer(total, x1, w1)
        total = _add_outer(total, x2, w2)
        total = _add_outer(total, x3, w3)
    return total.to(tl.float32)


@triton.jit
def rotate(x, matrix, ROTATION: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):
    """Rows float32 [T, P] -> the quantiser's basis; zeros stay where P exceeds D."""
    if ROTATION == HADAMARD:
        sign = tl.where(tl.load(matrix + tl.arange(0, P)) > 0, 1.0, -1.0)
        result = _butterflies(x * sign[None, :], T, P, LOG) * D**-0.5
    elif ROTATION == HAAR:
        result = _product(x, matrix, T, D, P)
    else:
        result = x
    return result


# ---- quantisers ------------------------------------------------------------------------------------------------
@triton.jit
def _magnitude(unit, scale):
    """|unit * scale|, one unit in the last place more where it is not positive.

    Codebooks are symmetric around a threshold at 0.  Positive numbers count the thresholds strictly below them, the
    others those at or below their magnitude: the next float turns the second count into the first.
    """
    return _from_bits(_to_bits(tl.abs(unit) * scale) + tl.where(unit > 0, 0, 1))


@triton.jit
def _sizes(magnitude, thresholds, centroids, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Magnitudes of the nearest centroids float32 [T, P], zero where P exceeds D."""
    half: tl.constexpr = 1 << (BITS - 1)
    sizes = tl.zeros_like(magnitude) + tl.load(centroids + half)
    for i in tl.static_range(1, half):
        above = magnitude > tl.load(thresholds + half - 1 + i)
        sizes = tl.where(above, tl.load(centroids + half + i), sizes)
    if D != P:
        sizes = tl.where((tl.arange(0, P) < D)[None, :], sizes, 0.0)
    return sizes


@triton.jit
def _codes(unit, magnitude, thresholds, BITS: tl.constexpr):
    """Numbers of the nearest centroids int32 [T, P]."""
    half: tl.constexpr = 1 << (BITS - 1)
    steps = tl.zeros(magnitude.shape, tl.int32)
    for i in tl.static_range(1, half):
        steps += (magnitude > tl.load(thresholds + half - 1 + i)).to(tl.int32)
    return tl.where(unit > 0, half + steps, half - 1 - steps)


@triton.jit
def _trial(unit, scale, thresholds, centroids, BITS: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
           LOG: tl.constexpr):  # fmt: skip
    """|codeword|^2 and <unit, codeword> [T] of a pre-scale; a coordinate and its centroid have the same sign."""
    sizes = _sizes(_magnitude(unit, scale), thresholds, centroids, BITS, D, P)
    return _tree_sum(sizes * sizes, T, P, LOG), _tree_sum(tl.abs(unit) * sizes, T, P, LOG)


@triton.jit
def _best_scale(unit, thresholds, centroids, BITS: tl.constexpr, CANDIDATES: tl.constexpr, T: tl.constexpr,
                D: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):  # fmt: skip
    """The first pre-scale with the best cosine and its `_trial`, all [T].

    Codes are not kept: rounding once more at the end is cheaper than the registers.  Not unrolled: the code of many
    rows would not fit into the instruction cache, and that of one row comes out three times as long.
    """
    half: tl.constexpr = CANDIDATES // 2
    best = tl.full([T], -float("inf"), tl.float32)
    scale, energy, dot = tl.full([T], 1.0, tl.float32), tl.zeros([T], tl.float32), tl.zeros([T], tl.float32)
    for trial in range(CANDIDATES):
        new_scale = 1.0
        for i in tl.static_range(CANDIDATES):
            new_scale = tl.where(trial == i, 1.0 + RADIUS * (i - half) / half, new_scale)
        new_energy, new_dot = _trial(unit, new_scale, thresholds, centroids, BITS, T, D, P, LOG)
        cosine = tl.math.div_rn(new_dot, tl.math.sqrt_rn(new_energy))
        better = cosine > best
        best, scale = tl.where(better, cosine, best), tl.where(better, new_scale, scale)
        energy, dot = tl.where(better, new_energy, energy), tl.where(better, new_dot, dot)
    return scale, energy, dot


@triton.jit
def encode_mse(rows, thresholds, centroids, BITS: tl.constexpr, CANDIDATES: tl.constexpr, NORM: tl.constexpr,
               T: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr):  # fmt: skip
    """`TurboQuantMSE.encode`: codes int32 [T, P] and the bits of the scale [T]."""
    norm = _row_norm(rows, T, P, LOG)
    unit = tl.math.div_rn(rows, tl.broadcast_to(tl.where(norm > 0, norm, 1.0)[:, None], [T, P])) * D**0.5
    if CANDIDATES == 1:
        magnitude = _magnitude(unit, 1.0)
        energy, dot = _trial(unit, 1.0, thresholds, centroids, BITS, T, D, P, LOG)
    else:
        best, energy, dot = _best_scale(unit, thresholds, centroids, BITS, CANDIDATES, T, D, P, LOG)
        magnitude = _magnitude(unit, best[:, None])
    codes = _codes(unit, magnitude, thresholds, BITS)
    if NORM == PLAIN:
        scale = tl.math.div_rn(norm, tl.full([T], D**0.5, tl.float32))
    elif NORM == UNBIASED:
        scale = tl.math.div_rn(norm * D**0.5, tl.where(dot > 0, dot, 1.0))
    else:
        scale = tl.math.div_rn(norm, tl.math.sqrt_rn(energy))
    return codes, _bfloat16(scale)


@triton.jit
def encode_prod(rows, thresholds, centroids, sketch, BITS: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
                P: tl.constexpr, LOG: tl.constexpr):  # fmt: skip
    """`TurboQuantProd.encode`: codes int32 [T, P], the bits of the scale and of the residual's norm [T]."""
    codes, scale = encode_mse(rows, thresholds, centroids, BITS - 1, 1, PLAIN, T, D, P, LOG)
    words = tl.load(centroids + codes, mask=(tl.arange(0, P) < D)[None, :], other=0.0)
    residual = rows - words * _widen(scale)[:, None]
    signs = (_product(residual, sketch, T, D, P) >= 0).to(tl.int32)
    return codes | (signs << (BITS - 1)), scale, _bfloat16(_row_norm(residual, T, P, LOG))


@triton.jit
def encode_fp8(rows, T: tl.constexpr, P: tl.constexpr):
    """`FP8Quantizer.encode`: codes int32 [T, P] and the bits of the scale [T]."""
    scale = _bfloat16(tl.math.div_rn(tl.max(tl.abs(rows), 1), tl.full([T], FP8_MAX, tl.float32)))
    wide = _widen(scale)
    scaled = tl.math.div_rn(rows, tl.broadcast_to(tl.where(wide > 0, wide, 1.0)[:, None], [T, P]))
    return _float8(tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)), scale


@triton.jit
def encode_group(rows, BITS: tl.constexpr, SIZE: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """`GroupQuantizer.encode`: codes int32 [T, P], the bits of steps and of minima [T, P / SIZE]."""
    levels: tl.constexpr = (1 << BITS) - 1
    count: tl.constexpr = P // SIZE
    groups = tl.reshape(rows, [T, count, SIZE])
    low = _bfloat16(tl.min(groups, 2))
    spread = tl.max(groups, 2) - _widen(low)
    step = _bfloat16(tl.math.div_rn(spread, tl.full([T, count], levels, tl.float32)))
    wide = _widen(step)
    safe = tl.broadcast_to(tl.where(wide > 0, wide, 1.0)[:, :, None], [T, count, SIZE])
    codes = tl.math.div_rn(groups - _widen(low)[:, :, None], safe)
    codes = tl.minimum(tl.maximum(codes, 0.0), levels)
    codes = ((codes + ROUND) - ROUND).to(tl.int32)
    return tl.reshape(codes, [T, P]), step, low


# ---- memory ----------------------------------------------------------------------------------------------------
@triton.jit
def _store_plane(pages, base, local, valid, codes, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
                 DIMENSION_MAJOR: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                 BS: tl.constexpr):  # fmt: skip
    """Pack codes int32 [T, P] below 2^WIDTH and store them: byte j holds the coordinates j, j + n, j + 2n, ..."""
    n: tl.constexpr = D * WIDTH // 8
    size: tl.constexpr = P * WIDTH // 8
    count: tl.constexpr = 8 // WIDTH
    byte = tl.arange(0, size)
    if count == 1:
        packed = codes
    elif D == P:
        shift = tl.arange(0, count) * WIDTH
        packed = tl.sum(tl.reshape(codes, [T, count, size]) << shift[None, :, None], 1)
    else:
        packed = tl.zeros([T, size], tl.int32)
        for i in tl.static_range(count):
            source = tl.broadcast_to(tl.minimum(byte + i * n, P - 1)[None, :], [T, size])
            packed |= tl.gather(codes, source, 1) << (i * WIDTH)
    packed = packed.to(tl.uint8)
    if DIMENSION_MAJOR:  # tokens last: neighbouring lanes store neighbouring tokens
        address = (base + OFFSET + local)[None, :] + byte[:, None] * BS
        tl.store(pages + address, tl.trans(packed), mask=(byte < n)[:, None] & valid[None, :])
    else:
        address = (base + OFFSET + local * n)[:, None] + byte[None, :]
        tl.store(pages + address, packed, mask=valid[:, None] & (byte < n)[None, :])


@triton.jit
def store_planes(pages, base, local, valid, codes, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
                 DIMENSION_MAJOR: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                 BS: tl.constexpr):  # fmt: skip
    """Codes int32 [T, P] -> their bytes in the page; 3 bits are a 2-bit plane and a 1-bit plane."""
    if BITS == 3:
        _store_plane(pages, base, local, valid, codes & 3, FIRST, 2, DIMENSION_MAJOR, T, D, P, BS)
        _store_plane(pages, base, local, valid, codes >> 2, SECOND, 1, DIMENSION_MAJOR, T, D, P, BS)
    else:
        _store_plane(pages, base, local, valid, codes, FIRST, BITS, DIMENSION_MAJOR, T, D, P, BS)


@triton.jit
def _store_scalar(pages, base, local, valid, bits, OFFSET: tl.constexpr, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Scalar INDEX of COUNT, bits int32 [T]; pages and planes start on multiples of 16 bytes."""
    tl.store(pages.to(tl.pointer_type(tl.int16)) + (base + OFFSET) // 2 + local * COUNT + INDEX, bits.to(tl.int16),
             mask=valid)  # fmt: skip


@triton.jit
def _store_scalars(pages, base, local, valid, bits, OFFSET: tl.constexpr, INDEX: tl.constexpr, COUNT: tl.constexpr,
                   GROUPS: tl.constexpr):  # fmt: skip
    """Scalars INDEX, INDEX + 1, ... of COUNT, half of which are bits int32 [T, GROUPS]."""
    group = tl.arange(0, GROUPS)
    address = ((base + OFFSET) // 2 + local * COUNT + INDEX)[:, None] + group[None, :]
    tl.store(pages.to(tl.pointer_type(tl.int16)) + address, bits.to(tl.int16),
             mask=valid[:, None] & (group < COUNT // 2)[None, :])  # fmt: skip


@triton.jit
def copy_to_ring(x, ring, index, kept, head, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Rows [T, P] of the cache's input dtype -> the ring's positions `index` [T] where `kept`."""
    coordinate = tl.arange(0, P)
    mask = kept[:, None] & (coordinate < D)[None, :]
    target = ring + (index * H + head)[:, None] * D + coordinate[None, :]
    if x.dtype == ring.dtype.element_ty:
        tl.store(target, x, mask=mask)
    elif ring.dtype.element_ty == tl.bfloat16:
        tl.store(target, _bfloat16(_to_float(x)).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(target, _to_float(x).to(ring.dtype.element_ty), mask=mask)


@triton.jit
def _load_plain(rows, line, inside, D: tl.constexpr, P: tl.constexpr):
    """Rows [T, P] as they are."""
    coordinate = tl.arange(0, P)
    mask = inside[:, None] & (coordinate < D)[None, :]
    return tl.load(rows + line[:, None] + coordinate[None, :], mask=mask, other=0.0)


@triton.jit
def _ring_position(slots, entry_of_part, token, inside, ES: tl.constexpr):
    """Positions int64 [T] in the flattened ring, and whether the tokens' parts of blocks have entries."""
    slot = tl.load(slots + token, mask=inside, other=-1)
    entry = tl.load(entry_of_part + slot // ES, mask=slot >= 0, other=-1)
    return entry * ES + slot % ES, entry >= 0


@triton.jit
def _load_rows(rows, line, inside, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr, L: tl.constexpr):
    """Rows float32 [T, P], a row in L lanes.  The order of the loaded axes is what gives a tile this layout."""
    coordinate = tl.arange(0, P // L)[:, None, None] * L + tl.arange(0, L)[None, None, :]
    mask = inside[None, :, None] & (coordinate < D)
    x = tl.load(rows + line[None, :, None] + coordinate, mask=mask, other=0.0)
    return tl.reshape(tl.permute(_to_float(x), [1, 0, 2]), [T, P])


@triton.jit
def _encode_side(x, pages, base, local, valid, matrix, sketch, thresholds, centroids, SIDE: tl.constexpr,
                 DIMENSION_MAJOR: tl.constexpr, T: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr,
                 BS: tl.constexpr):  # fmt: skip
    """Rows float32 [T, P] -> their bytes in the pages; SIDE is `side_constants`."""
    KIND: tl.constexpr = SIDE[0]
    BITS: tl.constexpr = SIDE[1]
    ROTATION: tl.constexpr = SIDE[2]
    CANDIDATES: tl.constexpr = SIDE[3]
    NORM: tl.constexpr = SIDE[4]
    SIZE: tl.constexpr = SIDE[5]
    COUNT: tl.constexpr = SIDE[6]
    OFFSET: tl.constexpr = SIDE[7]
    FIRST: tl.constexpr = SIDE[8]
    SECOND: tl.constexpr = SIDE[9]
    x = rotate(x, matrix, ROTATION, T, D, P, LOG)
    if KIND == MSE:
        codes, scale = encode_mse(x, thresholds, centroids, BITS, CANDIDATES, NORM, T, D, P, LOG)
        _store_scalar(pages, base, local, valid, scale, OFFSET, 0, COUNT)
    elif KIND == PROD:
        codes, scale, norm = encode_prod(x, thresholds, centroids, sketch, BITS, T, D, P, LOG)
        _store_scalar(pages, base, local, valid, scale, OFFSET, 0, COUNT)
        _store_scalar(pages, base, local, valid, norm, OFFSET, 1, COUNT)
    elif KIND == FP8:
        codes, scale = encode_fp8(x, T, P)
        _store_scalar(pages, base, local, valid, scale, OFFSET, 0, COUNT)
    else:
        codes, step, low = encode_group(x, BITS, SIZE, T, P)
        _store_scalars(pages, base, local, valid, step, OFFSET, 0, COUNT, P // SIZE)
        _store_scalars(pages, base, local, valid, low, OFFSET, COUNT // 2, COUNT, P // SIZE)
    store_planes(pages, base, local, valid, codes, FIRST, SECOND, BITS, DIMENSION_MAJOR, T, D, P, BS)


UNSPECIALISED = ["count", "spans", "key_stride", "key_head_stride", "value_stride", "value_head_stride"]


# Vector loads would put neighbouring coordinates into one thread: strides of unknown divisibility prevent them.
@triton.jit(do_not_specialize=UNSPECIALISED)
def _encode_kernel(
    keys, values, slots, pages, entry_of_part, written, recent_keys, recent_values, number, wide, center, gain,
    key_matrix, key_sketch, key_thresholds, key_centroids, value_matrix, value_sketch, value_thresholds,
    value_centroids, count, spans, key_stride, key_head_stride, value_stride, value_head_stride, page_stride,
    page_head_stride, KEY: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BS: tl.constexpr, ES: tl.constexpr, T: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = token < count
    slot = tl.load(slots + token, mask=inside, other=-1)
    valid = slot >= 0
    slot = tl.where(valid, slot, 0)
    base = slot // BS * page_stride + head * page_head_stride
    local = (slot % BS).to(tl.int32)
    # Rows do not wait for their slots, and the ring's copy is stored last: nothing waits for its entry.  A tile of
    # many rows reads the few that the ring keeps once more at the end, as holding them would cost registers.
    if RING and T == 1:
        index, kept = _ring_position(slots, entry_of_part, token, inside, ES)
    if tl.program_id(2) == 0:
        line = token.to(tl.int64) * key_stride + head * key_head_stride
        if RING and T == 1:
            plain = _load_plain(keys, line, inside, D, P)
        x = _load_rows(keys, line, inside, T, D, P, L)
        coordinate = tl.arange(0, P)
        block = tl.load(number + slot // BS, mask=inside, other=0)
        span = tl.minimum((block * BS + local) // SPAN, spans - 1).to(tl.int64) * (2 * D)
        cosine = _load_rows(wide, span, inside, T, D, P, L)
        sine = _load_rows(wide + D, span, inside, T, D, P, L)
        shift = tl.load(center + head * D + coordinate, mask=coordinate < D, other=0.0)
        quarter = tl.load(center + (H + head) * D + coordinate, mask=coordinate < D, other=0.0)
        scale = tl.load(gain + head * D + coordinate, mask=coordinate < D, other=0.0)
        x = (x - (cosine * shift[None, :] + sine * quarter[None, :])) * scale[None, :]
        _encode_side(x, pages, base, local, valid, key_matrix, key_sketch, key_thresholds, key_centroids, KEY, False,
                     T, D, P, LOG, BS)  # fmt: skip
        if RING:
            if T > 1:
                index, kept = _ring_position(slots, entry_of_part, token, inside, ES)
                plain = _load_plain(keys, line, kept, D, P)
            copy_to_ring(plain, recent_keys, index, kept, head, H, D, P)
            if head == 0:
                tl.store(written + index, 1, mask=kept)
    else:
        line = token.to(tl.int64) * value_stride + head * value_head_stride
        if RING and T == 1:
            plain = _load_plain(values, line, inside, D, P)
        x = _load_rows(values, line, inside, T, D, P, L)
        _encode_side(x, pages, base, local, valid, value_matrix, value_sketch, value_thresholds, value_centroids,
                     VALUE, True, T, D, P, LOG, BS)  # fmt: skip
        if RING:
            if T > 1:
                index, kept = _ring_position(slots, entry_of_part, token, inside, ES)
                plain = _load_plain(values, line, kept, D, P)
            copy_to_ring(plain, recent_values, index, kept, head, H, D, P)


# ---- launch ----------------------------------------------------------------------------------------------------
def tile(rows: int, width: int, products: bool) -> tuple[int, int]:
    """Tokens per program and warps, for `rows` rows of padded head size `width` in all.

    products: rows are multiplied by a matrix, whose float64 sums take twice the registers.
    """
    if rows <= SMALL_ROWS:
        return 1, 1
    return (8 if products or width > 128 else 16), 4


def has_products(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, TurboQuantProd) or quantizer.rotation.kind == "haar"


def side_constants(quantizer: Quantizer, layout: PageFormat, side: str) -> tuple[int, ...]:
    """What `_encode_side` needs to know of a quantiser and of its planes."""
    kind, candidates, norm, size = MSE, 1, 0, 1
    if isinstance(quantizer, TurboQuantMSE):
        candidates, norm = len(quantizer.scales), NORMS.index(quantizer.norm)
    elif isinstance(quantizer, TurboQuantProd):
        kind = PROD
    elif isinstance(quantizer, FP8Quantizer):
        kind = FP8
    elif isinstance(quantizer, GroupQuantizer):
        kind, size = GROUP, quantizer.group
    else:
        raise TypeError(f"no encoder for {type(quantizer).__name__}")
    codes = [plane.offset for plane in layout.group(f"{side}_codes")]
    (scalars,) = (plane.offset for plane in layout.group(f"{side}_scalars"))
    return (
        kind.value, quantizer.bits, ROTATIONS[quantizer.rotation.kind].value, candidates, norm, size,
        quantizer.num_scalars, scalars, codes[0], codes[-1],
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sides:
    """Of a store: `side_constants` of keys and values, `side_tables` of both, and whether one `has_products`."""

    key: tuple[int, ...]
    value: tuple[int, ...]
    tables: dict[str, torch.Tensor]
    products: bool


def store_sides(store: CompressedBlockStore) -> Sides:
    """Made once per store: they take longer than the launch."""
    if store not in _SIDES:
        key, value = store.codec.key, store.codec.value
        _SIDES[store] = Sides(
            side_constants(key, store.format, "key"),
            side_constants(value, store.format, "value"),
            {**side_tables(key, "key"), **side_tables(value, "value")},
            has_products(key) or has_products(value),
        )
    return _SIDES[store]


def side_tables(quantizer: Quantizer, side: str) -> dict[str, torch.Tensor]:
    """The tables of a quantiser by name; the rotation's matrix stands for those that it does not have."""
    sketch = thresholds = centroids = matrix = quantizer.rotation.matrix
    if isinstance(quantizer, TurboQuantProd):
        sketch, thresholds, centroids = quantizer.sketch, quantizer.mse.thresholds, quantizer.mse.centroids
    elif isinstance(quantizer, TurboQuantMSE):
        thresholds, centroids = quantizer.thresholds, quantizer.centroids
    return {
        f"{side}_matrix": matrix,
        f"{side}_sketch": sketch,
        f"{side}_thresholds": thresholds,
        f"{side}_centroids": centroids,
    }


def arguments(
    layer: LayerCache, ring: ExactRing, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `_encode_kernel` by name; nothing is copied."""
    codec, store = layer.codec, layer.store
    rows, heads, dim = keys.shape
    assert keys.stride(-1) == 1 and values.stride(-1) == 1, "rows must be contiguous"
    width, count, sides = power_of_2(dim), min(rows, slots.shape[0]), store_sides(store)
    tokens, warps = tile(2 * count * heads, width, sides.products)
    return {
        "keys": keys,
        "values": values,
        "slots": slots,
        "pages": store.pages,
        "entry_of_part": ring.entry_of_part,
        "written": ring.written.view(torch.uint8),
        "recent_keys": layer.recent.keys,
        "recent_values": layer.recent.values,
        "number": ring.number,
        "wide": codec.rotary.wide,
        "center": codec.center,
        "gain": codec.transform.gain,
        **sides.tables,
        "count": count,
        "spans": codec.rotary.wide.shape[0],
        "key_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "value_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "page_stride": store.pages.stride(0),
        "page_head_stride": store.pages.stride(1),
        "KEY": sides.key,
        "VALUE": sides.value,
        "RING": ring.capacity > 0,
        "H": heads,
        "D": dim,
        "BS": store.block_size,
        "ES": ring.size,
        "T": tokens,
        "P": width,
        "LOG": width.bit_length() - 1,
        "L": min(width, LANES * warps // tokens),
        "num_warps": warps,
    }


def has_layout(side: tuple[int, ...], key: bool) -> bool:
    """Whether `gluon_encode` has code for a side with these `side_constants`."""
    kind, bits, rotation, _, norm, *_ = side
    if kind == MSE.value:
        return bits in (2, 3, 4) and rotation == HADAMARD.value and norm == CORRECTED.value
    return key and kind == FP8.value and rotation == IDENTITY.value


def choose(chosen: dict[str, Any]) -> bool:
    """Whether `gluon_encode` takes these `arguments`: many rows, and sides and sizes that it has code for."""
    return (
        chosen["T"] > 1
        and chosen["D"] in (64, 128, 256)
        and chosen["BS"] % 16 == 0
        and has_layout(chosen["KEY"], True)
        and has_layout(chosen["VALUE"], False)
        and gluon_objection(chosen["keys"].device) is None
    )


def plan(chosen: dict[str, Any]) -> Launch:
    """The launch for `arguments`, on all their tensors.

    With explicit layouts, a program is a warp with 1024 coordinates.
    """
    if choose(chosen):
        from turboquant.kernels.gluon_encode import encode_kernel

        kernel, programs, warps = encode_kernel, -(-chosen["count"] * chosen["D"] // 1024), 1
    else:
        kernel, programs, warps = _encode_kernel, -(-chosen["count"] // chosen["T"]), chosen["num_warps"]
    names = kernel.arg_names
    numbers, constants = names.index("count"), names.index("KEY")
    return Launch(
        kernel, (programs, chosen["H"], 2), names[:numbers], [chosen[name] for name in names[numbers:constants]],
        {name: chosen[name] for name in names[constants:]}, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerOperands:
    """What of `arguments` stays from step to step, and a number for layers whose launches are alike (`kind_of`)."""

    ring: ExactRing
    kind: int
    operands: Operands


def layer_operands(layer: LayerCache, ring: ExactRing, chosen: Callable[[], dict[str, Any]]) -> LayerOperands:
    """Kept for as long as a layer has its store and its ring.  chosen: `arguments` of any step."""
    found = _OPERANDS.get(layer.store)
    if found is None or found.ring is not ring:
        given = chosen()
        tensors: dict[str, Operand] = {
            name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name not in STEP_TENSORS
        }
        names = ("spans", "page_stride", "page_head_stride", "KEY", "VALUE", "RING", "H", "D", "BS", "ES")
        kind = kind_of("encode", layer.store.pages.device, layer.recent.keys.dtype, *[given[name] for name in names])
        found = _OPERANDS[layer.store] = LayerOperands(ring, kind, Operands(tensors))
    return found


def encode(layer: LayerCache, ring: ExactRing, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """`KVCaptureEngine.ingest` without its synchronisations: keys, values [N, H_kv, d], slots int64 [N].

    Token and head strides are free.
    """
    if not min(keys.shape[0], slots.shape[0]):
        return

    def chosen() -> dict[str, Any]:
        return arguments(layer, ring, keys, values, slots)

    own = layer_operands(layer, ring, chosen)
    key = (keys.shape, keys.stride(), values.stride(), keys.dtype, values.dtype, slots.shape, slots.dtype)
    last = _LAST.get(own.kind)
    if last is None or last[0] != key:
        last = _LAST[own.kind] = key, plan(chosen())
    last[1](own.operands.joined(keys=keys, values=values, slots=slots))
