"""What a layer runs before it serves: the steps that are tried, and that they leave nothing behind."""

import pytest
import torch

from turboquant.capture import ExactRing, ExactWindow, KVCaptureEngine, plan_in_torch
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration.rehearsal import (
    LONG_LENGTH,
    SHORT_LENGTHS,
    Limits,
    Step,
    distinct_steps,
    largest_steps,
    rehearse,
    rehearse_plan,
)
from turboquant.score import WORKSPACE_TOKENS, HybridScorer

BLOCK = 16


def fits(step, limits):
    tokens, context = step.requests * step.new, step.new + step.cached
    return 0 < step.requests <= limits.requests and 0 < tokens <= limits.tokens and context <= limits.context


LIMITS = [Limits(8, 512, 4096), Limits(256, 16384, 131072, drafts=4), Limits(1, 64, 128), Limits(64, 8192, 8192)]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_steps_are_steps_that_the_engine_could_run(limits):
    scorer = HybridScorer(0.1, fused=(Watched(),))
    for found in (list(largest_steps(limits)), list(distinct_steps(limits, scorer, 4))):
        assert found and all(fits(step, limits) for step in found)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_variant_of_decoding_and_verifying_is_tried_once(limits):
    kernel = Watched()
    tried = list(distinct_steps(limits, HybridScorer(0.1, fused=(kernel,)), 4))
    for new in {1, 1 + limits.drafts}:
        found = [kernel.variant(step.requests, new, 4) for step in tried if step.new == new]
        most = min(limits.requests, limits.tokens // new)
        assert sorted(found) == sorted({kernel.variant(n, new, 4) for n in range(1, most + 1)})


def test_long_prompts_are_tried_with_one_to_three_pieces_of_history():
    limits = Limits(4, 2048, 131072)
    cached = [step.cached for step in distinct_steps(limits, HybridScorer(0.1), 4) if step.new == LONG_LENGTH]
    assert {-(-tokens // WORKSPACE_TOKENS) for tokens in cached} == {1, 2, 3}


def test_the_largest_step_fills_the_batch():
    limits = Limits(64, 16384, 131072)
    steps = list(largest_steps(limits))
    assert steps[0] == Step(1, 16384, 2 * WORKSPACE_TOKENS)
    assert max(step.requests * step.new for step in steps[1:]) == 64 * SHORT_LENGTHS[-1] // 2 == limits.tokens


class Watched:
    """A kernel that serves everything and remembers the shapes of what it was given."""

    nbytes = 0

    def __init__(self):
        self.calls = []

    def serves(self, group, query, own, softcap):
        return True

    def variant(self, requests, new, query_heads):
        return requests % 5, new, query_heads

    def attend(self, group, query, own, output, scale, softcap):
        assert len(query) == len(own[0]) == len(own[1]) == len(output)
        self.calls.append((len(group.requests), group.length, group.most_cached, len(query)))


def layer_of(window=32):
    engine = KVCaptureEngine(1, BLOCK, window, 1, "cpu")
    codec = KVCodec.build(TurboQuantConfig(), 1, 2, 64)
    return engine, engine.add_layer("layer", codec, 2, torch.float32)


def rows_of(tokens):
    return torch.randn(tokens, 4, 64), (torch.randn(tokens, 2, 64), torch.randn(tokens, 2, 64))


def test_rehearsal_runs_the_steps_and_writes_nothing():
    engine, layer = layer_of()
    before = layer.store.pages.clone()
    kernel, steps = Watched(), [Step(3, 2, 64), Step(1, 100, 400)]
    rehearse(layer, HybridScorer(0.1, fused=(kernel,)), engine.ring, rows_of(256), steps)
    assert kernel.calls == [(1, 1, 64, 256), (3, 2, 64, 6), (1, 100, 400, 100)]
    assert torch.equal(layer.store.pages, before)
    assert not engine.ring.written.any() and not layer.recent.keys.any()


@pytest.mark.parametrize("window", [0, 32])
def test_rehearsal_of_the_twins(window):
    engine, layer = layer_of(window)
    scorer = HybridScorer(0.1)
    rehearse(layer, scorer, engine.ring, rows_of(64), distinct_steps(Limits(2, 8, 200, drafts=2), scorer, 4))


def test_rehearsal_of_the_plan_leaves_an_empty_ring():
    ring = ExactRing(40, BLOCK, 32, 9)
    empty = [table.clone() for table in (ring.entry_of_part, ring.owner, ring.used, ring.written)]
    lines, window = (
        torch.zeros(5, 4, dtype=torch.int32),
        ExactWindow(torch.zeros(5, 32, dtype=torch.int64), torch.zeros(5, 32, dtype=torch.bool)),
    )
    rehearse_plan(plan_in_torch, ring, lines, window)
    for table, was in zip((ring.entry_of_part, ring.owner, ring.used, ring.written), empty, strict=True):
        assert torch.equal(table, was)
    assert not window.present.any()
