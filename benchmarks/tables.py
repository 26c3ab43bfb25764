"""Tables of the README and of docs/, from the result files; `python docs/make.py` writes them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LLAMA = (32, 8, 128)  # query heads, KV heads, head size
HEADS = [LLAMA, (64, 8, 128), (16, 8, 128), (14, 2, 64), (32, 4, 256)]
HEAD_SHAPES = [(1, 32768), (16, 32768), (64, 4096)]
HEAD_COLUMNS = (
    "query heads on KV heads of size, new tokens", *(f"{batch} x {length}" for batch, length in HEAD_SHAPES)
)  # fmt: skip
QUALITY = {"quality-h200-smollm2": "SmolLM2", "quality-h200-qwen": "Qwen2.5-Coder"}  # file and model
LONGEST = 4096  # context of them
Table = Iterator[Iterable[str]]


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def proof() -> Table:
    yield ("preset", "KV bytes per token", "smaller by", "KLD, window 128", "top-1, window 128", "KLD, no window",
           "top-1, no window", "MiB of pages, exact tokens, tables")  # fmt: skip
    for preset in ("k4v4", "k3v2"):
        engine = results(f"proof-cpu-{preset}")["engine"]
        native, compressed = engine["bytes_per_token_native"], engine["bytes_per_token_compressed"]
        row = [f"`{preset}`", f"{compressed:.0f} of {native:.0f}", f"{native / compressed:.2f}x"]
        for quality in engine["quality"]:
            row += [f"{quality['mean_kld']:.4f}", f"{100 * quality['top1_agreement']:.1f} %"]
        parts = (f"{engine[part] / 2**20:.1f}" for part in ("store_bytes", "ring_bytes", "table_bytes"))
        yield [*row, ", ".join(parts)]


def summary() -> Table:
    """Room and time of a decode step on a GPU, and the distance of real models' answers."""
    report = results("h200-engine")
    steps = {(row["contender"], row["batch"], row["length"]): row["decode_ms_step"] for row in report["rows"]}
    klds = {
        (name, row["contender"]): row["mean_kld"] for name in QUALITY for row in quality_rows(name)
        if row["context"] == LONGEST
    }  # fmt: skip
    shapes = (f"{batch} x {length}, ms" for batch, length in HEAD_SHAPES)
    yield ("cache", "tokens", *shapes, *(f"KLD, {model}" for model in QUALITY.values()))
    for cache, found in report["engines"].items():
        more = found["capacity_tokens"] / report["engines"]["bf16"]["capacity_tokens"]
        milliseconds = (f"{steps[cache, *shape]:.2f}" for shape in HEAD_SHAPES)
        distances = (f"{klds[name, cache]:.4f}" if cache != "bf16" else "-" for name in QUALITY)
        yield (quoted(cache), f"{found['capacity_tokens']:,} ({more:.2f}x)", *milliseconds, *distances)


def quoted(cache: str) -> str:
    return cache if cache in ("bf16", "fp8") else f"`{cache}`"


def engine() -> Table:
    report = results("h200-engine")
    by_place = {(row["contender"], row["batch"], row["length"]): row for row in report["rows"]}
    shapes = sorted({(batch, length) for _, batch, length in by_place})
    yield ("cache", "tokens", *(f"{batch} x {length}" for batch, length in shapes), "prefill")
    for name, found in report["engines"].items():
        ours = quoted(name) != name
        tokens = found["capacity_tokens"]
        more = f" ({tokens / report['engines']['bf16']['capacity_tokens']:.2f}x)" if name != "bf16" else ""
        row = [quoted(name), f"{tokens:,}{more}"]
        for shape in shapes:
            step = by_place[name, *shape]["decode_ms_step"]
            native = [by_place[rival, *shape]["decode_ms_step"] / step for rival in ("bf16", "fp8")]
            row.append(f"{step:.2f}" + (f" ({native[0]:.2f}x, {native[1]:.2f}x)" if ours else ""))
        yield [*row, f"{by_place[name, 16, 32768]['prefill_tok_s']:,.0f}"]


def times(batch: int, length: int, heads: tuple[int, int, int], q_rows: int) -> dict[str, float]:
    """Microseconds of a decode by contender."""
    place = (batch, length, *heads, q_rows)
    keys = ("batch", "length", "hq", "hkv", "d", "q_rows")
    rows = results("h200-kernels")["rows"]
    return {row["contender"]: row["us"] for row in rows if tuple(row[key] for key in keys) == place}


def faster(us: dict[str, float], preset: str) -> tuple[float, float]:
    """Times faster than FlashAttention-3 on a bf16 and on an fp8 cache."""
    return us["fa3-bf16"] / us[preset], us["fa3-fp8"] / us[preset]


def kernels() -> Table:
    presets = ("k4v4", "k3v2", "k2v2")
    yield ("batch x length", "FA3 bf16", "FA3 fp8", "vLLM's TurboQuant, 4 bits", *(f"`{name}`" for name in presets))
    for batch, length in dict.fromkeys((row["batch"], row["length"]) for row in results("h200-kernels")["rows"]):
        us = times(batch, length, LLAMA, 1)
        row = [f"{batch} x {length}", *(f"{us[name]:.0f}" for name in ("fa3-bf16", "fa3-fp8", "vllm-turboquant"))]
        yield row + ["{:.0f} ({:.2f}x, {:.2f}x)".format(us[name], *faster(us, name)) for name in presets]


def heads() -> Table:
    yield HEAD_COLUMNS
    for place, q_rows, ratios in head_ratios():
        cells = (f"{bf16:.2f}x, {fp8:.2f}x" for bf16, fp8 in ratios)
        yield (f"{place[0]} on {place[1]} of {place[2]}, {q_rows}", *cells)


def slower() -> Table:
    """The rows of `heads` with a ratio below 1."""
    head, *rows = heads()
    yield head
    places = zip(rows, head_ratios(), strict=True)
    yield from (row for row, (_, _, ratios) in places if any(ratio < 1 for pair in ratios for ratio in pair))


def head_ratios() -> Iterator[tuple[tuple[int, int, int], int, list[tuple[float, float]]]]:
    """Heads, new tokens a request, and how many times `k4v4` is faster than bf16 and fp8 at each of HEAD_SHAPES."""
    for place in HEADS:
        for q_rows in (1, 4):
            yield place, q_rows, [faster(times(*shape, place, q_rows), "k4v4") for shape in HEAD_SHAPES]


def details() -> Table:
    """Figures of the kernels that are in no other table."""
    report, long, prefill = results("h200-kernels"), (16, 32768), results("h200-prefill")["rows"]
    keys = ("contender", "batch", "length", "hq", "hkv", "d", "q_rows")
    (row,) = (row for row in report["rows"] if tuple(row[key] for key in keys) == ("k4v4", *long, *LLAMA, 1))
    copy, shared = report["copy_gb_per_s"], [row["us"] for row in results("h200-gqa")["rows"]]
    plain = {row["rows"]: row for row in prefill if row["preset"] == "k4v4" and not row["cached"]}
    (behind,) = (row for row in prefill if row["preset"] == "k4v4" and row["cached"])
    few, many = plain[min(plain)], plain[max(plain)]
    yield ("`k4v4`", "figure")
    yield (
        "bytes read at 16 x 32768", f"{row['gb_per_s']:.0f} GB/s, {row['gb_per_s'] / copy:.0%} of a copy's {copy:.0f}"
    )  # fmt: skip
    yield ("relative error of its output there", f"{row['rel_err']:.1e}")
    yield ("1 to 8 query heads on each of 8 KV heads, 16 x 32768", f"{min(shared):.0f} to {max(shared):.0f} us")
    yield (f"encoding {few['rows']} tokens of a layer", f"{few['encode_us']:.1f} us")
    share = many["encode_us"] / many["fa3_bf16_us"]
    yield (f"encoding {many['rows']} tokens", f"{many['encode_us']:.0f} us, {share:.1%} of FA3's time for that prompt")
    yield (
        f"a chunk of {behind['rows']} tokens behind {behind['cached']} compressed ones",
        f"{behind['fa3_bf16_us'] / behind['attend_us']:.2f} times FA3's speed on a bf16 cache",
    )
    yield ("Python's time to launch that", f"{behind['attend_launch_us']:.0f} us a layer")


def sinks() -> Table:
    """The engine with exact first tokens, on another machine."""
    report = results("h200-engine-sinks")
    steps = {(row["contender"], row["batch"], row["length"]): row["decode_ms_step"] for row in report["rows"]}
    yield ("cache", *(f"{batch} x {length}" for batch, length in HEAD_SHAPES))
    for cache in ("bf16", "k4v4"):
        yield (quoted(cache), *(f"{steps[cache, *shape]:.2f}" for shape in HEAD_SHAPES))


def centers() -> Table:
    """Decode attention with key centres that turn, and with constant ones."""
    yield ("preset, centres", *(f"{batch} x {length}" for batch, length in HEAD_SHAPES))
    for preset in ("k4v4", "k3v2"):
        for kind in ("turning", "constant"):
            us = {(row["batch"], row["length"]): row["us"] for row in results(f"h200-centers-{kind}")["rows"]
                  if row["contender"] == preset}  # fmt: skip
            yield (f"`{preset}`, {kind}", *(f"{us[shape]:.1f}" for shape in HEAD_SHAPES))


def quality_rows(name: str) -> list[dict[str, Any]]:
    """float16, and of bfloat16 fp8: FlashAttention-3 has it beside no other dtype."""
    beside = results(f"{name}-bf16")["rows"]
    return results(name)["rows"] + [row for row in beside if row["contender"] == "fp8"]


def quality() -> Table:
    return distances(row for name in QUALITY for row in quality_rows(name) if "+" not in row["contender"])


def quality_all() -> Table:
    """Every row there is, with its dtype."""
    rows = (row for name in QUALITY for part in (name, f"{name}-bf16") for row in results(part)["rows"])
    return distances(row | {"model": f"{row['model']} in {row['dtype']}"} for row in rows)


def distances(rows: Iterable[dict[str, Any]]) -> Table:
    yield ("model, cache", "context", "bits per number, with exact tokens", "KLD", "99 % below", "top-1", "perplexity")
    for row in rows:
        bits = f"{row['bits_per_element']:.2f}, {row['bits_with_window']:.2f}"
        klds = (f"{row[key]:.4f}" for key in ("mean_kld", "p99_kld"))
        head = f"{row['model']}, {quoted(row['contender'])}", str(row["context"])
        yield (*head, bits, *klds, f"{100 * row['top1']:.1f} %", f"x {row['ppl_ratio']:.3f}")


def serving() -> Table:
    report = results("h200-serving")
    yield ("cache", "tokens that it holds", "output tokens a second", "first token, ms", "ms a token")
    for row in report["serving"]:
        times = f"{row['ttft_ms_p50']:,.0f}", f"{row['tpot_ms_p50']:.1f}"
        yield (quoted(row["contender"]), f"{row['capacity_tokens']:,}", f"{row['output_tok_s']:,.0f}", *times)


def fuzz() -> Table:
    yield ("command", "schedules", "steps", "tokens", "failures", "largest error over its bound")
    for path in sorted(RESULTS.glob("fuzz-*.json")):
        found = results(path.stem)
        counts = (f"{found['done'][name]:,}" for name in ("schedules", "steps", "tokens"))
        worst = max(found["worst"].values())
        yield (f"`{found['command']}`", *counts, str(len(found["failures"])), f"{worst:.2f}")


def soak() -> Table:
    yield ("command", "minutes", "requests", "aborted", "preempted", "tokens hit", "KLD, drift", "grown, MiB",
           "failed checks")  # fmt: skip
    for path in sorted(RESULTS.glob("soak-*.json")):
        found = results(path.stem)
        counts = (f"{found[name]:,}" for name in ("finished", "aborted", "preemptions", "prefix_hit_tokens"))
        distance = f"{found['mean_kld']:.1e}, {found['kld_drift']:.0e}"
        grown, failed = f"{found['grown_bytes'] / 2**20:.1f}", ", ".join(found["failed"]) or "none"
        yield (f"`{found['command']}`", f"{found['seconds'] / 60:.0f}", *counts, distance, grown, failed)


def markdown(table: Table) -> str:
    head, *rows = ([*row] for row in table)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, *rows)).replace("\n", f"\n{'|---' * len(head)}|\n", 1)
