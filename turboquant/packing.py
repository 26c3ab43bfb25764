"""Packing of small integer codes into bytes.

A width is a list of bit planes (`PLANE_WIDTHS`): 3 bits are a 2-bit plane and a 1-bit plane, so every byte holds
whole codes.  In a plane of width w a row of d codes takes n = d*w/8 bytes, and byte j holds the coordinates
j, j+n, j+2n, ... from its low bits upwards.  A kernel therefore turns one byte into coordinates that are d*w/8
apart, and needs no interleave.
"""

import torch

from turboquant.checks import is_int

PLANE_WIDTHS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths in bits of the planes that hold codes of `bits` bits, lowest bits first."""
    if not is_int(bits) or bits not in PLANE_WIDTHS:
        raise ValueError(f"cannot pack {bits}-bit codes; allowed: {sorted(PLANE_WIDTHS)}")
    return PLANE_WIDTHS[bits]


def plane_bytes(width: int, dim: int) -> int:
    """Bytes of one row of `dim` codes in a plane of `width` bits."""
    if dim <= 0 or dim * width % 8:
        raise ValueError(f"{dim} codes of {width} bits fill no whole number of bytes; use a multiple of {8 // width}")
    return dim * width // 8


def packed_bytes(bits: int, dim: int) -> int:
    """Bytes of one row of `dim` codes of `bits` bits, over all planes."""
    return sum(plane_bytes(width, dim) for width in plane_widths(bits))


def pack_plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 codes [..., d] below 2^width -> uint8 [..., d*width/8]."""
    count = 8 // width
    groups = codes.unflatten(-1, (count, plane_bytes(width, codes.shape[-1])))
    packed = groups[..., 0, :].clone()
    for i in range(1, count):
        packed |= groups[..., i, :] << (i * width)
    return packed


def unpack_plane(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverse of `pack_plane`: uint8 [..., n] -> uint8 codes [..., n*8/width]."""
    mask = 2**width - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, width)], dim=-1)


def pack(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """uint8 codes [..., d] below 2^bits -> one uint8 tensor [..., d*width/8] per plane.

    Raises ValueError for a width that cannot be packed or a d that does not fill bytes.
    """
    planes, shift = [], 0
    for width in plane_widths(bits):
        planes.append(pack_plane((codes >> shift) & (2**width - 1), width))
        shift += width
    return planes


def unpack(planes: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Inverse of `pack`: planes -> uint8 codes [..., d]."""
    codes, shift = None, 0
    for plane, width in zip(planes, plane_widths(bits), strict=True):
        part = unpack_plane(plane, width) << shift
        codes = part if codes is None else codes | part
        shift += width
    assert codes is not None
    return codes
