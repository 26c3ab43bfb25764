#!/usr/bin/env python3
"""`model.generate` with a compressed cache, without vLLM: `python examples/transformers_generate.py --preset k4v4`."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turboquant import PRESETS
from turboquant.demo import smollm2
from turboquant.transformers import TurboQuantCache, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--preset", default="k4v4", choices=list(PRESETS))
    arguments = parser.parse_args()

    folder = arguments.model or str(smollm2())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    transforms = measure(model, tokenizer, context=2048)  # once a model
    cache = TurboQuantCache(model.config, arguments.preset, transforms=transforms)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=16, do_sample=False)
    print("answer:", tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    print("bytes:", cache.memory_bytes())


if __name__ == "__main__":
    main()
