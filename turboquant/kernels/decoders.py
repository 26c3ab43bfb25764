"""PTX that turns a word of packed codes into operands of the tensor cores.

A lookup of 4 codes is one `prmt` (byte permute): the codes are its selectors, the table its 8 bytes.  Bit 3 of a
selector asks for the sign of the byte, so with tables below 128 a 16-entry lookup is two permutes, of which the one
that is not meant gives 0: prmt(T0 T1, x) | prmt(T2 T3, x ^ 8).  What comes out is an integer level of the codebook's
grid (`turboquant.codebook.Grid`), 0 to 127: an int8 operand as it is, and below the byte 0x43 the bfloat16 number
128 + level.

Every assembly op is elementwise: element j of an output is made of element j of the inputs alone.
"""

from collections.abc import Callable

from turboquant.kernels.tiles import word_shifts

TABLE_WORDS = {2: 1, 3: 2, 4: 4}
BF16_128 = 0x43434343


def table_words(levels: tuple[int, ...]) -> list[int]:
    """Levels (4, 8 or 16) as little-endian words below 2^31."""
    groups = [levels[start : start + 4] for start in range(0, len(levels), 4)]
    return [sum(level << 8 * i for i, level in enumerate(group)) for group in groups]


def _selectors(bits: int, shift: int, words: list[str]) -> str:
    """The 8 selectors of a shift into register x.  words: PTX names of the code words, finest plane first."""
    if bits == 4:
        return f"mov.b32 x, {words[0]};"
    if bits == 2:
        return f"shr.u32 x, {words[0]}, {2 * shift}; and.b32 x, x, 0x33333333;"
    fine, coarse = words[0], words[1 + shift % 2]
    move = f"shl.b32 y, {fine}, {2 - shift};" if shift < 2 else f"shr.u32 y, {fine}, {shift - 2};"
    return (
        f"{move} and.b32 y, y, 0x44444444; shr.u32 x, {coarse}, {shift // 2 * 2}; lop3.b32 x, x, 0x33333333, y, 0xea;"
    )


def _lookup(bits: int, tables: list[str]) -> str:
    """Levels of the 8 selectors in x into registers a (low half) and b (high half)."""
    if bits == 4:
        return (
            "xor.b32 y, x, 0x88888888; shr.u32 xh, x, 16; shr.u32 yh, y, 16;"
            f"prmt.b32 a, {tables[0]}, {tables[1]}, x; prmt.b32 b, {tables[0]}, {tables[1]}, xh;"
            f"prmt.b32 c, {tables[2]}, {tables[3]}, y; prmt.b32 d, {tables[2]}, {tables[3]}, yh;"
            "or.b32 a, a, c; or.b32 b, b, d;"
        )
    pair = f"{tables[0]}, {tables[-1]}"
    return f"shr.u32 xh, x, 16; prmt.b32 a, {pair}, x; prmt.b32 b, {pair}, xh;"


def _operands(outputs: int, bits: int) -> tuple[list[str], list[str], str]:
    """PTX names of the words and of the constants (table words, BF16_128; 4 operands each), and the constraints."""
    words, constants = 3 if bits == 3 else 1, TABLE_WORDS[bits] + 1
    names = [f"${outputs + i}" for i in range(words)]
    fixed = [f"${outputs + words + 4 * i}" for i in range(constants)]
    return names, fixed, ",".join(["=r"] * outputs + ["r"] * (words + 4 * constants))


REGISTERS = ".reg .b32 x, y, xh, yh, a, b, c, d;"


def _decoder(bits: int, outputs: int, emit: Callable[[int, str], str]) -> tuple[str, str]:
    """(assembly, constraints) of `outputs` registers a shift.

    emit: from the number of a shift's first output and the name of BF16_128, what is made of levels in a and b.
    """
    shifts = word_shifts(bits)
    words, (*tables, high), constraints = _operands(outputs * len(shifts), bits)
    body = (_selectors(bits, s, words) + _lookup(bits, tables) + emit(outputs * s, high) for s in shifts)
    return "{" + REGISTERS + "".join(body) + "}", constraints


def key_decoder(bits: int) -> tuple[str, str]:
    """(assembly, constraints): words and constants -> int8 levels, for each shift low and high half of the word."""
    return _decoder(bits, 2, lambda first, _: f"mov.b32 ${first}, a; mov.b32 ${first + 1}, b;")


def value_decoder(bits: int) -> tuple[str, str]:
    """(assembly, constraints): words and constants -> bfloat16 128 + level, for each shift low and high nibble."""

    def emit(first: int, high: str) -> str:
        picks = [(register, selector) for selector in ("0x4240", "0x4341") for register in "ab"]
        return "".join(f"prmt.b32 ${first + i}, {r}, {high}, {pick};" for i, (r, pick) in enumerate(picks))

    return _decoder(bits, 4, emit)


FP8_DECODER = (
    "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}",
    "=r,=r,r",
)
TRANSPOSE = ("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")
