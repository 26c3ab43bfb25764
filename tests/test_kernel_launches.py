"""The host's side of the fast decode, without a device: what it serves, and what it launches for a batch."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers import Request, build_codec, normal, plain_step

pytest.importorskip("triton.experimental.gluon")

from turboquant.capture import KVCaptureEngine, plan_in_torch
from turboquant.kernels import choose_kernels, choose_plan, decode, gluon_objection
from turboquant.score import HybridScorer

PROCESSORS = 132
LAYOUTS = [  # key and value bits, head size, KV heads, query heads, block, window
    ({"key_bits": 4, "value_bits": 4}, 128, 8, 32, 32, 128),
    ({"key_bits": 3, "value_bits": 2}, 128, 2, 14, 16, 0),
    ({"key_bits": 8, "value_bits": 4}, 64, 4, 4, 32, 40),
    ({"key_bits": 2, "value_bits": 2}, 256, 1, 8, 16, 128),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]} {layout[1:]}")


class Launches:
    """Stands in for a kernel: keeps grid, arguments and options of every launch."""

    def __init__(self):
        self.made = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.made.append((grid, arguments, options))


@pytest.fixture
def kernels(monkeypatch):
    """An H200 that runs nothing: (launches of prepare, decode and merge)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    places = [
        (decode.gluon_rows, "prepare_kernel"), (decode.gluon_decode, "decode_kernel"),
        (decode.gluon_rows, "merge_kernel"),
    ]  # fmt: skip
    found = [Launches() for _ in places]
    for (module, name), launches in zip(places, found, strict=True):
        monkeypatch.setattr(module, name, launches)
    return found


def made_layer(layout, dtype=torch.bfloat16):
    options, dim, heads, _, block, window = layout
    engine = KVCaptureEngine(1, block, window, 1, sinks=4)
    return engine, engine.add_layer("layer", build_codec(heads, dim, **options), heads, dtype)


def step_of(lengths, block):
    """A batch of (cached, new) tokens; nothing is read, so that all blocks may be the same one."""
    parts = [(Request(0, blocks=[0] * (-(-(cached + new) // block))), cached, new) for cached, new in lengths]
    return plain_step(parts, block).batch


def served(layout, lengths, softcap=0.0):
    """Run a batch of (cached, new) tokens, as many new ones each, through the fast decode alone; returns it."""
    (_, dim, heads, query_heads, block, _), (engine, layer) = layout, made_layer(layout)
    fast, batch = decode.FastDecode(layer, engine.ring), step_of(lengths, block)
    count = batch.num_rows
    query, output = (torch.zeros(count, query_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    own = tuple(torch.zeros(count, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    plan = engine.begin_step(batch)
    rows = {lengths[0][1]: range(len(lengths))}  # as a captured graph has them: all are of one length, without padding
    HybridScorer(dim**-0.5, softcap=softcap, fused=(fast,)).attend(layer, plan, query, own, output, rows)
    return fast


def test_the_memory_of_a_step_ends_with_it(kernels):
    """Without the garbage collector, which engines run rarely."""
    (_, dim, heads, query_heads, block, _), (engine, layer) = LAYOUTS[0], made_layer(LAYOUTS[0])
    fast, batch = decode.FastDecode(layer, engine.ring), step_of([(40, 1)] * 3, block)
    query, output = (torch.zeros(3, query_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    own = tuple(torch.zeros(3, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    gc.collect()
    gc.disable()
    try:
        plan = engine.begin_step(batch)
        HybridScorer(dim**-0.5, fused=(fast,)).attend(layer, plan, query, own, output)
        (launches,) = (found for group in plan.groups.values() for found in group.launches.values())
        kept = [weakref.ref(x) for x in (*launches.prepared.kept.values(), *launches.parts[0].partial.kept.values())]
        for kernel in kernels:
            kernel.made.clear()
        assert len(kept) == 6 and all(x() is not None for x in kept)
        del plan, launches, batch
        assert not any(x() is not None for x in kept)
    finally:
        gc.enable()


def test_much_memory_ends_with_its_layer():
    small = decode.Scratch(torch.device("cpu"), x=((decode.KEPT_BYTES // 4,), torch.float32))
    large = decode.Scratch(torch.device("cpu"), x=((decode.KEPT_BYTES // 4,), torch.float32), y=((1,), torch.int8))
    assert small.take()["x"] is small.take()["x"]
    assert large.kept is None and large.take()["x"] is not large.take()["x"]


def plain(launches):
    """Launches without their tensors, of which the shapes stay."""
    return [
        (grid, [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in arguments], options)
        for grid, arguments, options in launches.made
    ]


@layouts
@pytest.mark.parametrize("new", [1, 4])
def test_launches_do_not_depend_on_lengths(kernels, layout, new):
    """A captured graph replays them for other requests."""
    served(layout, [(17, new), (300, new)])
    short = [plain(launches)[0] for launches in kernels]
    served(layout, [(280, new), (1, new)])
    long = [plain(launches)[1] for launches in kernels]
    for (grid, arguments, options), (other_grid, others, other_options) in zip(short, long, strict=True):
        assert grid == other_grid and options == other_options
        numbers = [(a, b) for a, b in zip(arguments, others, strict=True) if not isinstance(a, tuple)]
        # The stride of the block table, which a captured graph has in a tensor of its own, is all that may differ.
        assert sum(a != b for a, b in numbers) <= 1


@layouts
@pytest.mark.parametrize("requests", [1, 3, 64, 700])
def test_every_request_row_and_segment_has_its_program(kernels, layout, requests):
    _, dim, heads, query_heads, block, _window = layout
    fast = served(layout, [(block, 2)] * requests)
    prepare, attention, merge = kernels
    ((row_programs, prepare_heads), _, options) = prepare.made[0]
    assert prepare_heads == heads and row_programs * options["ROWS"] >= 2 * requests * query_heads // heads
    assert len(attention.made) == len(merge.made)
    seen = 0
    for grid, arguments, options in attention.made:
        entries, partial = arguments[9], arguments[16]
        seen += len(entries)
        count, kv_heads, row_tiles, segments, tile, width = partial.shape
        assert grid == (count * kv_heads, segments, row_tiles) and (count, kv_heads, width) == (
            len(entries),
            heads,
            dim,
        )
        assert row_tiles * tile >= 2 * query_heads // heads and options["R"] == tile
        pieces, exact_tiles = arguments[-5:-3]
        assert pieces * exact_tiles * decode.EXACT_TOKENS >= fast.columns and 1 <= segments - pieces <= 176
        assert count == 1 or partial.nbytes <= 2 * decode.PARTIAL_BYTES + 2**26
    assert seen == requests


@layouts
def test_steps_of_a_variant_take_the_same_compiled_kernels(kernels, layout):
    """`variant` is what decides which steps are rehearsed: all others of it must launch nothing that is new."""
    query_heads, block, known = layout[3], layout[4], {}
    for requests in (1, 2, 3, 7, 8, 33, 128, 300):
        for new in (1, 2, 5, 16):
            for launches in kernels:
                launches.made.clear()
            variant = served(layout, [(block, new)] * requests).variant(requests, new, query_heads)
            options = [[made[2] for made in launches.made[:1]] for launches in kernels]
            assert known.setdefault(variant, options) == options


def test_what_is_served(kernels):
    """Short groups of the model's dtype whose rows can be copied."""
    engine, layer = made_layer(LAYOUTS[0])
    fast = decode.FastDecode(layer, engine.ring)
    query, rows = torch.zeros(600, 32, 128, dtype=torch.bfloat16), torch.zeros(600, 8, 128, dtype=torch.bfloat16)

    def serves(length, cached=0, query=query, own=(rows, rows)):
        return fast.serves(SimpleNamespace(length=length, most_cached=cached), query, own, 0.0)

    assert serves(1) and serves(16, 10**6) and serves(512)
    assert not serves(513) and not serves(512, 16384)
    assert not serves(1, query=query.float()) and not serves(1, own=(rows, rows.half()))
    assert not serves(1, query=query.transpose(1, 2).contiguous().transpose(1, 2))
    assert not serves(1, own=(rows.flatten()[1:][: 599 * 1024].view(599, 8, 128), rows[:599]))


@pytest.mark.parametrize(("options", "dim", "block", "dtype", "said"), [
    ({"value_quantizer": "group"}, 64, 16, torch.bfloat16, "Lloyd-Max values"),
    ({"key_quantizer": "prod"}, 64, 16, torch.bfloat16, "Lloyd-Max or fp8 keys"),
    ({}, 80, 16, torch.bfloat16, "head sizes 64, 128 and 256"),
    ({}, 64, 24, torch.bfloat16, "a multiple of 16 tokens, not 64 and 24"),
    ({"key_bits": 3}, 64, 16, torch.bfloat16, "3 bits from head size 128, not 3 and 4 at 64"),
    ({}, 64, 16, torch.float32, "not torch.float32"),
], ids=lambda x: str(x))  # fmt: skip
def test_layers_that_are_not_served(kernels, options, dim, block, dtype, said):
    _, layer = made_layer((options, dim, 1, 1, block, 0), dtype)
    assert said in decode.unsupported(layer)


def test_fp8_keys_need_a_device_that_converts_them(kernels, monkeypatch):
    _, layer = made_layer(LAYOUTS[2])
    assert decode.unsupported(layer) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert "8.9" in decode.unsupported(layer)


def test_devices_without_gluon(kernels, monkeypatch):
    import triton

    device = torch.device("cuda")
    objection = gluon_objection.__wrapped__
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert objection(device) is None
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in objection(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "8.0" in objection(device) and "8.0" in objection(torch.device("cpu"))


def test_tables_are_the_codecs(kernels):
    """The matrices give the codec's products, in the order of the codes."""
    engine, layer = made_layer(LAYOUTS[0])
    tables = decode.FastDecode(layer, engine.ring).tables
    order = decode.tiles.key_order(4, 128)
    rows = normal(8, 5, 128, seed=1).bfloat16()
    found = tables.query_matrix.products(rows).float() * tables.query_matrix.scale
    expected = (rows.float() @ layer.codec.query_matrix)[..., order]
    assert ((found - expected).norm(dim=-1) <= 0.01 * expected.norm(dim=-1)).all()
    assert sorted(order.tolist()) == list(range(128)) and len(tables.lookup) == 20
    parts = (tables.query_matrix.parts, tables.output_matrix.parts, tables.lookup, tables.axes, tables.weights)
    assert tables.nbytes == sum(x.nbytes for x in parts)


def test_nothing_is_compiled_for_a_cpu():
    engine, layer = made_layer(LAYOUTS[0])
    chosen = choose_kernels(layer, engine.ring)
    assert not chosen.fused and chosen.nbytes == 0 and "CPU" in chosen.reason


def test_devices_without_the_fast_decode_take_portable_kernels():
    """And say why."""
    from turboquant.kernels import encode, history, prefill

    engine, layer = made_layer(LAYOUTS[0])
    layer.store.pages = layer.store.pages.to("meta")  # some device that is not NVIDIA's
    chosen = choose_kernels(layer, engine.ring, attention=lambda *_: None)
    assert (chosen.encode, chosen.history) == (encode.encode, history.history_kernel)
    assert chosen.decode is None and "NVIDIA" in chosen.reason
    assert [type(kernel) for kernel in chosen.fused] == [prefill.StagedPrefill]
    assert choose_kernels(layer, engine.ring).fused == ()
    assert choose_plan(torch.device("cpu")) is plan_in_torch


def test_what_is_compiled_together_is_not_run(monkeypatch):
    """Kernels are asked for without a launch, and as ever afterwards, also where one fails."""
    from triton.runtime.jit import JITFunction

    from turboquant.kernels.compilation import AsyncCompileMode, compile_together

    asked = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **options: asked.append(options))
    original = JITFunction.run

    def launch():
        JITFunction.run(None, grid=(1,), warmup=False)
        raise ZeroDivisionError

    if AsyncCompileMode is None:
        compile_together(launch)
        return
    with pytest.raises(ZeroDivisionError):
        compile_together(launch)
    assert asked == [{"grid": (1,), "warmup": True}] and JITFunction.run is original


def test_windows_are_packed_on_older_releases():
    """Pages of sliding windows count their compressed bytes only."""
    pytest.importorskip("vllm")
    from turboquant.integration.specs import PackedSlidingWindowSpec

    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8, "sliding_window": 128}
    assert PackedSlidingWindowSpec(**sizes, token_bytes=68).real_page_size_bytes == 32 * 2 * 68
