"""Import path of the prototype, kept for scripts that use it; everything lives in `turboquant.integration.vllm`."""

from typing import Any, NoReturn

from turboquant.config import Mode
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


def enable_no_alloc(**_: Any) -> NoReturn:
    """Will let vLLM size its pool by compressed pages; not available in this version."""
    raise NotImplementedError(
        "enable_no_alloc() is not available in this version: compressed pages from the start need the native route. "
        "Until then use install_turboquant_hooks(model_runner, mode='full_tq') and free_kv_cache(model_runner)."
    )
