"""KV-cache specs of ours for vLLM 0.26 and 0.27, which can pack full attention only; importable by every process."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import SlidingWindowSpec


@dataclass(frozen=True, kw_only=True)
class PackedSlidingWindowSpec(SlidingWindowSpec):
    """A sliding window whose tokens take `token_bytes` per KV head.

    vLLM's registry of specs walks up the classes, so that the pages are managed like any sliding window's.
    """

    token_bytes: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.token_bytes
