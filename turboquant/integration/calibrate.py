"""Gather the statistics of a running engine's keys and queries, and write its calibration file.

turboquant.calibrate(llm, "model.safetensors")                   # on the text of the package, all over the context
turboquant.calibrate(llm, "model.safetensors", ["my own text"])  # prompts, or lists of token ids
TURBOQUANT=k4v4 TURBOQUANT_OPTIONS='{"calibration": "model.safetensors"}' vllm serve MODEL
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turboquant.batch import AttentionBatch
from turboquant.calibration import SINKS, LayerTransforms
from turboquant.checks import is_int
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat, selfcalibration, sensitivity
from turboquant.integration.attach import call_workers
from turboquant.integration.calibration_file import save_transforms
from turboquant.integration.standin import StandIn
from turboquant.rotary import Rotary

logger = logging.getLogger("turboquant")
Figures = dict[str, dict[str, list[list[float]]]]  # layer -> `LayerTransforms.tensors`, as lists


class Observer(StandIn):
    """Looks at the arguments of a layer's `forward` and calls it."""

    def __init__(self, layer: Any, rotary: Rotary | None):
        self.forward = layer.impl.forward
        self.moments = selfcalibration.LayerMoments(layer, rotary)
        super().__init__(layer)

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if attn_metadata is not None:
            rows, positions = beyond_sinks(compat.batch_of(attn_metadata, 1))
            keys, queries = (x.view(len(x), -1, layer.head_size)[rows] for x in (key, query))
            self.moments.add(keys, queries, positions)
        result: torch.Tensor = self.forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        return result


def beyond_sinks(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows int64 [n] of a step's tokens, without the first of every sequence, and their positions in those."""
    rows, positions = [], []
    for start, new, cached in batch.host_lens:
        row = torch.arange(min(max(0, SINKS - cached), new), new)
        rows.append(start + row)
        positions.append(cached + row)
    return torch.cat(rows).to(batch.seq_lens.device), torch.cat(positions)


def compressible(runner: Any) -> dict[str, Any]:
    return {name: layer for name, layer in compat.all_layers(runner).items() if compat.native_reason(layer) is None}


def measure(runner: Any) -> Figures:
    """Figures of this worker's KV heads on the package's text; ValueError where the model cannot run by itself."""
    if reason := compat.run_objection(runner.vllm_config):
        raise ValueError(f"turboquant cannot run this model by itself ({reason}); give prompts to calibrate with")
    layers = compressible(runner)
    return as_figures({name: x for name, x in selfcalibration.measure(runner).items() if name in layers})


def damages(runner: Any) -> sensitivity.Damages:
    """What few bits cost in every layer, on the package's text; empty where that cannot be measured."""
    if compat.probe_objection(runner.vllm_config):
        return {}
    layers, rotaries = selfcalibration.measure(runner), compat.rotaries(runner)
    transforms = {name: layer.best(rotaries.get(name)) for name, layer in layers.items()}
    places = {name: index for index, name in enumerate(compressible(runner))}
    return sensitivity.measure(runner, TurboQuantConfig(), transforms, places)


def start(runner: Any) -> None:
    """Observe every layer that could be compressed, in this worker; ValueError if that is under way."""
    if hasattr(runner, "turboquant_observers"):
        raise ValueError("a calibration is under way already; finish it first")
    rotaries = compat.rotaries(runner)
    layers = compressible(runner).items()
    runner.turboquant_observers = {name: Observer(layer, rotaries.get(name)) for name, layer in layers}


def finish(runner: Any) -> Figures:
    """Stop observing; figures of this worker's KV heads.  ValueError if no calibration was started."""
    if not hasattr(runner, "turboquant_observers"):
        raise ValueError("no calibration was started")
    observers: dict[str, Observer] = vars(runner).pop("turboquant_observers")
    for observer in observers.values():
        observer.remove()
    return as_figures({name: observer.moments.transforms() for name, observer in observers.items()})


def as_figures(transforms: Mapping[str, LayerTransforms]) -> Figures:
    """Transforms as lists, which every RPC can carry."""
    return {name: {side: x.tolist() for side, x in layer.tensors().items()} for name, layer in transforms.items()}


def calibrate(
    llm: Any, path: str | Path, prompts: Sequence[str | list[int]] | None = None, *, layer_costs: bool = False
) -> Path:
    """Write the calibration file of a `vllm.LLM`'s model; takes seconds.

    prompts: texts or token ids like those that the model will see, and as long: what is measured holds for the
    positions that they reach.  Default: a text of several kinds in the package, at positions all over the context.
    layer_costs: measure what few bits cost in every layer, too, as "auto" presets need: two runs of the model a layer;
    left out where the engine cannot (data or pipeline parallelism).
    """
    check_prompts(prompts)
    workers = call_workers(llm, "tq_calibration_measure") if prompts is None else observe_prompts(llm, prompts)
    model = llm.llm_engine.vllm_config.model_config
    transforms, number = merge_workers(workers, model.get_total_num_kv_heads()), len(prompts or ())
    logger.info("turboquant: calibrated %d layers with %s: %s", len(transforms), number or "the package's text", path)
    costs = call_workers(llm, "tq_calibration_damages")[0] if layer_costs else None
    return save_transforms(path, transforms, costs, model=model.model, prompts=number)


def check_prompts(prompts: object) -> None:
    """ValueError unless prompts is None, or texts and lists of token ids, and not empty."""
    if prompts is None:
        return
    if not isinstance(prompts, list | tuple) or not prompts or not all(map(is_prompt, prompts)):
        raise ValueError(f"prompts={prompts!r} must be texts or lists of token ids, or None for the package's text")


def is_prompt(prompt: object) -> bool:
    return bool(prompt) and (isinstance(prompt, str) or (isinstance(prompt, list | tuple) and all(map(is_int, prompt))))


def observe_prompts(llm: Any, prompts: Sequence[str | list[int]]) -> list[Figures]:
    """Figures of every worker.  The prefix cache is reset, so that every prompt is computed, and none is kept."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    llm.collective_rpc("tq_calibration_start")
    try:
        batch = [as_prompt(prompt) for prompt in prompts]
        llm.generate(batch, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    finally:
        workers: list[Figures] = llm.collective_rpc("tq_calibration_finish")
        llm.reset_prefix_cache()
    return workers


def as_prompt(prompt: str | list[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def merge_workers(workers: Sequence[Figures], total_heads: int) -> dict[str, LayerTransforms]:
    """Transforms of all KV heads, from tensor-parallel ranks in order and pipeline stages one after another."""
    parts: dict[str, list[dict[str, list[list[float]]]]] = {}
    for figures in workers:
        for name, figure in figures.items():
            parts.setdefault(name, []).append(figure)
    merged = {}
    for name, ranks in parts.items():
        # More ranks than KV heads: neighbours hold the same head.
        ranks = ranks[:: max(1, len(ranks) * len(ranks[0]["center"]) // total_heads)]
        known = [
            side for side in ranks[0] if all(side in rank for rank in ranks)
        ]  # centres may turn on some ranks only
        sides = {side: torch.tensor([head for rank in ranks for head in rank[side]]) for side in known}
        merged[name] = LayerTransforms.of_tensors(sides)
    return merged
