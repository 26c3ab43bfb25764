"""The write path of a layer for many rows: `turboquant.kernels.encode` with explicit layouts, the same bytes.

One warp is one program and takes a tile of rows [T, D] of one KV head, 32 coordinates a lane.  Rows are loaded with the
lowest three coordinate bits in registers, which the first three levels of the Hadamard transform combine.  Then the
lanes of a row exchange once, and hold the lowest coordinate bits from there on: the upper levels, and the folds of a
tree sum down to one number a lane, are register operations.

Two things are computed in another way with the same result.  A quotient by a row's divisor is a product with the
rounded reciprocal and one correction by the exact remainder, which is the rounded quotient as long as nothing
underflows; tiles with numbers of extreme size divide.  The nearest centroid is a sum of steps, each taken by a
saturating multiply-add in place of a comparison and a selection.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from turboquant.kernels import encode
from turboquant.kernels.encode import FP8_MAX, MSE, RADIUS, SPAN

# The same functions, compiled for Gluon: as Gluon does with Triton's standard library.
to_bits, from_bits, bfloat16_bits, float8 = (
    gluon.jit(function.fn) for function in (encode._to_bits, encode._from_bits, encode._bfloat16, encode._float8)
)
STEEP = gl.constexpr(2.0**40)  # numbers that differ, and are no smaller than 2^-16, differ by 1 at least times this
LARGE = gl.constexpr(2.0**20)
SMALL_BITS = gl.constexpr(2 * ((127 - 100) << 23))  # 2^-100 as float32, its bits doubled
COUNTER = gl.constexpr(2.0**23)  # from here the lowest bits of a float32 count
RUN = gl.constexpr(8)  # neighbouring coordinates that a lane loads
# $4, and $5 more where $1 > -$3 / $2; NaN is not greater.
STEP = gl.constexpr("{ .reg .f32 above; fma.rn.sat.f32 above, $1, $2, $3; fma.rn.f32 $0, above, $5, $4; }")
# $4 where $1 > $2, else $3.  As one piece: the compiler would hold more results of comparisons than it has places.
SELECT = gl.constexpr("{ .reg .pred above; setp.gt.f32 above, $1, $2; selp.f32 $0, $4, $3, above; }")


# ---- numbers ---------------------------------------------------------------------------------------------------
@gluon.jit
def constant(like, value):
    """A float32 number beside every element of `like`."""
    return gl.full(like.shape, 0.0, gl.float32, layout=like.type.layout) + value


@gluon.jit
def per_row(x, rows):
    """[T] -> [T, 1] in the layout of `rows`."""
    return gl.convert_layout(x, gl.SliceLayout(1, rows.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def halves(x):
    """[T, N] -> its lower and upper half [T, N / 2]; only registers are renamed."""
    T: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([T, 2, N // 2]).permute([0, 2, 1]))


@gluon.jit
def tree_sum(x, LANES: gl.constexpr):
    """float32 [T, N] -> [T], folded half on half; the last folds, of a row's LANES numbers, are between lanes."""
    T: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if N > LANES:
        low, high = halves(x)
        return gl.convert_layout(tree_sum(low + high, LANES), layout, assert_trivial=True)
    elif N > 2:
        folded = tree_sum(gl.sum(x.reshape([T, 2, N // 2]), 1), LANES // 2)
        return gl.convert_layout(folded, layout, assert_trivial=True)
    else:
        return gl.sum(x, 1)


@gluon.jit
def butterfly(x, WIDTH: gl.constexpr):
    """A level of the Walsh-Hadamard transform of float32 [T, D]; the bit of WIDTH lies in registers."""
    T: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    low, high = gl.split(x.reshape([T, D // (2 * WIDTH), 2, WIDTH]).permute([0, 1, 3, 2]))
    x = gl.join(low + high, low - high).permute([0, 1, 3, 2]).reshape([T, D])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def hadamard(x, matrix, layout: gl.constexpr):
    """Rows as loaded -> rotated rows in `layout`; the matrix' first row is the signs."""
    D: gl.constexpr = x.shape[1]
    first = gl.load(matrix + gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout)))
    x = x * gl.where(first > 0, 1.0, -1.0)[None, :]
    x = butterfly(butterfly(butterfly(x, 1), 2), 4)
    x = butterfly(butterfly(butterfly(gl.convert_layout(x, layout), 8), 16), 32)
    if D > 64:
        x = butterfly(x, 64)
    if D > 128:
        x = butterfly(x, 128)
    return x * D**-0.5


# ---- quantisers ------------------------------------------------------------------------------------------------
@gluon.jit
def ratio(rows, divisor, EXTREME: gl.constexpr):
    """Rows divided by float32 [T], rounded to nearest."""
    wide = per_row(divisor, rows)
    if EXTREME:
        return gl.div_rn(rows, gl.full(rows.shape, 0.0, gl.float32, layout=rows.type.layout) + wide)
    else:
        inverse = per_row(gl.div_rn(constant(divisor, 1.0), divisor), rows)
        inverse = gl.full(rows.shape, 0.0, gl.float32, layout=rows.type.layout) + inverse
        wide = gl.full(rows.shape, 0.0, gl.float32, layout=rows.type.layout) + wide
        guess = rows * inverse
        return gl.fma(gl.fma(-guess, wide, rows), inverse, guess)


@gluon.jit
def normalise(rows, peak, LANES: gl.constexpr, EXTREME: gl.constexpr):
    """Euclidean norms [T] and rows of norm sqrt(D)."""
    D: gl.constexpr = rows.shape[1]
    scaled = ratio(rows, gl.where(peak > 0, peak, 1.0), EXTREME)
    norm = gl.sqrt_rn(tree_sum(scaled * scaled, LANES)) * peak
    return norm, ratio(rows, gl.where(norm > 0, norm, 1.0), EXTREME) * D**0.5


@gluon.jit
def is_extreme(rows, peak):
    """Whether a quotient or a remainder of `ratio` could leave the normal numbers."""
    bits = to_bits(rows).to(gl.uint32, bitcast=True)
    least = gl.min(gl.min(bits + bits - 1, 1), 0)  # zeros wrap around to the largest number
    return (least < SMALL_BITS - 1) | (gl.max(peak, 0) > LARGE)


@gluon.jit
def load_step(thresholds, centroids, i: gl.constexpr, BITS: gl.constexpr):
    """What `climb` needs at the positive threshold i: its negated multiple, the difference of the centroids beside it.

    The centroids from the second positive one are less than a factor 2 apart, so their differences are exact.
    """
    half: gl.constexpr = 1 << (BITS - 1)
    rise = gl.load(centroids + half + i) - gl.load(centroids + half + i - 1)
    return gl.load(thresholds + half - 1 + i) * -STEEP, rise


@gluon.jit
def load_steps(thresholds, centroids, BITS: gl.constexpr):
    """The first positive threshold, the centroids beside it, then `load_step` of the other positive thresholds."""
    half: gl.constexpr = 1 << (BITS - 1)
    first, low, high = gl.load(thresholds + half), gl.load(centroids + half), gl.load(centroids + half + 1)
    if BITS == 2:
        return first, low, high
    else:
        t2, r2 = load_step(thresholds, centroids, 2, BITS)
        t3, r3 = load_step(thresholds, centroids, 3, BITS)
        if BITS == 3:
            return first, low, high, t2, r2, t3, r3
        else:
            t4, r4 = load_step(thresholds, centroids, 4, BITS)
            t5, r5 = load_step(thresholds, centroids, 5, BITS)
            t6, r6 = load_step(thresholds, centroids, 6, BITS)
            t7, r7 = load_step(thresholds, centroids, 7, BITS)
            return first, low, high, t2, r2, t3, r3, t4, r4, t5, r5, t6, r6, t7, r7


@gluon.jit
def magnitude(unit, scale):
    """|unit * scale|, one unit in the last place more for negative numbers.

    Codebooks are symmetric around a threshold at 0.  Positive numbers count the thresholds strictly below them, the
    others those at or below their magnitude: the next float turns the second count into the first.
    """
    sign = (to_bits(unit).to(gl.uint32, bitcast=True) >> 31).to(gl.int32, bitcast=True)
    return from_bits(to_bits(gl.abs(unit) * scale) + sign)


@gluon.jit
def climb(total, size, limit, rise):
    """float32 `total`, and `rise` more where size > -limit / STEEP."""
    return gl.inline_asm_elementwise(
        STEP, "=f,f,f,f,f,f", [size, constant(size, STEEP), constant(size, limit), total, constant(size, rise)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def trial(unit, scale, steps, BITS: gl.constexpr, LANES: gl.constexpr):
    """|codeword|^2 and <unit, codeword> [T] of a pre-scale; a coordinate and its centroid have the same sign."""
    size = magnitude(unit, scale)
    word = gl.inline_asm_elementwise(
        SELECT, "=f,f,f,f,f", [size, constant(size, steps[0]), constant(size, steps[1]), constant(size, steps[2])],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    for i in gl.static_range(2, 1 << (BITS - 1)):
        word = climb(word, size, steps[2 * i - 1], steps[2 * i])
    return tree_sum(word * word, LANES), tree_sum(gl.abs(unit) * word, LANES)


@gluon.jit
def nearest(unit, scale, steps, BITS: gl.constexpr):
    """Numbers of the nearest centroids int32 [T, D]."""
    half: gl.constexpr = 1 << (BITS - 1)
    size = magnitude(unit, scale)
    count = climb(constant(size, COUNTER + half), size, steps[0] * -STEEP, 1.0)
    for i in gl.static_range(2, half):
        count = climb(count, size, steps[2 * i - 1], 1.0)
    code = to_bits(count)
    return gl.where(unit > 0, code, ~code) & (2 * half - 1)


@gluon.jit
def encode_mse(rows, thresholds, centroids, BITS: gl.constexpr, CANDIDATES: gl.constexpr, LANES: gl.constexpr):
    """`TurboQuantMSE.encode`, norm corrected: codes int32 [T, D] and the bits of the scale [T]."""
    peak = gl.max(gl.abs(rows), 1)
    if is_extreme(rows, peak):
        norm, unit = normalise(rows, peak, LANES, True)
    else:
        norm, unit = normalise(rows, peak, LANES, False)
    steps = load_steps(thresholds, centroids, BITS)
    if CANDIDATES == 1:
        energy, dot = trial(unit, 1.0, steps, BITS, LANES)
        best_scale = 1.0
    else:
        half: gl.constexpr = CANDIDATES // 2
        best = constant(norm, -float("inf"))
        scale, energy = constant(norm, 1.0), constant(norm, 0.0)
        for i in range(CANDIDATES):
            new_scale = 1.0
            for j in gl.static_range(CANDIDATES):
                new_scale = gl.where(i == j, 1.0 + RADIUS * (j - half) / half, new_scale)
            new_energy, dot = trial(unit, new_scale, steps, BITS, LANES)
            cosine = gl.div_rn(dot, gl.sqrt_rn(new_energy))
            better = cosine > best
            best = gl.where(better, cosine, best)
            scale = gl.where(better, new_scale, scale)
            energy = gl.where(better, new_energy, energy)
        best_scale = per_row(scale, unit)
    norm = bfloat16_bits(gl.div_rn(norm, gl.sqrt_rn(energy)))
    return nearest(unit, best_scale, steps, BITS), norm


@gluon.jit
def encode_fp8(rows):
    """`FP8Quantizer.encode`: codes int32 [T, D] and the bits of the scale [T]."""
    peak = gl.max(gl.abs(rows), 1)
    scale = bfloat16_bits(gl.div_rn(peak, constant(peak, FP8_MAX)))
    wide = from_bits(scale << 16)
    scaled = ratio(rows, gl.where(wide > 0, wide, 1.0), True)
    return float8(gl.minimum(gl.maximum(scaled, -FP8_MAX), FP8_MAX)), scale


# ---- memory ----------------------------------------------------------------------------------------------------
@gluon.jit
def pack(codes, SHIFT: gl.constexpr, WIDTH: gl.constexpr):
    """Codes int32 [T, D] below 2^WIDTH -> bytes [T, n]: byte j holds the coordinates j, j + n, j + 2n, ..."""
    if SHIFT >= WIDTH:
        low, high = halves(codes)
        return pack(low | (high << SHIFT), SHIFT // 2, WIDTH)
    else:
        return codes


@gluon.jit
def store_plane(plane, row, local, valid, codes, WIDTH: gl.constexpr, DIMENSION_MAJOR: gl.constexpr, BS: gl.constexpr,
                LANES: gl.constexpr):  # fmt: skip
    """Pack codes int32 [T, D] below 2^WIDTH and store them in the planes that start at plane + row [T]."""
    packed = pack(codes, 4, WIDTH).to(gl.uint8)
    n: gl.constexpr = packed.shape[1]
    if not DIMENSION_MAJOR and WIDTH < 8:
        packed = gl.convert_layout(packed, gl.BlockedLayout([1, n // LANES], [32 // LANES, LANES], [1, 1], [1, 0]))
    byte = gl.arange(0, n, layout=gl.SliceLayout(0, packed.type.layout))
    if DIMENSION_MAJOR:
        target = plane + per_row(row + local, packed) + byte[None, :] * BS
    else:
        target = plane + per_row(row + local * n, packed) + byte[None, :]
    gl.store(target, packed, mask=per_row(valid, packed))


@gluon.jit
def encode_side(x, pages, base, local, valid, matrix, thresholds, centroids, SIDE: gl.constexpr,
                DIMENSION_MAJOR: gl.constexpr, BS: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Rows float32 [T, D] as loaded -> their bytes in the pages; SIDE is `encode.side_constants`."""
    KIND: gl.constexpr = SIDE[0]
    BITS: gl.constexpr = SIDE[1]
    CANDIDATES: gl.constexpr = SIDE[3]
    SCALARS: gl.constexpr = SIDE[7]
    FIRST: gl.constexpr = SIDE[8]
    SECOND: gl.constexpr = SIDE[9]
    if KIND == MSE:
        x = hadamard(x, matrix, gl.BlockedLayout([1, 1], [32 // LANES, LANES], [1, 1], [1, 0]))
        codes, scale = encode_mse(x, thresholds, centroids, BITS, CANDIDATES, LANES)
    else:
        codes, scale = encode_fp8(x)
    target = pages.to(gl.pointer_type(gl.int16)) + (base + SCALARS) // 2 + local
    scale = gl.convert_layout(scale.to(gl.int16), base.type.layout, assert_trivial=True)
    gl.store(target, scale, mask=valid)
    if BITS == 3:
        store_plane(pages + FIRST, base, local, valid, codes & 3, 2, DIMENSION_MAJOR, BS, LANES)
        store_plane(pages + SECOND, base, local, valid, codes >> 2, 1, DIMENSION_MAJOR, BS, LANES)
    else:
        store_plane(pages + FIRST, base, local, valid, codes, BITS, DIMENSION_MAJOR, BS, LANES)


@gluon.jit
def copy_to_ring(source, ring, line, slots, entry_of_part, token, inside, head, layout: gl.constexpr, H: gl.constexpr,
                 D: gl.constexpr, ES: gl.constexpr):  # fmt: skip
    """Copy the rows whose part of a block has a place in the ring; returns places int64 [T] and which rows have one."""
    slot = gl.load(slots + token, mask=inside, other=-1)
    entry = gl.load(entry_of_part + slot // ES, mask=slot >= 0, other=-1)
    place = entry * ES + slot % ES
    kept = entry >= 0
    coordinate = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    x = gl.load(source + line[:, None] + coordinate[None, :], mask=kept[:, None], other=0.0)
    target = ring + ((place * H + head) * D)[:, None] + coordinate[None, :]
    if x.dtype == ring.dtype.element_ty:
        gl.store(target, x, mask=kept[:, None])
    elif ring.dtype.element_ty == gl.bfloat16:
        bits = bfloat16_bits(x.to(gl.float32)).to(gl.int16)
        gl.store(target, bits.to(gl.bfloat16, bitcast=True), mask=kept[:, None])
    else:
        gl.store(target, x.to(gl.float32).to(ring.dtype.element_ty), mask=kept[:, None])
    return place, kept


@gluon.jit(do_not_specialize=["count", "spans"])
def encode_kernel(
    keys, values, slots, pages, entry_of_part, written, recent_keys, recent_values, number, wide, center, gain,
    key_matrix, key_thresholds, key_centroids, value_matrix, value_thresholds, value_centroids, count, spans,
    key_stride, key_head_stride, value_stride, value_head_stride, page_stride, page_head_stride,
    KEY: gl.constexpr, VALUE: gl.constexpr, RING: gl.constexpr, H: gl.constexpr, D: gl.constexpr, BS: gl.constexpr,
    ES: gl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, head, side)."""
    LANES: gl.constexpr = D // 32
    T: gl.constexpr = 32 // LANES
    layout: gl.constexpr = gl.BlockedLayout([1, RUN], [T, LANES], [1, 1], [1, 0])
    head = gl.program_id(1)
    token = gl.program_id(0) * T + gl.arange(0, T, layout=gl.SliceLayout(1, layout))
    coordinate = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    inside = token < count
    slot = gl.load(slots + token, mask=inside, other=-1)
    valid = slot >= 0
    slot = gl.where(valid, slot, 0)
    base = slot // BS * page_stride + head * page_head_stride
    local = (slot % BS).to(gl.int32)
    if gl.program_id(2) == 0:
        line = token.to(gl.int64) * key_stride + head * key_head_stride
        x = gl.load(keys + line[:, None] + coordinate[None, :], mask=inside[:, None], other=0.0).to(gl.float32)
        block = gl.load(number + slot // BS, mask=inside, other=0)
        span = gl.minimum((block * BS + local) // SPAN, spans - 1) * (2 * D)
        row = wide + span[:, None] + coordinate[None, :]
        shift = gl.load(center + head * D + coordinate)
        quarter = gl.load(center + (H + head) * D + coordinate)
        scale = gl.load(gain + head * D + coordinate)
        shift = gl.load(row).to(gl.float32) * shift[None, :] + gl.load(row + D).to(gl.float32) * quarter[None, :]
        x = (x - shift) * scale[None, :]
        encode_side(x, pages, base, local, valid, key_matrix, key_thresholds, key_centroids, KEY, False, BS, LANES)
        if RING:
            place, kept = copy_to_ring(
                keys, recent_keys, line, slots, entry_of_part, token, inside, head, layout, H, D, ES
            )
            if head == 0:
                gl.store(written + place, 1, mask=kept)
    else:
        line = token.to(gl.int64) * value_stride + head * value_head_stride
        x = gl.load(values + line[:, None] + coordinate[None, :], mask=inside[:, None], other=0.0).to(gl.float32)
        encode_side(
            x, pages, base, local, valid, value_matrix, value_thresholds, value_centroids, VALUE, True, BS, LANES
        )
        if RING:
            copy_to_ring(values, recent_values, line, slots, entry_of_part, token, inside, head, layout, H, D, ES)
