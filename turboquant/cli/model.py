"""A model's layers, from its config.json alone: which have a cache, how large, and why one stays native.

The names are those that transformers writes; vLLM reads the same.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from turboquant.config import TurboQuantConfig, choice_error


class Kind(StrEnum):
    """What a layer mixes its tokens with."""

    FULL = "full attention"
    WINDOW = "sliding-window attention"
    CHUNKED = "chunked attention"
    RECURRENT = "recurrent or linear attention"


KINDS: dict[str, tuple[Kind, ...]] = {
    "full_attention": (Kind.FULL,),
    "attention": (Kind.FULL,),
    "sliding_attention": (Kind.WINDOW,),
    "chunked_attention": (Kind.CHUNKED,),
    "linear_attention": (Kind.RECURRENT,),
    "mamba": (Kind.RECURRENT,),
    "mamba2": (Kind.RECURRENT,),
    "conv": (Kind.RECURRENT,),
    "hybrid": (Kind.FULL, Kind.RECURRENT),
    "mlp": (),
    "moe": (),
}
NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WINDOWS = {Kind.WINDOW: "sliding_window", Kind.CHUNKED: "attention_chunk_size"}
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6}  # where config.json leaves the pattern to the code
BIDIRECTIONAL = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")  # vLLM's is_mm_prefix_lm
BIASED_KEYS = ("qwen2", "qwen2_moe")  # a bias on k_proj that config.json does not mention
STATE_ITEMSIZE = {"float32": 4}  # bytes of a number where the model asks for more than 2
STATE_DTYPES = {"nemotron_h": "float32"}  # where config.json leaves it to vLLM


@dataclass(frozen=True)
class Layer:
    """A layer with a cache, as a tensor-parallel rank has it.

    index: the model's (a hybrid layer is two); window: tokens, 0 = all; state_bytes: of a request, in recurrent layers;
    reads: the layer whose cache it reads instead of having one.
    """

    index: int
    kind: Kind
    num_kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    state_bytes: int = 0
    reads: int | None = None

    @property
    def is_attention(self) -> bool:
        return self.kind is not Kind.RECURRENT


@dataclass(frozen=True, eq=False)
class Model:
    """config: of the language model; whole: the file's, which contains it where there are others."""

    config: dict[str, Any]
    whole: dict[str, Any]
    layers: tuple[Layer, ...]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def max_position_embeddings(self) -> int:
        return required(self.config, "max_position_embeddings")

    @property
    def owners(self) -> list[Layer]:
        """Layers that have a cache of their own."""
        return [layer for layer in self.layers if layer.reads is None]

    def counts(self) -> dict[str, int]:
        """Layers of each kind, and how many read the cache of another."""
        kinds = Counter(str(layer.kind) for layer in self.layers)
        return {**kinds, "reading another layer's cache": len(self.layers) - len(self.owners)}


def read_model(folder: Path, tensor_parallel: int = 1) -> Model:
    """Layers of the model in a folder; ValueError or OSError if its config.json is missing or does not say enough."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no model folder: it has no config.json")
    whole = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(whole, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object")
    config = whole.get("text_config", whole)
    return Model(config, whole, tuple(model_layers(config, tensor_parallel)))


def required(config: dict[str, Any], *names: str) -> int:
    """The first of these numbers that config.json has."""
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json has {names[0]}={found!r}; an integer of at least 1 is needed")
    return found


def model_layers(config: dict[str, Any], tensor_parallel: int) -> list[Layer]:
    """All layers that use a cache, in model order."""
    if required(config, "num_attention_heads") % tensor_parallel:
        heads = config["num_attention_heads"]
        raise ValueError(f"--tensor-parallel {tensor_parallel} does not divide the model's {heads} attention heads")
    layers: list[Layer] = []
    names = layer_names(config)
    first_shared = len(names) - (config.get("num_kv_shared_layers") or 0)
    for index, name in enumerate(names):
        if name not in KINDS:
            raise choice_error("layer type", name, KINDS)
        for kind in KINDS[name]:
            reads = source_of(layers, kind, first_shared) if index >= first_shared else None
            layers.append(make_layer(config, index, kind, tensor_parallel, reads))
    return layers


def layer_names(config: dict[str, Any]) -> list[str]:
    """The type of every layer, by the first convention that the file follows; ValueError if the count is wrong."""
    count = required(config, "num_hidden_layers")
    names = next((list(found) for rule in NAMING if (found := rule(config, count))), ["full_attention"] * count)
    if len(names) != count:
        raise ValueError(f"config.json names {len(names)} layer types for num_hidden_layers={count}")
    return names


def listed(config: dict[str, Any], count: int) -> list[str] | None:
    found: list[str] | None = config.get("layer_types") or config.get("layers_block_type")
    return found


def spelled(config: dict[str, Any], count: int) -> list[str]:
    """Nemotron-H: a letter per layer."""
    return [NEMOTRON.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]


def indexed(config: dict[str, Any], count: int) -> list[str] | None:
    """LFM2: attention layers by index."""
    chosen = config.get("full_attn_idxs")
    return chosen and ["full_attention" if i in chosen else "conv" for i in range(count)]


def periodic(config: dict[str, Any], count: int) -> list[str] | None:
    """Qwen3-Next and Jamba: every n-th layer has attention."""
    period = config.get("full_attention_interval") or config.get("attn_layer_period")
    offset = config.get("attn_layer_offset", (period or 1) - 1)
    return period and ["attention" if i % period == offset else "mamba" for i in range(count)]


def parallel(config: dict[str, Any], count: int) -> list[str] | None:
    """Falcon-H1: attention and Mamba side by side in every layer."""
    return ["hybrid"] * count if config.get("model_type") == "falcon_h1" else None


def windowed(config: dict[str, Any], count: int) -> list[str] | None:
    """Sliding windows in all layers, or in all but every n-th."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return None
    pattern = config.get("sliding_window_pattern") or WINDOW_PATTERNS.get(config.get("model_type", ""), count + 1)
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]


NAMING: tuple[Callable[[dict[str, Any], int], list[str] | None], ...] = (
    listed, spelled, indexed, periodic, parallel, windowed
)  # fmt: skip


def source_of(layers: list[Layer], kind: Kind, first_shared: int) -> int:
    """The last layer of this kind that has a cache of its own (Gemma 3n)."""
    found = [layer.index for layer in layers if layer.kind is kind and layer.index < first_shared]
    if not found:
        raise ValueError(f"config.json shares caches of {kind} layers, but none of the first {first_shared} has one")
    return found[-1]


def make_layer(config: dict[str, Any], index: int, kind: Kind, tensor_parallel: int, reads: int | None) -> Layer:
    if kind is Kind.RECURRENT:
        return Layer(index, kind, state_bytes=state_bytes(config, tensor_parallel))
    heads, dim = attention_shape(config, kind)
    window = required(config, WINDOWS[kind]) if kind in WINDOWS else 0
    return Layer(index, kind, max(1, heads // tensor_parallel), dim, window, reads=reads)


def attention_shape(config: dict[str, Any], kind: Kind) -> tuple[int, int]:
    """KV heads and head size; full-attention layers can have their own (Gemma 4)."""
    own = ("num_global_key_value_heads", "global_head_dim") if kind is Kind.FULL else ("", "")
    heads = required(config, own[0], "num_key_value_heads", "num_attention_heads")
    if config.get(own[1]) or config.get("head_dim"):
        return heads, required(config, own[1], "head_dim")
    return heads, required(config, "hidden_size") // required(config, "num_attention_heads")


def state_bytes(config: dict[str, Any], tensor_parallel: int) -> int:
    """Bytes of a request's state in a recurrent layer on a GPU; ValueError where the sizes are not known."""
    taps, channels, numbers = state_shape(config, tensor_parallel)
    default = STATE_DTYPES.get(config.get("model_type", ""))
    asked = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or default
    return ((taps - 1) * channels * 2 + numbers * STATE_ITEMSIZE.get(str(asked), 2)) // tensor_parallel


def state_shape(config: dict[str, Any], tensor_parallel: int) -> tuple[int, int, int]:
    """Of all ranks: taps of the convolution, its channels, and numbers of the recurrent state."""
    if config.get("conv_L_cache"):
        return required(config, "conv_L_cache"), required(config, "conv_dim", "hidden_size"), 0
    if config.get("linear_num_value_heads"):
        keys = required(config, "linear_num_key_heads") * required(config, "linear_key_head_dim")
        values = required(config, "linear_num_value_heads") * required(config, "linear_value_head_dim")
        taps = required(config, "linear_conv_kernel_dim")
        return taps, 2 * keys + values, values * required(config, "linear_key_head_dim")
    if config.get("mamba_n_heads") or config.get("mamba_num_heads"):
        return mamba2_shape(config, tensor_parallel)
    raise ValueError(
        "the recurrent layers of this model are not known; config.json must have the sizes of Mamba 2 (mamba_n_heads), "
        "gated delta nets (linear_num_value_heads) or short convolutions (conv_L_cache)"
    )


def mamba2_shape(config: dict[str, Any], tensor_parallel: int) -> tuple[int, int, int]:
    heads = required(config, "mamba_n_heads", "mamba_num_heads")
    inner = heads * required(config, "mamba_d_head", "mamba_head_dim")
    groups, state = required(config, "mamba_n_groups", "n_groups"), required(config, "mamba_d_state", "ssm_state_size")
    if groups % tensor_parallel:  # every rank needs the groups of its heads
        groups = tensor_parallel
    return required(config, "mamba_d_conv", "conv_kernel"), inner + 2 * groups * state, inner * state


# ---- what turboquant says to it --------------------------------------------------------------------------------
def native_reason(layer: Layer, model: Model, config: TurboQuantConfig) -> str | None:
    """Why a layer's cache stays vLLM's own, or None if it is compressed.

    ValueError if skip_layers tears it from the layer whose cache it reads.
    """
    if layer.kind is Kind.RECURRENT:
        return "recurrent or linear, no softmax attention"
    skipped = config.skips(layer.index, model.num_layers)
    if layer.reads is not None and config.skips(layer.reads, model.num_layers) != skipped:
        raise ValueError(
            f"layer {layer.index} reads the cache of layer {layer.reads}: put both into skip_layers, or neither"
        )
    if skipped:
        return "skip_layers"
    return "chunked attention" if layer.kind is Kind.CHUNKED else None


def objections(model: Model) -> list[str]:
    """What the native route refuses in this model, each as 'name=value: what it is'."""
    config, found = model.config, []
    if config.get("kv_lora_rank"):
        found.append(f"kv_lora_rank={config['kv_lora_rank']}: multi-head latent attention (MLA)")
    if config.get("model_type") == "gpt_oss":
        found.append("model_type='gpt_oss': attention sinks; leave its layers out with skip_layers")
    if config.get("alibi") or config.get("model_type") in ("bloom", "mpt"):
        found.append(f"model_type={config.get('model_type')!r}: ALiBi; leave its layers out with skip_layers")
    if model.whole.get("model_type") in BIDIRECTIONAL:
        found.append(f"model_type={model.whole['model_type']!r}: attends to images in both directions")
    return found


def has_key_biases(model: Model) -> bool:
    """Whether the keys have biases, as far as config.json shows: such a model needs a calibration."""
    named = any(model.config.get(name) for name in ("attention_bias", "qkv_bias"))
    return named or model.config.get("model_type") in BIASED_KEYS
