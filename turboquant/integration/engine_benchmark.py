"""Time one vLLM engine: capacity, prefill, decode steps, prompts whose prefix is cached, and a serving load.

A contender is an engine with one kind of KV cache, in a process of its own:

    python -m turboquant.integration.engine_benchmark CASE.json

prints one JSON object a line, {"row": ...}, {"serving": ...} or {"engine": ...}, as it measures.  CASE is a `Case`.

A decode step's time is the slope between two generation lengths, so that what both share, the lookup of the cached
prompt and the first token, cancels.
"""

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turboquant.config import PRESETS, choice_error, is_preset, preset_options
from turboquant.integration import compat

NATIVE_DTYPES = (
    "fp8", "int4_per_token_head", "turboquant_4bit_nc", "turboquant_k8v4", "turboquant_3bit_nc"
)  # fmt: skip
HOOKS = "hooks-"  # prefix of a preset that is attached to a running engine
STEADY_STEPS = 10  # of prompts served before a load is timed
Prompt = dict[str, list[int]]


@dataclass(frozen=True)
class Geometry:
    """A Llama with dummy weights; the default is Llama-3.1-8B's."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocab: int = 128256

    def save(self, max_len: int) -> str:
        """Folder with the model's configuration."""
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab,
            "max_position_embeddings": max(131072, max_len), "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
            "eos_token_id": 2,
        }  # fmt: skip
        folder = Path(tempfile.mkdtemp(prefix="model-"))
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random (Poisson), `rate` a second, each on one of requests / sharing documents in turn.

    A request is `shared` tokens of its document and `own` tokens, and produces `output` tokens.  The documents have
    been read once before the load begins, as in a service that has been up for a while; whether they are still cached
    when they are asked about again is up to the cache.
    """

    rate: float
    requests: int
    shared: int
    own: int
    output: int
    sharing: int = 4

    @property
    def context(self) -> int:
        return self.shared + self.own + self.output

    def prompts(self, rng: random.Random, vocab: int) -> tuple[list[Prompt], list[Prompt]]:
        """The documents, and the requests in their order."""
        documents = [tokens(rng, self.shared, vocab) for _ in range(-(-self.requests // self.sharing))]
        asked = [documents[i % len(documents)] + tokens(rng, self.own, vocab) for i in range(self.requests)]
        return list(map(prompt, documents)), list(map(prompt, asked))


@dataclass(frozen=True)
class Case:
    """What is measured of one contender.

    model: folder with weights, None for dummy weights of `geometry`; shapes: (batch, prompt length); lengths: the two
    generation lengths; engine: further arguments of vllm.LLM.
    """

    contender: str
    model: str | None = None
    geometry: Geometry = field(default_factory=Geometry)
    shapes: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, int] = (8, 72)
    repeats: int = 3
    loads: tuple[Load, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.lengths[0] < self.lengths[1]:
            raise ValueError(f"lengths={self.lengths} must be two growing numbers of tokens")
        check_contender(self.contender)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        found = json.loads(text)
        found["geometry"] = Geometry(**found["geometry"])
        found["loads"] = tuple(Load(**load) for load in found["loads"])
        found["shapes"], found["lengths"] = tuple(map(tuple, found["shapes"])), tuple(found["lengths"])
        return cls(**found)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def max_len(self) -> int:
        needed = [length + self.lengths[1] for _, length in self.shapes] + [load.context for load in self.loads]
        return max(needed, default=0) + 16


def check_contender(name: str) -> None:
    """ValueError for a name that is none."""
    allowed = ("bf16", *NATIVE_DTYPES, *PRESETS, *(HOOKS + preset for preset in PRESETS))
    if is_preset(name):
        preset_options(name)
    elif name not in allowed:
        raise choice_error("contender", name, allowed)


def tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(10, vocab) for _ in range(count)]


def prompt(ids: list[int]) -> Prompt:
    return {"prompt_token_ids": ids}


# ---- the engine ------------------------------------------------------------------------------------------------
def engine_arguments(case: Case) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    arguments: dict[str, Any] = {
        "model": case.model or case.geometry.save(case.max_len), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": case.max_len, "enable_prefix_caching": True, "disable_log_stats": False, "seed": case.seed,
    }  # fmt: skip
    if case.model is None:
        arguments["load_format"] = "dummy"
    if case.contender in NATIVE_DTYPES:
        arguments["kv_cache_dtype"] = case.contender
    if case.contender.startswith(HOOKS):
        arguments["enforce_eager"] = True
    return arguments | case.engine


def start(case: Case) -> Any:
    """A vllm.LLM in this process, with the contender's cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from turboquant import attach, enable_no_alloc

    if is_preset(case.contender):
        enable_no_alloc(case.contender)
    llm = LLM(**engine_arguments(case))
    if case.contender.startswith(HOOKS):
        attach(llm, preset=case.contender.removeprefix(HOOKS), mode="full_tq").free_kv_cache()
    return llm


def peak_bytes() -> int | None:
    """Most bytes that were allocated on the CUDA device; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def greedy(count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


# ---- fixed batches ---------------------------------------------------------------------------------------------
def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_shape(case: Case, llm: Any, batch: int, length: int) -> dict[str, Any]:
    """Prefill of fresh prompts, decode steps, and one token on cached prompts."""
    rng, vocab = random.Random(case.seed + batch * length), llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def fresh(count: int) -> list[Prompt]:
        return [prompt(tokens(rng, length, vocab)) for _ in range(count)]

    def run(prompts: list[Prompt], count: int) -> Callable[[], object]:
        return lambda: llm.generate(prompts, greedy(count), use_tqdm=False)

    run(fresh(1), 1)()  # whatever is done once for this length
    prompts = fresh(batch)
    prefill = seconds(run(prompts, 1))
    short, long = case.lengths
    times = {}
    for count in (1, short, long):
        run(prompts, count)()
        times[count] = statistics.median(seconds(run(prompts, count)) for _ in range(case.repeats))
    step = (times[long] - times[short]) / (long - short)
    return {
        "batch": batch, "length": length, "prefill_tok_s": batch * length / prefill, "decode_ms_step": step * 1e3,
        "decode_tok_s": batch / step, "cached_prefix_s": times[1],
    }  # fmt: skip


# ---- serving ---------------------------------------------------------------------------------------------------
@dataclass
class Request:
    """Times in seconds since the load began; tokens: so many have been produced."""

    arrival: float
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0

    @property
    def ms_per_token(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1) * 1e3


def arrivals(load: Load, rng: random.Random) -> list[float]:
    moment, found = 0.0, []
    for _ in range(load.requests):
        found.append(moment)
        moment += rng.expovariate(load.rate)
    return found


def serve(llm: Any, load: Load, prompts: list[Prompt], moments: list[float]) -> list[Request]:
    """Give the engine requests as they arrive, and step it until all are done."""
    engine, requests, waiting = llm.llm_engine, dict[str, Request](), list(zip(moments, prompts, strict=True))[::-1]
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[-1][0] <= now:
            arrival, given = waiting.pop()
            name = f"{id(load)}-{len(requests)}"
            requests[name] = Request(arrival)
            engine.add_request(name, given, greedy(load.output))
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        for output in engine.step():
            note(requests[output.request_id], len(output.outputs[0].token_ids), time.perf_counter() - start)
    return list(requests.values())


def note(request: Request, produced: int, now: float) -> None:
    if produced and math.isnan(request.first):
        request.first = now
    request.last, request.tokens = now, produced


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def measure_load(case: Case, llm: Any, load: Load) -> dict[str, Any]:
    rng, vocab = random.Random(case.seed), llm.llm_engine.vllm_config.model_config.get_vocab_size()
    (documents, prompts), moments = load.prompts(rng, vocab), arrivals(load, rng)
    llm.reset_prefix_cache()
    llm.generate(documents, greedy(1), use_tqdm=False)
    llm.generate([prompt(tokens(rng, load.own, vocab))] * 2, greedy(STEADY_STEPS), use_tqdm=False)
    requests = serve(llm, load, prompts, moments)
    took = max(request.last for request in requests)
    first = [(request.first - request.arrival) * 1e3 for request in requests]
    per_token = [request.ms_per_token for request in requests]
    return asdict(load) | {
        "output_tok_s": sum(request.tokens for request in requests) / took,
        "mean_concurrency": sum(request.last - request.arrival for request in requests) / took,
        "ttft_ms_p50": statistics.median(first), "ttft_ms_p99": percentile(first, 0.99),
        "tpot_ms_p50": statistics.median(per_token), "tpot_ms_p99": percentile(per_token, 0.99),
    }  # fmt: skip


# ---- one contender ---------------------------------------------------------------------------------------------
def measure(case: Case) -> Iterator[dict[str, Any]]:
    """What the process prints."""
    began = time.perf_counter()
    llm = start(case)
    capacity = compat.pool_tokens(llm.llm_engine.vllm_config)
    yield {"engine": {"start_s": time.perf_counter() - began, "capacity_tokens": capacity, **versions()}}
    block = llm.llm_engine.vllm_config.cache_config.block_size
    for batch, length in case.shapes:
        row = {"contender": case.contender, "capacity_tokens": capacity}
        needed = batch * (-(-(length + case.lengths[1]) // block) * block)
        if needed > capacity:
            yield {"row": row | {"batch": batch, "length": length, "skipped": f"needs {needed} tokens of cache"}}
            continue
        yield {"row": row | measure_shape(case, llm, batch, length) | {"peak_bytes": peak_bytes()}}
    for load in case.loads:
        yield {"serving": {"contender": case.contender, "capacity_tokens": capacity} | measure_load(case, llm, load)}


def versions() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "vllm": compat.vllm_version(), "torch": torch.__version__}


def main() -> None:
    case = Case.from_json(Path(sys.argv[1]).read_text())
    for found in measure(case):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
