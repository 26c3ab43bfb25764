"""turboquant on a vllm.LLM, whose workers may be other processes."""

from typing import Any

from turboquant.integration import vllm as hooks
from turboquant.integration.vllm import HookError, NativeCacheFreedError, UnsupportedEngineError

ERRORS = {error.__name__: error for error in (HookError, NativeCacheFreedError, UnsupportedEngineError, ValueError)}


class EngineHandle:
    """turboquant in all workers of an engine; the methods are those of the hooks, one call for every worker."""

    def __init__(self, llm: Any):
        self._llm = llm

    def set_mode(self, mode: str) -> str:
        """Switch every worker; returns the mode."""
        return self._call("tq_set_mode", mode)[0]

    def free_kv_cache(self) -> int:
        """Bytes really returned, summed over workers."""
        return sum(self._call("tq_free"))

    def stats(self) -> list[dict[str, Any]]:
        """Statistics of every worker."""
        return self._call("tq_stats")

    def uninstall(self) -> None:
        self._call("tq_uninstall")

    def __enter__(self) -> "EngineHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return call_workers(self._llm, method, *args, **kwargs)


def call_workers(llm: Any, method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Results of a `tq_*` method, one a worker; raises what the first worker that refuses says."""
    results = llm.collective_rpc("tq_call", args=(method, *args), kwargs=kwargs)
    for status, payload in results:
        if status != "ok":
            raise ERRORS[status](payload)
    return [payload for _, payload in results]


def attach(llm: Any, **options: Any) -> EngineHandle:
    """Install the hooks in every worker of a `vllm.LLM`; options of `install_turboquant_hooks`.

    The workers know turboquant through its entry point, so the package must be installed (pip), not only importable.
    """
    if not hasattr(llm, "collective_rpc"):
        raise TypeError(f"llm={llm!r} must be a vllm.LLM, or something else with its collective_rpc")
    handle = EngineHandle(llm)
    handle._call("tq_install", **options)
    return handle


def get_stats(engine: Any) -> Any:
    """Plain numbers of either route: a list with a dictionary per worker of a `vllm.LLM`; one of a model runner in its
    own process.  HookError where nothing is compressed.
    """
    return call_workers(engine, "tq_stats") if hasattr(engine, "collective_rpc") else hooks.get_stats(engine)
