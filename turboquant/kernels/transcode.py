"""Compressed pages to dense rows in plain Triton, for attention kernels that read nothing else.

The twins are `CompressedBlockStore.read` (rotated rows), `CompressedBlockStore.read_slots` (original basis) and
`KVCodec.lift`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from turboquant.codec import KVCodec
from turboquant.kernels.launch import Launch, Operand, Operands, power_of_2
from turboquant.kernels.pages import code_table, load_codes, load_rows, load_scalar, page_sides, sketch_signs
from turboquant.quantizer import Quantizer, TurboQuantProd
from turboquant.rotary import SPAN
from turboquant.rotation import batch_invariant_matmul
from turboquant.store import CompressedBlockStore

Rows = tuple[torch.Tensor, torch.Tensor]
SPAN_TOKENS = tl.constexpr(SPAN)


@triton.jit
def _mapped(pages, scalars, table, matrix, base, local, seen, SIDE: tl.constexpr, SIGNS: tl.constexpr, D: tl.constexpr,
            BS: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Rows (or only the signs) of the tokens times matrix [D, D]: float32 [T, DIMS].

    A few coordinates at a time: a whole matrix of head size 256 exceeds shared memory.
    """
    column = tl.arange(0, DIMS)
    acc = tl.zeros([T, DIMS], tl.float32)
    for first in range(0, D, CHUNK):
        coordinate = first + tl.arange(0, CHUNK)
        if SIGNS:
            mask = seen[:, None] & (coordinate < D)[None, :]
            rows = sketch_signs(load_codes(pages, base, local, coordinate, mask, SIDE, D, BS), SIDE)
        else:
            rows = load_rows(pages, scalars, table, base, local, coordinate, seen, SIDE, D, BS)
        inside = (coordinate < D)[:, None] & (column < D)[None, :]
        weights = tl.load(matrix + coordinate[:, None] * D + column[None, :], mask=inside, other=0.0)
        acc += tl.dot(rows, weights, input_precision="ieee")
    return acc


@triton.jit
def turned_centers(center, wide, line, span, coordinate, HEADS_D: tl.constexpr, D: tl.constexpr):
    """Centres float32 [T, DIMS] of the spans [T]; center: `KVCodec.center`, line: where a head's begins."""
    inside = coordinate < D
    cosine = wide + span.to(tl.int64)[:, None] * (2 * D) + coordinate[None, :]
    own = tl.load(center + line + coordinate, mask=inside, other=0.0)
    quarter = tl.load(center + HEADS_D + line + coordinate, mask=inside, other=0.0)
    turned = tl.load(cosine, mask=inside[None, :], other=0.0).to(tl.float32) * own[None, :]
    return turned + tl.load(cosine + D, mask=inside[None, :], other=0.0).to(tl.float32) * quarter[None, :]


@triton.jit(do_not_specialize=["start", "count"])
def _lift_kernel(
    center, wide, gain, rotation, out, start, count, H: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    CHUNK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Centres of the spans start, start + 1, ... in the basis of decoded keys: out float32 [count, H, D]."""
    head, row, column = tl.program_id(1), tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, DIMS)
    span = start + tl.minimum(row, count - 1)
    acc = tl.zeros([T, DIMS], tl.float32)
    for first in range(0, D, CHUNK):
        coordinate = first + tl.arange(0, CHUNK)
        rows = turned_centers(center, wide, head * D, span, coordinate, H * D, D)
        rows *= tl.load(gain + head * D + coordinate, mask=coordinate < D, other=0.0)[None, :]
        inside = (coordinate < D)[:, None] & (column < D)[None, :]
        weights = tl.load(rotation + column[None, :] * D + coordinate[:, None], mask=inside, other=0.0)
        acc += tl.dot(rows, weights, input_precision="ieee")
    address = (row * H + head)[:, None] * D + column[None, :]
    tl.store(out + address, acc, mask=(row < count)[:, None] & (column < D)[None, :])


def num_spans(codec: KVCodec, first: int, last: int) -> int:
    """Spans of one centre each that hold the tokens [first, last)."""
    start, stop = codec.rotary.span_range(first, last)
    return stop - start


def plan_lift(codec: KVCodec, first: int, last: int) -> Launch:
    """`KVCodec.lift` into "lift" float32 [`num_spans`, H_kv, d], on `span_operands`."""
    start, stop = codec.rotary.span_range(first, last)
    heads, dim = codec.transform.center.shape
    constants = {"H": heads, "D": dim, "DIMS": power_of_2(dim), "CHUNK": 16, "T": 16}
    return Launch(
        _lift_kernel, (-(-(stop - start) // 16), heads), ("center", "wide", "gain", "key_rotation", "lift"),
        (start, stop - start), constants, num_stages=1,
    )  # fmt: skip


@triton.jit
def _decode_side(
    places, pages, scalars, table, rotation, sketch, gain, center, wide, lift, out, first, count, spans, page_stride,
    head_stride, out_stride, out_head_stride, SPAN: tl.constexpr, SIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BS: tl.constexpr, ROTATE: tl.constexpr, AFFINE: tl.constexpr, LIFT: tl.constexpr, DIMS: tl.constexpr,
    CHUNK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    head, token, coordinate = tl.program_id(1), tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, DIMS)
    if SPAN:
        seen, local = token < count, (first + token) % BS
        block = tl.load(places + (first + token) // BS, mask=seen, other=0).to(tl.int64)
    else:
        slot = tl.load(places + token, mask=token < count, other=-1).to(tl.int64)
        seen, block, local = slot >= 0, slot // BS, slot % BS
    last = spans - 1
    span = tl.minimum((first + token) // SPAN_TOKENS, last) if SPAN else token * 0
    base = block * page_stride + head * head_stride
    if ROTATE:
        rows = _mapped(pages, scalars, table, rotation, base, local, seen, SIDE, False, D, BS, DIMS, CHUNK, T)
    else:
        rows = load_rows(pages, scalars, table, base, local, coordinate, seen, SIDE, D, BS)
    if SIDE.decoder == "sketch":
        signs = _mapped(pages, scalars, table, sketch, base, local, seen, SIDE, True, D, BS, DIMS, CHUNK, T)
        rows += signs * load_scalar(scalars, base, local, 1, seen, SIDE)[:, None]
    if AFFINE:
        own = head * D + coordinate
        rows = rows / tl.load(gain + own, mask=coordinate < D, other=1.0)[None, :]
        rows = tl.where(seen[:, None], rows + turned_centers(center, wide, head * D, span, coordinate, H * D, D), 0.0)
    if LIFT:
        line = (span - tl.minimum(first // SPAN_TOKENS, last)) * H * D + head * D
        rows += tl.load(lift + line[:, None] + coordinate[None, :], mask=seen[:, None] & (coordinate < D)[None, :],
                        other=0.0)  # fmt: skip
    address = token.to(tl.int64)[:, None] * out_stride + head * out_head_stride + coordinate[None, :]
    tl.store(out + address, rows.to(out.dtype.element_ty), mask=(token < count)[:, None] & (coordinate < D)[None, :])


@triton.jit(do_not_specialize=["first", "count", "spans"], do_not_specialize_on_alignment=["places"])
def _decode_kernel(
    places, pages, scalars, key_table, key_rotation, key_sketch, value_table, value_rotation, value_sketch, gain,
    center, wide, lift, keys, values, first, count, spans, page_stride, head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, SPAN: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BS: tl.constexpr, ROTATE_KEYS: tl.constexpr, ROTATE_VALUES: tl.constexpr, AFFINE: tl.constexpr,
    LIFT: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, head, side).

    places: slots of single tokens; for a SPAN of tokens from `first` on, the blocks of their request.
    AFFINE: centres and gains, for keys in the original basis.
    LIFT: add rows of lift float32 [spans from that of `first` on, H, D] to the keys.
    """
    if tl.program_id(2) == 0:
        _decode_side(
            places, pages, scalars, key_table, key_rotation, key_sketch, gain, center, wide, lift, keys, first, count,
            spans, page_stride, head_stride, key_stride, key_head_stride, SPAN, KEY, H, D, BS, ROTATE_KEYS, AFFINE,
            LIFT, DIMS, CHUNK, T,
        )  # fmt: skip
    else:
        _decode_side(
            places, pages, scalars, value_table, value_rotation, value_sketch, gain, center, wide, lift, values,
            first, count, spans, page_stride, head_stride, value_stride, value_head_stride, SPAN, VALUE, H, D, BS,
            ROTATE_VALUES, False, False, DIMS, CHUNK, T,
        )  # fmt: skip


def decode_rows(
    store: CompressedBlockStore, slots: torch.Tensor, dtype: torch.dtype, *, rotated: bool, out: Rows | None = None
) -> Rows:
    """Decode single tokens: int64 [N] -> keys and values `dtype` [N, H_kv, d]; rows of slots below 0 are 0.

    Not for codecs whose centres turn with the position, unless rotated (ValueError).

    rotated: leave both in the codec's bases (`KVCodec.query`, `KVCodec.output`); else rotate and shift them back.
    out: where to write, two tensors of that shape and dtype whose rows are contiguous.
    """
    if not rotated:
        store.codec.centers(None)
    out = _rows(store, len(slots), dtype, slots.device) if out is None else out
    shape = (len(slots), store.num_kv_heads, store.format.head_dim)
    for rows in out:
        if rows.shape != shape or rows.dtype != dtype or rows.stride(-1) != 1:
            raise ValueError(f"out must be {dtype} {shape} with contiguous rows; got {rows.dtype} {tuple(rows.shape)}")
    if len(slots):
        _decode(store, slots.contiguous(), None, out, rotated)
    return out


def decode_span(store: CompressedBlockStore, blocks: torch.Tensor, first: int, last: int, out: Rows) -> None:
    """Decode the tokens [first, last) of a request to the original basis, into out [last - first, H_kv, d] each.

    blocks: its block table, contiguous integers.
    """
    if last > first:
        _decode(store, blocks, first, out, rotated=False)


def _rows(store: CompressedBlockStore, count: int, dtype: torch.dtype, device: torch.device) -> Rows:
    shape = (count, store.num_kv_heads, store.format.head_dim)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def plan_decode(
    store: CompressedBlockStore, places: torch.Tensor, first: int | None, count: int, strides: Sequence[int],
    rotated: bool, lifted: bool = False,
) -> Launch:  # fmt: skip
    """Decode `count` tokens into "keys" and "values" [count, H_kv, d], on `span_operands`.

    places: slots, or with the first token of a span the blocks of its request; strides: of a token's keys, of a head's,
    and the same of the values; lifted: add "lift" (`plan_lift`) to the keys.
    """
    codec, dim, wide = store.codec, store.format.head_dim, store.codec.rotary.wide
    turned = [not rotated and side.rotation.kind != "identity" for side in (codec.key, codec.value)]
    dims = power_of_2(dim)
    sketched = any(isinstance(side, TurboQuantProd) for side in (codec.key, codec.value))
    tokens = 32 if dims * (1 + sketched) <= 256 else 16  # so many rows stay in registers
    sides = page_sides(store)
    constants = {
        "SPAN": first is not None, "KEY": sides[0], "VALUE": sides[1], "H": store.num_kv_heads, "D": dim,
        "BS": store.block_size, "ROTATE_KEYS": turned[0], "ROTATE_VALUES": turned[1], "AFFINE": not rotated,
        "LIFT": lifted, "DIMS": dims, "CHUNK": 16, "T": tokens,
    }  # fmt: skip
    return Launch(
        _decode_kernel, (-(-count // tokens), store.num_kv_heads, 2),
        (places, "pages", "scalars", "key_table", "key_rotation", "key_sketch", "value_table", "value_rotation",
         "value_sketch", "gain", "center", "wide", "lift" if lifted else "wide", "keys", "values"),
        (first or 0, count, wide.shape[0], *store.pages.stride()[:2], *strides),
        constants, num_stages=1,
    )  # fmt: skip


def span_operands(store: CompressedBlockStore, rotated: bool) -> dict[str, Operand]:
    """What `plan_decode` and `plan_lift` need of a store."""
    pages, codec, (key, value) = store.pages, store.codec, (store.codec.key, store.codec.value)
    turned = [not rotated and side.rotation.kind != "identity" for side in (key, value)]
    return {
        "pages": pages, "scalars": pages.view(torch.bfloat16), "key_table": code_table(key, pages.device),
        "key_rotation": key.rotation.matrix, "key_sketch": _sketch_matrix(key, turned[0]),
        "value_table": code_table(value, pages.device), "value_rotation": value.rotation.matrix,
        "value_sketch": _sketch_matrix(value, turned[1]), "gain": codec.transform.gain, "center": codec.center,
        "wide": codec.rotary.wide,
    }  # fmt: skip


def _decode(store: CompressedBlockStore, places: torch.Tensor, first: int | None, out: Rows, rotated: bool) -> None:
    operands = Operands(span_operands(store, rotated)).joined(keys=out[0], values=out[1])
    strides = [stride for rows in out for stride in rows.stride()[:2]]
    plan_decode(store, places, first, out[0].shape[0], strides, rotated)(operands)


def _sketch_matrix(quantizer: Quantizer, rotate: bool) -> torch.Tensor:
    """What signs are multiplied with, float32 [d, d], up to the residual's norm; unused but for Algorithm 2."""
    if not isinstance(quantizer, TurboQuantProd):
        return quantizer.rotation.matrix
    sketch = quantizer.gain * quantizer.sketch
    return batch_invariant_matmul(sketch, quantizer.rotation.matrix) if rotate else sketch
