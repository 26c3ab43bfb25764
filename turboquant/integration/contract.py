"""What turboquant assumes about vLLM, probed on the installed one: every probe says what is wrong, or nothing."""

import inspect
from collections.abc import Callable

from turboquant.integration import compat

Probe = Callable[[], str | None]


def objections() -> dict[str, str | None]:
    """What each probe of the installed vLLM says, by what it asks for; None where all is well."""
    return {(probe.__doc__ or probe.__name__).rstrip("."): said(probe) for probe in PROBES}


def said(probe: Probe) -> str | None:
    """vLLM can lack the very modules that a probe looks at, or break where another package does not fit."""
    try:
        return probe()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def hooked_methods() -> str | None:
    """attention has the methods that the hooks replace."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    for impl in (CPUAttentionBackendImpl, FlashAttentionImpl):
        for name, expected in compat.HOOKED_METHODS.items():
            found = tuple(inspect.signature(getattr(impl, name)).parameters)[1 : 1 + len(expected)]
            if found != expected:
                return f"{impl.__name__}.{name} takes {found}, not {expected}"
    return None


def dynamic_calls() -> str | None:
    """attention looks these methods up when it runs."""
    from vllm.model_executor.layers.attention import attention

    calls = (
        (attention.unified_kv_cache_update, "impl.do_kv_cache_update("),
        (attention.unified_attention_with_output, "self.impl.forward("),
    )
    missing = [call for function, call in calls if call not in inspect.getsource(function)]
    return f"nothing calls {missing[0]}...)" if missing else None


def attention_takes_a_backend() -> str | None:
    """layers take a backend of our choice."""
    from vllm.model_executor.layers.attention.attention import Attention

    known = "attn_backend" in inspect.signature(Attention.__init__).parameters
    return None if known else "Attention takes no attn_backend"


def pages_can_be_packed() -> str | None:
    """the scheduler can count compressed pages."""
    import vllm.v1.kv_cache_interface as interface

    packs = compat.packs_states() or hasattr(interface, "TQFullAttentionSpec")
    return None if packs else "no spec of this vLLM has a number of bytes per token (0.26 or newer is needed)"


def workers_can_be_extended() -> str | None:
    """workers take our methods."""
    from vllm.v1.worker.worker_base import WorkerBase

    from turboquant.integration.plugin import WORKER_METHODS

    ours = {method.__name__: method for method in WORKER_METHODS}
    taken = [name for name, method in ours.items() if getattr(WorkerBase, name, method) is not method]
    return f"WorkerBase has a method {taken[0]} already" if taken else None


PROBES: tuple[Probe, ...] = (
    hooked_methods, dynamic_calls, attention_takes_a_backend, pages_can_be_packed, workers_can_be_extended
)  # fmt: skip
