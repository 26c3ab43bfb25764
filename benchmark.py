#!/usr/bin/env python3
"""Measure turboquant's kernels, and engines with it, against what a vLLM user has otherwise.

    python benchmark.py kernels --json benchmarks/results/h200-kernels.json
    python benchmark.py prefill --json benchmarks/results/h200-prefill.json
    python benchmark.py kernels --shapes 16x32768,1x32768 --heads 32,8,128 --presets k4v4
    python benchmark.py engine --json benchmarks/results/h200-engine.json --plot engine.png
    python benchmark.py engine --model FOLDER --contenders bf16,k4v4 --shapes 4x256   (also without a GPU)
    python benchmark.py quality --json benchmarks/results/quality.json --plot quality.png   (also without a GPU)

`engine` and `quality` start every contender as a process of its own: see `turboquant.integration.engine_benchmark` and
`turboquant.integration.quality`.

For `kernels` and `prefill`, every contender runs in this process on the same shapes, is checked against torch before
it is timed, and is timed as the replay of a CUDA graph of several calls (median of several replays), so that no launch
time of Python is in it; attention of prompt chunks, which engines launch from Python, as several calls launched in a
row.  "Ours" is the whole of an attention layer's decode: query preparation, history and exact window, merge.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from turboquant.batch import AttentionBatch
from turboquant.capture import KVCaptureEngine, LayerCache, StepPlan, exact_entries
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import PRESETS, TurboQuantConfig
from turboquant.demo import smollm2
from turboquant.integration import quality_report
from turboquant.integration.compat import dense_attention
from turboquant.integration.engine_benchmark import Case, Geometry, Load, versions
from turboquant.integration.quality import check_contender
from turboquant.kernels import choose_kernels
from turboquant.rotary import Rotary
from turboquant.score import HybridScorer, QueryGroup

SHAPES = "1x4096,1x32768,1x131072,8x8192,16x32768,32x16384,64x4096,256x2048"
HEADS = ("32,8,128", "64,8,128", "14,2,64", "16,8,128", "32,4,256")
DECODE_PRESETS = "k4v4,k8v4,k3v3,k4v2,k3v2,k2v2"
BLOCK = 32  # tokens of a compressed page
WINDOW = 128  # exact tokens
ENGINE_CONTENDERS = "bf16,fp8,k4v4,k3v2"
ENGINE_SHAPES = "1x131072,1x32768,16x32768,64x4096"
QUALITY_CONTENDERS = "fp8,k4v4,k3v2,k2v2,k4v4+calibration=none"
CALLS, REPLAYS = 10, 7
LAYERS = 8  # attention calls that Python launches one after the other, as the layers of a step are
CHECKED_REQUESTS = 1
MAX_ERROR = 5e-3
FP8_ERROR = 0.2  # an fp8 cache of random numbers is that coarse: the gate is against blunders
Attention = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """One decode step: requests of `length` tokens each, `q_rows` of them new."""

    batch: int
    length: int
    hq: int
    hkv: int
    d: int
    q_rows: int = 1

    @property
    def scale(self) -> float:
        return self.d**-0.5

    def starts(self) -> torch.Tensor:
        return torch.arange(self.batch + 1, device="cuda") * self.q_rows

    def query(self) -> torch.Tensor:
        rows = self.batch * self.q_rows
        return torch.randn(rows, self.hq, self.d, device="cuda").bfloat16()


@dataclass(frozen=True)
class Row:
    """What was measured; `gb_per_s` counts the bytes of keys and values that the contender must read."""

    contender: str
    preset: str | None
    batch: int
    length: int
    hq: int
    hkv: int
    d: int
    q_rows: int
    us: float
    gb_per_s: float
    rel_err: float


def graph_time(call: Attention, calls: int = CALLS) -> float:
    """Microseconds of one call, from replays of a CUDA graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return event_time(graph.replay) / calls


def event_time(call: Attention, calls: int = 1) -> float:
    """Microseconds of one call on the device, as launched from Python in runs of `calls`: median of several runs."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def launch_time(call: Attention) -> float:
    """Microseconds that Python takes to launch one call: median of several."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error; raises on NaN."""
    error = float((got.float() - want).norm() / want.norm())
    if math.isnan(error):
        raise RuntimeError("the output holds NaN")
    return error


def gate(name: str, error: float, limit: float) -> float:
    if error > limit:
        raise RuntimeError(f"{name} is wrong: relative error {error:.2e} is above {limit:.0e}; not timed")
    return error


def copy_bandwidth() -> float:
    """GB/s, read and written, of a kernel that copies 1 GiB (a copy node of a graph is slower)."""
    source = torch.zeros(2**28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time(lambda: torch.bitwise_not(source, out=target)) / 1e3


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last rows of one request: query [Q, H_q, d], keys and values [L, H_kv, d], in float32."""
    rows, length = len(query), len(keys)
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,lhd->hgql", grouped, keys.float()) * scale
    position = torch.arange(length - rows, length, device=query.device)
    hidden = torch.arange(length, device=query.device) > position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgql,lhd->qhgd", weights, values.float()).flatten(1, 2)


@dataclass(frozen=True)
class Native:
    """A native cache: FlashAttention-3 as vLLM calls it, on pages of 16 tokens."""

    fp8: bool
    page: int = 16

    @property
    def name(self) -> str:
        return "fa3-fp8" if self.fp8 else "fa3-bf16"

    def row(self, shape: Shape) -> Row:
        call, query, cache, table, out = self._prepare(shape)
        call()
        blocks = table[0].long()
        keys, values = (x[blocks].flatten(0, 1)[: shape.length].float() for x in cache)
        want = plain_attention(query[: shape.q_rows], keys, values, shape.scale)
        limit = FP8_ERROR if self.fp8 else MAX_ERROR
        error = gate(self.name, relative_error(out[: shape.q_rows], want), limit)
        micros = graph_time(call)
        read = 2 * shape.batch * shape.length * shape.hkv * shape.d * (1 if self.fp8 else 2)
        return Row(self.name, None, **asdict(shape), us=micros, gb_per_s=read / micros / 1e3, rel_err=error)

    def _prepare(self, shape: Shape) -> tuple[Any, ...]:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        per = -(-shape.length // self.page)
        cache = torch.empty(2, shape.batch * per, self.page, shape.hkv, shape.d, dtype=dtype, device="cuda")
        for part in cache.view(-1).split(2**28):
            part.copy_(torch.randn(len(part), device="cuda"))
        query = shape.query()
        operand = query.to(dtype)
        table = torch.randperm(shape.batch * per, device="cuda").int().view(shape.batch, per)
        lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda")
        starts, out = shape.starts().int(), torch.empty_like(query)
        one = torch.ones(shape.batch, shape.hkv, device="cuda")
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one) if self.fp8 else {}
        plan = get_scheduler_metadata(
            batch_size=shape.batch, max_seqlen_q=shape.q_rows, max_seqlen_k=shape.length, num_heads_q=shape.hq,
            num_heads_kv=shape.hkv, headdim=shape.d, cache_seqlens=lengths, qkv_dtype=dtype, cu_seqlens_q=starts,
            page_size=self.page, causal=True,
        )  # fmt: skip

        def call() -> None:
            flash_attn_varlen_func(
                q=operand, k=cache[0], v=cache[1], out=out, cu_seqlens_q=starts, max_seqlen_q=shape.q_rows,
                seqused_k=lengths, max_seqlen_k=shape.length, causal=True, softmax_scale=shape.scale,
                block_table=table, fa_version=3, scheduler_metadata=plan, **scales,
            )  # fmt: skip

        return call, operand.float(), cache, table, out


@dataclass(frozen=True)
class Stock:
    """The TurboQuant that vLLM itself carries (4-bit keys and values); decode only, one query row."""

    name: str = "vllm-turboquant"
    preset: str = "turboquant_4bit_nc"

    def row(self, shape: Shape) -> Row:
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig as StockConfig
        from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

        config = StockConfig.from_cache_dtype(self.preset, shape.d)
        page, per = 16, -(-shape.length // 16)
        slot = config.slot_size_aligned
        cache = torch.randint(0, 60, (shape.batch * per, page, shape.hkv, slot), dtype=torch.uint8, device="cuda")
        table = torch.randperm(shape.batch * per, device="cuda").int().view(shape.batch, per)
        lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda")
        codebook = KVCodec.build(TurboQuantConfig(), 0, shape.hkv, shape.d, None, "cuda").value
        query, rotation = shape.query(), codebook.rotation.matrix
        call = lambda: triton_turboquant_decode_attention(  # noqa: E731
            query=query, kv_cache=cache, block_table=table, seq_lens=lengths, Pi=rotation, centroids=codebook.centroids,
            scale=shape.scale, mse_bits=config.key_mse_bits, key_packed_size=config.key_packed_size,
            value_quant_bits=config.effective_value_quant_bits, key_fp8=config.key_fp8,
            norm_correction=config.norm_correction, PiT=rotation.T.contiguous(),
        )  # fmt: skip
        call()
        micros = graph_time(call, calls=3)
        read = shape.batch * shape.length * shape.hkv * slot
        # Random bytes have no meaning in its format: its speed is measured, its output is not ours to judge.
        return Row(self.name, self.preset, **asdict(shape), us=micros, gb_per_s=read / micros / 1e3, rel_err=math.nan)


def layer_codec(preset: str, hkv: int, d: int, context: int, turns: bool = True) -> KVCodec:
    """The codec of a calibrated layer whose centres turn as Llama's keys do, or are the same for all positions."""
    angles = torch.arange(context, device="cuda")[:, None] * 5e5 ** -(torch.arange(0, d, 2, device="cuda") / d)
    rotary = Rotary.of_cache(torch.cat((angles.cos(), angles.sin()), 1), d, False, context) if turns else None
    transform = KeyTransform(torch.randn(hkv, d, device="cuda"), torch.ones(hkv, d, device="cuda"), rotary)
    return KVCodec.build(TurboQuantConfig.from_options(preset), 0, hkv, d, transform, "cuda")


@dataclass(frozen=True)
class Ours:
    """A preset of turboquant on pages of random codes, the last WINDOW tokens exact."""

    preset: str
    turns: bool = True

    @property
    def name(self) -> str:
        return self.preset

    def row(self, shape: Shape) -> Row:
        codec = layer_codec(self.preset, shape.hkv, shape.d, shape.length, self.turns)
        layer, plan, engine = self._cache(shape, codec)
        query = shape.query()
        out = torch.empty_like(query)
        own = tuple(torch.randn(len(query), shape.hkv, shape.d, device="cuda").bfloat16() for _ in range(2))
        kernels = choose_kernels(layer, engine.ring)
        if kernels.decode is None:
            raise RuntimeError(f"{self.preset} has no fast decode here: {kernels.reason}")
        group = QueryGroup(plan, range(shape.batch), shape.q_rows, 0, 0)
        call = lambda: kernels.decode.attend(group, query, own, out, shape.scale, 0.0)  # noqa: E731
        call()
        error = gate(self.name, self._error(shape, layer, plan, query, own, out), MAX_ERROR)
        micros = graph_time(call)
        exact = int(plan.window.present.sum())
        cached = int(plan.batch.history_lens.sum())
        compressed = (cached - exact) * layer.store.format.token_bytes * shape.hkv
        read = compressed + (exact + len(query)) * 4 * shape.hkv * shape.d
        return Row(self.name, self.preset, **asdict(shape), us=micros, gb_per_s=read / micros / 1e3, rel_err=error)

    def _cache(self, shape: Shape, codec: KVCodec) -> tuple[LayerCache, StepPlan, KVCaptureEngine]:
        per = -(-shape.length // BLOCK)
        blocks = shape.batch * per
        engine = KVCaptureEngine(blocks, BLOCK, WINDOW, shape.batch * exact_entries(WINDOW, 0, BLOCK), "cuda")
        layer = engine.add_layer("layer", codec, shape.hkv, torch.bfloat16)
        pages = layer.store.pages
        pages.random_(0, 256)
        for plane in layer.store.format.group("key_scalars") + layer.store.format.group("value_scalars"):
            scalars = layer.store.format.view(pages, plane)
            scalars.copy_((torch.rand(*scalars.shape[:-1], 1, device="cuda") + 0.5).bfloat16().view(torch.uint8))
        if codec.key.bits == 8:  # codes of NaN do not occur in real pages
            keys = layer.store.format.view(pages, layer.store.format.group("key_codes")[0])
            keys[(keys & 127) == 127] = 0
        table = torch.randperm(blocks, device="cuda").int().view(shape.batch, per)
        before = torch.full((shape.batch,), shape.length - shape.q_rows, device="cuda")
        starts = torch.arange(shape.batch + 1, device="cuda") * (shape.length - shape.q_rows)
        engine.begin_step(AttentionBatch(starts, before, table, BLOCK))
        engine.ring.written.fill_(True)
        for rows in (layer.recent.keys, layer.recent.values):
            rows.normal_()
        return layer, engine.begin_step(AttentionBatch(shape.starts(), before + shape.q_rows, table, BLOCK)), engine

    def _error(self, shape: Shape, layer: LayerCache, plan: StepPlan, query: torch.Tensor, own: Any, out: Any) -> float:
        rows = {shape.q_rows: range(CHECKED_REQUESTS)}
        want = torch.zeros(out.shape, device="cuda")
        HybridScorer(shape.scale).attend(layer, plan, query, own, want, rows)
        checked = CHECKED_REQUESTS * shape.q_rows
        return relative_error(out[:checked], want[:checked])


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk of `rows` tokens behind `cached` ones, of one request: our pages, and a native cache beside."""

    preset: str
    rows: int
    cached: int
    hq: int = 32
    hkv: int = 8
    d: int = 128

    def measure(self) -> dict[str, Any]:
        """Microseconds of FlashAttention-3 on a bf16 cache, of our encoder, and of our attention; relative error.

        Attention of both is launched from Python, as in a prefill step; `attend_launch_us` is Python's time for it.
        """
        layer, engine = self._engine()
        attention = dense_attention(layer.recent.keys)
        if attention is None:
            raise RuntimeError("vLLM's FlashAttention is not installed")
        kernels = choose_kernels(layer, engine.ring, attention)
        layer.encode = kernels.encode
        total, device = self.cached + self.rows, "cuda"
        table = torch.randperm(engine.num_blocks, device=device).view(1, -1).int()
        position = torch.arange(total, device=device)
        slots = table[0].long()[position // BLOCK] * BLOCK + position % BLOCK
        fused = torch.randn(total, self.hq + 2 * self.hkv, self.d, device=device).bfloat16()
        query, keys, values = fused.split([self.hq, self.hkv, self.hkv], dim=1)
        new = slice(self.cached, total)
        if self.cached:
            engine.begin_step(self._batch(self.cached, self.cached, table))
            engine.ingest(layer, keys[: self.cached], values[: self.cached], slots[: self.cached])
        plan = engine.begin_step(self._batch(self.rows, total, table))
        encode = graph_time(lambda: engine.ingest(layer, keys[new], values[new], slots[new]))
        query, own = query[new].contiguous(), (keys[new].contiguous(), values[new].contiguous())
        out = torch.empty_like(query)
        scorer = HybridScorer(self.d**-0.5, fused=kernels.fused)
        attend = lambda: scorer.attend(layer, plan, query, own, out)  # noqa: E731
        ours, native = event_time(attend, LAYERS), self._native(query, keys.contiguous(), values.contiguous())
        return {**asdict(self), "fa3_bf16_us": native, "encode_us": encode, "attend_us": ours,
                "attend_launch_us": launch_time(attend),
                "rel_err": gate(self.preset, self._error(layer, plan, query, own, out), MAX_ERROR)}  # fmt: skip

    def _engine(self) -> tuple[LayerCache, KVCaptureEngine]:
        codec = layer_codec(self.preset, self.hkv, self.d, self.cached + self.rows)
        blocks = -(-(self.cached + self.rows) // BLOCK)
        engine = KVCaptureEngine(blocks, BLOCK, WINDOW, exact_entries(WINDOW, 0, BLOCK), "cuda")
        return engine.add_layer("layer", codec, self.hkv, torch.bfloat16), engine

    def _batch(self, rows: int, total: int, table: torch.Tensor) -> AttentionBatch:
        return AttentionBatch(
            torch.tensor([0, rows], device="cuda"), torch.tensor([total], device="cuda"), table, BLOCK
        )

    def _native(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> float:
        """FlashAttention-3 on the same tokens in native pages."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        page, total = Native.page, self.cached + self.rows
        cache = [x.view(total // page, page, self.hkv, self.d) for x in (keys, values)]
        table = torch.arange(total // page, device="cuda").int().view(1, -1)
        lens, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([total], [0, self.rows]))
        out = torch.empty_like(query)
        return event_time(
            lambda: flash_attn_varlen_func(
                q=query, k=cache[0], v=cache[1], out=out, cu_seqlens_q=starts, max_seqlen_q=self.rows, seqused_k=lens,
                max_seqlen_k=total, causal=True, softmax_scale=self.d**-0.5, block_table=table, fa_version=3,
            ),
            LAYERS,
        )  # fmt: skip

    def _error(self, layer: LayerCache, plan: StepPlan, query: torch.Tensor, own: Any, out: Any) -> float:
        """Against the torch scorer."""
        want = torch.zeros(out.shape, device="cuda")
        HybridScorer(self.d**-0.5).attend(layer, plan, query, own, want)
        return relative_error(out, want)


def prefill(arguments: argparse.Namespace) -> None:
    """Encoding of a step's tokens, and attention of prompt chunks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for preset in arguments.presets.split(","):
        for length, cached in parse_shapes(arguments.chunks):
            row = Chunk(preset, length, cached).measure()
            rows.append(row)
            share = row["encode_us"] / row["fa3_bf16_us"]
            print(f"{preset} {length} behind {cached}: encode {row['encode_us']:.1f} us ({share:.1%} of FA3), attend "
                  f"{row['attend_us']:.0f} us ({row['fa3_bf16_us'] / row['attend_us']:.2f}x FA3 bf16 at "
                  f"{row['fa3_bf16_us']:.0f} us), launched in {row['attend_launch_us']:.0f} us, error "
                  f"{row['rel_err']:.1e}", flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    report = {"device": torch.cuda.get_device_name(), "command": own_command(), "rows": rows}
    write_report(arguments.json, report)


# ---- engines ---------------------------------------------------------------------------------------------------
def engine(arguments: argparse.Namespace) -> None:
    """Whole engines: capacity, prefill, decode steps, cached prompts, serving."""
    from tqdm import tqdm

    cases = list(engine_cases(arguments))
    report: dict[str, Any] = {"command": own_command(), "engines": {}, "failed": {}}
    report |= {"rows": [], "serving": [], "starts": []}
    steps = sum(1 + len(case.shapes) + len(case.loads) + 2 * arguments.starts for case in cases)
    with tqdm(total=steps) as bar:
        for case in cases:
            bar.set_description(case.contender)
            for kind, found in chain(run_case(case), measure_starts(case) if arguments.starts else ()):
                collect(report, case.contender, kind, found)
                bar.update()
                write_report(arguments.json, report)
    print_engines(report)
    if arguments.plot:
        plot_engines(report, arguments.plot)


def engine_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    loads = tuple(Load(rate, *arguments.load, arguments.sharing) for rate in arguments.rates)
    options = json.loads(arguments.engine)
    for contender in arguments.contenders.split(","):
        yield Case(
            contender, arguments.model, Geometry(**json.loads(arguments.geometry)),
            tuple(parse_shapes(arguments.shapes)), tuple(arguments.lengths), arguments.repeats, loads, options,
        )  # fmt: skip


def measure_starts(case: Case) -> Iterator[tuple[str, Any]]:
    """("starts", seconds) of two engines that do nothing else, the first with an empty cache of compiled kernels."""
    bare = replace(case, shapes=(), loads=(), engine={"max_model_len": case.max_len, **case.engine})
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            for kind, found in run_case(bare, {"TRITON_CACHE_DIR": folder}):
                if kind == "engine":
                    yield "starts", {"contender": case.contender, "cache": cache, "start_s": found["start_s"]}
                else:
                    yield kind, found


def run_case(case: Case, environment: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """("engine", "row" or "serving", what the process printed), and ("failed", why) if it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "case.json"), Path(folder, "log.txt")
        file.write_text(case.to_json())
        command = [sys.executable, "-m", "turboquant.integration.engine_benchmark", str(file)]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environment or {})}
            ) as run,
        ):
            assert run.stdout is not None
            for line in run.stdout:
                if line.startswith('{"'):  # vLLM prints too
                    yield from json.loads(line).items()
        if run.returncode:
            lines = log.read_text().strip().splitlines()
            yield "failed", [line for line in lines if "Error" in line][-1:] or lines[-1:]


def collect(report: dict[str, Any], contender: str, kind: str, found: Any) -> None:
    if kind in ("engine", "failed"):
        report["engines" if kind == "engine" else kind][contender] = found
    else:
        report["rows" if kind == "row" else kind].append(found)  # also "serving" and "starts"


def print_engines(report: dict[str, Any]) -> None:
    titles = "batch x length", "tokens", "prefill tok/s", "ms a step", "cached s"
    print(f"{'contender':22} {titles[0]:>16} {titles[1]:>10} {titles[2]:>14} {titles[3]:>10} {titles[4]:>9}")
    for row in report["rows"]:
        head = f"{row['contender']:22} {row['batch']:>5} x {row['length']:<8} {row['capacity_tokens']:>10}"
        if "skipped" in row:
            print(head, row["skipped"])
            continue
        print(f"{head} {row['prefill_tok_s']:14.0f} {row['decode_ms_step']:10.2f} {row['cached_prefix_s']:9.3f}")
    for row in report["serving"]:
        print(f"{row['contender']:22} {row['rate']:g} requests/s: {row['output_tok_s']:.0f} tokens/s, first token "
              f"{row['ttft_ms_p50']:.0f} ms, then {row['tpot_ms_p50']:.1f} ms each")  # fmt: skip
    for row in report["starts"]:
        print(f"{row['contender']:22} starts in {row['start_s']:.1f} s with its cache of kernels {row['cache']}")
    for contender, reason in report["failed"].items():
        print(f"{contender:22} failed: {' '.join(reason)}")


def plot_engines(report: dict[str, Any], path: Path) -> None:
    """Step time against the batch's context, and throughput against concurrency where a load was served."""
    from matplotlib.figure import Figure

    panels = 2 if report["serving"] else 1
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    steps, *serving = figure.subplots(1, panels, squeeze=False)[0]
    for contender in report["engines"]:
        rows = [row for row in report["rows"] if row["contender"] == contender and "skipped" not in row]
        draw(steps, contender, [(row["batch"] * row["length"], row["decode_ms_step"]) for row in rows])
        rows = [row for row in report["serving"] if row["contender"] == contender]
        for axes in serving:
            draw(axes, contender, [(row["mean_concurrency"], row["output_tok_s"]) for row in rows])
            axes.set(xlabel="requests running, on average", ylabel="output tokens per second", ylim=(0, None))
    steps.set(xlabel="tokens of context in the batch", ylabel="ms per decode step", xscale="log", ylim=(0, None))
    contexts = sorted({row["batch"] * row["length"] for row in report["rows"]})
    steps.set_xticks(contexts, [f"{context / 1024:g}K" for context in contexts])
    steps.minorticks_off()
    figure.savefig(path, dpi=120)


def draw(axes: Any, label: str, points: list[tuple[float, float]]) -> None:
    if points:
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()


# ---- quality ---------------------------------------------------------------------------------------------------
def quality(arguments: argparse.Namespace) -> None:
    """Distance from the native cache on the decode path, by model, context and contender."""
    from tqdm import tqdm

    models, names = arguments.models or [str(smollm2())], arguments.contenders.split(",")
    for name in names:
        check_contender(name)
    plan = quality_report.Plan(
        names, arguments.contexts, arguments.texts, arguments.forced, arguments.generate, arguments.questions,
        [file.read_text(encoding="utf-8") for file in arguments.text], arguments.dtype, json.loads(arguments.options),
        json.loads(arguments.engine), arguments.jobs,
    )  # fmt: skip
    report: dict[str, Any] = {"command": own_command(), **versions(), "rows": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(models) * (len(names) + 1)) as bar:
        for model in models:
            bar.set_description(Path(model).name)
            for kind, row in quality_report.measure(plan, Path(folder), model, bar.update):
                report[kind].append(row)
                write_report(arguments.json, report)
    for row in report["rows"]:
        print(f"{row['model']:24} {row['context']:6} {row['contender']:24} {row['bits_with_window']:5.2f} bits", end="")
        print(f", KLD {row['mean_kld']:.5f} (99 %: {row['p99_kld']:.4f}), top-1 {row['top1']:.1%}", end="")
        print(f", perplexity x {row['ppl_ratio']:.4f}{quality_report.answers(row)}")
    for failed in report["failed"]:
        print(failed)
    if arguments.plot:
        quality_report.plot(report, arguments.plot)


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def own_command() -> str:
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "16x32768,..." -> [(16, 32768), ...]; ValueError names what it cannot read."""
    try:
        return [(int(batch), int(length)) for batch, length in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise ValueError(f"--shapes {text!r} is not of the form BATCHxLENGTH,BATCHxLENGTH") from None


def parse_heads(texts: list[str]) -> list[tuple[int, int, int]]:
    """ "32,8,128" -> (query heads, KV heads, head size)."""
    heads = [tuple(map(int, text.split(","))) for text in texts if text.replace(",", "").isdigit()]
    if len(heads) != len(texts) or any(len(h) != 3 or h[0] % h[1] for h in heads):
        raise ValueError(f"--heads {texts} are not all of the form H_Q,H_KV,D with H_Q a multiple of H_KV")
    return heads  # type: ignore[return-value]


def shapes(arguments: argparse.Namespace) -> Iterator[Shape]:
    for hq, hkv, d in parse_heads(arguments.heads):
        for batch, length in parse_shapes(arguments.shapes):
            yield from (Shape(batch, length, hq, hkv, d, rows) for rows in arguments.q_rows)


def contenders(arguments: argparse.Namespace, shape: Shape) -> Iterator[Any]:
    if not arguments.no_rivals:
        yield from (Native(fp8=False), Native(fp8=True))
    if arguments.stock and shape.q_rows == 1:
        yield Stock()
    yield from (Ours(preset, not arguments.constant_centers) for preset in arguments.presets.split(","))


def measure(contender: Any, shape: Shape) -> Row | None:
    """The contender's row, or None with a printed reason where it cannot run the shape."""
    try:
        return contender.row(shape)
    except (torch.cuda.OutOfMemoryError, ImportError, RuntimeError) as error:
        print(f"  {contender.name:16} {shape}: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


def kernels(arguments: argparse.Namespace) -> None:
    """Decode attention of one layer."""
    if unknown := set(arguments.presets.split(",")) - set(PRESETS):
        raise ValueError(f"unknown presets {sorted(unknown)}; allowed: {sorted(PRESETS)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth:.0f} GB/s", flush=True)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "copy_gb_per_s": bandwidth, "window": WINDOW, "page": BLOCK,
        "command": own_command(), "rows": [],
    }  # fmt: skip
    for shape in shapes(arguments):
        rows = [row for contender in contenders(arguments, shape) if (row := measure(contender, shape))]
        report["rows"] += [asdict(row) | {"rel_err": None if math.isnan(row.rel_err) else row.rel_err} for row in rows]
        print_table(shape, rows, bandwidth)
        write_report(arguments.json, report)


def print_table(shape: Shape, rows: list[Row], bandwidth: float) -> None:
    head = f"{shape.batch}x{shape.length}, {shape.hq} on {shape.hkv} heads of {shape.d}, {shape.q_rows} query rows"
    print(f"{head}\n  {'':16} {'us':>8} {'GB/s':>6} {'of copy':>8} {'error':>8}  over bf16, over fp8", flush=True)
    native = {row.contender: row.us for row in rows}
    for row in rows:
        ratios = [f"{native[name] / row.us:9.2f}" for name in ("fa3-bf16", "fa3-fp8") if name in native]
        figures = f"{row.us:8.1f} {row.gb_per_s:6.0f} {row.gb_per_s / bandwidth:8.1%} {row.rel_err:8.1e}"
        print(f"  {row.contender:16} {figures} {' '.join(ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("kernels", help="decode attention of one layer, on a CUDA device")
    part.add_argument("--shapes", default=SHAPES, help="BATCHxLENGTH,...")
    part.add_argument("--heads", nargs="+", default=list(HEADS), help="H_Q,H_KV,D ...")
    part.add_argument("--presets", default=DECODE_PRESETS)
    part.add_argument("--q-rows", nargs="+", type=int, default=[1, 4], help="new tokens of a request")
    part.add_argument("--no-rivals", action="store_true", help="leave FlashAttention-3 out")
    part.add_argument("--constant-centers", action="store_true", help="key centres that do not turn with the position")
    part.add_argument("--stock", action="store_true", help="measure vLLM's own TurboQuant too (slow)")
    part.add_argument("--json", type=Path)
    part = commands.add_parser("prefill", help="encoding and prompt chunks of one layer, on a CUDA device")
    part.add_argument("--chunks", default="64x0,2048x32768,16384x0", help="NEWxCACHED,...")
    part.add_argument("--presets", default="k4v4,k3v2")
    part.add_argument("--json", type=Path)
    part = commands.add_parser("engine", help="whole engines, one process per contender")
    part.add_argument(
        "--contenders", default=ENGINE_CONTENDERS, help="bf16, vLLM's cache dtypes, presets, hooks-PRESET"
    )
    part.add_argument("--shapes", default=ENGINE_SHAPES, help="BATCHxPROMPT,...")
    part.add_argument("--model", help="folder with a model; without it, dummy weights")
    part.add_argument("--geometry", default="{}", help='of the dummy model, JSON such as {"layers": 8, "kv_heads": 2}')
    part.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, JSON")
    part.add_argument("--lengths", nargs=2, type=int, default=[8, 72], help="the two generation lengths")
    part.add_argument("--repeats", type=int, default=3)
    part.add_argument("--rates", nargs="*", type=float, default=[], help="serving loads: requests per second")
    part.add_argument("--load", nargs=4, type=int, default=[96, 12288, 4096, 256], metavar="N",
                      help="of a serving load: requests, shared tokens, own tokens, output tokens")  # fmt: skip
    part.add_argument("--sharing", type=int, default=4, help="requests of a serving load that share a document")
    part.add_argument("--starts", action="store_true", help="time starts too, without compiled kernels and again")
    part.add_argument("--json", type=Path)
    part.add_argument("--plot", type=Path, help="PNG; needs matplotlib")
    part = commands.add_parser("quality", help="distance from the native cache, on the decode path")
    part.add_argument("--models", nargs="+", help="folders with models; without it, the demo model")
    part.add_argument(
        "--contenders", default=QUALITY_CONTENDERS,
        help="vLLM's cache dtypes, presets, and presets with options, as in k4v4+buffer_size=64+calibration=none",
    )  # fmt: skip
    part.add_argument("--dtype", default="float32", help="of the engines; a GPU needs float16 or bfloat16")
    part.add_argument("--jobs", type=int, default=1, help="engines at a time")
    part.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096])
    part.add_argument("--texts", type=int, default=4)
    part.add_argument("--forced", type=int, default=192, help="last tokens of a text, which are forced one by one")
    part.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE", help="instead of Python's docs and code"
    )
    part.add_argument("--generate", type=int, default=0, metavar="N", help="tokens that texts are continued by, freely")
    part.add_argument("--questions", type=int, default=0, metavar="N", help="of each kind on facts hidden in a text")
    part.add_argument("--options", default="{}", help="of turboquant, JSON")
    part.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, JSON")
    part.add_argument("--json", type=Path)
    part.add_argument("--plot", type=Path, help="PNG; needs matplotlib")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and arguments.command not in ("engine", "quality"):
        raise SystemExit("benchmark.py kernels and prefill need a CUDA device")
    try:
        {"kernels": kernels, "prefill": prefill, "engine": engine, "quality": quality}[arguments.command](arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
