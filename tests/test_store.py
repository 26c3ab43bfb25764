"""The paged store: only named slots change, whatever the pool held, and reading gives back what was quantised."""

import numpy as np
import pytest
import torch
from helpers import PROPERTY, build_codec, normal, page_oracle, page_owners, rng
from hypothesis import given
from hypothesis import strategies as st

from turboquant.config import PRESETS
from turboquant.store import CompressedBlockStore

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 576)
HEADS = 2
presets = pytest.mark.parametrize("preset", PRESETS)
VARIANTS = {
    "lloyd": {},
    "prod": {"key_quantizer": "prod"},
    "group": {"value_quantizer": "group"},
    "k3v3": {"key_bits": 3, "value_bits": 3},
    "fp8": {"key_bits": 8},
    "fp8 and group8": {"key_bits": 8, "value_quantizer": "group", "value_bits": 8},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def make_store(dim=64, block_size=8, num_blocks=6, fill=None, heads=HEADS, **options):
    """A store whose pages hold `fill`, or random bytes."""
    codec = build_codec(heads, dim, **options)
    shape = (num_blocks, heads, codec.page_format(block_size).page_bytes)
    raw = rng(99).integers(0, 256, shape, dtype=np.uint8) if fill is None else np.full(shape, fill, dtype=np.uint8)
    return CompressedBlockStore(codec, num_blocks, heads, block_size, pages=torch.from_numpy(raw))


def random_rows(n, dim, seed):
    return normal(n, HEADS, dim, seed=2 * seed), normal(n, HEADS, dim, seed=2 * seed + 1)


def expected_pages(store, before, slots, keys, values):
    """`before` with the bytes of the named slots replaced by the oracle's."""
    codec, size = store.codec, store.block_size
    key, value = codec.encode_keys(keys), codec.encode_values(values)
    owners, pages = page_owners(codec, size), before.clone().numpy()
    for i, slot in enumerate(slots):
        for head in range(HEADS):
            rows = [x[i, head].expand(size, -1) for x in (key.codes, value.codes, key.scalars, value.scalars)]
            mine = owners == slot % size
            pages[slot // size, head][mine] = page_oracle(*rows, codec.key.bits, codec.value.bits)[mine]
    return torch.from_numpy(pages)


@variants
@pytest.mark.parametrize(("dim", "block_size"), [(64, 8), (80, 1), (96, 24)])
def test_bytes_outside_the_named_slots_never_change(options, dim, block_size):
    """Slots of -1 are no slot, and padding bytes, neighbours and other blocks stay as they were."""
    store = make_store(dim, block_size, **options)
    before = store.pages.clone()
    slots = [-1, *rng(1).permutation(6 * block_size)[:4].tolist(), -1, -1]
    keys, values = random_rows(len(slots), dim, seed=5)
    store.write(torch.tensor(slots), keys, values)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    named = [slots[i] for i in real]
    assert torch.equal(store.pages, expected_pages(store, before, named, keys[real], values[real]))
    assert not torch.equal(store.pages, before)


@variants
def test_slots_and_rows_of_different_number(options):
    """VLLM pads either; what has no partner is ignored."""
    keys, values = random_rows(5, 64, seed=6)
    slots = torch.tensor([3, 40, 17, 9, 21])
    stores = [make_store(**options) for _ in range(3)]
    stores[0].write(slots[:3], keys[:3], values[:3])
    stores[1].write(slots[:3], keys, values)
    stores[2].write(slots, keys[:3], values[:3])
    assert all(torch.equal(store.pages, stores[0].pages) for store in stores)
    assert not torch.equal(stores[0].pages, make_store(**options).pages)


@variants
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("slots", [[], [-1, -1, -1]], ids=["empty", "padding"])
def test_a_step_without_tokens_changes_nothing(options, slots, heads):
    """A dummy batch, whose rows are all padding; with one KV head, too (MQA, or one head per rank)."""
    store = make_store(heads=heads, **options)
    before = store.pages.clone()
    rows = normal(len(slots), heads, 64, seed=7)
    store.write(torch.tensor(slots, dtype=torch.int64), rows, rows)
    assert torch.equal(store.pages, before)


@variants
def test_the_last_block_is_not_slot_minus_one(options):
    """Python's floor gives block -1 and slot bs-1, C's truncation block 0 and slot -1."""
    store = make_store(**options)
    slots = torch.tensor([0, 47])
    store.write(slots, *random_rows(2, 64, seed=8))
    before = store.pages.clone()
    store.write(torch.tensor([-1]), *random_rows(1, 64, seed=9))
    assert torch.equal(store.pages, before)


@presets
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_write_read_and_read_slots_agree(preset, dim):
    """Element by element what the codec quantised by hand decodes to, in a pool of 0xFF."""
    store = make_store(dim, 8, fill=0xFF, **PRESETS[preset])
    codec, slots = store.codec, torch.tensor([8, 9, 23, 40, 11, 0])
    keys, values = random_rows(6, dim, seed=dim)
    store.write(slots, keys, values)
    decoded_keys = codec.key.decode(codec.encode_keys(keys))
    decoded_values = codec.value.decode(codec.encode_values(values))
    blocks = torch.tensor([[1, 2], [5, 0]])
    read_keys, read_values = store.read(blocks)
    assert read_keys.shape == read_values.shape == (2, HEADS, 16, dim)
    for i, (row, local) in enumerate([(0, 0), (0, 1), (0, 15), (1, 0), (0, 3), (1, 8)]):
        assert torch.equal(read_keys[row, :, local], decoded_keys[i])
        assert torch.equal(read_values[row, :, local], decoded_values[i])
    original_keys, original_values = store.read_slots(slots)
    assert torch.equal(original_keys, codec.decode_keys(decoded_keys))
    assert torch.equal(original_values, codec.output(decoded_values))
    assert torch.isfinite(original_keys).all() and (original_keys - keys).norm() < 0.6 * keys.norm()


@variants
def test_ramp_values_come_back_in_order(options):
    """One token with V = 0, 1, ..., d-1, so that a stride error is visible in every coordinate."""
    store = make_store(**options)
    ramp = torch.arange(64.0).expand(1, HEADS, -1)
    store.write(torch.tensor([13]), random_rows(1, 64, seed=10)[0], ramp)
    decoded = store.read_slots(torch.tensor([13]))[1]
    codec = store.codec
    assert torch.equal(decoded, codec.output(codec.value.decode(codec.encode_values(ramp))))
    assert (decoded - ramp).abs().max() < 16


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F])
def test_written_tokens_do_not_depend_on_what_the_pool_held(fill):
    """Stale bytes, NaN patterns included."""
    store, zero = make_store(fill=fill, key_bits=8), make_store(fill=0, key_bits=8)
    slots = torch.tensor([5, 17, 44])
    for each in (store, zero):
        each.write(slots, *random_rows(3, 64, seed=11))
    for found, expected in zip(store.read_slots(slots), zero.read_slots(slots), strict=True):
        assert torch.equal(found, expected) and torch.isfinite(found).all()


def test_padded_page_strides():
    """Pages that are a view into larger ones, as a native allocation gives them."""
    tight = make_store(fill=0)
    wide = torch.full((6, HEADS + 1, tight.format.page_bytes + 32), 7, dtype=torch.uint8)
    pages = wide[:, :HEADS, 16:-16]
    pages.zero_()
    store = CompressedBlockStore(tight.codec, 6, HEADS, 8, pages=pages)
    slots = torch.tensor([2, 30, 47])
    for each in (tight, store):
        each.write(slots, *random_rows(3, 64, seed=12))
    assert torch.equal(pages, tight.pages)
    assert (wide[:, HEADS:] == 7).all() and (wide[..., :16] == 7).all() and (wide[..., -16:] == 7).all()
    assert all(torch.equal(a, b) for a, b in zip(store.read_slots(slots), tight.read_slots(slots), strict=True))


# Rotating whole numbers with a Hadamard matrix of 1/8 is exact in float32, in whatever order BLAS adds.
whole_numbers = st.integers(0, 2**20).map(
    lambda seed: torch.from_numpy(rng(seed).integers(-9, 10, (40, 2, HEADS, 64))).float()
)


@pytest.mark.parametrize("options", [VARIANTS["lloyd"], VARIANTS["k3v3"], VARIANTS["fp8 and group8"]], ids=str)
@PROPERTY
@given(rows=whole_numbers, order=st.permutations(range(40)), cuts=st.sets(st.integers(1, 39)), data=st.data())
def test_chunking_and_order_do_not_change_the_bytes(options, rows, order, cuts, data):
    """Habit 8: the same stream in random chunks, in random order, with padding in between, gives identical bytes."""
    slots = torch.tensor(data.draw(st.permutations(range(48))))[:40]
    whole, chunked = make_store(**options), make_store(**options)
    whole.write(slots, rows[:, 0], rows[:, 1])
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True):
        part = torch.tensor(order[start:end])
        padded_slots = torch.cat([slots[part], torch.tensor([-1])])
        padded = torch.cat([rows[part], torch.full((1, 2, HEADS, 64), torch.nan)])
        chunked.write(padded_slots, padded[:, 0], padded[:, 1])
    assert torch.equal(chunked.pages, whole.pages)


@pytest.mark.parametrize(("dim", "chunk", "options"), [(576, 3, {}), (128, 1, {}), (80, 1, VARIANTS["prod"])])
def test_bytes_of_a_token_do_not_depend_on_the_size_of_its_step(dim, chunk, options):
    """Habit 8 on ordinary numbers: a token of a decode or verify step gets the bytes that a prefill gives it."""
    whole, chunked = (make_store(dim, 16, 32, fill=0, **options) for _ in range(2))
    keys, values = random_rows(400, dim, seed=13)
    slots = torch.arange(400)
    whole.write(slots, keys, values)
    for part in slots.split(chunk):
        chunked.write(part, keys[part], values[part])
    pairs = zip(whole.read_slots(slots), chunked.read_slots(slots), strict=True)
    differing = int(sum((a != b).any(-1).any(-1).sum() for a, b in pairs))
    assert differing == 0, f"{differing} of 800 rows differ"
    assert torch.equal(whole.pages, chunked.pages)


def test_later_writes_win():
    """Block reuse and rejected drafts: a slot holds what was written last."""
    store = make_store()
    slots = torch.tensor([3, 4, 5])
    store.write(slots, *random_rows(3, 64, seed=14))
    keys, values = random_rows(3, 64, seed=15)
    store.write(slots[1:], keys[1:], values[1:])
    other = make_store()
    other.write(slots[1:], keys[1:], values[1:])
    assert all(torch.equal(a, b) for a, b in zip(store.read_slots(slots[1:]), other.read_slots(slots[1:]), strict=True))
    assert not torch.equal(store.read_slots(slots[:1])[0], other.read_slots(slots[:1])[0])


@presets
@pytest.mark.parametrize("dim", [64, 80, 576])
def test_accounting_is_the_real_number_of_bytes(preset, dim):
    """C4 (b), trap 4: store, format and tensor agree, and compression happened."""
    store = CompressedBlockStore(build_codec(HEADS, dim, **PRESETS[preset]), 5, HEADS, 32)
    assert store.nbytes == store.pages.untyped_storage().nbytes()
    assert store.nbytes == 5 * 32 * store.format.bytes_per_token(HEADS)
    assert store.nbytes < 5 * 32 * HEADS * dim * 4 / 2.3
    assert (store.num_blocks, store.num_kv_heads) == (5, HEADS)


@pytest.mark.parametrize("shape", [(5, 2), (6, 3), (6,)])
def test_pages_of_another_geometry_are_refused(shape):
    codec = build_codec(HEADS, 64)
    pages = torch.zeros(*shape, codec.page_format(8).page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"expected \(6, 2, "):
        CompressedBlockStore(codec, 6, HEADS, 8, pages=pages)
    with pytest.raises(ValueError, match="pages must be uint8"):
        CompressedBlockStore(codec, 6, HEADS, 16, pages=pages)
