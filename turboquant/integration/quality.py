"""How far an engine's answers move, measured on the decode path: texts are forced token by token, and the
log-probabilities that the engine had for each next token are compared with those of its native cache.

    python -m turboquant.integration.quality CASE.json

runs one engine and writes what it had to a file.  Prompts are prefilled exactly as ever, so that a forced token reads
what the cache holds of everything before it; log-probabilities of prompts would not touch the cache's codec at all.
"""

import argparse
import codecs
import inspect
import json
import os
import pydoc_data.topics
import sys
import tarfile
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from turboquant.config import PRESETS, TurboQuantConfig, choice_error, is_preset
from turboquant.integration import compat
from turboquant.integration.engine_benchmark import NATIVE_DTYPES, greedy

REFERENCE = "native"
KEY_TOKENS = 24  # first tokens of a text, by which its request is recognised
CODE = (argparse, tarfile, codecs, inspect, typing)
ROWS = 256  # log-probabilities that are compared at a time


@dataclass(frozen=True)
class Case:
    """One engine and what it is made to say.

    contender: native, a cache dtype of vLLM's, or a preset with options, as in k4v4+buffer_size=64+calibration=none;
    texts: token ids, the last `forced` of which are forced and those before prefilled; free: calls of the engine, each
    of prompts that are continued greedily and by how many tokens; options: of turboquant, unless the contender's own
    say otherwise; engine: of vllm.LLM; output: file for the log-probabilities.
    """

    contender: str
    model: str
    texts: list[list[int]]
    forced: int
    output: str
    dtype: str = "float32"
    free: list[tuple[list[list[int]], int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_contender(self.contender)
        if self.forced < 1 or any(len(text) < self.forced + KEY_TOKENS for text in self.texts):
            raise ValueError(f"forced={self.forced} must be positive and leave {KEY_TOKENS} tokens of every text")
        keys = {tuple(text[:KEY_TOKENS]) for text in self.texts}
        if len(keys) < len(self.texts):
            raise ValueError(f"two texts start with the same {KEY_TOKENS} tokens")
        if any(tuple(prompt[:KEY_TOKENS]) in keys for prompts, _ in self.free for prompt in prompts):
            raise ValueError(f"a free prompt starts with the {KEY_TOKENS} tokens of a forced text")

    @property
    def max_model_len(self) -> int:
        lengths = [len(prompt) + count for prompts, count in self.free for prompt in prompts]
        return max([*lengths, *(len(text) for text in self.texts)]) + 1

    def forced_tokens(self) -> torch.Tensor:
        """int64 [texts * forced], text after text."""
        return torch.tensor([token for text in self.texts for token in text[-self.forced :]])

    @property
    def preset(self) -> str | None:
        name = self.contender.split("+")[0]
        return name if is_preset(name) else None

    @property
    def all_options(self) -> dict[str, Any]:
        return self.options | own_options(self.contender)


def check_contender(name: str) -> None:
    allowed = (REFERENCE, *NATIVE_DTYPES, *PRESETS)
    preset, *_ = name.split("+")
    if is_preset(preset):
        TurboQuantConfig.from_options(preset, **own_options(name))
    elif name not in allowed:
        raise choice_error("contender", name, allowed)


def own_options(contender: str) -> dict[str, Any]:
    """ "k4v4+buffer_size=64+calibration=none" -> {"buffer_size": 64, "calibration": "none"}"""
    pairs = [part.partition("=") for part in contender.split("+")[1:]]
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def prose() -> str:
    """Python's documentation of its language."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    """Some of Python's library."""
    return "\n".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in CODE)


def texts(tokenizer: Any, lengths: Sequence[int], count: int, sources: Sequence[str] = ()) -> list[list[int]]:
    """Token ids, `count` texts of each length, taken from the sources by turns; default: prose and code."""
    left, found = [tokenizer.encode(source) for source in sources or (prose(), code())], []
    for length in lengths:
        for number in range(count):
            source = left[number % len(left)]
            if length > len(source):
                raise ValueError(f"{count} texts of each of {list(lengths)} tokens are more than there are")
            found.append(source[:length])
            left[number % len(left)] = source[length:]
    return found


# ---- in the worker ---------------------------------------------------------------------------------------------
class ForcingExtension:
    """Worker methods that force texts upon the sampler and record what it would have said (V1 model runner)."""

    model_runner: Any

    def tqq_force(self, forced: list[list[int]]) -> None:
        sampler, batch = self.model_runner.sampler, self.model_runner.input_batch
        self._tqq_recorder = recorder = Recorder(forced)
        original = type(sampler).forward

        def forward(logits: torch.Tensor, sampling_metadata: Any, **options: Any) -> Any:
            output = original(sampler, logits, sampling_metadata, **options)
            known = [int(n) for n in batch.num_tokens_no_spec[: len(logits)]]
            starts = [tuple(row) for row in batch.token_ids_cpu[: len(logits), :KEY_TOKENS].tolist()]
            if recorder.knows(starts):
                output.sampled_token_ids[:, 0] = torch.tensor(recorder.step(starts, known, logits))
            return output

        sampler.forward = forward

    def tqq_token_bytes(self) -> float:
        return compat.cached_token_bytes(self.model_runner)

    def tqq_save(self, path: str) -> int:
        """Write the log-probabilities, float32 [forced tokens, vocabulary], text after text; returns their number."""
        recorded = self._tqq_recorder.result()
        torch.save(recorded, path)
        return len(recorded)


class Recorder:
    """The next token of every request, and the log-probabilities before it was forced."""

    def __init__(self, forced: list[list[int]]):
        self.forced = {tuple(text[:KEY_TOKENS]): (number, text) for number, text in enumerate(forced)}
        self.recorded: dict[tuple[int, int], torch.Tensor] = {}  # stays on the device: copies would wait for it

    def knows(self, starts: list[tuple[int, ...]]) -> bool:
        """Whether these requests are forced ones; they never share a step with free ones."""
        return all(start in self.forced for start in starts)

    def step(self, starts: list[tuple[int, ...]], known: list[int], logits: torch.Tensor) -> list[int]:
        """Of a step's requests: their first tokens, how many are known, and logits [n, vocabulary]."""
        tokens = []
        for start, count, row in zip(starts, known, logits, strict=True):
            number, text = self.forced[start]
            # A chunk that does not end the prompt is recorded too, and overwritten by the one that does.
            self.recorded[number, count] = row.float().log_softmax(-1)
            tokens.append(text[count] if count < len(text) else text[-1])
        return tokens

    def result(self) -> torch.Tensor:
        return torch.stack([self.recorded[place].cpu() for place in sorted(self.recorded)])


def run(case: Case) -> dict[str, Any]:
    """Run the engine and write the file; returns bytes per token, the exact tokens of a request, and what was said."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    from vllm import LLM

    from turboquant import enable_no_alloc

    if case.preset:
        enable_no_alloc(case.preset, **case.all_options)
    arguments: dict[str, Any] = {
        "dtype": case.dtype, "max_model_len": case.max_model_len, "max_num_seqs": len(case.texts),
        "enforce_eager": True, "async_scheduling": False, "enable_prefix_caching": True,
        "worker_extension_cls": f"{__name__}.ForcingExtension",
    }  # fmt: skip
    if case.contender in NATIVE_DTYPES:
        arguments["kv_cache_dtype"] = case.contender
    llm = LLM(case.model, **arguments | case.engine)
    llm.collective_rpc("tqq_force", args=(case.texts,))
    prompts: Any = [{"prompt_token_ids": text[: -case.forced]} for text in case.texts]
    llm.generate(prompts, greedy(case.forced), use_tqdm=False)
    written, expected = llm.collective_rpc("tqq_save", args=(case.output,))[0], case.forced * len(case.texts)
    if written != expected:
        raise RuntimeError(f"recorded {written} tokens of {expected}")
    exact = llm.collective_rpc("tq_stats")[0]["exact_tokens_per_request"] if case.preset else 0
    said = [continuations(llm, prompts, count) for prompts, count in case.free]
    return {"bytes_per_token": llm.collective_rpc("tqq_token_bytes")[0], "exact_tokens": exact, "said": said}


def continuations(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    batch: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(batch, greedy(count), use_tqdm=False)]


# ---- comparison ------------------------------------------------------------------------------------------------
def compare(reference: torch.Tensor, tested: torch.Tensor, forced: torch.Tensor) -> dict[str, Any]:
    """Log-probabilities [n, vocabulary] of two engines for the same forced tokens int64 [n].

    KL divergence in nats of the tested from the reference; ppl_ratio of the forced tokens; top-1 agreement.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    divergence, agree, surprise = [], [], []
    for p, q, token in zip(reference.split(ROWS), tested.split(ROWS), forced.to(device).split(ROWS), strict=True):
        p, q = p.to(device).double(), q.to(device).double()
        divergence.append((p.exp() * (p - q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
        surprise.append((p - q).gather(1, token[:, None]).squeeze(1))
    klds = torch.cat(divergence)
    return {
        "mean_kld": float(klds.mean()), "p99_kld": float(klds.quantile(0.99)),
        "se_kld": float(klds.std() / len(klds) ** 0.5), "top1": float(torch.cat(agree).double().mean()),
        "ppl_ratio": float(torch.cat(surprise).mean().exp()), "scored": len(klds),
    }  # fmt: skip


def same_tokens(said: Sequence[Sequence[int]], native: Sequence[Sequence[int]]) -> dict[str, float]:
    """How long free continuations are those of the native cache: mean tokens, and share of texts to the end."""
    lengths = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
               for pair in zip(said, native, strict=True)]  # fmt: skip
    whole = [length == len(text) for length, text in zip(lengths, said, strict=True)]
    return {"generated": len(said[0]), "same_tokens": sum(lengths) / len(said), "same_texts": sum(whole) / len(said)}


def size(stats: dict[str, Any], plain: float, context: int) -> dict[str, float]:
    """Bytes per token of the pages and, with the exact tokens' blocks, of a request of `context`; times below bf16.

    stats: of `run`; plain: bytes of a token in bf16.
    """
    packed = stats["bytes_per_token"]
    whole = packed + min(stats["exact_tokens"], context) / context * plain
    return {
        "bytes_per_token": packed, "bits_per_element": 16 * packed / plain,
        "bits_with_window": 16 * whole / plain, "smaller_than_bf16": plain / whole,
    }  # fmt: skip


def main() -> None:
    case = Case(**json.loads(Path(sys.argv[1]).read_text()))
    stats = run(case)
    Path(case.output + ".json").write_text(json.dumps(stats))


def save_case(case: Case, path: Path) -> None:
    path.write_text(json.dumps(asdict(case)))


if __name__ == "__main__":
    main()
