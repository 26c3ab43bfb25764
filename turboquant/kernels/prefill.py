"""Attention of long query chunks: history is decoded piece by piece into a small workspace, for a dense kernel to read.

Many query rows share every cached token, so tokens are decoded once per piece instead of once per tile of rows, and
the dense kernel (FlashAttention where the engine has it) runs at its full speed.  The workspace holds
`WORKSPACE_TOKENS` tokens, whatever the context.  Exact tokens of the ring replace their decoded selves, so that the
history is one segment in the codec's bases; the chunk's own rows are attended causally in the original one.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from turboquant.capture import LayerCache
from turboquant.kernels.matrix import SplitMatrix
from turboquant.kernels.transcode import decode_rows
from turboquant.score import Own, QueryGroup

WORKSPACE_TOKENS = 16384
ROWS = 32  # rows of a program of the fold
# (query [Q, H_q, d], keys and values [L, H_kv, d], scale, causal) -> out [Q, H_q, d], lse float32 [H_q, Q] (natural)
DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]


@triton.jit
def _fold_kernel(
    TOTAL, TOTAL_LSE, PART, PART_LSE, SHIFT, rows, heads, SHIFTED: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """total := total merged with part; rows are (token, head).  SHIFT [tokens, heads] is added to the part's logits."""
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = row < rows
    tokens = rows // heads
    place = row % heads * tokens + row // heads
    a = tl.load(TOTAL_LSE + place, mask=real, other=0.0)
    b = tl.load(PART_LSE + place, mask=real, other=0.0)
    if SHIFTED:
        b += tl.load(SHIFT + row, mask=real, other=0.0)
    peak = tl.maximum(a, b)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    first, second = tl.exp(a - safe), tl.exp(b - safe)
    scale = 1.0 / tl.maximum(first + second, 1e-30)
    line = row.to(tl.int64)[:, None] * D + dim[None, :]
    mask = real[:, None] & (dim < D)[None, :]
    total = tl.load(TOTAL + line, mask=mask, other=0.0) * (first * scale)[:, None]
    part = tl.load(PART + line, mask=mask & (second > 0)[:, None], other=0.0).to(tl.float32)
    tl.store(TOTAL + line, total + part * (second * scale)[:, None], mask=mask)
    tl.store(TOTAL_LSE + place, safe + tl.log(first + second), mask=real)


def fold(
    total: torch.Tensor,
    total_lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    shift: torch.Tensor | None = None,
) -> None:
    """Merge a segment into float32 total [Q, H, d], total_lse [H, Q] in place; the twin is `turboquant.score.merge`.

    part [Q, H, d] of any float dtype, part_lse float32 [H, Q]; shift float32 [Q, H] is added to its logits.
    """
    tokens, heads, dim = total.shape
    _fold_kernel[(triton.cdiv(tokens * heads, ROWS),)](
        total, total_lse, part.contiguous(), part_lse.contiguous(), total_lse if shift is None else shift,
        tokens * heads, heads, SHIFTED=shift is not None, D=dim, DIMS=triton.next_power_of_2(dim), ROWS=ROWS,
    )  # fmt: skip


class StagedPrefill:
    """`turboquant.score.FusedKernel` for chunks of any length, on top of a dense attention."""

    def __init__(self, layer: LayerCache, attention: DenseAttention):
        self.layer, self.attention = layer, attention
        codec, dtype = layer.codec, layer.recent.keys.dtype
        self.query_matrix = SplitMatrix.of(codec.query_matrix.mT, dtype)
        self.output_matrix = SplitMatrix.of(codec.value.rotation.matrix.mT, dtype)
        self.nbytes = self.query_matrix.parts.nbytes + self.output_matrix.parts.nbytes

    def serves(self, group: QueryGroup, query: torch.Tensor, own: Own, softcap: float) -> bool:
        """Without sliding window and softcap: the dense attention would cap before the centre's shift."""
        dtype = self.layer.recent.keys.dtype
        half = dtype in (torch.bfloat16, torch.float16)
        return group.window == 0 and softcap == 0 and half and all(x.dtype == dtype for x in (query, *own))

    def attend(
        self, group: QueryGroup, query: torch.Tensor, own: Own, output: torch.Tensor, scale: float, softcap: float
    ) -> None:
        """Request by request: prefill batches hold few."""
        for row in group.host_rows:
            start, length, cached = group.plan.batch.host_lens[row]
            rows = slice(start, start + length)
            out, lse = self.attention(query[rows], own[0][rows], own[1][rows], scale, True)
            if not cached:
                output[rows] = out
                continue
            total, total_lse = self._history(group, row, query[rows], cached, scale)
            total = self.output_matrix.products(total.to(query.dtype)).float().mul_(self.output_matrix.scale)
            fold(total, total_lse, out, lse)
            output[rows] = total

    def _history(
        self, group: QueryGroup, row: int, query: torch.Tensor, cached: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the cached tokens of a request: float32 [Q, H_q, d] in the values' basis, lse [H_q, Q]."""
        heads = query.unflatten(1, (self.layer.store.num_kv_heads, -1))
        rotated = self.query_matrix.products(heads.transpose(0, 1).flatten(1, 2))  # [H_kv, Q * G, d]
        rotated = rotated.unflatten(1, (len(query), -1)).transpose(0, 1).flatten(1, 2)
        shift = self.layer.codec.center_logit(heads.float()).flatten(1) * scale
        total = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        total_lse = torch.full((query.shape[1], len(query)), -torch.inf, device=query.device)
        for first in range(0, cached, WORKSPACE_TOKENS):
            last = min(cached, first + WORKSPACE_TOKENS)
            keys, values = self._decode(group, row, first, last, cached, query.dtype)
            part = self.attention(rotated, keys, values, scale * self.query_matrix.scale, False)
            fold(total, total_lse, *part, shift)
        return total, total_lse

    def _decode(
        self, group: QueryGroup, row: int, first: int, last: int, cached: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [first, last) of a request in the codec's bases, exact ones where the ring has them."""
        store, batch, window = self.layer.store, group.plan.batch, group.plan.window
        position = torch.arange(first, last, device=store.pages.device)
        block = batch.block_table[row, position // store.block_size].long()
        # One row more, for what lies outside.
        shape = (last - first + 1, store.num_kv_heads, store.format.head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=position.device) for _ in range(2))
        slots = block * store.block_size + position % store.block_size
        decode_rows(store, slots, dtype, rotated=True, out=(keys[:-1], values[:-1]))
        width = window.present.shape[1]
        if cached - width < last and width:
            place = torch.arange(cached - width, cached, device=position.device) - first
            inside = window.present[row] & (place >= 0) & (place < last - first)
            place = torch.where(inside, place, last - first)
            index, codec, recent = window.index[row], self.layer.codec, self.layer.recent
            affine = (recent.keys[index].float() - codec.transform.center) * codec.transform.gain
            # By matrix: exact tokens need not have the encoder's bits, and butterflies are many small launches.
            keys[place] = (affine @ codec.key.rotation.matrix.mT).to(dtype)
            values[place] = (recent.values[index].float() @ codec.value.rotation.matrix.mT).to(dtype)
        return keys[:-1], values[:-1]
