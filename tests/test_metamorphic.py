"""Metamorphic relations of a real engine: what the scheduler does with requests must not change their answers.

One engine whose scheduler can be turned (`knobs`).  Where every cached token is read exactly (sequences within the
window), answers are the same token for token; behind the window chunk borders and hits decide what is still exact, and
answers are close (README, Limits).
"""

import pytest
from engine_helpers import divergences, engine, preemptions, prefix_hits, prompts

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402

LENGTHS = [93, 94, 30, 63, 157, 253]
TOKENS, WINDOW, BLOCK = 8, 128, 32
LOGPROB, KLD = 1e-3, 1e-3  # nats: of a token by rounding, and on average behind the window
KLD_COMPRESSED = 0.01  # without exact tokens


@pytest.fixture(scope="module")
def llm():
    """All prompts fit into one step, and the ring holds the windows of all of them."""
    options = {"ring_share": 1.0, "buffer_size": WINDOW, "calibration": "none"}
    limits = {"max_model_len": 512, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 80, "max_num_seqs": 16}
    with engine("k4v4", options, scheduler_cls="knobs.KnobScheduler", **limits) as llm:
        yield llm


def run(llm, batch, **knobs):
    """Completions of a batch; knobs: see `KnobScheduler`."""
    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=256, extra_args=knobs)
    return [request.outputs[0] for request in llm.generate(batch, parameters, use_tqdm=False)]


@pytest.fixture(scope="module")
def batch(llm):
    return prompts(llm, LENGTHS)


@pytest.fixture(scope="module")
def expected(llm, batch):
    """Whole prompts side by side, each computed afresh."""
    return run(llm, batch)


@pytest.fixture(autouse=True)
def nothing_cached(llm, expected):
    llm.reset_prefix_cache()


def salted(batch, salt):
    return [{**prompt, "cache_salt": salt} for prompt in batch]


def largest_difference(a, b):
    """Of the logprobs of all tokens that both outputs name."""
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    return max(abs(x[token].logprob - y[token].logprob) for x, y in pairs for token in x.keys() & y.keys())


def assert_same_answers(expected, found, window=WINDOW, kld=KLD):
    """Both in the order of LENGTHS; the same tokens where the whole sequence is within the window."""
    klds = []
    for length, a, b in zip(LENGTHS, expected, found, strict=True):
        if length + TOKENS <= window:
            assert a.token_ids == b.token_ids
            assert largest_difference(a, b) <= LOGPROB
        klds += divergences(a, b)
    assert len(klds) >= 0.8 * TOKENS * len(LENGTHS)
    assert sum(klds) / len(klds) <= kld


def test_the_order_of_requests_changes_nothing(llm, batch, expected):
    assert_same_answers(expected, run(llm, batch[::-1])[::-1])


def test_copies_beside_a_request_change_nothing(llm, batch, expected):
    """Copies hit blocks that the first one computes in the same step, whose exact rows are not there yet."""
    before = prefix_hits(llm)
    found = run(llm, [*batch, *reversed(batch)])
    assert prefix_hits(llm) > before
    assert_same_answers(expected, found[: len(batch)])
    assert_same_answers(expected, found[: len(batch) - 1 : -1], window=0, kld=KLD_COMPRESSED)


@pytest.mark.parametrize("chunk", [7, 32, 80])
def test_the_size_of_chunks_changes_nothing(llm, batch, expected, chunk):
    assert_same_answers(expected, run(llm, batch, chunk=chunk))


@pytest.mark.parametrize("part", [1.0, 0.6], ids=["whole prompts", "beginnings"])
def test_prefix_hits_change_nothing(llm, batch, expected, part):
    ids = [prompt["prompt_token_ids"] for prompt in batch]
    run(llm, [{"prompt_token_ids": x[: int(part * len(x))]} for x in ids])
    before = prefix_hits(llm)
    found = run(llm, batch)
    assert prefix_hits(llm) - before >= part / 2 * sum(LENGTHS)
    assert_same_answers(expected, found)


def test_preemption_changes_nothing(llm, batch, expected):
    before = preemptions(llm)
    found = run(llm, batch, blocks=11)
    assert preemptions(llm) > before
    assert_same_answers(expected, found)


def test_all_of_it_at_once_changes_nothing(llm, batch, expected):
    """Another order, chunks, hits and preemptions."""
    run(llm, batch[::2])
    before = preemptions(llm), prefix_hits(llm)
    found = run(llm, batch[::-1], chunk=48, blocks=11)
    assert preemptions(llm) > before[0] and prefix_hits(llm) > before[1]
    assert_same_answers(expected, found[::-1])


def test_requests_of_another_salt_hit_nothing(llm, batch, expected):
    """As if nothing were cached, while the same salt hits every whole block but the one of the last token."""
    blocks = sum((length - 1) // BLOCK for length in LENGTHS)
    mine, yours = (salted(batch, salt) for salt in ("mine", "yours"))
    for asked, hits in ((mine, 0), (yours, 0), (batch, 0), (mine, blocks)):
        before = prefix_hits(llm)
        assert_same_answers(expected, run(llm, asked))
        assert prefix_hits(llm) - before == hits * BLOCK


def test_salts_in_one_batch_do_not_mix(llm, batch, expected):
    """The same prompts under two salts in the same steps, chunked: twice the blocks, and no hits."""
    before = prefix_hits(llm)
    found = run(llm, [*salted(batch, "mine"), *salted(batch, "yours")], chunk=64)
    assert prefix_hits(llm) == before
    for half in (found[: len(batch)], found[len(batch) :]):
        assert_same_answers(expected, half)
