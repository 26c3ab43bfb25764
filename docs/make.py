#!/usr/bin/env python3
"""Tables and pictures of these pages and of the README, from the package and its results: `python docs/make.py`."""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "benchmarks")]
import tables as results_tables  # noqa: E402
from tables import markdown, results  # noqa: E402

from turboquant.config import AUTO, PRESETS, TurboQuantConfig, mixture  # noqa: E402
from turboquant.rotary import SPAN  # noqa: E402

PICTURES = HERE / "pictures"
Table = Iterator[Iterable[str]]
HEAD_SIZES = (64, 128, 256)
STOCK_BYTES = {  # of a token and KV head at those head sizes: vLLM 0.33's sources; its TurboQuant also asked of 0.32
    "bf16": (256, 512, 1024), "`fp8`": (128, 256, 512), "`int4_per_token_head`": (72, 136, 264),
    "`turboquant_k8v4`": (100, 196, 388), "`turboquant_4bit_nc`": (70, 134, 262),
    "`turboquant_k3v4_nc`": (62, 118, 230), "`turboquant_3bit_nc`": (54, 102, 198),
}  # fmt: skip


# ---- tables ----------------------------------------------------------------------------------------------------
def page_format(preset: str, head_dim: int, block_size: int = 32) -> Any:
    from turboquant.codec import KVCodec

    return KVCodec.build(TurboQuantConfig.from_options(preset), 0, 1, head_dim).page_format(block_size)


def smaller(sizes: Iterable[int]) -> list[str]:
    return [f"{size} ({4 * dim / size:.2f}x)" for size, dim in zip(sizes, HEAD_SIZES, strict=True)]


def presets() -> Table:
    yield ("preset", *(f"head size {dim}" for dim in HEAD_SIZES))
    for name in PRESETS:
        yield (f"`{name}`", *smaller(page_format(name, dim).token_bytes for dim in HEAD_SIZES))


def sizes() -> Table:
    yield ("cache", *(f"head size {dim}" for dim in HEAD_SIZES))
    for name, found in STOCK_BYTES.items():
        yield (f"vLLM, {name}", *smaller(found))
    for name in ("k8v4", "k4v4", "k3v2", "k2v2"):
        yield (f"**turboquant, `{name}`**", *smaller(page_format(name, dim).token_bytes for dim in HEAD_SIZES))


def metrics() -> Table:
    from turboquant.integration.telemetry import LABELS, METRICS

    yield ("metric", "kind", "labels", "what")
    for name, metric in METRICS.items():
        shown = f"{name}_total" if metric.kind == "counter" else name
        yield (f"`{shown}`", metric.kind, ", ".join((*LABELS, *metric.labels)), metric.help.rstrip("."))


def versions() -> Table:
    from turboquant.integration.compat import CHECKED

    yield ("vLLM", "checked by")
    yield from CHECKED.items()


def automatic() -> Table:
    rows = results("allocation-smollm2")["rows"]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    by_place = {(row["preset"], row["context"]): row for row in rows}
    columns = [f"{what}, {context} tokens" for context in contexts for what in ("KLD", "99 % below", "top-1")]
    yield ("preset", "bits per number", "layers", *columns)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        found = [by_place[preset, context] for context in contexts]
        distances = [
            (f"{row['mean_kld']:.5f} ± {row['se_kld']:.5f}", f"{row['p99_kld']:.3f}", f"{100 * row['top1']:.1f} %")
            for row in found
        ]
        mixed = mixture(found[0]["formats"]) if preset.startswith(AUTO) else "all alike"
        yield (f"`{preset}`", f"{found[0]['bits']:.2f}", mixed, *(part for parts in distances for part in parts))


def blocks() -> Table:
    rows = {(row["model"], row["cache"]): row for row in results("blocks-cpu")["rows"]}
    caches = list(dict.fromkeys(cache for _, cache in rows))
    yield ("model", *map(results_tables.quoted, caches))
    for model in dict.fromkeys(model for model, _ in rows):
        found = [rows[model, cache] for cache in caches]
        yield (model, *(f"{row['planned_blocks']:,} / {row['vllm_blocks']:,}" for row in found))


# ---- what each route says of a feature -------------------------------------------------------------------------
def engine(**changed: Any) -> Any:
    """vLLM's configuration, plain but for attributes named as in "cache_config__enable_prefix_caching"."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), kv_transfer_config=None, speculative_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True), model_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False), static_forward_context={}
        ),
    )  # fmt: skip
    for path, value in changed.items():
        owner: Any = config
        *parents, name = path.split("__")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


def drafts(method: str) -> Any:
    return engine(speculative_config=SimpleNamespace(method=method))


FEATURES = {
    "prefix caching, chunked prefill, preemption": engine(),
    "tensor parallelism": engine(parallel_config__tensor_parallel_size=2),
    "decode context parallelism": engine(parallel_config__decode_context_parallel_size=2),
    "prefill context parallelism": engine(parallel_config__prefill_context_parallel_size=2),
    "dual-batch overlap": engine(parallel_config__enable_dbo=True),
    "KV connectors": engine(kv_transfer_config=object()),
    "speculative decoding: ngram": drafts("ngram"),
    "speculative decoding: EAGLE": drafts("eagle"),
    "speculative decoding: MTP": drafts("mtp"),
    "speculative decoding: draft model": drafts("draft_model"),
    "speculative decoding: Medusa": drafts("medusa"),
    "full CUDA graphs": engine(
        compilation_config__cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)
    ),
    "`kv_sharing_fast_prefill`": engine(cache_config__kv_sharing_fast_prefill=True),
    "MLA": engine(model_config__use_mla=True),
    "images attended to in both directions": engine(model_config__is_mm_prefix_lm=True),
}  # fmt: skip
ARGUMENTS = {
    "cache_config": None, "alibi_slopes": None, "extra_impl_args": {}, "head_size": 64, "head_size_v": None,
}  # fmt: skip
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments that make the layer, attributes that it has
    "fp8 and other quantised native caches": (
        {"cache_config": SimpleNamespace(cache_dtype="fp8")}, {"kv_cache__dtype": "torch.uint8"}
    ),
    "ALiBi": ({"alibi_slopes": [1.0]}, {"impl__alibi_slopes": [1.0]}),
    "attention sinks": ({"extra_impl_args": {"sinks": [1.0]}}, {"impl__sinks": [1.0]}),
    "layers that share a KV cache": ({}, {"kv_sharing_target_layer_name": "another layer"}),
    "values of another size than keys": ({"head_size_v": 32}, {"head_size_v": 32}),
}  # fmt: skip


def features() -> Table:
    """Asked of the functions that refuse engines and layers when they start."""
    from turboquant.integration import compat

    yield ("feature", "compressed from the start", "on a live engine")
    for name, config in FEATURES.items():
        runner = SimpleNamespace(vllm_config=config, kv_cache_config=SimpleNamespace(kv_cache_groups=()))
        hooks = "stays native" if name == "MLA" else verdict(compat.engine_objections(runner))
        yield name, verdict(compat.config_objections(config)), hooks
    for name, (arguments, attributes) in LAYERS.items():
        native = verdict(compat.arguments_objections({**ARGUMENTS, **arguments}))
        yield name, native, verdict(compat.layer_objections(layer(attributes)))


def layer(changed: dict[str, Any]) -> Any:
    import torch

    shape = torch.empty(1, 2, 32, 128, device="meta")
    cache = SimpleNamespace(dtype=torch.bfloat16, shape=tuple(shape.shape))
    made = SimpleNamespace(
        impl=SimpleNamespace(), kv_cache=cache, head_size=64, num_kv_heads=2, get_attn_backend=SimpleNamespace
    )
    for path, value in changed.items():
        *parents, name = path.split("__")
        setattr(getattr(made, parents[0]) if parents else made, name, value)
    return made


def verdict(objections: list[str]) -> str:
    return "refused" if objections else "served"


# ---- pages -----------------------------------------------------------------------------------------------------
TABLES: dict[str, Callable[[], Table]] = {
    "presets": presets, "sizes": sizes, "metrics": metrics, "versions": versions, "features": features,
    "automatic": automatic,
    "blocks": blocks, "summary": results_tables.summary, "slower": results_tables.slower,
    "proof": results_tables.proof, "kernels": results_tables.kernels, "heads": results_tables.heads,
    "centers": results_tables.centers, "details": results_tables.details, "sinks": results_tables.sinks,
    "fuzz": results_tables.fuzz, "soak": results_tables.soak,
    "engine": results_tables.engine, "quality": results_tables.quality, "serving": results_tables.serving,
    "quality_all": results_tables.quality_all,
}  # fmt: skip


def with_tables(text: str) -> str:
    """A page with the tables between its markers written anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        if start in text:
            head, rest = text.split(start)
            text = head + start + markdown(table()) + rest[rest.index(end) :]
    return text


def pages() -> list[Path]:
    return [HERE.parent / "README.md", *sorted(HERE.glob("*.md"))]


# ---- pictures --------------------------------------------------------------------------------------------------
def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


COLORS = {"key_codes": "#7fb2e5", "value_codes": "#f4b183", "key_scalars": "#2e75b6", "value_scalars": "#c55a11"}


def draw_page(path: Path) -> None:
    """Planes of a page to scale, for presets of one and of two planes of key codes."""
    from matplotlib.patches import Patch

    figure = new_figure(9, 2.8)
    axes = figure.subplots()
    names = ("k4v4", "k3v2", "k2v2")
    for row, preset in enumerate(names):
        found = page_format(preset, 128)
        for plane in found.planes:
            kind, width = plane.name.rstrip("_0123"), plane.token_bytes * found.block_size
            axes.barh(row, width, left=plane.offset, color=COLORS[kind], edgecolor="white", height=0.6)
            if width > 300:
                side = f"{kind.replace('_', ' ')}\n{width} B"
                axes.text(plane.offset + width / 2, row, side, ha="center", va="center", fontsize=8)
        axes.text(found.page_bytes + 40, row, f"{found.page_bytes} B", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("bytes of a page: 32 tokens of one KV head of size 128; in bf16 they take 16384")
    axes.legend(
        handles=[Patch(color=color, label=kind.replace("_", " ")) for kind, color in COLORS.items()], frameon=False
    )
    axes.set_xlim(0, 4800)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


LINES = {
    "write": (
        "key, value", "key: less its\nspan's centre,\ntimes gain", "rotate", "norm,\nnearest\ncentroids",
        "pack bits", "page of\nthe block",
    ),
    "read": (
        "query", "divided by\ngain", "rotate", "scores on\ncentroids, plus\nspan's centre",
        "softmax,\nsum of\ncentroids", "rotate\nback", "merge",
    ),
}  # fmt: skip
ASIDES = {"write": "exact ring: first 16\nand last 128 tokens", "read": "exact ring and\nthe step's own rows"}
BLUE, ORANGE = "#2e75b6", "#c55a11"


def draw_lines(path: Path) -> None:
    """What happens to a key or value when it is written, and to a query when it reads."""
    figure = new_figure(9, 3.2)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.75, 6.5)
    axes.set_ylim(-2.0, 1.6)
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef4fb", "edgecolor": BLUE}
    for y, (name, steps) in zip((1.1, -0.7), LINES.items(), strict=True):
        axes.text(-0.75, y, name, weight="bold", va="center")
        boxes = [
            axes.text(6 * x / (len(steps) - 1), y, step, ha="center", va="center", fontsize=8, bbox=box)
            for x, step in enumerate(steps)
        ]
        for left, right in pairwise(boxes):
            arrow = {"arrowstyle": "->", "patchA": left.get_bbox_patch(), "patchB": right.get_bbox_patch()}
            axes.annotate(
                "", right.get_position(), left.get_position(), arrowprops=arrow | {"shrinkA": 2, "shrinkB": 2}
            )
        axes.text(6, y - 0.95, ASIDES[name], ha="center", va="center", fontsize=8, color=ORANGE)
        ends = [(6, y - 0.68), (6, y - 0.36)]
        axes.annotate("", *(ends if name == "write" else ends[::-1]), arrowprops={"arrowstyle": "->", "color": ORANGE})
    figure.savefig(path, dpi=110)


ROPE = (128, 10_000.0, 8192)  # head size, base and context of the picture


def draw_centre(path: Path) -> None:
    """Energy of a mean key that is left in the keys of a context, for every pair of channels of a rotary embedding.

    The mean turns with e^(i w p); what a constant centre, or one that is turned span by span, cannot take is
    1 - |mean of e^(i w p)|^2, over the context or over a span.
    """
    import numpy as np

    dim, base, context = ROPE
    pairs = np.arange(dim // 2)
    angles = np.outer(base ** (-2 * pairs / dim), np.arange(context))
    figure = new_figure(9, 2.6)
    axes = figure.subplots()
    for positions, label, color in ((context, "one centre", ORANGE), (SPAN, f"a centre per span of {SPAN}", BLUE)):
        left = 1 - np.abs(np.exp(1j * angles[:, :positions]).mean(1)) ** 2
        axes.plot(pairs, left, ".-", color=color, label=label)
    axes.set(xlabel=f"pair of channels, fast ones first (head size {dim}, base {base:,.0f})", ylim=(-0.03, 1.05))
    axes.set_ylabel(f"energy left over\n{context} positions")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def draw_blocks(path: Path) -> None:
    """Tokens of a request: which are read exactly, and in which pages all of them are."""
    figure = new_figure(9, 1.7)
    axes = figure.subplots()
    tokens, block, sinks, window = 416, 32, 16, 128
    for start in range(0, tokens, block):
        axes.barh(0, block, left=start, color="#eef4fb", edgecolor="#2e75b6", height=0.5)
    axes.barh(0, sinks, left=0, color="#f4b183", height=0.5)
    axes.barh(0, window, left=tokens - window - 20, color="#f4b183", height=0.5)
    axes.vlines(range(0, tokens, block), -0.25, 0.25, color=BLUE, linewidth=1)
    axes.barh(0, 1.5, left=tokens - 20, color="#c00000", height=0.7)
    labels = ((sinks / 2, "sinks"), (tokens / 2 - 60, "read from compressed pages"), (tokens - 84, "window, exact"))
    for x, text in labels:
        axes.text(x, 0.42, text, ha="center", fontsize=9)
    axes.text(tokens - 20, -0.6, "the step's own row, exact", ha="right", fontsize=9, color="#c00000")
    axes.set_ylim(-0.8, 0.7)
    axes.set_yticks([])
    axes.set_xlabel("position in the request; every box is a block of 32 tokens")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)


DRAWN = {"page.png": draw_page, "lines.png": draw_lines, "centre.png": draw_centre, "tokens.png": draw_blocks}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        draw(PICTURES / name)
    for page in pages():
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
