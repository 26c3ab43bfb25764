"""`turboquant verify`: what compression does to the answers of one model, and what to choose for it."""

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboquant.cli.arguments import COUNT, SHARE, Json, Options, parse_count, parse_options, parse_share
from turboquant.cli.output import FAILED, print_json, print_table, quiet_vllm, refusing
from turboquant.config import TurboQuantConfig
from turboquant.progress import progress_bar

if TYPE_CHECKING:
    from turboquant.integration.verify import Limits, Report, Trial

USUAL_PRESETS = ("k4v4", "k3v2", "k2v2")
MAX_KLD, MIN_TOP1 = "0.02", "0.95"  # about what vLLM's fp8 cache loses (benchmarks/results/quality-*.json)
OWN_OPTIONS = ("skip_layers", "shadow_interval", "ring_share")  # that the measurement chooses
PRESET_HELP = f"Preset to try; may be repeated. {', '.join(USUAL_PRESETS)} unless given."
QUIET = {"VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
PRESET_COLUMNS = ("cache", "bytes/token", "smaller", "KLD", "99 % below", "top-1", "within limits")


@refusing
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, as vLLM takes it.")],
    preset: Annotated[list[str] | None, typer.Option(metavar="PRESET", help=PRESET_HELP)] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to score; prose and code from Python's documentation.")
    ] = None,
    context: Annotated[str, typer.Option(metavar=COUNT, help="Tokens of the text, or of each of the two.")] = "832",
    max_kld: Annotated[str, typer.Option(metavar=SHARE, help="Largest mean KL divergence, in nats.")] = MAX_KLD,
    min_top1: Annotated[str, typer.Option(metavar=SHARE, help="Smallest agreement of the likeliest token.")] = MIN_TOP1,
    option: Options = None,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots; needs matplotlib.")] = None,
) -> None:
    """Measure what presets do to a model: error of every layer's attention, and distance of the answers.

    Everything is against the same engine's native cache. Exit status 1 if no preset is within the limits.
    """
    quiet_vllm()
    presets, options = preset or list(USUAL_PRESETS), checked_options(option)
    for name in presets:
        TurboQuantConfig.from_options(name, **options)
    limits = parse_share("--max-kld", max_kld), parse_share("--min-top1", min_top1)
    words = None if text is None else text.read_text(encoding="utf-8")
    if html is not None:
        check_matplotlib()
    report = measure(model, presets, limits, words, parse_count("--context", context), options)
    if html is not None:
        from turboquant.cli.report import page

        html.write_text(page(report), encoding="utf-8")
    print_json(asdict(report)) if as_json else show(report)
    if report.recommended is None:
        raise typer.Exit(FAILED)


def checked_options(texts: list[str] | None) -> dict[str, Any]:
    options = parse_options(texts)
    if taken := sorted(options.keys() & set(OWN_OPTIONS)):
        raise ValueError(f"--option {taken[0]} is chosen by the measurement itself; leave it out")
    return options


def check_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("--html needs matplotlib, which is not installed: pip install 'turboquant[plot]'")


def measure(
    model: str, presets: list[str], limits: tuple[float, float], text: str | None, context: int,
    options: dict[str, Any],
) -> "Report":  # fmt: skip
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # whose sampler is recorded
    from turboquant.integration import activation
    from turboquant.integration.verify import Limits, steps
    from turboquant.integration.verify import verify as run
    from turboquant.integration.vllm import HookError

    activation.disable()  # the hooks need a native cache
    with progress_bar(steps(presets)) as progress:
        try:
            return run(model, presets, Limits(*limits), text, context, options, progress)
        except HookError as error:
            raise ValueError(str(error)) from None


# ---- output ----------------------------------------------------------------------------------------------------
def show(report: "Report") -> None:
    for line in heading(report):
        typer.echo(line)
    print_table(PRESET_COLUMNS, preset_rows(report))
    typer.echo()
    print_table(("layer", *(trial.preset for trial in report.trials)), layer_rows(report))
    typer.echo()
    for line in verdict(report):
        typer.echo(line)


def heading(report: "Report") -> Iterable[str]:
    scored = report.trials[0].scored
    yield f"{report.model} on vLLM {report.vllm}, {scored} tokens scored in windows of {report.context}"
    yield f"calibrated with: {report.calibration}"
    if not all(trial.unchanged for trial in report.trials):
        yield "warning: capture_only changed the answers, which it must not; please report this"


def preset_rows(report: "Report") -> list[tuple[str, ...]]:
    trials = [*report.trials, *([report.protected] if report.protected else [])]
    return [preset_row(trial, report.limits) for trial in trials]


def name_of(trial: "Trial") -> str:
    native = ",".join(map(str, trial.skip_layers))
    return f"{trial.preset}, skip_layers={native}" if native else trial.preset


def preset_row(trial: "Trial", limits: "Limits") -> tuple[str, ...]:
    return (
        name_of(trial), f"{trial.bytes_per_token:,.0f}", f"{trial.smaller:.2f}x",
        f"{trial.mean_kld:.4f} ± {trial.se_kld:.4f}", f"{trial.p99_kld:.4f}", f"{100 * trial.top1:.2f} %",
        "yes" if limits.hold(trial) else "no",
    )  # fmt: skip


def layer_rows(report: "Report") -> list[tuple[str, ...]]:
    """Mean relative error of every layer's attention output, in per cent, with each preset."""
    per_layer = zip(*(trial.layers for trial in report.trials), strict=True)
    return [(str(errors[0].index), *(f"{100 * error.mean:.2f} %" for error in errors)) for errors in per_layer]


def verdict(report: "Report") -> Iterable[str]:
    limits, best, protected = report.limits, report.recommended, report.protected
    wanted = f"KLD up to {limits.max_kld:g} and top-1 from {100 * limits.min_top1:g} %"
    if best is None:
        yield f"recommended: none of these presets, as none has {wanted}; try k8v4, or keep vLLM's own cache"
    else:
        yield f"recommended: {best.preset}, the smallest with {wanted}"
    if protected is None:
        yield "layers to protect: none; leaving the worst ones native is not worth it"
        return
    plain = next(trial for trial in report.trials if trial.preset == protected.preset)
    change = f"KLD {plain.mean_kld:.4f} to {protected.mean_kld:.4f}, {plain.smaller:.2f}x to {protected.smaller:.2f}x"
    yield f"layers to protect: {', '.join(map(str, protected.skip_layers))} ({change}):"
    yield f"  --option skip_layers={','.join(map(str, protected.skip_layers))}"
