"""Launches that skip Triton's binder run the code that it would have chosen, on the right layer's tensors.

Without a GPU: kernels are compiled for one, and a driver stands in that notes what it is asked to launch.  That needs
Triton outside its interpreter, hence a process of its own, which runs this file.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

LAYOUTS = [  # key and value bits, head size, KV heads, query heads, softcap, turning centres
    ({}, 128, 8, 32, 0.0, True),
    ({"key_bits": 3, "value_bits": 2}, 128, 2, 16, 0.0, False),
    ({"key_bits": 8}, 64, 2, 4, 30.0, False),
]
STEPS = {"decode": [(300, 1)] * 5, "mixed": [(300, 1), (300, 1), (400, 600)], "pieces": [(17000, 700)]}


# ---- a driver that notes ---------------------------------------------------------------------------------------
class Notes:
    """Stands in for Triton's CUDA driver; made: (code, grid, arguments) of every launch."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.made, self.codes = [], 0
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_active_torch_device = lambda: torch.device("cpu")
        self.utils = SimpleNamespace(
            load_binary=self.load, get_device_properties=lambda device: {"max_shared_mem": 232448}
        )
        self.launcher_cls = lambda source, metadata: self.launch

    def load(self, name, binary, *rest):
        """A new number in place of a function's address."""
        self.codes += 1
        return 1, self.codes, 100, 0, 1024

    def launch(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.made.append((function, (x, y, z), [plain(argument) for argument in arguments]))

    def taken(self):
        made, self.made = self.made, []
        return made


def plain(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def install():
    from triton.runtime import driver

    notes = Notes()
    driver.set_active(notes)
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    torch.cuda.get_device_properties = lambda *a: SimpleNamespace(multi_processor_count=132)
    return notes


# ---- single launches -------------------------------------------------------------------------------------------
def check_codes(notes):
    """`launch` finds the code that Triton finds, for all that tells codes apart, the first time and again."""
    from triton import language as tl

    from turboquant.kernels.launch import launch

    @triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["B"])
    def kernel(A, B, free, told, factor, SIZE: tl.constexpr, NAME: tl.constexpr):
        x = tl.arange(0, SIZE)
        tl.store(A + x * told, (tl.load(B + x + free) * factor).to(A.dtype.element_ty))

    a, b = torch.zeros(200), torch.zeros(200, dtype=torch.int32)
    tensors = [(a, b), (a[4:], b), (a[1:], b), (a, b[1:]), (a.half(), b), (a, b.long())]
    numbers = [(5, 16, 1.5), (7, 16, 2.5), (5, 32, 1.5), (5, 1, 1.5), (5, 3, 1.5), (1, 3, 1.0), (16, 3, 1.0)]
    constants = [{"SIZE": 64, "NAME": "x"}, {"SIZE": 128, "NAME": "x"}, {"SIZE": 64, "NAME": "y"}]
    options = [{"num_warps": 4}, {"num_warps": 2}]
    launched = 0
    for case in [(t, n, c, o) for t in tensors for n in numbers for c in constants for o in options] * 2:
        operands, values, chosen, compiled = case
        kernel[(3, 2)](*operands, *values, **chosen, **compiled)
        launch(kernel, (3, 2), operands, values, chosen, **compiled)
        expected, found = notes.taken()
        assert expected == found, (case, expected, found)
        launched += 1
    return {"launched": launched, "codes": notes.codes}


def check_compiling(notes):
    """While launches only compile, none is made, and none is remembered as a repeatable one."""
    from triton import language as tl

    from turboquant.kernels.compilation import compile_together
    from turboquant.kernels.launch import Launch, Operands

    @triton.jit
    def kernel(A, SIZE: tl.constexpr):
        tl.store(A + tl.arange(0, SIZE), 1)

    layers = [Operands({"a": torch.zeros(64)}) for _ in range(3)]
    launch = Launch(kernel, (1,), ("a",), (), {"SIZE": 64})
    compile_together(lambda: [launch(layer) for layer in layers])
    compiled = len(notes.taken())
    for layer in layers:
        launch(layer)
    compile_together(lambda: launch(layers[0]))
    given = [arguments[0] for _, _, arguments in notes.taken()]
    return {"while compiling": compiled, "right": given == [layer.raw["a"] for layer in layers]}


# ---- layers of a step ------------------------------------------------------------------------------------------
def made_layers(layout):
    """Three alike layers with tensors of their own, their kernels, and a step's rows."""
    from helpers import make_rotary, normal

    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KeyTransform, KVCodec
    from turboquant.config import TurboQuantConfig
    from turboquant.kernels import decode, prefill

    options, dim, heads, _, _, turns = layout
    engine = KVCaptureEngine(1, 32, 128, 40, sinks=16)
    kernels = []
    for number in range(3):
        rotary = make_rotary(dim, 640) if turns else None
        gain = normal(heads, dim, seed=number).exp()
        transform = KeyTransform(normal(heads, dim, seed=9 + number), gain, rotary)
        codec = KVCodec.build(TurboQuantConfig(**options), number, heads, dim, transform, "cpu")
        layer = engine.add_layer(str(number), codec, heads, torch.bfloat16)
        kernels.append((decode.FastDecode(layer, engine.ring), prefill.StagedPrefill(layer, dense)))
    return engine, kernels


def dense(query, keys, values, scale, causal, window, softcap):
    return torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])


def run_step(engine, kernels, layout, lengths):
    """Layer by layer, each with its own rows: every layer's tensors, and what `notes` got of it."""
    from helpers import Request, plain_step

    from turboquant.capture import ExactWindow, StepPlan
    from turboquant.kernels.encode import encode
    from turboquant.score import HybridScorer

    _, dim, heads, query_heads, softcap, _ = layout
    parts = [(Request(0, blocks=[0] * (-(-(cached + new) // 32))), cached, new) for cached, new in lengths]
    batch = plain_step(parts, 32).batch
    absent = torch.zeros(len(lengths), engine.ring.columns, dtype=torch.int64)
    plan = StepPlan(batch, ExactWindow(absent, absent.bool(), engine.ring.sinks))
    slots = torch.zeros(batch.num_rows, dtype=torch.int64)
    for fast, staged in kernels:
        query, output = (torch.zeros(batch.num_rows, query_heads, dim, dtype=torch.bfloat16) for _ in range(2))
        own = tuple(torch.zeros(batch.num_rows, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        encode(fast.layer, engine.ring, *own, slots)
        HybridScorer(dim**-0.5, softcap=softcap, fused=(fast, staged)).attend(fast.layer, plan, query, own, output)
        yield {"query": query, "output": output, "keys": own[0], "values": own[1], **tensors_of(fast, staged)}


def tensors_of(fast, staged):
    """What belongs to a layer, by name."""
    codec, layer = fast.layer.codec, fast.layer
    named = {"pages": layer.store.pages, "recent keys": layer.recent.keys, "recent values": layer.recent.values}
    named |= {"center": codec.center, "plain center": codec.transform.center, "gain": codec.transform.gain}
    for side, quantizer in (("key", codec.key), ("value", codec.value)):
        named |= {f"{side} {name}": x for name, x in vars(quantizer).items() if isinstance(x, torch.Tensor)}
        named[f"{side} rotation"] = quantizer.rotation.matrix
    for kernel, kind in ((fast.tables, "decode"), (staged, "prefill")):
        named |= {f"{kind} query": kernel.query_matrix.parts, f"{kind} output": kernel.output_matrix.parts}
    return named | {"lookup": fast.tables.lookup, "axes": fast.tables.axes, "weights": fast.tables.weights}


def readable(made, tensors):
    """Launches with names for a layer's tensors, and one for all other memory; part of a tensor counts as it."""
    spans = [(x.data_ptr(), x.data_ptr() + max(1, x.nbytes), name) for name, x in tensors.items()]

    def name(argument):
        if not isinstance(argument, int) or abs(argument) < 1 << 32:
            return argument
        found = [(name, argument - first) for first, last, name in spans if first <= argument < last]
        return found or "other memory"

    return [(code, grid, [name(argument) for argument in arguments]) for code, grid, arguments in made]


@contextmanager
def never_again():
    """Every launch the long way."""
    from turboquant.kernels import launch

    original = launch.Launch.__call__
    launch.Launch.__call__ = lambda self, operands: self._launch(operands)
    try:
        yield
    finally:
        launch.Launch.__call__ = original


def check_layers(notes):
    """A step's second and third layer launch what they would have launched the long way."""
    report = {}
    for layout in LAYOUTS:
        engine, kernels = made_layers(layout)
        for name, lengths in STEPS.items():
            notes.taken()
            found = [readable(notes.taken(), tensors) for tensors in run_step(engine, kernels, layout, lengths)]
            with never_again():
                expected = [readable(notes.taken(), tensors) for tensors in run_step(engine, kernels, layout, lengths)]
            for layer, pair in enumerate(zip(found, expected, strict=True)):
                for one, other in zip(*pair, strict=True):
                    assert one == other, (layout, name, layer, one, other)
            report[f"{layout[0]} {name}"] = [len(launches) for launches in found]
    return report


# ---- tests -----------------------------------------------------------------------------------------------------
def in_a_process(check):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(Path(__file__).parent.parent), str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, __file__, check]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_launches_find_tritons_code():
    found = in_a_process("codes")
    assert found["launched"] == 504 and found["codes"] >= 48  # how many numbers are told apart is up to Triton


def test_nothing_is_launched_while_kernels_compile():
    assert in_a_process("compiling") == {"while compiling": 0, "right": True}


def test_layers_launch_on_their_own_tensors():
    found = in_a_process("layers")
    assert len(found) == len(LAYOUTS) * len(STEPS)
    assert all(min(launches) == max(launches) >= 4 for launches in found.values()), found


if __name__ == "__main__":
    checks = {"codes": check_codes, "compiling": check_compiling, "layers": check_layers}
    sys.stdout.write(json.dumps(checks[sys.argv[1]](install())) + "\n")
