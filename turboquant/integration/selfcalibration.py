"""Calibrate a model in its worker when it has been loaded, before anything is cached.

The model runs over the package's text, piece by piece, with plain attention within the piece in the place of every
layer's own: no cache and no scheduler are needed, and every rank measures the KV heads that it holds.

Pieces lie at positions all over the context.  Rotary embeddings turn the mean key from one position to the next, so
that a mean of the first 512 positions is wrong further on: keys of Qwen2.5-Coder at position 7000 lose twice, and at
31000 three times as much with it as with one that was measured all over (issue 5).
"""

import random
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from turboquant.calibration import CHUNK, SINKS, LayerTransforms, Moments, sequences, text_ids
from turboquant.integration import compat
from turboquant.integration.standin import StandIn, standing
from turboquant.rotary import Rotary

RANDOM_TOKENS = 4 * CHUNK  # where the engine has no tokenizer


class LayerMoments:
    """Moments of one layer's keys, as they are and without their rotary embedding."""

    def __init__(self, layer: Any, rotary: Rotary | None):
        kinds = [None] if rotary is None else [None, rotary]
        self.kinds = [Moments.empty(layer.num_kv_heads, layer.head_size, kind) for kind in kinds]

    def add(self, keys: torch.Tensor, query: torch.Tensor, positions: torch.Tensor) -> None:
        """As `Moments.add`."""
        for moments in self.kinds:
            moments.add(keys, query, positions)

    def transforms(self) -> LayerTransforms:
        """A centre that turns is left out where it is worse: some layers have an embedding that they do not use."""
        found = [(moments.transform(), moments) for moments in self.kinds]
        errors = [moments.error(transform) for transform, moments in found]
        return LayerTransforms(*(transform for transform, _ in found[: 1 + (errors[-1] < errors[0])]))


class PlainAttention(StandIn):
    """Stands in for the attention of one layer over one sequence, and sums up its keys and queries.

    Softcaps and sliding windows are left out: pieces are short, and the moments hardly depend on them.
    """

    def __init__(self, layer: Any, target: "PlainAttention | None", rotary: Rotary | None):
        self.target, self.first = target, 0
        self.scale = compat.attention_parameters(layer).scale
        self.moments = LayerMoments(layer, rotary)
        super().__init__(layer)

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        q = query.view(len(query), -1, layer.head_size)
        if self.target is None:
            self.rows = key.view(len(key), layer.num_kv_heads, -1), value.view(len(value), layer.num_kv_heads, -1)
            positions = torch.arange(self.first, self.first + len(q))
            self.moments.add(*(x[SINKS:] for x in (self.rows[0], q, positions)))
        keys, values = (self.target or self).rows
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        found = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=self.scale, enable_gqa=True)
        output.view(len(query), q.shape[1], -1).copy_(found[0].transpose(0, 1))
        return output


def measure(runner: Any) -> dict[str, LayerTransforms]:
    """Key transforms of the model's layers, for this worker's KV heads."""
    rotaries = compat.rotaries(runner)

    def make(name: str, layer: Any, target: PlainAttention | None) -> PlainAttention:
        return PlainAttention(layer, target, rotaries.get(name))

    with standing(runner, make) as layers:
        for piece, first in placed_pieces(runner.vllm_config):
            for attention in layers.values():
                attention.first = first
            compat.run_model(runner, piece, first)
    return {name: found.moments.transforms() for name, found in layers.items() if found.moments.kinds[0].tokens}


def first_positions(size: int, context: int) -> list[int]:
    """Where pieces of `size` tokens start: at 0, size, 2 size, 4 size, ... and at the end of `context` positions."""
    last, doubled = max(0, context - size), [0, size]
    while doubled[-1] < last:
        doubled.append(2 * doubled[-1])
    return [first for first in doubled if first < last] + [last]


def placed_pieces(vllm_config: Any) -> list[tuple[list[int], int]]:
    """(token ids, first position): every piece of the text, and every octave of the context."""
    texts, context = pieces(vllm_config), vllm_config.model_config.max_model_len
    starts = first_positions(len(texts[0]), context)
    return [
        (texts[i % len(texts)], min(starts[i % len(starts)], context - len(texts[i % len(texts)])))
        for i in range(max(len(texts), len(starts)))
    ]


def pieces(vllm_config: Any) -> list[list[int]]:
    """Token ids of the package's text in pieces that one step can hold; random ones without a tokenizer."""
    tokenizer, model = compat.tokenizer_of(vllm_config), vllm_config.model_config
    if tokenizer is None:
        ids = random.Random(0).choices(range(model.get_vocab_size()), k=RANDOM_TOKENS)
    else:
        ids = text_ids(tokenizer)
    return sequences(ids, min(model.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens))
