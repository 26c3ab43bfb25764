"""Triton kernels; the only part of the package that imports Triton.

encode      a step's keys and values into pages and ring, one launch a layer
decode      attention of few query rows, fast: NVIDIA, Lloyd-Max and fp8 (query, gluon_decode, merge; tiles, decoders)
history     attention over compressed tokens, portable: any codec, any number of rows
transcode   compressed pages to plain rows
"""

from dataclasses import dataclass
from importlib.util import find_spec

from turboquant.capture import EncodeKernel, ExactRing, LayerCache
from turboquant.score import DecodeKernel, HistoryKernel


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer; None where torch does the work.  reason: why the fast decode is not among them."""

    encode: EncodeKernel | None = None
    history: HistoryKernel | None = None
    decode: DecodeKernel | None = None
    reason: str | None = None


def choose_kernels(layer: LayerCache, ring: ExactRing) -> Kernels:
    """What serves a layer on its device; decided once, at installation."""
    if layer.store.pages.device.type == "cpu":
        return Kernels(reason="the cache is on the CPU")
    if find_spec("triton") is None:
        return Kernels(reason="Triton is not installed")
    from turboquant.kernels import history
    from turboquant.kernels.encode import encode

    fast, reason = choose_decode(layer, ring)
    portable = history.history_kernel if history.serves(layer) else None
    return Kernels(encode, portable, fast, reason)


def choose_decode(layer: LayerCache, ring: ExactRing) -> tuple[DecodeKernel | None, str | None]:
    """The fast decode, or why not."""
    if find_spec("triton.experimental.gluon") is None:
        return None, "this Triton has no Gluon"
    from turboquant.kernels import decode

    if reason := decode.unsupported(layer):
        return None, reason
    return decode.FastDecode(layer, ring), None
