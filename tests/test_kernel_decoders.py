"""The decoders' PTX, executed instruction by instruction, and the coordinate orders that go with it."""

import re

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from turboquant import codebook
from turboquant.kernels import decoders, tiles
from turboquant.packing import pack

MASK = 0xFFFFFFFF


def prmt(a, b, selector):
    """PTX's byte permute in its default mode: bit 3 of a selector replicates the sign of the byte."""
    data, result = a | b << 32, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * i
    return result


def lop3(a, b, c, table):
    bits = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32)]
    return sum((table >> index & 1) << i for i, index in enumerate(bits))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & MASK,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def execute(assembly, operands):
    """Registers after the assembly; operands: values of $n by name."""
    registers = dict(operands)
    for line in re.sub(r"\.reg[^;]*;", "", assembly.strip("{}")).split(";"):
        if line.strip():
            name, rest = line.strip().split(" ", 1)
            target, *sources = (part.strip() for part in rest.split(","))
            values = [registers[s] if s in registers else int(s, 0) for s in sources]
            registers[target] = OPERATIONS[name](*values)
    return registers


def word(plane, start):
    return int.from_bytes(bytes(plane[start : start + 4].tolist()), "little")


def words_at(planes, bits, rows, start):
    """What a lane holds for bytes start to start + 3 of the finest plane: its words, finest plane first."""
    if bits == 3:
        coarse, fine = planes
        return [word(fine, start), word(coarse, start), word(coarse, start + rows)]
    return [word(planes[0], start)]


def outputs(decoder, bits, words):
    """Output registers of one execution, in order."""
    assembly, constraints = decoder(bits)
    count = constraints.split(",").count("=r")
    levels = codebook.load(128, bits).grid.levels
    values = [*words, *(v for v in (*decoders.table_words(levels), decoders.BF16_128) for _ in range(4))]
    assert len(values) == constraints.split(",").count("r")
    registers = execute(assembly, {f"${count + i}": value for i, value in enumerate(values)})
    return [registers[f"${i}"] for i in range(count)]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_come_out_in_key_order(bits, dim):
    codes = torch.randint(0, 2**bits, (dim,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    rows, order = tiles.code_rows(bits, dim), tiles.key_order(bits, dim)
    found = torch.full((dim,), -1)
    for start in range(0, rows, 4):
        for part, register in enumerate(
            outputs(decoders.key_decoder, bits, words_at(pack(codes, bits), bits, rows, start))
        ):
            for byte in range(4):
                found[part * rows + start + byte] = register >> 8 * byte & 255
    levels = torch.tensor(codebook.load(128, bits).grid.levels)
    assert torch.equal(found, levels[codes.long()][order])
    assert torch.equal(order.sort().values, torch.arange(dim))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_come_out_in_value_order(bits):
    """A value word holds four tokens of one byte row; a part is bfloat16 128 + level of one coordinate."""
    dim, tokens = 128, 4
    codes = torch.randint(0, 2**bits, (tokens, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    rows, order = tiles.code_rows(bits, dim), tiles.value_order(bits, dim)
    planes = [plane.T.contiguous() for plane in pack(codes, bits)]  # [byte, token]
    levels = torch.tensor(codebook.load(128, bits).grid.levels)
    for row in (0, 1, rows - 1):
        if bits == 3:
            words = [word(planes[1][row], 0), word(planes[0][row], 0), word(planes[0][row + rows], 0)]
        else:
            words = [word(planes[0][row], 0)]
        registers = outputs(decoders.value_decoder, bits, words)
        for part in range(dim // rows):
            halves = [registers[2 * part + t // 2] >> 16 * (t % 2) & 0xFFFF for t in range(tokens)]
            values = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
            assert torch.equal(values, 128 + levels[codes[:, order[part * rows + row]].long()].float())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", codebook.SHIPPED_DIMS)
def test_grid_is_symmetric_and_close(bits, dim):
    book = codebook.load(dim, bits)
    levels = torch.tensor(book.grid.levels)
    assert levels.min() >= 0 and levels.max() < codebook.GRID_LEVELS and (levels.diff() > 0).all()
    assert torch.equal(levels + levels.flip(0), torch.full_like(levels, codebook.GRID_LEVELS - 1))
    assert max(abs(a - b) for a, b in zip(book.grid.centroids, book.centroids, strict=True)) < 0.02


def test_constants_can_be_written_as_json():
    """Engines install launch hooks that write the constants of every Triton kernel as JSON."""
    import json

    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KVCodec
    from turboquant.config import TurboQuantConfig
    from turboquant.kernels import decode, encode, pages

    codec = KVCodec.build(TurboQuantConfig(), 0, 2, 128)
    layer = KVCaptureEngine(4, 16, 8, 4).add_layer("layer", codec, 2, torch.bfloat16)
    sides = [pages.page_side(layer.store.format, name, q) for name, q in (("key", codec.key), ("value", codec.value))]
    assert sides[0] != sides[1] and sides[1].dimension_major
    written = encode.store_sides(layer.store)
    assert json.dumps([decode.kernel_constants(layer), written.key, written.value, *sides])
