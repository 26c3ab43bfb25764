"""What every kernel shares that reads compressed pages: a side's layout and tables, and loaders for its rows.

The loaders take tokens as `base` int64 [t] (byte address of the token's page), `local` int [t] (its place in the page)
and a mask, and never touch memory where the mask is False: there a code is 0 and a scalar 0.0.
"""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from turboquant.page import PageFormat
from turboquant.quantizer import FP8Quantizer, GroupQuantizer, Quantizer, TurboQuantMSE, TurboQuantProd
from turboquant.store import CompressedBlockStore


class Side(str):
    """The keys or the values of a page; a compile-time constant of the kernels.

    A string, because launch hooks of engines write the constants of a kernel as JSON.
    decoder: "table" (a scale times a table entry), "sketch" (the same, and the top bit of a code is the sign of a
    sketch) or "group" (a step and a minimum per `group` coordinates).
    first, second: bytes before the code planes; scalars: bf16 numbers before the scalars, `per_token` of them.
    """

    decoder: str
    bits: int
    first: int
    second: int
    dimension_major: bool
    scalars: int
    per_token: int
    group: int

    @classmethod
    def of(cls, **facts: Any) -> "Side":
        side = cls(" ".join(f"{name}={fact}" for name, fact in facts.items()))
        vars(side).update(facts)
        return side

    @property
    def coarse_bits(self) -> int:
        """Bits of a code that look up the table."""
        return self.bits - (self.decoder == "sketch")


def page_side(layout: PageFormat, name: str, quantizer: Quantizer) -> Side:
    """The side `name` ("key" or "value") of pages that `quantizer` wrote."""
    first, *rest = layout.group(f"{name}_codes")
    (scalars,) = layout.group(f"{name}_scalars")
    decoder = {TurboQuantProd: "sketch", GroupQuantizer: "group"}.get(type(quantizer), "table")
    group = quantizer.group if isinstance(quantizer, GroupQuantizer) else layout.head_dim
    second = rest[0].offset if rest else 0
    return Side.of(
        decoder=decoder, bits=quantizer.bits, first=first.offset, second=second, group=group,
        dimension_major=first.dimension_major, scalars=scalars.offset // 2, per_token=quantizer.num_scalars,
    )  # fmt: skip


_sides: WeakKeyDictionary[CompressedBlockStore, tuple[Side, Side]] = WeakKeyDictionary()


def page_sides(store: CompressedBlockStore) -> tuple[Side, Side]:
    """`page_side` of keys and values, made once per store: they take longer than a launch."""
    if store not in _sides:
        codec = store.codec
        _sides[store] = page_side(store.format, "key", codec.key), page_side(store.format, "value", codec.value)
    return _sides[store]


@cache
def fp8_table(device: torch.device) -> torch.Tensor:
    """float32 [256], the value of every float8_e4m3 code; 0x7f and 0xff are NaN."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def code_table(quantizer: Quantizer, device: torch.device) -> torch.Tensor:
    """float32 [2^coarse_bits], what the codes of `quantizer` look up; unused and empty for "group"."""
    if isinstance(quantizer, TurboQuantMSE):
        return quantizer.centroids
    if isinstance(quantizer, TurboQuantProd):
        return quantizer.mse.centroids
    if isinstance(quantizer, FP8Quantizer):
        return fp8_table(device)
    return torch.empty(0, device=device)


@triton.jit
def plane_codes(pages, base, local, coordinate, mask, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
                DIMENSION_MAJOR: tl.constexpr, D: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """One plane's codes int32 [t, coordinates]: byte j of a row holds the coordinates j, j + n, j + 2n, ..."""
    n: tl.constexpr = D * WIDTH // 8
    byte, shift = coordinate % n, coordinate // n * WIDTH
    if DIMENSION_MAJOR:
        address = base[:, None] + OFFSET + byte[None, :] * BS + local[:, None]
    else:
        address = base[:, None] + OFFSET + local[:, None] * n + byte[None, :]
    return (tl.load(pages + address, mask=mask, other=0).to(tl.int32) >> shift[None, :]) & ((1 << WIDTH) - 1)


@triton.jit
def load_codes(pages, base, local, coordinate, mask, SIDE: tl.constexpr, D: tl.constexpr, BS: tl.constexpr):
    """Codes int32 [t, coordinates]; 3 bits are a 2-bit plane and a 1-bit plane."""
    if SIDE.bits == 3:
        low = plane_codes(pages, base, local, coordinate, mask, SIDE.first, 2, SIDE.dimension_major, D, BS)
        high = plane_codes(pages, base, local, coordinate, mask, SIDE.second, 1, SIDE.dimension_major, D, BS)
        codes = low | high << 2
    else:
        codes = plane_codes(pages, base, local, coordinate, mask, SIDE.first, SIDE.bits, SIDE.dimension_major, D, BS)
    return codes


@triton.jit
def load_scalar(scalars, base, local, index, seen, SIDE: tl.constexpr):
    """Scalar `index` of every token, float32 [t]."""
    return tl.load(scalars + base // 2 + SIDE.scalars + local * SIDE.per_token + index, mask=seen, other=0.0).to(
        tl.float32
    )


@triton.jit
def look_up(table, codes, mask, SIDE: tl.constexpr):
    """Table entries float32 [t, coordinates] of the codes without their sign bits, still to be scaled."""
    return tl.load(table + (codes & ((1 << SIDE.coarse_bits) - 1)), mask=mask, other=0.0)


@triton.jit
def sketch_signs(codes, SIDE: tl.constexpr):
    """-1 or 1 float32 [t, coordinates], the top bits of the codes; -1 where nothing was loaded."""
    return ((codes >> SIDE.coarse_bits) * 2 - 1).to(tl.float32)


@triton.jit
def group_rows(scalars, codes, base, local, coordinate, mask, SIDE: tl.constexpr):
    """Codes [t, coordinates] times the step of their group plus its minimum, float32."""
    group = local[:, None] * SIDE.per_token + coordinate[None, :] // SIDE.group
    steps = scalars + base[:, None] // 2 + SIDE.scalars + group
    step = tl.load(steps, mask=mask, other=0.0).to(tl.float32)
    return codes.to(tl.float32) * step + tl.load(steps + SIDE.per_token // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(pages, scalars, table, base, local, coordinate, seen, SIDE: tl.constexpr, D: tl.constexpr,
              BS: tl.constexpr):  # fmt: skip
    """Decoded rows float32 [t, coordinates] without what a sketch adds; 0 outside the mask and beyond D."""
    mask = seen[:, None] & (coordinate < D)[None, :]
    codes = load_codes(pages, base, local, coordinate, mask, SIDE, D, BS)
    if SIDE.decoder == "group":
        rows = group_rows(scalars, codes, base, local, coordinate, mask, SIDE)
    else:
        scale = load_scalar(scalars, base, local, 0, seen, SIDE)
        rows = look_up(table, codes, mask, SIDE) * scale[:, None]
    return rows
