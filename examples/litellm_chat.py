#!/usr/bin/env python3
"""LiteLLM against a server with a compressed cache.

turboquant serve MODEL --served-model-name demo
python examples/litellm_chat.py --url http://localhost:8000/v1 --model demo
"""

import argparse

import litellm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--model", default="demo", help="name under which it is served")
arguments = parser.parse_args()

answer = litellm.completion(
    f"hosted_vllm/{arguments.model}", api_base=arguments.url, max_tokens=16, temperature=0,
    messages=[{"role": "user", "content": "What is the capital of France? Answer in one word."}],
)  # fmt: skip
print(answer.choices[0].message.content)
