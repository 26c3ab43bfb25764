"""Device code around the fast decode: queries into the keys' basis before, merged rows out of the values' basis after.

Both are products of 16 rows with a small matrix, and are short: what counts is that loads do not wait for one another,
and that little goes through shared memory.  Matrices come as one or two 16-bit parts [.., n, k], row n holding the
k factors of output n (`turboquant.kernels.matrix.SplitMatrix`), and go straight into the tensor cores' registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turboquant.codebook import GRID_CENTER

ROWS = gl.constexpr(16)
QUERY_LEVELS = gl.constexpr(32512.0)  # 127 * 256: the high byte of a 16-bit query stays an int8
TWICE_CENTER = gl.constexpr(int(2 * GRID_CENTER))


@gluon.jit
def matrix_operand(matrix, D: gl.constexpr, layout: gl.constexpr):
    """A matrix [n, k] of size D as the second operand [k, n]."""
    k = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    return gl.load(matrix + n[None, :] * D + k[:, None])


@gluon.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    RAW, MATRIX, CENTER, AXES, WEIGHTS, QUERY, FACTOR, OFFSET, WAVES, tokens, raw_stride, scale, matrix_scale,
    key_step, heads, G: gl.constexpr, D: gl.constexpr, FLOAT: gl.constexpr, EXACT: gl.constexpr, TURNS: gl.constexpr,
    PDL: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """ROWS query rows of one KV head.

    RAW [T, heads * G, D]; MATRIX [2, heads, D, D] in RAW's dtype, rows in key order; CENTER float32 [heads, D];
    QUERY [T, heads, G, 2, D], int8 high and low bytes or float16 number and rest; FACTOR float32 [T, heads, G, 2],
    factor of a score and its shift; OFFSET int32 [T, heads, G], what the grid's centre takes from the low scores.
    Where centres turn, WAVES float16 [T, heads, G, 2, D], number and rest, are `KVCodec.waves` in units of their
    largest, which FACTOR has instead of the shift; AXES int32 [2, D], WEIGHTS float32 [2, heads, D] (`turning_terms`).
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    head = gl.program_id(1)
    matrix = MATRIX + head * D * D
    operand = matrix_operand(matrix, D, b_layout)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: the next kernel reads pages that were written before this one
    a_row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, a_layout))
    a_dim = gl.arange(0, D, layout=gl.SliceLayout(0, a_layout))
    source = (a_row // G).to(gl.int64) * raw_stride + (head * G + a_row % G) * D
    x = gl.load(RAW + source[:, None] + a_dim[None, :], mask=(a_row < tokens * G)[:, None], other=0.0)
    y = mma_v2(x, operand, gl.full([ROWS, D], 0.0, gl.float32, layout=mma))
    if not EXACT:
        y = mma_v2(x, matrix_operand(matrix + heads * D * D, D, b_layout), y)
    y = y * matrix_scale
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, mma))
    real = row < tokens * G
    line = (row // G * heads + head) * G + row % G
    target = QUERY + (line.to(gl.int64) * 2 * D)[:, None] + dim[None, :]
    peak = gl.maximum(gl.max(gl.abs(y), 1), 1e-30)
    if FLOAT:
        unit = y * (1.0 / peak)[:, None]
        high = unit.to(gl.float16)
        low = (unit - high.to(gl.float32)).to(gl.float16)
        factor = peak * scale
    else:
        level = gl.floor(y * (QUERY_LEVELS / peak)[:, None] + 0.5).to(gl.int32)
        top = (level + 128) >> 8
        low = (level - top * 256).to(gl.int8)
        high = top.to(gl.int8)
        factor = peak / QUERY_LEVELS * scale * key_step
        gl.store(OFFSET + line, -((gl.sum(level, 1) * TWICE_CENTER) >> 1), mask=real)
    gl.store(target, high, mask=real[:, None])
    gl.store(target + D, low, mask=real[:, None])
    gl.store(FACTOR + line * 2, factor, mask=real)
    if TURNS:
        source = RAW + (row // G).to(gl.int64) * raw_stride + (head * G + row % G) * D
        waves = gl.full([ROWS, D], 0.0, gl.float32, layout=mma)
        for side in gl.static_range(2):
            axis = gl.load(AXES + side * D + dim)
            weight = gl.load(WEIGHTS + (side * heads + head) * D + dim)
            x_axis = gl.load(source[:, None] + axis[None, :], mask=real[:, None], other=0.0)
            waves += x_axis.to(gl.float32) * weight[None, :]
        peak = gl.maximum(gl.max(gl.abs(waves), 1), 1e-30)
        unit = waves * (1.0 / peak)[:, None]
        high = unit.to(gl.float16)
        target = WAVES + (line.to(gl.int64) * 2 * D)[:, None] + dim[None, :]
        gl.store(target, high, mask=real[:, None])
        gl.store(target + D, (unit - high.to(gl.float32)).to(gl.float16), mask=real[:, None])
        shift = peak * scale
    else:
        center = gl.load(CENTER + head * D + a_dim)
        shift = gl.convert_layout(gl.sum(x.to(gl.float32) * center[None, :], 1), gl.SliceLayout(1, mma)) * scale
    gl.store(FACTOR + line * 2 + 1, shift, mask=real)


@gluon.jit
def weighted_sum(
    OUT, LSE, start, stop, first, lane, tile, group, real, peak, dim, D: gl.constexpr, GROUPS: gl.constexpr,
    UNROLL: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sum over segments group, group + GROUPS, ... of [start, stop): weights [rows] and weighted rows [rows, D].

    UNROLL segments are on their way at once: rows are loaded before their weights are known, and those of weight 0
    (memory that may never have been written) are blanked afterwards.
    """
    rows: gl.constexpr = peak.shape[0]
    mass = gl.full([rows], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.full([rows, D], 0.0, gl.float32, layout=layout)
    for segment in range(start, stop, UNROLL * GROUPS):
        for step in gl.static_range(UNROLL):
            place = segment + step * GROUPS + group
            used = real & (place < stop)
            line = (first + place) * tile + lane
            part = gl.load(OUT + line[:, None] * D + dim[None, :], mask=used[:, None], other=0.0)
            weight = gl.exp2(gl.load(LSE + line, mask=used, other=float("-inf")) - peak)
            mass += weight
            total += weight[:, None] * gl.where((weight > 0)[:, None], part, 0.0)
    return mass, total


@gluon.jit(do_not_specialize=["pairs", "row_tiles", "tile_bits", "pieces", "segments"])
def merge_kernel(
    OUT, LSE, MATRIX, REQUESTS, OUTPUT, pairs, output_stride, matrix_scale, heads, row_tiles, tile_bits, pieces,
    segments, G: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr,
    EXACT: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr, UNROLL: gl.constexpr, LSE_STEPS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """ROWS / GROUPS query rows of one KV head; group g of a row adds up the row's segments g, g + GROUPS, ...

    OUT float32 [requests, heads, row_tiles, segments, R, D], LSE [.., R] (base 2), R = 2^tile_bits: first `pieces`
    exact segments; then splits of the history, in the values' basis and order.  MATRIX bfloat16 [2, D, D] leads back.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    read: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [WARPS, 1], [1, 0])  # a warp reads whole rows
    head = gl.program_id(1)
    operand = matrix_operand(MATRIX, D, b_layout)
    index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, read))
    row = gl.program_id(0) * (ROWS // GROUPS) + index // GROUPS
    tile = 1 << tile_bits
    real = row < pairs * row_tiles * tile
    row = gl.minimum(row, pairs * row_tiles * tile - 1)
    row_tile = row >> tile_bits
    first = ((row_tile // row_tiles).to(gl.int64) * heads + head) * row_tiles + row_tile % row_tiles
    first = first * segments
    lane = row & (tile - 1)
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, read))
    if PDL:
        gdc_wait()

    lse = gl.full([ROWS, D], float("-inf"), gl.float32, layout=read)
    for step in gl.static_range(LSE_STEPS):
        place = step * D + dim
        line = (first[:, None] + place[None, :]) * tile + lane[:, None]
        used = real[:, None] & (place < segments)[None, :]
        lse = gl.maximum(lse, gl.load(LSE + line, mask=used, other=float("-inf")))
    peak = gl.max(lse, 1)
    peak = gl.where(peak == float("-inf"), 0.0, peak)
    group = index % GROUPS
    mass, rotated = weighted_sum(
        OUT, LSE, pieces, segments, first, lane, tile, group, real, peak, dim, D, GROUPS, UNROLL, read
    )  # fmt: skip
    exact_mass, plain = weighted_sum(
        OUT, LSE, 0, pieces, first, lane, tile, group, real, peak, dim, D, GROUPS, 1, read
    )  # fmt: skip
    high = rotated.to(gl.bfloat16)
    low = gl.convert_layout((rotated - high.to(gl.float32)).to(gl.bfloat16), a_layout)
    high = gl.convert_layout(high, a_layout)
    result = mma_v2(low, operand, gl.full([ROWS, D], 0.0, gl.float32, layout=mma))
    result = mma_v2(high, operand, result)
    if not EXACT:
        result = mma_v2(high, matrix_operand(MATRIX + D * D, D, b_layout), result)
    result = result * matrix_scale + gl.convert_layout(plain, mma)
    total = gl.convert_layout(mass + exact_mass, gl.SliceLayout(1, mma))
    total = gl.sum(total.reshape([ROWS // GROUPS, GROUPS]), 1)
    result = gl.sum(result.reshape([ROWS // GROUPS, GROUPS, D]), 1)
    store_output(REQUESTS, OUTPUT, result, total, pairs, output_stride, head, row_tiles * tile, G, D)


@gluon.jit
def store_output(
    REQUESTS, OUTPUT, result, total, pairs, output_stride, head, per_request, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store result [rows, D] / total [rows] where one of the `per_request` rows is a query row of the batch."""
    layout: gl.constexpr = result.type.layout
    rows: gl.constexpr = result.shape[0]
    total = gl.convert_layout(total, gl.SliceLayout(1, layout))
    result = result * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
    row = gl.program_id(0) * rows + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    real = row < pairs * per_request
    entry = REQUESTS + row // per_request * 4
    row = row % per_request
    token = gl.load(entry + 1, mask=real, other=0) + row // G
    real = real & (row // G < gl.load(entry + 2, mask=real, other=0))
    target = token.to(gl.int64) * output_stride + (head * G + row % G) * D
    gl.store(OUTPUT + target[:, None] + dim[None, :], result.to(OUTPUT.dtype.element_ty), mask=real[:, None])
