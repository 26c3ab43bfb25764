"""A model runner and attention layers in vLLM's shape, in plain torch, for testing the hooks without vLLM."""

from types import SimpleNamespace

import torch

from turboquant.integration import compat


class FakeBackend:
    def __init__(self, mla=False):
        self._mla = mla

    def is_mla(self):
        return self._mla

    def get_name(self):
        return "FAKE_ATTN"


class FakeImpl:
    """Exact paged attention; inside a block, keys and values lie in an order of its own."""

    def __init__(self, scale, num_kv_heads, head_dim, block_size):
        self.scale, self.logits_soft_cap, self.alibi_slopes, self.sinks = scale, 0, None, None
        self.order = torch.randperm(
            2 * num_kv_heads * block_size * head_dim, generator=torch.Generator().manual_seed(5)
        )
        self.shape = (num_kv_heads, block_size, head_dim)
        self.calls = {"forward": 0, "do_kv_cache_update": 0}

    def _index(self):
        return self.order.view(2, *self.shape)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        self.calls["do_kv_cache_update"] += 1
        flat = kv_cache.view(kv_cache.shape[0], -1)
        size = self.shape[1]
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                flat[slot // size, self._index()[0][:, slot % size]] = key[i]
                flat[slot // size, self._index()[1][:, slot % size]] = value[i]

    def read(self, kv_cache, blocks, length):
        """Keys and values [length, H_kv, d] of a block list."""
        flat = kv_cache.view(kv_cache.shape[0], -1)[blocks]
        parts = (flat[:, self._index()[i]].transpose(1, 2).flatten(0, 1)[:length] for i in (0, 1))
        return tuple(parts)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        self.calls["forward"] += 1
        if attn_metadata is None:
            return output.zero_()
        md, size = attn_metadata, self.shape[1]
        for r, seq in enumerate(md.seq_lens.tolist()):
            first, last = int(md.query_start_loc[r]), int(md.query_start_loc[r + 1])
            keys, values = self.read(kv_cache, md.block_table[r, : -(-seq // size)].long(), seq)
            output[first:last] = causal_attention(query[first:last], keys, values, self.scale)
        return output


def causal_attention(query, keys, values, scale):
    """query [q, H_q, d] are the last rows of keys, values [t, H_kv, d]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query, keys) * scale
    hidden = torch.ones(len(query), len(keys), dtype=torch.bool).triu(len(keys) - len(query) + 1)
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


class FakeLayer:
    def __init__(self, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, mla=False):
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = (
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim,
        )
        self.sliding_window, self.attn_type, self.kv_sharing_target_layer_name = None, "decoder", None
        self.impl = FakeImpl(head_dim**-0.5, num_kv_heads, head_dim, block_size)
        self.kv_cache = torch.tensor([])
        self._backend = FakeBackend(mla)

    def get_attn_backend(self):
        return self._backend


class FakeRunner:
    """`layers` share one buffer, as in vLLM 0.30 and newer."""

    def __init__(self, layers, num_blocks=24, block_size=16, max_num_seqs=4):
        graphs = SimpleNamespace(has_full_cudagraphs=lambda: False)
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers, cudagraph_mode=graphs),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            model_config=SimpleNamespace(max_model_len=num_blocks * block_size),
            kv_transfer_config=None,
            speculative_config=None,
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        paged = {name: layer for name, layer in layers.items() if isinstance(layer, FakeLayer)}
        self.attn_groups = [[SimpleNamespace(layer_names=list(paged))]]
        first = next(iter(paged.values()))
        shape = (len(paged), num_blocks, first.num_kv_heads, block_size, 2 * first.head_size)
        buffer = torch.zeros(shape)
        for layer, cache in zip(paged.values(), buffer, strict=True):
            layer.kv_cache = cache
        self.kv_caches = [layer.kv_cache for layer in paged.values()]

    @property
    def layers(self):
        return self.vllm_config.compilation_config.static_forward_context

    def get_model(self):
        return torch.nn.Module()


class FakeEngine:
    """Runs steps of requests through the layers' impl the way vLLM does."""

    def __init__(self, runner, monkeypatch, block_size=16):
        self.runner, self.block_size, self.metadata = runner, block_size, None
        monkeypatch.setattr(compat, "current_metadata", lambda name: self.metadata)

    def step(self, rows, padding=0):
        """rows: list of (block list, seq_len, query, key, value); returns outputs [T, H_q, d] per layer."""
        width = max(len(blocks) for blocks, *_ in rows)
        table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, *_ in rows], dtype=torch.int32)
        lens = torch.tensor([0] + [len(q) for *_, q, _, _ in rows])
        query, key, value = (torch.cat([row[i] for row in rows]) for i in (2, 3, 4))
        slots = []
        for blocks, seq, q, _, _ in rows:
            slots += [
                blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(seq - len(q), seq)
            ]
        self.metadata = SimpleNamespace(
            query_start_loc=lens.cumsum(0).int(),
            seq_lens=torch.tensor([seq for _, seq, *_ in rows], dtype=torch.int32),
            block_table=table,
            causal=True,
        )
        pad = torch.zeros(padding, *key.shape[1:])
        slot_mapping = torch.tensor(slots + [-1] * padding)
        outputs = {}
        for name, layer in self.runner.layers.items():
            layer.impl.do_kv_cache_update(
                layer, torch.cat([key, pad]), torch.cat([value, pad]), layer.kv_cache, slot_mapping
            )
            output = torch.zeros_like(query)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, self.metadata, output=output)
            outputs[name] = output
        return outputs
