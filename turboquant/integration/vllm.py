"""The hook route: compress the KV cache of a live vLLM engine by patching its attention layers' instances.

    handle = install_turboquant_hooks(model_runner, key_bits=4, value_bits=4, mode="hybrid")
    set_mode("full_tq"); free_kv_cache(model_runner); handle.uninstall()

Two methods of each layer's `impl` are replaced, `do_kv_cache_update` and `forward`; nothing else in vLLM changes.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from turboquant.allocation import LayerDamage, allocate
from turboquant.calibration import of_layer
from turboquant.capture import KVCaptureEngine, LayerCache, StepPlan, entry_size, exact_entries
from turboquant.checks import check_instance
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import (
    MODE_POLICIES,
    NO_CALIBRATION,
    Mode,
    ModePolicy,
    SkippedLayer,
    TurboQuantConfig,
    parse_mode,
)
from turboquant.integration import compat, sensitivity, telemetry
from turboquant.integration.calibration_file import load_transforms
from turboquant.kernels import choose_kernels
from turboquant.score import HybridScorer

logger = logging.getLogger("turboquant")
TRANSCODE_TOKENS = 4096  # tokens converted at a time; bounds the transient memory of a mode change


class HookError(RuntimeError):
    """A request to the hooks that cannot be met; nothing was changed."""


class UnsupportedEngineError(HookError):
    """The engine or model has features that turboquant cannot serve; the message lists all of them."""


class NativeCacheFreedError(HookError):
    """The mode asked for needs the native KV cache, which `free_kv_cache` gave back."""


@dataclass
class Counters:
    """What really happened in a layer, in tokens (token reads count once per step and request)."""

    tokens_encoded: int = 0
    tokens_read_compressed: int = 0
    tokens_read_exact: int = 0


@dataclass
class ShadowStats:
    """Relative L2 error of compressed against native attention, over the steps that capture_only sampled."""

    samples: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0

    def add(self, error: float) -> None:
        self.samples += 1
        self.error_sum += error
        self.error_max = max(self.error_max, error)

    @property
    def mean(self) -> float | None:
        return self.error_sum / self.samples if self.samples else None


class CacheGroup:
    """Layers that share metadata, hence slots: one capture engine, one plan per step, and what each slot holds.

    in_store, in_native: bool [num_blocks * block_size], whether the compressed and the native page hold the token.
    """

    def __init__(self, engine: KVCaptureEngine):
        self.engine = engine
        slots = engine.num_blocks * engine.block_size
        self.in_store = torch.zeros(slots, dtype=torch.bool, device=engine.device)
        self.in_native = torch.zeros(slots, dtype=torch.bool, device=engine.device)
        self.steps = 0
        self._metadata: Any = None
        self._plan: StepPlan | None = None
        self._rows: dict[int, list[int]] = {}
        self._reads: dict[tuple[int, ...], tuple[int, int]] = {}
        self.step_tokens = 0

    def begin_step(self, metadata: Any, slots: torch.Tensor, native_write: bool) -> StepPlan:
        """Plan of the step that `metadata` describes; made by the first layer that writes, reused by the others."""
        if self._plan is None or metadata is not self._metadata:
            self.forget_step()
            batch = compat.batch_of(metadata, self.engine.block_size)
            self._plan, self._metadata, self._rows = self.engine.begin_step(batch), metadata, batch.rows_by_length()
            self.steps += 1
            written = slots[slots >= 0]
            self.step_tokens = len(written)
            self.in_store[written], self.in_native[written] = True, native_write
        return self._plan

    def current_step(self, metadata: Any) -> tuple[StepPlan, dict[int, list[int]]]:
        """Plan and query groups of the running step; its tokens must have been written."""
        if self._plan is None or metadata is not self._metadata:
            raise RuntimeError("attention was called for a step whose keys and values were not written")
        return self._plan, self._rows

    def reads(self, plan: StepPlan, rows: dict[int, list[int]]) -> tuple[int, int]:
        """Cached tokens that the query groups `rows` read compressed and exactly; counted once per step."""
        key = tuple(rows)
        if key not in self._reads:
            exact = sum(int(plan.window.present[group].sum()) for group in rows.values())
            cached = sum(int(plan.batch.history_lens[group].sum()) for group in rows.values())
            self._reads[key] = (cached - exact, exact)
        return self._reads[key]

    def stale_slots(self) -> torch.Tensor:
        """Slots whose token only the compressed store holds: int64 [n]."""
        return (self.in_store & ~self.in_native).nonzero().squeeze(1)

    def forget_step(self) -> None:
        """Drop the plan; the query groups in it refer back to it, and their masks should not wait for the collector."""
        if self._plan is not None:
            self._plan.groups.clear()
        self._metadata, self._plan, self._rows = None, None, {}
        self._reads.clear()

    @property
    def nbytes(self) -> int:
        return self.engine.nbytes + self.in_store.nbytes + self.in_native.nbytes


class LayerHook:
    """The hooked attention layer: its compressed cache, its counters, and the way back."""

    def __init__(
        self, handle: "HookHandle", name: str, layer: Any, group: CacheGroup, cache: LayerCache, leads: bool = False
    ):
        self.handle, self.name, self.layer, self.group, self.cache = handle, name, layer, group, cache
        self.leads = leads  # of its group: whose counters go into the metrics
        parameters = compat.attention_parameters(layer)
        self.kernels = choose_kernels(cache, group.engine.ring, compat.dense_attention(cache.recent.keys))
        cache.encode = self.kernels.encode
        self.scorer = HybridScorer(
            parameters.scale, parameters.window, parameters.softcap, self.kernels.history, self.kernels.fused
        )
        self.native_update, self.native_forward = layer.impl.do_kv_cache_update, layer.impl.forward
        self.layout = compat.native_layout(layer, self.native_update)
        self.native_form = compat.form_of(layer.kv_cache)
        self.counters, self.shadow = Counters(), ShadowStats()

    def update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Replaces `impl.do_kv_cache_update`."""
        policy = self.handle.policy
        if policy.native_write:
            self.native_update(layer, key, value, kv_cache, slot_mapping)
        if not policy.compressed_write:
            return
        metadata = compat.current_metadata(self.name)
        if metadata is not None:
            self.group.begin_step(metadata, slot_mapping, policy.native_write)
            self.group.engine.ingest(self.cache, key, value, slot_mapping)
            self.counters.tokens_encoded += self.group.step_tokens
            if self.leads:
                self._write_counters()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Replaces `impl.forward`."""
        policy = self.handle.policy
        native = (layer, query, key, value, kv_cache, attn_metadata)
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if attn_metadata is None or policy.native_decode:
            result = self.native_forward(*native, output=output, **scales)
            if attn_metadata is not None and self.handle.shadows(policy, self.group):
                self._shadow(query, key, value, attn_metadata, output)
            return result
        if output_scale is not None or output_block_scale is not None:
            raise RuntimeError("fused output quantisation is not supported by turboquant's hooks")
        plan, rows = self.group.current_step(attn_metadata)
        if policy.native_prefill and any(length > 1 for length in rows):
            self.native_forward(*native, output=output)
            rows = {length: r for length, r in rows.items() if length == 1}
        self._score(plan, rows, query, key, value, output)
        return output

    def _score(
        self,
        plan: StepPlan,
        rows: dict[int, list[int]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        heads = output.view(len(output), -1, self.cache.codec.key.dim)
        self.scorer.attend(self.cache, plan, query.view(heads.shape), (key, value), heads, rows)
        compressed, exact = self.group.reads(plan, rows)
        self.counters.tokens_read_compressed += compressed
        self.counters.tokens_read_exact += exact

    def _write_counters(self) -> None:
        """Reads of the last step are still missing."""
        exact, compressed = self.counters.tokens_read_exact, self.counters.tokens_read_compressed
        encoded = self.counters.tokens_encoded
        telemetry.write_counters(self.handle.writer, self.name, encoded, exact + compressed, exact)

    def _shadow(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any, native: torch.Tensor
    ) -> None:
        """Score the step from the compressed cache too and record its distance to the native output."""
        plan, rows = self.group.current_step(metadata)
        scored = torch.zeros_like(native)
        self._score(plan, rows, query, key, value, scored)
        tokens = int(plan.batch.query_start[-1])
        reference = native[:tokens].float()
        difference = (scored[:tokens].float() - reference).norm()
        self.shadow.add(float(difference / reference.norm().clamp(min=1e-30)))
        self.handle.writer.write("turboquant_layer_error", self.shadow.mean or 0.0, self.name)

    def encode_native(self, blocks: torch.Tensor) -> None:
        """Fill the compressed pages of `blocks` from the native ones."""
        size = self.cache.store.block_size
        offsets = torch.arange(size, device=blocks.device)
        for part in blocks.split(max(1, TRANSCODE_TOKENS // size)):
            keys, values = self.layout.read(self.layer.kv_cache, part)
            self.cache.store.write((part[:, None] * size + offsets).flatten(), keys, values)

    def decode_native(self, slots: torch.Tensor) -> None:
        """Write the tokens of `slots` from the compressed pages, or exactly where the ring has them, natively."""
        for part in slots.split(TRANSCODE_TOKENS):
            keys, values = self.cache.store.read_slots(part)
            index, present = self.group.engine.ring.lookup(part)
            keys[present] = self.cache.recent.keys[index[present]].float()
            values[present] = self.cache.recent.values[index[present]].float()
            dtype = self.layer.kv_cache.dtype
            self.native_update(self.layer, keys.to(dtype), values.to(dtype), self.layer.kv_cache, part)

    @property
    def replacements(self) -> dict[str, Any]:
        return {"do_kv_cache_update": self.update, "forward": self.forward}

    def patch(self) -> None:
        attributes = vars(self.layer.impl)
        self._previous = {name: attributes[name] for name in self.replacements if name in attributes}
        attributes.update(self.replacements)

    def check_unpatchable(self) -> None:
        """Raise if somebody else patched the layer after us."""
        for name, ours in self.replacements.items():
            if vars(self.layer.impl).get(name) != ours:
                raise HookError(f"{self.name}: impl.{name} was replaced after turboquant; undo that first")

    def unpatch(self) -> None:
        """Restore what was there: the class's methods, or an earlier patch of the instance."""
        for name in self.replacements:
            delattr(self.layer.impl, name)
        vars(self.layer.impl).update(self._previous)


@dataclass(eq=False)
class HookHandle(Mapping[str, LayerHook]):
    """The installed hooks: layer name -> LayerHook.  A context manager; leaving it uninstalls."""

    runner: Any
    config: TurboQuantConfig
    window: int = 0
    mode: Mode = Mode.OFF
    freed_bytes: int = 0
    is_freed: bool = False
    installed: bool = False
    groups: list[CacheGroup] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    hooks: dict[str, LayerHook] = field(default_factory=dict)
    native_bytes: int = 0

    def __post_init__(self) -> None:
        self.writer = telemetry.Writer(compat.worker_place(self.runner.vllm_config))

    def __getitem__(self, name: str) -> LayerHook:
        return self.hooks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    def __enter__(self) -> "HookHandle":
        return self

    def __exit__(self, *_: object) -> None:
        if self.installed:
            self.uninstall()

    @property
    def policy(self) -> ModePolicy:
        policy = MODE_POLICIES[self.mode]
        return policy.without_native_cache() if self.is_freed else policy

    def shadows(self, policy: ModePolicy, group: CacheGroup) -> bool:
        interval = self.config.shadow_interval
        return policy.compressed_write and interval > 0 and group.steps % interval == 0

    def set_mode(self, mode: Mode | str) -> None:
        """Switch between steps; tokens cached so far are transcoded, so running requests go on unharmed."""
        self._check_installed()
        new = parse_mode(mode)
        policy = MODE_POLICIES[new]
        if self.is_freed and policy.native_decode:
            raise NativeCacheFreedError(
                f"mode {new.value!r} reads the native KV cache, which was freed; allowed now: 'hybrid', 'full_tq' "
                "(uninstall() allocates it again)"
            )
        if policy.compressed_write and not MODE_POLICIES[self.mode].compressed_write:
            self._encode_all()
        if policy.reads_native and not self.is_freed:
            self._decode_stale()
        if new is not self.mode:
            logger.info("turboquant: mode %s -> %s", self.mode.value, new.value)
        self.mode = new
        for group in self.groups:
            group.forget_step()

    def free_kv_cache(self) -> int:
        """Drop the native cache of all compressed layers; returns the bytes of memory that are really gone.

        Allowed in hybrid and full_tq; afterwards native modes are refused.  A second call returns 0.
        """
        self._check_installed()
        if self.policy.needs_native_cache:
            raise HookError(f"mode {self.mode.value!r} reads the native KV cache; set 'hybrid' or 'full_tq' first")
        if self.is_freed:
            return 0
        if reasons := compat.free_objections(self.runner):
            raise UnsupportedEngineError("the native KV cache cannot be freed: " + "; ".join(reasons))
        self.freed_bytes = compat.drop_caches(self.runner, [hook.layer for hook in self.values()])
        self.is_freed = True
        for group in self.groups:
            group.in_native.zero_()
        logger.info("turboquant: freed %.1f MiB of native KV cache", self.freed_bytes / 2**20)
        return self.freed_bytes

    def uninstall(self) -> None:
        """Bring the native cache up to date (allocating it again if freed) and restore the original methods."""
        self._check_installed()
        for hook in self.values():
            hook.check_unpatchable()
        if self.is_freed:
            for hook in self.values():
                new = compat.allocate_cache(hook.native_form, hook.group.engine.device)
                compat.rebind(self.runner, hook.layer, new)
            self.is_freed = False
        self._decode_stale()
        for hook in self.values():
            hook.unpatch()
        self.installed = False
        _handles.pop(id(self.runner), None)

    def stats(self) -> dict[str, Any]:
        """Plain numbers: memory of real tensors, counters of every layer, skipped layers and why."""
        stores = sum(hook.cache.store.nbytes for hook in self.values())
        rings = sum(hook.cache.recent.nbytes for hook in self.values())
        total = sum(group.nbytes for group in self.groups) + sum(hook.kernels.nbytes for hook in self.values())
        tokens = sum(hook.cache.store.num_blocks * hook.cache.store.block_size for hook in self.values())
        first = next(iter(self.values()))
        return {
            "mode": self.mode.value,
            "preset": self.config.name,
            "window": self.window,
            "sinks": self.groups[0].engine.ring.sinks,
            "layers": len(self) + len(self.skipped),
            "layers_compressed": len(self),
            "layers_skipped": {layer.name: layer.reason for layer in self.skipped},
            "bytes_per_token_native": self.native_bytes / tokens * len(self),
            "bytes_per_token_compressed": stores / tokens * len(self),
            "store_bytes": stores,
            "ring_bytes": rings,
            "table_bytes": total - stores - rings,
            "total_bytes": total,
            "native_bytes": self.native_bytes,
            "freed_bytes": self.freed_bytes if self.is_freed else 0,
            "tokens_encoded": first.counters.tokens_encoded,
            "tokens_read_compressed": first.counters.tokens_read_compressed,
            "tokens_read_exact": first.counters.tokens_read_exact,
            "per_layer": {name: self._layer_stats(hook) for name, hook in self.items()},
        }

    def _layer_stats(self, hook: LayerHook) -> dict[str, Any]:
        shadow = {"samples": hook.shadow.samples, "mean": hook.shadow.mean, "max": hook.shadow.error_max}
        bits = {"key_bits": hook.cache.codec.key.bits, "value_bits": hook.cache.codec.value.bits}
        return {**vars(hook.counters), **bits, "shadow_rel_error": shadow}

    def _check_installed(self) -> None:
        if not self.installed:
            raise HookError("these turboquant hooks were uninstalled; install them again")

    def _encode_all(self) -> None:
        """Leaving `off`: every native page that was ever written goes into the store."""
        for group in self.groups:
            hooks = [hook for hook in self.values() if hook.group is group]
            group.engine.ring.clear()
            blocks = compat.live_blocks(hooks[0].layer.kv_cache)
            if not len(blocks):
                continue
            for hook in hooks:
                hook.encode_native(blocks)
            size = group.engine.block_size
            for table in (group.in_store, group.in_native):
                table.view(-1, size)[blocks] = True

    def _decode_stale(self) -> None:
        """Before anything reads native pages: write the tokens there that only the store has."""
        for group in self.groups:
            slots = group.stale_slots()
            for hook in self.values():
                if len(slots) and hook.group is group:
                    hook.decode_native(slots)
            group.in_native[slots] = True


# By id of the runner; the patched layers keep a handle alive, and it its runner.
_handles: "weakref.WeakValueDictionary[int, HookHandle]" = weakref.WeakValueDictionary()


def install_turboquant_hooks(
    model_runner: Any,
    key_bits: int | None = None,
    value_bits: int | None = None,
    buffer_size: int | None = None,
    mode: Mode | str = Mode.HYBRID,
    *,
    preset: str | None = None,
    key_transforms: Mapping[str, KeyTransform] | None = None,
    **options: Any,
) -> HookHandle:
    """Hook every attention layer of a live model runner and switch to `mode`.

    key_bits, value_bits, buffer_size, preset, options: see `TurboQuantConfig`.
    key_transforms: affine key map per layer name, identity where absent; instead of those of a calibration file.
    Raises UnsupportedEngineError with all reasons, ValueError for bad options, RuntimeError if already installed.
    """
    config = TurboQuantConfig.from_options(
        preset, key_bits=key_bits, value_bits=value_bits, buffer_size=buffer_size, **options
    )
    mode = parse_mode(mode)
    if not hasattr(model_runner, "vllm_config"):
        raise TypeError(f"model_runner={model_runner!r} is no model runner of vLLM: it has no vllm_config")
    check_transforms(key_transforms)
    if id(model_runner) in _handles:
        raise HookError("turboquant's hooks are already installed on this model runner; uninstall them first")
    names, skipped = select_layers(model_runner, config)
    if config.auto_bits:
        config = allocated(config, model_runner, names)
    handle = HookHandle(model_runner, config, skipped=skipped)
    try:
        build_caches(handle, names, dict(key_transforms or calibrated(handle, names)))
    except torch.cuda.OutOfMemoryError as error:
        raise HookError(f"no room for the compressed cache beside the native one: {error}; "
                        "lower gpu_memory_utilization or num_gpu_blocks_override") from error  # fmt: skip
    for hook in handle.values():
        hook.patch()
    handle.installed = True
    _handles[id(model_runner)] = handle
    with ExitStack() as undo:
        undo.enter_context(handle)
        handle.set_mode(mode)
        undo.pop_all()
    log_summary(handle)
    telemetry.write_figures(handle.writer, figures(handle))
    return handle


def check_transforms(transforms: object) -> None:
    """TypeError unless these are None, or a KeyTransform per layer name."""
    if transforms is None:
        return
    if not isinstance(transforms, Mapping):
        raise TypeError(f"key_transforms={transforms!r} must be a KeyTransform per layer name")
    for name, transform in transforms.items():
        check_instance(f"key_transforms[{name!r}]", transform, KeyTransform)


install_hooks = install_turboquant_hooks


def select_layers(runner: Any, config: TurboQuantConfig) -> tuple[list[str], list[SkippedLayer]]:
    """Names of the layers to compress, and those that stay native; raises UnsupportedEngineError."""
    layers = compat.all_layers(runner)
    skipped = [SkippedLayer(n, reason) for n, layer in layers.items() if (reason := compat.native_reason(layer))]
    native = {layer.name for layer in skipped}
    attention = [name for name in layers if name not in native]
    names = []
    for index, name in enumerate(attention):
        if config.skips(index, len(attention)):
            skipped.append(SkippedLayer(name, "is in skip_layers"))
        else:
            names.append(name)
    raise_objections(runner, layers, names, skipped)
    return names, skipped


def raise_objections(runner: Any, layers: dict[str, Any], names: list[str], skipped: list[SkippedLayer]) -> None:
    reasons = compat.engine_objections(runner)
    by_text: dict[str, list[str]] = {}
    for name in names:
        for text in compat.layer_objections(layers[name]) + compat.signature_objections(layers[name].impl):
            by_text.setdefault(text, []).append(name)
    for text, who in by_text.items():
        reasons.append(f"{text} (in {who[0]}{f' and {len(who) - 1} more' if who[1:] else ''})")
    if not names:
        why = "; ".join(f"{layer.name} {layer.reason}" for layer in skipped[:4]) or "it has none"
        reasons.append(f"no attention layer can be compressed: {why}")
    if reasons:
        listed = "\n- ".join(reasons)
        raise UnsupportedEngineError(f"turboquant cannot serve this engine (vLLM {compat.vllm_version()}):\n- {listed}")


def allocated(config: TurboQuantConfig, runner: Any, names: list[str]) -> TurboQuantConfig:
    """The configuration with the bits of the layers that `auto_bits` asks for; ValueError without a file to know by."""
    if not config.calibration_file:
        raise ValueError(
            f"the hooks take the bits of preset {config.name!r} from a calibration file: write one with "
            "turboquant.calibrate(..., layer_costs=True), and name it as calibration"
        )
    layers, damages = compat.all_layers(runner), sensitivity.load(config.calibration_file, names)
    found = [
        LayerDamage(index, layers[name].num_kv_heads, layers[name].head_size, **damages[name])
        for index, name in enumerate(names)
    ]
    return allocate(config, found)


def calibrated(handle: HookHandle, names: list[str]) -> dict[str, KeyTransform]:
    """Key transforms of the configuration's calibration file, for the KV heads of this rank."""
    if not handle.config.calibration_file:
        return {}
    transforms, layers = load_transforms(handle.config.calibration_file), compat.all_layers(handle.runner)
    place = compat.tensor_parallel_place()
    return {name: of_layer(transforms, name, place, layers[name].num_kv_heads).constant for name in names}


def build_caches(handle: HookHandle, names: list[str], transforms: dict[str, KeyTransform]) -> None:
    """Allocate the compressed caches of all layers, one capture engine per metadata group."""
    layers = compat.all_layers(handle.runner)
    if unknown := set(transforms) - set(names):
        raise ValueError(f"key_transforms name layers that are not compressed: {sorted(unknown)}")
    order = {name: index for index, name in enumerate(names)}
    for group_names in compat.layer_groups(handle.runner):
        members = [name for name in group_names if name in order]
        if not members:
            continue
        group = CacheGroup(make_engine(handle, layers[members[0]]))
        handle.groups.append(group)
        for name in members:
            size = compat.geometry(layers[name])
            codec = KVCodec.build(
                handle.config, order[name], size.num_kv_heads, size.head_dim, transforms.get(name), size.device
            )
            cache = group.engine.add_layer(name, codec, size.num_kv_heads, size.dtype)
            handle.hooks[name] = LayerHook(handle, name, layers[name], group, cache, leads=name == members[0])
            handle.native_bytes += layers[name].kv_cache.nbytes


def make_engine(handle: HookHandle, layer: Any) -> KVCaptureEngine:
    """Capture engine of a group; its ring holds the windows of `max_num_seqs` requests within `ring_share`."""
    size, config, max_seqs = compat.geometry(layer), handle.config, compat.max_num_seqs(handle.runner)
    entry, window, sinks = entry_size(size.block_size), config.buffer_size, config.sink_size
    limit = int(size.num_blocks * config.ring_share * (size.block_size // entry))
    if exact_entries(window, sinks, size.block_size) > limit:
        window = max(0, limit - 1 - exact_entries(0, sinks, size.block_size)) * entry
        share = f"ring_share={config.ring_share} of {size.num_blocks} blocks"
        logger.warning("turboquant: buffer_size %d does not fit %s; using %d", config.buffer_size, share, window)
    drafts = compat.speculative_tokens(handle.runner.vllm_config) if window else 0
    each = exact_entries(window + drafts, sinks, size.block_size)
    if max_seqs * each > limit:
        fitting = (limit // each, max_seqs, config.ring_share)
        logger.info("turboquant: the exact ring holds the windows of %d of max_num_seqs=%d (ring_share=%s)", *fitting)
    handle.window = window
    capacity = min(max_seqs * each, limit)
    return KVCaptureEngine(size.num_blocks, size.block_size, window, capacity, size.device, sinks)


def figures(handle: HookHandle) -> telemetry.Figures:
    """For the metrics."""
    found, ring = handle.stats(), handle.groups[0].engine.ring
    slots = min(group.engine.num_blocks * group.engine.block_size for group in handle.groups)
    return telemetry.Figures(
        found["preset"], "hooks", handle.config.calibration or NO_CALIBRATION, len(handle), len(handle.skipped),
        found["bytes_per_token_compressed"], found["bytes_per_token_native"], slots, found["store_bytes"],
        found["ring_bytes"], found["table_bytes"], ring.tokens, ring.tokens_per_request,
    )  # fmt: skip


def log_summary(handle: HookHandle) -> None:
    stats = handle.stats()
    reasons = {layer.reason for layer in handle.skipped}
    logger.info(
        "turboquant: %s compresses %d of %d layers (%s): %.0f instead of %.0f B per token; window %d, ring %.1f MiB",
        handle.config.name,
        len(handle),
        stats["layers"],
        "; ".join(sorted(reasons)) or "none skipped",
        stats["bytes_per_token_compressed"],
        stats["bytes_per_token_native"],
        handle.window,
        stats["ring_bytes"] / 2**20,
    )


def handle_of(model_runner: Any) -> HookHandle:
    """The hooks installed on a model runner; RuntimeError if there are none."""
    if (handle := _handles.get(id(model_runner))) is None:
        raise HookError("turboquant's hooks are not installed on this model runner")
    return handle


def set_mode(mode: Mode | str, model_runner: Any = None) -> None:
    """Switch the mode of a model runner, or of every hooked one in this process."""
    mode = parse_mode(mode)
    for handle in [handle_of(model_runner)] if model_runner is not None else list(_handles.values()):
        handle.set_mode(mode)


def get_mode(model_runner: Any = None) -> Mode:
    """Mode of a model runner, or of the hooked ones in this process (`off` if there are none)."""
    if model_runner is not None:
        return handle_of(model_runner).mode
    modes = {handle.mode for handle in _handles.values()}
    if len(modes) > 1:
        raise HookError(f"model runners are in different modes {sorted(modes)}; name one")
    return modes.pop() if modes else Mode.OFF


def free_kv_cache(model_runner: Any) -> int:
    """Give the native KV cache of a hooked model runner back; returns the bytes really returned."""
    return handle_of(model_runner).free_kv_cache()


def get_stats(model_runner: Any) -> dict[str, Any]:
    """`HookHandle.stats` of a model runner."""
    return handle_of(model_runner).stats()


def uninstall(model_runner: Any) -> None:
    handle_of(model_runner).uninstall()
