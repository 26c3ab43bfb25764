"""The hooks under a busy scheduler: chunked prefill, prefix hits and preemption at once, and no cross-talk."""

import pytest
from engine_helpers import alone, divergences, generate, preemptions, prefix_hits, prompts, start

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant import attach  # noqa: E402
from turboquant.demo import smollm2  # noqa: E402

LENGTHS = [93, 94, 95, 125, 126, 127, 157, 190]  # most grow into another block of 32 within three tokens
TOKENS = 14
WORDS = ["zebra", "copper", "violin", "harbor", "pepper", "rocket", "blanket", "garden"]


@pytest.fixture(scope="module")
def llm():
    """A pool of 13 blocks for prompts of 32: requests wait, and running ones are preempted.  Chunks of 64."""
    return start(str(smollm2()), max_model_len=320, max_num_batched_tokens=64, num_gpu_blocks_override=14)


@pytest.mark.parametrize("mode", ["hybrid", "full_tq"])
def test_busy_engine_stays_close_to_requests_run_alone(llm, mode):
    """The exact part of the history depends on chunk borders, so the outputs are close, not equal: KLD <= 0.01."""
    batch = prompts(llm, LENGTHS, shared_prefix=32)
    with attach(llm, mode=mode, ring_share=1.0) as handle:  # a quarter of 14 blocks holds no window of 112
        if mode == "full_tq":
            handle.free_kv_cache()
        single = alone(llm, batch, TOKENS, logprobs=1024)
        before, hits = preemptions(llm), prefix_hits(llm)
        together = generate(llm, batch, TOKENS, logprobs=1024)
        assert preemptions(llm) > before
        assert prefix_hits(llm) > hits
        assert handle.stats()[0]["tokens_read_compressed"] > 0
    found = [kld for a, b in zip(single, together, strict=True) for kld in divergences(a, b)]
    assert len(found) >= 0.6 * TOKENS * len(LENGTHS)
    assert sum(found) / len(found) <= 0.01


@pytest.mark.parametrize("buffer_size", [128, 0])
def test_no_request_sees_the_tokens_of_another(llm, buffer_size):
    """Every request repeats a sentence with a word of its own; pool full, blocks reused: the words never mix."""
    encode = llm.get_tokenizer().encode
    ids = [encode(" " + word) for word in WORDS]
    texts = [encode(f"My {word} is old. I like my {word}. " * 30) for word in WORDS]
    batch = [{"prompt_token_ids": text[:length]} for text, length in zip(texts, LENGTHS, strict=True)]
    with attach(llm, mode="full_tq", buffer_size=buffer_size) as handle:
        handle.free_kv_cache()
        before = preemptions(llm)
        rounds = [generate(llm, batch, TOKENS) for _ in range(2)]
        assert preemptions(llm) > before
    for outputs in rounds:
        for own, output in zip(ids, outputs, strict=True):
            others = {t for other in ids if other is not own for t in other} - set(own)
            assert not others & set(output.token_ids)
            assert set(own) & set(output.token_ids)  # the request does read its own history
