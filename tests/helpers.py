"""Oracles and fixtures of several test files, written from the documented layout and rules, not from the code."""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from hypothesis import settings

from turboquant.batch import AttentionBatch
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.rotary import Rotary

torch.set_num_threads(1)

DATA_STREAM = 0xDA7A  # test data share no stream with rotations or sketches
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
PLANE_WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
FLOAT32_EPS = torch.finfo(torch.float32).eps


def rng(*seed):
    return np.random.default_rng([DATA_STREAM, *seed])


def normal(*shape, seed):
    return torch.from_numpy(rng(seed).standard_normal(shape, dtype=np.float32))


@cache
def build_codec(num_kv_heads, head_dim, **options):
    """A codec; do not modify it, all tests share it."""
    return KVCodec.build(TurboQuantConfig(**options), 0, num_kv_heads, head_dim)


def make_rotary(dim, context=256, *, base=300.0, fastest=0.25, size=None, interleaved=False, device="cpu"):
    """A rotary embedding of `size` coordinates (all by default) of which some turn within a short context.

    fastest: radians a position of the first pair.
    """
    size = size or dim
    angles = torch.arange(context)[:, None] * base ** -(torch.arange(0, size, 2) / size) * fastest
    table = torch.cat((angles.cos(), angles.sin()), 1)
    return Rotary.of_cache(table.to(device), dim, interleaved, context)


# ---- layout ----------------------------------------------------------------------------------------------------
def pack_oracle(codes, width):
    """codes [..., d] -> bytes [..., d*width/8]; byte j holds coordinates j, j+n, j+2n, ... from its low bits up."""
    n = codes.shape[-1] * width // 8
    packed = np.zeros((*codes.shape[:-1], n), dtype=np.uint8)
    for j in range(n):
        for i in range(8 // width):
            packed[..., j] += codes[..., j + i * n].astype(np.uint8) << (i * width)
    return packed


def planes_oracle(codes, bits):
    """codes [..., d] -> the bytes of each plane; the first plane has the lowest bits."""
    planes, codes = [], np.asarray(codes).astype(np.int64)
    for width in PLANE_WIDTHS[bits]:
        planes.append(pack_oracle(codes % 2**width, width))
        codes = codes // 2**width
    return planes


def scalar_bytes_oracle(scalars):
    """bfloat16 [..., n] -> the upper halves of float32, little-endian: bytes [..., 2n]."""
    upper = np.ascontiguousarray(scalars.float().numpy()).view(np.uint32) >> 16
    return upper.astype("<u2").view(np.uint8)


def padded(plane):
    raw = np.ascontiguousarray(plane).reshape(-1)
    return np.concatenate([raw, np.zeros(-len(raw) % 16, dtype=raw.dtype)])


def page_oracle(key_codes, value_codes, key_scalars, value_scalars, key_bits, value_bits):
    """The bytes of one page of one head, from codes [tokens, d] and scalars bfloat16 [tokens, n]."""
    planes = [
        *planes_oracle(key_codes, key_bits),
        *(plane.T for plane in planes_oracle(value_codes, value_bits)),
        scalar_bytes_oracle(key_scalars),
        scalar_bytes_oracle(value_scalars),
    ]
    return np.concatenate([padded(plane) for plane in planes])


def page_owners(codec, block_size):
    """Which token of the page each byte belongs to, -1 for padding: int64 [page_bytes]."""
    tokens = np.arange(1, block_size + 1)
    dim = codec.key.dim
    planes = [
        *(np.repeat(tokens, dim * w // 8) for w in PLANE_WIDTHS[codec.key.bits]),
        *(np.tile(tokens, dim * w // 8) for w in PLANE_WIDTHS[codec.value.bits]),
        np.repeat(tokens, 2 * codec.key.num_scalars),
        np.repeat(tokens, 2 * codec.value.num_scalars),
    ]
    return np.concatenate([padded(plane) for plane in planes]) - 1


# ---- metrics ---------------------------------------------------------------------------------------------------
def rel_l2(found, expected):
    """Relative L2 error of the last axis, in float64."""
    found, expected = found.double(), expected.double()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def cosine(found, expected):
    """Cosine of the last axis, in float64."""
    found, expected = found.double(), expected.double()
    return (found * expected).sum(-1) / (found.norm(dim=-1) * expected.norm(dim=-1))


def attention(query, keys, values, first, scale, *, window=0, softcap=0.0, dtype=torch.float64):
    """Plain attention of query [T, H_q, d] at positions first, first+1, ... over keys, values [n, H_kv, d].

    Row i sees positions up to first + i, and with a window only the last `window` of them.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->htn", query.to(dtype), keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = first + torch.arange(len(query))[:, None] - torch.arange(len(keys))
    visible = (distance >= 0) & (distance < window) if window else distance >= 0
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, values)


# ---- continuous batching ---------------------------------------------------------------------------------------
@dataclass(eq=False)
class Request:
    """rows: numbers of the computed rows that its cached tokens are; blocks: physical block of each logical one."""

    target: int
    rows: list = field(default_factory=list)
    blocks: list = field(default_factory=list)
    generations: list = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Step:
    """One batch.  parts: (request, history, new) of each real request, in batch order; slots: -1 for padding rows.

    first_row: number of the step's first computed row; row i of the step is row first_row + i of the run.
    """

    parts: list
    batch: AttentionBatch
    slots: torch.Tensor
    first_row: int


def plain_step(parts, block_size, first_row=0):
    """A batch of (request, history, new) whose requests have all their blocks; no padding."""
    starts = torch.tensor([0] + [new for *_, new in parts]).cumsum(0)
    seqs = torch.tensor([history + new for _, history, new in parts])
    width = max(len(request.blocks) for request, *_ in parts)
    table = torch.tensor([request.blocks + [-1] * (width - len(request.blocks)) for request, *_ in parts])
    slots = [r.blocks[p // block_size] * block_size + p % block_size for r, h, n in parts for p in range(h, h + n)]
    return Step(parts, AttentionBatch(starts, seqs, table, block_size), torch.tensor(slots), first_row)


class Scheduler:
    """Random continuous batching over a small pool; each request's plain list of rows is the oracle.

    Mixes decodes, verify steps whose drafts are partly rejected, chunked prefill, prefix hits on full blocks (of
    running and of finished requests), preemption with recompute, and reuse of freed blocks.
    """

    def __init__(self, seed, *, num_blocks=40, block_size=8, max_seqs=4, max_chunk=20, max_length=90):
        self.rng = rng(seed, 77)
        self.block_size, self.max_seqs, self.max_chunk, self.max_length = block_size, max_seqs, max_chunk, max_length
        self.free = self.rng.permutation(num_blocks).tolist()
        self.references, self.generation = Counter(), Counter()
        self.running, self.donors = [], []
        self.rows = 0
        self.events = Counter()

    def step(self):
        """The next batch; the caller computes it, then calls `commit`."""
        self._release_some()
        while (len(self.running) < self.max_seqs and self.rng.random() < 0.5) or not self.running:
            self._admit()
        parts = []
        for request in self.rng.permutation(np.array(self.running, dtype=object)).tolist():
            if request in self.running and self.rng.random() < 0.8:
                new = self._new_tokens(request)
                if self._grow(request, len(request.rows) + new, {id(part[0]) for part in parts}):
                    parts.append((request, len(request.rows), new))
        return self._step(parts) if parts else self.step()

    def commit(self, step):
        """Append the step's rows to the requests' lists; of a verify step only the accepted ones."""
        row = step.first_row
        for request, history, new in step.parts:
            accepted = new
            if 1 < new <= 4 and self.rng.random() < 0.5:
                accepted = int(self.rng.integers(1, new + 1))
                self.events["rejected"] += new - accepted
            request.rows = [*request.rows[:history], *range(row, row + accepted)]
            row += new

    def _release_some(self):
        for request in list(self.running):
            if len(request.rows) >= request.target:
                self._finish(request)
            elif self.rng.random() < 0.04:
                self._preempt(request)

    def _finish(self, request):
        self.running.remove(request)
        self.donors = [*self.donors[-3:], request]
        self._unref(request.blocks)

    def _preempt(self, request):
        self.events["preempted"] += 1
        self._unref(request.blocks)
        request.rows, request.blocks, request.generations = [], [], []

    def _unref(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.insert(int(self.rng.integers(0, len(self.free) + 1)), block)

    def _admit(self):
        request = Request(int(self.rng.integers(1, self.max_length + 1)))
        self.running.append(request)
        donors = [donor for donor in [*self.running, *self.donors] if len(donor.rows) >= self.block_size]
        if donors and self.rng.random() < 0.6:
            self._share_prefix(request, donors[int(self.rng.integers(len(donors)))])

    def _share_prefix(self, request, donor):
        for i in range(int(self.rng.integers(1, len(donor.rows) // self.block_size + 1))):
            block = donor.blocks[i]
            if self.generation[block] != donor.generations[i]:
                break
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
            request.blocks.append(block)
            request.generations.append(self.generation[block])
            self.events["shared"] += 1
        request.rows = donor.rows[: len(request.blocks) * self.block_size]
        request.target = max(request.target, len(request.rows) + 1)

    def _new_tokens(self, request):
        left = max(1, request.target - len(request.rows))
        kind = self.rng.random()
        new = (
            1
            if kind < 0.4
            else 1 + int(self.rng.integers(1, 4))
            if kind < 0.6
            else int(self.rng.integers(1, self.max_chunk))
        )
        return min(new, left)

    def _grow(self, request, length, busy):
        """Give the request blocks for `length` tokens, preempting requests outside the batch for them."""
        while len(request.blocks) * self.block_size < length:
            if not self.free:
                victims = [r for r in self.running if r is not request and id(r) not in busy and r.blocks]
                if not victims:
                    return False
                self._preempt(victims[int(self.rng.integers(len(victims)))])
                continue
            block = self.free.pop()
            self.generation[block] += 1
            self.references[block] += 1
            self.events["reused"] += self.generation[block] > 1
            request.blocks.append(block)
            request.generations.append(self.generation[block])
        return True

    def _step(self, parts):
        padding = int(self.rng.integers(0, 3))
        lens = [new for *_, new in parts] + [int(self.rng.integers(0, 2)) for _ in range(padding)]
        seqs = [history + new for _, history, new in parts] + [0] * padding
        slots = [
            request.blocks[p // self.block_size] * self.block_size + p % self.block_size
            for request, history, new in parts
            for p in range(history, history + new)
        ]
        slots += [-1] * (sum(lens) - len(slots))
        blocks = [request.blocks for request, *_ in parts] + [[]] * padding
        starts = torch.tensor(np.concatenate([[0], np.cumsum(lens)]))
        batch = AttentionBatch(starts, torch.tensor(seqs), self._table(blocks), self.block_size)
        step = Step(parts, batch, torch.tensor(slots), self.rows)
        self.rows += sum(lens)
        self.events["steps"] += 1
        return step

    def _table(self, blocks):
        """A narrowed view of a wider table, garbage wherever no sequence reaches."""
        width = max(len(b) for b in blocks) + 2
        wide = self.rng.integers(-(2**31), 2**31 - 1, (len(blocks), width + 3)).astype(np.int32)
        for row, request_blocks in enumerate(blocks):
            wide[row, : len(request_blocks)] = request_blocks
        return torch.from_numpy(wide)[:, :width]


class AmpleRing:
    """The exact ring's rule with room for everything, in plain sets.

    A part of a block gets an entry when one of the last `window` or first `sinks` tokens of its request is written into
    it; from then on every token written into the part is held exactly.  held: offsets, by block and part.
    """

    def __init__(self, window, block_size, sinks=0):
        self.window, self.block_size, self.sinks = window, block_size, min(sinks, block_size)
        self.held = {}

    def plan(self, step):
        """Assign entries and return, per request, the positions that are read exactly."""
        exact = []
        for request, history, new in step.parts:
            recent = range(max(history, history + new - self.window), history + new)
            for position in (*recent, *range(history, min(history + new, self.sinks))):
                self.held.setdefault(self._part(request.blocks[position // self.block_size], position), set())
        for request, history, _ in step.parts:
            start = max(0, history - self.window)
            wanted = (*range(min(self.sinks, start)), *range(start, history))
            exact.append([p for p in wanted if self._holds(request.blocks[p // self.block_size], p)])
        return exact

    def write(self, step):
        for slot in step.slots.tolist():
            if slot >= 0 and (part := self._part(slot // self.block_size, slot)) in self.held:
                self.held[part].add(slot % self.block_size)

    def _part(self, block, position):
        return block, position % self.block_size // math.gcd(self.block_size, 16)

    def _holds(self, block, position):
        return position % self.block_size in self.held.get(self._part(block, position), ())
