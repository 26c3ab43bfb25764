"""One step of one KV-cache group, as the paged layout describes it.

Everything is addressed by physical slot (block_id * block_size + offset); nothing is keyed by request.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from turboquant.checks import check_indices, check_int


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """R requests whose query rows lie one after another.

    query_start: int64 [R+1], first query row of each request; its last entry is the number of rows.
    seq_lens: int64 [R], tokens of each request after this step, its own rows included; 0 for padding.
    block_table: integer [R, M], physical block of each logical block; entries beyond a sequence are never read.
    lens: `host_lens` where they are known without asking the device; lines: `entries` where they lie already.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    lens: list[tuple[int, int, int]] | None = None
    lines: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, least=1)
        check_indices("seq_lens", self.seq_lens, (None,), "[R]")
        check_indices("query_start", self.query_start, (len(self.seq_lens) + 1,), "[R + 1] for R seq_lens")
        check_indices("block_table", self.block_table, (len(self.seq_lens), None), "[R, M]")

    @cached_property
    def num_rows(self) -> int:
        """Query rows up to the last request's, as the host knows them."""
        return max((start + new for start, new, _ in self.host_lens if new), default=0)

    @cached_property
    def entries(self) -> torch.Tensor:
        """int32 [R, 4]: request, first query row, query rows, cached tokens; one line for a kernel to read."""
        return self.computed_entries() if self.lines is None else self.lines

    def computed_entries(self) -> torch.Tensor:
        rows = torch.arange(len(self.seq_lens), device=self.seq_lens.device)
        return torch.stack((rows, self.query_start[:-1], self.query_lens, self.history_lens), 1).int()

    @cached_property
    def query_lens(self) -> torch.Tensor:
        """int64 [R]; 0 for padding rows, whatever the row offsets say."""
        lens = self.query_start[1:] - self.query_start[:-1]
        return torch.where(self.seq_lens > 0, torch.minimum(lens, self.seq_lens), torch.zeros_like(lens))

    @cached_property
    def history_lens(self) -> torch.Tensor:
        """int64 [R], cached tokens before this step's own rows, per request (never inferred from batch maxima)."""
        return self.seq_lens - self.query_lens

    def blocks_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Physical blocks int64 of `positions` [n, w] in the requests `rows` [n]; out-of-range ones are clamped."""
        logical = (positions // self.block_size).clamp(0, self.block_table.shape[1] - 1)
        return self.block_table[rows].long().gather(1, logical)

    def rows_by_length(self) -> dict[int, list[int]]:
        """Requests grouped by query length rounded up to a power of two: {padded length: request numbers}.

        Keeps padding below a factor of two.  Reads the lengths on the host, once.
        """
        return self._rows_by_length

    @cached_property
    def host_lens(self) -> list[tuple[int, int, int]]:
        """(first query row, query rows, cached tokens) of every request, read on the host once per step."""
        if self.lens is not None:
            return self.lens
        columns = (self.query_start[:-1], self.query_lens, self.history_lens)
        return [(start, new, cached) for start, new, cached in torch.stack(columns, 1).tolist()]

    @cached_property
    def _rows_by_length(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for row, (_, length, _) in enumerate(self.host_lens):
            if length > 0:
                groups.setdefault(1 << (length - 1).bit_length(), []).append(row)
        return dict(sorted(groups.items()))
