"""The page layout against bytes written by hand: planes, order inside planes, alignment, sizes, and refusals."""

import itertools

import numpy as np
import pytest
import torch
from helpers import PLANE_WIDTHS, build_codec, normal, page_oracle, page_owners

from turboquant.config import PRESETS
from turboquant.page import GIB, PageFormat
from turboquant.store import CompressedBlockStore

BLOCK_SIZES = (1, 8, 16, 24, 32, 48, 64, 128, 528)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 576)
QUANTIZERS = list(itertools.product(("mse", "prod"), ("lloyd", "group")))
presets = pytest.mark.parametrize("preset", PRESETS)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def scalars_of(preset, key_quantizer, value_quantizer, dim):
    """Stored numbers per token for key and value, from the documentation of the quantisers."""
    key = 2 if key_quantizer == "prod" and PRESETS[preset]["key_bits"] != 8 else 1
    return key, 2 * (dim // 16) if value_quantizer == "group" else 1


def page_format(preset, block_size, dim, key_quantizer="mse", value_quantizer="lloyd"):
    bits = PRESETS[preset]
    key, value = scalars_of(preset, key_quantizer, value_quantizer, dim)
    return PageFormat(dim, block_size, bits["key_bits"], bits["value_bits"], key, value)


@presets
@block_sizes
def test_planes_are_aligned_and_disjoint(preset, block_size):
    """Block sizes that are no power of two, too."""
    for dim, (key, value) in itertools.product(HEAD_DIMS, QUANTIZERS):
        layout = page_format(preset, block_size, dim, key, value)
        end = 0
        for plane in layout.planes:
            assert plane.offset % 16 == 0 and 0 <= plane.offset - end < 16
            end = plane.offset + plane.token_bytes * block_size
        assert layout.page_bytes % 16 == 0 and 0 <= layout.page_bytes - end < 16


@presets
@block_sizes
def test_page_bytes_formula(preset, block_size):
    """Sum over planes of block_size * width * d / 8, each rounded up to 16; scalars are 2 bytes."""
    for dim, (key, value) in itertools.product(HEAD_DIMS, QUANTIZERS):
        layout = page_format(preset, block_size, dim, key, value)
        widths = [*PLANE_WIDTHS[PRESETS[preset]["key_bits"]], *PLANE_WIDTHS[PRESETS[preset]["value_bits"]]]
        sizes = [w * dim // 8 for w in widths] + [2 * n for n in scalars_of(preset, key, value, dim)]
        assert layout.page_bytes == sum((size * block_size + 15) // 16 * 16 for size in sizes)
        assert layout.token_bytes == sum(sizes)
        assert layout.bytes_per_token(1) == layout.page_bytes / block_size
        assert layout.bytes_per_token(8, 3) == 24 * layout.page_bytes / block_size


# Slot bytes per token and KV head.
SLOT_BYTES = {
    "k8v4": {64: 100, 128: 196, 256: 388},
    "k4v4": {64: 68, 128: 132, 256: 260},
    "k4v3": {64: 60, 128: 116, 256: 228},
    "k3v4": {64: 60, 128: 116, 256: 228},
    "k3v3": {64: 52, 128: 100, 256: 196},
    "k4v2": {64: 52, 128: 100, 256: 196},
    "k3v2": {64: 44, 128: 84, 256: 164},
    "k2v2": {64: 36, 128: 68, 256: 132},
}


@presets
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_printed_slot_bytes(preset, dim):
    layout = page_format(preset, 32, dim)
    assert layout.token_bytes == SLOT_BYTES[preset][dim]
    assert layout.page_bytes == 32 * layout.token_bytes  # 32 tokens fill every plane: no padding
    assert layout.tokens_per_gib(8, 36) == GIB // (SLOT_BYTES[preset][dim] * 8 * 36)


def hand_written_page(codec, block_size, seed):
    """Keys and values of a page of both heads, and its bytes [2, page_bytes] after the oracle."""
    keys, values = normal(block_size, 2, codec.key.dim, seed=seed), normal(block_size, 2, codec.key.dim, seed=seed + 1)
    key, value = codec.encode_keys(keys), codec.encode_values(values)
    pages = [
        page_oracle(
            key.codes[:, head], value.codes[:, head], key.scalars[:, head], value.scalars[:, head],
            codec.key.bits, codec.value.bits,
        )
        for head in range(2)
    ]  # fmt: skip
    return keys, values, torch.from_numpy(np.stack(pages))


@presets
@block_sizes
@pytest.mark.parametrize(("key_quantizer", "value_quantizer"), QUANTIZERS)
def test_store_writes_the_hand_written_bytes(preset, block_size, key_quantizer, value_quantizer):
    """Expected bytes come from a packer that knows the layout alone, for every preset and quantiser."""
    dim = 80 if block_size <= 64 else 64
    key = "mse" if PRESETS[preset]["key_bits"] == 8 else key_quantizer  # fp8 keys have no other
    codec = build_codec(2, dim, key_quantizer=key, value_quantizer=value_quantizer, value_group=16, **PRESETS[preset])
    keys, values, expected = hand_written_page(codec, block_size, seed=block_size)
    store = CompressedBlockStore(codec, 3, 2, block_size)
    assert store.format == page_format(preset, block_size, dim, key_quantizer, value_quantizer)
    store.write(torch.arange(block_size) + block_size, keys, values)
    assert torch.equal(store.pages[1], expected)
    assert not store.pages[0].any() and not store.pages[2].any()


@presets
@block_sizes
def test_view_round_trip(preset, block_size):
    """A view selects exactly the bytes of its plane: [token, byte] for keys and scalars, [byte, token] for values."""
    layout = page_format(preset, block_size, 96, "prod", "group")
    raw = np.random.default_rng(block_size).integers(0, 256, (2, 3, layout.page_bytes), dtype=np.uint8)
    pages = torch.from_numpy(raw.copy())
    for plane in layout.planes:
        part = raw[..., plane.offset : plane.offset + plane.token_bytes * block_size]
        if plane.name.startswith("value_codes"):
            expected = part.reshape(2, 3, plane.token_bytes, block_size).transpose(0, 1, 3, 2)
        else:
            expected = part.reshape(2, 3, block_size, plane.token_bytes)
        view = layout.view(pages, plane)
        assert np.array_equal(view.numpy(), expected)
        view.copy_(torch.from_numpy(255 - expected))
        raw[..., plane.offset : plane.offset + plane.token_bytes * block_size] ^= 255
        assert np.array_equal(pages.numpy(), raw)


def test_order_of_the_planes():
    names = [plane.name for plane in PageFormat(64, 16, 3, 3).planes]
    assert names == [
        "key_codes_0", "key_codes_1", "value_codes_0", "value_codes_1", "key_scalars", "value_scalars"
    ]  # fmt: skip
    layout = PageFormat(64, 16, 3, 2)
    assert [plane.name for plane in layout.group("value_codes")] == ["value_codes_0"]
    assert [plane.name for plane in layout.group("key")] == ["key_codes_0", "key_codes_1", "key_scalars"]


@pytest.mark.parametrize("block_size", [8, 24])
def test_keys_are_token_major_and_values_dimension_major(block_size):
    """On raw bytes: rewriting one token changes one run of key bytes, and every block_size-th byte of the values."""
    codec = build_codec(1, 64, key_bits=4, value_bits=4)
    store = CompressedBlockStore(codec, 1, 1, block_size)
    keys, values = normal(block_size, 1, 64, seed=3), normal(block_size, 1, 64, seed=4)
    store.write(torch.arange(block_size), keys, values)
    before = store.pages[0, 0].clone()
    store.write(torch.tensor([5]), -keys[5:6], -values[5:6])
    changed = (store.pages[0, 0] != before).nonzero().flatten()
    assert set(changed.tolist()) <= set(np.flatnonzero(page_owners(codec, block_size) == 5).tolist())
    key_bytes, value_bytes = (
        changed[(changed >= low) & (changed < low + 32 * block_size)] for low in (0, 32 * block_size)
    )
    assert len(key_bytes) == len(value_bytes) == 32
    assert key_bytes.tolist() == list(range(5 * 32, 6 * 32))
    assert value_bytes.tolist() == list(range(32 * block_size + 5, 64 * block_size, block_size))


def test_check_accepts_padded_page_strides():
    """The stride of a page may be larger than its bytes."""
    layout = PageFormat(64, 16, 4, 4)
    padded = torch.zeros(4, 2, layout.page_bytes + 48, dtype=torch.uint8)[..., : layout.page_bytes]
    layout.check(padded)
    layout.view(padded, layout.planes[1])[3, 1, 7, 2] = 9
    assert padded[3, 1, layout.planes[1].offset + 2 * 16 + 7] == 9


@pytest.mark.parametrize(
    "damage",
    [
        lambda pages: pages.to(torch.int8),
        lambda pages: pages.float(),
        lambda pages: pages[..., :-1],
        lambda pages: pages[..., :-16],
        lambda pages: torch.cat([pages, pages], dim=-1),
        lambda pages: torch.cat([pages, pages], dim=-1)[..., ::2],
        lambda pages: pages.transpose(0, -1).contiguous().transpose(0, -1),
    ],
)
def test_check_refuses(damage):
    """The message names what is expected and what was found."""
    layout = PageFormat(64, 16, 4, 4)
    pages = torch.zeros(4, 2, layout.page_bytes, dtype=torch.uint8)
    layout.check(pages)
    bad = damage(pages)
    with pytest.raises(ValueError, match=rf"{layout.page_bytes}\].*got {bad.dtype}"):
        layout.check(bad)
    with pytest.raises(ValueError, match="pages must be uint8"):
        layout.view(bad, layout.planes[0])


@pytest.mark.parametrize("dim", [0, 8, 12, 20, 100, -64])
def test_head_sizes_that_are_refused(dim):
    with pytest.raises(ValueError, match=rf"head size {dim}.*multiple of 8 and at least 16"):
        PageFormat(dim, 16, 4, 4)


@pytest.mark.parametrize("block_size", [0, -16])
def test_block_sizes_that_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size={block_size}"):
        PageFormat(64, block_size, 4, 4)


@pytest.mark.parametrize("bits", [0, 5, 6, 16])
def test_widths_that_are_refused(bits):
    with pytest.raises(ValueError, match=rf"{bits}-bit.*\[1, 2, 3, 4, 8\]"):
        _ = PageFormat(64, 16, bits, 4).page_bytes
