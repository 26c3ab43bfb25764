"""Packing against an oracle written from the documented layout alone, and golden bytes that pin the layout."""

import numpy as np
import pytest
import torch
from helpers import PLANE_WIDTHS, PROPERTY, pack_oracle, planes_oracle, rng
from hypothesis import given
from hypothesis import strategies as st

from turboquant.packing import pack, pack_plane, packed_bytes, plane_bytes, plane_widths, unpack, unpack_plane

WIDTHS = (1, 2, 3, 4, 8)
DIMS = (8, 16, 64, 80, 96, 112, 128, 576)


def all_codes(bits, dim):
    """Every code at every coordinate, then random neighbours: uint8 [2^bits + 64, dim]."""
    sweep = (np.arange(2**bits)[:, None] + np.arange(dim)) % 2**bits
    return np.concatenate([sweep, rng(bits, dim).integers(0, 2**bits, (64, dim))]).astype(np.uint8)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_bytes_are_the_documented_ones(bits, dim):
    """All codes, odd head sizes, against the oracle."""
    codes = all_codes(bits, dim)
    planes = pack(torch.from_numpy(codes), bits)
    for plane, expected in zip(planes, planes_oracle(codes, bits), strict=True):
        assert plane.dtype == torch.uint8
        assert np.array_equal(plane.numpy(), expected)
    assert torch.equal(unpack(planes, bits), torch.from_numpy(codes))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_byte_value_in_every_place(width):
    """256 byte values x all bytes of a row; unpack is the inverse of the oracle and pack of unpack."""
    n = 80 * width // 8
    packed = ((np.arange(256)[:, None] + 37 * np.arange(n)) % 256).astype(np.uint8)
    codes = unpack_plane(torch.from_numpy(packed), width)
    assert codes.shape == (256, 80) and int(codes.max()) == 2**width - 1
    assert np.array_equal(pack_oracle(codes.numpy(), width), packed)
    assert np.array_equal(pack_plane(codes, width).numpy(), packed)


@pytest.mark.parametrize(
    ("bits", "codes", "planes"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 1], ["63ea"]),
        (2, [3, 1, 0, 2, 0, 0, 1, 1, 2, 3, 2, 3, 1, 2, 3, 0], ["63b1e436"]),
        (3, [5, 2, 7, 0, 1, 6, 3, 4, 4, 4, 1, 0, 7, 2, 2, 6], ["c58a9f80", "539c"]),
        (4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], ["8091a2b3c4d5e6f7"]),
        (8, [0, 1, 127, 128, 200, 254, 255, 16], ["00017f80c8feff10"]),
    ],
)
def test_golden_bytes(bits, codes, planes):
    """Worked out by hand; a change of the layout has to be deliberate."""
    found = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert [bytes(plane.tolist()).hex() for plane in found] == planes


@PROPERTY
@given(data=st.data(), bits=st.sampled_from(WIDTHS), dim=st.integers(1, 24).map(lambda n: 8 * n))
def test_round_trip(data, bits, dim):
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.from_numpy(rng(seed).integers(0, 2**bits, (*shape, dim)).astype(np.uint8))
    before = codes.clone()
    planes = pack(codes, bits)
    assert [plane.shape for plane in planes] == [(*shape, dim * w // 8) for w in PLANE_WIDTHS[bits]]
    assert torch.equal(unpack(planes, bits), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", WIDTHS)
def test_strided_codes_and_planes(bits):
    """Neither direction may take strides from shapes."""
    codes = torch.from_numpy(all_codes(bits, 64))
    strided = codes.t().contiguous().t()
    planes = pack(strided, bits)
    assert all(torch.equal(a, b) for a, b in zip(planes, pack(codes, bits), strict=True))
    assert torch.equal(unpack([plane.t().contiguous().t() for plane in planes], bits), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_sizes(bits):
    assert plane_widths(bits) == PLANE_WIDTHS[bits]
    assert packed_bytes(bits, 576) == 576 * bits // 8
    assert packed_bytes(bits, 80) == 80 * bits // 8


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 9, -1])
def test_unknown_width_is_refused(bits):
    for call in (plane_widths, lambda b: packed_bytes(b, 64), lambda b: pack(torch.zeros(64, dtype=torch.uint8), b)):
        with pytest.raises(ValueError, match=rf"{bits}-bit.*\[1, 2, 3, 4, 8\]"):
            call(bits)


@pytest.mark.parametrize(("width", "dim"), [(1, 12), (1, 4), (2, 6), (4, 7), (4, 0), (8, -8)])
def test_row_that_does_not_fill_bytes_is_refused(width, dim):
    with pytest.raises(ValueError, match=rf"{dim} codes of {width} bits.*multiple of {8 // width}"):
        plane_bytes(width, dim)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_pack_refuses_a_row_that_does_not_fill_bytes(bits):
    with pytest.raises(ValueError, match="multiple of"):
        pack(torch.zeros(2, 9, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_wrong_number_of_planes_is_refused(bits):
    planes = pack(torch.zeros(16, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match="zip"):
        unpack([*planes, planes[0]], bits)
