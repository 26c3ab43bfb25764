"""The exact ring's plan of a step in two launches; its twin is `turboquant.capture.ExactRing.plan`.

The twin is some sixty small launches, which a decode step of a few milliseconds feels.  One program plans: its phases
follow one another, and entries are given out one by one, of which a decode step needs few (a request enters a new
part of a block every `ExactRing.size` tokens).
"""

import torch
import triton
import triton.language as tl

from turboquant.batch import AttentionBatch
from turboquant.capture import RETIRED, ExactRing, ExactWindow, exact_entries

REQUESTS = 32  # of a tile of the planning program
NUMBERS = tl.constexpr(128)  # blocks that are numbered at a time
COUNTS = ["table_stride", "columns", "requests", "step"]  # whatever they are, one compiled kernel serves


@triton.jit
def _lens(QUERY_START, SEQ_LENS, row, requests):
    """Cached tokens and tokens after this step, of each request: (history, seq), int64."""
    real = row < requests
    seq = tl.load(SEQ_LENS + row, mask=real, other=0).to(tl.int64)
    start = tl.load(QUERY_START + row, mask=real, other=0).to(tl.int64)
    new = tl.load(QUERY_START + row + 1, mask=real, other=0).to(tl.int64) - start
    new = tl.where(seq > 0, tl.minimum(new, seq), 0)
    return seq - new, seq, start, new


@triton.jit
def _parts(TABLE, table_stride, columns, row, requests, start, end, W: tl.constexpr, BS: tl.constexpr,
           ES: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Parts that hold positions [start, end), no more than a window can touch: int64 [rows, COLS] or -1."""
    column, count = tl.arange(0, COLS)[None, :], BS // ES
    logical = (tl.maximum(start, 0) // ES)[:, None] + column
    wanted = (logical * ES < end[:, None]) & (row < requests)[:, None] & (column < (W + ES - 1) // ES + 2)
    place = row.to(tl.int64)[:, None] * table_stride + tl.minimum(logical // count, columns - 1)
    block = tl.load(TABLE + place, mask=wanted, other=0).to(tl.int64)
    return tl.where(wanted, block * count + logical % count, -1)


@triton.jit
def _first_parts(TABLE, table_stride, row, number, wanted, BS: tl.constexpr, ES: tl.constexpr):
    """Parts `number` [COLS] of the first blocks: int64 [rows, COLS], -1 where none is wanted."""
    block = tl.load(TABLE + row.to(tl.int64)[:, None] * table_stride + number[None, :] * 0, mask=wanted, other=0)
    return tl.where(wanted, block.to(tl.int64) * (BS // ES) + number[None, :], -1)


@triton.jit
def _written_parts(TABLE, table_stride, columns, row, requests, history, seq, W: tl.constexpr, SINKS: tl.constexpr,
                   BS: tl.constexpr, ES: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Parts that are written now and read exactly later: int64 [rows, COLS], sinks in the last columns."""
    parts = tl.full([row.shape[0], COLS], -1, tl.int64)
    if W > 0:
        start = tl.maximum(history, seq - W)
        parts = _parts(TABLE, table_stride, columns, row, requests, start, seq, W, BS, ES, COLS)
    if SINKS > 0:
        number = tl.arange(0, COLS) - (COLS - (SINKS + ES - 1) // ES)
        start, end = (number * ES)[None, :], ((number + 1) * ES)[None, :]
        begins = (history[:, None] < tl.minimum(end, SINKS)) & (seq[:, None] > tl.maximum(history[:, None], start))
        begins = begins & (number >= 0)[None, :] & (row < requests)[:, None]
        if W > 0:
            begins = begins & (seq[:, None] - W >= end)
        sinks = _first_parts(TABLE, table_stride, row, number, begins, BS, ES)
        parts = tl.where((number >= 0)[None, :], sinks, parts)
    return parts


@triton.jit
def _touch(ENTRY_OF_PART, USED, parts, clock):
    entry = tl.load(ENTRY_OF_PART + parts, mask=parts >= 0, other=-1)
    tl.store(USED + entry, tl.zeros_like(entry) + clock, mask=entry >= 0)


@triton.jit
def _give(ENTRY_OF_PART, OWNER, USED, WRITTEN, part, step, CAPACITY: tl.constexpr, ENTRIES: tl.constexpr,
          ES: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    """Give a part without entry the least recently used one, if that is not in use by this step."""
    number = tl.arange(0, ENTRIES)
    used = tl.load(USED + number, mask=number < CAPACITY, other=step)
    one = tl.zeros([1], tl.int64)
    victim = tl.argmin(used, 0, tie_break_left=True) + one
    free = tl.min(used, 0) + one < step
    evicted = tl.load(OWNER + victim, mask=free, other=-1)
    tl.debug_barrier()
    tl.store(ENTRY_OF_PART + evicted, one - 1, mask=free & (evicted >= 0))
    tl.debug_barrier()
    tl.store(ENTRY_OF_PART + part + one, victim, mask=free)
    tl.store(OWNER + victim, part + one, mask=free)
    tl.store(USED + victim, step + one, mask=free)
    byte = tl.arange(0, BYTES)
    tl.store(WRITTEN + victim * ES + byte, tl.zeros([BYTES], tl.uint8), mask=free & (byte < ES))
    tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def _plan_kernel(
    QUERY_START, SEQ_LENS, TABLE, ENTRY_OF_PART, OWNER, USED, WRITTEN, table_stride, columns, requests, step,
    W: tl.constexpr, SINKS: tl.constexpr, BS: tl.constexpr, ES: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    CAPACITY: tl.constexpr, ENTRIES: tl.constexpr, BYTES: tl.constexpr, RETIRED: tl.constexpr,
):  # fmt: skip
    for phase in tl.static_range(4):
        for first in range(0, requests, ROWS):
            row = first + tl.arange(0, ROWS)
            history, seq, _, _ = _lens(QUERY_START, SEQ_LENS, row, requests)
            kept = seq - 1 - W  # where the windows of the next steps begin
            if phase < 3 and W > 0:
                if phase == 0:
                    start, end, clock = history - W - ES, kept, RETIRED
                elif phase == 1:
                    start, end, clock = history - W, history, step - 1
                else:
                    start, end, clock = kept, history, step
                parts = _parts(TABLE, table_stride, columns, row, requests, start, end, W, BS, ES, COLS)
                _touch(ENTRY_OF_PART, USED, parts, clock)
            elif phase == 3:
                parts = _written_parts(
                    TABLE, table_stride, columns, row, requests, history, seq, W, SINKS, BS, ES, COLS
                )  # fmt: skip
                _touch(ENTRY_OF_PART, USED, parts, step)
                if SINKS > 0:
                    number = tl.arange(0, COLS)
                    live = ((seq > 0) & (row < requests))[:, None] & (number * ES < SINKS)[None, :]
                    _touch(ENTRY_OF_PART, USED, _first_parts(TABLE, table_stride, row, number, live, BS, ES), step)
        tl.debug_barrier()
    for first in range(0, requests, ROWS):
        row = first + tl.arange(0, ROWS)
        history, seq, _, _ = _lens(QUERY_START, SEQ_LENS, row, requests)
        parts = _written_parts(TABLE, table_stride, columns, row, requests, history, seq, W, SINKS, BS, ES, COLS)
        entry = tl.load(ENTRY_OF_PART + parts, mask=parts >= 0, other=0)
        order = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        waiting = tl.where((parts >= 0) & (entry < 0), order, ROWS * COLS)
        chosen = tl.min(tl.min(waiting, 1), 0)
        while chosen < ROWS * COLS:
            part = tl.max(tl.max(tl.where(order == chosen, parts, -1), 1), 0)
            _give(ENTRY_OF_PART, OWNER, USED, WRITTEN, part, step, CAPACITY, ENTRIES, ES, BYTES)
            waiting = tl.where(order == chosen, ROWS * COLS, waiting)
            chosen = tl.min(tl.min(waiting, 1), 0)


@triton.jit(do_not_specialize=COUNTS[:3])
def _locate_kernel(
    QUERY_START, SEQ_LENS, TABLE, ENTRY_OF_PART, WRITTEN, NUMBER, LINES, INDEX, PRESENT, table_stride, columns,
    requests, SINKS: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, ES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one request: numbers of the blocks that it writes, its line of `AttentionBatch.entries`, and where the C
    tokens are that it reads exactly.
    """
    row = tl.program_id(0)
    history, seq, start, new = _lens(QUERY_START, SEQ_LENS, row, requests)
    end = tl.where(new > 0, tl.minimum(tl.cdiv(seq, BS), columns), 0)  # dummy batches claim more than tables hold
    for first in range(history // BS, end, NUMBERS):
        number = first + tl.arange(0, NUMBERS)
        written = number < end
        block = tl.load(TABLE + row.to(tl.int64) * table_stride + number, mask=written, other=0).to(tl.int64)
        tl.store(NUMBER + block, number.to(tl.int32), mask=written)
    tl.store(LINES + row * 4, row)
    tl.store(LINES + row * 4 + 1, start.to(tl.int32))
    tl.store(LINES + row * 4 + 2, new.to(tl.int32))
    tl.store(LINES + row * 4 + 3, history.to(tl.int32))
    if C > 0:
        column = tl.arange(0, COLUMNS)
        start = history - (C - SINKS)  # of the last tokens
        position = tl.where(column < SINKS, tl.where(column < start, column, -1), start + column - SINKS)
        known = (position >= 0) & (column < C)
        position = tl.maximum(position, 0)
        logical = tl.minimum(position // BS, columns - 1)
        block = tl.load(TABLE + row.to(tl.int64) * table_stride + logical, mask=known, other=0).to(tl.int64)
        entry = tl.load(ENTRY_OF_PART + block * (BS // ES) + position % BS // ES, mask=known, other=-1)
        place = entry * ES + position % ES
        written = tl.load(WRITTEN + place, mask=known & (entry >= 0), other=0) != 0
        target = row * C + column
        tl.store(INDEX + target, tl.where(written, place, 0), mask=column < C)
        tl.store(PRESENT + target, written.to(tl.uint8), mask=column < C)


def plan(ring: ExactRing, batch: AttentionBatch, lines: torch.Tensor, window: ExactWindow) -> None:
    """`ExactRing.plan` into window [R, C], and `AttentionBatch.entries` into lines int32 [R, 4], without allocating.

    Block tables must not name a block twice for tokens written in this step, as vLLM's do not.
    """
    ring.step += 2
    requests, sizes = len(batch.seq_lens), {"BS": ring.block_size, "ES": ring.size}
    common = (batch.query_start, batch.seq_lens, batch.block_table, ring.entry_of_part)
    counts = (batch.block_table.stride(0), batch.block_table.shape[1], requests)
    written = ring.written.view(torch.uint8)
    if ring.columns:
        touched = exact_entries(ring.window, ring.sinks, ring.block_size) + 1  # and the part that leaves the window
        _plan_kernel[(1,)](
            *common, ring.owner, ring.used, written, *counts, ring.step, W=ring.window, SINKS=ring.sinks,
            COLS=triton.next_power_of_2(touched), ROWS=REQUESTS, CAPACITY=ring.capacity,
            ENTRIES=triton.next_power_of_2(ring.capacity), BYTES=triton.next_power_of_2(ring.size), RETIRED=RETIRED,
            num_warps=8, **sizes,
        )  # fmt: skip
    _locate_kernel[(requests,)](
        *common, written, ring.number, lines, window.index, window.flags, *counts,
        SINKS=ring.sinks, C=ring.columns, COLUMNS=triton.next_power_of_2(max(ring.columns, 1)), **sizes,
    )  # fmt: skip
