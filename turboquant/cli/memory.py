"""How much of a GPU's memory is left for the KV cache: weights and steps, estimated from config.json.

For models without images; biases, norms and quantisation scales are left out.  `--kv-memory` replaces all of it.
"""

from typing import Any

from turboquant.cli.model import Kind, Model, attention_shape, layer_names, required, state_shape
from turboquant.integration.rehearsal import Limits

ITEMSIZE = 2  # bytes: vLLM runs float32 models in 16 bits too, unless told otherwise
CONTEXT_BYTES = 400 * 2**20  # CUDA context and the rest: fitted to one engine (benchmarks/results/h200-engine.json)
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
QUANTIZED_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}


def weight_bytes(model: Model) -> int:
    """Bytes of the weights of all ranks."""
    config, hidden = model.config, required(model.config, "hidden_size")
    mixers = sum(mixer_parameters(config, layer.kind) for layer in model.layers)
    names = layer_names(config)
    feed_forward = sum(name in ("mlp", "moe") for name in names) or len(names)
    linear = mixers + feed_forward * feed_forward_parameters(config)
    tables = 1 if ties_embeddings(config) else 2
    embedded = tables * required(config, "vocab_size") * hidden + per_layer_embeddings(config)
    return int(linear * weight_bits(model) / 8) + embedded * ITEMSIZE


def mixer_parameters(config: dict[str, Any], kind: Kind) -> int:
    """Of one layer's attention, or roughly of its recurrence: three matrices onto the channels of the convolution."""
    hidden = required(config, "hidden_size")
    if kind is Kind.RECURRENT:
        _, channels, _ = state_shape(config, 1)
        return 3 * hidden * channels
    kv_heads, dim = attention_shape(config, kind)
    return 2 * hidden * dim * (required(config, "num_attention_heads") + kv_heads)


def feed_forward_parameters(config: dict[str, Any]) -> int:
    """Of one layer: three matrices, in all of its experts."""
    hidden, experts = required(config, "hidden_size"), sum(config.get(name) or 0 for name in EXPERTS)
    return 3 * hidden * (experts * expert_width(config) + shared_width(config, experts))


def expert_width(config: dict[str, Any]) -> int:
    return required(config, "moe_intermediate_size", "intermediate_size")


def shared_width(config: dict[str, Any], experts: int) -> int:
    """Width of what every token passes: the whole layer without experts, else the shared experts."""
    if own := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        return int(own)
    if experts:
        return (config.get("n_shared_experts") or 0) * expert_width(config)
    return dense_width(config)


def dense_width(config: dict[str, Any]) -> int:
    """The widest layer's, where they differ (Gemma 3n)."""
    width = config.get("intermediate_size")
    return max(width) if isinstance(width, list) and width else required(config, "intermediate_size")


def per_layer_embeddings(config: dict[str, Any]) -> int:
    """Gemma 3n: embeddings of every layer."""
    width = config.get("hidden_size_per_layer_input") or 0
    return width and width * required(config, "vocab_size_per_layer_input") * required(config, "num_hidden_layers")


def ties_embeddings(config: dict[str, Any]) -> bool:
    """Gemma leaves the entry out and ties; other families write it."""
    return bool(config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma")))


def weight_bits(model: Model) -> float:
    """Bits of a weight of a linear layer."""
    quantization = model.whole.get("quantization_config") or model.config.get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).values()
    packed = [group["weights"]["num_bits"] for group in groups if group.get("weights")]
    default = QUANTIZED_BITS.get(str(quantization.get("quant_method")), 8 * ITEMSIZE)
    return max(packed) if packed else quantization.get("bits") or (4 if quantization.get("load_in_4bit") else default)


def step_bytes(model: Model, limits: Limits, tensor_parallel: int) -> int:
    """Bytes that the largest step needs on a rank: activations around the feed-forward layer, and logits in float32."""
    config = model.config
    width = shared_width(config, 0) if "intermediate_size" in config else expert_width(config)
    row = (3 * width // tensor_parallel + 2 * required(config, "hidden_size")) * ITEMSIZE
    logits = limits.requests * required(config, "vocab_size") * 4
    return limits.tokens * row + logits + CONTEXT_BYTES
