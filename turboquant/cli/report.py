"""The page that `turboquant verify --html` writes: tables and plots in one file that needs no other."""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from turboquant.cli.verify import PRESET_COLUMNS, heading, layer_rows, name_of, preset_rows, verdict

if TYPE_CHECKING:
    from turboquant.integration.verify import Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 960px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } img { width: 100%; margin: 1.2em 0 }
p { color: #666; margin: .2em 0 } summary { cursor: pointer; color: #2e75b6; margin-bottom: .8em }
table { border-collapse: collapse } td, th { padding: .2em .9em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } tr.chosen { background: #eef4fb; font-weight: bold }
.verdict { background: #eef4fb; border-left: 4px solid #2e75b6; padding: .6em 1em; margin: 1.2em 0 }
"""
SIZE, DPI = (9.0, 3.4), 150


def page(report: "Report") -> str:
    """HTML of a report."""
    best = None if report.recommended is None else name_of(report.recommended)
    body = [
        f"<h1>turboquant on {escape(report.model)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in heading(report)),
        f'<div class="verdict">{"<br>".join(escape(line) for line in verdict(report))}</div>',
        "<h2>Answers against the native cache</h2>",
        table(PRESET_COLUMNS, preset_rows(report), best),
        image(draw_trials, report, "KL divergence against bytes per token"),
        "<h2>Error of every layer's attention output, relative to the native one</h2>",
        image(draw_layers, report, "error per layer"),
        "<details><summary>As numbers</summary>",
        table(("layer", *(trial.preset for trial in report.trials)), layer_rows(report)),
        "</details>",
    ]
    title = f"turboquant verify: {escape(report.model)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>
<body>
{chr(10).join(body)}
</body></html>
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], chosen: str | None = None) -> str:
    """chosen: first cell of the row that stands out."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(table_row(row, row[0] == chosen) for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def table_row(cells: Sequence[str], chosen: bool) -> str:
    line = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="chosen">{line}</tr>' if chosen else f"<tr>{line}</tr>"


def image(draw: Callable[["Report", Any], None], report: "Report", what: str) -> str:
    """What `draw` draws on matplotlib's axes, as an <img> that holds its data."""
    from matplotlib.figure import Figure

    figure, png = Figure(SIZE, layout="constrained"), io.BytesIO()
    draw(report, figure.subplots())
    figure.savefig(png, format="png", dpi=DPI)
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="{escape(what)}" src="data:image/png;base64,{data}">'


def draw_trials(report: "Report", axes: Any) -> None:
    trials = [*report.trials, *([report.protected] if report.protected else [])]
    for trial in trials:
        axes.errorbar(trial.bytes_per_token, trial.mean_kld, yerr=trial.se_kld, fmt="o", capsize=3)
        axes.annotate(
            name_of(trial), (trial.bytes_per_token, trial.mean_kld), xytext=(6, 4), textcoords="offset points"
        )
    axes.axhline(report.limits.max_kld, color="grey", linestyle="--", label=f"limit {report.limits.max_kld:g}")
    axes.margins(x=0.2)
    axes.set(yscale="log", xlabel="bytes per token", ylabel="mean KL divergence, nats")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()


def draw_layers(report: "Report", axes: Any) -> None:
    for trial in report.trials:
        errors = [layer.mean for layer in trial.layers]
        axes.plot([layer.index for layer in trial.layers], errors, "o-", markersize=3, label=trial.preset)
    axes.set(xlabel="layer", ylabel="relative error", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
