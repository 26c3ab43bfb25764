"""Attention over compressed history in plain Triton: no inline assembly, no vendor layouts.

The twin is `turboquant.score.twin_history`.  Split-KV: a program takes one KV head of one request, one tile of query
rows and one share of the history; all query heads of the KV head are rows of its tile, so every page is decoded once
per tile.  Splits are merged by log-sum-exp.  Serves Lloyd-Max keys and values of 2 to 4 bits.
"""

import torch
import triton
import triton.language as tl

from turboquant.capture import LayerCache
from turboquant.page import PageFormat
from turboquant.quantizer import TurboQuantMSE
from turboquant.score import Partial, QueryGroup

TOKENS = 32  # per step of the inner loop
TARGET_PROGRAMS = 512  # a few waves on any current GPU; independent of lengths, so a captured graph may keep it
MAX_SPLITS = 32
PRECISION = tl.constexpr("tf32x3")  # plain tf32 is off by 5e-3 at logits of 10


@triton.jit
def _codes(pages, base, local, coordinate, mask, OFFSET, WIDTH: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
           DIMENSION_MAJOR: tl.constexpr):  # fmt: skip
    """One plane's codes int32 [tokens, coordinates]: byte j of a row holds the coordinates j, j + n, j + 2n, ..."""
    n: tl.constexpr = D * WIDTH // 8
    byte, shift = coordinate % n, coordinate // n * WIDTH
    if DIMENSION_MAJOR:
        address = base[:, None] + OFFSET + byte[None, :] * BS + local[:, None]
    else:
        address = base[:, None] + OFFSET + local[:, None] * n + byte[None, :]
    return (tl.load(pages + address, mask=mask, other=0).to(tl.int32) >> shift[None, :]) & ((1 << WIDTH) - 1)


@triton.jit
def _rows(pages, centroids, base, local, coordinate, mask, FIRST, SECOND, BITS: tl.constexpr, D: tl.constexpr,
          BS: tl.constexpr, DIMENSION_MAJOR: tl.constexpr):  # fmt: skip
    """Centroids float32 [tokens, coordinates]; 3 bits are a 2-bit plane and a 1-bit plane."""
    if BITS == 3:
        low = _codes(pages, base, local, coordinate, mask, FIRST, 2, D, BS, DIMENSION_MAJOR)
        codes = low | _codes(pages, base, local, coordinate, mask, SECOND, 1, D, BS, DIMENSION_MAJOR) << 2
    else:
        codes = _codes(pages, base, local, coordinate, mask, FIRST, BITS, D, BS, DIMENSION_MAJOR)
    return tl.load(centroids + codes, mask=mask, other=0.0)


@triton.jit
def _history_kernel(
    query, shift, pages, scalars, table, lengths, present, key_book, value_book, out, lse,
    table_stride, present_stride, page_stride, rows, query_len, softcap, sliding,
    H: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, PAGE: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KS: tl.constexpr, VS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    DIMS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0) // H, tl.program_id(0) % H
    split, first_row = tl.program_id(1), tl.program_id(2) * ROWS
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, SPLITS), T) * T
    start, end = split * share, tl.minimum(length, (split + 1) * share)
    row, coordinate = first_row + tl.arange(0, ROWS), tl.arange(0, DIMS)
    line = (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * D + coordinate[None, :]
    inside = (row < rows)[:, None] & (coordinate < D)[None, :]
    q = tl.load(query + line, mask=inside, other=0.0)
    bias = tl.load(shift + tl.program_id(0) * rows + row, mask=row < rows, other=0.0)
    position = length + row % query_len
    if sliding > 0:
        start = tl.maximum(start, (length - sliding + 1) // T * T)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(start, end, T):
        token = first + tl.arange(0, T)
        seen = (token >= 0) & (token < end)
        if WINDOW > 0:
            column = token - (length - WINDOW)
            recent = seen & (column >= 0)
            seen = seen & (tl.load(present + request * present_stride + column, mask=recent, other=0) == 0)
        block = tl.load(table + request * table_stride + token // BS, mask=seen, other=0).to(tl.int64)
        base, local = block * page_stride + head * PAGE, token % BS
        mask = seen[:, None] & (coordinate < D)[None, :]
        keys = _rows(pages, key_book, base, local, coordinate, mask, K0, K1, KEY_BITS, D, BS, False)
        key_scale = tl.load(scalars + (base + KS) // 2 + local, mask=seen, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * key_scale[None, :] + bias[:, None]
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
        values = _rows(pages, value_book, base, local, coordinate, mask, V0, V1, VALUE_BITS, D, BS, True)
        value_scale = tl.load(scalars + (base + VS) // 2 + local, mask=seen, other=0.0).to(tl.float32)
        acc = acc * rescale[:, None] + tl.dot(weights, values * value_scale[:, None], input_precision=PRECISION)
        total = total * rescale + tl.sum(weights, 1)
        peak = new_peak
    result = tl.program_id(0).to(tl.int64) * SPLITS + split
    used = total > 0
    acc = acc / tl.where(used, total, 1.0)[:, None]
    tl.store(out + (result * rows + row)[:, None] * D + coordinate[None, :], acc, mask=inside)
    tl.store(lse + result * rows + row, tl.where(used, peak + tl.log(tl.where(used, total, 1.0)), -float("inf")),
             mask=row < rows)  # fmt: skip


def serves(layer: LayerCache) -> bool:
    """Whether this kernel can read a layer's pages."""
    return isinstance(layer.codec.key, TurboQuantMSE) and isinstance(layer.codec.value, TurboQuantMSE)


def history_kernel(
    layer: LayerCache, group: QueryGroup, query: torch.Tensor, shift: torch.Tensor, softcap: float
) -> Partial:
    """`turboquant.score.HistoryKernel` of the layers that `serves` accepts."""
    assert isinstance(layer.codec.key, TurboQuantMSE) and isinstance(layer.codec.value, TurboQuantMSE)
    return history_attention(
        query.contiguous(),
        shift,
        layer.store.pages,
        layer.store.format,
        layer.codec.key.centroids,
        layer.codec.value.centroids,
        group.blocks,
        group.cached,
        group.exact,
        softcap,
        group.window,
    )


def history_attention(
    query: torch.Tensor,
    shift: torch.Tensor,
    pages: torch.Tensor,
    layout: PageFormat,
    key_centroids: torch.Tensor,
    value_centroids: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    present: torch.Tensor,
    softcap: float = 0.0,
    sliding: int = 0,
) -> Partial:
    """Attention of rotated, scaled queries over compressed pages.

    query float32 [n, H_kv, G, Q, d], contiguous; shift float32 [n, H_kv, G, Q]; pages uint8 [blocks, H_kv, page_bytes];
    block_table integer [n, M]; lengths int64 [n], cached tokens; present bool [n, W], which of the last W cached tokens
    are read exactly elsewhere and so skipped; softcap and sliding as in `HybridScorer` (0 = none).
    Returns out float32 [n, H_kv, G, Q, d] in the value basis and lse float32 [n, H_kv, G, Q].
    """
    n, heads, group, query_len, dim = query.shape
    rows = group * query_len
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, tile)
    splits = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // (n * heads * row_tiles)))
    out = query.new_empty(n, heads, splits, rows, dim)
    lse = query.new_empty(n, heads, splits, rows)
    planes = {plane.name: plane.offset for plane in layout.planes}
    _history_kernel[(n * heads, splits, row_tiles)](
        query, shift.contiguous(), pages, pages.view(torch.bfloat16), block_table, lengths, present.view(torch.uint8),
        key_centroids, value_centroids, out, lse,
        block_table.stride(0), present.stride(0), pages.stride(0), rows, query_len, softcap, sliding,
        H=heads, D=dim, BS=layout.block_size, PAGE=layout.page_bytes, KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits, K0=planes["key_codes_0"], K1=planes.get("key_codes_1", 0),
        V0=planes["value_codes_0"], V1=planes.get("value_codes_1", 0), KS=planes["key_scalars"],
        VS=planes["value_scalars"], WINDOW=present.shape[1], SPLITS=splits, ROWS=tile,
        DIMS=triton.next_power_of_2(dim), T=TOKENS,
    )  # fmt: skip
    total = torch.logsumexp(lse, 2)
    safe = torch.where(total == -torch.inf, 0.0, total)
    merged = torch.einsum("nhsr,nhsrd->nhrd", (lse - safe[:, :, None]).exp(), out)
    return merged.view(query.shape), total.view(query.shape[:-1])
