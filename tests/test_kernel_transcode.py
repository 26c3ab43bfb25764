"""Decoding of pages to dense rows against the store's own, in Triton's interpreter where there is no device."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import make_rotary, normal
from test_kernel_history import CODECS, DEVICE, make_codec

from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.kernels.launch import Operands
from turboquant.kernels.transcode import decode_rows, num_spans, plan_lift, span_operands
from turboquant.quantizer import GroupQuantizer, TurboQuantProd
from turboquant.rotation import qjl_matrix
from turboquant.store import CompressedBlockStore

HEADS, BLOCKS = 2, 6
TOLERANCE = 1e-5  # float32 sums of d terms in another order


def make_store(codec, block_size=16):
    """Pages of 0xFF with 37 written slots, and the written slots in random order, some of them twice."""
    pages = torch.full((BLOCKS, HEADS, codec.page_format(block_size).page_bytes), 0xFF, dtype=torch.uint8)
    store = CompressedBlockStore(codec, BLOCKS, HEADS, block_size, pages=pages.to(DEVICE))
    generator = torch.Generator().manual_seed(4)
    written = torch.randperm(BLOCKS * block_size, generator=generator)[:37].to(DEVICE)
    dim = codec.key.dim
    store.write(written, *(normal(37, HEADS, dim, seed=s).to(DEVICE) for s in (1, 2)))
    slots = written[torch.randint(37, (45,), generator=generator).to(DEVICE)]
    assert len(slots.unique()) < len(slots)
    return store, slots


def read_rotated(store, slots):
    """Rows [N, H_kv, d] in the codec's bases."""
    blocks, local = slots // store.block_size, slots % store.block_size
    rows = torch.arange(len(slots), device=slots.device)
    return tuple(x[rows, :, local] for x in store.read(blocks[:, None]))


def assert_close(found, expected, tolerance=TOLERANCE):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        error = (a.float() - b).norm(dim=-1) / b.norm(dim=-1)
        assert (error <= tolerance).all(), error.max()


def within_one_rounding(found, expected):
    """bfloat16 rows and the float32 ones, which have float32 noise of their own; Triton's interpreter truncates."""
    step = expected.abs() * 2**-7 + expected.norm(dim=-1, keepdim=True) * 1e-6
    return ((found.float() - expected).abs() <= step).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("dim", "count"), [(64, 45), (80, 20)])
def test_rows_of_every_codec(name, dim, count):
    store, slots = make_store(make_codec(HEADS, dim, CODECS[name]), 24)
    slots = slots[:count]
    assert_close(decode_rows(store, slots, torch.float32, rotated=False), store.read_slots(slots))
    rotated = decode_rows(store, slots, torch.float32, rotated=True)
    assert_close(rotated, read_rotated(store, slots), 1e-6)


@pytest.mark.parametrize(
    ("name", "dim"),
    [*(("k3v3", dim) for dim in (96, 112, 128, 192, 256, 576)), ("prod3-group3", 128), ("prod3-group3", 192)],
)
def test_head_sizes(name, dim):
    store, slots = make_store(make_codec(HEADS, dim, CODECS[name]))
    assert_close(decode_rows(store, slots[:9], torch.float32, rotated=False), store.read_slots(slots[:9]))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (40, 130), (31, 33), (500, 900), (0, 1200)])
def test_lift(dim, turns, first, last):
    """One span, several, some behind the table's end, and more than a program takes."""
    rotary = make_rotary(dim, 640) if turns else None
    transform = KeyTransform(normal(HEADS, dim, seed=5), normal(HEADS, dim, seed=6).exp(), rotary)
    codec = KVCodec.build(TurboQuantConfig(), 1, HEADS, dim, transform, DEVICE)
    operands = Operands(span_operands(CompressedBlockStore(codec, 1, HEADS, 16, DEVICE), True))
    out = torch.empty(num_spans(codec, first, last), HEADS, dim, device=DEVICE)
    plan_lift(codec, first, last)(operands.joined(lift=out))
    assert_close([out], [codec.lift(first, last)])


@pytest.mark.parametrize("name", ["k8v4", "k4v4", "prod4-group4"])
@pytest.mark.parametrize("rotated", [False, True])
def test_bfloat16_rows_are_rounded_once(name, rotated):
    store, slots = make_store(make_codec(HEADS, 64, CODECS[name]))
    expected = read_rotated(store, slots) if rotated else store.read_slots(slots)
    for a, b in zip(decode_rows(store, slots, torch.bfloat16, rotated=rotated), expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert within_one_rounding(a, b)


def test_every_fp8_code_decodes_as_in_torch():
    """NaN codes, too; a scale of 1 in every token."""
    codec = make_codec(1, 128, CODECS["k8v4"])
    store = CompressedBlockStore(codec, 2, 1, 16, DEVICE)
    (codes,), (scalars,) = (store.format.group(f"key_{part}") for part in ("codes", "scalars"))
    table = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128)
    store.format.view(store.pages, codes)[0, 0, :2] = table
    store.format.view(store.pages, scalars)[0, 0, :2] = torch.tensor([0x80, 0x3F], dtype=torch.uint8, device=DEVICE)
    keys, _ = decode_rows(store, torch.tensor([0, 1], device=DEVICE), torch.float32, rotated=True)
    assert torch.equal(keys[:, 0].isnan(), table.view(torch.float8_e4m3fn).float().isnan())
    assert torch.equal(keys[:, 0].nan_to_num(), table.view(torch.float8_e4m3fn).float().nan_to_num())


def test_codecs_of_swapped_sides():
    """No configuration offers grouped keys and sketched values."""
    codec = make_codec(HEADS, 64, {})
    value = TurboQuantProd(64, 3, codec.value.rotation, qjl_matrix(64, 1)).to(DEVICE)
    store, slots = make_store(KVCodec(GroupQuantizer(64, 4).to(DEVICE), value, codec.transform))
    assert_close(decode_rows(store, slots, torch.float32, rotated=False), store.read_slots(slots))


@pytest.mark.parametrize("rotated", [False, True])
def test_slots_of_padding_give_zeros(rotated):
    store, slots = make_store(make_codec(HEADS, 64, CODECS["prod3-group3"]))
    padded = torch.where(torch.arange(len(slots), device=DEVICE) % 3 == 0, -1, slots)
    expected = decode_rows(store, slots, torch.float32, rotated=rotated)
    for a, b in zip(decode_rows(store, padded, torch.float32, rotated=rotated), expected, strict=True):
        assert (a[::3] == 0).all()
        assert torch.equal(a[padded >= 0], b[padded >= 0])


def test_output_may_be_given():
    """Both sides of one interleaved buffer, and nothing beside them changes."""
    store, slots = make_store(make_codec(HEADS, 80, CODECS["k4v4"]))
    buffer = torch.full((len(slots) + 1, HEADS, 2, 88), 7.0, device=DEVICE)
    out = buffer[:-1, :, 0, :80], buffer[:-1, :, 1, :80]
    expected = decode_rows(store, slots, torch.float32, rotated=False)
    found = decode_rows(store, slots, torch.float32, rotated=False, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (buffer[-1] == 7).all() and (buffer[..., 80:] == 7).all()


def test_output_of_another_shape_or_dtype_is_refused():
    store, slots = make_store(make_codec(HEADS, 64, CODECS["k4v4"]))
    rows = torch.empty(len(slots), HEADS, 64, device=DEVICE)
    for wrong in (rows[1:], rows.half(), rows.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]):
        with pytest.raises(ValueError, match="out must be"):
            decode_rows(store, slots, torch.float32, rotated=True, out=(rows, wrong))


def test_no_slots():
    store, slots = make_store(make_codec(HEADS, 64, CODECS["k4v4"]))
    keys, values = decode_rows(store, slots[:0], torch.bfloat16, rotated=False)
    assert keys.shape == values.shape == (0, HEADS, 64)
