"""Attention over compressed history in plain Triton: no inline assembly, no vendor layouts.

The twin is `turboquant.score.twin_history`.  Split-KV: a program takes one KV head of one request, one tile of query
rows and one share of the history; all query heads of the KV head are rows of its tile, so every page is decoded once
per tile.  Splits are merged by log-sum-exp.  Serves every codec but Algorithm 2 for values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turboquant.capture import LayerCache
from turboquant.codec import KVCodec
from turboquant.kernels.pages import (
    code_table,
    load_codes,
    load_rows,
    load_scalar,
    look_up,
    page_side,
    sketch_signs,
)
from turboquant.quantizer import TurboQuantProd
from turboquant.rotary import SPAN
from turboquant.score import Partial, QueryGroup
from turboquant.store import CompressedBlockStore

TARGET_PROGRAMS = 512  # a few waves on any current GPU; independent of lengths, so a captured graph may keep it
MAX_SPLITS = 32
MAX_DIM = 256
# 64 rows would be Hopper's asynchronous products, which Triton 3.6 and 3.7 compile to reads beyond shared memory, and
# ptxas 12.9 to reads of registers that hold something else by then (triton-lang/triton issues 11366 and 11781).
MAX_ROWS = 32
SPAN_TOKENS = tl.constexpr(SPAN)
# Plain tf32 is off by 5e-3 at logits of 10; AMD's matrix units take float32 and know no tf32x3.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


@triton.jit
def _key_scores(q, sketched, pages, scalars, table, base, local, coordinate, seen, SIDE: tl.constexpr,
                D: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Inner products float32 [rows, t] of the queries with the keys of the tokens; 0 where a token is not seen."""
    if SIDE.decoder == "group":
        keys = load_rows(pages, scalars, table, base, local, coordinate, seen, SIDE, D, BS)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    else:
        # A token's scale multiplies its score, not its d coordinates.
        mask = seen[:, None] & (coordinate < D)[None, :]
        codes = load_codes(pages, base, local, coordinate, mask, SIDE, D, BS)
        scores = tl.dot(q, tl.trans(look_up(table, codes, mask, SIDE)), input_precision=PRECISION)
        scores *= load_scalar(scalars, base, local, 0, seen, SIDE)[None, :]
        if SIDE.decoder == "sketch":
            signs = tl.dot(sketched, tl.trans(sketch_signs(codes, SIDE)), input_precision=PRECISION)
            scores += signs * load_scalar(scalars, base, local, 1, seen, SIDE)[None, :]
    return scores


@triton.jit(do_not_specialize=["table_stride", "present_stride", "rows", "query_len", "splits", "spans"])
def _history_kernel(
    query, sketch, waves, cos_sin, pages, scalars, block_table, lengths, present, key_table, value_table, out, lse,
    table_stride, present_stride, page_stride, head_stride, rows, query_len, splits, spans, softcap, sliding,
    H: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TURNS: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0) // H, tl.program_id(0) % H
    split, row = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    coordinate = tl.arange(0, DIMS)
    line = (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * D + coordinate[None, :]
    inside = (row < rows)[:, None] & (coordinate < D)[None, :]
    q = tl.load(query + line, mask=inside, other=0.0)
    sketched = tl.load(sketch + line, mask=inside, other=0.0) if KEY.decoder == "sketch" else q
    wave = tl.load(waves + line, mask=inside, other=0.0)
    still = tl.sum(wave * tl.load(cos_sin + coordinate, mask=coordinate < D, other=0.0).to(tl.float32)[None, :], 1)
    length = tl.load(lengths + request)
    position = length + row % query_len
    oldest = length * 0
    if sliding > 0:
        oldest = tl.maximum(length - sliding + 1, 0)  # blocks that no row can see may be someone else's by now
    share = tl.cdiv(tl.cdiv(length - oldest, splits), T) * T
    start, end = oldest + split * share, tl.minimum(length, oldest + (split + 1) * share)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(start, end, T):
        token = first + tl.arange(0, T)
        seen = token < end
        if COLUMNS > 0:
            column = token - (length - COLUMNS)
            recent = column >= SINKS
            exact = seen & (recent | (token < SINKS))
            column = tl.where(recent, column, token)
            seen = seen & (tl.load(present + request * present_stride + column, mask=exact, other=0) == 0)
        block = tl.load(block_table + request * table_stride + token // BS, mask=seen, other=0).to(tl.int64)
        base, local = block * page_stride + head * head_stride, token % BS
        scores = _key_scores(q, sketched, pages, scalars, key_table, base, local, coordinate, seen, KEY, D, BS)
        if TURNS:
            span = tl.minimum(token // SPAN_TOKENS, spans - 1).to(tl.int64)
            turned = tl.load(
                cos_sin + span[:, None] * D + coordinate[None, :], mask=(coordinate < D)[None, :], other=0.0
            )
            scores += tl.dot(wave, tl.trans(turned.to(tl.float32)), input_precision=PRECISION)
        else:
            scores += still[:, None]
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        visible = tl.broadcast_to(seen[None, :], (ROWS, T))
        if sliding > 0:
            visible = visible & (token[None, :] > position[:, None] - sliding)
        scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp(scores - safe[:, None])
        rescale = tl.exp(peak - safe)
        values = load_rows(pages, scalars, value_table, base, local, coordinate, seen, VALUE, D, BS)
        acc = acc * rescale[:, None] + tl.dot(weights, values, input_precision=PRECISION)
        total = total * rescale + tl.sum(weights, 1)
        peak = new_peak
    result = tl.program_id(0).to(tl.int64) * splits + split
    used = total > 0
    acc = acc / tl.where(used, total, 1.0)[:, None]
    tl.store(out + (result * rows + row)[:, None] * D + coordinate[None, :], acc, mask=inside)
    tl.store(lse + result * rows + row, tl.where(used, peak + tl.log(tl.where(used, total, 1.0)), -float("inf")),
             mask=row < rows)  # fmt: skip


class Tile(NamedTuple):
    """Query rows and tokens of an inner step, and how the compiler runs it."""

    rows: int
    tokens: int
    warps: int
    stages: int


def choose_tile(rows: int, dim: int, operands: int) -> Tile:
    """Tile for `rows` query rows per KV head, of what compiles into registers and 99 KiB of shared memory.

    operands: what query rows are multiplied with beside keys.
    """
    dims = triton.next_power_of_2(dim)
    size = max(16, min(triton.next_power_of_2(rows), (4096 >> operands) // dims, MAX_ROWS))
    small = size * dims <= 2048
    pipelined = small and not operands and not torch.version.hip  # AMD's 64 KiB hold one stage
    return Tile(size, 32 if dims <= 128 else 16, 4 if small else 8, 3 if pipelined else 1)


def serves(layer: LayerCache) -> bool:
    """Whether this kernel can read a layer's pages.

    Not those with values of Algorithm 2, which no configuration offers, and not a head size whose accumulator fills
    the shared memory of most GPUs.
    """
    return not isinstance(layer.codec.value, TurboQuantProd) and layer.codec.value.dim <= MAX_DIM


def history_kernel(
    layer: LayerCache, group: QueryGroup, query: torch.Tensor, waves: torch.Tensor, softcap: float
) -> Partial:
    """`turboquant.score.HistoryKernel` of the layers that `serves` accepts."""
    return history_attention(
        layer.store, query, waves, group.blocks, group.cached, group.exact, softcap, group.window,
        group.plan.window.sinks,
    )  # fmt: skip


def history_attention(
    store: CompressedBlockStore,
    query: torch.Tensor,
    waves: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    present: torch.Tensor,
    softcap: float = 0.0,
    sliding: int = 0,
    sinks: int = 0,
) -> Partial:
    """Attention of rotated, scaled queries over the pages of a store.

    query, waves (`KVCodec.waves`) float32 [n, H_kv, G, Q, d]; block_table integer [n, M]; lengths int64 [n],
    cached tokens; present bool [n, C], which of the `sinks` first and the last cached tokens (`ExactWindow`) are read
    exactly elsewhere and so skipped; softcap and sliding as in `HybridScorer` (0 = none).
    Returns out float32 [n, H_kv, G, Q, d] in the value basis and lse float32 [n, H_kv, G, Q].
    """
    n, heads, group, query_len, dim = query.shape
    rows, sketched = group * query_len, isinstance(store.codec.key, TurboQuantProd)
    cos_sin, turns = store.codec.rotary.cos_sin, store.codec.rotary.turns
    tile = choose_tile(rows, dim, sketched + turns)
    row_tiles = triton.cdiv(rows, tile.rows)
    splits = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // (n * heads * row_tiles)))
    out = query.new_empty(n, heads, splits, rows, dim)
    lse = query.new_empty(n, heads, splits, rows)
    query, pages, codec = query.contiguous(), store.pages, store.codec
    _history_kernel[(n * heads, splits, row_tiles)](
        query, sketch_query(codec, query), waves.contiguous(), cos_sin, pages, pages.view(torch.bfloat16), block_table,
        lengths, present.view(torch.uint8), code_table(codec.key, pages.device), code_table(codec.value, pages.device),
        out, lse, block_table.stride(0), present.stride(0), pages.stride(0), pages.stride(1), rows, query_len, splits,
        len(cos_sin), softcap, sliding, TURNS=turns, H=heads, D=dim, BS=store.block_size,
        KEY=page_side(store.format, "key", codec.key), VALUE=page_side(store.format, "value", codec.value),
        COLUMNS=present.shape[1], SINKS=sinks, ROWS=tile.rows,
        DIMS=triton.next_power_of_2(dim), T=tile.tokens, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return merge_splits(out, lse, query.shape)


def sketch_query(codec: KVCodec, query: torch.Tensor) -> torch.Tensor:
    """What the signs of Algorithm 2's keys are scored with, [..., d]; the query itself for other keys, unused."""
    if isinstance(codec.key, TurboQuantProd):
        return query @ (codec.key.sketch.T * codec.key.gain)
    return query


def merge_splits(out: torch.Tensor, lse: torch.Tensor, shape: torch.Size) -> Partial:
    """Fold out [n, H_kv, splits, rows, d] and lse [n, H_kv, splits, rows] into a Partial of queries of `shape`."""
    total = torch.logsumexp(lse, 2)
    safe = torch.where(total == -torch.inf, 0.0, total)
    merged = torch.einsum("nhsr,nhsrd->nhrd", (lse - safe[:, :, None]).exp(), out)
    return merged.view(shape), total.view(shape[:-1])
