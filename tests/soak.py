"""Random serving traffic on one engine of the native route, with checks that need time: leaks, drift, cross-talk.

    python tests/soak.py --minutes 30 --json benchmarks/results/soak-cpu.json
    python tests/soak.py --minutes 5 --place gpu --json benchmarks/results/soak-gpu.json

Every prompt repeats a word of its own after a beginning that it shares with others; its answer alone is the reference.
Then requests come and go at random in a pool that is too small for them: chunks, prefix hits, preemptions and aborts.
On a GPU the model has random weights and the prompts random tokens, so that only distances from the references tell.
"""

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_engine
from engine_helpers import alone, divergences, engine, greedy, preemptions, prefix_hits, prompts

from turboquant.integration import compat

WORDS = (
    "zebra", "copper", "violin", "harbor", "pepper", "rocket", "blanket", "garden", "lemon", "marble", "pencil",
    "tiger", "candle", "ladder", "button", "helmet",
)  # fmt: skip
SHARED = 32  # tokens that all prompts start with
MEAN_KLD, WORST_KLD, WORST_DRIFT = 0.01, 0.2, 0.005  # nats: of all requests, of one, from one third to the next
LEAK = 64 << 20  # bytes that the processes may grow after the first third
LIMITS = {"max_model_len": 320, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 14}
GPU_LIMITS = {
    "max_model_len": 2048, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 400, "max_num_seqs": 32,
    "dtype": "bfloat16", "enforce_eager": False, "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30,  # not measured, so that others may be there
    "compilation_config": gpu_engine.GRAPHS | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]},
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the engine runs: its limits, and requests that overflow its pool.

    lengths: of prompts, most of which soon grow into another block of 32; tokens: of a whole answer; most: requests;
    random: key of `gpu_engine.MODELS` with random weights, None for the demo model.
    """

    limits: dict[str, Any]
    lengths: tuple[int, ...]
    tokens: int
    most: int
    random: str | None = None

    def model(self) -> str | None:
        """Folder of the random model."""
        if self.random is None:
            return None
        folder = tempfile.mkdtemp(prefix="model-")
        gpu_engine.save(self.random, folder)
        return folder


PLACES = {
    "cpu": Place(LIMITS, (93, 94, 95, 125, 126, 127, 157, 190), 14, 16),
    "gpu": Place(GPU_LIMITS, (733, 734, 735, 1021, 1022, 1023, 1277, 1502), 40, 64, "llama"),
}


@dataclass
class Soak:
    """What was seen; klds: (seconds since the start, mean KLD of a finished request)."""

    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    foreign: list[str] = field(default_factory=list)
    klds: list[tuple[float, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def thirds(self, pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Values of the second and of the last third of the time."""
        end = pairs[-1][0]
        return [v for t, v in pairs if end / 3 <= t < 2 * end / 3], [v for t, v in pairs if t >= 2 * end / 3]

    def figures(self) -> dict[str, Any]:
        middle, last = (sum(x) / len(x) for x in self.thirds(self.klds))
        before, after = (max(x) for x in self.thirds(self.memory))
        values = [value for _, value in self.klds]
        return {
            "finished": self.finished, "aborted": self.aborted, "tokens": self.tokens, "foreign_words": self.foreign,
            "mean_kld": sum(values) / len(values), "worst_request_kld": max(values), "kld_drift": last - middle,
            "grown_bytes": int(after - before),
        }  # fmt: skip


def held_bytes(llm: Any) -> int:
    """Of this process and those that it started, on the host and on devices."""
    import psutil

    own = psutil.Process()
    resident = sum(process.memory_info().rss for process in [own, *own.children(recursive=True)])
    return resident + sum(llm.collective_rpc("tqtest_device_bytes"))


def word_prompts(llm: Any, words: Sequence[str], lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of a prompt of each word, of several lengths."""
    encode, beginning = llm.get_tokenizer().encode, prompts(llm, [SHARED])[0]["prompt_token_ids"]
    texts = [encode(f"My {word} is old. I like my {word}. " * 30) for word in words]
    return [beginning + text[: lengths[i % len(lengths)] - SHARED] for i, text in enumerate(texts)]


def random_prompts(count: int, lengths: Sequence[int]) -> list[list[int]]:
    """As many prompts of random token ids."""
    rng, ids = random.Random(0), range(gpu_engine.VOCABULARY)
    beginning = rng.choices(ids, k=SHARED)
    return [beginning + rng.choices(ids, k=lengths[i % len(lengths)] - SHARED) for i in range(count)]


class Traffic:
    """Sends the prompts at random and compares what comes back with the references."""

    def __init__(self, llm: Any, words: Sequence[str], seed: int, place: Place):
        self.llm, self.engine, self.place = llm, llm.llm_engine, place
        self.words, self.rng = words, random.Random(seed)
        if place.random:
            ids, self.ids = random_prompts(len(words), place.lengths), [set[int]()] * len(words)
        else:
            ids = word_prompts(llm, words, place.lengths)
            self.ids = [set(llm.get_tokenizer().encode(" " + word)) for word in words]
        self.prompts = [{"prompt_token_ids": prompt} for prompt in ids]
        self.references = alone(llm, self.prompts, place.tokens, logprobs=64)
        self.running: dict[str, int] = {}
        self.found, self.sent = Soak(), 0

    def send(self) -> None:
        number, name = self.rng.randrange(len(self.words)), f"soak-{self.sent}"
        tokens = self.rng.choice((3, self.place.tokens, self.place.tokens))
        self.engine.add_request(name, dict(self.prompts[number]), greedy(tokens, 64))
        self.running[name], self.sent = number, self.sent + 1

    def abort(self) -> None:
        name = self.rng.choice(list(self.running))
        self.engine.abort_request([name])
        del self.running[name]
        self.found.aborted += 1

    def receive(self, seconds: float) -> None:
        for output in self.engine.step():
            if output.finished and output.request_id in self.running:
                self.judge(self.running.pop(output.request_id), output.outputs[0], seconds)

    def judge(self, number: int, output: Any, seconds: float) -> None:
        klds = self.distances(number, output)
        self.found.klds.append((seconds, sum(klds) / len(klds)))
        self.found.finished, self.found.tokens = self.found.finished + 1, self.found.tokens + len(output.token_ids)
        others = set().union(*(ids for i, ids in enumerate(self.ids) if i != number)) - self.ids[number]
        if foreign := others & set(output.token_ids):
            self.found.foreign.append(f"{self.words[number]}: {sorted(foreign)}")

    def distances(self, number: int, output: Any) -> list[float]:
        """KLD of each step from the reference's."""
        reference = self.references[number]
        length = len(output.token_ids)
        cut = replace(reference, token_ids=reference.token_ids[:length], logprobs=reference.logprobs[:length])
        return divergences(cut, output)

    def run(self, seconds: float) -> Soak:
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds or self.running:
            if now < seconds and len(self.running) < self.place.most and self.rng.random() < 0.8:
                self.send()
            if self.running and self.rng.random() < 0.01:
                self.abort()
            if self.running:  # without requests, a step would wait for ever
                self.receive(now)
            if not self.found.memory or now - self.found.memory[-1][0] > seconds / 60:
                self.found.memory.append((now, held_bytes(self.llm)))
        return self.found


def cache_in_use(llm: Any) -> float:
    """Share of the blocks that requests hold."""
    return float(next(m.value for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"))


def soak(
    llm: Any, seconds: float, words: Sequence[str] = WORDS, seed: int = 0, place: Place = PLACES["cpu"]
) -> dict[str, Any]:
    """Run traffic on an engine with the limits of a place; figures, and the names of the checks that do not hold."""
    traffic = Traffic(llm, words, seed, place)
    before, hits = preemptions(llm), prefix_hits(llm)
    found = traffic.run(seconds).figures() | {"seconds": seconds, "seed": seed}
    found |= {"preemptions": preemptions(llm) - before, "prefix_hit_tokens": prefix_hits(llm) - hits}
    found["cache_in_use_at_the_end"] = cache_in_use(llm)
    checks = {
        "no word of another request": not found["foreign_words"],
        f"mean KLD <= {MEAN_KLD}": found["mean_kld"] <= MEAN_KLD,
        f"KLD of every request <= {WORST_KLD}": found["worst_request_kld"] <= WORST_KLD,
        f"drift <= {WORST_DRIFT}": found["kld_drift"] <= WORST_DRIFT,
        f"growth <= {LEAK} bytes": found["grown_bytes"] <= LEAK,
        "all blocks are free at the end": found["cache_in_use_at_the_end"] == 0,
        "requests were preempted": found["preemptions"] > 0,
        "prefixes were shared": found["prefix_hit_tokens"] > 0,
    }
    return found | {"failed": [name for name, holds in checks.items() if not holds]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", choices=sorted(PLACES), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    place = PLACES[arguments.place]
    with engine(arguments.preset, {"ring_share": 1.0}, model=place.model(), **place.limits) as llm:
        found = soak(llm, arguments.minutes * 60, seed=arguments.seed, place=place)
    command = shlex.join(["python", "tests/soak.py", *sys.argv[1:]])
    about = {"command": command, "preset": arguments.preset, "vllm": compat.vllm_version(), "cores": os.cpu_count()}
    text = json.dumps(about | found, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
