"""The compressed cache for `model.generate` of Hugging Face transformers, without vLLM.

    cache = TurboQuantCache(model.config, "k4v4", transforms=measure(model, tokenizer))
    model.generate(**inputs, past_key_values=cache)

transformers hands whole keys and values to attention, so every step decodes one layer after another: this saves memory
and no time.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turboquant.calibration import SINKS, Moments, sequences, text_ids
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration.selfcalibration import first_positions
from turboquant.store import CompressedBlockStore

BLOCK = 32  # tokens of a page
MIN_GROWTH = 8  # pages of a sequence that are added at a time, or an eighth of what there is


class TurboQuantLayer(DynamicLayer):
    """The cache of one layer of full attention.

    keys, values: exact tokens [B, H_kv, n, d], the first `sink_size` and the last `buffer_size`.  All tokens are in
    pages too, which lie block after block, and the sequences' side by side in each.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, config: TurboQuantConfig, index: int, transform: KeyTransform | None = None):
        super().__init__()
        self.config, self.index, self.transform, self.length = config, index, transform, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        heads, dim = key_states.shape[1], key_states.shape[3]
        if value_states.shape[3] != dim:
            raise ValueError(f"layer {self.index} has values of size {value_states.shape[3]} and keys of size {dim}")
        self.codec = KVCodec.build(self.config, self.index, heads, dim, self.transform, self.device)
        self.store = CompressedBlockStore(self.codec, 0, heads, BLOCK, self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key and value states [B, H_kv, T, d]; all tokens, those of this step exactly."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cached = self._cached()
        self._append(key_states, value_states)
        keys, values = (torch.cat(pair, -2) for pair in zip(cached, (key_states, value_states), strict=True))
        return keys, values

    def _cached(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All cached tokens, decoded where they are not kept exactly."""
        if self.keys.shape[-2] >= self.length:
            return self.keys, self.values
        keys, values = self.store.read(self._table())
        original = self.codec.decode_keys(keys.transpose(1, 2)).transpose(1, 2), self.codec.output(values)
        decoded = tuple(x[..., : self.length, :].to(self.dtype) for x in original)
        for side, exact in zip(decoded, (self.keys, self.values), strict=True):
            sinks = self.config.sink_size
            side[..., :sinks, :] = exact[..., :sinks, :]
            side[..., self.length - exact.shape[-2] + sinks :, :] = exact[..., sinks:, :]
        return decoded[0], decoded[1]

    def _table(self) -> torch.Tensor:
        """Blocks int64 [B, n] of all cached tokens."""
        batch, blocks = self.keys.shape[0], -(-self.length // BLOCK)
        return torch.arange(blocks * batch, device=self.device).view(blocks, batch).T

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, new = key_states.shape[0], key_states.shape[2]
        self._reserve(self.length + new)
        positions = torch.arange(self.length, self.length + new, device=self.device)
        blocks = positions // BLOCK * batch + torch.arange(batch, device=self.device)[:, None]
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        self.store.write((blocks * BLOCK + positions % BLOCK).flatten(), *rows)
        self.length += new
        self.keys, self.values = self._trimmed(self.keys, key_states), self._trimmed(self.values, value_states)

    def _trimmed(self, exact: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The exact tokens behind a step: the first and the last, none of them a view of the model's tensors."""
        sinks, recent = self.config.sink_size, self.config.buffer_size
        tokens = torch.cat([exact, states], -2)
        if tokens.shape[-2] <= sinks + recent:
            return tokens
        return torch.cat([tokens[..., :sinks, :], tokens[..., tokens.shape[-2] - recent :, :]], -2)

    def _reserve(self, tokens: int) -> None:
        """Pages for so many tokens of every sequence."""
        batch, wanted = self.keys.shape[0], -(-tokens // BLOCK)
        missing = wanted * batch - self.store.num_blocks
        if missing > 0:
            more = max(missing, batch * max(MIN_GROWTH, wanted // 8))
            empty = self.store.pages.new_zeros(more, *self.store.pages.shape[1:])
            self._replace_pages(torch.cat([self.store.pages, empty]))

    def _replace_pages(self, pages: torch.Tensor) -> None:
        self.store = CompressedBlockStore(self.codec, len(pages), pages.shape[1], BLOCK, self.device, pages)

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -n tokens; a positive number is the length that is left, as in older releases."""
        left = self.length + tokens_to_remove if tokens_to_remove < 0 else min(tokens_to_remove, self.length)
        removed, sinks = self.length - left, min(self.config.sink_size, left)
        if tokens_to_remove == 0 or not removed:
            return
        kept = max(sinks, self.keys.shape[-2] - removed)
        self.keys, self.values, self.length = self.keys[..., :kept, :], self.values[..., :kept, :], left

    def _select(self, indices: torch.Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        if not self.is_initialized:
            return
        pages = self.store.pages.unflatten(0, (-1, self.keys.shape[0]))[:, indices.to(self.device)]
        self.keys, self.values = (x[indices.to(self.device)] for x in (self.keys, self.values))
        self._replace_pages(pages.flatten(0, 1))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of pages, exact tokens and tables."""
        if not self.is_initialized:
            return {"pages": 0, "exact": 0, "tables": 0}
        return {
            "pages": self.store.nbytes, "exact": self.keys.nbytes + self.values.nbytes, "tables": self.codec.nbytes,
        }  # fmt: skip


class TurboQuantCache(DynamicCache):
    """transformers' dynamic cache with its layers of full attention compressed; the others stay as they are.

    config: the model's; preset, options: as for `turboquant.install_turboquant_hooks`, of which `skip_layers` counts
    all of the model's layers; transforms: of keys, by layer (`measure`).  ValueError for what cannot be meant.
    """

    def __init__(
        self,
        config: Any,
        preset: str | None = None,
        *,
        transforms: Mapping[int, KeyTransform] | None = None,
        **options: Any,
    ):
        super().__init__(config=config)
        chosen, found = TurboQuantConfig.from_options(preset, **options), transforms or {}
        chosen.check_chosen()
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer and not chosen.skips(index, len(self.layers)):
                self.layers[index] = TurboQuantLayer(chosen, index, found.get(index))
        if not any(isinstance(layer, TurboQuantLayer) for layer in self.layers):
            kinds = sorted({type(layer).__name__ for layer in self.layers})
            raise ValueError(f"no layer can be compressed: the model's are {', '.join(kinds)}")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of pages, exact tokens, tables, layers that are not compressed, and the total."""
        ours = [layer.memory_bytes() for layer in self.layers if isinstance(layer, TurboQuantLayer)]
        others = [layer for layer in self.layers if not isinstance(layer, TurboQuantLayer)]
        parts = {name: sum(layer[name] for layer in ours) for name in ("pages", "exact", "tables")}
        tensors = (getattr(layer, side, None) for layer in others for side in ("keys", "values"))
        parts["native"] = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return {**parts, "total": sum(parts.values())}


# ---- calibration -----------------------------------------------------------------------------------------------
def measure(model: PreTrainedModel, tokenizer: Any, context: int | None = None) -> dict[int, KeyTransform]:
    """Key transforms by layer, from the package's text at positions all over the context.

    context: tokens of the longest sequence to come, the model's maximum unless given.
    """
    longest = int(context or model.config.get_text_config(decoder=True).max_position_embeddings)
    pieces, moments = sequences(text_ids(tokenizer), longest), dict[int, Moments]()
    starts = first_positions(len(pieces[0]), longest)
    with torch.inference_mode(), observed(model, moments):
        for i in range(max(len(pieces), len(starts))):
            run(model, pieces[i % len(pieces)], starts[i % len(starts)])
    return {index: found.transform() for index, found in moments.items() if found.tokens}


def run(model: PreTrainedModel, ids: list[int], first: int) -> None:
    """The model on token ids at positions `first` and further."""
    tokens = torch.tensor([ids], device=model.device)
    positions = torch.arange(first, first + len(ids), device=model.device)[None]
    model(input_ids=tokens, position_ids=positions, use_cache=False)


@contextmanager
def observed(model: PreTrainedModel, moments: dict[int, Moments]) -> Iterator[None]:
    """Within the block, attention adds its keys and queries to the moments of its layer."""
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        allowed = ", ".join(sorted(ALL_ATTENTION_FUNCTIONS))
        raise ValueError(f"attn_implementation={name!r} cannot be observed; allowed: {allowed}")
    attention = ALL_ATTENTION_FUNCTIONS[name]

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        mine = moments.setdefault(module.layer_idx, Moments.empty(key.shape[1], key.shape[3]))
        keys, queries = (x[0].transpose(0, 1)[SINKS:] for x in (key, query))
        mine.add(keys, queries, torch.arange(len(keys)))  # of no matter to centres that do not turn
        return attention(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attention
