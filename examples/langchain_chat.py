#!/usr/bin/env python3
"""LangChain against a server with a compressed cache.

turboquant serve MODEL --served-model-name demo
python examples/langchain_chat.py --url http://localhost:8000/v1 --model demo
"""

import argparse

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--model", default="demo", help="name under which it is served")
arguments = parser.parse_args()

chat = ChatOpenAI(base_url=arguments.url, api_key="none", model=arguments.model, max_tokens=16, temperature=0)
chain = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}? Answer in one word.")]) | chat
for piece in chain.stream({"country": "France"}):
    print(piece.content, end="", flush=True)
print()
