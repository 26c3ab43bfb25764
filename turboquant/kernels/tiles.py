"""Where codes lie in a page tile, and in which register of a warp: facts shared by the fast decode kernel's parts.

A tile is `tokens` (16 or 32) consecutive tokens of a page, read by one warp.  The order of the coordinates inside a
dot product is free as long as query and key agree, and so is the order of the tokens as long as P and V agree; both
orders are chosen so that every byte is loaded by the lane whose tensor-core fragment needs it.

Tensor-core fragments (PTX m16n8k16 and m16n8k32): lane = 4 i + c holds rows i and i + 8 of the first operand, and in
each row the positions that belong to c.  Row 8 a + 2 c' + b of a tile is token tokens/4 * c' + 2 a + b, so that the
weights which lane c gets after a transposition (tokens 2 c + b of every a) belong to neighbouring tokens.
"""

import torch
import triton
from triton.experimental.gluon import language as gl

from turboquant.packing import plane_bytes, plane_widths

WORD = 4  # bytes that a lane decodes at a time


@triton.constexpr_function
def bits_of(start, stop):
    """Powers of two in [start, stop)."""
    return [1 << k for k in range(start.bit_length() - 1, stop.bit_length() - 1)]


@triton.constexpr_function
def key_layout(rows, tokens, run):
    """Layout of uint8 [tokens, rows] of a token-major plane in physical token order; `run` neighbours in a lane."""
    quarter = tokens // 4
    registers = [[0, bit] for bit in bits_of(1, run)] + [[bit, 0] for bit in bits_of(2, quarter)]
    registers += [[0, bit] for bit in bits_of(4 * run, rows)]
    lanes = [[0, run], [0, 2 * run], [1, 0], [quarter, 0], [2 * quarter, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tokens, rows])


@triton.constexpr_function
def value_layout(rows, tokens):
    """Layout of uint8 [rows, tokens] of a dimension-major plane in physical token order."""
    quarter = tokens // 4
    registers = [[0, bit] for bit in bits_of(1, quarter)] + [[bit, 0] for bit in bits_of(8, rows)]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [rows, tokens])


def code_rows(bits: int, dim: int) -> int:
    """Bytes per token of the finest plane: every part that is decoded at once has so many coordinates."""
    return plane_bytes(min(plane_widths(bits)), dim)


def byte_run(rows: int) -> int:
    return min(16, rows // 4)


def key_order(bits: int, dim: int) -> torch.Tensor:
    """Coordinate of each position of the dot product over a key: int64 [dim], part after part.

    A part holds the codes that one output register gets from a word: of the low or of the high half of the four bytes,
    both nibbles of each byte (4 and 2 bits: of one shift of the word).
    """
    if bits == 8:
        return torch.arange(dim)
    rows, parts = code_rows(bits, dim), []
    byte = torch.arange(rows)
    for shift in word_shifts(bits):
        for half in (0, 1):
            source = byte // WORD * WORD + half * 2 + byte % WORD // 2
            parts.append(_coordinate(bits, dim, source, byte % 2, shift))
    return torch.cat(parts)


def value_order(bits: int, dim: int) -> torch.Tensor:
    """Coordinate of each row of a decoded value tile: int64 [dim], part after part."""
    rows = code_rows(bits, dim)
    byte = torch.arange(rows)
    shifts = word_shifts(bits)
    return torch.cat([_coordinate(bits, dim, byte, nibble, shift) for shift in shifts for nibble in (0, 1)])


def word_shifts(bits: int) -> range:
    """Shifts of a word, in codes of the finest plane, in the order in which the decoders take them."""
    return range({4: 1, 2: 2, 3: 4}[bits])


def _coordinate(bits: int, dim: int, byte: torch.Tensor, nibble: torch.Tensor | int, shift: int) -> torch.Tensor:
    """Coordinate of the code at (byte, nibble) after the word was shifted by `shift` codes of the finest plane."""
    rows = code_rows(bits, dim)
    per_nibble = dim // rows // 2  # codes of the finest plane in half a byte
    return byte + rows * (shift + per_nibble * nibble)
