"""Triton kernels; the only part of the package that imports Triton."""

from importlib.util import find_spec

from turboquant.capture import LayerCache
from turboquant.score import HistoryKernel


def choose_history(layer: LayerCache) -> HistoryKernel | None:
    """The kernel for a layer's compressed history, or None for the torch twin; decided once, at installation."""
    if layer.store.pages.device.type == "cpu" or find_spec("triton") is None:
        return None
    from turboquant.kernels import history

    return history.history_kernel if history.serves(layer) else None
