"""The portable history kernel against its torch twin, in Triton's interpreter where there is no device."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import normal

from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.kernels.history import history_kernel
from turboquant.score import QueryGroup, tile_tokens, twin_history

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def setup(lengths, heads=2, dim=64, block_size=16, window=0, transform=None, **options):
    """A layer with these cached lengths, one decode row each, pages between them poisoned."""
    codec = KVCodec.build(TurboQuantConfig(**options), 1, heads, dim, transform, DEVICE)
    blocks = max(1, -(-max(lengths) // block_size)) + 1
    engine = KVCaptureEngine(len(lengths) * blocks + 1, block_size, window, 64, DEVICE)
    layer = engine.add_layer("layer", codec, heads, torch.float32)
    layer.store.pages.fill_(0xFF)
    table = (torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(3)) + 1).view(
        len(lengths), -1
    )
    table = table.to(DEVICE)
    for i, length in enumerate(lengths):
        positions = torch.arange(length, device=DEVICE)
        batch = AttentionBatch(torch.tensor([0, length], device=DEVICE), torch.tensor([length], device=DEVICE),
                               table[i : i + 1], block_size)  # fmt: skip
        keys, values = (normal(length, heads, dim, seed=10 * i + s).to(DEVICE) for s in (1, 2))
        engine.begin_step(batch)
        engine.ingest(layer, keys, values, table[i, positions // block_size] * block_size + positions % block_size)
    return engine, layer, table


def compare(lengths, group=3, query_len=1, sliding=0, softcap=0.0, **options):
    engine, layer, table = setup(lengths, **options)
    n, heads, dim = len(lengths), layer.store.num_kv_heads, layer.codec.key.dim
    starts = torch.arange(n + 1, device=DEVICE) * query_len
    batch = AttentionBatch(starts, torch.tensor(lengths, device=DEVICE) + query_len, table, engine.block_size)
    plan = engine.begin_step(batch)
    rows = torch.arange(n, device=DEVICE)
    planned = QueryGroup(plan, rows, query_len, sliding, tile_tokens(n, query_len, heads * group, dim))
    query = normal(n, heads, group, query_len, dim, seed=99).to(DEVICE) * dim**-0.5 * 3
    rotated = layer.codec.query(query.flatten(2, 3)).view(query.shape)
    shift = layer.codec.center_logit(query.flatten(2, 3)).view(query.shape[:-1])
    expected = twin_history(layer, planned, rotated, shift, softcap)
    found = history_kernel(layer, planned, rotated, shift, softcap)
    assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
    some = expected[1] > -torch.inf
    assert ((found[1] - expected[1]).abs() < 5e-3)[some].all()
    error = (found[0] - expected[0]).norm(dim=-1)[some] / expected[0].norm(dim=-1)[some]
    assert (error < 5e-3).all()
    assert torch.isfinite(found[0]).all()


@pytest.mark.parametrize("preset", ["k4v4", "k4v3", "k3v4", "k3v2", "k2v2"])
def test_presets(preset):
    compare([5, 37], key_bits=int(preset[1]), value_bits=int(preset[3]))


@pytest.mark.parametrize("dim", [80, 96, 128])
def test_head_sizes(dim):
    compare([21], heads=1, group=2, dim=dim)


@pytest.mark.parametrize("block_size", [16, 24, 32])
def test_every_residue_of_the_length(block_size):
    compare(list(range(block_size - 2, block_size + 3)), heads=1, group=1, block_size=block_size)


@pytest.mark.parametrize("group", [1, 7, 8])
def test_query_heads_per_kv_head(group):
    compare([33], heads=1, group=group)


def test_verify_rows_and_sliding_window():
    compare([40, 9], query_len=4, sliding=10)
    compare([40, 9], query_len=4, sliding=1)


def test_exact_tokens_are_left_out():
    compare([40, 9], window=12)


def test_softcap_and_empty_history():
    compare([40, 0], softcap=2.0)
