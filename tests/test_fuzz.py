"""Random schedules of a paged engine against plain lists, as hypothesis state machines.

Schedules admit, share prefixes (also of the running step), chunk, decode, verify drafts and reject some, preempt,
finish, forget blocks and scribble over them, in batches of any order, with padding, over random geometries.  After
every step attention of every request equals float64 attention over its plain list of tokens, and no byte outside the
step's slots has changed.

    python tests/test_fuzz.py --schedules 20000 --seed 1 [--machine cache|modes|interpreter|device]
        [--processes 16] [--json FILE]
"""

import argparse
import json
import multiprocessing
import shlex
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import conftest  # noqa: F401  # decides about Triton's interpreter, for the script too
import pytest
import torch
from fake_vllm import FakeEngine, FakeLayer, FakeRunner
from helpers import FLOAT32_EPS, AmpleRing, Request, Step, attention, make_rotary, normal, page_owners, rng
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    initialize,
    rule,
    run_state_machine_as_test,
)

from turboquant.batch import AttentionBatch
from turboquant.capture import ExactRing, ExactWindow, KVCaptureEngine, StepPlan, entry_size, plan_in_torch
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import PRESETS, Mode, TurboQuantConfig
from turboquant.integration import compat
from turboquant.integration import vllm as hooks
from turboquant.kernels import Kernels, choose_kernels, choose_plan
from turboquant.rotary import SPAN
from turboquant.score import HybridScorer, QueryGroup
from turboquant.store import CompressedBlockStore

UNTOUCHED = 7.0
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps
NULL_BLOCK = 0  # where vLLM points the logical blocks that have left every sliding window
MOST_RUNNING, MOST_DONORS, MOST_TOKENS = 5, 4, 260
LOOK = 3  # in about one of so many steps the cache is also read without writing
DONE = Counter()
WORST = Counter()


# ---- geometry --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Geometry:
    """capacity: ring entries, None for as many as there are blocks; flavour: what the rows look like.

    center: "none", "constant", or the rotary embedding that turns it, one of ROTARIES.
    """

    dim: int = 64
    heads: int = 2
    group: int = 2
    block_size: int = 16
    num_blocks: int = 16
    window: int = 0
    sinks: int = 0
    capacity: int | None = None
    sliding: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    layers: int = 1
    codec: tuple[tuple[str, object], ...] = ()
    center: str = "none"
    flavour: str = "normal"

    @property
    def scale(self):
        return self.dim**-0.5


CODECS = [
    *PRESETS.values(),
    {"key_quantizer": "prod"},
    {"key_quantizer": "prod", "key_bits": 2, "value_quantizer": "group", "value_bits": 3},
    {"value_quantizer": "group", "value_bits": 8, "key_bits": 8},
    {"rotation": "haar", "scale_candidates": 1},
    {"initial_layers_count": 1, "key_bits": 3, "value_bits": 2},
]
# Share of the coordinates that turn, base, whether pairs are neighbours; "short" ends before most sequences do.
ROTARIES = {"turning": (1.0, 1e4, False), "neighbours": (1.0, 100.0, True), "partly": (0.5, 1e6, False),
            "short": (1.0, 10.0, False)}  # fmt: skip
CENTERS = ("none", "constant", *ROTARIES)
FLAVOURS = ("normal", "biased", "giant channel", "uneven")


def geometries(**fixed):
    axes = {
        "dim": st.sampled_from([64, 16, 80, 96, 128]),
        "heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 4, 8]),
        "block_size": st.sampled_from([16, 24, 32, 48, 64]),
        "num_blocks": st.sampled_from([12, 7, 24]),
        "window": st.sampled_from([0, 1, 5, 15, 16, 17, 40, 128]),
        "sinks": st.sampled_from([0, 1, 4, 16, 70]),
        "capacity": st.sampled_from([None, 0, 1, 3, 8]),
        "sliding": st.sampled_from([0, 0, 1, 7, 16, 33, 100]),
        "softcap": st.sampled_from([0.0, 0.0, 5.0]),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        "layers": st.sampled_from([1, 2]),
        "codec": st.sampled_from([tuple(options.items()) for options in CODECS]),
        "center": st.sampled_from(CENTERS),
        "flavour": st.sampled_from(FLAVOURS),
    }
    return st.builds(Geometry, **{**axes, **{name: st.sampled_from(values) for name, values in fixed.items()}})


@cache
def rotary(dim, center):
    share, base, interleaved = ROTARIES[center]
    context = 100 if center == "short" else MOST_TOKENS
    return make_rotary(dim, context, base=base, fastest=1.0, size=int(dim * share), interleaved=interleaved)


@cache
def codec_of(dim, heads, options, center, index, device):
    transform = None
    if center != "none":
        turns = rotary(dim, center) if center in ROTARIES else None
        transform = KeyTransform(normal(heads, dim, seed=7), normal(heads, dim, seed=8).exp(), turns)
    return KVCodec.build(TurboQuantConfig(**dict(options)), index, heads, dim, transform, device)


# ---- the oracle ------------------------------------------------------------------------------------------------
class Oracle:
    """Rows of one layer: drawn, as the codec's reference decodes them, and attended to in float64."""

    def __init__(self, geometry, index, error):
        self.geometry, self.index, self.error = geometry, index, error
        self.codec = codec_of(*self.shape, "cpu")
        self.exact, self.coded = {}, {}  # by number of the row: float64 [2, H_kv, d]

    @property
    def shape(self):
        g = self.geometry
        return g.dim, g.heads, g.codec, g.center, self.index

    def centers(self, positions):
        """Centres float64 [N, H_kv, d] at positions: every pair a complex number, turned by its span's rounded one."""
        center, turning = self.codec.transform.center.double(), self.codec.rotary
        if self.geometry.center not in ROTARIES:
            return center.expand(len(positions), -1, -1)
        rows = [min(position // SPAN, len(turning.cos_sin) - 1) for position in positions]
        turns = torch.complex(*turning.cos_sin[rows].double().chunk(2, 1))
        pairs = torch.complex(*center[:, turning.pairs].unbind(1)) * turns[:, None]
        found = torch.empty(len(rows), *center.shape, dtype=torch.float64)
        found[..., turning.pairs[0]], found[..., turning.pairs[1]] = pairs.real, pairs.imag
        return found

    def rows(self, first, count):
        """Query, keys and values of rows first, first + 1, ..."""
        g, start = self.geometry, 10 * first + 3 + 5 * self.index
        sizes = ((0, g.heads * g.group), (1, g.heads), (2, g.heads))
        query, keys, values = (normal(count + 1, heads, g.dim, seed=start + i)[:count] for i, heads in sizes)
        if g.flavour == "biased":
            keys += 4 * normal(g.heads, g.dim, seed=1)
        elif g.flavour == "giant channel":
            keys[..., 3] = 40
        elif g.flavour == "uneven":
            sizes = torch.from_numpy(10.0 ** rng(start).uniform(-6, 2, (2, count, 1, 1))).float()
            keys, values = keys * sizes[0].clamp(max=4), values * sizes[1]
        return tuple(x.to(g.dtype) for x in (query, keys, values))

    def decoded(self, keys, values, positions):
        """What is left of keys and values [n, H_kv, d] in the original basis: float64 [n, 2, H_kv, d]."""
        codec = self.codec
        coded = codec.encode_keys(keys, torch.tensor(positions))
        coded_keys = codec.key.decode(coded).double() @ codec.key.rotation.matrix.double()
        coded_keys = coded_keys / codec.transform.gain.double() + self.centers(positions)
        coded_values = codec.value.decode(codec.encode_values(values)).double()
        return torch.stack([coded_keys, coded_values @ codec.value.rotation.matrix.double()], 1)

    def remember(self, step, keys, values):
        """Keep every row that has a slot; these are the first of a step."""
        positions = positions_of(step)
        if not positions:
            return
        exact = torch.stack([keys, values], 1).double()
        coded = self.decoded(keys[: len(positions)], values[: len(positions)], positions)
        for row in range(len(positions)):
            self.exact[step.first_row + row], self.coded[step.first_row + row] = exact[row], coded[row]

    def check(self, query, output, tokens, history):
        """Every query row and head of one request, at positions history, history + 1, ... of `tokens`."""
        g, (keys, values) = self.geometry, torch.stack(tokens, 1)
        options = {"window": g.sliding, "softcap": g.softcap}
        sized = torch.cat([values, values.norm(dim=-1, keepdim=True)], -1)  # the mean size of what is mixed, by the way
        expected, spread = attention(query, keys, sized, history, g.scale, **options).split([g.dim, 1], -1)
        limit = (
            self.limit(self.largest_logit(query, keys)) * spread[..., 0] + torch.finfo(g.dtype).smallest_normal * g.dim
        )
        error = float(((output.double() - expected).norm(dim=-1) / limit).max())
        assert error <= 1, f"the error is {error:.3g} times its bound"
        name = f"error of {g.dtype} over its bound"
        WORST[name] = max(WORST[name], error)

    def largest_logit(self, query, keys):
        """What a float32 sum meets on the way: inner products before and after the key transform, and the centre's."""
        gain, center = self.codec.transform.gain.double(), self.codec.transform.center.double()
        heads = query.double().unflatten(1, (len(gain), -1))
        plain = largest(heads) * (largest(keys) + largest(center))
        transformed = largest(heads / gain[:, None]) * largest((keys - self.centers(range(len(keys)))) * gain)
        return self.geometry.scale * max(plain, transformed)

    def limit(self, logit):
        """Bound of an output's L2 error over the mean size of the values in it.

        Rounding to the dtype costs half a unit; float32 sums of d and of some hundred terms a few units, and a logit
        of size L is off by up to 2 L units, which its weight takes over.
        """
        rounding = torch.finfo(self.geometry.dtype).eps / 2 if self.geometry.dtype != torch.float32 else 0.0
        return rounding + (self.error + FLOAT32_EPS) * (16 + 2 * logit)


def largest(rows):
    return float(rows.norm(dim=-1).max())


def positions_of(step):
    """Positions of a step's rows in their sequences, without padding."""
    return [position for _, history, new in step.parts for position in range(history, history + new)]


def check_bytes(store, before, slots, owners):
    """Pages may have changed in the named slots only; owners: token of each byte of a page, -1 for padding."""
    named = torch.zeros(store.num_blocks, store.block_size + 1, dtype=torch.bool, device=slots.device)
    real = slots[slots >= 0]
    named[real // store.block_size, real % store.block_size] = True
    changed = (before != store.pages).any(1)
    assert not (changed & ~named[:, owners]).any(), "bytes outside the named slots changed"


# ---- what is under test ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Backend:
    """Where a cache lives, and what serves it.

    error, half_error: of float32 and 16-bit outputs per unit of the logits, beyond what float32 sums and rounding cost.
    ties: whether sums in another order than torch's may choose another code where two are equally good.
    """

    device: str = "cpu"
    plan: object = plan_in_torch
    kernels: object = lambda layer, ring: Kernels()
    error: float = 0.0
    half_error: float = 0.0
    ties: bool = False


class Layer:
    """One layer's cache beside its oracle."""

    def __init__(self, geometry, backend, engine, index):
        g, self.backend = geometry, backend
        self.oracle = Oracle(g, index, backend.error if g.dtype == torch.float32 else backend.half_error)
        self.cache = engine.add_layer(str(index), codec_of(*self.oracle.shape, backend.device), g.heads, g.dtype)
        self.cache.store.pages.fill_(0xFF)
        for data in (self.cache.recent.keys, self.cache.recent.values):
            data.view(torch.uint8).fill_(0xFF)
        kernels = backend.kernels(self.cache, engine.ring)
        self.cache.encode = kernels.encode
        self.scorer = HybridScorer(g.scale, g.sliding, g.softcap, kernels.history, kernels.fused)
        self.owners = torch.from_numpy(page_owners(self.oracle.codec, g.block_size)).to(backend.device)

    def check_attention(self, query, output, ids, history, exact, own):
        """exact: cached positions that are read exactly; own: whether rows from `history` on are the request's own."""
        oracle, exact = self.oracle, {*exact, *(range(history, len(ids)) if own else ())}
        tokens = [oracle.exact[row] if p in exact else oracle.coded[row] for p, row in enumerate(ids)]
        oracle.check(query, output, tokens, history)
        DONE["exact reads"] += len(exact)
        DONE["coded reads"] += len(ids) - len(exact)

    def settle_ties(self, step, keys, values):
        """Where the codes of a step's tokens are others than the oracle's, they are as good, and it takes them.

        A key with one giant channel has coordinates of about one size once rotated, which neighbouring levels and two
        scales can describe alike; what decides then is rounding, and the scale's own to bfloat16 comes after.
        """
        oracle, positions = self.oracle, positions_of(step)
        if not positions:
            return
        slots = step.slots[: len(positions)]
        found = [rows.cpu().double() for rows in self.read(slots.tolist(), positions)]
        wanted = torch.stack([oracle.coded[step.first_row + i] for i in range(len(positions))], 1)
        transform, centers = oracle.codec.transform, oracle.centers(positions)
        sides = zip(found, (keys, values), (transform.gain.double(), 1.0), (centers, 0.0), strict=True)
        for side, (rows, given, gain, center) in enumerate(sides):
            exact = (given[: len(positions)].double() - center) * gain
            errors = [((coded - center) * gain - exact).square().sum(-1) for coded in (rows, wanted[side])]
            other = (rows - wanted[side]).norm(dim=-1) > self.rounding(wanted[side])
            worse = (errors[0] - errors[1]) / (BFLOAT16_EPS * exact.norm(dim=-1)).square()
            assert (worse[other] <= 1).all(), f"codes cost {worse[other].max():.3g} times what a scale's rounding does"
            DONE["ties"] += int(other.sum())
            for i, token in zip(*other.nonzero(as_tuple=True), strict=True):
                oracle.coded[step.first_row + int(i)][side, token] = rows[i, token]

    def rounding(self, expected):
        """What float32 may be off by in decoded rows that are `expected`."""
        transform = self.oracle.codec.transform
        units = 16 * FLOAT32_EPS * float(transform.gain.max() / transform.gain.min())
        return units * (expected.norm(dim=-1) + transform.center.norm(dim=-1))

    def read(self, slots, positions):
        """Keys and values of slots as the store itself decodes them."""
        return self.cache.store.read_slots(*(torch.tensor(x, device=self.backend.device) for x in (slots, positions)))

    def check_pages(self, request):
        """The compressed tokens of a request."""
        size = self.cache.store.block_size
        tokens = {p: row for p, row in enumerate(request.rows) if request.blocks[p // size] != NULL_BLOCK}
        if not tokens:
            return
        slots = [request.blocks[p // size] * size + p % size for p in tokens]
        wanted = torch.stack([self.oracle.coded[row] for row in tokens.values()], 1)
        for rows, expected in zip(self.read(slots, list(tokens)), wanted, strict=True):
            error = ((rows.cpu().double() - expected).norm(dim=-1) / self.rounding(expected)).max()
            assert error <= 1, f"a decoded token is off by {error:.3g} times what rounding costs"


class Ring(AmpleRing):
    """The ring's rule with room for everything; `located` is what a step of these cached tokens would read exactly."""

    def located(self, request, history):
        start = max(0, history - self.window)
        wanted = (*range(min(self.sinks, start)), *range(start, history))
        return [p for p in wanted if self._holds(request.blocks[p // self.block_size], p)]

    def holds(self, slot):
        return self._holds(slot // self.block_size, slot)

    def clear(self):
        self.held.clear()


class System:
    """A KV-cache group of one or two layers, and the exact ring beside its rule."""

    def __init__(self, geometry, backend):
        self.geometry, self.backend = geometry, backend
        g = geometry
        ample = g.num_blocks * (g.block_size // entry_size(g.block_size)) if g.capacity is None else g.capacity
        self.engine = KVCaptureEngine(g.num_blocks, g.block_size, g.window, ample, backend.device, g.sinks)
        self.layers = [Layer(g, backend, self.engine, i) for i in range(g.layers)]
        self.model = Ring(g.window, g.block_size, g.sinks) if g.capacity is None else None

    def plan(self, batch):
        ring, requests = self.engine.ring, len(batch.seq_lens)
        lines = torch.full((requests, 4), 77, dtype=torch.int32, device=self.backend.device)
        index = torch.full((requests, ring.columns), 77, dtype=torch.int64, device=self.backend.device)
        window = ExactWindow(index, torch.ones_like(index, dtype=torch.bool), ring.sinks)
        self.backend.plan(ring, batch, lines, window)
        return StepPlan(replace(batch, lines=lines), window)

    def run(self, step, surplus):
        """Compute a step in all layers and check it; surplus: rows without a slot behind the others."""
        batch = self.on_device(step.batch)
        plan, slots = self.plan(batch), step.slots.to(self.backend.device)
        exact = self.model.plan(step) if self.model else self.present(plan, step)
        assert exact == self.present(plan, step), "other tokens are read exactly than the ring's rule says"
        if self.model:
            self.model.write(step)
        for layer in self.layers:
            query, keys, values = layer.oracle.rows(step.first_row, len(step.slots) + surplus)
            layer.oracle.remember(step, keys, values)
            before = layer.cache.store.pages.clone()
            own = (keys.to(self.backend.device), values.to(self.backend.device))
            self.engine.ingest(layer.cache, *own, slots)
            check_bytes(layer.cache.store, before, slots, layer.owners)
            if self.backend.ties:
                layer.settle_ties(step, keys, values)
            output = torch.full_like(query, UNTOUCHED, device=self.backend.device)
            layer.scorer.attend(layer.cache, plan, query.to(self.backend.device), own, output)
            self.check(layer, step, query, output.cpu(), exact)

    def check(self, layer, step, query, output, exact):
        row = 0
        for (request, history, new), positions in zip(step.parts, exact, strict=True):
            ids = [*request.rows[:history], *range(step.first_row + row, step.first_row + row + new)]
            part = slice(row, row + new)
            layer.check_attention(query[part], output[part], ids, history, positions, own=True)
            row += new
        assert (output[row:] == UNTOUCHED).all(), "a padded row was written"

    def look(self, requests, first_row):
        """One query row over the cached tokens of every request, without writing or planning anything."""
        requests = [request for request in requests if request.rows]
        if not requests:
            return
        starts, lens = torch.arange(len(requests) + 1), torch.tensor([len(r.rows) + 1 for r in requests])
        width = max(len(request.blocks) for request in requests)
        table = torch.tensor([r.blocks + [-1] * (width - len(r.blocks)) for r in requests])
        batch = self.on_device(AttentionBatch(starts, lens, table, self.geometry.block_size))
        plan = StepPlan(batch, self.engine.ring.locate(batch))
        parts = [(request, len(request.rows), 1) for request in requests]
        exact = self.present(plan, SimpleNamespace(parts=parts, batch=batch))
        if self.model:
            assert exact == [self.model.located(request, len(request.rows)) for request in requests]
        for layer in self.layers:
            query = layer.oracle.rows(first_row, len(requests))[0]
            output = torch.empty_like(query, device=self.backend.device)
            layer.scorer.attend(layer.cache, plan, query.to(self.backend.device), None, output)
            for i, request in enumerate(requests):
                if self.geometry.sliding == 1:  # nothing but its own row would be visible
                    assert (output[i] == 0).all()
                    continue
                part, ids = slice(i, i + 1), request.rows
                layer.check_attention(query[part], output[part].cpu(), ids, len(ids), exact[i], own=False)

    def scribble(self, blocks, byte):
        """Fill pages that are nobody's."""
        for layer in self.layers:
            layer.cache.store.pages[blocks] = byte

    def present(self, plan, step):
        """Positions that each request reads exactly, as planned."""
        positions = plan.window.positions(plan.batch.history_lens).cpu()
        present = plan.window.present.cpu()
        assert not present[len(step.parts) :].any(), "padding reads something"
        return [sorted(positions[i][present[i]].tolist()) for i in range(len(step.parts))]

    def on_device(self, batch):
        parts = (batch.query_start, batch.seq_lens, batch.block_table)
        return AttentionBatch(*(part.to(self.backend.device) for part in parts), batch.block_size, batch.lens)


# ---- the engine that drives it ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """What a request does in a step; numbers are taken modulo what there is.

    kind: "chunk" of so many tokens; "verify" of 1 to 4 rows, of which `accepted` stay; a chunk of a "new" request, of
    one that "share"s the first blocks of another, or that "join"s: shares what the request before it in the batch
    computes in this very step.
    """

    request: int
    kind: str
    tokens: int
    accepted: int = 1


WORK = st.builds(
    Work,
    st.integers(0, MOST_RUNNING - 1),
    st.sampled_from(["chunk", "decode", "verify", "new", "share", "join"]),
    st.one_of(st.integers(1, 9), st.integers(1, 80), st.sampled_from([15, 16, 17, 32, 33, 48, 64, 65, 129])),
    st.integers(1, 4),
)


PADDING = st.integers(0, 3)
BYTES = (0xFF, 0x7F, 0x51, 0x00)  # 0x7F7F is 3e38 in bfloat16, 0x5151 is 6e10


class Pool:
    """Blocks with reference counts, and the finished requests whose blocks can still be shared."""

    def __init__(self, num_blocks, block_size, sliding):
        self.block_size, self.sliding = block_size, sliding
        self.free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self.references, self.generation = Counter(), Counter()
        self.running, self.donors = [], []

    def admit(self):
        self.running.append(Request(MOST_TOKENS))
        return self.running[-1]

    def share(self, donor, rows, count):
        """A new request whose first blocks are those of `donor`, which hold `rows`; None if none is left."""
        count = min(count, len(rows) // self.block_size)
        while count and not self._all_live(donor, count):
            count -= 1
        if not count:
            return None
        request = self.admit()
        for block, generation in zip(donor.blocks[:count], donor.generations[:count], strict=True):
            gone = block == NULL_BLOCK or self.generation[block] != generation
            self._take(request, NULL_BLOCK if gone else block)
        DONE["shared blocks"] += count
        request.rows = list(rows[: count * self.block_size])
        return request

    def _all_live(self, donor, count):
        """Whether the blocks that the sliding window of the next row can see still hold what they held."""
        first = max(0, count * self.block_size - self.sliding + 1) // self.block_size if self.sliding else 0
        if first == count:
            return True
        blocks = zip(donor.blocks[first:count], donor.generations[first:count], strict=True)
        return all(block != NULL_BLOCK and self.generation[block] == generation for block, generation in blocks)

    def _take(self, request, block):
        if block != NULL_BLOCK:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
        request.blocks.append(block)
        request.generations.append(self.generation[block])

    def slide(self, request):
        """Give back the blocks that no later row can see, as vLLM's window manager does."""
        if not self.sliding:
            return
        for i in range(max(0, len(request.rows) - self.sliding + 1) // self.block_size):
            self._release([request.blocks[i]])
            request.blocks[i] = NULL_BLOCK

    def grow(self, request, length, busy):
        """Blocks for `length` tokens, preempting requests outside the batch for them; whether it worked."""
        while len(request.blocks) * self.block_size < length:
            if not self.free:
                victims = [r for r in self.running if r is not request and r not in busy and any(r.blocks)]
                if not victims:
                    return False
                self.preempt(victims[0])
                continue
            block = self.free[-1]
            DONE["reused blocks"] += self.generation[block] > 0
            self.generation[block] += 1
            self._take(request, block)
        return True

    def preempt(self, request):
        """The request starts again; its blocks can be shared until they are reused."""
        self._keep(replace(request, rows=list(request.rows), blocks=list(request.blocks)))
        self._release(request.blocks)
        request.rows, request.blocks, request.generations = [], [], []

    def finish(self, request):
        self.running.remove(request)
        self._keep(request)
        self._release(request.blocks)

    def forget(self):
        """Forget all finished requests; returns the blocks that are nobody's."""
        self.donors.clear()
        return list(self.free)

    def _keep(self, request):
        self.donors = [*self.donors[1 - MOST_DONORS :], request]

    def _release(self, blocks):
        for block in blocks:
            if block != NULL_BLOCK:
                self.references[block] -= 1
                if not self.references[block]:
                    self.free.insert(0, block)


class Serving:
    """Turns work into batches, and keeps each request's plain list of rows."""

    def __init__(self, geometry):
        g = self.geometry = geometry
        self.pool = Pool(g.num_blocks, g.block_size, g.sliding)
        self.rows = 0

    def schedule(self, work):
        """(parts, accepted rows): of each request in the batch its cached and new tokens, in batch order."""
        parts, accepted = [], []
        for item in work:
            busy = [request for request, *_ in parts]
            request = self._request(item, parts, accepted)
            if request is None or request in busy:
                continue
            self.pool.slide(request)
            history, new = len(request.rows), self._new_tokens(item, request)
            if new > 0 and self.pool.grow(request, history + new, busy):
                parts.append((request, history, new))
                accepted.append(1 + (item.accepted - 1) % new if item.kind == "verify" else new)
        return parts, accepted

    def _request(self, item, parts, accepted):
        running = self.pool.running
        if len(running) < MOST_RUNNING:
            donors = [r for r in running + self.pool.donors if len(r.rows) >= self.geometry.block_size]
            if item.kind == "new" or not running:
                return self.pool.admit()
            if item.kind == "share" and donors:
                donor = donors[item.request % len(donors)]
                return self.pool.share(donor, donor.rows, item.accepted)
            if item.kind == "join":
                return self._joining(parts, accepted, item.accepted)
        return running[item.request % len(running)]

    def _joining(self, parts, accepted, count):
        """A request that hits the blocks which the last one in the batch is about to fill."""
        if not parts or accepted[-1] < parts[-1][2]:
            return None
        request, history, new = parts[-1]
        first = self.rows + sum(part[2] for part in parts[:-1])
        DONE["joined"] += history + new >= self.geometry.block_size
        return self.pool.share(request, [*request.rows[:history], *range(first, first + new)], count)

    def _new_tokens(self, item, request):
        wanted = {"decode": 1, "verify": 1 + item.tokens % 4}.get(item.kind, item.tokens)
        return min(wanted, MOST_TOKENS - len(request.rows))

    def step(self, parts, padding, host_lens=False):
        """A batch with so many padding requests, which claim 0, 1, 0, ... rows; garbage wherever nobody may read."""
        lens = [new for *_, new in parts] + [i % 2 for i in range(padding)]
        seqs = [history + new for _, history, new in parts] + [0] * padding
        starts = torch.tensor([0, *lens]).cumsum(0)
        blocks = [request.blocks for request, *_ in parts] + [[]] * padding
        width = max(len(b) for b in blocks) + 2
        wide = torch.from_numpy(rng(self.rows).integers(-(2**31), 2**31 - 1, (len(blocks), width + 3))).int()
        for row, request_blocks in enumerate(blocks):
            wide[row, : len(request_blocks)] = torch.tensor(request_blocks, dtype=torch.int32)
        known = None
        if host_lens:
            news = [new for *_, new in parts] + [0] * padding
            known = [(start, new, seq - new) for start, new, seq in zip(starts.tolist(), news, seqs, strict=False)]
        batch = AttentionBatch(starts, torch.tensor(seqs), wide[:, :width], self.geometry.block_size, known)
        size = self.geometry.block_size
        slots = [r.blocks[p // size] * size + p % size for r, h, new in parts for p in range(h, h + new)]
        slots = torch.tensor(slots + [-1] * (sum(lens) - len(slots)), dtype=torch.int64)
        return Step(parts, batch, slots, self.rows)

    def commit(self, step, accepted):
        """Append the accepted rows to the requests' lists."""
        row = step.first_row
        for (request, history, new), kept in zip(step.parts, accepted, strict=True):
            request.rows = [*request.rows[:history], *range(row, row + kept)]
            row += new
            DONE["rejected"] += new - kept
        DONE["steps"] += 1
        DONE["tokens"] += row - step.first_row


class CacheMachine(RuleBasedStateMachine):
    """Store, capture and scorer."""

    backend = Backend()
    shapes = geometries()
    serving = system = None

    @initialize(data=st.data())
    def start(self, data):
        geometry = data.draw(self.shapes, "geometry")
        self.serving, self.system = Serving(geometry), System(geometry, self.backend)

    @rule(work=st.lists(WORK, min_size=1, max_size=5), padding=PADDING, surplus=st.integers(0, 2), known=st.booleans())
    def step(self, work, padding, surplus, known):
        self.run(work, padding, surplus, known)

    @rule(kind=st.sampled_from(["decode", "verify"]), drafts=st.integers(0, 3), accepted=st.integers(1, 4),
          padding=PADDING, known=st.booleans())  # fmt: skip
    def generate(self, kind, drafts, accepted, padding, known):
        """All requests decode, or verify as many drafts each."""
        work = [Work(i, kind, drafts, accepted + i) for i in range(len(self.serving.pool.running))]
        self.run(work, padding, 0, known)

    @rule(kind=st.sampled_from(["preempt", "finish", "scribble", "dummy"]), number=st.integers(0, MOST_RUNNING - 1))
    def disturb(self, kind, number):
        pool = self.serving.pool
        if kind in ("preempt", "finish") and pool.running:
            getattr(pool, kind)(pool.running[number % len(pool.running)])
        elif kind == "scribble":
            self.system.scribble([NULL_BLOCK, *pool.forget()], BYTES[number % len(BYTES)])
        elif kind == "dummy":
            self.system.run(self.serving.step([], 1 + number), 0)
            self.serving.rows += 1 + number
        DONE[kind] += 1

    def run(self, work, padding, surplus, known):
        parts, accepted = self.serving.schedule(work)
        if not parts:
            return
        step = self.serving.step(parts, padding, known)
        self.system.run(step, surplus)
        self.serving.rows += len(step.slots) + surplus
        self.serving.commit(step, accepted)
        if self.serving.rows % LOOK == 0:
            self.system.look(self.serving.pool.running, self.serving.rows)
            self.serving.rows += MOST_RUNNING

    def teardown(self):
        DONE["schedules"] += 1
        for request in self.serving.pool.running if self.serving else ():
            for layer in self.system.layers:
                layer.check_pages(request)


# ---- mode changes ----------------------------------------------------------------------------------------------
class ModesMachine(RuleBasedStateMachine):
    """The hooks on a fake engine: what each mode writes and reads, and what a change of mode transcodes.

    exact_rows: by slot what was written there last, float64 [2, H_kv, d].
    native, stored: by slot what the native and the compressed page of every layer hold, float64 [L, 2, H_kv, d].
    stale: slots whose token only the compressed page holds.
    """

    shapes = geometries(
        dim=[16, 64, 80], num_blocks=[16], block_size=[16], capacity=[None], softcap=[0.0], dtype=[torch.float32],
        sliding=[0], center=["none"], flavour=["normal", "giant channel"],
    )  # fmt: skip
    serving = handle = None

    @initialize(geometry=shapes, mode=st.sampled_from(Mode), shadow=st.integers(0, 2))
    def start(self, geometry, mode, shadow):
        g, self.serving = geometry, Serving(geometry)
        self.options = {**dict(g.codec), "buffer_size": g.window, "sink_size": g.sinks, "shadow_interval": shadow}
        self.oracles = [Oracle(g, i, 0.0) for i in range(g.layers)]
        self.exact_rows, self.native, self.stored, self.stale = {}, {}, {}, set()
        layers = {f"layers.{i}": FakeLayer(g.heads * g.group, g.heads, g.dim, g.block_size) for i in range(g.layers)}
        self.runner = FakeRunner(layers, g.num_blocks, g.block_size, max_num_seqs=g.num_blocks)
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(compat, "vllm_version", lambda: "0.0-fake")
        self.engine = FakeEngine(self.runner, self.patches, g.block_size)
        self.install(mode)

    def install(self, mode):
        g = self.serving.geometry
        self.ring, self.stale = Ring(g.window, g.block_size, g.sinks), set()
        self.handle = hooks.install_turboquant_hooks(self.runner, mode=Mode.OFF, ring_share=1.0, **self.options)
        self.set_mode(mode)

    @rule(work=st.lists(WORK, min_size=1, max_size=4), padding=PADDING)
    def step(self, work, padding):
        parts, accepted = self.serving.schedule(work)
        if parts:
            self.run(self.serving.step(parts, 0), accepted, padding)

    @rule(mode=st.sampled_from(Mode))
    def change_mode(self, mode):
        self.set_mode(mode)

    @rule(kind=st.sampled_from(["preempt", "finish", "free", "reinstall"]), number=st.integers(0, MOST_RUNNING - 1))
    def disturb(self, kind, number):
        running = self.serving.pool.running
        if kind == "free":
            self.free()
        elif kind == "reinstall":
            self.uninstall()
            self.install(list(Mode)[number % len(Mode)])
        elif running:
            getattr(self.serving.pool, kind)(running[number % len(running)])
        DONE[kind] += 1

    def set_mode(self, mode):
        policy, old = hooks.MODE_POLICIES[mode], self.handle.policy
        if self.handle.is_freed and policy.native_decode:
            with pytest.raises(hooks.NativeCacheFreedError):
                self.handle.set_mode(mode)
            return
        self.handle.set_mode(mode)
        if policy.compressed_write and not old.compressed_write:
            self.encode_all()
        if policy.reads_native and not self.handle.is_freed:
            self.decode_stale()
        DONE[f"to {mode}"] += 1

    def free(self):
        if self.handle.policy.native_decode:
            with pytest.raises(hooks.HookError):
                self.handle.free_kv_cache()
            return
        self.handle.free_kv_cache()
        self.stale, self.native = set(self.stored), {}

    def run(self, step, accepted, padding):
        policy, rows = self.handle.policy, self.oracles[0].rows(step.first_row, len(step.slots))
        exact = [[] for _ in step.parts]
        if policy.compressed_write:
            exact = self.ring.plan(step)
            self.ring.write(step)
        self.write(step, policy, *rows[1:])
        before = [hook.cache.store.pages.clone() for hook in self.handle.values()]
        starts = step.batch.query_start.tolist()
        requests = [
            (request.blocks, history + new, *(x[start : start + new] for x in rows))
            for (request, history, new), start in zip(step.parts, starts, strict=False)
        ]
        outputs = self.engine.step(requests, padding)
        named = step.slots if policy.compressed_write else step.slots[:0]
        for oracle, pages, hook in zip(self.oracles, before, self.handle.values(), strict=True):
            owners = torch.from_numpy(page_owners(oracle.codec, step.batch.block_size))
            check_bytes(hook.cache.store, pages, named, owners)
        for i, part in enumerate(step.parts):
            self.check(part, slice(starts[i], starts[i + 1]), policy, exact[i], rows, outputs)
        self.serving.rows += len(step.slots)
        self.serving.commit(step, accepted)

    def write(self, step, policy, keys, values):
        """What the mode writes, in every layer the same rows."""
        rows = torch.stack([keys, values], 1).double()
        coded = [oracle.decoded(keys, values, positions_of(step)) for oracle in self.oracles]
        for i, slot in enumerate(step.slots.tolist()):
            self.exact_rows[slot] = rows[i]
            if policy.native_write:
                self.native[slot] = rows[i].expand(len(self.oracles), -1, -1, -1)
            if policy.compressed_write:
                self.stored[slot] = torch.stack([layer[i] for layer in coded])
                (self.stale.discard if policy.native_write else self.stale.add)(slot)

    def check(self, part, rows, policy, exact, step_rows, outputs):
        """One request, in every layer: what its mode lets it read."""
        request, history, new = part
        native = policy.native_decode or (policy.native_prefill and new > 1)
        own = [*torch.stack(step_rows[1:], 1)[rows].double()]
        slots = [self.slot(request, p) for p in range(history)]
        for layer, (oracle, output) in enumerate(zip(self.oracles, outputs.values(), strict=True)):
            if native:
                cached = [self.native[slot][layer] for slot in slots]
            else:
                cached = [self.exact_rows[s] if p in exact else self.stored[s][layer] for p, s in enumerate(slots)]
            oracle.check(step_rows[0][rows], output[rows], cached + own, history)
        DONE["native reads" if native else "compressed reads"] += history

    def slot(self, request, position):
        size = self.serving.geometry.block_size
        return request.blocks[position // size] * size + position % size

    def encode_all(self):
        """Leaving `off`: what the native pages hold goes into the store, and nothing is exact any more."""
        self.ring.clear()
        self.stored, self.stale = {}, set()
        if not self.native:
            return
        tokens = torch.stack(list(self.native.values())).float()
        anywhere = [0] * len(tokens)  # centres of hooks do not turn
        coded = torch.stack([o.decoded(*tokens[:, i].unbind(1), anywhere) for i, o in enumerate(self.oracles)], 1)
        self.stored = dict(zip(self.native, coded, strict=True))

    def decode_stale(self):
        """Going native: exactly from the ring where it holds the token, else as it was compressed."""
        for slot in self.stale:
            held = self.ring.holds(slot)
            layers = len(self.oracles)
            self.native[slot] = self.exact_rows[slot].expand(layers, -1, -1, -1) if held else self.stored[slot]
        self.stale = set()

    def uninstall(self):
        self.handle.uninstall()
        self.decode_stale()
        self.check_native()

    def check_native(self):
        """The native pages of all running requests, token by token."""
        for request in self.serving.pool.running:
            slots = [self.slot(request, p) for p in range(len(request.rows))]
            for i, layer in enumerate(self.runner.layers.values() if slots else ()):
                found = torch.stack(layer.impl.read(layer.kv_cache, request.blocks, len(slots)), 1).double()
                wanted = torch.stack([self.native[slot][i] for slot in slots])
                error = (found - wanted).norm(dim=-1)
                assert (error <= 16 * FLOAT32_EPS * wanted.norm(dim=-1)).all()

    def teardown(self):
        DONE["schedules"] += 1
        if self.handle is not None:
            try:
                self.uninstall()
            finally:
                self.patches.undo()


# ---- the kernels -----------------------------------------------------------------------------------------------
def dense_attention(*arguments):
    """A dense attention as an engine would bring it; contiguous, as `StagedPrefill` needs it."""
    from test_kernel_prefill import dense

    out, lse = dense(*arguments)
    return out.contiguous(), lse.contiguous()


def interpreted_kernels(layer, ring):
    """What `choose_kernels` would choose on a device without the fast decode."""
    from turboquant.kernels.encode import encode
    from turboquant.kernels.history import history_kernel
    from turboquant.kernels.prefill import StagedPrefill

    half = layer.recent.keys.dtype != torch.float32
    return Kernels(encode, history_kernel, prefill=StagedPrefill(layer, dense_attention) if half else None)


def interpreted_plan(*arguments):
    from turboquant.kernels.ring import plan

    plan(*arguments)


class InterpretedMachine(CacheMachine):
    """The portable kernels in Triton's interpreter, which truncates to 16 bits."""

    backend = Backend("cpu", interpreted_plan, interpreted_kernels, half_error=2.0**-8, ties=True)
    shapes = geometries(
        dim=[64, 16, 80], heads=[1, 2], group=[1, 3], block_size=[16, 24], num_blocks=[9], layers=[1],
        window=[0, 5, 17], sliding=[0, 0, 20],
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        few_programs(self.patches)

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.patches.undo()


def few_programs(patches):
    """The interpreter runs programs one by one, also empty ones."""
    from turboquant.kernels import encode, history

    patches.setattr(history, "MAX_SPLITS", 2)
    patches.setattr(encode, "tile", lambda *_: (8, 4))


def device_kernels(layer, ring):
    return choose_kernels(layer, ring, dense_attention)


def device_plan(*arguments):
    choose_plan(torch.device("cuda"))(*arguments)


class DeviceMachine(CacheMachine):
    """What serves a CUDA device, the fast decode included."""

    backend = Backend("cuda", device_plan, device_kernels, error=2.0**-20, half_error=2.0**-8, ties=True)
    shapes = geometries(dim=[128, 64, 16, 80, 256], block_size=[16, 32, 48, 64], sliding=[0, 0, 1, 16, 100, 128])


CI = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
TestCache, TestModes = CacheMachine.TestCase, ModesMachine.TestCase
TestCache.settings = CI
TestModes.settings = settings(CI, max_examples=15)


def keep_what_the_ring_held(patches):
    """A block that gets an entry keeps the marks of the entry's former block."""
    assign = ExactRing._assign

    def keep(self, blocks):
        before = self.written.clone()
        assign(self, blocks)
        self.written.copy_(before)

    patches.setattr(ExactRing, "_assign", keep)


def forget_the_history_of_a_mixed_batch(patches):
    """The batch's longest query says that nobody has cached tokens."""
    lens = AttentionBatch.history_lens.func

    def forget(self):
        return torch.zeros_like(self.seq_lens) if self.query_lens.max() > 4 else lens(self)

    patches.setattr(AttentionBatch, "history_lens", property(forget))


def write_the_neighbour_too(patches):
    write = CompressedBlockStore.write

    def spill(self, slots, keys, values, positions):
        write(self, slots[-1:] ^ 1, keys[-1:], values[-1:], positions[-1:])
        write(self, slots, keys, values, positions)

    patches.setattr(CompressedBlockStore, "write", spill)


def see_one_token_more(patches):
    window = QueryGroup._in_window

    def wide(self, mask, positions):
        return window(replace(self, window=self.window + 1) if self.window else self, mask, positions)

    patches.setattr(QueryGroup, "_in_window", wide)


def forget_the_number_of_blocks(patches):
    patches.setattr(ExactRing, "_number_written", lambda self, batch: None)


def leave_native_pages_stale(patches):
    patches.setattr(hooks.HookHandle, "_decode_stale", lambda self: None)


def keep_the_ring_across_off(patches):
    patches.setattr(ExactRing, "clear", lambda self: None)


MUTATIONS = [
    (CacheMachine, keep_what_the_ring_held),
    (CacheMachine, forget_the_history_of_a_mixed_batch),
    (CacheMachine, write_the_neighbour_too),
    (CacheMachine, see_one_token_more),
    (CacheMachine, forget_the_number_of_blocks),
    (ModesMachine, leave_native_pages_stale),
    (ModesMachine, keep_the_ring_across_off),
]


@pytest.mark.parametrize(("machine", "mutate"), MUTATIONS, ids=lambda x: x.__name__)
def test_mutation_is_noticed(machine, mutate, monkeypatch):
    mutate(monkeypatch)
    options = settings(CI, max_examples=100, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=options)


def test_interpreted_kernels():
    pytest.importorskip("triton")
    run_state_machine_as_test(InterpretedMachine, settings=settings(CI, max_examples=3, stateful_step_count=8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_device():
    run_state_machine_as_test(DeviceMachine, settings=settings(CI, max_examples=200))


# ---- the script ------------------------------------------------------------------------------------------------
MACHINES = {"cache": CacheMachine, "modes": ModesMachine, "interpreter": InterpretedMachine, "device": DeviceMachine}
BATCH = 100  # schedules of one hypothesis run, which remembers all of them


def run_batch(machine, shrink, count, number):
    """What failed, and the figures, of `count` schedules of a seed."""
    DONE.clear()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    options = settings(CI, max_examples=count, stateful_step_count=30, derandomize=False, database=None, phases=phases)
    try:
        seed(number)(get_state_machine_test(MACHINES[machine], settings=options))()
    except Exception as error:  # noqa: BLE001  # hypothesis has noted the schedule; the others are run, too
        where = traceback.extract_tb(error.__traceback__)[-1]
        notes = [f"seed {number}: {type(error).__name__} in line {where.lineno}: {error}"]
        notes += getattr(error, "__notes__", ())
        return ["\n".join(notes)], DONE, WORST
    return [], DONE, WORST


def run_all(machine, schedules, first_seed, processes, shrink):
    """Batch after batch, or many at a time."""
    counts = [min(BATCH, schedules - first) for first in range(0, schedules, BATCH)]
    run, seeds = partial(run_batch, machine, shrink), range(first_seed, first_seed + len(counts))
    if processes == 1:
        yield from map(run, counts, seeds)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, counts, seeds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", choices=sorted(MACHINES), default="cache")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shrink", action="store_true", help="reduce what fails; takes minutes")
    parser.add_argument("--json", type=Path, help="file of the figures, written again after every batch")
    options = parser.parse_args()
    command = shlex.join(["python", "tests/test_fuzz.py", *sys.argv[1:]])
    start, failures, done, worst = time.monotonic(), [], Counter(), Counter()
    chosen = (options.machine, options.schedules, options.seed, options.processes, options.shrink)
    for failed, counted, errors in run_all(*chosen):
        failures, done, worst = failures + failed, done + counted, worst | errors  # the union takes the larger ones
        sys.stderr.write("".join(f"{failure}\n" for failure in failed))
        found = {"command": command, "seed": options.seed, "seconds": round(time.monotonic() - start)}
        found |= {"failures": failures, "done": dict(sorted(done.items())), "worst": dict(sorted(worst.items()))}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
