"""Device code of the fast decode: one warp is one program, and nothing is exchanged through memory but its own pages.

Tokens are the 16 rows of the first tensor-core operand, query rows its 8 (16, 32) columns.  Pages come by asynchronous
copies, one tile ahead, and are decoded on the way from shared memory to the operand (`turboquant.kernels.decoders`).
Queries are 16-bit integers in two int8 columns, high and low byte.  The weights are transposed in place (`movmatrix`).
The running maximum is kept until a score exceeds it by 2^8, so the accumulators are rarely rescaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turboquant.codebook import GRID_CENTER
from turboquant.kernels import decoders
from turboquant.kernels.tiles import key_layout, value_layout
from turboquant.rotary import SPAN

K2, K3, K4, V2, V3, V4 = (
    gl.constexpr(decode(bits)) for decode in (decoders.key_decoder, decoders.value_decoder) for bits in (2, 3, 4)
)
FP8 = gl.constexpr(decoders.FP8_DECODER)
TRANSPOSE = gl.constexpr(decoders.TRANSPOSE)
STAGES = gl.constexpr(2)
# The name up to Triton 3.8, and from 3.7.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
SharedMemory = gl.shared_memory_descriptor
reinterpret = getattr(SharedMemory, "reinterpret", None) or SharedMemory._reinterpret  # from Triton 3.8, and before
LAZY = gl.constexpr(8.0)  # log2 of how far a score may exceed the maximum in use
LOWEST = gl.constexpr(-1e30)
VALUE_OFFSET = gl.constexpr(128 + GRID_CENTER)
# Tiles after which the values' offset is taken out of the sums: tensor cores truncate, and where values cancel, what
# they lose of the offset would outweigh the result.
STRETCH = gl.constexpr(32)
SPAN_TOKENS = gl.constexpr(SPAN)
SPANS = gl.constexpr(32)  # of a stretch: a tile lies within a span
WAVE_STEP = gl.constexpr(32)  # coordinates of a step of their product: few registers
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def stack(x, y, axis: gl.constexpr):
    """Two [m, n] tensors, one behind the other along `axis`; only registers are renamed."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    if axis == 0:
        return gl.join(x, y).permute([2, 0, 1]).reshape([2 * m, n])
    else:
        return gl.join(x, y).permute([0, 2, 1]).reshape([m, 2 * n])


@gluon.jit
def constant(words, value):
    """A number of the lookup tables beside every code byte of `words`."""
    return gl.full(words.shape, 0, gl.int32, layout=words.type.layout) + value


@gluon.jit
def decode_part(words, asm: gl.constexpr, tables, dtype: gl.constexpr, axis: gl.constexpr, BITS: gl.constexpr):
    """Code words (a tuple, finest plane first) -> all parts, one behind the other along `axis`."""
    w = words[0]
    t0, t1 = constant(w, tables[0]), constant(w, tables[1])
    t2, t3 = constant(w, tables[2]), constant(w, tables[3])
    high = constant(w, tables[4])
    if BITS == 4:
        p0, p1 = gl.inline_asm_elementwise(
            asm[0], asm[1], [w, t0, t1, t2, t3, high], dtype=(dtype.value,) * 2, is_pure=True, pack=4
        )
        return stack(p0, p1, axis)
    elif BITS == 2:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            asm[0], asm[1], [w, t0, high], dtype=(dtype.value,) * 4, is_pure=True, pack=4
        )
        return stack(stack(p0, p1, axis), stack(p2, p3, axis), axis)
    else:
        p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
            asm[0], asm[1], [w, words[1], words[2], t0, t1, high], dtype=(dtype.value,) * 8, is_pure=True, pack=4
        )
        first = stack(stack(p0, p1, axis), stack(p2, p3, axis), axis)
        return stack(first, stack(stack(p4, p5, axis), stack(p6, p7, axis), axis), axis)


@gluon.jit
def load_words(buffer, layout: gl.constexpr, axis: gl.constexpr, fine, BITS: gl.constexpr, ROWS: gl.constexpr):
    """Code words of a tile: of the only plane, or (1-bit plane, first and second half of the 2-bit plane)."""
    if BITS == 3:
        return (
            fine.load(layout),
            buffer.slice(0, ROWS, dim=axis).load(layout),
            buffer.slice(ROWS, ROWS, dim=axis).load(layout),
        )
    else:
        return (buffer.load(layout),)


@gluon.jit
def key_operand(words, tables, T: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr, RUN: gl.constexpr):
    """Key words -> the first operand [T, D] of the score product; rows in tile order."""
    if BITS == 8:
        keys = gl.inline_asm_elementwise(FP8[0], FP8[1], [words[0]], dtype=gl.float16, is_pure=True, pack=4)
    elif BITS == 4:
        keys = decode_part(words, K4, tables, gl.int8, 1, BITS)
    elif BITS == 3:
        keys = decode_part(words, K3, tables, gl.int8, 1, BITS)
    else:
        keys = decode_part(words, K2, tables, gl.int8, 1, BITS)
    keys = keys.reshape([4, T // 8, 2, D]).permute([1, 0, 2, 3]).reshape([T, D])
    return gl.convert_layout(keys, gl.DotOperandLayout(0, MMA, RUN), assert_trivial=True)


@gluon.jit
def value_operand(words, tables, T: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Value words -> the first operand bfloat16 [D, T] of the output product; columns in tile order."""
    if BITS == 4:
        values = decode_part(words, V4, tables, gl.bfloat16, 0, BITS)
    elif BITS == 3:
        values = decode_part(words, V3, tables, gl.bfloat16, 0, BITS)
    else:
        values = decode_part(words, V2, tables, gl.bfloat16, 0, BITS)
    values = values.reshape([D, 4, T // 8, 2]).permute([0, 2, 1, 3]).reshape([D, T])
    return gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def weight_operand(weights, T: gl.constexpr, N: gl.constexpr):
    """16-bit weights [T, N] as an accumulator holds them -> the second operand of the output product."""
    w = gl.inline_asm_elementwise(
        TRANSPOSE[0], TRANSPOSE[1], [weights], dtype=weights.dtype, is_pure=True, pack=2
    )  # every 8 x 8 block is transposed in place
    w = w.reshape([T // 8, 8, N // 8, 8]).permute([0, 3, 2, 1]).reshape([T, N])
    return gl.convert_layout(w, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def tile_order(T: gl.constexpr, layout: gl.constexpr):
    """Token of each tile row: int32 [T]."""
    row = gl.arange(0, T, layout=layout)
    return ((row % 8) // 2) * (T // 4) + (row // 8) * 2 + row % 2


@gluon.jit
def pair_scores(raw, T: gl.constexpr, R: gl.constexpr):
    """Scores against high and low query halves [T, 2R] -> (high, low), each [T, R] in the order of query rows."""
    if R == 4:
        return gl.split(raw.reshape([T, 4, 2]))
    else:
        high, low = gl.split(raw.reshape([T, R // 8, 2, 4, 2]))
        high = gl.convert_layout(high.permute([0, 1, 3, 2]).reshape([T, R]), MMA, assert_trivial=True)
        low = gl.convert_layout(low.permute([0, 1, 3, 2]).reshape([T, R]), MMA, assert_trivial=True)
        return high, low


@gluon.jit
def query_row(column, R: gl.constexpr):
    """Query row whose half the score column holds."""
    pair = column // 2
    if R == 4:
        return pair
    else:
        return pair // 8 * 8 + pair % 4 * 2 + pair % 8 // 4


@gluon.jit
def per_column(x, R: gl.constexpr):
    """float32 [R] of the score rows -> the columns of an output accumulator."""
    if R == 4:
        return gl.convert_layout(gl.join(x, x).reshape([8]), gl.SliceLayout(0, MMA), assert_trivial=True)
    else:
        return x


@gluon.jit
def copy_plane(smem, source, STRIDE: gl.constexpr):
    """Start copying [rows, columns] bytes, rows STRIDE bytes apart."""
    rows: gl.constexpr = smem.shape[0]
    cols: gl.constexpr = smem.shape[1]
    run: gl.constexpr = cols // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // run, run], [1, 1], [1, 0])
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, cols, layout=gl.SliceLayout(0, layout))
    copy_async(smem, source + (row[:, None] * STRIDE + col[None, :]))


@gluon.jit
def copy_line(smem, plane, offset):
    """Start copying bfloat16 [T] of a scalar plane."""
    size: gl.constexpr = smem.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    scalars = plane.to(gl.pointer_type(gl.bfloat16))
    copy_async(smem, scalars + offset + gl.arange(0, size, layout=layout))


@gluon.jit
def copy_tile(
    page, local, keys, fine_keys, values, fine_values, key_scales, value_scales,
    BS: gl.constexpr, KBITS: gl.constexpr, VBITS: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, V0: gl.constexpr,
    V1: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
):  # fmt: skip
    """Start copying the tile of a page whose first token is `local`, as one group."""
    copy_plane(keys, page + K0 + local * keys.shape[1], keys.shape[1])
    copy_plane(values, page + V0 + local, BS)
    if KBITS == 3:
        copy_plane(fine_keys, page + K1 + local * fine_keys.shape[1], fine_keys.shape[1])
    if VBITS == 3:
        copy_plane(fine_values, page + V1 + local, BS)
    copy_line(key_scales, page + KS, local)
    copy_line(value_scales, page + VS, local)
    async_copy.commit_group()


@gluon.jit
def load_scales(smem, T: gl.constexpr, layout: gl.constexpr):
    """bfloat16 [T] in token order -> float32 [T] in tile order."""
    order: gl.constexpr = gl.DistributedLinearLayout(
        [[2]] if T == 16 else [[2], [4]], [[0], [0], [1], [T // 4], [T // 2]], [], [], [T]
    )
    scales = smem.load(order).reshape([4, T // 8, 2]).permute([1, 0, 2]).reshape([T])
    return gl.convert_layout(scales, layout, assert_trivial=True).to(gl.float32)


@gluon.jit
def load_tables(table):
    """Five words of lookup tables in ordinary registers.

    Each word lies twice in memory and goes through a shuffle: from a plain load the compiler knows that all lanes hold
    the same, keeps it in a uniform register, and copies it before every permute.
    """
    two = gl.arange(0, 2, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return (
        gl.max(gl.load(table + two), 0),
        gl.max(gl.load(table + 2 + two), 0),
        gl.max(gl.load(table + 4 + two), 0),
        gl.max(gl.load(table + 6 + two), 0),
        gl.max(gl.load(table + 8 + two), 0),
    )


@gluon.jit
def capped(x, softcap, SOFTCAP: gl.constexpr):
    """With a softcap, scores come in units of the cap; the result is in units of log 2.  softcap: cap / log 2."""
    if SOFTCAP:
        return softcap * (1.0 - 2.0 / (1.0 + gl.exp(2.0 * x)))
    else:
        return x


@gluon.jit
def store_empty(LSE, place, R: gl.constexpr):
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, R, layout=line)
    gl.store(LSE + place * R + row, gl.full([R], float("-inf"), gl.float32, layout=line))


@gluon.jit
def exceeds(x, m, T: gl.constexpr, C: gl.constexpr):
    """Whether any score [T, C] is too far above the maximum [C] in use; one vote, no exchange of scores."""
    high = gl.max(x.reshape([T // 8, 8, C]), 0)
    limit = gl.convert_layout(m, gl.SliceLayout(0, high.type.layout), assert_trivial=True) + LAZY
    return gl.max((high > limit[None, :]).to(gl.int32).reshape([8 * C]), 0) > 0


@gluon.jit
def mask_edge(x, vs, token, length, PRESENT, rows, sliding, COLUMNS: gl.constexpr, SINKS: gl.constexpr,
              SLIDING: gl.constexpr):  # fmt: skip
    """Scores and value scales of tokens that are not to be read here: past the end, held exactly, out of the window.

    rows [R]: number of each query row in its request.  Scales of such tokens may be anything, even NaN: blocks behind
    a sliding window belong to others by now.
    """
    seen = token < length
    if SLIDING:
        seen = seen & (token > length - sliding)
    if COLUMNS > 0:
        column = token - (length - COLUMNS)
        recent = column >= SINKS
        exact = seen & (recent | (token < SINKS))
        seen = seen & (gl.load(PRESENT + gl.where(recent, column, token), mask=exact, other=0) == 0)
    x = gl.where(seen[:, None], x, float("-inf"))
    if SLIDING:
        x = gl.where(token[:, None] > (length + rows)[None, :] - sliding, x, float("-inf"))
    return x, gl.where(seen, vs, 0.0)


@gluon.jit
def make_shifts(
    shifts, WAVES, FACTOR, COS_SIN, first, last, spans, first_row, q_start, q_len, head, heads, D: gl.constexpr,
    G: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """What turning centres add to the scores of query rows in the spans first to last: into float32 [SPANS, R].

    WAVES float16 [T, heads, G, 2, D], number and rest, in units of FACTOR[.., 1]; COS_SIN float16 [spans, D].
    """
    a_layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    some: gl.constexpr = 16
    parts = reinterpret(shifts, gl.float32, [SPANS // some, some, R], FLAT)
    a_dim = gl.arange(0, WAVE_STEP, layout=gl.SliceLayout(0, a_layout))
    b_dim = gl.arange(0, WAVE_STEP, layout=gl.SliceLayout(1, b_layout))
    column = gl.arange(0, 2 * R, layout=gl.SliceLayout(0, b_layout))
    row = first_row + query_row(column, R)
    line = (((q_start + row // G) * heads + head) * G + row % G) * 2 + column % 2
    real = row // G < q_len
    for part in range((last - first) // some + 1):
        span = first + part * some + gl.arange(0, some, layout=gl.SliceLayout(1, a_layout))
        turned = COS_SIN + gl.minimum(span, spans - 1)[:, None] * D
        raw = gl.full([some, 2 * R], 0.0, gl.float32, layout=MMA)
        for step in gl.static_range(0, D, WAVE_STEP):
            turns = gl.load(turned + (step + a_dim)[None, :])
            waves = gl.load(WAVES + line[None, :] * D + (step + b_dim)[:, None], mask=real[None, :], other=0.0)
            raw = mma_v2(turns, waves, raw)
        high, low = pair_scores(raw, some, R)
        score_row = first_row + gl.arange(0, R, layout=gl.SliceLayout(0, high.type.layout))
        score_line = ((q_start + score_row // G) * heads + head) * G + score_row % G
        unit = gl.load(FACTOR + score_line * 2 + 1, mask=score_row // G < q_len, other=0.0)
        parts.index(part).store((high + low) * unit[None, :])


@gluon.jit
def tile_shift(shifts, shift, index, layout: gl.constexpr, TURNS: gl.constexpr):
    """Shift float32 [R] of a tile's scores: its span's, or the one of all."""
    if TURNS:
        return shifts.index(index).load(layout)
    else:
        return shift


@gluon.jit
def history(
    QUERY, FACTOR, OFFSET, WAVES, COS_SIN, PAGES, TABLES, BLOCKS, PRESENT, OUT, LSE, place, first_row, q_start, q_len,
    length, start, end, page_stride, head, heads, spans, softcap, sliding,
    D: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr, BS: gl.constexpr, KBITS: gl.constexpr,
    VBITS: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr, KS: gl.constexpr,
    VS: gl.constexpr, KROWS: gl.constexpr, VROWS: gl.constexpr, RUN: gl.constexpr,
    COLUMNS: gl.constexpr, SINKS: gl.constexpr, SLIDING: gl.constexpr, SOFTCAP: gl.constexpr, VSTEP: gl.constexpr,
    PAGE: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows over the tiles [start, end) of compressed history.  start < end."""
    N: gl.constexpr = 8 if R == 4 else R
    b_layout: gl.constexpr = gl.DotOperandLayout(1, MMA, RUN)
    tables = load_tables(TABLES)
    value_tables = load_tables(TABLES + 10)

    KFULL: gl.constexpr = 2 * KROWS if KBITS == 3 else KROWS
    VFULL: gl.constexpr = 2 * VROWS if VBITS == 3 else VROWS
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, T, KFULL], FLAT)
    values = gl.allocate_shared_memory(gl.uint8, [STAGES, VFULL, T], FLAT)
    key_scales = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T], LINE)
    value_scales = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T], LINE)
    if KBITS == 3:
        fine_keys = gl.allocate_shared_memory(gl.uint8, [STAGES, T, KROWS], FLAT)
    else:
        fine_keys = keys
    if VBITS == 3:
        fine_values = gl.allocate_shared_memory(gl.uint8, [STAGES, VROWS, T], FLAT)
    else:
        fine_values = values
    if TURNS:
        shifts = gl.allocate_shared_memory(gl.float32, [SPANS, R], LINE)
    else:
        shifts = keys
    TILES: gl.constexpr = BS // T
    last = end - 1

    for ahead in gl.static_range(STAGES):
        tile = gl.minimum(start + ahead, last)
        block = gl.load(BLOCKS + tile // TILES).to(gl.int64)
        if ahead < STAGES - 1:
            base = block * page_stride + head * PAGE
            local = tile % TILES * T
            copy_tile(
                PAGES + base, local, keys.index(ahead), fine_keys.index(ahead), values.index(ahead),
                fine_values.index(ahead), key_scales.index(ahead), value_scales.index(ahead), BS, KBITS, VBITS,
                K0, K1, V0, V1, KS, VS,
            )  # fmt: skip

    if PDL:
        gdc_wait()
    column = gl.arange(0, 2 * R, layout=gl.SliceLayout(0, b_layout))
    position = gl.arange(0, D, layout=gl.SliceLayout(1, b_layout))
    q_row = first_row + query_row(column, R)
    q_token = q_start + q_row // G
    q_line = ((q_token * heads + head) * G + q_row % G) * 2 + column % 2
    real = q_row // G < q_len
    q = gl.load(QUERY + q_line[None, :] * D + position[:, None], mask=real[None, :], other=0)
    if KBITS == 8:
        init = gl.full([T, 2 * R], 0.0, gl.float32, layout=MMA)
    else:
        column = gl.arange(0, 2 * R, layout=gl.SliceLayout(0, MMA))
        q_row = first_row + query_row(column, R)
        line = ((q_start + q_row // G) * heads + head) * G + q_row % G
        offset = gl.load(OFFSET + line, mask=(q_row // G < q_len) & (column % 2 == 1), other=0)
        init = gl.full([T, 2 * R], 0, gl.int32, layout=MMA) + offset[None, :]

    # The score layout: an accumulator's, or for 4 rows the half of one that `split` leaves.
    probe, _ = pair_scores(gl.full([T, 2 * R], 0.0, gl.float32, layout=MMA), T, R)
    S: gl.constexpr = probe.type.layout
    row = first_row + gl.arange(0, R, layout=gl.SliceLayout(0, S))
    line = ((q_start + row // G) * heads + head) * G + row % G
    factor = gl.load(FACTOR + line * 2, mask=row // G < q_len, other=0.0)
    shift = gl.load(FACTOR + line * 2 + 1, mask=row // G < q_len, other=0.0)
    tau = tile_order(T, gl.SliceLayout(1, S))

    m = gl.full([R], LOWEST, gl.float32, layout=gl.SliceLayout(0, S))
    mass = gl.full([T, R], 0.0, gl.float32, layout=S)
    acc = gl.full([D, N], 0.0, gl.float32, layout=MMA)
    weight_sum = gl.full([16, N], 0.0, gl.float32, layout=MMA)
    ones = gl.full([16, T], 1.0, gl.bfloat16, layout=gl.DotOperandLayout(0, MMA, 2))

    slot = 0
    for stretch in range(start, end, STRETCH):
        first_span = stretch * T // SPAN_TOKENS
        last_span = (gl.minimum(stretch + STRETCH, end) - 1) * T // SPAN_TOKENS
        if TURNS:
            make_shifts(
                shifts, WAVES, FACTOR, COS_SIN, first_span, last_span, spans, first_row, q_start, q_len, head, heads,
                D, G, R,
            )  # fmt: skip
        for t in range(stretch, gl.minimum(stretch + STRETCH, end)):
            other = gl.where(slot == 0, STAGES - 1, slot - 1)
            async_copy.wait_group(STAGES - 2)
            base = block * page_stride + head * PAGE
            local = gl.minimum(t + STAGES - 1, last) % TILES * T
            copy_tile(
                PAGES + base, local, keys.index(other), fine_keys.index(other), values.index(other),
                fine_values.index(other), key_scales.index(other), value_scales.index(other), BS, KBITS, VBITS,
                K0, K1, V0, V1, KS, VS,
            )  # fmt: skip
            block = gl.load(BLOCKS + gl.minimum(t + STAGES, last) // TILES).to(gl.int64)

            key_words = load_words(keys.index(slot), key_layout(KROWS, T, RUN), 1, fine_keys.index(slot), KBITS, KROWS)
            value_words = load_words(
                values.index(slot), value_layout(VROWS, T), 0, fine_values.index(slot), VBITS, VROWS
            )
            ks = load_scales(key_scales.index(slot), T, gl.SliceLayout(1, S))
            vs = load_scales(value_scales.index(slot), T, gl.SliceLayout(1, S))
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)

            high, low = pair_scores(mma_v2(key_operand(key_words, tables, T, D, KBITS, RUN), q, init), T, R)
            if KBITS == 8:
                x = high + low
            else:
                x = (high * 256 + low).to(gl.float32)
            moved = tile_shift(shifts, shift, t * T // SPAN_TOKENS - first_span, gl.SliceLayout(0, S), TURNS)
            x = capped(x * ks[:, None] * factor[None, :] + moved[None, :], softcap, SOFTCAP)
            edge = (t + 1) * T > length - (COLUMNS - SINKS)
            if SINKS > 0:
                edge = edge | (t * T < SINKS)
            if SLIDING:
                edge = edge | (t * T <= length + q_len - 1 - sliding)
            if edge:
                x, vs = mask_edge(x, vs, t * T + tau, length, PRESENT, row // G, sliding, COLUMNS, SINKS, SLIDING)
            if exceeds(x, m, T, R):
                new = gl.maximum(m, gl.max(x, 0))
                rescale = gl.exp2(m - new)
                m = new
                mass = mass * rescale[None, :]
                columns = per_column(rescale, R)
                acc = acc * columns[None, :]
                weight_sum = weight_sum * columns[None, :]
            p = gl.exp2(x - m[None, :])
            mass = mass + p
            p = p * vs[:, None]
            if R == 4:
                p = gl.join(p, gl.full([T, R], 0.0, gl.float32, layout=S)).reshape([T, N])
                p = gl.convert_layout(p.to(gl.bfloat16), MMA, assert_trivial=True)
            else:
                p = p.to(gl.bfloat16)
            p = weight_operand(p, T, N)
            acc = mma_v2(value_operand(value_words, value_tables, T, D, VBITS), p, acc)
            weight_sum = mma_v2(ones, p, weight_sum)
        acc -= (gl.max(weight_sum, 0) * VALUE_OFFSET)[None, :]
        weight_sum = gl.full([16, N], 0.0, gl.float32, layout=MMA)
    async_copy.wait_group(0)

    total = gl.sum(mass, 0)
    safe = gl.where(total > 0, total, 1.0)
    acc = acc * (per_column(VSTEP / safe, R))[None, :]
    if R == 4:
        even, odd = gl.split(acc.reshape([D, 4, 2]))
        acc = even + odd
    store_rows(OUT + place * R * D, acc, D, R)
    gl.store(LSE + place * R + row - first_row, gl.where(total > 0, m + gl.log2(safe), float("-inf")))


@gluon.jit
def store_rows(OUT, acc, D: gl.constexpr, R: gl.constexpr):
    """Store the first R columns of an output accumulator [D, N] as rows."""
    layout: gl.constexpr = acc.type.layout
    columns: gl.constexpr = acc.shape[1]
    row = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    dim = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    gl.store(OUT + (row[None, :] * D + dim[:, None]), acc, mask=(row < R)[None, :])


@gluon.jit
def exact(
    RAW, KEYS, VALUES, INDEX, PRESENT, OWN_KEYS, OWN_VALUES, OUT, LSE, place, first_row, q_start, q_len, length, piece,
    tiles, raw_stride, key_stride, value_stride, ring_stride, head, heads, scale, softcap, sliding,
    D: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr, COLUMNS: gl.constexpr, SINKS: gl.constexpr,
    SLIDING: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attention over `tiles` tiles of the exact ring; the last piece also over the step's own rows, causally."""
    N: gl.constexpr = 8 if R == 4 else R
    a_layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    column = gl.arange(0, N, layout=gl.SliceLayout(0, b_layout))
    position = gl.arange(0, D, layout=gl.SliceLayout(1, b_layout))
    q_row = first_row + column
    q_line = (q_start + q_row // G).to(gl.int64) * raw_stride + (head * G + q_row % G) * D
    real = (q_row // G < q_len) & (column < R)
    q = gl.load(RAW + q_line[None, :] + position[:, None], mask=real[None, :], other=0.0)

    row = (first_row + gl.arange(0, N, layout=gl.SliceLayout(0, MMA))) // G
    tile_row = gl.arange(0, T, layout=gl.SliceLayout(1, MMA))
    m = gl.full([N], LOWEST, gl.float32, layout=gl.SliceLayout(0, MMA))
    mass = gl.full([T, N], 0.0, gl.float32, layout=MMA)
    acc = gl.full([D, N], 0.0, gl.float32, layout=MMA)
    keys = gl.allocate_shared_memory(RAW.dtype.element_ty, [T, D], shared)
    values = gl.allocate_shared_memory(RAW.dtype.element_ty, [T, D], shared)
    copy_row = gl.arange(0, T, layout=gl.SliceLayout(1, copy))
    copy_dim = head * D + gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    all_tiles: gl.constexpr = (COLUMNS + T - 1) // T
    end = gl.minimum((piece + 1) * tiles, all_tiles)
    if (piece + 1) * tiles >= all_tiles:
        end = all_tiles + gl.cdiv(q_len, T)
    for t in range(piece * tiles, end):
        first = t * T
        if t >= all_tiles:
            first = (t - all_tiles) * T
            line = (q_start + first + copy_row).to(gl.int64)
            mask = (first + copy_row < q_len)[:, None]
            k_line = OWN_KEYS + (line * key_stride)[:, None] + copy_dim[None, :]
            v_line = OWN_VALUES + (line * value_stride)[:, None] + copy_dim[None, :]
            copy_async(keys, k_line, mask=mask)
            copy_async(values, v_line, mask=mask)
            seen = first + tile_row < q_len
            token = length + first + tile_row
        else:
            inside = first + copy_row < COLUMNS
            held = gl.load(PRESENT + first + copy_row, mask=inside, other=0) != 0
            line = gl.load(INDEX + first + copy_row, mask=held, other=0) * ring_stride
            mask = held[:, None]
            copy_async(keys, KEYS + line[:, None] + copy_dim[None, :], mask=mask)
            copy_async(values, VALUES + line[:, None] + copy_dim[None, :], mask=mask)
            seen = gl.load(PRESENT + first + tile_row, mask=first + tile_row < COLUMNS, other=0) != 0
            token = length - COLUMNS + first + tile_row
            if SINKS > 0:
                token = gl.where(first + tile_row < SINKS, first + tile_row, token)
        async_copy.commit_group()
        async_copy.wait_group(0)
        k = keys.load(a_layout)
        x = mma_v2(k, q, gl.full([T, N], 0.0, gl.float32, layout=MMA)) * scale
        x = capped(x, softcap, SOFTCAP)
        visible = seen[:, None] & (token[:, None] <= (length + row)[None, :])
        if SLIDING:
            visible = visible & (token[:, None] > (length + row)[None, :] - sliding)
        x = gl.where(visible, x, float("-inf"))
        new = gl.maximum(m, gl.max(x, 0))
        rescale = gl.exp2(m - new)
        m = new
        p = gl.exp2(x - m[None, :])
        mass = mass * rescale[None, :] + p
        w = weight_operand(p.to(RAW.dtype.element_ty), T, N)
        acc = mma_v2(values.permute([1, 0]).load(a_layout), w, acc * rescale[None, :])

    total = gl.sum(mass, 0)
    safe = gl.where(total > 0, total, 1.0)
    acc = acc * (1.0 / safe)[None, :]
    store_rows(OUT + place * R * D, acc, D, R)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
    gl.store(LSE + place * R + column, gl.where(total > 0, m + gl.log2(safe), float("-inf")), mask=column < R)


@gluon.jit(do_not_specialize=["block_stride", "spans", "splits", "pieces", "exact_tiles"])
def decode_kernel(
    QUERY, FACTOR, OFFSET, WAVES, COS_SIN, RAW, PAGES, TABLES, BLOCKS, REQUESTS, INDEX, PRESENT, KEYS, VALUES,
    OWN_KEYS, OWN_VALUES, OUT, LSE, block_stride, page_stride, raw_stride, key_stride, value_stride,
    ring_stride, heads, spans, splits, pieces, exact_tiles, scale, softcap, sliding,
    D: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr, BS: gl.constexpr, KBITS: gl.constexpr,
    VBITS: gl.constexpr, K0: gl.constexpr, K1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr, KS: gl.constexpr,
    VS: gl.constexpr, KROWS: gl.constexpr, VROWS: gl.constexpr, RUN: gl.constexpr,
    COLUMNS: gl.constexpr, SINKS: gl.constexpr, SLIDING: gl.constexpr, SOFTCAP: gl.constexpr, VSTEP: gl.constexpr,
    PAGE: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (request and head, segment, row tile); segments are the exact pieces, then the splits of the history."""
    pair = gl.program_id(0)
    segment = gl.program_id(1)
    row_tile = gl.program_id(2)
    head = pair % heads
    if PDL:
        gdc_launch_dependents()  # the merge may start as programs run out; it waits for the end itself
    entry = REQUESTS + pair // heads * 4
    request = gl.load(entry)
    q_start = gl.load(entry + 1)
    q_len = gl.load(entry + 2)
    length = gl.load(entry + 3)
    place = (pair * gl.num_programs(2) + row_tile).to(gl.int64) * (splits + pieces) + segment
    first_row = row_tile * R
    present = PRESENT + request.to(gl.int64) * COLUMNS
    if segment < pieces:
        exact(
            RAW, KEYS, VALUES, INDEX + request.to(gl.int64) * COLUMNS, present, OWN_KEYS, OWN_VALUES, OUT, LSE, place,
            first_row, q_start, q_len, length, segment, exact_tiles, raw_stride, key_stride, value_stride, ring_stride,
            head, heads, scale, softcap, sliding, D, G, R, 16, COLUMNS, SINKS, SLIDING, SOFTCAP,
        )  # fmt: skip
    else:
        low = 0
        if SLIDING:
            low = gl.maximum(length - sliding + 1, 0) // T
        tiles = gl.cdiv(length, T) - low
        share = gl.cdiv(gl.maximum(tiles, 0), splits)
        start = low + (segment - pieces) * share
        end = gl.minimum(start + share, low + tiles)
        if (start < end) & (first_row < q_len * G):
            history(
                QUERY, FACTOR, OFFSET, WAVES, COS_SIN, PAGES, TABLES, BLOCKS + request.to(gl.int64) * block_stride,
                present, OUT, LSE, place, first_row, q_start, q_len, length, start, end, page_stride, head, heads,
                spans, softcap, sliding, D, G, R, T, BS, KBITS, VBITS, K0, K1, V0, V1, KS, VS, KROWS, VROWS, RUN,
                COLUMNS, SINKS, SLIDING, SOFTCAP, VSTEP, PAGE, TURNS, PDL,
            )  # fmt: skip
        else:
            store_empty(LSE, place, R)
    if PDL:
        gdc_wait()  # exact and empty programs too: the merge may take for granted that the queries' kernel has ended
