"""The read path: attention over {compressed history, exact recent tokens, own chunk}.

Every segment gives (out, lse), and `merge` folds them; an empty segment is (0, -inf), the identity of the merge
(FlashInfer's merge-state algebra).  The history needs no causal mask; only the own chunk is causal; decode is the
chunk of length 1.  Everything is vectorised over requests of similar query length, and over a tile of tokens, so
that transient memory does not grow with the context.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from turboquant.capture import LayerCache, StepPlan
from turboquant.checks import check_int, check_number, check_rows

TILE_ELEMENTS = 1 << 24  # float32 numbers in the largest temporary of a tile (64 MiB)
WORKSPACE_TOKENS = 16384  # tokens that are decoded at a time for a dense kernel
Partial = tuple[torch.Tensor, torch.Tensor]
Own = tuple[torch.Tensor, torch.Tensor]


def merge(a: Partial, b: Partial) -> Partial:
    """Fold two segments: out [..., d], lse [...] (natural log; -inf for an empty one)."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    out = (lse_a - safe).exp()[..., None] * out_a + (lse_b - safe).exp()[..., None] * out_b
    return out, lse


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    softcap: float = 0.0,
    shift: torch.Tensor | None = None,
) -> Partial:
    """Softmax attention over one tile.

    query float32 [n, H_kv, G, Q, d], already scaled; keys, values [n, H_kv, T, d]; mask bool [n, Q or 1, T];
    shift float32 [n, H_kv, G, Q, T], added to the logits.
    Tokens that no row may see are blanked before the sum: their memory may hold anything (0 * NaN is NaN).
    Returns out [n, H_kv, G, Q, d] and lse [n, H_kv, G, Q].
    """
    seen = mask.any(1)[:, None, :, None]
    values = torch.where(seen, values.float(), 0.0)
    scores = query.flatten(2, 3) @ keys.float().transpose(-1, -2)
    scores = scores.unflatten(2, query.shape[2:4])
    if shift is not None:
        scores = scores + shift
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
    """Requests of similar query length, padded to a rectangle, and what their rows may see; the same for all layers.

    What a layer asks for is computed once and kept for the other layers of the step.
    requests: n request numbers; length: Q; window: sliding window (0 = none); tile: tokens of a tile;
    launches: what kernels plan for the layers of a kind.
    """

    plan: StepPlan
    requests: Sequence[int]
    length: int
    window: int
    tile: int
    launches: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [n], the request numbers on the device, which is not waited for."""
        device = self.plan.batch.seq_lens.device
        return torch.tensor(self.requests, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    @cached_property
    def real(self) -> torch.Tensor:
        """bool [n, Q]; False for padded query rows."""
        return torch.arange(self.length, device=self.rows.device) < self.plan.batch.query_lens[self.rows, None]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """int64 [n, Q], query row of each (0 where padded)."""
        column = torch.arange(self.length, device=self.rows.device)
        return torch.where(self.real, self.plan.batch.query_start[self.rows, None] + column, 0)

    @cached_property
    def cached(self) -> torch.Tensor:
        """int64 [n], cached tokens of each request."""
        return self.plan.batch.history_lens[self.rows]

    @cached_property
    def entries(self) -> torch.Tensor:
        """int32 [n, 4], `AttentionBatch.entries` of these requests; the batch's own tensor where they are all."""
        entries = self.plan.batch.entries
        return entries if len(self.requests) == len(entries) else entries[self.rows]

    @cached_property
    def most_cached(self) -> int:
        """Cached tokens of the longest request, as the host knows them."""
        return max(self.plan.batch.host_lens[request][2] for request in self.requests)

    @cached_property
    def lines(self) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each request its blocks, contiguous, and its `ExactWindow.index` and `.flags`."""
        window, table = self.plan.window, self.plan.batch.block_table
        return {row: (table[row].contiguous(), window.index[row], window.flags[row]) for row in self.requests}

    @cached_property
    def blocks(self) -> torch.Tensor:
        """integer [n, M], block tables."""
        return self.plan.batch.block_table[self.rows]

    @cached_property
    def exact(self) -> torch.Tensor:
        """bool [n, C], which of the sinks and the last cached tokens are read exactly (`ExactWindow`)."""
        return self.plan.window.present[self.rows]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x [T, H, d] as float32 [n, H, Q, d]; padded rows repeat a real one."""
        return x[self.tokens].float().transpose(1, 2)

    @cached_property
    def history(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Compressed tokens per tile: position of the first, blocks int64 [n, count], mask bool [n, Q or 1, T];
        T = count * block_size.
        """
        return list(self._history())

    @cached_property
    def recent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact tokens: positions in the ring int64 [n, C], mask bool [n, Q or 1, C]."""
        index = self.plan.window.index[self.rows]
        return index, self._in_window(self.exact[:, None], self.plan.window.positions(self.cached))

    @cached_property
    def chunk(self) -> list[tuple[slice, torch.Tensor]]:
        """The step's own rows per tile, causal: their columns, mask bool [n, Q, columns]."""
        return list(self._chunk())

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [n, Q], position of each query row in its sequence."""
        return self.cached[:, None] + torch.arange(self.length, device=self.rows.device)

    def _history(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        batch, size = self.plan.batch, self.plan.batch.block_size
        cached, step = self.cached, max(1, self.tile // size)
        end = -(-int(cached.max()) // size)
        start = max(0, int(cached.min()) - self.window + 1) // size if self.window else 0
        for first in range(start, end, step):
            count = min(step, end - first)
            positions = torch.arange(first * size, (first + count) * size, device=cached.device).expand(len(cached), -1)
            seen = (positions < cached[:, None]) & ~self.plan.window.covers(batch, self.rows, positions)
            mask = self._in_window(seen[:, None], positions)
            if not mask.any():
                continue
            blocks = self.blocks[:, first : first + count].long()
            used = mask.any(1).unflatten(1, (count, -1)).any(2)
            yield first * size, torch.where(used, blocks, 0), mask

    def _chunk(self) -> Iterator[tuple[slice, torch.Tensor]]:
        queries = self.positions
        for start in range(0, self.length, self.tile):
            part = slice(start, start + self.tile)
            causal = queries[:, None, part] <= queries[:, :, None]
            yield part, self._in_window(causal & self.real[:, None, part], queries[:, part])

    def _in_window(self, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the sliding window of every query row to mask [n, Q or 1, t] over positions [n, t]."""
        if not self.window:
            return mask
        return mask & (positions[:, None] > self.positions[..., None] - self.window)


class FusedKernel(Protocol):
    """Attention of a whole group: history, exact tokens and own rows.  nbytes: bytes of its tables."""

    nbytes: int

    def serves(self, group: QueryGroup, query: torch.Tensor, own: Own, softcap: float) -> bool:
        """Whether the group's shapes and dtypes are within what the kernel can do."""

    def attend(
        self, group: QueryGroup, query: torch.Tensor, own: Own, output: torch.Tensor, scale: float, softcap: float
    ) -> None:
        """Write the group's rows of output [T, H_q, d]; arguments as in `HybridScorer`."""

    def variant(self, requests: int, new: int, query_heads: int) -> Hashable:
        """Steps of as many new rows a request for which this is the same launch the same compiled kernels."""


# (layer, group, rotated query and waves (`KVCodec.waves`) [n, H_kv, G, Q, d], softcap) -> Partial in the value basis
HistoryKernel = Callable[[LayerCache, QueryGroup, torch.Tensor, torch.Tensor, float], Partial]


@dataclass(frozen=True)
class HybridScorer:
    """Attention of a layer over its LayerCache.

    scale: factor of q.k; window: sliding window in tokens, the query's own included (0 = none); softcap: cap of the
    logits (0 = none); history: kernel for the compressed tokens, None for the torch twin; fused: kernels for whole
    groups, of which the first that serves a group takes it.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    history: HistoryKernel | None = None
    fused: tuple[FusedKernel, ...] = ()

    def __post_init__(self) -> None:
        check_number("scale", self.scale)
        check_int("window", self.window)
        check_number("softcap", self.softcap, least=0)

    def attend(
        self,
        layer: LayerCache,
        plan: StepPlan,
        query: torch.Tensor,
        own: Own | None,
        output: torch.Tensor,
        rows_by_length: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Write the attention of query [T, H_q, d] into output [T, H_q, d].

        own: keys and values [T, H_kv, d] of the step's rows, attended exactly and causally; None to attend to cached
        tokens only.  rows_by_length selects requests (default: all that have query rows); other rows of `output` stay
        as they are.  Fewer rows than the plan's, other heads than the layer's, and integers are refused.
        """
        known = rows_by_length is None or plan.batch.lens is not None  # to the host, which must not wait for a device
        check_step(layer, plan.batch.num_rows if known else 0, query, own, output)
        selected = plan.batch.rows_by_length() if rows_by_length is None else rows_by_length
        for length, rows in selected.items():
            group = self._group(plan, length, rows, tile_tokens(len(rows), length, query.shape[1], query.shape[2]))
            if own is not None and (kernel := self._fused(group, query, own)) is not None:
                kernel.attend(group, query, own, output, self.scale, self.softcap)
                continue
            heads = group.gather(query).unflatten(1, (layer.store.num_kv_heads, -1)) * self.scale  # [n, H_kv, G, Q, d]
            partial = merge(self._history(layer, group, heads), self._recent(layer, group, heads))
            if own is not None:
                partial = merge(partial, self._own_chunk(group, heads, *own))
            flat = partial[0].flatten(1, 2).transpose(1, 2)  # [n, Q, H_q, d]
            output[group.tokens[group.real]] = flat[group.real].to(output.dtype)

    def _fused(self, group: QueryGroup, query: torch.Tensor, own: Own) -> FusedKernel | None:
        return next((kernel for kernel in self.fused if kernel.serves(group, query, own, self.softcap)), None)

    def _group(self, plan: StepPlan, length: int, rows: Sequence[int], tile: int) -> QueryGroup:
        """Made by the first layer that needs it in a step, and kept with the step."""
        key = (id(rows), length, self.window, tile)
        if key not in plan.groups:
            # A plan without groups: one that led back here would be freed by the garbage collector alone, some time.
            plan.groups[key] = QueryGroup(StepPlan(plan.batch, plan.window), rows, length, self.window, tile)
        return plan.groups[key]

    def _history(self, layer: LayerCache, group: QueryGroup, heads: torch.Tensor) -> Partial:
        """Cached keys lack their centres, whose logits are the same for all tokens of a span."""
        query = layer.codec.query(heads.flatten(2, 3)).view(heads.shape)
        waves = layer.codec.waves(heads.flatten(2, 3)).view(heads.shape)
        partial = (self.history or twin_history)(layer, group, query, waves, self.softcap)
        return layer.codec.output(partial[0]), partial[1]

    def _recent(self, layer: LayerCache, group: QueryGroup, heads: torch.Tensor) -> Partial:
        index, mask = group.recent
        if not index.shape[1]:
            return empty_partial(heads)
        keys, values = (x[index].transpose(1, 2) for x in (layer.recent.keys, layer.recent.values))
        return attend(heads, keys, values, mask, self.softcap)

    def _own_chunk(self, group: QueryGroup, heads: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        keys, values = group.gather(key), group.gather(value)
        partial = empty_partial(heads)
        for part, mask in group.chunk:
            partial = merge(partial, attend(heads, keys[:, :, part], values[:, :, part], mask, self.softcap))
        return partial


def check_step(layer: LayerCache, count: int, query: torch.Tensor, own: Own | None, output: torch.Tensor) -> None:
    """Refuse tensors that are not those of a step of `count` rows in this layer."""
    heads, dim, device = layer.store.num_kv_heads, layer.codec.key.dim, layer.store.pages.device
    check_rows("query", query, (None, None, dim), "[T, H_q, d]", device)
    if query.shape[1] % heads:
        raise ValueError(f"query has {query.shape[1]} heads, expected a multiple of {heads}")
    check_rows("output", output, (None, query.shape[1], dim), "[T, H_q, d]", device)
    if own is not None:
        check_rows("key", own[0], (None, heads, dim), "[T, H_kv, d]", device)
        check_rows("value", own[1], (None, heads, dim), "[T, H_kv, d]", device)
    rows = [len(x) for x in (query, output, *(own or ()))]
    if min(rows) < count:
        raise ValueError(f"query, output, key, value have {rows} rows, the step has {count}")


def twin_history(
    layer: LayerCache, group: QueryGroup, query: torch.Tensor, waves: torch.Tensor, softcap: float
) -> Partial:
    """Compressed tokens of a group, in the codec's bases; what a HistoryKernel must equal."""
    partial = empty_partial(query)
    for first, blocks, mask in group.history:
        shift = layer.codec.center_logits(waves, torch.arange(first, first + mask.shape[-1], device=mask.device))
        partial = merge(partial, attend(query, *layer.store.read(blocks), mask, softcap, shift))
    return partial


def empty_partial(heads: torch.Tensor) -> Partial:
    """The identity of `merge` for queries [n, H_kv, G, Q, d]."""
    return torch.zeros_like(heads), heads.new_full(heads.shape[:-1], -torch.inf)


def tile_tokens(n: int, length: int, num_heads: int, dim: int) -> int:
    """Tokens of a tile so that its scores and its decoded rows stay within TILE_ELEMENTS."""
    return max(16, TILE_ELEMENTS // (n * num_heads * max(length, 2 * dim)))
