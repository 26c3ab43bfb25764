#!/usr/bin/env python3
"""A live engine, mode by mode: `python examples/rollout.py`.  What to look at is in docs/rollout.md."""

import argparse
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

import turboquant
from turboquant.demo import smollm2

PROMPT = "The water cycle describes how water moves above, on, and below the surface of the Earth. " * 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--preset", default="k4v4", choices=list(turboquant.PRESETS))
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model or str(smollm2()), max_model_len=1024, num_gpu_blocks_override=64, enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=16)
    native = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text
    with tempfile.TemporaryDirectory() as folder:
        calibration = turboquant.calibrate(llm, Path(folder) / "model.safetensors")
        engine = turboquant.attach(
            llm, preset=arguments.preset, mode="capture_only", shadow_interval=4, ring_share=1.0,
            calibration=str(calibration),
        )  # fmt: skip
    assert llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text == native, "capture_only changes nothing"
    errors = [layer["shadow_rel_error"]["mean"] for layer in engine.stats()[0]["per_layer"].values()]
    print(f"capture_only: mean error of attention {sum(errors) / len(errors):.4f}, worst layer {max(errors):.4f}")
    for mode in ("hybrid", "full_tq"):
        engine.set_mode(mode)
        text = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text
        print(f"{mode}: {'the same answer' if text == native else 'another answer'}: {text!r}")
    print(f"freed {engine.free_kv_cache() / 2**20:.1f} MiB of native cache")
    engine.uninstall()  # allocates it again


if __name__ == "__main__":  # workers import this file
    main()
