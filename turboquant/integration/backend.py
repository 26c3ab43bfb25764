"""The native route: attention layers whose pages are compressed from the start.

vLLM asks a layer's backend for the bytes of a token (`customize_spec`, or the layer's spec up to 0.27), so its
scheduler counts compressed pages.  Each layer keeps a codec and exact recent tokens; layers of a KV-cache group share
the ring's tables, which the group's metadata builder plans once a step, before any layer runs.  Nothing in a layer's
step waits for the device, and what a captured CUDA graph reads lies in memory that stays.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from turboquant.allocation import LayerDamage, allocate
from turboquant.batch import AttentionBatch
from turboquant.calibration import LayerTransforms, of_layer
from turboquant.capture import ExactRing, ExactWindow, LayerCache, RingData, StepPlan, entry_size, exact_entries
from turboquant.codec import KeyTransform, KVCodec, rotary_bytes
from turboquant.config import NO_CALIBRATION, TurboQuantConfig, format_name, mixture
from turboquant.integration import compat, selfcalibration, sensitivity, telemetry
from turboquant.integration.calibration_file import load_transforms
from turboquant.integration.rehearsal import distinct_steps, largest_steps, rehearse, rehearse_plan
from turboquant.integration.vllm import UnsupportedEngineError
from turboquant.kernels import choose_kernels, choose_plan
from turboquant.page import PageFormat
from turboquant.score import HybridScorer, Own
from turboquant.store import CompressedBlockStore

logger = logging.getLogger("turboquant")
PREFERRED_BLOCK = 32  # tokens of a page where nobody asked for a size
MOST_OF_MEMORY = 0.25  # of the cache that one request's exact tokens may take
MAX_GRAPH_QUERY = 16  # query rows of a request that the fast decode serves


class TurboQuantBackend(AttentionBackend):
    """Base of the backends that `backend_of` makes, one per page format."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    config: TurboQuantConfig
    key_bits: int
    value_bits: int

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TurboQuantImpl"]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type["TurboQuantMetadataBuilder"]:
        return TurboQuantMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Never part of a block: vLLM's CPU runner zeroes the wrong ones where blocks are split (0.32.0)."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Pages may be padded: other layers' can be larger (vLLM 0.26 asks)."""
        return True

    @classmethod
    def token_bytes(cls, head_dim: int) -> int:
        """Bytes of a token and KV head."""
        return cls.page_format(head_dim, PREFERRED_BLOCK).token_bytes

    @classmethod
    def page_format(cls, head_dim: int, block_size: int) -> PageFormat:
        return page_format(cls.config, cls.key_bits, cls.value_bits, head_dim, block_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec with our bytes per token (vLLM 0.30 and newer)."""
        return compat.packed_spec(spec, cls.token_bytes(spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Head after head inside a block, blocks of a layer one after another (vLLM 0.30 and newer)."""
        return compat.head_major_layouts()

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, H_kv, block, bytes] (vLLM up to 0.27)."""
        return num_blocks, num_kv_heads, block_size, cls.token_bytes(head_size)


@cache
def page_format(config: TurboQuantConfig, key_bits: int, value_bits: int, head_dim: int, block_size: int) -> PageFormat:
    return KVCodec.build(config.uniform(key_bits, value_bits), 0, 1, head_dim).page_format(block_size)


@cache
def backend_of(config: TurboQuantConfig, key_bits: int, value_bits: int) -> type[TurboQuantBackend]:
    """The backend of layers with a page format."""
    fields = {"config": config, "key_bits": key_bits, "value_bits": value_bits}
    return type(f"TurboQuantBackend_{format_name(key_bits, value_bits)}", (TurboQuantBackend,), fields)


@dataclass(eq=False)
class TurboQuantMetadata(AttentionMetadata):
    """One step of a KV-cache group: vLLM's fields, and the plan that the layers share."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    ring: ExactRing
    plan: StepPlan
    rows: Mapping[int, Sequence[int]]
    causal: bool = True


class TurboQuantMetadataBuilder(AttentionMetadataBuilder[TurboQuantMetadata]):
    """Plans the exact ring and the query groups of a step.

    What a captured graph reads is written into the same tensors every step: `lines` int32 [max_num_seqs, 4]
    (`AttentionBatch.entries`), `window` for max_num_seqs requests.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size, self.vllm_config = kv_cache_spec.block_size, vllm_config
        self.layer_names, self.impls = layer_names, list[TurboQuantImpl]()  # vLLM adds draft layers to the names later
        compat.outside_pools(device, self._prepare)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if all(layer.impl.attached for layer in compressed_layers(vllm_config).values()):
            compat.log_once(vllm_config, summary(vllm_config))  # the last group has joined
            telemetry.write_figures(self.meter.writer, figures(vllm_config))
        self.has_pages = False

    def _prepare(self) -> None:
        """Everything that outlives a step."""
        impls = [compat.layer_named(self.vllm_config, name).impl for name in self.layer_names]
        memory = min((impl.memory for impl in impls), key=lambda memory: memory.ring_tokens)
        capacity = memory.ring_tokens // entry_size(self.block_size)
        blocks = compat.kernel_blocks(self.vllm_config, self.block_size)
        self.ring = ExactRing(blocks, self.block_size, memory.window, capacity, self.device, memory.sinks)
        self.plan_ring = choose_plan(self.ring.owner.device)
        writer = telemetry.Writer(compat.worker_place(self.vllm_config))
        self.meter = telemetry.Meter(writer, self.layer_names[0], self.device)
        self._join()
        for impl in {impl.variant: impl for impl in self.impls}.values():
            impl.compile_kernels()
        rows = compat.max_batch(self.vllm_config)
        self.lines = torch.zeros(rows, 4, dtype=torch.int32, device=self.device)
        index = torch.zeros(rows, self.ring.columns, dtype=torch.int64, device=self.device)
        self.window = ExactWindow(index, torch.zeros_like(index, dtype=torch.bool), self.ring.sinks)
        rehearse_plan(self.plan_ring, self.ring, self.lines, self.window)

    def _join(self) -> None:
        """Take in the layers that are named and have not joined yet.

        Draft layers are in a group of the model first, and then move to one of their own.
        """
        for name in self.layer_names[len(self.impls) :]:
            impl = compat.layer_named(self.vllm_config, name).impl
            if impl.memory.ring_tokens < self.ring.tokens:
                raise RuntimeError(
                    f"{name} has room for {impl.memory.ring_tokens} exact tokens, not {self.ring.tokens}"
                )
            impl.attach(self.ring, self.meter)
            self.impls.append(impl)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs of decode and verify steps where the fast decode serves every compressed layer."""
        impls = [layer.impl for layer in compat.attention_layers(vllm_config).values()]
        ours = [impl for impl in impls if isinstance(impl, TurboQuantImpl)]
        if all(impl.serves_graphs(kv_cache_spec.block_size) for impl in ours):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TurboQuantMetadata:
        step = common_attn_metadata
        compat.check_step(step)
        self._join()
        count = step.num_reqs
        batch = AttentionBatch(
            step.query_start_loc[: count + 1].long(), step.seq_lens[:count].long(), step.block_table_tensor[:count],
            self.block_size, compat.lens_on_host(step), self.lines[:count],
        )  # fmt: skip
        plan = StepPlan(batch, self.window.of(count))
        self.plan_ring(self.ring, batch, self.lines[:count], plan.window)
        self.meter.step(batch.host_lens, plan.window.present)
        if not self.has_pages:  # at the first step vLLM has allocated them
            telemetry.write_figures(self.meter.writer, figures(self.vllm_config))
            self.has_pages = True
        return TurboQuantMetadata(
            step.num_actual_tokens, step.max_query_len, step.query_start_loc, step.max_seq_len, step.seq_lens,
            step.block_table_tensor, step.slot_mapping, self.ring, plan, self._rows(batch),
        )  # fmt: skip

    def _rows(self, batch: AttentionBatch) -> Mapping[int, Sequence[int]]:
        """Query groups: one of all rows where the lengths agree, padding included, as a captured graph needs it."""
        lengths = {new for _, new, _ in batch.host_lens if new}
        if len(lengths) == 1 and max(lengths) <= MAX_GRAPH_QUERY:
            return {lengths.pop(): range(len(batch.seq_lens))}
        return batch.rows_by_length()


@dataclass(frozen=True)
class LayerMemory:
    """What a layer may use besides its pages: recent and first tokens of a request that are exact (0 = none), and how
    many exact tokens are kept at all.
    """

    window: int
    sinks: int
    ring_tokens: int


def plan_memory(config: TurboQuantConfig, host: compat.LayerHost, token_bytes: int) -> LayerMemory:
    """Windows of all requests that may run, or of as many as the ring's share of the memory holds.

    One request's at least, unless that alone took more than MOST_OF_MEMORY: where memory is short, few run.
    token_bytes: of an exact token in one layer.
    """
    window, sinks = config.buffer_size, config.sink_size
    size, each = entry_size(host.block_size), exact_entries(window, sinks, host.block_size)
    all_entries = host.cache_budget / (host.num_layers * token_bytes * size)
    if each > MOST_OF_MEMORY * all_entries:
        return LayerMemory(0, 0, 0)
    entries = min(each * host.limits.requests, max(each, int(config.ring_share * all_entries)))
    return LayerMemory(window, sinks, entries * size)


class TurboQuantImpl(AttentionImpl[TurboQuantMetadata]):
    """Attention of one layer on compressed pages.

    target: the layer whose cache this one reads instead of keeping its own, None for most layers.
    """

    target: "TurboQuantImpl | None" = None
    is_shared = False  # whether another layer has this one as target
    own_rows: Own | None = None  # of the running step, for the layers that share the cache
    codec: KVCodec
    memory: LayerMemory
    recent: RingData
    cache: LayerCache
    scorer: HybridScorer

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **unserved: Any,
    ):
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.sliding_window = float(scale), sliding_window or 0
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, float(logits_soft_cap or 0.0)
        self.target_name = kv_sharing_target_layer_name
        self.host = compat.host_of_layer(PREFERRED_BLOCK)
        self.attached = False
        self.bound: int | None = None

    def configure(
        self, config: TurboQuantConfig, transforms: dict[str, LayerTransforms], name: str, layer_index: int
    ) -> None:
        """Called when the layer has been made: what it is compressed with."""
        self.config, self.layer_index = config, layer_index
        self.named: LayerTransforms | None = None  # what the calibration file says
        self.transform: KeyTransform | None = None
        if self.target_name is not None:
            self.target = compat.current_layer(self.target_name).impl
            self.target.is_shared = True
        elif transforms:
            self.named = of_layer(transforms, name, compat.tensor_parallel_place(), self.num_kv_heads)
            self.transform = self.named.constant  # until the layer's rotary embedding is known

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Codec and exact tokens; before vLLM measures what is left for pages.  Weights may be loaded again."""
        if hasattr(self, "codec"):
            return
        if self.target is not None:  # an earlier layer
            self.codec, self.memory, self.recent = self.target.codec, self.target.memory, self.target.recent
            return
        self.codec = self._build_codec()
        self.memory = self._plan_memory(act_dtype)
        self.recent = RingData(
            self.memory.ring_tokens, self.num_kv_heads, self.head_size, act_dtype, self.host.device
        )  # fmt: skip

    def recalibrate(self, transform: KeyTransform) -> None:
        """Another key transform, before anything is cached."""
        self.transform = transform
        self.codec = self._build_codec()

    def take_bits(self, config: TurboQuantConfig) -> None:
        """Other bits, before anything is cached."""
        self.config = config
        self.codec = self._build_codec() if self.target is None else self.target.codec

    @property
    def backend(self) -> type[TurboQuantBackend]:
        return backend_of(self.config, self.codec.key.bits, self.codec.value.bits)

    def _build_codec(self) -> KVCodec:
        sizes = self.num_kv_heads, self.head_size

        def build() -> KVCodec:
            return KVCodec.build(self.config, self.layer_index, *sizes, self.transform, self.host.device)

        with compat.default_dtype(torch.float32):
            return compat.outside_pools(self.host.device, build)

    def _plan_memory(self, dtype: torch.dtype) -> LayerMemory:
        return plan_memory(self.config, self.host, 2 * self.num_kv_heads * self.head_size * dtype.itemsize)

    def cache_on(self, ring: ExactRing, pages: torch.Tensor) -> LayerCache:
        store = CompressedBlockStore(
            self.codec, len(pages), self.num_kv_heads, ring.block_size, self.host.device, pages
        )  # fmt: skip
        return LayerCache(store, self.recent)

    def on_empty_page(self, ring: ExactRing) -> LayerCache:
        """The cache before vLLM has allocated its pages."""
        shape = (1, self.num_kv_heads, self.codec.page_format(ring.block_size).page_bytes)
        return self.cache_on(ring, torch.zeros(shape, dtype=torch.uint8, device=self.host.device))

    def small_ring(self, block_size: int) -> ExactRing:
        """A ring like the one that the layer will get, for one block."""
        memory = self.memory
        return ExactRing(
            1, block_size, memory.window, min(1, memory.ring_tokens), self.host.device, memory.sinks
        )  # fmt: skip

    def serves_graphs(self, block_size: int) -> bool:
        ring = self.small_ring(block_size)
        return choose_kernels(self.on_empty_page(ring), ring).decode is not None

    @property
    def variant(self) -> tuple[object, ...]:
        """Layers for which this is the same run the same compiled kernels."""
        heads = (self.num_heads, self.num_kv_heads, self.head_size, self.codec.key.bits, self.codec.value.bits)
        return *heads, self.sliding_window, self.logits_soft_cap, self.codec.rotary.turns

    def take_memory(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Use as much transient memory as any step can, while vLLM measures: rows of a step of the most tokens."""
        ring, limits = self.small_ring(self.host.block_size), replace(self.host.limits, tokens=len(query))
        self._equip(ring)
        rehearse(self.cache, self.scorer, ring, (query, (key, value)), largest_steps(limits))

    def compile_kernels(self) -> None:
        """Nothing is left to compile when the engine serves."""
        if self.host.device.type == "cpu":
            return
        tokens, size = self.host.limits.tokens, self.head_size
        query, key, value = (
            self.recent.keys.new_zeros(tokens, heads, size)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        ring = self.small_ring(self.ring.block_size)
        steps = distinct_steps(self.host.limits, self.scorer, self.num_heads)
        rehearse(self.cache, self.scorer, ring, (query, (key, value)), steps)

    def attach(self, ring: ExactRing, meter: telemetry.Meter) -> None:
        """Join a KV-cache group."""
        self.ring, self.meter, self.attached, self.bound = ring, meter, True, None
        self._equip(ring)

    def _equip(self, ring: ExactRing) -> None:
        """The layer's kernels, on an empty page."""
        if self.target is not None:
            self.cache, self.table_bytes, scorer = self.target.cache, 0, self.target.scorer
            self.scorer = replace(scorer, scale=self.scale, window=self.sliding_window, softcap=self.logits_soft_cap)
            return
        self.cache = self.on_empty_page(ring)
        kernels = choose_kernels(self.cache, ring, compat.dense_attention(self.recent.keys))
        self.cache.encode = kernels.encode
        self.table_bytes = self.codec.nbytes + kernels.nbytes
        self.scorer = HybridScorer(
            self.scale, self.sliding_window, self.logits_soft_cap, kernels.history, kernels.fused
        )  # fmt: skip

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's [blocks, H_kv, block, bytes] as pages."""
        if self.target is not None:
            return self.target.bind(kv_cache)
        if kv_cache.data_ptr() == self.bound:
            return
        pages = kv_cache.view(torch.uint8).flatten(2)
        if pages.data_ptr() != kv_cache.data_ptr():
            raise RuntimeError(f"pages of strides {kv_cache.stride()} are not contiguous per head")
        if len(pages) > self.ring.num_blocks:
            raise RuntimeError(f"{len(pages)} pages, but the ring was planned for {self.ring.num_blocks}")
        self.cache.store = self.cache_on(self.ring, pages).store
        self.bound = kv_cache.data_ptr()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if kv_cache.numel():
            self.bind(kv_cache)
            self.cache.ingest(self.ring, key, value, slot_mapping)
            self.own_rows = (key, value) if self.is_shared else None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise RuntimeError("fused output quantisation is not supported by turboquant")
        rows = query.view(len(query), -1, self.head_size)
        if attn_metadata is None:  # profiling, or a step that only keeps other ranks company
            if not self.attached and self.target is None and self.host.device.type != "cpu":
                self.take_memory(rows, key, value)
            return output.fill_(0)
        if attn_metadata.ring is not self.ring:
            raise RuntimeError("the step was planned for another group of layers than this one belongs to")
        self.bind(kv_cache)
        heads = output.view(len(output), -1, self.head_size)
        own = (key, value) if self.target is None else self.target.own_rows
        self.scorer.attend(self.cache, attn_metadata.plan, rows, own, heads, attn_metadata.rows)
        return output


_installed: list[compat.AttentionPatch] = []


def install(config: TurboQuantConfig) -> None:
    """Give attention layers that are made from now on compressed pages; again for another configuration."""
    uninstall()
    transforms = load_transforms(config.calibration_file) if config.calibration_file else {}
    patch = compat.AttentionPatch(
        lambda layer_class, arguments: backend_for(config, layer_class, arguments),
        lambda layer: made(config, transforms, layer),
    )
    patch.apply()
    _installed.append(patch)


def uninstall() -> None:
    """Layers that are made from now on are vLLM's own."""
    while _installed:
        _installed.pop().undo()


def backend_for(config: TurboQuantConfig, layer_class: type, arguments: dict[str, Any]) -> Any:
    """The backend of a layer that is being made, or the reason (a string) why it stays native.

    Layers of a draft model are compressed too, all alike: what they lose costs accepted drafts, not right answers.
    UnsupportedEngineError if it can neither be compressed nor stay native as it is.
    """
    place = compat.layer_place(arguments["prefix"])
    target, skipped = arguments["kv_sharing_target_layer_name"], config.skips(place.index, place.count)
    if target is not None and isinstance(compat.current_layer(target).impl, TurboQuantImpl) == skipped:
        raise UnsupportedEngineError(
            f"{arguments['prefix']} reads the cache of {target}: put both layers into skip_layers, or neither"
        )
    if skipped and not place.draft:
        return "skip_layers"
    if reason := compat.layer_stays_native(layer_class, arguments):
        return reason
    if objections := compat.arguments_objections(arguments):
        raise UnsupportedEngineError(
            f"turboquant cannot compress {arguments['prefix']}: {'; '.join(objections)}. Leave it out with skip_layers"
        )
    if target is not None:
        return compat.current_layer(target).get_attn_backend()
    return backend_of_layer(config, place)


def backend_of_layer(config: TurboQuantConfig, place: compat.LayerPlace) -> type[TurboQuantBackend]:
    if place.draft:
        return backend_of(config, config.key_bits, config.value_bits)
    return backend_of(config, config.layer_key_bits(place.index), config.layer_value_bits(place.index))


def made(config: TurboQuantConfig, transforms: dict[str, LayerTransforms], layer: Any) -> None:
    """A layer with one of our backends has been made."""
    place = compat.layer_place(layer.layer_name)
    if place.draft:
        config, transforms = config.uniform(config.key_bits, config.value_bits), {}
    layer.impl.configure(config, transforms, layer.layer_name, place.index)


def calibrate_loaded(runner: Any) -> None:
    """Give the layers of the loaded model the key transforms of a calibration that was named, or measured ones."""
    ours = compressed_layers(runner.vllm_config)
    found = calibrations(runner, ours)
    device = next(iter(ours.values())).impl.host.device
    rotaries = compat.outside_pools(device, lambda: compat.rotaries(runner)) if found else {}
    for name in ours.keys() & found.keys():
        ours[name].impl.recalibrate(found[name].best(rotaries.get(name)))


def calibrations(runner: Any, ours: dict[str, Any]) -> dict[str, LayerTransforms]:
    """Of a file or measured; none where that was asked for, or the model cannot be measured."""
    if next(iter(ours.values())).impl.config.calibration:
        return {name: layer.impl.named for name, layer in ours.items() if layer.impl.named is not None}
    if reason := compat.run_objection(runner.vllm_config):
        refuse_biased(runner, reason)
        logger.warning("turboquant: the model is not calibrated (%s); turboquant.calibrate writes a file", reason)
        return {}
    return selfcalibration.measure(runner)


def allocate_loaded(runner: Any) -> None:
    """Give the layers the bits that are best under `auto_bits`, before vLLM asks for their pages."""
    ours = compressed_layers(runner.vllm_config)
    chosen = {name: layer for name, layer in ours.items() if layer.impl.config.auto_bits}  # not those of drafts
    owners = {name: layer.impl for name, layer in chosen.items() if layer.impl.target is None}
    if not owners:
        return
    config, alike = next(iter(owners.values())).config, not compat.pages_may_differ(runner.vllm_config)
    if alike:
        logger.warning("turboquant: pages of this model's layers are as large as the largest: they get the same bits")
    damages = damages_of(runner, config, owners)
    config = allocate(config, [layer_damage(impl, damages[name]) for name, impl in owners.items()], alike)
    for layer in chosen.values():
        layer.impl.take_bits(config)
        compat.rebind_backend(layer, layer.impl.backend)


def damages_of(runner: Any, config: TurboQuantConfig, owners: Mapping[str, TurboQuantImpl]) -> sensitivity.Damages:
    """Of a calibration file, or measured on the loaded model."""
    if config.calibration_file:
        return sensitivity.load(config.calibration_file, owners)
    if reason := compat.probe_objection(runner.vllm_config):
        raise UnsupportedEngineError(
            f"turboquant cannot measure what bits cost in this engine ({reason}), as preset {config.name!r} needs: "
            "name a calibration file that turboquant.calibrate(..., layer_costs=True) wrote on one that can, another "
            "preset, or layer_bits"
        )
    transforms = {name: impl.transform for name, impl in owners.items() if impl.transform is not None}
    places = {name: impl.layer_index for name, impl in owners.items()}
    return sensitivity.measure(runner, config, transforms, places)


def layer_damage(impl: TurboQuantImpl, damage: Mapping[str, float]) -> LayerDamage:
    return LayerDamage(impl.layer_index, impl.num_kv_heads, impl.head_size, damage["keys"], damage["values"])


def refuse_biased(runner: Any, reason: str) -> None:
    """UnsupportedEngineError for a model whose keys have biases: without a calibration it would answer wrongly."""
    if biased := compat.key_biases(runner):
        raise UnsupportedEngineError(
            f"turboquant cannot calibrate this engine when it starts ({reason}), and without calibration the biases of "
            f"the keys ({biased[0]} and {len(biased) - 1} more) would spoil its answers: write a file with "
            f"turboquant.calibrate and name it as calibration, or insist with calibration='{NO_CALIBRATION}'"
        )


def compressed_layers(vllm_config: Any) -> dict[str, Any]:
    layers = compat.attention_layers(vllm_config)
    return {name: layer for name, layer in layers.items() if isinstance(layer.impl, TurboQuantImpl)}


def stats(vllm_config: Any) -> dict[str, Any]:
    """Layers, bytes and counters of the native route in this worker; JSON-ready.  Waits for the device."""
    groups = {id(layer.impl.meter): layer.impl.meter for layer in compressed_layers(vllm_config).values()}.values()
    counters = ("tokens_encoded", "tokens_read", "tokens_read_exact")
    return fixed_stats(vllm_config) | {name: sum(getattr(meter, name) for meter in groups) for name in counters}


def fixed_stats(vllm_config: Any) -> dict[str, Any]:
    """What steps do not change."""
    ours = compressed_layers(vllm_config)
    others = {n: layer for n, layer in compat.attention_layers(vllm_config).items() if n not in ours}
    owners = [layer for layer in ours.values() if layer.impl.target is None]
    first = owners[0].impl
    groups = {id(layer.impl.ring): layer.impl for layer in ours.values()}.values()
    return {
        "route": "native",
        "preset": first.config.name,
        "formats": formats(owners),
        "layers": list(ours),
        "skipped": {name: compat.native_because(layer) for name, layer in others.items()},
        "bytes_per_token_native": sum(compat.plain_token_bytes(layer) for layer in owners),
        "bytes_per_token_compressed": sum(
            layer.num_kv_heads * layer.get_attn_backend().token_bytes(layer.head_size) for layer in owners
        ),
        "capacity_tokens": compat.pool_tokens(vllm_config),
        "page_bytes": sum(layer.kv_cache.nbytes for layer in owners),
        "calibration": first.config.calibration or ("at the start" if first.transform is not None else NO_CALIBRATION),
        "calibrated_layers": sum(layer.impl.transform is not None for layer in owners),
        "window": first.ring.window,
        "sinks": first.ring.sinks,
        "exact_tokens_asked": first.config.sink_size + first.config.buffer_size,
        "exact_tokens_per_request": first.ring.tokens_per_request,
        "ring_tokens": first.memory.ring_tokens,
        "ring_bytes": sum(layer.impl.recent.nbytes for layer in owners) + sum(g.ring.nbytes for g in groups),
        "table_bytes": sum(layer.impl.table_bytes for layer in ours.values())
        + rotary_bytes(layer.impl.codec for layer in owners),
    }


def formats(layers: Sequence[Any]) -> dict[str, int]:
    """Layers by their bits: {"k4v2": 30}."""
    codecs = (layer.impl.codec for layer in layers)
    return dict(Counter(format_name(codec.key.bits, codec.value.bits) for codec in codecs))


def figures(vllm_config: Any) -> telemetry.Figures:
    """For the metrics."""
    found = fixed_stats(vllm_config)
    return telemetry.Figures(
        found["preset"], found["route"], found["calibration"], len(found["layers"]), len(found["skipped"]),
        found["bytes_per_token_compressed"], found["bytes_per_token_native"], found["capacity_tokens"],
        found["page_bytes"], found["ring_bytes"], found["table_bytes"], found["ring_tokens"],
        found["exact_tokens_per_request"],
    )  # fmt: skip


def summary(vllm_config: Any) -> str:
    """One line: layers compressed and skipped and why, bytes per token, tokens of capacity."""
    found = fixed_stats(vllm_config)
    packed, plain = found["bytes_per_token_compressed"], found["bytes_per_token_native"]
    name = f"{found['preset']} ({mixture(found['formats'])})" if len(found["formats"]) > 1 else found["preset"]
    text = (
        f"turboquant {name}: {len(found['layers'])} layers compressed, {packed} instead of {plain} bytes "
        f"per token, {found['capacity_tokens']} tokens of capacity instead of about "
        f"{found['capacity_tokens'] * packed // plain}, exact windows of {found['window']} tokens "
        f"({found['ring_bytes'] / 2**20:.1f} MiB for {found['ring_tokens']} tokens)"
    )
    if not found["ring_tokens"] and found["exact_tokens_asked"]:
        text += "; the cache is too small for exact tokens, so answers are less accurate"
    return text + "".join(f"; {name} native: {reason}" for name, reason in found["skipped"].items())
