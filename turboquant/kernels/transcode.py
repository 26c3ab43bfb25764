"""Compressed pages to dense rows in plain Triton, for attention kernels that read nothing else.

The twins are `CompressedBlockStore.read` (rotated rows) and `CompressedBlockStore.read_slots` (original basis).
"""

import torch
import triton
import triton.language as tl

from turboquant.kernels.pages import code_table, load_codes, load_rows, load_scalar, page_side, sketch_signs
from turboquant.quantizer import Quantizer, TurboQuantProd
from turboquant.rotation import batch_invariant_matmul
from turboquant.store import CompressedBlockStore

Rows = tuple[torch.Tensor, torch.Tensor]


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


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=["places"])
def _decode_kernel(
    places, pages, scalars, table, rotation, sketch, gain, center, out, first, count, page_stride, head_stride,
    out_stride, out_head_stride, SPAN: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
    ROTATE: tl.constexpr, AFFINE: tl.constexpr, DIMS: tl.constexpr, CHUNK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """places: slots of single tokens; for a SPAN of tokens from `first` on, the blocks of their request."""
    head, token, coordinate = tl.program_id(1), tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, DIMS)
    if SPAN:
        seen, local = token < count, (first + token) % BS
        block = tl.load(places + (first + token) // BS, mask=seen, other=0).to(tl.int64)
    else:
        slot = tl.load(places + token, mask=token < count, other=-1).to(tl.int64)
        seen, block, local = slot >= 0, slot // BS, slot % BS
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
        rows = tl.where(seen[:, None], rows + tl.load(center + own, mask=coordinate < D, other=0.0)[None, :], 0.0)
    address = token.to(tl.int64)[:, None] * out_stride + head * out_head_stride + coordinate[None, :]
    tl.store(out + address, rows.to(out.dtype.element_ty), mask=(token < count)[:, None] & (coordinate < D)[None, :])


def decode_rows(
    store: CompressedBlockStore, slots: torch.Tensor, dtype: torch.dtype, *, rotated: bool, out: Rows | None = None
) -> Rows:
    """Decode single tokens: int64 [N] -> keys and values `dtype` [N, H_kv, d]; rows of slots below 0 are 0.

    rotated: leave both in the codec's bases (`KVCodec.query`, `KVCodec.output`); else rotate and shift them back.
    out: where to write, two tensors of that shape and dtype whose rows are contiguous.
    """
    out = _rows(store, len(slots), dtype, slots.device) if out is None else out
    shape = (len(slots), store.num_kv_heads, store.format.head_dim)
    for rows in out:
        if rows.shape != shape or rows.dtype != dtype or rows.stride(-1) != 1:
            raise ValueError(f"out must be {dtype} {shape} with contiguous rows; got {rows.dtype} {tuple(rows.shape)}")
    if len(slots):
        _decode_sides(store, slots.contiguous(), None, out, rotated)
    return out


def decode_span(
    store: CompressedBlockStore, blocks: torch.Tensor, first: int, last: int, dtype: torch.dtype, *,
    rotated: bool = True, out: Rows | None = None,
) -> Rows:  # fmt: skip
    """Decode the tokens [first, last) of a request; rotated and out as in `decode_rows`.

    blocks: its block table, contiguous integers -> keys and values `dtype` [last - first, H_kv, d].
    """
    out = _rows(store, last - first, dtype, blocks.device) if out is None else out
    if last > first:
        _decode_sides(store, blocks, first, out, rotated)
    return out


def _rows(store: CompressedBlockStore, count: int, dtype: torch.dtype, device: torch.device) -> Rows:
    shape = (count, store.num_kv_heads, store.format.head_dim)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def _decode_sides(
    store: CompressedBlockStore, places: torch.Tensor, first: int | None, out: Rows, rotated: bool
) -> None:
    """places: slots, or with the first token of a span the blocks of its request."""
    _decode_side(store, "key", store.codec.key, places, first, out[0], rotated)
    _decode_side(store, "value", store.codec.value, places, first, out[1], rotated)


def _decode_side(
    store: CompressedBlockStore, name: str, quantizer: Quantizer, places: torch.Tensor, first: int | None,
    out: torch.Tensor, rotated: bool,
) -> None:  # fmt: skip
    """Decode the side `name` ("key" or "value") into out [N, H_kv, d]."""
    pages, transform, rotation = store.pages, store.codec.transform, quantizer.rotation
    rotate = not rotated and rotation.kind != "identity"
    dims = triton.next_power_of_2(quantizer.dim)
    sketched = isinstance(quantizer, TurboQuantProd)
    tokens = 32 if dims * (1 + sketched) <= 256 else 16  # so many rows stay in registers
    _decode_kernel[(triton.cdiv(len(out), tokens), store.num_kv_heads)](
        places, pages, pages.view(torch.bfloat16), code_table(quantizer, pages.device), rotation.matrix,
        _sketch_matrix(quantizer, rotate), transform.gain, transform.center, out, first or 0, len(out),
        pages.stride(0), pages.stride(1), out.stride(0), out.stride(1), SPAN=first is not None,
        SIDE=page_side(store.format, name, quantizer), D=quantizer.dim, BS=store.block_size, ROTATE=rotate,
        AFFINE=name == "key" and not rotated, DIMS=dims, CHUNK=16, T=tokens, num_stages=1,
    )  # fmt: skip


def _sketch_matrix(quantizer: Quantizer, rotate: bool) -> torch.Tensor:
    """What signs are multiplied with, float32 [d, d], up to the residual's norm; unused but for Algorithm 2."""
    if not isinstance(quantizer, TurboQuantProd):
        return quantizer.rotation.matrix
    sketch = quantizer.gain * quantizer.sketch
    return batch_invariant_matmul(sketch, quantizer.rotation.matrix) if rotate else sketch
