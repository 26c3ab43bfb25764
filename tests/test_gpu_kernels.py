"""The kernels on a CUDA device against their torch twins; skipped elsewhere.

TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_kernels.py writes DIR/kernels-gpu.json
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import make_rotary

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from turboquant.batch import AttentionBatch  # noqa: E402
from turboquant.capture import KVCaptureEngine, LayerCache, StepPlan, exact_entries  # noqa: E402
from turboquant.codec import KeyTransform, KVCodec  # noqa: E402
from turboquant.config import TurboQuantConfig  # noqa: E402
from turboquant.kernels import choose_kernels  # noqa: E402
from turboquant.score import HybridScorer  # noqa: E402

RESULTS: dict[str, float] = {}
MAX_ERROR = 5e-3  # bfloat16 outputs; rounding alone is 1.7e-3
PRESETS = [(4, 4), (8, 4), (3, 3), (4, 2), (3, 2), (2, 2), (4, 3), (3, 4)]


@pytest.fixture(scope="module", autouse=True)
def results():
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    if folder := os.environ.get("TURBOQUANT_RESULTS"):
        report = {
            "command": "TURBOQUANT_RESULTS=DIR python -m pytest tests/test_gpu_kernels.py",
            "device": torch.cuda.get_device_name(),
            "figures": RESULTS,
        }
        Path(folder, "kernels-gpu.json").write_text(json.dumps(report, indent=1) + "\n")


@dataclass
class Case:
    """A batch with history in pages and ring, and the step's own rows."""

    engine: KVCaptureEngine
    layer: LayerCache
    plan: StepPlan
    query: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor]


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, device="cuda")


def make_case(
    lens=(700, 33, 0, 1, 260), *, hq=32, hkv=8, d=128, block=32, q=1, window=128, sinks=16, center="turning",
    dtype=torch.bfloat16, seed=11, **options,
):  # fmt: skip
    """lens: cached tokens of each request; a request without any is padding.  center: turning, constant, or None."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    transform = None
    if center:
        gain = torch.rand(hkv, d, generator=g, device="cuda") + 0.5
        rotary = make_rotary(d, max(lens) + q, device="cuda") if center == "turning" else None
        transform = KeyTransform(normal(g, hkv, d) * 2, gain, rotary)
    codec = KVCodec.build(TurboQuantConfig(**options), 0, hkv, d, transform, "cuda")
    n, per = len(lens), (max(lens) + q) // block + 2
    engine = KVCaptureEngine(n * per, block, window, n * (exact_entries(window, sinks, block) + 1), "cuda", sinks)
    layer = engine.add_layer("layer", codec, hkv, dtype)
    layer.store.pages.fill_(255)
    table = torch.randperm(n * per, generator=g, device="cuda").view(n, per).int()
    cached = torch.tensor(lens, device="cuda")
    new = torch.where(cached > 0, q, 0)

    def starts(counts):
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def rows(count, heads):
        return (normal(g, count, heads, d) + 1).to(dtype)

    positions = [torch.arange(length, device="cuda") for length in lens]
    slots = torch.cat([table[i].long()[p // block] * block + p % block for i, p in enumerate(positions)])
    engine.begin_step(AttentionBatch(starts(cached), cached, table, block))
    engine.ingest(layer, rows(len(slots), hkv), rows(len(slots), hkv), slots)
    plan = engine.begin_step(AttentionBatch(starts(new), cached + new, table, block))
    tokens = int(new.sum()) + 3  # padded rows
    fused = rows(tokens, hq + 2 * hkv)
    own = (fused[:, hq : hq + hkv], fused[:, hq + hkv :])
    return Case(engine, layer, plan, (normal(g, tokens, hq, d) * 2).to(dtype), own)


def check_decode(case, *, sliding=0, softcap=0.0, name):
    scale, tokens = case.query.shape[2] ** -0.5, int(case.plan.batch.query_start[-1])
    kernels = choose_kernels(case.layer, case.engine.ring)
    assert kernels.decode is not None, kernels.reason
    want = torch.full(case.query.shape, 7.0, device="cuda")
    HybridScorer(scale, sliding, softcap).attend(case.layer, case.plan, case.query, case.own, want)
    got = torch.full_like(case.query, 7.0)
    scorer = HybridScorer(scale, sliding, softcap, kernels.history, kernels.fused)
    scorer.attend(case.layer, case.plan, case.query, case.own, got)
    assert (got[tokens:] == 7).all(), "rows of no request were written"
    error = float((got[:tokens].float() - want[:tokens]).norm() / want[:tokens].norm())
    RESULTS[f"decode {name}"] = error
    assert error < MAX_ERROR  # False for NaN
    return got


@pytest.mark.parametrize("bits", PRESETS, ids=str)
def test_decode_of_every_preset(bits):
    check_decode(make_case(key_bits=bits[0], value_bits=bits[1]), name=f"k{bits[0]}v{bits[1]}")


@pytest.mark.parametrize(
    "options",
    [
        {"q": 4},
        {"hq": 64},
        {"hq": 64, "q": 4},
        {"hq": 16, "q": 3},
        {"hq": 8},
        {"hq": 56},
        {"hq": 14, "hkv": 2, "d": 64},
        {"hq": 14, "hkv": 2, "d": 64, "q": 3, "key_bits": 2, "value_bits": 2},
        {"hq": 32, "hkv": 4, "d": 256},
        {"hq": 32, "hkv": 4, "d": 256, "q": 2, "key_bits": 3, "value_bits": 3},
        {"hq": 32, "hkv": 4, "d": 256, "key_bits": 8},
        {"hq": 12, "hkv": 2, "q": 16},
        {"block": 16},
        {"block": 16, "key_bits": 3, "value_bits": 2},
        {"block": 16, "key_bits": 8, "value_bits": 3},
        {"block": 48},
        {"block": 64, "key_bits": 3, "value_bits": 3, "q": 5},
        {"window": 0, "sinks": 0},
        {"window": 0},
        {"window": 37},
        {"sinks": 0},
        {"sinks": 5, "block": 16, "q": 3},
        {"sinks": 48, "block": 48},
        {"lens": tuple(range(1, 200))},
        {"lens": tuple(range(1, 301)), "q": 16},
        {"lens": (300, 40, 7), "q": 20},
        {"lens": (900, 50), "q": 500},
        {"lens": (2000, 33), "q": 100, "hq": 14, "hkv": 2, "d": 64},
        {"lens": (700,), "q": 64, "hq": 32, "hkv": 4, "d": 256},
        {"lens": (5,)},
        {"lens": (3000, 2999)},
        {"lens": (0, 0, 40)},
        {"dtype": torch.float16},
        {"rotation": "haar"},
        {"center": None},
        {"center": "constant"},
        {"center": "constant", "hq": 64, "q": 4, "block": 16},
        {"center": "constant", "hq": 32, "hkv": 4, "d": 256, "key_bits": 8},
    ],
    ids=str,
)
def test_decode_of_every_shape(options):
    check_decode(make_case(**options), name=str(options)[:60])


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ({"sliding": 100}, {}),
        ({"sliding": 300}, {"q": 3, "key_bits": 3, "value_bits": 2}),
        ({"sliding": 50}, {"q": 4, "window": 0}),
        ({"softcap": 5.0}, {}),
        ({"softcap": 20.0, "sliding": 90}, {"q": 2, "key_bits": 8}),
    ],
    ids=str,
)
def test_decode_with_sliding_window_and_softcap(attention, options):
    check_decode(make_case(**options), **attention, name=f"{attention} {options}")


def test_blocks_behind_the_sliding_window_may_hold_anything():
    case = make_case((700, 290), window=16)
    table, sliding = case.plan.batch.block_table, 100
    want = check_decode(case, sliding=sliding, name="before the poison")
    for row, length in enumerate((700, 290)):
        behind = (length + 1 - sliding) // 32  # logical blocks of which no token is seen
        case.layer.store.pages[table[row, :behind].long()] = 255
    assert torch.equal(check_decode(case, sliding=sliding, name="poison behind the window"), want)


def test_graph_replay_with_other_lengths():
    """A captured decode follows lengths that change in place, down to padding."""
    case = make_case((700, 33, 12, 1, 260), window=0, sinks=0)
    starts, table = case.plan.batch.query_start, case.plan.batch.block_table
    seqs = case.plan.batch.seq_lens.clone()
    kernels = choose_kernels(case.layer, case.engine.ring)
    rows, out = {1: range(5)}, torch.zeros_like(case.query)

    def attend(scorer, output):
        plan = StepPlan(AttentionBatch(starts, seqs, table, 32), case.plan.window)  # nothing of it is computed yet
        scorer.attend(case.layer, plan, case.query, case.own, output, rows)

    fast = HybridScorer(128**-0.5, 0, 0.0, kernels.history, kernels.fused)
    attend(fast, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(fast, out)
    for lens in ((700, 33, 12, 1, 260), (100, 20, 3, 1, 64), (640, 0, 0, 0, 0)):
        seqs.copy_(torch.tensor([length + 1 if length else 0 for length in lens], device="cuda"))
        out.fill_(7.0)
        graph.replay()
        want = torch.full(out.shape, 7.0, device="cuda")
        real = seqs > 0
        attend(HybridScorer(128**-0.5), want)
        assert (out[: len(lens)][~real] == 7).all()
        assert (
            float((out[: len(lens)][real].float() - want[: len(lens)][real]).norm() / want[: len(lens)][real].norm())
            < MAX_ERROR
        )


@pytest.mark.parametrize(
    ("options", "sliding", "softcap"),
    [
        ({}, 0, 0.0),
        ({"key_bits": 8}, 0, 0.0),
        ({"d": 64, "hkv": 2, "hq": 14}, 0, 0.0),
        ({"window": 0}, 0, 0.0),
        ({}, 512, 0.0),
        ({}, 500, 0.0),
        ({"window": 0}, 4096, 30.0),
        ({}, 0, 30.0),
    ],
    ids=str,
)
def test_prefill_of_long_chunks(options, sliding, softcap):
    compat = pytest.importorskip("turboquant.integration.compat")
    case = make_case((20000, 33, 700), q=600, **options)
    attention = compat.dense_attention(case.layer.recent.keys)
    if attention is None:
        pytest.skip("no FlashAttention here")
    kernels = choose_kernels(case.layer, case.engine.ring, attention)
    scale, tokens = case.query.shape[2] ** -0.5, int(case.plan.batch.query_start[-1])
    want, got = torch.zeros(case.query.shape, device="cuda"), torch.zeros_like(case.query)
    HybridScorer(scale, sliding, softcap).attend(case.layer, case.plan, case.query, case.own, want)
    fast = HybridScorer(scale, sliding, softcap, fused=kernels.fused)
    fast.attend(case.layer, case.plan, case.query, case.own, got)
    error = float((got[:tokens].float() - want[:tokens]).norm() / want[:tokens].norm())
    RESULTS[f"prefill {options} {sliding} {softcap}"] = error
    assert error < MAX_ERROR


CODECS = [
    *({"key_bits": k, "value_bits": v} for k, v in PRESETS),
    {"key_quantizer": "prod"},
    {"value_quantizer": "group"},
    {"rotation": "haar"},
    {"scale_candidates": 1},
]


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize(("d", "rows"), [(64, 300), (80, 300), (128, 300), (64, 3000), (128, 3000), (256, 3000)])
def test_encode_writes_the_twins_bytes(options, d, rows):
    if options.get("rotation") != "haar" or d == 80:
        pages = []
        for kernel in (True, False):
            case = make_case((1500, 1400), hkv=2, d=d, hq=2, block=16, **options)
            case.layer.store.pages.fill_(0xA5)
            case.engine.ring.written.zero_()
            g = torch.Generator(device="cuda").manual_seed(5)
            keys, values = (normal(g, rows, 2, d).bfloat16() * 3 + 1 for _ in range(2))
            keys[0], values[1], keys[2], values[3] = 0.0, 0.0, keys[2] * 1e25, values[3] * 1e-25
            slots = torch.randperm(case.engine.num_blocks * 16, generator=g, device="cuda")[:rows]
            slots[::7] = -1
            if kernel:
                case.layer.encode = choose_kernels(case.layer, case.engine.ring).encode
            case.engine.ingest(case.layer, keys, values, slots)
            pages.append((case.layer.store.pages, case.layer.recent.keys, case.engine.ring.written))
        for ours, twins in zip(*pages, strict=True):
            different = int((ours != twins).sum())
            RESULTS[f"encode {options} {d} {rows} bytes that differ of {ours.numel()}"] = different
            assert different == 0


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("d", [80, 128])
def test_portable_history(options, d):
    case = make_case(hq=8, hkv=2, d=d, q=3, **options)
    kernels = choose_kernels(case.layer, case.engine.ring)
    scale, tokens = d**-0.5, int(case.plan.batch.query_start[-1])
    outputs = [torch.zeros(case.query.shape, device="cuda") for _ in range(2)]
    for history, out in zip((None, kernels.history), outputs, strict=True):
        HybridScorer(scale, history=history).attend(case.layer, case.plan, case.query, case.own, out)
    want, got = (out[:tokens] for out in outputs)
    error = float((got - want).norm() / want.norm())
    RESULTS[f"history {options} {d}"] = error
    assert error < 1e-4


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("d", [80, 128])
def test_transcode(options, d):
    from turboquant.kernels.transcode import decode_rows

    case = make_case(hq=8, hkv=2, d=d, center="constant", **options)
    batch = case.plan.batch
    slots = (batch.block_table[0, :20].long()[:, None] * 32 + torch.arange(32, device="cuda")).flatten()
    for got, want in zip(
        decode_rows(case.layer.store, slots, torch.float32, rotated=False),
        case.layer.store.read_slots(slots),
        strict=True,
    ):
        assert float((got - want).norm() / want.norm()) < 1e-5
