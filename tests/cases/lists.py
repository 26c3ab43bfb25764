"""The oracle of the cases: beside one layer's cache, the plain list of rows that every request was given.

Expected outputs are float64 softmax attention over those lists, before any quantisation; nothing of the codec, the
pages, the ring or the scorer takes part in them.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers import PLANE_WIDTHS, Request, attention, build_codec, cosine, normal, plain_step, rel_l2, rng

from turboquant.capture import KVCaptureEngine
from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.score import HybridScorer

# fp8 keys and 8-bit values between minimum and maximum: there are rows that they hold exactly.
FINE = {"key_bits": 8, "value_quantizer": "group", "value_bits": 8}


@dataclass(frozen=True)
class Gate:
    """Largest relative L2 error and least cosine, of any row and head."""

    error: float
    cosine: float


EXACT = Gate(1e-4, 1 - 1e-7)  # nothing but the rounding of float32
# Gaussian rows in 3 or 4 bits: the worst has 0.39 and 0.92; one that lost its prefix has 1 and 0.3.
CODED = Gate(0.5, 0.9)


def exact_keys(count, heads, dim, seed):
    """Rows float32 [count, heads, dim] that fp8 codes with a scale of 1/64 hold exactly."""
    keys = (64 * normal(count, heads, dim, seed=seed)).to(torch.float8_e4m3fn).float() / 64
    keys[torch.arange(count), :, torch.arange(count) % dim] = 448 / 64
    return keys


def exact_values(count, heads, dim, seed):
    """Rows float32 [count, heads, dim] that 8-bit codes with a step of 1/64 hold exactly, whatever the group."""
    values = torch.from_numpy(rng(seed).integers(-128, 128, (count, heads, dim)).astype(np.float32))
    values[..., ::8], values[..., 1::8] = -128, 127
    return values / 64


def assert_close(found, expected, gate):
    errors, cosines = rel_l2(found, expected), cosine(found, expected)
    assert torch.isfinite(found).all()
    assert errors.max() <= gate.error, f"relative error {errors.max():.3f} is above {gate.error}"
    assert cosines.min() >= gate.cosine, f"cosine {cosines.min():.4f} is below {gate.cosine}"


class Lists:
    """A layer's cache in a poisoned pool, and the rows [n, H_kv, d] of all tokens that it was given.

    kernels: write and read with the portable Triton kernels instead of torch.
    """

    def __init__(
        self, *, heads=1, group=2, dim=64, block_size=16, num_blocks=96, window=0, sinks=0, capacity=None, sliding=0,
        softcap=0.0, gain=1.0, kernels=False, fill=0xFF, transform=None, pages=None, **options,
    ):  # fmt: skip
        codec = build_codec(heads, dim, **(options or FINE))
        if transform is not None:
            codec = KVCodec.build(TurboQuantConfig(**(options or FINE)), 0, heads, dim, transform)
        self.heads, self.group, self.dim, self.block_size = heads, group, dim, block_size
        self.is_exact, self.gate = not options, CODED if options else EXACT
        capacity = num_blocks if capacity is None else capacity
        self.engine = KVCaptureEngine(num_blocks, block_size, window, capacity, sinks=sinks)
        self.layer = self.engine.add_layer("layer", codec, heads, torch.float32)
        if pages is not None:
            self.layer.store.pages = pages(self.layer.store.pages.shape)
        self.layer.store.pages.fill_(fill)
        self.scorer = HybridScorer(gain / math.sqrt(dim), sliding, softcap, history_kernel() if kernels else None)
        self.layer.encode = encode_kernel() if kernels else None
        self.free = rng(num_blocks).permutation(np.arange(1, num_blocks)).tolist()
        self.keys = torch.zeros(0, heads, dim)
        self.values = self.keys.clone()
        self.read_compressed = self.read_exact = 0

    def request(self, tokens, blocks=None):
        """A request with scattered blocks for so many tokens; block 0 is nobody's, as in vLLM."""
        return Request(0, blocks=blocks or [self.free.pop() for _ in range(-(-tokens // self.block_size))])

    def prefilled(self, length, room=32):
        """A request with so many cached tokens, computed by torch, which is quicker than an interpreted kernel."""
        request = self.request(length + room)
        if length:
            encode, scorer = self.layer.encode, self.scorer
            self.layer.encode, self.scorer = None, replace(scorer, history=None)
            self.run({request: length})
            self.layer.encode, self.scorer = encode, scorer
        return request

    def random_rows(self, count, seed=None):
        """Query, keys, values; such as the codes hold exactly unless the codec was named."""
        seed = 3 * (len(self.keys) if seed is None else seed)
        query = normal(count, self.heads * self.group, self.dim, seed=seed)
        make_keys, make_values = (exact_keys, exact_values) if self.is_exact else (normal, normal)
        shape = count, self.heads, self.dim
        return query, make_keys(*shape, seed=seed + 1), make_values(*shape, seed=seed + 2)

    def run(self, news, rows=None, check=True):
        """A step of {request: new tokens}, appended to the lists; returns outputs [T, H_q, d], after comparing them."""
        return self.run_step(plain_step(self.parts(news), self.block_size, len(self.keys)), rows, check)

    def parts(self, news):
        return [(request, len(request.rows), new) for request, new in news.items()]

    def run_step(self, step, rows=None, check=True):
        """The same for a step of helpers.Scheduler; padding rows stay unwritten."""
        rows = rows or self.random_rows(len(step.slots))
        output = self.compute(step, rows)
        self.keys, self.values = torch.cat([self.keys, rows[1]]), torch.cat([self.values, rows[2]])
        count, expected = 0, self.expected(step, rows[0])
        for request, history, new in step.parts:
            request.rows = [*request.rows[:history], *range(step.first_row + count, step.first_row + count + new)]
            count += new
        assert output[count:].isnan().all(), "a padding row was written"
        if check:
            assert_close(output[:count], expected, self.gate)
        return output[:count]

    def compute(self, step, rows, batch=None):
        """Outputs of a step, whose tokens are written first; rows: query, keys, values."""
        query, *own = rows
        plan = self.engine.begin_step(batch or step.batch)
        self.engine.ingest(self.layer, *own, step.slots)
        output = torch.full_like(query, torch.nan)
        self.scorer.attend(self.layer, plan, query, own, output)
        exact = int(plan.window.present.sum())
        self.read_exact += exact
        self.read_compressed += sum(history for _, history, _ in step.parts) - exact
        return output

    def expected(self, step, query):
        """Attention over the lists, where the step's own rows are in them."""
        outputs, row = [], 0
        for request, history, new in step.parts:
            ids = [*request.rows[:history], *range(step.first_row + row, step.first_row + row + new)]
            outputs.append(self.plain(query[row : row + new], ids, history))
            row += new
        return torch.cat(outputs)

    def plain(self, query, ids, first):
        options = {"window": self.scorer.window, "softcap": self.scorer.softcap}
        return attention(query, self.keys[ids], self.values[ids], first, self.scorer.scale, **options)

    @property
    def is_smaller_than_bfloat16(self):
        return self.layer.store.nbytes < self.layer.store.num_blocks * self.block_size * self.heads * self.dim * 4

    def assert_compressed(self, at_least=1):
        """The compressed path ran: so many token reads, from pages smaller than bfloat16."""
        assert self.read_compressed >= at_least and self.is_smaller_than_bfloat16


def history_kernel():
    from turboquant.kernels.history import history_kernel

    return history_kernel


def encode_kernel():
    from turboquant.kernels.encode import encode

    return encode


# ---- bytes -----------------------------------------------------------------------------------------------------
def unpacked(planes, bits, dim):
    """Bytes [..., d*w/8] of each plane -> codes [..., d].

    Byte j holds coordinates j, j+n, j+2n, ... from its low bits up; the first plane has the lowest bits.
    """
    codes, shift = np.zeros((*planes[0].shape[:-1], dim), dtype=np.int64), 0
    for plane, width in zip(planes, PLANE_WIDTHS[bits], strict=True):
        n = dim * width // 8
        for coordinate in range(dim):
            byte = plane[..., coordinate % n].astype(np.int64)
            codes[..., coordinate] |= (byte >> (coordinate // n * width) & (2**width - 1)) << shift
        shift += width
    return codes


def bfloat16_numbers(raw):
    """Bytes [..., 2n] -> float64 [..., n]; bfloat16 is the upper half of a float32."""
    halves = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16
    return halves.view(np.float32).astype(np.float64)


def page_planes(page, codec, block_size):
    """One page's bytes -> {"key" or "value": (planes [token, byte], scalars float64 [token, n])}."""
    offset, parts = 0, []
    for side in (codec.key, codec.value):
        parts += [side.dim * width // 8 for width in PLANE_WIDTHS[side.bits]]
    parts += [2 * codec.key.num_scalars, 2 * codec.value.num_scalars]
    planes = []
    for size in parts:
        planes.append(page[offset : offset + size * block_size])
        offset += -(-size * block_size // 16) * 16
    keys, values = len(PLANE_WIDTHS[codec.key.bits]), len(PLANE_WIDTHS[codec.value.bits])
    key_planes = [plane.reshape(block_size, -1) for plane in planes[:keys]]
    value_planes = [plane.reshape(-1, block_size).T for plane in planes[keys : keys + values]]
    key_scalars, value_scalars = (bfloat16_numbers(plane.reshape(block_size, -1)) for plane in planes[-2:])
    return {"key": (key_planes, key_scalars), "value": (value_planes, value_scalars)}


def decoded_page(page, codec, block_size):
    """Keys and values float64 [token, d] of one page of a Lloyd-Max codec, in the original basis."""
    rows, parts = [], page_planes(np.asarray(page), codec, block_size)
    for name, side in (("key", codec.key), ("value", codec.value)):
        planes, scalars = parts[name]
        words = np.asarray(side.centroids, dtype=np.float64)[unpacked(planes, side.bits, side.dim)]
        rows.append(torch.from_numpy(words * scalars[:, :1] @ side.rotation.matrix.double().numpy()))
    return rows
