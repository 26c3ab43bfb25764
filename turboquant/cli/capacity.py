"""What one engine's memory holds, per kind of cache: bytes from turboquant's own classes, blocks by vLLM's rules."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from turboquant.allocation import LayerDamage, allocate
from turboquant.capture import ExactRing, RingData, entry_size
from turboquant.cli.memory import step_bytes, weight_bytes
from turboquant.cli.model import Layer, Model, native_reason
from turboquant.cli.output import size
from turboquant.cli.pool import (
    BLOCK_MULTIPLE,
    CONCURRENT_BATCHES,
    NATIVE_BLOCK,
    Page,
    Pool,
    attention_page,
    hybrid_block,
    make_pool,
)
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration.backend import PREFERRED_BLOCK, LayerMemory, backend_of, plan_memory
from turboquant.integration.compat import LayerHost
from turboquant.integration.rehearsal import Limits

NATIVE_ITEMSIZE = {"bf16": 2, "fp8": 1}  # bytes of a number in vLLM's own caches
EXACT_DTYPE = torch.bfloat16  # exact tokens and layers that stay native have the model's, of 16 bits


@dataclass(frozen=True)
class Engine:
    """What an engine is started with.

    memory: bytes that it may use; reserved: bytes of it that weights and steps take; kv_memory: bytes given to blocks,
    whatever is left.
    """

    limits: Limits
    memory: int
    reserved: int = 0
    kv_memory: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size % BLOCK_MULTIPLE:
            raise ValueError(f"block size {self.block_size} is not supported; allowed: multiples of {BLOCK_MULTIPLE}")

    def left(self, beside: int) -> int:
        """Bytes for blocks where `beside` bytes were taken for something else."""
        left = self.memory - self.reserved - beside if self.kv_memory is None else self.kv_memory
        return max(0, left)


@dataclass(frozen=True)
class CachePlan:
    """One cache on one GPU.

    formats: compressed layers by their bits, none where an engine chooses them; bytes_per_token: of all attention
    layers; exact_bytes: the ring of exact tokens; table_bytes: codecs and the ring's tables; kv_bytes: for blocks;
    blocks: vLLM's num_gpu_blocks; tokens: vLLM's "KV cache size", for requests of the full length; concurrency: so many
    such requests at once.
    """

    cache: str
    formats: dict[str, int]
    bytes_per_token: int
    exact_bytes: int
    table_bytes: int
    kv_bytes: int
    block_size: int
    blocks: int
    tokens: int
    concurrency: float

    @property
    def requests(self) -> int:
        """Requests of the full length that fit."""
        return int(self.concurrency)


def engine_on_gpu(model: Model, limits: Limits, memory: int, tensor_parallel: int, block_size: int | None) -> Engine:
    """An engine that may use `memory` bytes of a GPU; ValueError if weights and steps leave nothing of it."""
    reserved = weight_bytes(model) // tensor_parallel + step_bytes(model, limits, tensor_parallel)
    if reserved >= memory:
        raise ValueError(
            f"{size(memory)} for vLLM are not enough, as weights and steps take about {size(reserved)}; "
            f"give more --gpu-memory, or --kv-memory"
        )
    return Engine(limits, memory, reserved, block_size=block_size)


def plan_native(model: Model, engine: Engine, name: str) -> CachePlan:
    """vLLM's own cache, "bf16" or "fp8"."""
    tokens = {layer: plain_bytes(layer, NATIVE_ITEMSIZE[name]) for layer in model.owners}
    return fill(name, engine, layout_of(tokens, engine.block_size or NATIVE_BLOCK), 0, 0)


def plan_compressed(model: Model, engine: Engine, name: str, config: TurboQuantConfig) -> CachePlan:
    """The native route's cache: compressed pages, with exact tokens and tables beside them."""
    ours = [layer for layer in model.owners if native_reason(layer, model, config) is None]
    formats = {} if config.auto_bits else config.formats(layer.index for layer in ours)
    config = planned(config, model, ours)
    tokens = {x: compressed_bytes(x, config) if x in ours else plain_bytes(x) for x in model.owners}
    asked = engine.block_size or PREFERRED_BLOCK
    host, layout = host_of(model, engine, asked), layout_of(tokens, asked)
    memories = {layer: plan_memory(config, host, plain_bytes(layer)) for layer in ours}
    exact = sum(exact_bytes(layer, memory) for layer, memory in memories.items())
    codecs = sum(codec_bytes(config, *bits_of(x, config), x.num_kv_heads, x.head_dim) for x in ours)
    plan = fill(name, engine, layout, exact, codecs)
    smallest = min(memories.values(), key=lambda memory: memory.ring_tokens, default=LayerMemory(0, 0, 0))
    rings = layout.pool.groups_of({tokens[layer] for layer in ours}) if ours else 0
    tables = codecs + rings * ring_table_bytes(smallest, plan.blocks, layout.block_size)
    return replace(plan, formats=formats, table_bytes=tables)


def planned(config: TurboQuantConfig, model: Model, ours: list[Layer]) -> TurboQuantConfig:
    """With bits for `auto_bits`, as if all layers cost the same: an engine measures what they do.

    ValueError if the model's layers cannot have so few, or so many.
    """
    if not config.auto_bits:
        return config
    alike = len({(layer.kind, layer.window) for layer in model.owners}) > 1
    layers = [LayerDamage(layer.index, layer.num_kv_heads, layer.head_dim, 1.0, 1.0) for layer in ours]
    return allocate(config, layers, alike)


@dataclass(frozen=True)
class Layout:
    """How the layers' tokens lie in blocks of `block_size` tokens; bytes_per_token: of all of them."""

    bytes_per_token: int
    block_size: int
    pool: Pool


def layout_of(tokens: dict[Layer, int], block_size: int) -> Layout:
    """vLLM's layout of layers with so many bytes a token (recurrent ones: none); block_size: what was asked for."""
    state = max(layer.state_bytes for layer in tokens)
    if state:
        smallest = min(number for layer, number in tokens.items() if layer.is_attention)
        block_size = hybrid_block(block_size, smallest, state)
    pages = [page_of(layer, number, block_size) for layer, number in tokens.items()]
    return Layout(sum(tokens.values()), block_size, make_pool(pages))


def fill(name: str, engine: Engine, layout: Layout, exact: int, tables: int) -> CachePlan:
    """The plan of a cache beside which so many bytes are taken, before its blocks."""
    kv_bytes, length = engine.left(exact + tables), engine.limits.context
    blocks = layout.pool.blocks(kv_bytes)
    concurrency = blocks / layout.pool.blocks_of_request(length, CONCURRENT_BATCHES * engine.limits.tokens)
    return CachePlan(
        name, {}, layout.bytes_per_token, exact, tables, kv_bytes, layout.block_size, blocks, int(concurrency * length),
        round(concurrency, 3),
    )  # fmt: skip


def page_of(layer: Layer, token_bytes: int, block_size: int) -> Page:
    if layer.is_attention:
        return attention_page(layer.kind, token_bytes, block_size, layer.window)
    return Page(layer.kind, layer.state_bytes)


def host_of(model: Model, engine: Engine, block_size: int) -> LayerHost:
    """What a layer knows of the engine that it is made for."""
    block = max(block_size, PREFERRED_BLOCK)
    return LayerHost(torch.device("cpu"), engine.limits, block, model.num_layers, engine.memory)


# ---- bytes of a layer ------------------------------------------------------------------------------------------
def plain_bytes(layer: Layer, itemsize: int = EXACT_DTYPE.itemsize) -> int:
    """Bytes of a token in vLLM's own cache; 0 for recurrent layers."""
    return 2 * layer.num_kv_heads * layer.head_dim * itemsize


def compressed_bytes(layer: Layer, config: TurboQuantConfig) -> int:
    """Bytes of a token in compressed pages, as vLLM's scheduler counts them."""
    backend = backend_of(config, *bits_of(layer, config))
    return layer.num_kv_heads * backend.token_bytes(layer.head_dim)


def bits_of(layer: Layer, config: TurboQuantConfig) -> tuple[int, int]:
    return config.layer_key_bits(layer.index), config.layer_value_bits(layer.index)


def exact_bytes(layer: Layer, memory: LayerMemory) -> int:
    """Bytes of a layer's exact tokens."""
    return RingData(memory.ring_tokens, layer.num_kv_heads, layer.head_dim, EXACT_DTYPE, "meta").nbytes


def ring_table_bytes(memory: LayerMemory, blocks: int, block_size: int) -> int:
    """Bytes of the tables of one group's ring."""
    capacity = memory.ring_tokens // entry_size(block_size)
    return ExactRing(blocks, block_size, memory.window, capacity, "meta", memory.sinks).nbytes


@cache
def codec_bytes(config: TurboQuantConfig, key_bits: int, value_bits: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of a layer's codec; the same for all layers with these sizes."""
    return KVCodec.build(config.uniform(key_bits, value_bits), 0, num_kv_heads, head_dim).nbytes
