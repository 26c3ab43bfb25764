"""The hooks on a real engine, prompts prefilled in one chunk: modes, freeing, undo, independence of the batch."""

import pytest
from engine_helpers import alone, divergences, generate, greedy, prompts, start

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant import attach  # noqa: E402
from turboquant.demo import smollm2  # noqa: E402
from turboquant.integration.vllm import HookError, NativeCacheFreedError  # noqa: E402

LENGTHS = [5, 31, 32, 33, 64, 97, 150, 201]
TOKENS = 6


@pytest.fixture(scope="module")
def llm():
    return start(str(smollm2()), max_num_batched_tokens=1024)


@pytest.fixture(autouse=True)
def empty_cache(llm):
    """Installing encodes every block that was ever written; the blocks of earlier tests would only take time."""
    llm.reset_prefix_cache()
    llm.collective_rpc("tqtest_zero_native")


@pytest.fixture(scope="module")
def native(llm):
    return alone(llm, prompts(llm, LENGTHS), TOKENS, logprobs=1024)


def tokens_of(outputs):
    return [tuple(output.token_ids) for output in outputs]


def assert_close(reference, tested):
    """Mean KL divergence at most 0.01, as long as the texts agree, and they agree for long enough to tell."""
    found = [kld for a, b in zip(reference, tested, strict=True) for kld in divergences(a, b)]
    assert len(found) >= 0.5 * sum(len(output.token_ids) for output in reference)
    assert sum(found) / len(found) <= 0.01


def test_capture_only_is_identical_to_plain_vllm(llm, native):
    with attach(llm, mode="capture_only", shadow_interval=4) as handle:
        captured = alone(llm, prompts(llm, LENGTHS), TOKENS, logprobs=1024)
        stats = handle.stats()[0]
    assert tokens_of(captured) == tokens_of(native)
    assert [o.cumulative_logprob for o in captured] == [o.cumulative_logprob for o in native]
    assert stats["tokens_encoded"] >= sum(LENGTHS)
    errors = [layer["shadow_rel_error"] for layer in stats["per_layer"].values()]
    assert all(e["samples"] > 0 and 0 < e["mean"] < 0.2 for e in errors)


@pytest.mark.parametrize(("mode", "buffer_size"), [("hybrid", 32), ("full_tq", 32), ("full_tq", 0)])
def test_output_does_not_depend_on_the_batch(llm, mode, buffer_size):
    with attach(llm, mode=mode, buffer_size=buffer_size) as handle:
        single = alone(llm, prompts(llm, LENGTHS), TOKENS)
        llm.reset_prefix_cache()
        together = generate(llm, prompts(llm, LENGTHS), TOKENS)
        stats = handle.stats()[0]
    assert tokens_of(together) == tokens_of(single)
    assert stats["tokens_read_compressed"] > 0
    assert stats["tokens_read_exact"] > 0  # sinks, without a window too


def run_steps(llm, steps):
    """Step the engine; returns finished outputs by request."""
    finished = {}
    for _ in range(steps):
        if not llm.llm_engine.has_unfinished_requests():
            break
        finished |= {o.request_id: o.outputs[0] for o in llm.llm_engine.step() if o.finished}
    return finished


def test_modes_change_under_running_requests(llm, native):
    """off -> capture_only -> hybrid -> full_tq -> free -> hybrid -> full_tq, then native modes are refused."""
    handle = attach(llm, mode="off")
    for i, prompt in enumerate(prompts(llm, LENGTHS)):
        llm.llm_engine.add_request(str(i), prompt, greedy(TOKENS, 1024))
    finished = run_steps(llm, 2)
    for mode in ("capture_only", "hybrid", "full_tq"):
        assert handle.set_mode(mode) == mode
        finished |= run_steps(llm, 2)
    native_bytes = handle.stats()[0]["native_bytes"]
    assert handle.free_kv_cache() == native_bytes > 0
    assert handle.free_kv_cache() == 0
    for mode in ("off", "capture_only"):
        with pytest.raises(NativeCacheFreedError, match="full_tq"):
            handle.set_mode(mode)
    for mode in ("hybrid", "full_tq"):
        handle.set_mode(mode)
        finished |= run_steps(llm, 1)
    finished |= run_steps(llm, 1000)
    assert_close(native, [finished[str(i)] for i in range(len(LENGTHS))])
    stats = handle.stats()[0]
    assert stats["freed_bytes"] == native_bytes and stats["tokens_read_compressed"] > 0
    handle.uninstall()
    assert tokens_of(alone(llm, prompts(llm, LENGTHS), TOKENS)) == tokens_of(native)


@pytest.mark.parametrize("back_to", ["off", "capture_only", "hybrid"])
def test_leaving_full_tq_decodes_the_store_into_native_pages(llm, native, back_to):
    """Tokens that only the store holds are written natively first, so a running request goes on."""
    prompt = prompts(llm, LENGTHS)[-1]
    llm.reset_prefix_cache()
    with attach(llm, mode="full_tq") as handle:
        llm.llm_engine.add_request("walk", prompt, greedy(TOKENS, 1024))
        run_steps(llm, 3)
        handle.set_mode(back_to)
        output = run_steps(llm, 1000)["walk"]
    assert_close(native[-1:], [output])


def test_prefix_hits_read_the_compressed_cache_after_free(llm, native):
    """Blocks cached by one request serve another although the native cache is gone."""
    prompt = prompts(llm, LENGTHS)[-1]
    llm.reset_prefix_cache()
    with attach(llm, mode="full_tq") as handle:
        handle.free_kv_cache()
        generate(llm, [prompt], 2)
        read = handle.stats()[0]["tokens_read_compressed"]
        (again,) = generate(llm, [prompt], TOKENS, logprobs=1024)
        assert handle.stats()[0]["tokens_read_compressed"] > read
    assert_close(native[-1:], [again])


def test_uninstall_restores_the_original_objects(llm):
    before = llm.collective_rpc("tqtest_originals")
    handle = attach(llm, mode="hybrid")
    assert len(llm.collective_rpc("tqtest_patched")[0]) == 30
    with pytest.raises(HookError, match="already installed"):
        attach(llm)
    handle.uninstall()
    assert llm.collective_rpc("tqtest_patched") == [[]]
    assert llm.collective_rpc("tqtest_originals") == before
    with pytest.raises(HookError, match="not installed"):
        handle.stats()


def test_bad_options_are_refused_and_leave_the_engine_alone(llm):
    for options, message in [
        ({"preset": "k4v5"}, "did you mean"),
        ({"key_bits": 5}, "key_bits=5"),
        ({"mode": "ful_tq"}, "full_tq"),
        ({"bufer_size": 3}, "buffer_size"),
        ({"buffer_size": -1}, "buffer_size=-1"),
    ]:
        with pytest.raises(ValueError, match=message):
            attach(llm, **options)
    assert llm.collective_rpc("tqtest_patched") == [[]]


def test_skipped_layers_stay_native_and_survive_a_free(llm, native):
    """All layers share one buffer in this vLLM: the skipped layer's pages must move before it is dropped."""
    prompt = prompts(llm, LENGTHS)[-1]
    with attach(llm, mode="full_tq", skip_layers=(0, -1)) as handle:
        stats = handle.stats()[0]
        assert stats["layers_compressed"] == 28 and set(stats["layers_skipped"].values()) == {"is in skip_layers"}
        llm.reset_prefix_cache()
        llm.llm_engine.add_request("skip", prompt, greedy(TOKENS, 1024))
        run_steps(llm, 3)
        freed = handle.free_kv_cache()
        assert 0 < freed <= stats["native_bytes"]
        output = run_steps(llm, 1000)["skip"]
    assert_close(native[-1:], [output])


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "k8v4"},
        {"preset": "k3v2"},
        {"key_quantizer": "prod"},
        {"value_quantizer": "group"},
        {"rotation": "haar", "initial_layers_count": 2},
    ],
    ids=str,
)
def test_every_codec_runs_in_the_engine(llm, options):
    with attach(llm, mode="full_tq", **options) as handle:
        outputs = generate(llm, prompts(llm, LENGTHS[-3:]), 4)
        stats = handle.stats()[0]
    assert all(len(o.token_ids) == 4 for o in outputs) and stats["tokens_read_compressed"] > 0


def test_reported_bytes_are_those_of_real_tensors(llm):
    with attach(llm, mode="full_tq") as handle:
        stats = handle.stats()[0]
        real = llm.collective_rpc("tqtest_tensor_bytes")[0]
    parts = stats["store_bytes"] + stats["ring_bytes"] + stats["table_bytes"]
    assert stats["total_bytes"] == parts
    assert real == parts
