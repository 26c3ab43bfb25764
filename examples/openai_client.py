#!/usr/bin/env python3
"""The official OpenAI client against a server with a compressed cache.

turboquant serve MODEL --served-model-name demo
python examples/openai_client.py --url http://localhost:8000/v1 --model demo
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--model", default="demo", help="name under which it is served")
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.url, api_key="none")
question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
for chunk in client.chat.completions.create(
    model=arguments.model, messages=question, max_tokens=16, temperature=0, stream=True
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
