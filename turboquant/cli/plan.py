"""`turboquant plan`: what fits into the memory of a GPU, from a model's config.json."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turboquant.cli.arguments import COUNT, SHARE, Json, Options, config_from, parse_count, parse_share, parse_size
from turboquant.cli.output import MIB, print_json, print_table, quiet_vllm, ranges, refusing, size
from turboquant.config import PRESETS, TurboQuantConfig, mixture
from turboquant.progress import working

if TYPE_CHECKING:
    from turboquant.cli.capacity import CachePlan, Engine
    from turboquant.cli.model import Model
    from turboquant.integration.rehearsal import Limits

COLUMNS = ("cache", "bytes/token", "smaller", "exact", "tables", "block", "blocks", "tokens", "requests")
KV_MEMORY_HELP = "Memory given to the cache's blocks, instead of an estimate of what is left."
LENGTH_HELP = "Tokens of a request; the model's maximum unless given."
PRESET_HELP = "Preset to plan for; may be repeated. All of them unless given."


@refusing
def plan(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder with the model's config.json.")],
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, such as 24GiB.")] = None,
    max_model_len: Annotated[str | None, typer.Option(metavar=COUNT, help=LENGTH_HELP)] = None,
    utilization: Annotated[str, typer.Option(metavar=SHARE, help="Share of the memory that vLLM may use.")] = "0.9",
    preset: Annotated[list[str] | None, typer.Option(metavar="PRESET", help=PRESET_HELP)] = None,
    option: Options = None,
    kv_memory: Annotated[str | None, typer.Option(metavar="SIZE", help=KV_MEMORY_HELP)] = None,
    block_size: Annotated[str | None, typer.Option(metavar=COUNT, help="Tokens of a block, as for vLLM.")] = None,
    max_num_seqs: Annotated[str, typer.Option(metavar=COUNT, help="Requests that run at once.")] = "256",
    max_num_batched_tokens: Annotated[str, typer.Option(metavar=COUNT, help="Tokens of a step.")] = "8192",
    tensor_parallel: Annotated[str, typer.Option(metavar=COUNT, help="GPUs that the model is split over.")] = "1",
    as_json: Json = False,
) -> None:
    """Plan what fits: bytes per token, tokens and requests for every kind of cache.

    Everything is of one GPU. Weights and steps are estimates; with --kv-memory the number of blocks is vLLM's own.
    """
    quiet_vllm()
    configs = {name: config_from(name, option) for name in preset or PRESETS}
    ranks, block = parse_count("--tensor-parallel", tensor_parallel), None
    if block_size is not None:
        block = parse_count("--block-size", block_size)
    model = read_plannable(folder, ranks)
    limits = limits_of(model, max_num_seqs, max_num_batched_tokens, max_model_len)
    with working("asking vLLM"):
        engine = engine_of(model, limits, gpu_memory, kv_memory, utilization, ranks, block)
        plans = plan_all(model, engine, configs)
    show(model, engine, plans, configs, as_json)


def read_plannable(folder: Path, tensor_parallel: int) -> "Model":
    """The model; ValueError if turboquant cannot serve it."""
    from turboquant.cli.model import objections, read_model

    model = read_model(folder, tensor_parallel)
    if found := objections(model):
        raise ValueError(f"turboquant cannot serve this model: {'; '.join(found)}")
    if not any(layer.is_attention for layer in model.layers):
        raise ValueError("the model has no layer of softmax attention, so nothing grows with the tokens")
    return model


def limits_of(model: "Model", requests: str, tokens: str, length: str | None) -> "Limits":
    from turboquant.integration.rehearsal import Limits

    context = model.max_position_embeddings if length is None else parse_count("--max-model-len", length)
    return Limits(parse_count("--max-num-seqs", requests), parse_count("--max-num-batched-tokens", tokens), context)


def engine_of(
    model: "Model",
    limits: "Limits",
    gpu_memory: str | None,
    kv_memory: str | None,
    utilization: str,
    tensor_parallel: int,
    block_size: int | None,
) -> "Engine":
    from turboquant.cli.capacity import Engine, engine_on_gpu

    if kv_memory is not None:
        given = parse_size("--kv-memory", kv_memory)
        return Engine(limits, given, kv_memory=given, block_size=block_size)
    if gpu_memory is None:
        raise ValueError("give --gpu-memory, such as 24GiB, or --kv-memory")
    memory = int(parse_size("--gpu-memory", gpu_memory) * parse_share("--utilization", utilization))
    return engine_on_gpu(model, limits, memory, tensor_parallel, block_size)


def plan_all(model: "Model", engine: "Engine", configs: dict[str, TurboQuantConfig]) -> "list[CachePlan]":
    """Of vLLM's own caches, the one with 16 bits first, and of the presets."""
    from turboquant.cli.capacity import NATIVE_ITEMSIZE, plan_compressed, plan_native

    native = [plan_native(model, engine, name) for name in NATIVE_ITEMSIZE]
    return native + [plan_compressed(model, engine, name, config) for name, config in configs.items()]


# ---- output ----------------------------------------------------------------------------------------------------
def show(
    model: "Model", engine: "Engine", plans: "list[CachePlan]", configs: dict[str, TurboQuantConfig], as_json: bool
) -> None:
    skipped = native_layers(model, next(iter(configs.values())))
    if as_json:
        caches = [asdict(plan) | {"requests": plan.requests} for plan in plans]
        print_json(
            {"layers": model.counts(), "native_layers": skipped, "engine": asdict(engine), "caches": caches}
        )  # fmt: skip
        return
    for line in heading(model, engine, skipped):
        typer.echo(line)
    print_table(COLUMNS, [row_of(plan, plans[0]) for plan in plans])
    for line in [*bits_of_layers(configs, plans), *remarks(engine, plans)]:
        typer.echo(line)


def native_layers(model: "Model", config: TurboQuantConfig) -> dict[str, list[int]]:
    """Layers that turboquant leaves as they are, by the reason."""
    from turboquant.cli.model import native_reason

    found: dict[str, list[int]] = {}
    for layer in model.layers:
        if reason := native_reason(layer, model, config):
            found.setdefault(reason, []).append(layer.index)
    return found


def heading(model: "Model", engine: "Engine", skipped: dict[str, list[int]]) -> Iterable[str]:
    counts = ", ".join(f"{count} {what}" for what, count in model.counts().items() if count)
    yield f"{model.num_layers} layers: {counts}"
    for reason, indices in skipped.items():
        yield f"{len(indices)} stay native with a preset ({reason}): {ranges(indices)}"
    if engine.kv_memory is not None:
        yield f"{size(engine.kv_memory)} for blocks; exact tokens and tables come on top"
        return
    left = size(engine.memory - engine.reserved)
    yield f"{size(engine.memory)} for vLLM; weights and steps take about {size(engine.reserved)}, which leaves {left}"


def row_of(plan: "CachePlan", native: "CachePlan") -> tuple[str, ...]:
    smaller = native.bytes_per_token / plan.bytes_per_token
    beside = (f"{part / MIB:.1f} MiB" if part else "-" for part in (plan.exact_bytes, plan.table_bytes))
    return (
        plan.cache, f"{plan.bytes_per_token:,}", f"{smaller:.2f}x", *beside, str(plan.block_size), f"{plan.blocks:,}",
        f"{plan.tokens:,}", f"{plan.requests:,}",
    )  # fmt: skip


def bits_of_layers(configs: dict[str, TurboQuantConfig], plans: "list[CachePlan]") -> Iterable[str]:
    """Of presets whose layers differ."""
    for plan in plans:
        if len(plan.formats) > 1:
            yield f"{plan.cache}: {mixture(plan.formats)} layers"
        elif plan.cache in configs and configs[plan.cache].auto_bits:
            yield f"{plan.cache}: the engine chooses the bits of every layer when it starts, within these bytes"


def remarks(engine: "Engine", plans: "list[CachePlan]") -> Iterable[str]:
    length = engine.limits.context
    yield f"tokens and requests: of requests of {length} tokens"
    for plan in plans:
        if plan.concurrency < 1:
            yield f"warning: {plan.cache} holds {plan.tokens} tokens, not one request of {length}: vLLM would not start"
        elif not plan.exact_bytes and plan.table_bytes:
            yield f"warning: {plan.cache} has no room for exact tokens, so that answers are less accurate"
