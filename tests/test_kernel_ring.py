"""The ring's plan in two launches against `ExactRing.plan`, over random schedules; in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import Scheduler
from test_kernel_history import DEVICE

from turboquant.batch import AttentionBatch
from turboquant.capture import ExactRing, ExactWindow
from turboquant.kernels import ring as kernel


def on_device(batch):
    parts = (batch.query_start, batch.seq_lens, batch.block_table)
    return AttentionBatch(*(part.to(DEVICE) for part in parts), batch.block_size)


def planned(ring, batch):
    """(lines, window) of the kernel, in memory that held something else."""
    requests = len(batch.seq_lens)
    lines = torch.full((requests, 4), 77, dtype=torch.int32, device=DEVICE)
    index = torch.full((requests, ring.columns), 77, dtype=torch.int64, device=DEVICE)
    window = ExactWindow(index, torch.ones_like(index, dtype=torch.bool), ring.sinks)
    kernel.plan(ring, batch, lines, window)
    return lines, window


def assert_same(twin, ring):
    for name in ("entry_of_part", "owner", "used", "written"):
        assert torch.equal(getattr(twin, name), getattr(ring, name)), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("window", "capacity", "sinks", "block_size"),
    [(11, 12, 0, 8), (20, 5, 4, 8), (8, 40, 8, 8), (0, 0, 0, 8), (0, 6, 3, 8), (15, 9, 16, 8),
     (20, 9, 20, 32), (9, 60, 0, 24), (0, 7, 40, 48)],
)  # fmt: skip
def test_plan_is_the_twins(seed, window, capacity, sinks, block_size):
    """Also where a block has several entries, and the sinks too."""
    scheduler = Scheduler(seed, block_size=block_size, max_length=max(90, 3 * block_size))
    twin, ring = (ExactRing(40, block_size, window, capacity, DEVICE, sinks) for _ in range(2))
    assigned = 0
    for _ in range(30):
        step = scheduler.step()
        batch = on_device(step.batch)
        want = twin.plan(batch)
        lines, got = planned(ring, batch)
        assert torch.equal(got.index, want.index) and torch.equal(got.present, want.present)
        assert torch.equal(lines, batch.computed_entries())
        assert_same(twin, ring)
        slots = step.slots.to(DEVICE)
        twin.accept(slots)
        ring.accept(slots)
        assigned += int((ring.owner >= 0).sum())
        scheduler.commit(step)
    assert (assigned > 0) == (capacity > 0)


@pytest.mark.parametrize("sinks", [0, 6])
def test_padded_rows_and_many_requests(sinks):
    """More requests than a tile, int32 as vLLM's metadata, padding behind them, a table wider than it is used."""
    twin, ring = (ExactRing(300, 16, 20, 200, DEVICE, sinks) for _ in range(2))
    requests, real = 80, 70
    table = torch.randperm(300, generator=torch.Generator().manual_seed(1))[: requests * 3].view(requests, 3)
    table = torch.cat([table, torch.full((requests, 2), 10**6)], 1).int().to(DEVICE)
    for length in (5, 17, 40, 41):
        seq = torch.where(torch.arange(requests) < real, length, 0).int().to(DEVICE)
        start = torch.arange(requests + 1).clamp(max=real).int().to(DEVICE)
        batch = AttentionBatch(start, seq, table, 16)
        want = twin.plan(AttentionBatch(start.long(), seq.long(), table, 16))
        lines, got = planned(ring, batch)
        assert torch.equal(got.index, want.index) and torch.equal(got.present, want.present)
        assert torch.equal(lines[real:, 2:], torch.zeros(requests - real, 2, dtype=torch.int32, device=DEVICE))
        assert_same(twin, ring)
        ring.written.fill_(True)
        twin.written.fill_(True)
