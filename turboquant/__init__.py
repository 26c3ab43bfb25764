"""turboquant: a compressed KV cache for vLLM, with attention computed on the compressed pages.

Importing needs torch and numpy only; names that need vLLM are loaded when used.
"""

from importlib import import_module
from typing import Any

from turboquant.config import PRESETS, Mode, TurboQuantConfig
from turboquant.page import PageFormat

__version__ = "0.1.0"

_HOOKS = "turboquant.integration.vllm"
_LAZY = {
    "TurboQuantKVCache": "turboquant.kv_cache",
    "TurboQuantMSE": "turboquant.quantizer",
    "TurboQuantProd": "turboquant.quantizer",
    "attach": "turboquant.integration.attach",
    "calibrate": "turboquant.integration.calibrate",
    "enable_no_alloc": "turboquant.vllm_attn_backend",
    "free_kv_cache": _HOOKS,
    "get_mode": _HOOKS,
    "get_stats": "turboquant.integration.attach",
    "install_hooks": _HOOKS,
    "install_turboquant_hooks": _HOOKS,
    "set_mode": _HOOKS,
}

__all__ = [
    "PRESETS",
    "Mode",
    "PageFormat",
    "TurboQuantConfig",
    *sorted(_LAZY),
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'turboquant' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
