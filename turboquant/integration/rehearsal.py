"""Steps that a layer runs on an empty page before it serves.

They compile every kernel variant that a later step can ask for, and take the transient memory of the largest step
while vLLM measures what is left for pages, so that nothing compiles or grows once the engine has started.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from turboquant.batch import AttentionBatch
from turboquant.capture import ExactRing, ExactWindow, LayerCache, PlanKernel, StepPlan
from turboquant.score import WORKSPACE_TOKENS, HybridScorer, Own

SHORT_LENGTHS = tuple(1 << bit for bit in range(10))  # padded query lengths that the fast decode may serve
LONG_LENGTH = 1024  # no kernel distinguishes longer ones
CACHED = 64  # cached tokens of a rehearsed request: more do not change a kernel


@dataclass(frozen=True)
class Limits:
    """Of the engine's steps: requests and tokens; of a request: context tokens, and draft tokens verified at once."""

    requests: int
    tokens: int
    context: int
    drafts: int = 0


@dataclass(frozen=True)
class Step:
    """`requests` requests with `new` query rows each after `cached` tokens."""

    requests: int
    new: int
    cached: int

    def batch(self, block_size: int, device: torch.device) -> AttentionBatch:
        """All blocks of all requests are block 0."""
        starts = torch.arange(self.requests + 1, device=device) * self.new
        seq_lens = torch.full((self.requests,), self.cached + self.new, device=device)
        blocks = -(-(self.cached + self.new) // block_size)
        table = torch.zeros(1, blocks, dtype=torch.int32, device=device).expand(self.requests, -1)
        lens = [(row * self.new, self.new, self.cached) for row in range(self.requests)]
        return AttentionBatch(starts, seq_lens, table, block_size, lens)


def largest_steps(limits: Limits) -> Iterator[Step]:
    """The steps that need the most transient memory: one long chunk, many shorter ones, many requests."""
    new = min(limits.tokens, limits.context)
    yield Step(1, new, min(2 * WORKSPACE_TOKENS, limits.context - new))
    for new in SHORT_LENGTHS:
        if new <= limits.tokens:
            yield Step(min(limits.requests, limits.tokens // new), new, CACHED)


def distinct_steps(limits: Limits, scorer: HybridScorer, query_heads: int) -> Iterator[Step]:
    """Steps that together reach every kernel variant of a scorer."""
    for new in sorted({*SHORT_LENGTHS, 1 + limits.drafts}):
        first = {
            tuple(kernel.variant(requests, new, query_heads) for kernel in scorer.fused): requests
            for requests in range(min(limits.requests, limits.tokens // new), 0, -1)
        }
        yield from (Step(requests, new, CACHED) for requests in first.values())
    new = min(LONG_LENGTH, limits.tokens)
    most = max(0, limits.context - new)
    for cached in (CACHED, WORKSPACE_TOKENS, 2 * WORKSPACE_TOKENS, 3 * WORKSPACE_TOKENS):  # one to three pieces
        yield Step(1, new, min(cached, most))


def rehearse(
    cache: LayerCache, scorer: HybridScorer, ring: ExactRing, rows: tuple[torch.Tensor, Own], steps: Iterable[Step]
) -> None:
    """Run steps on a cache whose store has at least one page, once all their kernels are compiled, side by side.

    What is written goes nowhere.

    rows: query [T, H_q, d], and keys and values [T, H_kv, d], of a step of the most tokens.
    """
    query, (keys, values) = rows
    steps = tuple(steps)
    nowhere = torch.full((len(query),), -1, device=query.device)
    output = torch.empty_like(query)

    def run(step: Step, tokens: int) -> None:
        absent = torch.zeros(step.requests, ring.columns, dtype=torch.int64, device=query.device)
        plan = StepPlan(step.batch(ring.block_size, query.device), ExactWindow(absent, absent.bool(), ring.sinks))
        own = keys[:tokens], values[:tokens]
        scorer.attend(cache, plan, query[:tokens], own, output[:tokens], {step.new: range(step.requests)})

    def run_all() -> None:
        for count in (1, len(query)):
            cache.ingest(ring, keys[:count], values[:count], nowhere[:count])
        run(Step(1, 1, CACHED), len(query))  # among rows of other requests
        for step in steps:
            run(step, step.requests * step.new)

    if query.is_cuda:
        from turboquant.kernels.compilation import compile_together

        compile_together(run_all)
    run_all()


def rehearse_plan(plan_ring: PlanKernel, ring: ExactRing, lines: torch.Tensor, window: ExactWindow) -> None:
    """Compile the ring's plan; the ring is left empty."""
    batch = Step(1, 1, CACHED).batch(ring.block_size, lines.device)
    plan_ring(ring, batch, lines[:1], window.of(1))
    ring.clear()
