#!/usr/bin/env python3
"""The official OpenAI client against a server with a compressed cache.

turboquant serve MODEL --served-model-name demo
python examples/openai_client.py --url http://localhost:8000/v1 --model demo
"""

import argparse
from pathlib import Path

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--model", default="demo", help="name under which it is served")
parser.add_argument(
    "--document", type=Path, metavar="FILE", help="text to ask about: the longer, the more is compressed"
)
arguments = parser.parse_args()

question, tokens = "What is the capital of France? Answer in one word.", 16
if arguments.document:
    question, tokens = f"{arguments.document.read_text()}\n\nWhat is this text about? Answer in one sentence.", 64
client = OpenAI(base_url=arguments.url, api_key="none")
messages = [{"role": "user", "content": question}]
for chunk in client.chat.completions.create(
    model=arguments.model, messages=messages, max_tokens=tokens, temperature=0, stream=True
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
