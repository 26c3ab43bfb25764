"""The write path: every token is encoded into its page, and recent tokens are also kept exactly.

The exact ring is a pool of entries, each for the tokens of a part of a physical block.  Encoding is write-through, so
a lost ring entry is never wrong, only less exact.  Rule: a cached token is read exactly iff it is among the last
`window` tokens before the step's own rows, or among the first `sinks` tokens of its sequence, and its ring entry is
still there.  Sinks are what attention falls back on: their keys lie far from the others, and quantise worst where they
count most.

Replacement is least-recently-used, not first-in-first-out: every step touches the live windows of its batch, so a
long prompt that streams through the ring cannot push out the windows of running requests; parts that have left their
request's window go first.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from turboquant.batch import AttentionBatch
from turboquant.checks import check_float_dtype, check_int
from turboquant.codec import KVCodec, rotary_bytes
from turboquant.store import CompressedBlockStore

ENTRY_TOKENS = 16  # of a ring entry: windows end within blocks, and those of hybrid models are large


def entry_size(block_size: int) -> int:
    """Tokens of a ring entry, which holds a part of a block."""
    return math.gcd(block_size, ENTRY_TOKENS)


def window_entries(window: int, size: int) -> int:
    """Entries of `size` tokens that `window` cached tokens and the token being written can touch."""
    return -(-window // size) + 1 if window else 0


def exact_entries(window: int, sinks: int, block_size: int) -> int:
    """Ring entries of a request: of its window, and of its sinks, which lie in its first block."""
    size = entry_size(block_size)
    return window_entries(window, size) + -(-min(sinks, block_size) // size)


def exact_positions(cached: torch.Tensor, columns: int, sinks: int) -> torch.Tensor:
    """`ExactWindow.positions` of so many columns, `sinks` of which are the first tokens."""
    column = torch.arange(columns, device=cached.device)
    start = cached[:, None] - (columns - sinks)  # of the last tokens
    sink = torch.where(column < start, column, -1)
    return torch.where(column < sinks, sink, (start + column - sinks).clamp(min=-1))


FREE, RETIRED = -1, 0  # clock of entries without a part, and of parts that have left their request's window


@dataclass(frozen=True, eq=False)
class ExactWindow:
    """What is read exactly of every request: its first `sinks` tokens, and its last cached ones, oldest first.

    index: int64 [R, C], position in the flattened ring (0 where absent); present: bool [R, C].  A token that is among
    both is in its column among the last.
    """

    index: torch.Tensor
    present: torch.Tensor
    sinks: int = 0

    def of(self, count: int) -> "ExactWindow":
        """Of the first `count` requests."""
        return ExactWindow(self.index[:count], self.present[:count], self.sinks)

    @cached_property
    def flags(self) -> torch.Tensor:
        """`present` as uint8, for kernels."""
        return self.present.view(torch.uint8)

    @property
    def recent(self) -> int:
        """Columns of last tokens."""
        return self.present.shape[1] - self.sinks

    def positions(self, cached: torch.Tensor) -> torch.Tensor:
        """Position int64 [n, C] of each column's token in sequences of `cached` int64 [n] tokens; -1 for none."""
        return exact_positions(cached, self.present.shape[1], self.sinks)

    def covers(self, batch: AttentionBatch, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Whether the requests `rows` [n] read `positions` [n, t] exactly: bool [n, t]."""
        columns = self.present.shape[1]
        if columns == 0:
            return torch.zeros_like(positions, dtype=torch.bool)
        behind = positions - (batch.history_lens[rows, None] - columns)
        column = torch.where(behind >= self.sinks, behind, positions)
        inside = (column < columns) & ((behind >= self.sinks) | (positions < self.sinks))
        return inside & self.present[rows].gather(1, column.clamp(0, columns - 1))


class ExactRing:
    """Which tokens have exact entries; shared by the layers of a KV-cache group, whose data lie in `RingData`.

    capacity: number of entries, of `size` tokens each; slot // size is the part of a block that an entry may hold.
    What n requests read exactly always fits into n * exact_entries entries as long as every running request is in every
    batch; one that sits out steps can lose exactness to those that came after it.
    sinks: first tokens that are kept exactly, a block of them at most.
    Tables: entry_of_part int64 [num_blocks * block_size / size] (-1 = none), owner int64 [capacity] (-1 = free), used
    int64 [capacity] (clock of last use), written bool [capacity, size].
    number int32 [num_blocks]: which block of its sequence a physical block is; of prefixes that requests share, too.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int,
        capacity: int,
        device: torch.device | str = "cpu",
        sinks: int = 0,
    ):
        check_int("block_size", block_size, least=1)
        sizes = {"num_blocks": num_blocks, "window": window, "capacity": capacity, "sinks": sinks}
        for name, size in sizes.items():
            check_int(name, size)
        self.block_size, self.capacity, self.size = block_size, capacity, entry_size(block_size)
        self.window, self.sinks = (window, min(sinks, block_size)) if capacity else (0, 0)
        self.step = 0  # the clock; two ticks a step
        # One more than is used of each: where writes go that have no target, so that nothing waits for a count.
        self._tables = (
            torch.full((num_blocks * self.parts + 1,), -1, device=device),
            torch.full((capacity + 1,), -1, device=device),
            torch.full((capacity + 1,), FREE, device=device),
            torch.zeros(capacity + 1, self.size, dtype=torch.bool, device=device),
        )
        self.entry_of_part, self.owner, self.used, self.written = (table[:-1] for table in self._tables)
        self._numbers = torch.zeros(num_blocks + 1, dtype=torch.int32, device=device)
        self.number = self._numbers[:-1]

    @property
    def parts(self) -> int:
        """Entries that a whole block takes."""
        return self.block_size // self.size

    @property
    def columns(self) -> int:
        """Tokens of a request that are read exactly, at most."""
        return self.sinks + self.window

    @property
    def tokens_per_request(self) -> int:
        """Exact tokens that the entries of one request hold."""
        return exact_entries(self.window, self.sinks, self.block_size) * self.size

    @property
    def tokens(self) -> int:
        """Exact tokens that the entries hold."""
        return self.capacity * self.size

    @property
    def num_blocks(self) -> int:
        return len(self.number)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._numbers.nbytes + sum(table.nbytes for table in self._tables)

    def plan(self, batch: AttentionBatch) -> ExactWindow:
        """Start a step: touch what is live, give entries to the parts written now, and locate what is exact."""
        self.step += 2
        self._number_written(batch)
        wanted = [self._plan_window(batch)] if self.window else []
        if self.sinks:
            self._touch(self._first_parts(batch, (batch.seq_lens > 0)[:, None]), self.step)
            wanted.append(self._first_parts(batch, self._begins(batch)))
        if wanted:
            self._assign(torch.cat(wanted, 1))
        return self.locate(batch)

    def _number_written(self, batch: AttentionBatch) -> None:
        """Note the numbers of the blocks that are written now."""
        column = torch.arange(batch.block_table.shape[1], device=batch.seq_lens.device)
        first, last = (x[:, None] // self.block_size for x in (batch.history_lens, batch.seq_lens - 1))
        written = (column >= first) & (column <= last) & (batch.query_lens > 0)[:, None]
        blocks = torch.where(written, batch.block_table.long(), len(self.number))
        self._numbers[blocks] = column.int().expand_as(blocks)

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions int64 [N] in their sequences of the tokens in `slots` [N]; anything for slots below 0."""
        blocks = slots.clamp(min=0) // self.block_size
        return self.number[blocks].long() * self.block_size + slots.clamp(min=0) % self.block_size

    def _plan_window(self, batch: AttentionBatch) -> torch.Tensor:
        """Touch the parts of the windows; parts int64 [R, n] that are written now and read by the next steps."""
        history, seq = batch.history_lens, batch.seq_lens
        kept = seq - 1 - self.window  # where the windows of the next steps begin
        self._touch(self._parts_between(batch, history - self.window - self.size, kept), RETIRED)
        # Read by this step only: they give way to what the next steps read.
        self._touch(self._parts_between(batch, history - self.window, history), self.step - 1)
        self._touch(self._parts_between(batch, kept, history), self.step)
        return self._parts_between(batch, torch.maximum(history, kept + 1), seq)

    def _begins(self, batch: AttentionBatch) -> torch.Tensor:
        """Parts that requests write sinks into and that are not in their windows anyway: bool [R, n]."""
        start = torch.arange(0, self.sinks, self.size, device=batch.seq_lens.device)
        end, history, seq = start + self.size, batch.history_lens[:, None], batch.seq_lens[:, None]
        writes = (history < end.clamp(max=self.sinks)) & (seq > torch.maximum(history, start))
        return writes & (seq - self.window >= end) if self.window else writes

    def _first_parts(self, batch: AttentionBatch, mask: torch.Tensor) -> torch.Tensor:
        """Parts of the requests' sinks in a mask [R, n or 1]: int64 [R, n], -1 for the others."""
        first = batch.block_table[:, :1].long() * self.parts
        return torch.where(mask, first + torch.arange(-(-self.sinks // self.size), device=first.device), -1)

    def locate(self, batch: AttentionBatch) -> ExactWindow:
        """Where each request's exact tokens are; changes nothing."""
        positions = exact_positions(batch.history_lens, self.columns, self.sinks)
        rows = torch.arange(len(positions), device=positions.device)
        slots = batch.blocks_at(rows, positions) * self.block_size + positions % self.block_size
        index, present = self.lookup(torch.where(positions >= 0, slots, -1))
        return ExactWindow(index, present, self.sinks)

    def accept(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the tokens of `slots` int64 [N] as exact where their part has an entry.

        Returns their row numbers in `slots` and their positions in the flattened ring, both int64 [n].  A token
        whose part has an entry is always taken, so an entry never holds a block's earlier contents.
        """
        entry = torch.where(slots >= 0, self.entry_of_part[slots.clamp(min=0) // self.size], -1)
        rows = (entry >= 0).nonzero().squeeze(1)
        index = entry[rows] * self.size + slots[rows] % self.size
        self.written.view(-1)[index] = True
        return rows, index

    def lookup(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring positions int64 of `slots` [...] (0 where absent) and whether each holds that token: bool [...]."""
        if not self.capacity:
            return torch.zeros_like(slots), torch.zeros_like(slots, dtype=torch.bool)
        entry = self.entry_of_part[slots.clamp(min=0) // self.size]
        index = entry.clamp(min=0) * self.size + slots.clamp(min=0) % self.size
        present = (entry >= 0) & (slots >= 0) & self.written.view(-1)[index]
        return torch.where(present, index, 0), present

    def clear(self) -> None:
        """Forget every entry."""
        self.entry_of_part.fill_(-1)
        self.owner.fill_(-1)
        self.used.fill_(FREE)
        self.written.zero_()

    def _parts_between(self, batch: AttentionBatch, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Parts that hold positions [start, end) of the requests: int64 [R, n], -1 for none."""
        first = start.clamp(min=0) // self.size
        logical = first[:, None] + torch.arange(window_entries(self.window, self.size) + 1, device=first.device)
        rows = torch.arange(len(first), device=first.device)
        found = batch.blocks_at(rows, logical * self.size) * self.parts + logical % self.parts
        return torch.where(logical * self.size < end[:, None], found, -1)

    def _touch(self, parts: torch.Tensor, clock: int) -> None:
        entry = torch.where(parts >= 0, self.entry_of_part[parts.clamp(min=0)], -1)
        self._tables[2][torch.where(entry >= 0, entry, self.capacity)] = clock

    def _assign(self, parts: torch.Tensor) -> None:
        """Give each part an entry, least recently used first; parts beyond the free entries get none."""
        self._touch(parts, self.step)
        parts = parts.flatten()
        missing = (parts >= 0) & (self.entry_of_part[parts.clamp(min=0)] < 0)
        oldest = self.used.argsort(stable=True)
        rank = (missing.cumsum(0) - 1).clamp(0, self.capacity - 1)
        victim = oldest[rank]
        given = missing & (missing.cumsum(0) <= (self.used < self.step).sum())
        victim = torch.where(given, victim, self.capacity)
        entry_of_part, owner, used, written = self._tables
        evicted, nowhere = owner[victim], len(self.entry_of_part)
        entry_of_part[torch.where(given & (evicted >= 0), evicted, nowhere)] = -1
        entry_of_part[torch.where(given, parts, nowhere)] = victim
        owner[victim], used[victim], written[victim] = torch.where(given, parts, -1), self.step, False


# (ring, batch, lines, window): `ExactRing.plan` into window, `AttentionBatch.entries` into lines int32 [R, 4]
PlanKernel = Callable[[ExactRing, AttentionBatch, torch.Tensor, ExactWindow], None]


def plan_in_torch(ring: ExactRing, batch: AttentionBatch, lines: torch.Tensor, window: ExactWindow) -> None:
    """The twin of a `PlanKernel`."""
    lines.copy_(batch.computed_entries())
    planned = ring.plan(batch)
    window.index.copy_(planned.index)
    window.present.copy_(planned.present)


class RingData:
    """Exact keys and values of one layer: [tokens, H_kv, d] in the cache's dtype, `ExactRing.tokens` or more."""

    def __init__(self, tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str):
        check_float_dtype(dtype)
        self.keys = torch.zeros(tokens, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


# (layer, ring, keys, values, slots): what `KVCaptureEngine.ingest` does, in one launch
EncodeKernel = Callable[["LayerCache", ExactRing, torch.Tensor, torch.Tensor, torch.Tensor], None]


class LayerCache:
    """Everything that one layer keeps: compressed pages and exact recent tokens.

    encode: kernel that writes a step's tokens (arguments of `KVCaptureEngine.ingest` after the ring), None for torch.
    """

    encode: EncodeKernel | None = None

    def __init__(self, store: CompressedBlockStore, recent: RingData):
        self.codec, self.store, self.recent = store.codec, store, recent

    def ingest(self, ring: ExactRing, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write a step's tokens: keys, values [N, H_kv, d], slots int64 [N] (below 0 = padding, skipped)."""
        self.store.check_tokens(slots, keys, values)
        slots = slots[: len(keys)]
        if self.encode is not None:
            self.encode(self, ring, keys[: len(slots)], values[: len(slots)], slots)
            return
        self.store.write(slots, keys, values, ring.positions(slots))
        rows, index = ring.accept(slots)
        self.recent.keys[index] = keys[rows].to(self.recent.keys.dtype)
        self.recent.values[index] = values[rows].to(self.recent.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of pages, exact tokens and codec tables."""
        return self.store.nbytes + self.recent.nbytes + self.codec.nbytes


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A batch with the exact window of each request; made once per step and used by every layer.

    groups: what the scorer plans for the step, by what it depends on.
    """

    batch: AttentionBatch
    window: ExactWindow
    groups: dict[Hashable, Any] = field(default_factory=dict)


class KVCaptureEngine:
    """The write path of one KV-cache group: one exact ring, many layers.

    window, sinks: recent and first tokens to keep exactly; capacity: ring entries (`exact_entries` a request).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int,
        capacity: int,
        device: torch.device | str = "cpu",
        sinks: int = 0,
    ):
        self.ring = ExactRing(num_blocks, block_size, window, capacity if window or sinks else 0, device, sinks)
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, torch.device(device)
        self.layers: dict[str, LayerCache] = {}

    def add_layer(self, name: str, codec: KVCodec, num_kv_heads: int, dtype: torch.dtype) -> LayerCache:
        """Allocate the pages and the exact tokens of a layer; all memory of the layer is taken here.

        ValueError for a name that there is already, other heads than the codec's, or a dtype that no model computes in.
        """
        if name in self.layers:
            raise ValueError(f"there is a layer {name!r} already")
        store = CompressedBlockStore(codec, self.num_blocks, num_kv_heads, self.block_size, self.device)
        recent = RingData(self.ring.tokens, num_kv_heads, codec.key.dim, dtype, self.device)
        self.layers[name] = LayerCache(store, recent)
        return self.layers[name]

    def begin_step(self, batch: AttentionBatch) -> StepPlan:
        """Plan a step; before its first `ingest`, and once for all layers.

        ValueError for blocks of another size than the engine's.
        """
        if batch.block_size != self.block_size:
            raise ValueError(f"the batch has block_size={batch.block_size}, the engine {self.block_size}")
        return StepPlan(batch, self.ring.plan(batch))

    def ingest(self, layer: LayerCache, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """`LayerCache.ingest` of one of the engine's layers."""
        layer.ingest(self.ring, keys, values, slots)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor of the group: pages, exact tokens, codec tables, ring tables."""
        layers = self.layers.values()
        return self.ring.nbytes + sum(layer.nbytes for layer in layers) + rotary_bytes(layer.codec for layer in layers)
