"""How a model of one's own takes compression: the distance of its answers from those of its native cache, and the error
of every layer's attention, measured on one engine with the hooks.

Calibrated as pages compressed from the start are, on the package's text, which is none of what is scored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from turboquant.config import PRESETS
from turboquant.integration import compat
from turboquant.integration.ab import FIRST_SCORED, Engine, compare, first_tokens, score, text_windows
from turboquant.integration.attach import attach
from turboquant.integration.calibrate import calibrate

SHADOWED = 4  # every so many steps are scored both ways
OUTLIER = 1.5  # times the median error: a layer that could be protected
MOST_PROTECTED = 4  # layers
WORTH = 0.8  # of the divergence is left at most, where protecting layers is recommended
Progress = Callable[[str], None]


@dataclass(frozen=True)
class LayerError:
    """Relative L2 error of one layer's attention output against the native one: mean and worst of the sampled steps.

    index: the model's; place: among the layers of attention, by which the hooks skip.
    """

    name: str
    index: int
    place: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Trial:
    """One configuration on the texts.

    skip_layers: by the model's index; bytes_per_token: of all layers, those that stay native included; KL divergence in
    nats, with its standard error; unchanged: capture_only left every log-probability as it was.
    """

    preset: str
    skip_layers: tuple[int, ...]
    bytes_per_token: float
    native_bytes_per_token: float
    mean_kld: float
    se_kld: float
    p99_kld: float
    top1: float
    scored: int
    unchanged: bool
    layers: tuple[LayerError, ...]

    @property
    def smaller(self) -> float:
        """Times smaller than the native cache."""
        return self.native_bytes_per_token / self.bytes_per_token


@dataclass(frozen=True)
class Limits:
    """What is close enough to the native cache: mean KL divergence in nats, agreement of the most likely token."""

    max_kld: float
    min_top1: float

    def hold(self, trial: Trial) -> bool:
        return trial.mean_kld <= self.max_kld and trial.top1 >= self.min_top1


@dataclass(frozen=True)
class Report:
    """Trials of all presets; recommended: the smallest within the limits, None where none is.

    protected: that one again, or the first, with its outliers native; None where that is not worth it.
    """

    model: str
    vllm: str
    calibration: str
    context: int
    limits: Limits
    trials: list[Trial]
    recommended: Trial | None
    protected: Trial | None


@dataclass(frozen=True)
class Bench:
    """A running engine whose native answers to the windows are kept; options: of the hooks, for all trials."""

    llm: Any
    windows: list[list[int]]
    options: dict[str, Any]

    def trial(self, preset: str, protected: Sequence[LayerError] = ()) -> Trial:
        """capture_only for the error of every layer, then full_tq for the answers."""
        options = {"skip_layers": [layer.place for layer in protected], "shadow_interval": SHADOWED} | self.options
        with attach(self.llm, preset=preset, mode="capture_only", ring_share=1.0, **options) as handle:
            score(self.llm, self.windows)
            seen = self.llm.collective_rpc("tqab_compare", args=(len(self.windows[0]) - 1, 0))[0]
            workers = handle.stats()
            handle.set_mode("full_tq")
            quality = compare(self.llm, self.windows, workers[0]["window"])
        native = self.llm.collective_rpc("tqab_token_bytes")[0]
        saved = workers[0]["bytes_per_token_native"] - workers[0]["bytes_per_token_compressed"]
        return Trial(
            preset, tuple(layer.index for layer in protected), native - saved, native, quality.mean_kld,
            quality.se_kld, quality.p99_kld, quality.top1_agreement, quality.scored_tokens,
            seen["max_difference"] == 0, layer_errors(workers, {layer.place for layer in protected}),
        )  # fmt: skip

    def protect(self, plain: Trial) -> Trial | None:
        """The trial with its outliers native, None where there are none or it is not worth it."""
        layers = outliers(plain.layers)
        protected = self.trial(plain.preset, layers) if layers else plain
        return protected if protected.mean_kld <= WORTH * plain.mean_kld else None


def layer_errors(workers: list[dict[str, Any]], skipped: set[int]) -> tuple[LayerError, ...]:
    """Of the worker with the largest error, in model order; skipped: places of layers that stayed native."""
    names = list(workers[0]["per_layer"])
    places = [place for place in range(len(names) + len(skipped)) if place not in skipped]
    found = []
    for name, place in zip(names, places, strict=True):
        error = max((w["per_layer"][name]["shadow_rel_error"] for w in workers), key=lambda error: error["mean"])
        found.append(LayerError(name, compat.layer_index(name), place, error["mean"], error["max"]))
    return tuple(found)


def outliers(layers: Sequence[LayerError]) -> list[LayerError]:
    """The few layers whose error is far above the others', in model order."""
    usual = median(layer.mean for layer in layers)
    far = sorted((x for x in layers if x.mean > OUTLIER * usual), key=lambda layer: -layer.mean)
    return sorted(far[:MOST_PROTECTED], key=lambda layer: layer.index)


def recommend(trials: Sequence[Trial], limits: Limits) -> Trial | None:
    """The smallest cache within the limits, or None."""
    return min((t for t in trials if limits.hold(t)), key=lambda trial: trial.bytes_per_token, default=None)


def windows_of(llm: Any, text: str | None, context: int) -> list[list[int]]:
    """Token ids to score: of the user's text, else prose and code from Python's own documentation and library."""
    return text_windows(llm, context) if text is None else [first_tokens(llm, text, context)]


def calibrated(llm: Any, path: Path, options: dict[str, Any], layer_costs: bool) -> tuple[dict[str, Any], str]:
    """The options with a calibration file, unless they say what to do, and what is to be said of it."""
    if options.get("calibration"):
        return options, options["calibration"]
    try:
        file = calibrate(llm, path, layer_costs=layer_costs)
        return options | {"calibration": str(file)}, "the package's text"
    except ValueError as error:
        return options, f"none, as {error}"


def start(model: str, context: int) -> Any:
    """An engine for windows of `context` tokens, in a pool that leaves room for the hooks' pages."""
    blocks = 2 + -(-2 * context // 16)  # 16 is the smallest block of any backend
    return Engine(model, "auto", max_model_len=context + 1, blocks=blocks).start()


def verify(
    model: str, presets: Sequence[str], limits: Limits, text: str | None, context: int, options: dict[str, Any],
    progress: Progress,
) -> Report:  # fmt: skip
    """Try presets on an engine of their own.

    context: tokens of a window; options: of the hooks; progress: called with what is done next, `steps` times.
    ValueError for a text that is too short, HookError for an engine that is refused.
    """
    if context <= FIRST_SCORED:
        raise ValueError(f"context={context} must be above {FIRST_SCORED}, as earlier tokens are not scored")
    progress("starting vLLM")
    llm = start(model, context)
    try:
        with TemporaryDirectory() as folder:
            return measured(llm, model, presets, limits, text, context, options, Path(folder), progress)
    finally:
        llm.llm_engine.engine_core.shutdown()


def measured(
    llm: Any, model: str, presets: Sequence[str], limits: Limits, text: str | None, context: int,
    options: dict[str, Any], folder: Path, progress: Progress,
) -> Report:  # fmt: skip
    windows = windows_of(llm, text, context)
    progress("scoring with the native cache")
    llm.collective_rpc("tqab_start")
    score(llm, windows)
    llm.collective_rpc("tqab_keep_reference")
    progress("calibrating")
    automatic = any(preset not in PRESETS for preset in presets)
    options, said = calibrated(llm, folder / "calibration.safetensors", options, layer_costs=automatic)
    bench, trials = Bench(llm, windows, options), []
    for preset in presets:
        progress(f"trying {preset}")
        trials.append(bench.trial(preset))
    best = recommend(trials, limits)
    progress("trying to protect layers")
    protected = bench.protect(best or trials[0])
    return Report(Path(model).name, compat.vllm_version(), said, context, limits, trials, best, protected)


def steps(presets: Sequence[str]) -> int:
    """How often `verify` reports progress."""
    return 4 + len(presets)
