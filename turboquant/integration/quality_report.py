"""How far contenders are from the native cache, of whole engines that run as processes of their own (`quality`)."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turboquant.integration import quality, retrieval

INTRODUCTION = "Notes, and what the numbers of some places are.\n"
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What every engine does.

    texts: of each context, the last `forced` tokens of which are forced; generate: tokens by which each is continued
    freely; questions: of each kind, in a quiz for each context (`retrieval`); sources: see `quality.texts`.
    """

    contenders: list[str]
    contexts: list[int]
    texts: int
    forced: int
    generate: int
    questions: int
    sources: list[str]
    dtype: str
    options: dict[str, Any]
    engine: dict[str, Any]
    jobs: int

    def materials(self, tokenizer: Any) -> "Materials":
        texts = quality.texts(tokenizer, self.contexts, self.texts, self.sources)
        filler = tokenizer.encode(INTRODUCTION + (self.sources[0] if self.sources else quality.prose()))
        quizzes = [
            retrieval.make_quiz(tokenizer, filler, context, self.questions, seed)
            for seed, context in enumerate(self.contexts if self.questions else ())
        ]
        return Materials(self, tokenizer, texts, quizzes)


@dataclass(frozen=True)
class Materials:
    """The texts of a plan in a model's tokens: `plan.texts` of every context, and a quiz of each."""

    plan: Plan
    tokenizer: Any
    texts: list[list[int]]
    quizzes: list[retrieval.Quiz]

    def case(self, contender: str, model: str, output: Path) -> quality.Case:
        plan = self.plan
        return quality.Case(
            contender, model, self.texts, plan.forced, str(output), plan.dtype, self.free(), plan.options, plan.engine
        )

    def free(self) -> list[tuple[list[list[int]], int]]:
        """Continuations of all texts, then of every quiz its text, which is cached so, and its questions."""
        calls = []
        if self.plan.generate:
            # Without their second token, so that they are no forced texts.
            prompts = [[text[0], *text[2 : -self.plan.forced]] for text in self.texts]
            calls.append((prompts, self.plan.generate))
        for quiz in self.quizzes:
            calls += [([quiz.text], 1), ([question.prompt for question in quiz.questions], retrieval.ANSWER_TOKENS)]
        return calls

    def compare_said(self, number: int, said: Sequence[Any], native: Sequence[Any]) -> Row:
        """How what a cache said about the texts and the quiz of a context (its number) differs from the native one."""
        found: Row = {}
        if self.plan.generate:
            part = slice(number * self.plan.texts, (number + 1) * self.plan.texts)
            found |= quality.same_tokens(said[0][part], native[0][part])
        if self.quizzes:
            answers = [self._answers(calls, number) for calls in (said, native)]
            found |= retrieval.score(self.quizzes[number].questions, *answers)
        return found

    def _answers(self, calls: Sequence[Any], number: int) -> list[str]:
        first = 1 if self.plan.generate else 0
        texts: list[str] = self.tokenizer.batch_decode(calls[first + 2 * number + 1])
        return texts


def measure(plan: Plan, folder: Path, model: str, done: Callable[[], object]) -> Iterator[tuple[str, Row]]:
    """("rows" or "failed", row) of one model: texts of all contexts run in the same engine.

    folder: for the engines' results; done: called after each engine.
    """
    from transformers import AutoTokenizer

    materials = plan.materials(AutoTokenizer.from_pretrained(model))
    names = [quality.REFERENCE, *plan.contenders]
    cases = [materials.case(name, model, folder / f"{number}.pt") for number, name in enumerate(names)]

    def run(case: quality.Case) -> Row:
        found = run_process(case)
        done()
        return found

    with ThreadPoolExecutor(plan.jobs) as pool:
        found = pool.map(run, cases)
        reference = next(found)
        if "failed" in reference:
            raise SystemExit(f"the native cache of {model} failed: {reference['failed']}")
        for case, stats in zip(cases[1:], found, strict=True):
            head = {
                "model": Path(model).name,
                "dtype": case.dtype,
                "contender": case.contender,
                "options": case.options,
            }
            if "failed" in stats:
                yield "failed", head | stats
                continue
            for row in compare(materials, cases[0], reference, case, stats):
                yield "rows", head | row
            Path(case.output).unlink()


def compare(
    materials: Materials, reference: quality.Case, native: Row, case: quality.Case, stats: Row
) -> Iterator[Row]:
    """A row of every context, from what two engines wrote and returned."""
    plan, forced = materials.plan, case.forced_tokens()
    plain = native["bytes_per_token"] * 2 / getattr(torch, case.dtype).itemsize
    expected, recorded = (torch.load(each.output, mmap=True, weights_only=True) for each in (reference, case))
    rows = plan.forced * plan.texts
    for number, context in enumerate(plan.contexts):
        part = slice(number * rows, (number + 1) * rows)
        distance = quality.compare(expected[part], recorded[part], forced[part])
        said = materials.compare_said(number, stats["said"], native["said"])
        yield {"context": context} | quality.size(stats, plain, context) | distance | said


def run_process(case: quality.Case) -> Row:
    """Run a case in a process of its own; its statistics, or {"failed": last lines of the log}."""
    file = Path(case.output + ".case")
    quality.save_case(case, file)
    command = [sys.executable, "-m", quality.__name__, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    stats: Row = json.loads(Path(case.output + ".json").read_text())
    return stats


def answers(row: Row) -> str:
    """What a row says of free continuations and questions, for a line of text."""
    text = ""
    if "same_tokens" in row:
        text += f", {row['same_tokens']:.0f} of {row['generated']} tokens as native"
    if "retrieved" in row:
        text += f", right answers {row['retrieved']:.0%} (native {row['retrieved_native']:.0%})"
        text += f", over two hops {row['retrieved_two_hops']:.0%} ({row['retrieved_two_hops_native']:.0%})"
    return text


def plot(report: Row, path: Path) -> None:
    """KL divergence against bits per element, exact window included: one panel a model and context."""
    from matplotlib.figure import Figure

    panels = sorted({(row["model"], row["context"]) for row in report["rows"]})
    colors = {name: f"C{i % 10}" for i, name in enumerate(sorted({row["contender"] for row in report["rows"]}))}
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    plots = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(plots, panels, strict=True):
        for row in report["rows"]:
            if (row["model"], row["context"]) == panel:
                place = row["bits_with_window"], row["mean_kld"]
                axes.plot(*place, "o", color=colors[row["contender"]])
                axes.annotate(row["contender"], place, (0, 7), textcoords="offset points", ha="center")
        axes.set(title=f"{panel[0]}, {panel[1]} tokens", xlabel="bits per number, exact tokens counted", yscale="log")
        axes.margins(0.2)
        axes.grid(visible=True, alpha=0.3)
    plots[0].set_ylabel("mean KL divergence from the native cache")
    figure.savefig(path, dpi=120)
