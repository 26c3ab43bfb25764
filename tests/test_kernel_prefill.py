"""Long chunks through a small workspace of decoded tokens, against the torch scorer; in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import make_rotary, normal
from test_kernel_history import DEVICE

from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.kernels import prefill
from turboquant.score import HybridScorer, merge

HEADS, GROUP, BLOCK = 2, 3, 16


def dense(query, keys, values, scale, causal, window, softcap):
    """A dense attention as an engine would bring it, computed in float32."""
    q = query.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,lhd->hgql", q, keys.float()).flatten(0, 1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        position = torch.arange(len(query), device=DEVICE)[:, None] + len(keys) - len(query)
        distance = position - torch.arange(len(keys), device=DEVICE)
        scores = scores.masked_fill((distance < 0) | (window > 0) & (distance >= window), -torch.inf)
    out = torch.einsum("hgql,lhd->qhgd", scores.softmax(-1).unflatten(0, q.shape[1:3]), values.float())
    return out.flatten(1, 2).to(query.dtype), scores.logsumexp(-1)


def make_step(cached, new, *, window=20, sinks=11, center=True, turns=False, dim=64, **options):
    """Requests with `cached` tokens in pages and ring, and `new` rows of their own."""
    transform = None
    if center:
        rotary = make_rotary(dim) if turns else None
        transform = KeyTransform(normal(HEADS, dim, seed=8) * 2, normal(HEADS, dim, seed=9).abs() + 0.5, rotary)
    codec = KVCodec.build(TurboQuantConfig(**options), 0, HEADS, dim, transform, DEVICE)
    per = (max(cached) + max(new)) // BLOCK + 1
    engine = KVCaptureEngine(len(cached) * per, BLOCK, window, len(cached) * 4, DEVICE, sinks)
    layer = engine.add_layer("layer", codec, HEADS, torch.bfloat16)
    layer.store.pages.fill_(0xFF)
    table = torch.randperm(len(cached) * per, generator=torch.Generator().manual_seed(3)).view(-1, per).to(DEVICE)
    before, counts = torch.tensor(cached, device=DEVICE), torch.tensor(new, device=DEVICE)
    slots = [table[i, p // BLOCK] * BLOCK + p % BLOCK for i, n in enumerate(cached) for p in range(n)]

    def rows(seed, count, heads):
        return (normal(count, heads, dim, seed=seed) + 1).to(DEVICE, torch.bfloat16)

    def starts(lens):
        return torch.cat([lens.new_zeros(1), lens.cumsum(0)])

    engine.begin_step(AttentionBatch(starts(before), before, table, BLOCK))
    engine.ingest(layer, rows(1, sum(cached), HEADS), rows(2, sum(cached), HEADS), torch.stack(slots))
    plan = engine.begin_step(AttentionBatch(starts(counts), before + counts, table, BLOCK))
    return layer, plan, rows(3, sum(new), HEADS * GROUP), (rows(4, sum(new), HEADS), rows(5, sum(new), HEADS))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_bits": 3, "value_bits": 2},
        {"key_bits": 8},
        {"window": 0},
        {"window": 0, "sinks": 0},
        {"sinks": 0},
        {"center": False},
        {"turns": True},
        {"turns": True, "key_bits": 3, "window": 0, "dim": 80},
        {"rotation": "haar"},
        {"key_quantizer": "prod"},
        {"value_quantizer": "group", "dim": 128},
        {"dim": 80},
        {"dim": 256, "rotation": "haar"},
    ],
    ids=str,
)
@pytest.mark.parametrize("workspace", [40, 1000])
def test_chunk_equals_the_torch_scorer(options, workspace, monkeypatch):
    monkeypatch.setattr(prefill, "WORKSPACE_TOKENS", workspace)
    layer, plan, query, own = make_step((90, 0, 37), (21, 18, 30), **options)
    kernel = prefill.StagedPrefill(layer, dense)
    want, got = (torch.full(query.shape, 9.0, device=DEVICE) for _ in range(2))
    scale = 6.4 / query.shape[2]
    HybridScorer(scale).attend(layer, plan, query, own, want)
    HybridScorer(scale, fused=(kernel,)).attend(layer, plan, query, own, got)
    assert (got - want).norm() / want.norm() < 1e-2  # decoded rows are bfloat16; the interpreter truncates


@pytest.mark.parametrize("window", [20, 0])
@pytest.mark.parametrize(
    ("sliding", "softcap"), [(13, 0.0), (1, 0.0), (45, 0.0), (1000, 0.0), (0, 3.0), (25, 3.0)], ids=str
)
def test_sliding_window_and_softcap(sliding, softcap, window, monkeypatch):
    monkeypatch.setattr(prefill, "WORKSPACE_TOKENS", 40)
    monkeypatch.setattr(prefill, "WINDOW_STEP", 1)
    layer, plan, query, own = make_step((90, 0, 37), (21, 18, 30), window=window)
    want, got = (torch.full(query.shape, 9.0, device=DEVICE) for _ in range(2))
    HybridScorer(0.1, sliding, softcap).attend(layer, plan, query, own, want)
    kernel = prefill.StagedPrefill(layer, dense)
    HybridScorer(0.1, sliding, softcap, fused=(kernel,)).attend(layer, plan, query, own, got)
    assert (got - want).norm() / want.norm() < 1e-2


def test_rows_that_it_does_not_serve():
    layer, plan, query, own = make_step((40,), (20,))
    kernel = prefill.StagedPrefill(layer, dense)
    group = HybridScorer(0.1)._group(plan, 32, [0], 64)
    assert kernel.serves(group, query, own, 0.0)
    for window, served in ((128, True), (1024, True), (500, False)):  # FlashAttention-3 is wrong at 500
        windowed = HybridScorer(0.1, window)._group(plan, 32, [0], 64)
        assert kernel.serves(windowed, query, own, 0.0) is served
    assert not kernel.serves(group, query.float(), own, 0.0)
    assert not kernel.serves(group, query.transpose(1, 2).contiguous().transpose(1, 2), own, 0.0)


@pytest.mark.parametrize("dim", [64, 80])
def test_fold_is_merge(dim):
    rows, heads = 5, 3
    a, b = normal(rows, heads, dim, seed=1).to(DEVICE), normal(rows, heads, dim, seed=2).to(DEVICE)
    a_lse, b_lse = normal(heads, rows, seed=3).to(DEVICE), normal(heads, rows, seed=4).to(DEVICE)
    a_lse[0], b_lse[1], a_lse[2, 0], b_lse[2, 0] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    a[:, 0], b[:, 1], a[0, 2] = torch.nan, torch.nan, torch.nan  # never written
    want, want_lse = merge((a.nan_to_num(), a_lse.T), (b.nan_to_num(), b_lse.T))
    got, got_lse = prefill.fold((a, a_lse), (b, b_lse))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_lse.T, want_lse, rtol=1e-5, atol=1e-6)
