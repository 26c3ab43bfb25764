"""The framework-free facade against torch's own attention, its accounting, and its refusals."""

import pytest
import torch
from helpers import cosine, normal, rel_l2
from torch.nn.functional import scaled_dot_product_attention

from turboquant.codec import KeyTransform
from turboquant.config import PRESETS, TurboQuantConfig
from turboquant.kv_cache import TurboQuantKVCache


def rows(batch, heads, tokens, dim, seed, dtype=torch.float32):
    return normal(batch, heads, tokens, dim, seed=seed).to(dtype)


def causal(query, key, value, dtype=torch.float64, scale=None):
    """torch's attention of the last T positions, [B, H_q, T, d]."""
    length, cached = query.shape[2], key.shape[2]
    mask = torch.ones(length, cached, dtype=torch.bool).tril(cached - length)
    return scaled_dot_product_attention(
        query.to(dtype), key.to(dtype), value.to(dtype), attn_mask=mask, scale=scale, enable_gqa=True
    )


def assert_as_exact_as_torch(found, query, key, value, **options):
    expected, rival = causal(query, key, value, **options), causal(query, key, value, torch.float32, **options)
    bound = 2 * rel_l2(rival, expected).max()
    assert found.shape == query.shape and found.dtype == query.dtype
    assert rel_l2(found, expected).max() <= bound
    assert (1 - cosine(found, expected)).max() <= bound**2 + 1e-15


@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim"), [(1, 2, 1, 64), (3, 2, 4, 64), (2, 1, 7, 80), (1, 8, 1, 128)]
)
def test_everything_in_the_window_is_exact(batch, heads, group, dim):
    """Chunks, verify steps and decodes with all tokens in the exact window: within twice torch's own error."""
    cache = TurboQuantKVCache(heads, dim, 100, batch_size=batch, block_size=16)
    key, value = rows(batch, heads, 60, dim, seed=1), rows(batch, heads, 60, dim, seed=2)
    query, start = rows(batch, heads * group, 60, dim, seed=3), 0
    for new in (37, 1, 1, 4, 17):
        part = slice(start, start + new)
        found = cache.attend(query[:, :, part], key[:, :, part], value[:, :, part])
        assert_as_exact_as_torch(found, query[:, :, part], key[:, :, : start + new], value[:, :, : start + new])
        start += new
        assert len(cache) == start


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_history_is_close(preset):
    """Worst output cosine with compressed tokens; and they are really compressed."""
    config = TurboQuantConfig.from_options(preset, buffer_size=0)
    cache = TurboQuantKVCache(2, 64, 300, config=config)
    key, value, query = rows(1, 2, 256, 64, seed=4), rows(1, 2, 256, 64, seed=5), rows(1, 4, 64, 64, seed=6) / 2
    cache.append(key, value)
    found = cache.attend(query)
    expected = scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True)
    floor = {2: 0.816, 3: 0.870, 4: 0.954}[min(config.key_bits, config.value_bits)]
    cosines = cosine(found, expected)
    assert floor < cosines.flatten().quantile(0.05) and cosines.max() < 1 - 1e-4


def test_the_window_makes_recent_tokens_exact():
    """The same history with and without the window: the error falls, and most when only recent tokens count."""
    errors = []
    for buffer_size in (0, 64):
        cache = TurboQuantKVCache(
            1, 64, 200, config=TurboQuantConfig(key_bits=2, value_bits=2, buffer_size=buffer_size)
        )
        key, value, query = rows(1, 1, 150, 64, seed=7), rows(1, 1, 150, 64, seed=8), rows(1, 1, 1, 64, seed=9)
        key[:, :, -20:] += query
        cache.append(key, value)
        errors.append(float(rel_l2(cache.attend(query), causal(query, key, value)).mean()))
    assert errors[1] < 0.1 * errors[0]


def test_scale_and_layer():
    key, value, query = rows(1, 1, 40, 64, seed=10), rows(1, 1, 40, 64, seed=11), rows(1, 2, 1, 64, seed=12)
    cache = TurboQuantKVCache(1, 64, 40, scale=0.7)
    cache.append(key, value)
    assert_as_exact_as_torch(cache.attend(query), query, key, value, scale=0.7)
    pages = []
    for layer_index in (0, 1):
        layer = TurboQuantKVCache(1, 64, 40, layer_index=layer_index)
        layer.append(key, value)
        pages.append(layer._layer.store.pages)
    assert not torch.equal(*pages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The output has the query's dtype; computed in float32 and rounded once."""
    cache = TurboQuantKVCache(2, 64, 64, dtype=dtype)
    key, value, query = (rows(1, h, 40, 64, seed=13 + h, dtype=dtype) for h in (2, 2, 4))
    expected = causal(query, key, value)
    found = cache.attend(query, key, value)
    assert found.dtype == dtype
    assert rel_l2(found, expected).max() <= 2 * rel_l2(expected.to(dtype), expected).max()


def test_batch_rows_do_not_mix():
    """Each sequence of a batch gives what it gives alone."""
    key, value, query = rows(3, 2, 90, 64, seed=20), rows(3, 2, 90, 64, seed=21), rows(3, 4, 2, 64, seed=22)
    config = TurboQuantConfig(buffer_size=20)
    together = TurboQuantKVCache(2, 64, 90, batch_size=3, config=config)
    together.append(key, value)
    found = together.attend(query)
    for i in range(3):
        alone = TurboQuantKVCache(2, 64, 90, config=config)
        alone.append(key[i : i + 1], value[i : i + 1])
        torch.testing.assert_close(found[i : i + 1], alone.attend(query[i : i + 1]))


def test_query_without_keys_sees_all_cached_tokens():
    """Several rows, all of them over the whole cache, and nothing is appended."""
    cache = TurboQuantKVCache(1, 64, 50)
    key, value, query = rows(1, 1, 50, 64, seed=23), rows(1, 1, 50, 64, seed=24), rows(1, 2, 5, 64, seed=25)
    cache.append(key, value)
    found, singles = cache.attend(query), [cache.attend(query[:, :, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(found, torch.cat(singles, dim=2))
    assert rel_l2(found, causal(query[:, :, 4:], key, value))[0, :, 4].max() < 1e-5
    assert len(cache) == 50


def test_empty_cache_gives_zeros():
    assert torch.equal(TurboQuantKVCache(1, 64, 50).attend(rows(1, 2, 3, 64, seed=26)), torch.zeros(1, 2, 3, 64))


@pytest.mark.parametrize("block_size", [1, 16, 24, 32])
def test_chunked_append_equals_one_append(block_size):
    """Pages byte for byte; whole numbers, whose Hadamard rotation is exact in whatever order BLAS adds."""
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randint(-9, 10, (2, 2, 2, 70, 64), generator=generator).float()
    whole, chunked = (TurboQuantKVCache(2, 64, 80, batch_size=2, block_size=block_size) for _ in range(2))
    whole.append(key, value)
    for part in torch.arange(70).split([3, 1, 1, 30, 17, 18]):
        chunked.append(key[:, :, part], value[:, :, part])
    assert torch.equal(chunked._layer.store.pages, whole._layer.store.pages)
    assert whole._layer.store.pages.any() and len(chunked) == len(whole) == 70
    query = rows(2, 4, 1, 64, seed=30)
    torch.testing.assert_close(chunked.attend(query), whole.attend(query))


def test_appending_nothing():
    cache = TurboQuantKVCache(1, 64, 50)
    cache.append(rows(1, 1, 0, 64, seed=27), rows(1, 1, 0, 64, seed=28))
    assert len(cache) == 0 and not cache._layer.store.pages.any()


def tensors_of(thing, seen):
    """All tensors reachable from an object of this package."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_of(value, seen)
    elif type(thing).__module__.startswith("turboquant"):
        yield from tensors_of(vars(thing), seen)


@pytest.mark.parametrize("options", [
    {}, {"key_quantizer": "prod"}, {"key_bits": 8}, {"value_quantizer": "group"}, {"buffer_size": 0}
], ids=str)  # fmt: skip
def test_memory_bytes_is_the_sum_of_all_tensors(options):
    """Invariant 7: every tensor that the cache keeps is reported, tables included."""
    cache = TurboQuantKVCache(2, 64, 200, batch_size=2, config=TurboQuantConfig(**options))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(cache, set())}
    reported = cache.memory_bytes()
    assert reported["total"] == reported["pages"] + reported["recent"] + reported["tables"]
    assert reported["pages"] == cache._layer.store.pages.nbytes
    assert reported["recent"] == cache._layer.recent.keys.nbytes + cache._layer.recent.values.nbytes
    assert reported["total"] == sum(storages.values())


def test_pages_are_smaller_than_what_they_hold():
    """k4v4 at head size 128: 132 instead of 512 bytes of bf16."""
    cache = TurboQuantKVCache(8, 128, 1024)
    assert cache.memory_bytes()["pages"] == 1024 * 8 * 132


def test_memory_does_not_grow():
    cache = TurboQuantKVCache(1, 64, 100)
    before = cache.memory_bytes()
    cache.append(rows(1, 1, 100, 64, seed=31), rows(1, 1, 100, 64, seed=32))
    assert cache.memory_bytes() == before


def state(cache):
    return [x.clone() for x in tensors_of(cache, set())], len(cache)


def assert_unchanged(cache, before):
    tensors, length = state(cache)
    assert length == before[1]
    assert all(torch.equal(a, b) for a, b in zip(tensors, before[0], strict=True))


def cache_with_history():
    cache = TurboQuantKVCache(2, 64, 50, config=TurboQuantConfig(buffer_size=20))
    cache.append(rows(1, 2, 45, 64, seed=33), rows(1, 2, 45, 64, seed=34))
    return cache


def test_overflow_changes_nothing():
    cache = cache_with_history()
    before = state(cache)
    key, value = rows(1, 2, 6, 64, seed=35), rows(1, 2, 6, 64, seed=36)
    with pytest.raises(ValueError, match=r"6 more tokens do not fit: 45 of max_tokens=50"):
        cache.append(key, value)
    with pytest.raises(ValueError, match="do not fit"):
        cache.attend(rows(1, 2, 6, 64, seed=37), key, value)
    assert_unchanged(cache, before)
    cache.append(key[:, :, :5], value[:, :, :5])
    assert len(cache) == 50


@pytest.mark.parametrize("shape", [(2, 2, 3, 64), (1, 3, 3, 64), (1, 2, 3, 80), (2, 3, 64), (1, 2, 64)])
@pytest.mark.parametrize("side", ["key", "value"])
def test_wrong_shapes_change_nothing(shape, side):
    cache = cache_with_history()
    before = state(cache)
    pair = {"key": torch.zeros(1, 2, 3, 64), "value": torch.zeros(1, 2, 3, 64), side: torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"expected \[B, H_kv, T, d\]"):
        cache.append(**pair)
    assert_unchanged(cache, before)


def test_key_without_value_is_refused():
    cache = cache_with_history()
    query = rows(1, 2, 3, 64, seed=38)
    for pair in ({"key": query}, {"value": query}):
        with pytest.raises(ValueError, match="together"):
            cache.attend(query, **pair)
    assert len(cache) == 45


@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 64), (1, 2, 4, 64), (2, 2, 3, 64), (1, 3, 3, 64), (1, 2, 3, 80)],
    ids=["fewer rows", "more rows", "batch", "heads", "head size"],
)  # fmt: skip
def test_query_that_does_not_fit_its_keys_changes_nothing(shape):
    """A query of another length than its keys has rows without a position; no garbage output, no half-done append."""
    cache = cache_with_history()
    before = state(cache)
    with pytest.raises(ValueError, match="query"):
        cache.attend(normal(*shape, seed=39), rows(1, 2, 3, 64, seed=40), rows(1, 2, 3, 64, seed=41))
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    ("name", "value"), [("num_kv_heads", 0), ("max_tokens", 0), ("max_tokens", -5), ("batch_size", 0)]
)
def test_sizes_are_checked(name, value):
    sizes = {"num_kv_heads": 1, "head_dim": 64, "max_tokens": 10, "batch_size": 1, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TurboQuantKVCache(**sizes)


@pytest.mark.parametrize("block_size", [0, -16])
def test_block_size_is_checked(block_size):
    with pytest.raises(ValueError, match=f"block_size={block_size}"):
        TurboQuantKVCache(1, 64, 10, block_size=block_size)


def test_head_size_is_checked():
    with pytest.raises(ValueError, match="head size 20"):
        TurboQuantKVCache(1, 20, 10)


def test_key_transform_with_a_centre():
    """A constant in the keys costs nothing when the transform takes it out: exact and compressed tokens together."""
    center = 10 * normal(2, 64, seed=42)
    transform = KeyTransform(center, torch.ones(2, 64))
    cache = TurboQuantKVCache(2, 64, 200, config=TurboQuantConfig(buffer_size=16), transform=transform)
    key, value = rows(1, 2, 150, 64, seed=43) + center[:, None], rows(1, 2, 150, 64, seed=44)
    query = rows(1, 2, 30, 64, seed=45)
    cache.append(key[:, :, :120], value[:, :, :120])
    found = cache.attend(query, key[:, :, 120:], value[:, :, 120:])
    assert cosine(found, causal(query, key, value)).flatten().quantile(0.05) > 0.97
