#!/usr/bin/env python3
"""`turboquant plan` against the blocks that vLLM really has: one engine per model and cache, with random weights.

python benchmarks/blocks.py --json benchmarks/results/blocks-cpu.json
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LENGTH, REQUESTS, BLOCK = 4096, 8, 32
MEMORY = 512 * 2**20
CACHES = ("bf16", "k4v4", "k3v2", "k2v2")
WINDOWS = {"sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "Qwen2.5-Coder-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "Gemma-3-270M": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "head_dim": 256,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, **WINDOWS,
    },
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--caches", nargs="+", default=list(CACHES), metavar="CACHE", help="bf16 and presets")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "CACHE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(folder: str, cache: str) -> dict[str, int]:
    """Blocks of an engine, in this process."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    import turboquant

    if cache != "bf16":
        turboquant.enable_no_alloc(cache, calibration="none")
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        max_num_seqs=REQUESTS, max_model_len=LENGTH, block_size=BLOCK, kv_cache_memory_bytes=MEMORY,
    )  # fmt: skip
    return {"vllm_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}


def planned(folder: str, cache: str) -> dict[str, int]:
    command = [sys.executable, "-m", "turboquant.cli", "plan", folder, "--json", "--kv-memory", str(MEMORY)]
    command += ["--block-size", str(BLOCK), "--max-num-seqs", str(REQUESTS), "--max-model-len", str(LENGTH)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["caches"]
    (plan,) = (plan for plan in found if plan["cache"] == cache)
    return {"planned_blocks": plan["blocks"], "bytes_per_token": plan["bytes_per_token"]}


def row(name: str, cache: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        command = [sys.executable, __file__, "--measure", folder, cache]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} with {cache} did not start:\n{done.stderr[-2000:]}")
        measured = json.loads(done.stdout.splitlines()[-1])
        return {"model": name, "cache": cache, **planned(folder, cache), **measured}


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    from turboquant.progress import working

    rows = []
    for name in arguments.models:
        for cache in arguments.caches:
            with working(f"{name}, {cache}"):
                rows.append(row(name, cache))
            print(rows[-1], flush=True)
    if arguments.json:
        from turboquant.integration.engine_benchmark import versions

        command = shlex.join(["python", *sys.argv])
        limits = {"kv_memory": MEMORY, "block_size": BLOCK, "max_num_seqs": REQUESTS, "max_model_len": LENGTH}
        found = {"command": command, **versions(), **limits, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
