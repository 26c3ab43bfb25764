#!/usr/bin/env python3
"""Compressed pages from the start in a script: `python examples/offline.py --preset k4v4`."""

import argparse

from vllm import LLM, SamplingParams

import turboquant
from turboquant.demo import smollm2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--preset", default="k4v4", choices=list(turboquant.PRESETS))
    arguments = parser.parse_args()

    turboquant.enable_no_alloc(arguments.preset)  # before the engine
    llm = LLM(arguments.model or str(smollm2()), max_model_len=2048, enforce_eager=True)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
    print("answer:", answer.outputs[0].text.strip())

    (stats,) = turboquant.get_stats(llm)  # one worker
    for name in ("preset", "bytes_per_token_compressed", "bytes_per_token_native", "capacity_tokens", "calibration"):
        print(f"{name}: {stats[name]}")


if __name__ == "__main__":  # workers import this file
    main()
