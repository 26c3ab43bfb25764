"""The native route on a real engine: compressed pages from the start, seen from the scheduler and from the outputs."""

import pytest
from engine_helpers import alone, divergences, engine, generate, preemptions, prefix_hits, prompts
from soak import LIMITS, soak

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

LENGTHS = [5, 31, 32, 33, 64, 97, 150, 201]
BUSY_LENGTHS = [93, 94, 95, 125, 126, 127, 157, 190]  # most grow into another block of 32 within three tokens
WORDS = ["zebra", "copper", "violin", "harbor", "pepper", "rocket", "blanket", "garden"]


def pool(llm):
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


def statistics(llm):
    return llm.collective_rpc("tq_stats")[0]


def tokens_of(outputs):
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def native():
    """Blocks of a bf16 pool, and outputs of the native cache in float32."""
    with engine(dtype="bfloat16") as llm:
        blocks = pool(llm)
        assert llm.collective_rpc("tqtest_patched")[0] == []
    with engine(max_num_batched_tokens=1024) as llm:
        return blocks, alone(llm, prompts(llm, LENGTHS), 8, logprobs=1024)


@pytest.mark.parametrize(("preset", "ratio"), [("k4v4", 3.7), ("k3v2", 5.6)])
def test_the_pool_counts_compressed_pages(native, preset, ratio):
    with engine(preset, dtype="bfloat16") as llm:
        assert pool(llm) >= ratio * native[0]
        stats = statistics(llm)
    assert len(stats["layers"]) == 30 and not stats["skipped"] and stats["calibration"] == "at the start"
    assert stats["capacity_tokens"] == 32 * pool(llm)
    assert stats["page_bytes"] == stats["capacity_tokens"] * stats["bytes_per_token_compressed"] <= 2**30
    assert stats["bytes_per_token_native"] / stats["bytes_per_token_compressed"] >= ratio


def test_skipped_layers_stay_native(native):
    with engine("k4v4", {"skip_layers": (0, -1)}, dtype="bfloat16") as llm:
        stats, blocks = statistics(llm), pool(llm)
        assert generate(llm, prompts(llm, [40]), 4)
    assert len(stats["layers"]) == stats["calibrated_layers"] == 28 and set(stats["skipped"].values()) == {
        "skip_layers"
    }
    assert native[0] < blocks < 3.7 * native[0]


@pytest.fixture(scope="module", params=[32, 0], ids=lambda size: f"buffer{size}")
def llm(request):
    options = {"buffer_size": request.param, "ring_share": 0.1, "calibration": "" if request.param else "none"}
    with engine("k4v4", options, max_num_batched_tokens=1024) as llm:
        yield llm


def test_output_does_not_depend_on_the_batch(llm):
    """Prompts of one chunk, in float32: token for token."""
    single = alone(llm, prompts(llm, LENGTHS), 8)
    assert tokens_of(generate(llm, prompts(llm, LENGTHS), 8)) == tokens_of(single)


def test_outputs_stay_close_to_the_native_cache(llm, native):
    """The chunk's own rows are exact, so that the first token is the native one."""
    before = statistics(llm)
    outputs = alone(llm, prompts(llm, LENGTHS), 8, logprobs=1024)
    after = statistics(llm)
    found = [kld for a, b in zip(native[1], outputs, strict=True) for kld in divergences(a, b)]
    assert after["calibrated_layers"] == (30 if after["window"] else 0)
    assert len(found) >= 0.5 * 8 * len(LENGTHS)
    assert sum(found) / len(found) <= (0.02 if after["window"] else 0.03)
    assert [t[0] for t in tokens_of(outputs)] == [t[0] for t in tokens_of(native[1])]
    assert after["tokens_encoded"] - before["tokens_encoded"] >= sum(LENGTHS) + 7 * len(LENGTHS)
    assert after["tokens_read"] > before["tokens_read"]


@pytest.fixture(scope="module")
def busy():
    """A pool of 13 blocks for prompts of 32: requests wait, and running ones are preempted.  Chunks of 64."""
    with engine("k4v4", {"ring_share": 1.0}, **LIMITS) as llm:
        yield llm


def test_busy_engine_stays_close_to_requests_run_alone(busy):
    """Chunks, prefix hits and preemptions at once; chunk borders decide what is exact, so close, not equal."""
    batch = prompts(busy, BUSY_LENGTHS, shared_prefix=32)
    single = alone(busy, batch, 14, logprobs=1024)
    before, hits = preemptions(busy), prefix_hits(busy)
    together = generate(busy, batch, 14, logprobs=1024)
    assert preemptions(busy) > before and prefix_hits(busy) > hits
    found = [kld for a, b in zip(single, together, strict=True) for kld in divergences(a, b)]
    assert len(found) >= 0.6 * 14 * len(BUSY_LENGTHS)
    assert sum(found) / len(found) <= 0.01


def test_no_request_sees_the_tokens_of_another(busy):
    """Every request repeats a sentence with a word of its own; pool full, blocks reused: the words never mix."""
    encode = busy.get_tokenizer().encode
    ids = [encode(" " + word) for word in WORDS]
    texts = [encode(f"My {word} is old. I like my {word}. " * 30) for word in WORDS]
    batch = [{"prompt_token_ids": text[:length]} for text, length in zip(texts, BUSY_LENGTHS, strict=True)]
    before = preemptions(busy)
    rounds = [generate(busy, batch, 14) for _ in range(2)]
    assert preemptions(busy) > before
    for outputs in rounds:
        for own, output in zip(ids, outputs, strict=True):
            others = {t for other in ids if other is not own for t in other} - set(own)
            assert not others & set(output.token_ids)
            assert set(own) & set(output.token_ids)  # the request does read its own history


def test_random_traffic_leaks_nothing_and_drifts_nowhere(busy):
    """The short form of `python tests/soak.py`."""
    found = soak(busy, 20, words=WORDS[:5])
    assert not found["failed"], found
    assert found["finished"] >= 10


def test_hooks_are_refused_where_pages_are_compressed_already(busy):
    from turboquant import attach
    from turboquant.integration.vllm import UnsupportedEngineError

    with pytest.raises(UnsupportedEngineError, match="compressed from the start"):
        attach(busy, mode="full_tq")
