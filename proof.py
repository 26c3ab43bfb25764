#!/usr/bin/env python3
"""Proof: the paper's claims as assertions, and an A/B on a real vLLM engine.

    python proof.py                       both; builds the demo model on the first call
    python proof.py --claims              the twelve claims only (CPU, under a minute)
    python proof.py --engine --model DIR  the A/B only, with a model folder of yours

Exit status 1 if any claim or check fails.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before numpy, torch and tqdm are loaded; what the user has set wins.  The claims' many small QRs make numpy's threads
# fight with torch's.
for _name in (
    "OPENBLAS_NUM_THREADS",
    "TQDM_DISABLE",
    "VLLM_NO_USAGE_STATS",
    "HF_HUB_OFFLINE",
    "VLLM_CPU_KVCACHE_SPACE",
):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from turboquant.config import PRESETS  # noqa: E402

# Limits for k4v4 on the demo model, by buffer size: (largest mean KLD, smallest top-1 agreement).
DEMO_LIMITS = {0: (0.065, 0.86), 128: (0.008, 0.94)}
DEMO_BYTES_RATIO = 0.27


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", action="store_true", help="run the claims (default: claims and engine)")
    parser.add_argument("--engine", action="store_true", help="run the engine A/B (default: claims and engine)")
    parser.add_argument("--model", metavar="DIR", help="model folder (default: SmolLM2-135M-Instruct, built locally)")
    parser.add_argument("--preset", default="k4v4", choices=list(PRESETS), help="default: %(default)s")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write claims, engine figures and checks here")
    parser.add_argument("--seed", type=int, default=0, help="seed of the claims (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.claims or arguments.engine):
        arguments.claims = arguments.engine = True
    if arguments.model and not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"--model {arguments.model}: no config.json there; give a model folder in Hugging Face format")
    return arguments


def run_claims(seed: int) -> list[dict[str, Any]]:
    from turboquant.claims import CLAIMS
    from turboquant.progress import working

    claims = []
    for number, run in enumerate(CLAIMS, 1):
        with working(f"claim {number} of {len(CLAIMS)}"):
            claim = asdict(run(seed))
        print(f"[{'PASS' if claim['ok'] else 'FAIL'}] {claim['name']}: {claim['value']} (bound: {claim['bound']})")
        claims.append(claim)
    return claims


def check(name: str, value: Any, bound: str, ok: bool) -> dict[str, Any]:
    print(f"[{'PASS' if ok else 'FAIL'}] {name}: {value} (bound: {bound})")
    return {"name": name, "value": value, "bound": bound, "ok": bool(ok)}


def engine_checks(engine: dict[str, Any], is_demo: bool) -> list[dict[str, Any]]:
    """What must hold for any model, and the figures that this project promises for the demo model."""
    difference, freed, native = engine["capture_only_max_difference"], engine["freed_bytes"], engine["native_bytes"]
    read, error = engine["tokens_read_compressed"], engine["rel_err_attention"]
    checks = [
        check("capture_only leaves the output as it is", difference, "= 0", difference == 0),
        check("the compressed path ran", read, "> 0 tokens read compressed", read > 0),
        check("free_kv_cache returned the native cache", freed, f"= {native} bytes", freed == native),
        check("attention error was measured", error, "finite, > 0", math.isfinite(error) and error > 0),
    ]
    if is_demo and engine["preset"] == "k4v4":
        checks += demo_checks(engine)
    return checks


def demo_checks(engine: dict[str, Any]) -> list[dict[str, Any]]:
    ratio = round(engine["bytes_per_token_compressed"] / engine["bytes_per_token_native"], 4)
    checks = [check("bytes per token", ratio, f"<= {DEMO_BYTES_RATIO} of native", ratio <= DEMO_BYTES_RATIO)]
    for quality in engine["quality"]:
        kld, top1 = quality["mean_kld"], quality["top1_agreement"]
        max_kld, min_top1 = DEMO_LIMITS[quality["buffer_size"]]
        window = f"buffer_size={quality['buffer_size']}"
        checks.append(check(f"mean KLD, {window}", round(kld, 5), f"<= {max_kld}", kld <= max_kld))
        checks.append(check(f"top-1 agreement, {window}", round(top1, 4), f">= {min_top1}", top1 >= min_top1))
    return checks


def print_table(engine: dict[str, Any]) -> None:
    native, compressed = engine["bytes_per_token_native"], engine["bytes_per_token_compressed"]
    settings = f"{engine['engine']['dtype']}, {engine['preset']}, mode {engine['mode']}"
    print(f"\n{engine['model']} on vLLM {engine['vllm']}, {settings}")
    rows = [
        ("", "native", "turboquant"),
        ("KV bytes per token", f"{native:.0f}", f"{compressed:.0f} ({native / compressed:.2f}x smaller)"),
        ("KV pages, MiB", mib(engine["native_bytes"]), mib(engine["store_bytes"])),
        ("exact ring and tables, MiB", "0", f"{mib(engine['ring_bytes'])} + {mib(engine['table_bytes'])}"),
        ("native cache given back, MiB", "", mib(engine["freed_bytes"])),
        ("layers compressed", "", f"{engine['layers_compressed']} of {engine['layers']}"),
        ("attention, relative L2 error", "0", f"{engine['rel_err_attention']:.4f}"),
    ]
    for quality in engine["quality"]:
        rows.append((f"mean KLD, buffer_size={quality['buffer_size']}", "0", f"{quality['mean_kld']:.4f} nats"))
        rows.append((f"top-1 agreement, buffer_size={quality['buffer_size']}", "1", f"{quality['top1_agreement']:.4f}"))
    for name, left, right in rows:
        print(f"  {name:36s} {left:>12s}   {right}")
    print(f"  quality over {engine['scored_tokens']} teacher-forced tokens, chunks of {engine['engine']['chunk']}\n")
    print(f"native:     {engine['text_native']!r}\nturboquant: {engine['text_turboquant']!r}\n")


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def run_engine(model: str | None, preset: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from turboquant.demo import smollm2
    from turboquant.integration.ab import STEPS, Engine, run_ab
    from turboquant.progress import progress_bar

    folder = model or str(smollm2())
    with progress_bar(STEPS) as progress:
        engine = run_ab(Engine(folder), preset, progress)
    print_table(engine)
    return engine, engine_checks(engine, is_demo=model is None)


def main() -> int:
    arguments = parse_arguments()
    result: dict[str, Any] = {"command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])}
    if arguments.claims:
        result["claims"] = run_claims(arguments.seed)
    if arguments.engine:
        result["engine"], result["checks"] = run_engine(arguments.model, arguments.preset)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = [entry["name"] for entry in result.get("claims", []) + result.get("checks", []) if not entry["ok"]]
    print("all claims and checks hold" if not failed else f"FAILED: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
