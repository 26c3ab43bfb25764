"""A scheduler of vLLM that tests can turn: size of chunks and of the pool, without another start of the engine."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class KnobScheduler(Scheduler):
    """Takes `chunk` (most prompt tokens of a request in a step) and `blocks` (of the pool) from the last request added.

    They are `SamplingParams.extra_args`; 0 or none: the engine's own.
    """

    blocks = 0

    def add_request(self, request: Any) -> None:
        knobs = request.sampling_params.extra_args or {}
        self.scheduler_config.long_prefill_token_threshold = knobs.get("chunk", 0)
        self.blocks = knobs.get("blocks", 0)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        pool = self.kv_cache_manager.block_pool
        used, free = pool.num_gpu_blocks - pool.get_num_free_blocks(), pool.get_num_free_blocks()
        held = pool.get_new_blocks(max(0, free - max(0, self.blocks - used))) if self.blocks else []
        try:
            return super().schedule(*args, **kwargs)
        finally:
            pool.free_blocks(held)
