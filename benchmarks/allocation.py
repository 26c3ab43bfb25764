#!/usr/bin/env python3
"""What a model's answers lose with presets, automatic bits beside them, on many rows at once.

    python benchmarks/allocation.py MODEL --presets k4v4,auto:4.25 --contexts 1024 4096 --json allocation.json

A simulation of decode steps in vLLM's model: the last rows of a text attend to what the layers' codecs make of the keys
and values of an exact prefill, but for the first and the last tokens before each row.  `benchmark.py quality` measures
less of it through the engine itself.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from turboquant.allocation import LayerDamage, allocate, row_bytes
from turboquant.codec import KeyTransform
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat, quality, selfcalibration, sensitivity
from turboquant.integration.calibrate import compressible


def runner_of(model: str, context: int) -> Any:
    """The model runner of an engine in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    llm = LLM(model, dtype=dtype, max_model_len=context, max_num_seqs=1, enforce_eager=True)
    return llm.collective_rpc(lambda worker: worker.model_runner)[0]


class Bench:
    """A model, calibrated, with what bits cost in its layers; seconds: of processor time that the latter took."""

    def __init__(self, runner: Any):
        self.runner, self.layers = runner, compressible(runner)
        rotaries = compat.rotaries(runner)
        found = selfcalibration.measure(runner)
        self.transforms = {name: found[name].best(rotaries.get(name)) for name in self.layers}
        places, start = {name: index for index, name in enumerate(self.layers)}, time.process_time()
        damages = sensitivity.measure(runner, TurboQuantConfig(), self.transforms, places)
        self.seconds = time.process_time() - start
        self.damages = [
            LayerDamage(index, layer.num_kv_heads, layer.head_size, **damages[name])
            for index, (name, layer) in enumerate(self.layers.items())
        ]

    def config(self, preset: str) -> TurboQuantConfig:
        config = TurboQuantConfig.from_options(preset)
        return allocate(config, self.damages) if config.auto_bits else config

    def bits(self, config: TurboQuantConfig) -> float:
        """Per number, scales included."""
        plain, size, numbers = TurboQuantConfig(), 0, 0
        for layer in self.damages:
            keys, values = (row_bytes(plain, layer.head_dim, side) for side in ("keys", "values"))
            bits = config.layer_key_bits(layer.index), config.layer_value_bits(layer.index)
            size += layer.num_kv_heads * (keys[bits[0]] + values[bits[1]])
            numbers += 2 * layer.num_kv_heads * layer.head_dim
        return 8 * size / numbers

    def texts(self, contexts: list[int], count: int) -> list[list[int]]:
        return quality.texts(compat.tokenizer_of(self.runner.vllm_config), contexts, count)

    def outputs(
        self, ids: list[int], rows: int, configs: dict[str, TurboQuantConfig]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(preset, log-probabilities of the last rows), first those of the exact cache by the name ""."""
        with sensitivity.cached_attention(self.runner) as standing:
            probe = sensitivity.Probe(self.runner, standing, ids, range(len(ids) - rows - 1, len(ids) - 1))
            yield "", probe.reference
            decoded: dict[tuple[str, str, int], torch.Tensor] = {}
            for preset, config in configs.items():
                for index, name in enumerate(self.layers):
                    standing[name].fakes = fakes(standing[name], config, index, self.transforms[name], decoded, name)
                yield preset, probe.log_probabilities()


def fakes(
    attention: sensitivity.CachedAttention, config: TurboQuantConfig, index: int, transform: KeyTransform,
    decoded: dict[tuple[str, str, int], torch.Tensor], name: str,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """`sensitivity.fakes`, each width once."""
    widths = {"keys": config.layer_key_bits(index), "values": config.layer_value_bits(index)}
    if any((name, side, bits) not in decoded for side, bits in widths.items()):
        found = sensitivity.fakes(attention, config.uniform(*widths.values()), index, transform)
        decoded |= {(name, side, bits): found[side] for side, bits in widths.items()}
    return {side: decoded[name, side, bits] for side, bits in widths.items()}


def measure(bench: Bench, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every context and preset."""
    configs = {preset: bench.config(preset) for preset in arguments.presets.split(",")}
    texts = bench.texts(arguments.contexts, arguments.texts)
    for number, context in enumerate(arguments.contexts):
        found: dict[str, list[torch.Tensor]] = {}
        ours = texts[number * arguments.texts : (number + 1) * arguments.texts]
        for ids in ours:
            for preset, outputs in bench.outputs(ids, arguments.rows, configs):
                found.setdefault(preset, []).append(outputs.cpu())
        forced = torch.tensor([token for ids in ours for token in ids[-arguments.rows :]])
        reference = torch.cat(found.pop(""))
        for preset, outputs in found.items():
            formats = configs[preset].formats(range(len(bench.damages)))
            head = {"context": context, "preset": preset, "bits": bench.bits(configs[preset]), "formats": formats}
            yield head | quality.compare(reference, torch.cat(outputs), forced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--presets", default="k3v2,auto:2.75,k4v2,auto:3.25,auto:4,k4v4,auto:4.25")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sensitivity.CPU_ROWS = sensitivity.ROWS  # what bits cost is measured as on a GPU
    bench = Bench(runner_of(arguments.model, max(arguments.contexts) + 1))
    command = f"python benchmarks/allocation.py {Path(arguments.model).name} --presets {arguments.presets} "
    command += f"--contexts {' '.join(map(str, arguments.contexts))} --texts {arguments.texts} --rows {arguments.rows}"
    report: dict[str, Any] = {
        "command": command, "vllm": compat.vllm_version(), "torch": torch.__version__,
        "device": bench.runner.device.type, "threads": torch.get_num_threads(), "model": Path(arguments.model).name,
        "measuring_seconds": bench.seconds, "rows": [],
    }  # fmt: skip
    print(f"what bits cost was measured in {bench.seconds:.1f} s of processor time")
    for row in measure(bench, arguments):
        report["rows"].append(row)
        print(f"{row['context']:6} {row['preset']:10} {row['bits']:6.3f} bits, KLD {row['mean_kld']:.5f}", end="")
        print(f" ± {row['se_kld']:.5f} (99 %: {row['p99_kld']:.4f}), top-1 {row['top1']:.1%}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
