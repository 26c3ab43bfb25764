"""The compressed cache of one layer behind a framework-free facade, for use without vLLM."""

import torch

from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine, StepPlan, entry_size, exact_entries
from turboquant.checks import check_floats, check_instance, check_int, check_rows
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.score import HybridScorer


class TurboQuantKVCache:
    """Compressed keys and values of `batch_size` sequences of one attention layer.

    All memory is taken at construction; appending beyond `max_tokens` raises ValueError and changes nothing.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        *,
        batch_size: int = 1,
        config: TurboQuantConfig | None = None,
        layer_index: int = 0,
        block_size: int = 32,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        transform: KeyTransform | None = None,
    ):
        sizes = {"num_kv_heads": num_kv_heads, "max_tokens": max_tokens, "batch_size": batch_size}
        for name, size in {**sizes, "block_size": block_size}.items():
            check_int(name, size, least=1)
        config = TurboQuantConfig() if config is None else config
        check_instance("config", config, TurboQuantConfig)
        config.check_chosen()
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.max_tokens, self.batch_size, self.length = max_tokens, batch_size, 0
        per_sequence = -(-max_tokens // block_size)
        codec = KVCodec.build(config, layer_index, num_kv_heads, head_dim, transform, device)
        window, sinks = config.buffer_size, config.sink_size
        entries = per_sequence * (block_size // entry_size(block_size))
        capacity = batch_size * min(exact_entries(window, sinks, block_size), entries)
        self._engine = KVCaptureEngine(batch_size * per_sequence, block_size, window, capacity, device, sinks)
        self._layer = self._engine.add_layer("layer", codec, num_kv_heads, dtype)
        self._scorer = HybridScorer(head_dim**-0.5 if scale is None else scale)
        self._table = torch.arange(batch_size * per_sequence, device=device).view(batch_size, per_sequence)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Encode key and value float [B, H_kv, T, d] behind the tokens that are cached."""
        self._check(key, value)
        self._ingest(key, value)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of query [B, H_q, T, d]; returns float [B, H_q, T, d] in the query's dtype.

        With key and value [B, H_kv, T, d] the rows are appended first and attend causally to themselves, exactly, and
        to everything before them; without, every row attends to all cached tokens.
        """
        if (key is None) != (value is None):
            raise ValueError("attend needs key and value together, or neither")
        self._check_query(query)
        if key is None or value is None:
            batch = self._batch(self.length + query.shape[2], query.shape[2])
            plan, own = StepPlan(batch, self._engine.ring.locate(batch)), None
        else:
            self._check(key, value)
            if key.shape[2] != query.shape[2]:
                raise ValueError(f"query has {query.shape[2]} rows per sequence, key {key.shape[2]}; give it as many")
            plan, own = self._ingest(key, value), (token_rows(key), token_rows(value))
        output = torch.empty_like(token_rows(query))
        self._scorer.attend(self._layer, plan, token_rows(query), own, output)
        return output.unflatten(0, (self.batch_size, -1)).transpose(1, 2)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of real tensors: pages, exact recent tokens, tables, and their total."""
        pages, recent = self._layer.store.nbytes, self._layer.recent.nbytes
        total = self._engine.nbytes + self._table.nbytes
        return {"pages": pages, "recent": recent, "tables": total - pages - recent, "total": total}

    def __len__(self) -> int:
        """Cached tokens per sequence."""
        return self.length

    def _batch(self, seq_len: int, query_len: int) -> AttentionBatch:
        device = self._table.device
        starts = torch.arange(self.batch_size + 1, device=device) * query_len
        lens = torch.full((self.batch_size,), seq_len, device=device)
        return AttentionBatch(starts, lens, self._table, self._engine.block_size)

    def _ingest(self, key: torch.Tensor, value: torch.Tensor) -> StepPlan:
        new, size = key.shape[2], self._engine.block_size
        plan = self._engine.begin_step(self._batch(self.length + new, new))
        positions = torch.arange(self.length, self.length + new, device=self._table.device)
        slots = self._table[:, positions // size] * size + positions % size
        self._engine.ingest(self._layer, token_rows(key), token_rows(value), slots.reshape(-1))
        self.length += new
        return plan

    def _check_query(self, query: torch.Tensor) -> None:
        check_floats("query", query)
        heads = query.shape[1] if query.dim() == 4 else 0
        if not heads or heads % self.num_kv_heads:
            raise ValueError(f"query is {tuple(query.shape)}, expected [B, multiple of {self.num_kv_heads}, T, d]")
        check_rows("query", query, (self.batch_size, heads, None, self.head_dim), "[B, H_q, T, d]", self._table.device)

    def _check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        shape, device = (self.batch_size, self.num_kv_heads, None, self.head_dim), self._table.device
        check_rows("key", key, shape, "[B, H_kv, T, d]", device)
        check_rows("value", value, tuple(key.shape), "[B, H_kv, T, d]", device)
        if self.length + key.shape[2] > self.max_tokens:
            used = f"{self.length} of max_tokens={self.max_tokens} are used"
            raise ValueError(f"{key.shape[2]} more tokens do not fit: {used}")


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, T, d] -> [B * T, H, d], the row order of `AttentionBatch`."""
    return x.transpose(1, 2).flatten(0, 1)
