"""The read path against plain attention over plain lists: merge algebra, segments, hostile memory, sensitivity."""

import itertools
import math

import pytest
import torch
from helpers import (
    FLOAT32_EPS,
    AmpleRing,
    Request,
    Scheduler,
    attention,
    build_codec,
    cosine,
    normal,
    plain_step,
    rel_l2,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from turboquant import score
from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine, StepPlan, entry_size
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import PRESETS, TurboQuantConfig
from turboquant.score import HybridScorer, attend, merge

UNTOUCHED = 7.0


class World:
    """One layer's cache next to plain lists of the rows it was given, exact and as the codec quantises them.

    The pool and the ring start full of NaN patterns.  Which tokens are read exactly comes from `AmpleRing` when the
    ring has room for all blocks, else from the plan: losing an entry is never wrong.
    """

    def __init__(
        self, *, heads=2, group=2, dim=64, window=11, sinks=0, block_size=8, num_blocks=40, capacity=None, gain=1.0,
        sliding=0, softcap=0.0, transform=None, dtype=torch.float32, fill=0xFF, **options,
    ):  # fmt: skip
        self.heads, self.group, self.dim, self.block_size, self.dtype = heads, group, dim, block_size, dtype
        self.codec = build_codec(heads, dim, **options)
        if transform is not None:
            self.codec = KVCodec.build(TurboQuantConfig(**options), 0, heads, dim, transform)
        ample = capacity is None
        capacity = num_blocks * block_size // entry_size(block_size) if ample else capacity
        self.engine = KVCaptureEngine(num_blocks, block_size, window, capacity, sinks=sinks)
        self.layer = self.engine.add_layer("layer", self.codec, heads, dtype)
        self.layer.store.pages.fill_(fill)
        for ring_data in (self.layer.recent.keys, self.layer.recent.values):
            ring_data.view(torch.uint8).fill_(fill)
        self.model = AmpleRing(window, block_size, sinks) if ample else None
        self.scorer = HybridScorer(gain / math.sqrt(dim), sliding, softcap)
        self.exact = torch.zeros(2, 0, heads, dim, dtype=torch.float64)
        self.coded = self.exact.clone()
        self.errors, self.rival_errors, self.cosines = [], [], []
        self.exact_tokens = self.coded_tokens = self.rows = 0

    def run(self, step, rows=None):
        """Compute a step; record the errors of every row and head.  Returns the whole output tensor."""
        query, keys, values = rows or self.random_rows(step)
        plan = self.engine.begin_step(step.batch)
        exact = self.model.plan(step) if self.model else present_positions(plan, step)
        self.remember(step, keys, values)
        self.engine.ingest(self.layer, keys, values, step.slots)
        if self.model:
            self.model.write(step)
        output = torch.full_like(query, UNTOUCHED)
        self.scorer.attend(self.layer, plan, query, (keys, values), output)
        row = 0
        for (request, history, new), positions in zip(step.parts, exact, strict=True):
            ids = [*request.rows[:history], *range(step.first_row + row, step.first_row + row + new)]
            self.compare(query[row : row + new], output[row : row + new], ids, history, positions)
            row += new
        assert (output[row:] == UNTOUCHED).all(), "a padded row was written"
        self.rows = step.first_row + len(step.slots)
        return output

    def random_rows(self, step):
        n, seed = len(step.slots), 10 * step.first_row + 3
        query = normal(n, self.heads * self.group, self.dim, seed=seed)
        keys, values = (normal(n, self.heads, self.dim, seed=seed + i) for i in (1, 2))
        return query.to(self.dtype), keys.to(self.dtype), values.to(self.dtype)

    def remember(self, step, keys, values):
        """Append the rows to the lists, quantised by hand and decoded in float64 to the original basis."""
        real, codec = step.slots >= 0, self.codec
        coded_keys = codec.key.decode(codec.encode_keys(keys[real])).double() @ codec.key.rotation.matrix.double()
        coded_keys = coded_keys / codec.transform.gain.double() + codec.transform.center.double()
        coded_values = (
            codec.value.decode(codec.encode_values(values[real])).double() @ codec.value.rotation.matrix.double()
        )
        coded = torch.full((2, len(real), self.heads, self.dim), torch.nan, dtype=torch.float64)
        coded[:, real] = torch.stack([coded_keys, coded_values])
        self.coded = torch.cat([self.coded, coded], dim=1)
        self.exact = torch.cat([self.exact, torch.stack([keys, values]).double()], dim=1)

    def compare(self, query, output, ids, history, exact_positions):
        is_exact = torch.arange(len(ids)) >= history
        is_exact[torch.tensor(exact_positions, dtype=torch.int64)] = True
        keys, values = torch.where(is_exact[:, None, None], self.exact[:, ids], self.coded[:, ids])
        options = {"window": self.scorer.window, "softcap": self.scorer.softcap}
        expected = attention(query, keys, values, history, self.scorer.scale, **options)
        rival = self.rotated_attention(query, keys, values, history, options)
        self.errors.append(rel_l2(output, expected).flatten())
        self.rival_errors.append(rel_l2(rival.to(self.dtype), expected).flatten())
        self.cosines.append(cosine(output, expected).flatten())
        self.exact_tokens += len(exact_positions)
        self.coded_tokens += history - len(exact_positions)

    def rotated_attention(self, query, keys, values, history, options):
        """torch's own float32 attention in the codec's bases: rotated query, keys and values, output rotated back."""
        key_matrix, value_matrix = self.codec.key.rotation.matrix, self.codec.value.rotation.matrix
        rows = (query.float() @ key_matrix.T, keys.float() @ key_matrix.T, values.float() @ value_matrix.T)
        return attention(*rows, history, self.scorer.scale, **options, dtype=torch.float32) @ value_matrix

    def check(self):
        """Trap 1: relative error and cosine of every row and head, against torch's own error in this dtype.

        Twice that in the mean square; a single row may be unlucky twice more.
        """
        errors, rivals, cosines = (torch.cat(x) for x in (self.errors, self.rival_errors, self.cosines))
        rms, rival_rms = errors.square().mean().sqrt(), rivals.square().mean().sqrt()
        assert rms <= 2 * rival_rms, f"{rms:.2e} is above twice {rival_rms:.2e}"
        assert errors.max() <= 4 * rivals.max(), f"{errors.max():.2e} is above four times {rivals.max():.2e}"
        assert (1 - cosines).max() <= (4 * rivals.max()) ** 2 + 1e-15


def present_positions(plan, step):
    positions = plan.window.positions(step.batch.history_lens)
    return [positions[i][plan.window.present[i]].tolist() for i in range(len(step.parts))]


def serve(world, seed, steps=20, **options):
    """Random continuous batching through a world; returns the scheduler, whose events say what happened."""
    num_blocks = world.layer.store.num_blocks
    scheduler = Scheduler(seed, num_blocks=num_blocks, block_size=world.block_size, **options)
    for _ in range(steps):
        step = scheduler.step()
        world.run(step)
        scheduler.commit(step)
    world.check()
    assert world.coded_tokens > 0, "no compressed token was read"
    return scheduler


def requests_with_history(world, lengths, blocks=None, room=40):
    """Requests of given lengths whose tokens were prefilled one request at a time, in scattered blocks."""
    free = iter(
        blocks or torch.randperm(world.layer.store.num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
    )
    requests = []
    for length in lengths:
        request = Request(0, blocks=[next(free) for _ in range((length + room) // world.block_size + 1)])
        if length:
            world.run(plain_step([(request, 0, length)], world.block_size, world.rows))
            request.rows = list(range(world.rows - length, world.rows))
        requests.append(request)
    return requests


# ---- merge and attend ------------------------------------------------------------------------------------------
def random_partial(seed, shape=(3, 5), dim=8):
    generator = torch.Generator().manual_seed(seed)
    lse = 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randn(*shape, dim, generator=generator, dtype=torch.float64), lse


def empty(shape=(3, 5), dim=8):
    return torch.zeros(*shape, dim, dtype=torch.float64), torch.full(shape, -torch.inf, dtype=torch.float64)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


def test_merge_is_commutative_and_associative():
    a, b, c = (random_partial(i) for i in range(3))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_empty_segment_is_the_identity():
    a = random_partial(1)
    assert_same(merge(a, empty()), a)
    assert_same(merge(empty(), a), a)


def test_two_empty_segments_are_empty():
    """-inf - -inf is NaN; the merge of nothing with nothing is nothing."""
    out, lse = merge(empty(), empty())
    assert torch.equal(out, torch.zeros(3, 5, 8, dtype=torch.float64)) and (lse == -torch.inf).all()


def test_merge_of_extreme_weights():
    """A segment 10^4 nats heavier takes everything, without overflow."""
    (out, lse), b = random_partial(2), random_partial(3)
    assert_same(merge((out, lse + 1e4), b), (out, lse + 1e4))
    assert_same(merge(b, (out, lse - 1e4)), b)


def segment(first, last):
    """`attend` over tokens [first, last) of a fixed problem with 40 tokens, and over all of them with a mask."""
    query, keys, values = normal(2, 3, 2, 4, 16, seed=90), normal(2, 3, 40, 16, seed=91), normal(2, 3, 40, 16, seed=92)
    mask = torch.zeros(2, 1, 40, dtype=torch.bool)
    mask[..., first:last] = True
    part = slice(first, last)
    cut = attend(query, keys[:, :, part], values[:, :, part], mask[..., part]) if first < last else None
    return cut, attend(query, keys, values, mask)


@pytest.mark.parametrize(
    "cuts", [[0, 40], [0, 13, 40], [0, 1, 2, 39, 40], [0, 0, 40, 40], [0, 20, 20, 20, 40], list(range(41))]
)
def test_any_cuts_give_the_whole(cuts):
    """Segments may be empty or repeated; masked tokens are as good as absent ones."""
    (whole, whole_lse), _ = segment(0, 40)
    folded = masked = (torch.zeros_like(whole), torch.full_like(whole_lse, -torch.inf))
    for first, last in itertools.pairwise(cuts):
        cut, hidden = segment(first, last)
        folded, masked = merge(folded, cut) if cut else folded, merge(masked, hidden)
    for out, lse in (folded, masked):
        assert rel_l2(out, whole).max() < (4 + len(cuts)) * FLOAT32_EPS
        assert ((lse - whole_lse).abs() < (4 + len(cuts)) * FLOAT32_EPS * whole_lse.abs()).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attend_is_softmax_attention(softcap):
    """out and lse of the definition, for a mask that differs from row to row; empty rows are (0, -inf)."""
    query, keys, values = normal(2, 3, 2, 4, 16, seed=1), normal(2, 3, 9, 16, seed=2), normal(2, 3, 9, 16, seed=3)
    mask = torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[0, 2] = False
    out, lse = attend(query, keys, values, mask, softcap)
    logits = torch.einsum("nhgqd,nhtd->nhgqt", query.double(), keys.double())
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    expected = torch.einsum("nhgqt,nhtd->nhgqd", logits.softmax(-1).nan_to_num(), values.double())
    torch.testing.assert_close(lse, logits.logsumexp(-1).float())
    torch.testing.assert_close(out, expected.float())
    assert (lse[0, :, :, 2] == -torch.inf).all() and (out[0, :, :, 2] == 0).all()


def test_attend_never_looks_at_hidden_tokens():
    """0 * NaN is NaN."""
    query, keys, values = normal(2, 1, 2, 4, 16, seed=5), normal(2, 1, 9, 16, seed=6), normal(2, 1, 9, 16, seed=7)
    mask = torch.ones(2, 1, 9, dtype=torch.bool)
    mask[0, :, 3:5], mask[1] = False, False
    expected = attend(query, keys, values, mask)
    for poison in (torch.nan, torch.inf, -torch.inf, 1e30):
        keys[0, :, 3:5], values[0, :, 3:5], keys[1], values[1] = poison, poison, poison, poison
        assert all(torch.equal(a, b) for a, b in zip(attend(query, keys, values, mask), expected, strict=True))


# ---- any batch ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (5, 4), (16, 0), (27, 8), (0, 3)])
def test_any_interleaving_equals_plain_attention(window, sinks, seed):
    """Invariant 1: chunks, prefix hits, preemption, block reuse, rejected drafts, padding, garbage tables."""
    world = World(window=window, sinks=sinks, num_blocks=30)
    scheduler = serve(world, seed, steps=25, max_chunk=30)
    assert (world.exact_tokens > 0) == (window + sinks > 0)
    assert min(scheduler.events[e] for e in ("reused", "shared", "rejected")) > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("capacity", [1, 4, 12])
def test_any_interleaving_with_a_small_ring(capacity, seed):
    """Evicted tokens are read compressed."""
    world = World(capacity=capacity, sinks=4)
    serve(world, seed, steps=25)
    assert world.exact_tokens > 0


def test_all_events_happen():
    """The random batches contain what the comparison needs; preemption needs a small pool."""
    scheduler = serve(World(num_blocks=18), 11, steps=60)
    assert min(scheduler.events[e] for e in ("reused", "shared", "rejected", "preempted")) >= 3


CODECS = [
    *PRESETS.values(),
    {"key_quantizer": "prod"},
    {"key_quantizer": "prod", "key_bits": 2},
    {"value_quantizer": "group"},
    {"value_quantizer": "group", "value_bits": 8, "key_bits": 8},
    {"rotation": "haar"},
    {"scale_candidates": 1},
]


@pytest.mark.parametrize("options", CODECS, ids=str)
def test_every_codec(options):
    serve(World(**options), 21)


@pytest.mark.parametrize("dim", [80, 96, 112, 128, 192, 256, 576])
def test_every_head_size(dim):
    serve(World(dim=dim, heads=1, group=3), 22, steps=12)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("heads", [1, 2])
def test_every_gqa_ratio(heads, group):
    serve(World(heads=heads, group=group), 23, steps=12)


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 320), (16, 20), (24, 14), (48, 8), (128, 5)])
def test_every_block_size(block_size, num_blocks):
    """S21."""
    serve(World(block_size=block_size, num_blocks=num_blocks, sinks=20), 24, max_length=130)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_every_residue_of_the_length(block_size):
    """Prompts of every length modulo the block size, then a decode, a verify step and a chunk."""
    world = World(block_size=block_size, window=5, num_blocks=640)
    for request in requests_with_history(world, range(2 * block_size + 2)):
        for new in (1, 3, block_size + 1, 1):
            world.run(plain_step([(request, len(request.rows), new)], block_size, world.rows))
            request.rows += range(world.rows - new, world.rows)
    world.check()


@pytest.mark.parametrize("gain", [4.0, 30.0])
def test_peaked_attention(gain):
    """One token takes nearly all the weight; the sink of trap 1 shows in the relative error."""
    serve(World(gain=gain), 25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype):
    """Queries, keys, values, ring and output in half precision; computed in float32 and rounded once."""
    serve(World(dtype=dtype), 26)


def test_gain_of_the_key_transform():
    """Queries are divided by what keys are multiplied with."""
    gain = torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    serve(World(transform=KeyTransform(torch.zeros(2, 64), gain)), 27)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_centre_of_the_key_transform(softcap):
    """Compressed keys are centred, exact ones are not: all segments must be merged with the same shift."""
    center = normal(2, 64, seed=77)
    serve(World(transform=KeyTransform(center, torch.ones(2, 64)), softcap=softcap), 27)


# ---- batches from bug reports ----------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["long first", "long last"])
@pytest.mark.parametrize("long", [(0, 1000), (0, 1000, 0, 700), (3, 997)], ids=["one", "two", "continued"])
@pytest.mark.parametrize("chunk", [(400, 100), (499, 1)], ids=["chunk", "one token"])
def test_mixed_batch_keeps_the_cached_prefix(order, long, chunk):
    """{q=1000, seq=1000; q=100, seq=500}: max_query_len == max_seq_len does not mean that nobody has history."""
    world = World(block_size=16, num_blocks=330, heads=1)
    lengths = [long, chunk][order[0]] + [long, chunk][order[1]]
    requests = requests_with_history(world, lengths[::2], room=1000)
    world.run(plain_step([*zip(requests, lengths[::2], lengths[1::2], strict=True)], 16, world.rows))
    world.check()
    assert world.coded_tokens >= chunk[0] - 11


def test_losing_the_prefix_would_be_seen():
    """What the comparison above is worth; without the cached tokens the output is another one."""
    world = World(block_size=16, num_blocks=120, heads=1)
    (request,) = requests_with_history(world, [400], room=100)
    step = plain_step([(request, 400, 100)], 16, world.rows)
    query, keys, values = world.random_rows(step)
    right = world.run(step, (query, keys, values))
    alone = attention(query, keys, values, 0, world.scorer.scale)
    assert cosine(right, alone).mean() < 0.6


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_verify_batch(drafts):
    """Row t of a request with 1+k rows sees its prefix and t+1 of its own rows, not a neighbour's."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [17, 40, 3, 24])
    parts = [(request, len(request.rows), 1 + drafts) for request in requests]
    step = plain_step(parts, 8, world.rows)
    rows = world.random_rows(step)
    world.run(step, rows)
    world.check()
    assert world.coded_tokens > 30
    for row, (request, history, _) in enumerate(parts):
        last = (row + 1) * (1 + drafts) - 1
        shorter = plain_step([(request, history, drafts)], 8, world.rows)
        first = row * (1 + drafts)
        again = world.run(shorter, tuple(x[first:last] for x in rows))
        output = world.run(step, rows)[first:last]
        assert rel_l2(again, output).max() <= 2 * torch.cat(world.rival_errors).max()


def test_decodes_joined_by_a_late_prefill():
    """A short prefill joins verify steps of running requests; values tell the requests apart."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [30, 21, 0])
    parts = [(requests[0], 30, 4), (requests[2], 0, 6), (requests[1], 21, 4)]
    step = plain_step(parts, 8, world.rows)
    query, keys, values = world.random_rows(step)
    values[4:10] += 1000
    output = world.run(step, (query, keys, values))
    world.check()
    assert (output[4:10] > 900).all() and output[:4].abs().max() < 10 and output[10:].abs().max() < 10


def test_dummy_lengths_of_graph_capture():
    """Q_lens [4, 4] with seq_lens [1, 1] select one row each, without history."""
    world = World(heads=1)
    batch = AttentionBatch(torch.tensor([0, 4, 8]), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=torch.int32), 8)
    query, keys, values = normal(8, 2, 64, seed=1), normal(8, 1, 64, seed=2), normal(8, 1, 64, seed=3)
    output = torch.full_like(query, UNTOUCHED)
    plan = world.engine.begin_step(batch)
    world.engine.ingest(world.layer, keys, values, torch.full((8,), -1))
    world.scorer.attend(world.layer, plan, query, (keys, values), output)
    for row in (0, 4):
        torch.testing.assert_close(output[row], values[row].expand(2, -1))
    assert (output[[1, 2, 3, 5, 6, 7]] == UNTOUCHED).all()


@pytest.mark.parametrize("sliding", [1, 7, 11, 12, 30])
@pytest.mark.parametrize("capacity", [None, 12])
def test_sliding_window(sliding, capacity):
    """Windows of 1, ring, ring + 1; sequences wrap the ring several times, in chunks that are no divisor."""
    serve(World(sliding=sliding, capacity=capacity, sinks=6), 31, steps=25)


def test_sliding_window_over_many_chunks():
    """400 tokens in chunks of 30 through a ring of 3 entries and a window of 64."""
    world = World(sliding=64, capacity=3, num_blocks=60, heads=1)
    (request,) = requests_with_history(world, [0], blocks=list(range(60))[::-1])
    request.blocks = list(range(60))[::-1]
    while len(request.rows) < 400:
        world.run(plain_step([(request, len(request.rows), 30)], 8, world.rows))
        request.rows += range(world.rows - 30, world.rows)
    world.check()
    assert world.exact_tokens and world.coded_tokens


def test_blocks_that_the_window_manager_freed():
    """VLLM points the logical blocks that left the window to block 0, whose bytes are anything."""
    world = World(sliding=10, num_blocks=60, heads=1)
    request, _ = requests_with_history(world, [70, 45], blocks=list(range(1, 60)))
    request.blocks = [0] * 7 + request.blocks[7:]
    world.run(plain_step([(request, 70, 3)], 8, world.rows))
    world.check()


@pytest.mark.parametrize("softcap", [50.0, 20.0])
def test_softcap_with_large_logits(softcap):
    """At logits of 80 to 200 the cap decides; at ordinary ones leaving it out would hardly show."""
    world = World(softcap=softcap, gain=50.0, heads=1)
    requests = requests_with_history(world, [60, 33])
    step = plain_step([(request, len(request.rows), 2) for request in requests], 8, world.rows)
    query, keys, values = world.random_rows(step)
    capped = world.run(step, (query, keys, values))
    world.check()
    logits = torch.einsum("thd,nd->thn", query, world.exact[0, :, 0].float()) * world.scorer.scale
    assert 80 < logits.abs().max() < 300
    world.scorer = HybridScorer(world.scorer.scale)
    assert rel_l2(world.run(step, (query, keys, values)), capped).mean() > 0.05


# ---- hostile memory --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"key_bits": 8, "value_quantizer": "group"}, {"sliding": 9}], ids=str)
@pytest.mark.parametrize("fill", [0xFF, 0x7F, 0x51])
def test_stale_bytes_and_garbage_tables_change_nothing(options, fill):
    """Outputs bit-equal to those over a zero-filled pool with clean tables (0x7F7F is 3e38, 0x5151 is 6e10)."""
    dirty, clean = World(fill=fill, **options), World(fill=0, **options)
    schedulers = [Scheduler(41, num_blocks=40), Scheduler(41, num_blocks=40)]
    for _ in range(15):
        step, same = (scheduler.step() for scheduler in schedulers)
        used = (same.batch.seq_lens[:, None] + 7) // 8 > torch.arange(same.batch.block_table.shape[1])
        same.batch.block_table.masked_fill_(~used, 0)
        assert torch.equal(dirty.run(step), clean.run(same))
        for scheduler, done in zip(schedulers, (step, same), strict=True):
            scheduler.commit(done)


def test_narrowed_tables_and_expanded_lengths():
    """Strides are not what the shapes suggest."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [30, 30, 30])
    step = plain_step([(request, 30, 1) for request in requests], 8, world.rows)
    rows = world.random_rows(step)
    expected = world.run(step, rows)
    wide = torch.full((3, 40), 2**31 - 1, dtype=torch.int32)
    wide[:, 3 : 3 + step.batch.block_table.shape[1]] = step.batch.block_table
    table = wide[:, 3 : 3 + step.batch.block_table.shape[1]]
    batch = AttentionBatch(step.batch.query_start, torch.tensor([31]).expand(3), table, 8)
    plan, output = world.engine.begin_step(batch), torch.empty_like(rows[0])
    world.scorer.attend(world.layer, plan, rows[0], rows[1:], output)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("side", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_token_of_one_request_does_not_touch_another(side, bad):
    """NaN in request A's step; the rows of B and C, which share the batch, stay bit for bit."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [20, 20, 9])
    step = plain_step([(request, len(request.rows), 3) for request in requests], 8, world.rows)
    rows = world.random_rows(step)
    expected = world.run(step, rows)
    rows[side][0] = bad
    found = world.run(step, rows)
    assert torch.equal(found[3:], expected[3:]) and not torch.equal(found[:3], expected[:3])


def test_broken_key_does_not_touch_earlier_rows():
    """The last row of a chunk is NaN; the rows before it do not see that token."""
    world = World(heads=1, num_blocks=60)
    (request,) = requests_with_history(world, [20])
    step = plain_step([(request, 20, 4)], 8, world.rows)
    rows = world.random_rows(step)
    expected = world.run(step, rows)
    rows[1][3] = torch.nan
    found = world.run(step, rows)
    assert torch.isnan(found[3]).any()
    assert torch.equal(found[:3], expected[:3])


def test_ring_that_got_no_memory():
    """A window without entries is read compressed."""
    serve(World(capacity=0), 42, steps=5)


# ---- selection -------------------------------------------------------------------------------------------------
def test_selected_requests_only():
    """rows_by_length computes the requests it names; other rows of the output stay as they are."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [20, 31, 9])
    step = plain_step(
        [(request, len(request.rows), new) for request, new in zip(requests, (1, 3, 1), strict=True)], 8, world.rows
    )
    query, keys, values = world.random_rows(step)
    expected, output = world.run(step, (query, keys, values)), torch.full_like(query, UNTOUCHED)
    plan = world.engine.begin_step(step.batch)
    groups = step.batch.rows_by_length()
    assert groups == {1: [0, 2], 4: [1]}
    world.scorer.attend(world.layer, plan, query, (keys, values), output, {1: groups[1]})
    torch.testing.assert_close(output[[0, 4]], expected[[0, 4]])
    assert (output[1:4] == UNTOUCHED).all()


def test_selections_of_one_step_do_not_get_mixed_up():
    """One plan, several calls: each computes the requests it names, also where another call named as many."""
    world = World(heads=1, num_blocks=60)
    requests = requests_with_history(world, [20, 31, 9])
    step = plain_step([(request, len(request.rows), 1) for request in requests], 8, world.rows)
    query, keys, values = world.random_rows(step)
    expected, plan = world.run(step, (query, keys, values)), world.engine.begin_step(step.batch)
    for row in range(3):
        output = torch.full_like(query, UNTOUCHED)
        world.scorer.attend(world.layer, plan, query, (keys, values), output, {1: [row]})
        torch.testing.assert_close(output[row], expected[row])
        assert (output[[i for i in range(3) if i != row]] == UNTOUCHED).all()


def test_layers_of_one_step_do_not_get_mixed_up():
    """One plan for layers that differ in heads, head size, sliding window and softcap: it keeps nothing of a layer."""
    shapes = [(1, 2, 64, 0, 0.0), (2, 1, 64, 7, 0.0), (2, 4, 80, 7, 0.0), (1, 2, 64, 0, 4.0), (1, 2, 64, 20, 0.0)]
    alone, shared = [], []
    engine = KVCaptureEngine(20, 8, 11, 20)
    layers = [engine.add_layer(str(i), build_codec(s[0], s[2]), s[0], torch.float32) for i, s in enumerate(shapes)]
    request = Request(0, blocks=list(range(20)))
    for history, new in ((0, 50), (50, 3)):
        step = plain_step([(request, history, new)], 8)
        plan, rows = engine.begin_step(step.batch), step.batch.rows_by_length()
        for i, (layer, (heads, group, dim, window, softcap)) in enumerate(zip(layers, shapes, strict=True)):
            query, *own = (normal(new, h, dim, seed=10 * i + j) for j, h in enumerate((heads * group, heads, heads)))
            engine.ingest(layer, *own, step.slots)
            scorer = HybridScorer(dim**-0.5, window, softcap)
            for outputs, which in ((shared, plan), (alone, StepPlan(step.batch, plan.window))):
                outputs.append(torch.empty_like(query))
                scorer.attend(layer, which, query, own, outputs[-1], rows)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_cached_tokens_only():
    """own=None: the step's rows are not attended to."""
    world = World(heads=1, num_blocks=60, window=0)
    (request,) = requests_with_history(world, [37])
    step = plain_step([(request, 37, 2)], 8, world.rows)
    query = world.random_rows(step)[0]
    output = torch.empty_like(query)
    world.scorer.attend(world.layer, world.engine.begin_step(step.batch), query, None, output)
    expected = attention(query, *world.coded[:, request.rows], 37, world.scorer.scale)
    rival = attention(query, *world.coded[:, request.rows], 37, world.scorer.scale, dtype=torch.float32)
    assert rel_l2(output, expected).max() <= 2 * rel_l2(rival, expected).max() + 2 * torch.cat(world.rival_errors).max()


# ---- sensitivity -----------------------------------------------------------------------------------------------
def decode_step():
    """A decode of 41 cached tokens, the last 11 of them exact, and a function that computes it again."""
    world = World(group=2, num_blocks=20, key_bits=3, value_bits=3)
    (request,) = requests_with_history(world, [41])
    step = plain_step([(request, 41, 1)], 8, world.rows)
    query, keys, values = world.random_rows(step)
    plan = world.engine.begin_step(step.batch)

    def compute():
        output = torch.empty_like(query)
        world.scorer.attend(world.layer, plan, query, (keys, values), output)
        return output

    return world, request, plan, compute


def test_every_plane_of_a_compressed_token_matters():
    """Habit 5: one flipped bit of a key code, value code or scale changes its own head's output, and only that."""
    world, request, _, compute = decode_step()
    before = compute()
    for plane in world.layer.store.format.planes:
        for head in (0, 1):
            view = world.layer.store.format.view(world.layer.store.pages, plane)[request.blocks[2], head]
            view[5, -1] ^= 0x40
            after = compute()
            changed = (after != before).flatten(2).any(-1)[0].tolist()
            assert changed == [head == 0, head == 0, head == 1, head == 1], plane.name
            view[5, -1] ^= 0x40
    assert torch.equal(compute(), before)


def test_pages_of_exact_tokens_are_not_read():
    """The window comes from the ring: its pages do not matter, its data do."""
    world, request, plan, compute = decode_step()
    before = compute()
    assert plan.window.present.all()
    world.layer.store.pages[request.blocks[4:6]] ^= 0xFF  # positions 32 to 47, all in the window
    assert torch.equal(compute(), before)
    for data in (world.layer.recent.keys, world.layer.recent.values):
        data[plan.window.index[0, 3]] += 1
        assert not torch.equal(compute(), before)
        data[plan.window.index[0, 3]] -= 1


# ---- tiles -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"sliding": 20}, {"softcap": 3.0}, {"window": 0}, {"block_size": 24, "num_blocks": 14}], ids=str
)
def test_several_tiles_are_folded(monkeypatch, options):
    """The smallest tiles: 16 tokens, or one block, of history, and 16 of the own chunk."""
    sizes = []
    monkeypatch.setattr(score, "attend", lambda *args: sizes.append(args[1].shape[2]) or attend(*args))
    serve(World(**options), 51, steps=12, max_chunk=70, max_length=150)
    in_one_piece = len(sizes)
    monkeypatch.setattr(score, "TILE_ELEMENTS", 1)
    serve(World(**options), 51, steps=12, max_chunk=70, max_length=150)
    assert len(sizes) - in_one_piece > 1.25 * in_one_piece
    assert max(sizes[in_one_piece:]) <= 24 < max(sizes[:in_one_piece])


class LiveBytes(TorchDispatchMode):
    """Highest number of bytes in storages that live at once, of those created inside."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {id(x.untyped_storage()) for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not known & {id(tensor.untyped_storage())}:
                storage = tensor.untyped_storage()
                self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {pointer: entry for pointer, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def transient_bytes(contexts, rows, sliding):
    """Peak of a step of `rows` rows of each request after so many cached tokens, whose pages hold random codes."""
    blocks_each = max(contexts) // 16 + rows // 16 + 2
    world = World(heads=1, block_size=16, sliding=sliding, num_blocks=len(contexts) * blocks_each)
    world.layer.store.pages.fill_(0x35)
    requests = [Request(0, blocks=list(range(i * blocks_each, (i + 1) * blocks_each))) for i in range(len(contexts))]
    step = plain_step([(request, context, rows) for request, context in zip(requests, contexts, strict=True)], 16)
    query, keys, values = world.random_rows(step)
    plan, output = world.engine.begin_step(step.batch), torch.empty_like(query)
    with LiveBytes() as memory:
        world.scorer.attend(world.layer, plan, query, (keys, values), output)
    assert torch.isfinite(output).all()
    return memory.peak


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("sliding", [0, 48])
@pytest.mark.parametrize("others", [(), (40,)], ids=["alone", "beside a short one"])
def test_transient_memory_does_not_grow_with_the_context(monkeypatch, rows, sliding, others):
    """Six times the context adds a few copies of its block table, and a mask of a byte per request and token."""
    monkeypatch.setattr(score, "TILE_ELEMENTS", 1 << 15)
    small, large = (transient_bytes((context, *others), rows, sliding) for context in (512, 3072))
    assert large - small <= 4 * (1 + len(others)) * (3072 - 512)
    assert small < 12 * 4 * (1 << 15)


# ---- quality ---------------------------------------------------------------------------------------------------
# Worst 5th percentile of the output cosine over all head sizes, less 0.01.
@pytest.mark.parametrize(("bits", "floor"), [((4, 4), 0.978), ((3, 4), 0.954), ((3, 2), 0.870), ((2, 2), 0.816)])
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("value_quantizer", ["lloyd", "group"])
def test_output_cosine(bits, floor, dim, value_quantizer):
    """256 cached tokens, 64 flat queries, nothing exact; wrong code lands at 0.07 to 0.87."""
    codec = build_codec(1, dim, key_bits=bits[0], value_bits=bits[1], value_quantizer=value_quantizer)
    engine = KVCaptureEngine(16, 16, 0, 0)
    layer = engine.add_layer("layer", codec, 1, torch.float32)
    keys, values, query = normal(256, 1, dim, seed=61), normal(256, 1, dim, seed=62), normal(64, 1, dim, seed=63) / 2
    engine.ingest(layer, keys, values, torch.arange(256))
    batch = AttentionBatch(torch.tensor([0, 64]), torch.tensor([320]), torch.arange(20)[None].clamp(max=15), 16)
    output = torch.empty_like(query)
    HybridScorer(dim**-0.5).attend(layer, engine.begin_step(batch), query, None, output)
    cosines = cosine(output, attention(query, keys, values, 256, dim**-0.5))
    assert cosines.quantile(0.05) > floor
