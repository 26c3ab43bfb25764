"""The README's tables, from the result files: `python benchmarks/tables.py` writes them between their markers."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
LLAMA = (32, 8, 128)  # query heads, KV heads, head size
HEADS = [LLAMA, (64, 8, 128), (16, 8, 128), (14, 2, 64), (32, 4, 256)]
HEAD_SHAPES = [(1, 32768), (16, 32768), (64, 4096)]
QUALITY = ("quality-smollm2", "quality-qwen")
Table = Iterator[Iterable[str]]


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def proof() -> Table:
    yield ("preset", "KV bytes per token", "smaller by", "KLD, window 128", "top-1, window 128", "KLD, no window",
           "top-1, no window")  # fmt: skip
    for preset in ("k4v4", "k3v2"):
        engine = results(f"proof-cpu-{preset}")["engine"]
        native, compressed = engine["bytes_per_token_native"], engine["bytes_per_token_compressed"]
        row = [f"`{preset}`", f"{compressed:.0f} of {native:.0f}", f"{native / compressed:.2f}x"]
        for quality in engine["quality"]:
            row += [f"{quality['mean_kld']:.4f}", f"{100 * quality['top1_agreement']:.1f} %"]
        yield row


def engine() -> Table:
    report = results("h200-engine")
    by_place = {(row["contender"], row["batch"], row["length"]): row for row in report["rows"]}
    shapes = sorted({(batch, length) for _, batch, length in by_place})
    yield ("cache", "tokens", *(f"{batch} x {length}" for batch, length in shapes), "prefill")
    for name, found in report["engines"].items():
        ours = name not in ("bf16", "fp8")
        tokens = found["capacity_tokens"]
        more = f" ({tokens / report['engines']['bf16']['capacity_tokens']:.2f}x)" if name != "bf16" else ""
        row = [f"`{name}`" if ours else name, f"{tokens:,}{more}"]
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


def over_native(us: dict[str, float], preset: str) -> str:
    return f"{us['fa3-bf16'] / us[preset]:.2f}x, {us['fa3-fp8'] / us[preset]:.2f}x"


def kernels() -> Table:
    presets = ("k4v4", "k3v2", "k2v2")
    yield ("batch x length", "FA3 bf16", "FA3 fp8", "vLLM's TurboQuant, 4 bits", *(f"`{name}`" for name in presets))
    for batch, length in dict.fromkeys((row["batch"], row["length"]) for row in results("h200-kernels")["rows"]):
        us = times(batch, length, LLAMA, 1)
        row = [f"{batch} x {length}", *(f"{us[name]:.0f}" for name in ("fa3-bf16", "fa3-fp8", "vllm-turboquant"))]
        yield row + [f"{us[name]:.0f} ({over_native(us, name)})" for name in presets]


def heads() -> Table:
    shapes = (f"{batch} x {length}" for batch, length in HEAD_SHAPES)
    yield ("query heads on KV heads of size, new tokens", *shapes)
    for place in HEADS:
        for q_rows in (1, 4):
            cells = (over_native(times(*shape, place, q_rows), "k4v4") for shape in HEAD_SHAPES)
            yield (f"{place[0]} on {place[1]} of {place[2]}, {q_rows}", *cells)


def quality() -> Table:
    yield ("model, cache", "context", "bits per number, with exact tokens", "KLD", "99 % below", "top-1")
    for name in QUALITY:
        for row in results(name)["rows"]:
            cache = f"`{row['contender']}`" if row["contender"] != "fp8" else "fp8"
            bits = f"{row['bits_per_element']:.2f}, {row['bits_with_window']:.2f}"
            klds = (f"{row[key]:.4f}" for key in ("mean_kld", "p99_kld"))
            yield (f"{row['model']}, {cache}", str(row["context"]), bits, *klds, f"{100 * row['top1']:.1f} %")


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


TABLES: list[Callable[[], Table]] = [proof, quality, engine, kernels, heads, fuzz, soak]


def markdown(table: Table) -> str:
    head, *rows = ([*row] for row in table)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, *rows)).replace("\n", f"\n{'|---' * len(head)}|\n", 1)


def with_tables(text: str) -> str:
    """The text with every table between its markers written anew; ValueError for a marker that is missing."""
    for table in TABLES:
        start, end = f"<!-- table: {table.__name__} -->\n", "<!-- end of table -->"
        if text.count(start) != 1:
            raise ValueError(f"{start.strip()} must be in the README once, not {text.count(start)} times")
        head, rest = text.split(start)
        text = head + start + markdown(table()) + rest[rest.index(end) :]
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
