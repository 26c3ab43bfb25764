"""A/B measurement on a real vLLM engine: the same engine, the same text, with and without turboquant.

Quality is measured teacher-forced through the engine: the text is a prompt with prompt_logprobs, prefilled in small
chunks, so that every scored token attends to history that is read from the compressed cache.
"""

import argparse
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from turboquant.integration import compat
from turboquant.integration.attach import EngineHandle, attach

WINDOW_TOKENS = 832
FIRST_SCORED = 256  # earlier positions have little history to read
CHUNK_TOKENS = 32  # own rows of a step are exact, so a small chunk keeps the measurement about the cache
PROSE_TOPICS = ("execmodel", "objects", "naming", "customization", "typesseq")
QUESTION = "Explain in a few sentences why the sky is blue."


class ScoringExtension:
    """Worker methods that record the log-probabilities of whole prompts and compare two runs (V1 model runner)."""

    model_runner: Any

    def tqab_start(self) -> None:
        """Record what the sampler computes for prompt positions from now on."""
        sampler, recorded = self.model_runner.sampler, []
        original = type(sampler).compute_logprobs

        def record(logits: torch.Tensor) -> torch.Tensor:
            logprobs = original(logits)
            recorded.append(logprobs.cpu())
            return logprobs

        sampler.compute_logprobs = record
        self._tqab_recorded = recorded

    def tqab_keep_reference(self) -> int:
        """What was recorded becomes the reference; returns its rows."""
        self._tqab_reference = torch.cat(self._tqab_recorded)
        self._tqab_recorded.clear()
        return len(self._tqab_reference)

    def tqab_token_bytes(self) -> float:
        return compat.cached_token_bytes(self.model_runner)

    def tqab_compare(self, window: int, first: int) -> dict[str, float]:
        """Compare what was recorded with the reference, on positions `first` and later of every `window` rows.

        The recording may end early, on a whole number of windows.
        """
        tested = torch.cat(self._tqab_recorded)
        self._tqab_recorded.clear()
        if not len(tested) or len(tested) % window or len(tested) > len(self._tqab_reference):
            raise RuntimeError(f"recorded {len(tested)} rows, reference {len(self._tqab_reference)}, window {window}")
        reference = self._tqab_reference[: len(tested)]
        p, q = (x.view(-1, window, x.shape[-1])[:, first:].flatten(0, 1) for x in (reference, tested))
        divergence = (p.exp() * (p - q)).sum(-1)
        return {
            "mean_kld": float(divergence.mean()),
            "p99_kld": float(divergence.quantile(0.99)),
            "se_kld": float(divergence.std() / len(p) ** 0.5),
            "top1_agreement": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
            "max_difference": float((p - q).abs().max()),
            "scored_tokens": len(p),
        }


@dataclass(frozen=True)
class Engine:
    """How to start the engine under test."""

    model: str
    dtype: str = "bfloat16"
    chunk: int = CHUNK_TOKENS
    max_num_seqs: int = 4
    max_model_len: int = 2048
    blocks: int | None = None  # of the pool; vLLM's choice unless given

    def start(self) -> Any:
        from vllm import LLM

        options: dict[str, Any] = {"dtype": self.dtype, "num_gpu_blocks_override": self.blocks}
        return LLM(
            model=self.model,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.chunk,
            enable_chunked_prefill=True,
            enforce_eager=True,
            worker_extension_cls=f"{__name__}.ScoringExtension",
            **options,
        )


def text_windows(llm: Any, length: int = WINDOW_TOKENS) -> list[list[int]]:
    """Two windows of `length` tokens, prose and code, from Python's own documentation and library."""
    prose = "\n".join(pydoc_data.topics.topics[name] for name in PROSE_TOPICS)
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    return [first_tokens(llm, text, length) for text in (prose, code)]


def first_tokens(llm: Any, text: str, length: int) -> list[int]:
    """Token ids of a text's beginning; ValueError if it is shorter."""
    ids: list[int] = llm.get_tokenizer().encode(text)
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens; {length} are needed")
    return ids[:length]


def score(llm: Any, windows: list[list[int]]) -> None:
    """Prefill every window alone, in order, with log-probabilities at every position."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for window in windows:
        llm.generate({"prompt_token_ids": window}, params, use_tqdm=False)


def generate(llm: Any, tokens: int) -> str:
    """Greedy answer to QUESTION, in the chat template where the model has one."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens)
    if llm.get_tokenizer().chat_template:
        outputs = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    else:
        outputs = llm.generate(QUESTION, params, use_tqdm=False)
    return outputs[0].outputs[0].text


@dataclass(frozen=True)
class Quality:
    """Of the compressed against the native cache: KL divergence in nats, agreement of the most likely token."""

    buffer_size: int
    mean_kld: float
    p99_kld: float
    se_kld: float
    top1_agreement: float
    scored_tokens: int


def compare(llm: Any, windows: list[list[int]], buffer_size: int) -> Quality:
    """Windows of the same length, scored on positions FIRST_SCORED and later."""
    score(llm, windows)
    found = llm.collective_rpc("tqab_compare", args=(len(windows[0]) - 1, FIRST_SCORED))[0]
    found.pop("max_difference")
    return Quality(buffer_size=buffer_size, **found)


def shadow_error(stats: dict[str, Any]) -> float:
    """Mean over layers of the relative L2 error of compressed attention."""
    means = [layer["shadow_rel_error"]["mean"] for layer in stats["per_layer"].values()]
    return sum(means) / len(means)


def capture_run(llm: Any, windows: list[list[int]], handle: EngineHandle) -> dict[str, float]:
    """capture_only on the first window: outputs must be identical; the shadow statistics give the attention error."""
    score(llm, windows[:1])
    found = llm.collective_rpc("tqab_compare", args=(len(windows[0]) - 1, 0))[0]
    error = shadow_error(handle.stats()[0])
    return {"capture_only_max_difference": found["max_difference"], "rel_err_attention": error}


BUFFER_SIZES = (128, 0)


def run_ab(engine: Engine, preset: str, progress: Callable[[str], None], tokens: int = 64) -> dict[str, Any]:
    """Native run, capture_only, full_tq with the native cache freed, for each of BUFFER_SIZES.  JSON-ready.

    The first of them is the one reported at the top level; all are under "quality".  progress: called with what is
    done next, `STEPS` times.
    """
    progress("starting vLLM")
    llm = engine.start()
    progress("native cache")
    windows = text_windows(llm)
    llm.collective_rpc("tqab_start")
    result: dict[str, Any] = {"text_native": generate(llm, tokens)}
    score(llm, windows)
    llm.collective_rpc("tqab_keep_reference")
    quality: list[Quality] = []
    report: dict[str, Any] = {}
    for buffer_size in BUFFER_SIZES:
        progress(f"{preset}, buffer_size={buffer_size}")
        exact = {"buffer_size": buffer_size, "sink_size": None if buffer_size else 0}
        with attach(llm, preset=preset, mode="capture_only", shadow_interval=8, **exact) as handle:
            if not report:
                result |= capture_run(llm, windows, handle)
            handle.set_mode("full_tq")
            freed = handle.free_kv_cache()
            quality.append(compare(llm, windows, buffer_size))
            if not report:
                result["text_turboquant"] = generate(llm, tokens)
                report = handle.stats()[0] | {"freed_bytes": freed}
    first = asdict(quality[0])
    return {
        "vllm": compat.vllm_version(),
        "model": Path(engine.model).name,
        "engine": asdict(engine) | {"model": Path(engine.model).name},
        "preset": preset,
        "mode": report["mode"],
        **{key: report[key] for key in REPORTED},
        **{key: first[key] for key in ("buffer_size", "top1_agreement", "mean_kld", "p99_kld", "scored_tokens")},
        **result,
        "quality": [asdict(q) for q in quality],
    }


STEPS = 2 + len(BUFFER_SIZES)
REPORTED = (
    "layers",
    "layers_compressed",
    "layers_skipped",
    "bytes_per_token_native",
    "bytes_per_token_compressed",
    "store_bytes",
    "ring_bytes",
    "table_bytes",
    "native_bytes",
    "freed_bytes",
    "tokens_encoded",
    "tokens_read_compressed",
    "tokens_read_exact",
)
