"""The hooks on a real engine with FlashAttention on a CUDA device; skipped elsewhere.

TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_hooks.py writes DIR/hooks-gpu.json
"""

import json
import os
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gpu_engine import save  # noqa: E402

from turboquant import attach  # noqa: E402
from turboquant.integration import compat, plugin  # noqa: E402

PROMPTS = [
    {"prompt_token_ids": [(7 * i * j + i) % 1000 for j in range(length)]} for i, length in enumerate((40, 333, 1500))
]
RESULTS: dict[str, object] = {}


@pytest.fixture(scope="module", params=["0", "1"], ids=["runner-v1", "runner-v2"])
def llm(request, tmp_path_factory):
    from vllm import LLM

    folder = tmp_path_factory.mktemp("model")
    save("llama", folder)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": request.param}
    plugin.register()
    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=2048,
        gpu_memory_utilization=0.3,
    )
    yield engine
    del engine
    if folder := os.environ.get("TURBOQUANT_RESULTS"):
        Path(folder, "hooks-gpu.json").write_text(json.dumps(RESULTS, indent=1) + "\n")


def generate(llm):
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False))
    return [tuple(o.outputs[0].token_ids) for o in outputs]


def test_hooks_on_flash_attention(llm, request):
    native = generate(llm)
    with attach(llm, mode="capture_only", shadow_interval=1) as handle:
        assert generate(llm) == native
        layers = handle.stats()[0]["per_layer"].values()
        errors = [layer["shadow_rel_error"]["mean"] for layer in layers]
        assert all(0 < error < 0.2 for error in errors)
        handle.set_mode("hybrid")
        generate(llm)
        handle.set_mode("full_tq")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        freed = handle.free_kv_cache()
        gone = before - torch.cuda.memory_allocated()
        compressed = generate(llm)
        stats = handle.stats()[0]
        assert freed == stats["native_bytes"] and gone == pytest.approx(freed, rel=0.001)
        assert stats["tokens_read_compressed"] > 0
    assert generate(llm) == native
    equal = sum(x == y for a, b in zip(native, compressed, strict=True) for x, y in zip(a, b, strict=True))
    RESULTS[request.node.callspec.id] = {
        "command": "TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_hooks.py",
        "device": torch.cuda.get_device_name(),
        "vllm": compat.vllm_version(),
        "torch": torch.__version__,
        "backend": next(iter(compat.all_layers(runner_of(llm)).values())).get_attn_backend().get_name(),
        "attention_rel_error_per_layer": errors,
        "bytes_per_token_native": stats["bytes_per_token_native"],
        "bytes_per_token_compressed": stats["bytes_per_token_compressed"],
        "freed_bytes": freed,
        "equal_greedy_tokens": f"{equal} of {sum(map(len, native))}",
    }


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner
