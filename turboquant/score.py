"""The read path: attention over {compressed history, exact recent tokens, own chunk}.

Every segment gives (out, lse), and `merge` folds them; an empty segment is (0, -inf), the identity of the merge
(FlashInfer's merge-state algebra).  The history needs no causal mask; only the own chunk is causal; decode is the
chunk of length 1.  Everything is vectorised over requests of similar query length, and over a tile of tokens, so
that transient memory does not grow with the context.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from turboquant.batch import AttentionBatch
from turboquant.capture import LayerCache, StepPlan

TILE_ELEMENTS = 1 << 24  # float32 numbers in the largest temporary of a tile (64 MiB)
Partial = tuple[torch.Tensor, torch.Tensor]


def merge(a: Partial, b: Partial) -> Partial:
    """Fold two segments: out [..., d], lse [...] (natural log; -inf for an empty one)."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    out = (lse_a - safe).exp()[..., None] * out_a + (lse_b - safe).exp()[..., None] * out_b
    return out, lse


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, softcap: float = 0.0
) -> Partial:
    """Softmax attention over one tile.

    query float32 [n, H_kv, G, Q, d], already scaled; keys, values [n, H_kv, T, d]; mask bool [n, Q or 1, T].
    Tokens that no row may see are blanked before the sum: their memory may hold anything (0 * NaN is NaN).
    Returns out [n, H_kv, G, Q, d] and lse [n, H_kv, G, Q].
    """
    seen = mask.any(1)[:, None, :, None]
    values = torch.where(seen, values.float(), 0.0)
    scores = query.flatten(2, 3) @ keys.float().transpose(-1, -2)
    scores = scores.unflatten(2, query.shape[2:4])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - torch.where(peak == -torch.inf, 0.0, peak)).exp()
    total = weights.sum(-1)
    out = (weights.flatten(2, 3) @ values).unflatten(2, query.shape[2:4])
    lse = torch.where(total > 0, peak.squeeze(-1) + total.log(), -torch.inf)
    return out / torch.where(total > 0, total, 1.0)[..., None], lse


@dataclass(frozen=True, eq=False)
class QueryGroup:
    """Requests of similar query length, padded to a rectangle.

    rows: int64 [n], request numbers; tokens: int64 [n, Q], query row of each (0 where padded); real: bool [n, Q];
    positions: int64 [n, Q], position of each query row in its sequence.
    """

    batch: AttentionBatch
    rows: torch.Tensor
    tokens: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, rows: torch.Tensor, length: int) -> "QueryGroup":
        column = torch.arange(length, device=rows.device)
        real = column < batch.query_lens[rows, None]
        tokens = torch.where(real, batch.query_start[rows, None] + column, 0)
        return cls(batch, rows, tokens, real, batch.history_lens[rows, None] + column)

    @property
    def history(self) -> torch.Tensor:
        """int64 [n], cached tokens of each request."""
        return self.batch.history_lens[self.rows]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x [T, H, d] as float32 [n, H, Q, d]; padded rows repeat a real one."""
        return x[self.tokens].float().transpose(1, 2)


@dataclass(frozen=True)
class HybridScorer:
    """Attention of a layer over its LayerCache.

    scale: factor of q.k; window: sliding window in tokens, the query's own included (0 = none); softcap: cap of the
    logits (0 = none).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0

    def attend(
        self,
        layer: LayerCache,
        plan: StepPlan,
        query: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        output: torch.Tensor,
        rows_by_length: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Write the attention of query [T, H_q, d] into output [T, H_q, d].

        own: keys and values [T, H_kv, d] of the step's rows, attended exactly and causally; None to attend to cached
        tokens only.  rows_by_length selects requests (default: all that have query rows); other rows of `output` stay
        as they are.
        """
        groups = plan.batch.rows_by_length() if rows_by_length is None else rows_by_length
        for length, rows in groups.items():
            group = QueryGroup.of(plan.batch, rows, length)
            heads = group.gather(query).unflatten(1, (layer.store.num_kv_heads, -1)) * self.scale  # [n, H_kv, G, Q, d]
            partial = self._history(layer, plan, group, heads)
            partial = merge(partial, self._recent(layer, plan, group, heads))
            if own is not None:
                partial = merge(partial, self._own_chunk(group, heads, *own))
            flat = partial[0].flatten(1, 2).transpose(1, 2)  # [n, Q, H_q, d]
            output[group.tokens[group.real]] = flat[group.real].to(output.dtype)

    def _history(self, layer: LayerCache, plan: StepPlan, group: QueryGroup, heads: torch.Tensor) -> Partial:
        """Compressed tokens that are not read exactly."""
        query = layer.codec.query(heads.flatten(2, 3)).view(heads.shape)
        partial = empty_partial(heads)
        for first, count in self._tiles(group, heads, layer.store.block_size):
            blocks = group.batch.block_table[group.rows, first : first + count].long()
            positions = self._positions(group, first * layer.store.block_size, count * layer.store.block_size)
            cached = (positions < group.history[:, None]) & ~plan.window.covers(group.batch, group.rows, positions)
            used = cached.unflatten(1, (count, -1)).any(2)
            keys, values = layer.store.read(torch.where(used, blocks, 0))
            mask = cached[:, None] & self._in_window(group, positions)
            partial = merge(partial, attend(query, keys, values, mask, self.softcap))
        return layer.codec.output(partial[0]), partial[1]

    def _recent(self, layer: LayerCache, plan: StepPlan, group: QueryGroup, heads: torch.Tensor) -> Partial:
        """Exact recent tokens of the ring."""
        index, present = plan.window.index[group.rows], plan.window.present[group.rows]
        if index.shape[1] == 0:
            return empty_partial(heads)
        positions = group.history[:, None] - index.shape[1] + torch.arange(index.shape[1], device=index.device)
        mask = present[:, None] & self._in_window(group, positions)
        keys, values = (x[index].transpose(1, 2) for x in (layer.recent.keys, layer.recent.values))
        return attend(heads, keys, values, mask, self.softcap)

    def _own_chunk(self, group: QueryGroup, heads: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        """The step's own rows, causal."""
        keys, values = group.gather(key), group.gather(value)
        partial = empty_partial(heads)
        step = tile_tokens(heads)
        for start in range(0, keys.shape[2], step):
            part = slice(start, start + step)
            positions = group.positions[:, part]
            causal = positions[:, None] <= group.positions[..., None]
            mask = causal & group.real[:, None, part] & self._in_window(group, positions)
            partial = merge(partial, attend(heads, keys[:, :, part], values[:, :, part], mask, self.softcap))
        return partial

    def _tiles(self, group: QueryGroup, heads: torch.Tensor, block_size: int) -> Iterator[tuple[int, int]]:
        """(first logical block, number of blocks) of each tile of the history."""
        total = -(-int(group.history.max()) // block_size)
        start = self._first_visible(group) // block_size
        step = max(1, tile_tokens(heads) // block_size)
        for first in range(start, total, step):
            yield first, min(step, total - first)

    def _first_visible(self, group: QueryGroup) -> int:
        if not self.window:
            return 0
        return max(0, int(group.history.min()) - self.window + 1)

    def _positions(self, group: QueryGroup, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count, device=group.rows.device).expand(len(group.rows), -1)

    def _in_window(self, group: QueryGroup, positions: torch.Tensor) -> torch.Tensor:
        """Sliding window of every query row: bool [n, Q or 1, t]."""
        if not self.window:
            return torch.ones_like(positions, dtype=torch.bool)[:, None]
        return positions[:, None] > group.positions[..., None] - self.window


def empty_partial(heads: torch.Tensor) -> Partial:
    """The identity of `merge` for queries [n, H_kv, G, Q, d]."""
    return torch.zeros_like(heads), heads.new_full(heads.shape[:-1], -torch.inf)


def tile_tokens(heads: torch.Tensor) -> int:
    """Tokens of a tile for queries [n, H_kv, G, Q, d], so that scores and decoded rows stay within TILE_ELEMENTS."""
    n, num_kv_heads, group, length, dim = heads.shape
    per_token = n * num_kv_heads * max(group * length, 2 * dim)
    return max(16, TILE_ELEMENTS // per_token)
