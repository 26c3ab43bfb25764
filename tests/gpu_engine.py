"""One engine on a CUDA device, run as a process of its own: python gpu_engine.py CASE.json RESULT.json

CASE: {"model": key of MODELS, "preset": or null, "runner": "0" (V1) or "1" (V2), "sleep": bool, "engine": {...}}.
RESULT: outputs of the same prompts together ("first"), again with prefix hits, alone, and after sleeping; what was
compiled, waited for and allocated meanwhile.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

LENGTHS = (40, 333, 1500, 2900, 17)
TOKENS = 16
VOCABULARY = 1024


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            initializer_range=1024**-0.5,
        )
    )


def gemma3():
    """Two of three layers have a window of 256 tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            sliding_window=256,
            query_pre_attn_scalar=128,
            initializer_range=512**-0.5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
    )


def granite():
    """Two of four layers are Mamba 2."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            hidden_size=512,
            intermediate_size=1024,
            shared_intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            layer_types=["mamba", "attention"] * 2,
            mamba_n_heads=16,
            mamba_d_head=64,
            mamba_d_state=64,
            mamba_expand=2,
            mamba_n_groups=1,
            num_local_experts=0,
            num_experts_per_tok=0,
            position_embedding_type="rope",
            attention_multiplier=128**-0.5,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            embedding_multiplier=1.0,
            initializer_range=512**-0.5,
        )
    )


MODELS = {"llama": llama, "gemma3": gemma3, "granite": granite}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def save(kind, folder):
    """Write a model of MODELS with random weights."""
    import torch

    torch.manual_seed(0)
    MODELS[kind]().to(torch.bfloat16).save_pretrained(folder)


def watch_compilations():
    """Names of kernels that are compiled from now on."""
    import triton

    compiled = []

    def note(*, fn, **_):
        compiled.append(f"{fn.module}.{fn.name}")

    triton.knobs.runtime.jit_post_compile_hook = note
    return compiled


def forbid_waiting():
    """Steps of the native route raise where they would wait for the device."""
    import torch

    from turboquant.integration import backend

    def strict(owner, name):
        original = getattr(owner, name)

        def method(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, method)

    strict(backend.TurboQuantMetadataBuilder, "build")
    strict(backend.TurboQuantImpl, "forward")
    strict(backend.TurboQuantImpl, "do_kv_cache_update")


def generate(llm, prompts):
    """[(token, {token: log-probability})] of each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=VOCABULARY
    )  # fmt: skip
    outputs = [r.outputs[0] for r in llm.generate(prompts, greedy, use_tqdm=False)]
    return [
        [
            (int(t), {int(k): v.logprob for k, v in p.items()})
            for t, p in zip(o.token_ids, o.logprobs, strict=True)
        ]
        for o in outputs
    ]  # fmt: skip


def run(case):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": case["runner"]}
    if case["preset"]:
        os.environ["TURBOQUANT"] = case["preset"]
    import torch
    from vllm import LLM

    from turboquant.integration import plugin

    plugin.register()
    defaults = {
        "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, "max_logprobs": VOCABULARY,
        "disable_log_stats": False,
    }  # fmt: skip
    folder = tempfile.mkdtemp(prefix="model-")
    save(case["model"], folder)
    llm = LLM(folder, **defaults | case["engine"])
    prompts = [
        {"prompt_token_ids": [(7 * i * j + i * i + j // 7) % 1000 for j in range(n)]} for i, n in enumerate(LENGTHS)
    ]
    result = {"config": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)}
    if case["preset"] and "enforce_eager" in case["engine"]:
        forbid_waiting()
    compiled, before = watch_compilations(), torch.cuda.memory_allocated()
    result["first"] = generate(llm, prompts)
    result["again"] = generate(llm, prompts)
    llm.reset_prefix_cache()
    result["alone"] = [generate(llm, [prompt])[0] for prompt in prompts]
    result |= {"compiled": compiled, "grown_bytes": torch.cuda.memory_allocated() - before}
    result["metrics"] = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    cache = llm.llm_engine.vllm_config.cache_config
    result |= {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
    if case["preset"]:
        result["stats"] = llm.collective_rpc("tq_stats")[0]
    for level in (1, 2) if case["sleep"] else ():
        llm.reset_prefix_cache()
        llm.sleep(level)
        llm.wake_up(["weights"] if level == 2 else None)
        if level == 2:
            llm.collective_rpc("reload_weights")
            llm.wake_up(["kv_cache"])
        result[f"slept_{level}"] = generate(llm, prompts)
    return result


if __name__ == "__main__":
    case_file, result_file = sys.argv[1:]
    Path(result_file).write_text(json.dumps(run(json.loads(Path(case_file).read_text()))))
