"""Triton kernels; the only part of the package that imports Triton.

encode      a step's keys and values into pages and ring, one launch a layer (gluon_encode: many rows on NVIDIA)
decode      attention of few query rows, fast: NVIDIA, Lloyd-Max and fp8 (gluon_decode, gluon_rows; tiles, decoders)
prefill     attention of long chunks on top of a dense kernel, from a small workspace of decoded tokens
history     attention over compressed tokens, portable: any codec, any number of rows
transcode   compressed pages to plain rows (pages: how kernels read them)
ring        the exact ring's plan of a step
launch      how kernels are launched: planned by one layer, repeated by the others (compilation: before they are needed)
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from turboquant.capture import EncodeKernel, ExactRing, LayerCache, PlanKernel, plan_in_torch
from turboquant.score import FusedKernel, HistoryKernel

if TYPE_CHECKING:
    from turboquant.kernels.prefill import DenseAttention


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer; None where torch does the work.  reason: why the fast decode is not among them."""

    encode: EncodeKernel | None = None
    history: HistoryKernel | None = None
    decode: FusedKernel | None = None
    prefill: FusedKernel | None = None
    reason: str | None = None

    @property
    def fused(self) -> tuple[FusedKernel, ...]:
        """Kernels that take whole groups, the most special first."""
        return tuple(kernel for kernel in (self.decode, self.prefill) if kernel is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that the kernels keep on top of the codec's."""
        return sum(kernel.nbytes for kernel in self.fused)


def choose_kernels(layer: LayerCache, ring: ExactRing, attention: "DenseAttention | None" = None) -> Kernels:
    """What serves a layer on its device; decided once, at installation.

    attention: the engine's dense attention, for long chunks.
    """
    if layer.store.pages.device.type == "cpu":
        return Kernels(reason="the cache is on the CPU")
    if find_spec("triton") is None:
        return Kernels(reason="Triton is not installed")
    from turboquant.kernels import history
    from turboquant.kernels.encode import encode
    from turboquant.kernels.prefill import StagedPrefill

    decode, reason = choose_decode(layer, ring)
    return Kernels(
        encode,
        history.history_kernel if history.serves(layer) else None,
        decode,
        StagedPrefill(layer, attention) if attention is not None else None,
        reason,
    )


def choose_plan(device: torch.device) -> PlanKernel:
    """What plans the ring on a device."""
    if device.type == "cpu" or find_spec("triton") is None:
        return plan_in_torch
    from turboquant.kernels import ring

    return ring.plan


@cache
def gluon_objection(device: torch.device) -> str | None:
    """Why kernels with layouts by hand cannot run on a device, or None."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0"
    if find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    import triton

    return "Triton's interpreter has no Gluon" if triton.knobs.runtime.interpret else None


def choose_decode(layer: LayerCache, ring: ExactRing) -> tuple[FusedKernel | None, str | None]:
    """The fast decode, or why not."""
    if reason := gluon_objection(layer.store.pages.device):
        return None, reason
    from turboquant.kernels import decode

    if reason := decode.unsupported(layer):
        return None, reason
    return decode.FastDecode(layer, ring), None
