"""Attention of long query chunks: history is decoded piece by piece into a small workspace, for a dense kernel to read.

Many query rows share every cached token, so tokens are decoded once per piece instead of once per tile of rows, and
the dense kernel (FlashAttention where the engine has it) runs at its full speed.  The workspace holds
`WORKSPACE_TOKENS` tokens, whatever the context.  Exact tokens of the ring replace their decoded selves, so that the
history is one segment in the codec's bases; the chunk's own rows are attended causally in the original one.
With a sliding window the history is short, and is attended together with the own rows, so that tokens are decoded to
the original basis; with a softcap, too.
A chunk is half a dozen launches around two of the dense kernel, planned by the first layer of a step and repeated by
the others: the time of Python between them counts too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from turboquant.capture import LayerCache
from turboquant.kernels.launch import Launch, Operand, Operands, kind_of, launch, power_of_2
from turboquant.kernels.matrix import SplitMatrix
from turboquant.kernels.pages import page_sides
from turboquant.kernels.transcode import Rows, decode_span, num_spans, plan_decode, plan_lift, span_operands
from turboquant.score import WORKSPACE_TOKENS, Own, Partial, QueryGroup
from turboquant.store import CompressedBlockStore

ROWS = 32  # query rows of a program: with CHUNK coordinates at a time, all head sizes stay in registers
CHUNK = 32
# FlashAttention-3 loses keys of some rows, with several query heads on a KV head, where a window is no multiple of what
# its tiles hold (vLLM 0.26: a relative error of 5 % at a window of 500).
WINDOW_STEP = 128
# (query [Q, H_q, d], keys and values [L, H_kv, d], scale, causal, sliding window, softcap) -> out [Q, H_q, d],
# lse float32 [H_q, Q] (natural), both contiguous.  Causal: the last query is at the last key.  0 = no window, softcap.
DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool, int, float], Partial]


@triton.jit
def _weights(matrix, n, k, D: tl.constexpr):
    """The factors k of the outputs n of a matrix [n, k] of size D: float32 [k, n], in tf32 exactly if it is 16-bit."""
    mask = (k < D)[:, None] & (n < D)[None, :]
    return tl.load(matrix + n[None, :] * D + k[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(
    QUERY, MATRIX, OUT, tokens, stride, heads, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows (token, query head) of one KV head times its matrix: QUERY, OUT [tokens, heads * G, D]."""
    head, n = tl.program_id(1), tl.arange(0, DIMS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tokens * G
    token, place = (row // G).to(tl.int64), (head * G + row % G) * D
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(0, D, CHUNK):
        k = first + tl.arange(0, CHUNK)
        mask = real[:, None] & (k < D)[None, :]
        x = tl.load(QUERY + (token * stride + place)[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            acc = tl.dot(x, _weights(MATRIX + (part * heads + head) * D * D, n, k, D), acc)
    target = OUT + (token * heads * G * D + place)[:, None] + n[None, :]
    tl.store(target, acc.to(OUT.dtype.element_ty), mask=real[:, None] & (n < D)[None, :])


@triton.jit(do_not_specialize=["first", "count", "cached"], do_not_specialize_on_alignment=["INDEX", "PRESENT"])
def _exact_kernel(
    KEYS, VALUES, INDEX, PRESENT, KEY_MATRIX, VALUE_MATRIX, GAIN, KEYS_OUT, VALUES_OUT, first, count, cached,
    ring_stride, C: tl.constexpr, SINKS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Exact tokens of the ring, rotated, over their decoded selves: outputs [count, heads, D] hold tokens from `first`.

    Program (tile of columns, head, side).
    """
    head, n, is_key = tl.program_id(1), tl.arange(0, DIMS), tl.program_id(2) == 0
    ring, matrix, out = VALUES, VALUE_MATRIX, VALUES_OUT
    if is_key:
        ring, matrix, out = KEYS, KEY_MATRIX, KEYS_OUT
    column = tl.program_id(0) * T + tl.arange(0, T)
    place = tl.where(column < SINKS, column, cached - C + column) - first
    found = tl.load(PRESENT + column, mask=column < C, other=0) != 0
    found = found & (place >= 0) & (place < count)
    entry = tl.load(INDEX + column, mask=found, other=0).to(tl.int64)
    acc = tl.zeros([T, DIMS], tl.float32)
    for start in range(0, D, CHUNK):
        k = start + tl.arange(0, CHUNK)
        mask = found[:, None] & (k < D)[None, :]
        x = tl.load(ring + (entry * ring_stride + head * D)[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        x *= tl.where(is_key, tl.load(GAIN + head * D + k, mask=k < D, other=1.0), 1.0)[None, :]
        acc += tl.dot(x, _weights(matrix, n, k, D), input_precision="ieee")
    target = out + (place.to(tl.int64) * tl.num_programs(1) + head)[:, None] * D + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=found[:, None] & (n < D)[None, :])


@triton.jit
def _lse(LSE, row, tokens, heads):
    """[heads, tokens] at rows (token, head)."""
    return tl.load(LSE + row % heads * tokens + row // heads, mask=row < tokens * heads, other=-float("inf"))


@triton.jit
def _shares(a, b):
    """Shares of two segments in their merge, and its lse, from theirs."""
    peak = tl.maximum(a, b)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    first, second = tl.exp(a - safe), tl.exp(b - safe)
    total = tl.maximum(first + second, 1e-30)  # 1 at least, unless both are empty
    return first / total, second / total, peak + tl.log(total)


@triton.jit(do_not_specialize=["tokens"])
def _fold_kernel(A, A_LSE, B, B_LSE, OUT, OUT_LSE, tokens, heads, D: tl.constexpr, DIMS: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    """OUT float32 := A merged with B; rows are (token, head)."""
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = row < tokens * heads
    first, second, lse = _shares(_lse(A_LSE, row, tokens, heads), _lse(B_LSE, row, tokens, heads))
    line = row.to(tl.int64)[:, None] * D + dim[None, :]
    mask = real[:, None] & (dim < D)[None, :]
    out = tl.load(A + line, mask=mask & (first > 0)[:, None], other=0.0).to(tl.float32) * first[:, None]
    out += tl.load(B + line, mask=mask & (second > 0)[:, None], other=0.0).to(tl.float32) * second[:, None]
    tl.store(OUT + line, out, mask=mask)
    tl.store(OUT_LSE + row % heads * tokens + row // heads, lse, mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _finish_kernel(
    HISTORY, HISTORY_LSE, OWN, OWN_LSE, MATRIX, OUTPUT, tokens, output_stride, heads, matrix_scale, D: tl.constexpr,
    DIMS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """OUTPUT := the history, rotated back, merged with the own chunk."""
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = row < tokens * heads
    token, head = (row // heads).to(tl.int64), row % heads
    line = row.to(tl.int64) * D
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(0, D, CHUNK):
        k = first + tl.arange(0, CHUNK)
        mask = real[:, None] & (k < D)[None, :]
        history = tl.load(HISTORY + line[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            acc = tl.dot(history, _weights(MATRIX + part * D * D, n, k, D), acc)
    first, second, _ = _shares(_lse(HISTORY_LSE, row, tokens, heads), _lse(OWN_LSE, row, tokens, heads))
    mask = real[:, None] & (n < D)[None, :]
    own = tl.load(OWN + line[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    out = acc * (first * matrix_scale)[:, None] + own * second[:, None]
    target = OUTPUT + (token * output_stride + head * D)[:, None] + n[None, :]
    tl.store(target, out.to(OUTPUT.dtype.element_ty), mask=mask)


def fold(a: Partial, b: Partial) -> Partial:
    """Merge two segments: out [Q, H, d] of any float dtype, lse float32 [H, Q] -> the same, out in float32.

    The twin is `turboquant.score.merge`.
    """
    tokens, heads, dim = a[0].shape
    out, lse = torch.empty_like(a[0], dtype=torch.float32), torch.empty_like(a[1])
    sizes = {"D": dim, "DIMS": power_of_2(dim), "ROWS": ROWS}
    launch(_fold_kernel, (-(-tokens * heads // ROWS),), (*a, *b, out, lse), (tokens, heads), sizes)
    return out, lse


@dataclass(frozen=True)
class Piece:
    """Cached tokens that are decoded at a time: how many, in how many spans of one centre, and the launches for it."""

    tokens: int
    spans: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class ChunkPlan:
    """Launches around the dense kernel for the chunk of one request, for all layers of a kind."""

    rotate: Launch
    pieces: tuple[Piece, ...]
    finish: Launch


class StagedPrefill:
    """`turboquant.score.FusedKernel` for chunks of any length, on top of a dense attention."""

    def __init__(self, layer: LayerCache, attention: DenseAttention):
        self.layer, self.attention = layer, attention
        codec, dtype = layer.codec, layer.recent.keys.dtype
        self.query_matrix = SplitMatrix.of(codec.query_matrix.mT, dtype)
        self.output_matrix = SplitMatrix.of(codec.value.rotation.matrix.mT, dtype)
        self.nbytes = self.query_matrix.parts.nbytes + self.output_matrix.parts.nbytes
        dims = power_of_2(layer.store.format.head_dim)
        self.sizes = {"D": layer.store.format.head_dim, "DIMS": dims}
        self.kind = self._kind()
        self._operands: WeakKeyDictionary[CompressedBlockStore, Operands] = WeakKeyDictionary()

    def _kind(self) -> int:
        """The same for layers that launch alike, in steps that are alike: everything of a layer that launches depend on
        but for its `operands`.
        """
        store, recent, rotary = self.layer.store, self.layer.recent, self.layer.codec.rotary
        return kind_of(
            "prefill", *page_sides(store), store.num_kv_heads, store.format.head_dim, store.block_size,
            store.pages.device, recent.keys.stride(0), recent.keys.dtype, rotary.wide.shape, rotary.wide.dtype,
            len(self.query_matrix.parts), len(self.output_matrix.parts),
        )  # fmt: skip

    @property
    def operands(self) -> Operands:
        """Of the layer with its store's pages, which an engine may exchange for others."""
        store, recent = self.layer.store, self.layer.recent
        if store not in self._operands:
            own: dict[str, Operand] = {
                "recent_keys": recent.keys, "recent_values": recent.values, "query_matrix": self.query_matrix.parts,
                "output_matrix": self.output_matrix.parts, "output_scale": self.output_matrix.scale,
            }  # fmt: skip
            self._operands[store] = Operands(span_operands(store, True) | own)
        return self._operands[store]

    def serves(self, group: QueryGroup, query: torch.Tensor, own: Own, softcap: float) -> bool:
        """See `turboquant.score.FusedKernel`."""
        dtype = self.layer.recent.keys.dtype
        half = dtype in (torch.bfloat16, torch.float16)
        same = all(x.dtype == dtype and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in (query, *own))
        return half and same and group.window % WINDOW_STEP == 0

    def attend(
        self, group: QueryGroup, query: torch.Tensor, own: Own, output: torch.Tensor, scale: float, softcap: float
    ) -> None:
        """Request by request: prefill batches hold few."""
        for row in group.requests:
            start, length, cached = group.plan.batch.host_lens[row]
            rows = slice(start, start + length)
            queries, own_rows = query[rows], (own[0][rows], own[1][rows])
            if not cached:
                output[rows] = self.attention(queries, *own_rows, scale, True, group.window, softcap)[0]
            elif group.window or softcap:
                attend = self._windowed if group.window else self._capped
                output[rows] = attend(group, row, queries, own_rows, cached, scale, softcap)
            else:
                self._staged(group, row, queries, own_rows, scale, output[rows])

    def variant(self, requests: int, new: int, query_heads: int) -> None:
        """See `turboquant.score.FusedKernel`: requests are served one by one."""

    def _staged(
        self, group: QueryGroup, row: int, query: torch.Tensor, own: Own, scale: float, output: torch.Tensor
    ) -> None:
        """Attention of a chunk into output [Q, H_q, d]: history in the codec's bases, own rows in the original one.

        The history first: while the device is at it, Python launches the rest.
        """
        key = (
            self.kind, row, query.shape[1], query.stride(0), output.stride(0), output.dtype,
            self.layer.store.pages.stride(),
        )  # fmt: skip
        plan = group.launches.get(key)
        if plan is None:
            plan = group.launches[key] = self._plan(group, row, query, output)
        rotated, total = torch.empty(query.shape, dtype=query.dtype, device=query.device), None
        operands = self.operands.joined(query=query, rotated=rotated, output=output)
        plan.rotate(operands)
        for piece in plan.pieces:
            keys, values = (rows.new_empty(piece.tokens, *rows.shape[1:]) for rows in own)
            lift = torch.empty(piece.spans, *own[0].shape[1:], device=query.device)
            decoded = operands.joined(keys=keys, values=values, lift=lift)
            for decode in piece.launches:
                decode(decoded)
            part = self.attention(rotated, keys, values, scale * self.query_matrix.scale, False, 0, 0.0)
            total = part if total is None else fold(total, part)
        assert total is not None, "there is a piece for every cached > 0"
        chunk = self.attention(query, *own, scale, True, 0, 0.0)
        names = ("history", "history_lse", "chunk", "chunk_lse")
        plan.finish(operands.joined(**dict(zip(names, (*total, *chunk), strict=True))))

    def _plan(self, group: QueryGroup, row: int, query: torch.Tensor, output: torch.Tensor) -> ChunkPlan:
        tokens, query_heads, _ = query.shape
        heads, (_, _, cached) = self.layer.store.num_kv_heads, group.plan.batch.host_lens[row]
        parts = {"CHUNK": CHUNK, "PARTS": len(self.query_matrix.parts), "ROWS": ROWS}
        rotate = Launch(
            _rotate_kernel, (-(-tokens * query_heads // heads // ROWS), heads), ("query", "query_matrix", "rotated"),
            (tokens, query.stride(0), heads), {"G": query_heads // heads, **self.sizes, **parts}, num_stages=2,
        )  # fmt: skip
        firsts = range(0, cached, WORKSPACE_TOKENS)
        pieces = [self._piece(group, row, first, min(cached, first + WORKSPACE_TOKENS), cached) for first in firsts]
        finish = Launch(
            _finish_kernel, (-(-tokens * query_heads // ROWS),),
            ("history", "history_lse", "chunk", "chunk_lse", "output_matrix", "output"),
            (tokens, output.stride(0), query_heads, "output_scale"),
            {**self.sizes, **parts, "PARTS": len(self.output_matrix.parts)}, num_stages=2,
        )  # fmt: skip
        return ChunkPlan(rotate, tuple(pieces), finish)

    def _piece(self, group: QueryGroup, row: int, first: int, last: int, cached: int) -> Piece:
        """Tokens [first, last) of a request in the codec's bases, keys whole; exact ones where the ring has them."""
        store, window, (blocks, index, flags) = self.layer.store, group.plan.window, group.lines[row]
        heads, dim, columns = store.num_kv_heads, store.format.head_dim, window.present.shape[1]
        strides = (heads * dim, dim) * 2
        launches = [
            plan_lift(store.codec, first, last),
            plan_decode(store, blocks, first, last - first, strides, rotated=True, lifted=True),
        ]
        if columns and (first < window.sinks or cached - window.recent < last):
            tables = ("key_rotation", "value_rotation", "gain", "keys", "values")
            exact = Launch(
                _exact_kernel, (-(-columns // 16), heads, 2), ("recent_keys", "recent_values", index, flags, *tables),
                (first, last - first, cached, self.layer.recent.keys.stride(0)),
                {"C": columns, "SINKS": window.sinks, **self.sizes, "CHUNK": 16, "T": 16},
            )  # fmt: skip
            launches.append(exact)
        return Piece(last - first, num_spans(store.codec, first, last), tuple(launches))

    def _windowed(
        self, group: QueryGroup, row: int, query: torch.Tensor, own: Own, cached: int, scale: float, softcap: float
    ) -> torch.Tensor:
        """Attention [Q, H_q, d] over what is left of the history within the window, and the own rows, at once."""
        first = max(0, cached - group.window + 1)
        span, shape = cached - first, own[0].shape[1:]
        keys, values = (rows.new_empty(span + len(rows), *shape) for rows in own)
        self._decode_plain(group, row, first, cached, cached, (keys[:span], values[:span]))
        keys[span:], values[span:] = own
        return self.attention(query, keys, values, scale, True, group.window, softcap)[0]

    def _capped(
        self, group: QueryGroup, row: int, query: torch.Tensor, own: Own, cached: int, scale: float, softcap: float
    ) -> torch.Tensor:
        """Attention [Q, H_q, d] over the history, piece by piece, and the own rows."""
        total = self.attention(query, *own, scale, True, 0, softcap)
        for first in range(0, cached, WORKSPACE_TOKENS):
            last = min(cached, first + WORKSPACE_TOKENS)
            keys, values = (rows.new_empty(last - first, *rows.shape[1:]) for rows in own)
            self._decode_plain(group, row, first, last, cached, (keys, values))
            total = fold(total, self.attention(query, keys, values, scale, False, 0, softcap))
        return total[0]

    def _decode_plain(self, group: QueryGroup, row: int, first: int, last: int, cached: int, out: Rows) -> None:
        """Tokens [first, last) of a request in the original basis, exact ones where the ring has them."""
        (blocks, _, _), window, recent = group.lines[row], group.plan.window, self.layer.recent
        decode_span(self.layer.store, blocks, first, last, out)
        start = cached - window.recent
        # (first token, column of token 0, end) of the sinks and of the last tokens
        for begin, origin, end in ((0, 0, min(window.sinks, start)), (start, start - window.sinks, cached)):
            tokens = range(max(first, begin, 0), min(last, end))
            if not tokens:
                continue
            columns, place = (slice(tokens.start - at, tokens.stop - at) for at in (origin, first))
            index, seen = window.index[row, columns], window.present[row, columns, None, None]
            for rows, exact in zip(out, (recent.keys, recent.values), strict=True):
                rows[place] = torch.where(seen, exact[index], rows[place])
