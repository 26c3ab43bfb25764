"""Import path of the prototype, kept for scripts that use it; everything lives in `turboquant.integration.vllm`."""

from typing import Any

from turboquant.config import Mode, TurboQuantConfig
from turboquant.integration import activation
from turboquant.integration.vllm import free_kv_cache, get_mode, get_stats, install_turboquant_hooks, set_mode

MODE_OFF = Mode.OFF.value
MODE_ACTIVE = Mode.HYBRID.value
MODE_HYBRID = Mode.HYBRID.value
MODE_SHADOW = Mode.CAPTURE_ONLY.value
MODE_ACCUMULATE = Mode.CAPTURE_ONLY.value
MODE_CAPTURE_ONLY = Mode.CAPTURE_ONLY.value
MODE_FULL_TQ = Mode.FULL_TQ.value

__all__ = [
    "MODE_ACCUMULATE",
    "MODE_ACTIVE",
    "MODE_CAPTURE_ONLY",
    "MODE_FULL_TQ",
    "MODE_HYBRID",
    "MODE_OFF",
    "MODE_SHADOW",
    "enable_no_alloc",
    "free_kv_cache",
    "get_mode",
    "get_stats",
    "install_turboquant_hooks",
    "set_mode",
]


def enable_no_alloc(preset: str | None = None, **options: Any) -> TurboQuantConfig:
    """Compressed pages from the start, for engines that are built after this call, in whatever processes they run.

    preset, options: as for `install_turboquant_hooks`.  Returns the configuration; ValueError for unknown names.
    """
    return activation.enable(preset, **options)
