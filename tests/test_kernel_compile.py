"""Kernels compile for the GPUs that we serve, without one, within what their registers and shared memory hold.

Compilation needs Triton outside its interpreter, which is decided at its import: hence processes of their own, which
run this file.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

GLUON = find_spec("triton.experimental.gluon") is not None
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
CONFIGS = {
    "k4v4": {},
    "k3v2": {"key_bits": 3, "value_bits": 2},
    "k8v4": {"key_bits": 8},
    "prod-group": {"key_quantizer": "prod", "value_quantizer": "group"},
}
CASES = [("k4v4", 64), *((config, 16384) for config in CONFIGS)]  # a decode step, and long prompts

# Bytes of registers set aside, with sliding window and softcap on; a decode without them keeps everything.
MAX_STACK = {"prepare": 0, "decode": 64, "merge": 48}
ONE_REGISTER = 8  # ptxas aims at 128 registers a thread, and may set one aside outside the loop (k8v4 on sm_90)


def signature_of(kernel, values, unspecialised):
    """Signature, constants and attributes that a launch with these arguments would have."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif type(value) is str:  # a page's `Side` is a constant
            signature[name] = value
        elif name.isupper():
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32"
        aligned = signature[name][0] == "*" or (signature[name] == "i32" and value % 16 == 0)
        if aligned and name not in unspecialised:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_for(kernel, values, capability, unspecialised=(), **options):
    """The kernel that these arguments launch, compiled for CUDA devices of a capability such as 90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, *signature_of(kernel, values, unspecialised))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled):
    """Registers, stack and local bytes of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(
        field.split(":") for field in usage.split() if field.count(":") == 1 and field.split(":")[1].isdigit()
    )
    return {name: int(fields[name]) for name in ("REG", "STACK", "LOCAL")}


def compile_encode(capability, config, tokens, dim=128, heads=8):
    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KVCodec
    from turboquant.config import TurboQuantConfig
    from turboquant.kernels import encode

    codec = KVCodec.build(TurboQuantConfig(**CONFIGS[config]), 1, heads, dim)
    engine = KVCaptureEngine(4, 16, 8, 4)
    layer = engine.add_layer("layer", codec, heads, torch.bfloat16)
    rows = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    values = encode.arguments(layer, engine.ring, rows, rows, torch.empty(tokens, dtype=torch.int64))
    warps, found = values.pop("num_warps"), {}
    kernels = [(encode._encode_kernel, warps, encode.UNSPECIALISED)]
    if tokens > 64 and GLUON and encode.has_layout(values["KEY"], True) and encode.has_layout(values["VALUE"], False):
        from turboquant.kernels import gluon_encode

        kernels.append((gluon_encode.encode_kernel, 1, ("count",)))
    for kernel, num_warps, unspecialised in kernels:
        own = values if kernel is encode._encode_kernel else {name: values[name] for name in kernel.arg_names}
        compiled = compile_for(kernel, own, capability, unspecialised, num_warps=num_warps, enable_fp_fusion=False)
        ptx = compiled.asm["ptx"]
        found[kernel.__name__] = {
            **resources(compiled), "ftz": ".ftz" in ptx, "contracted": "fma.rn.f32" in ptx
        }  # fmt: skip
    return found


# key bits, value bits, head size, page size, query heads per KV head and query rows of a tile
DECODES = [
    (4, 4, 128, 32, 4, 4),
    (3, 2, 128, 32, 4, 4),
    (2, 2, 128, 16, 8, 8),
    (4, 4, 128, 32, 16, 16),
    (4, 2, 64, 64, 7, 8),
    (3, 3, 256, 32, 8, 8),
    (8, 4, 128, 32, 4, 4),
]


def decode_arguments(key_bits, value_bits, dim, block, group, tile, capability, many):
    """Arguments of the three kernels of the fast decode, with type names for tensors."""
    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KVCodec
    from turboquant.config import TurboQuantConfig
    from turboquant.kernels import decode

    codec = KVCodec.build(TurboQuantConfig(key_bits=key_bits, value_bits=value_bits), 1, 1, dim)
    layer = KVCaptureEngine(4, block, 128, 4).add_layer("layer", codec, 1, torch.bfloat16)
    types = {
        "*bf16": "RAW KEYS VALUES OWN_KEYS OWN_VALUES MATRIX OUTPUT",
        "*fp32": "FACTOR OUT LSE CENTER WEIGHTS",
        "*fp16": "WAVES COS_SIN",
        "*i32": "OFFSET TABLES BLOCKS REQUESTS AXES",
        "*u8": "PAGES PRESENT",
        "*i64": "INDEX",
        "fp32": "scale softcap matrix_scale key_step",
    }
    values = {name: kind for kind, names in types.items() for name in names.split()}
    values["QUERY"] = "*fp16" if key_bits == 8 else "*i8"
    integers = "block_stride spans heads splits sliding tokens pairs row_tiles tile_bits pieces exact_tiles segments"
    values |= dict.fromkeys(integers.split(), 1001) | dict.fromkeys(
        ["page_stride", "raw_stride", "key_stride", "value_stride", "ring_stride", "output_stride"], 1024
    )
    overlap = capability >= 90
    common = {"G": group, "D": dim, "R": tile, "EXACT": True, "PDL": overlap, "TURNS": not many}
    attention = {"COLUMNS": 144, "SINKS": 16, "SLIDING": True, "SOFTCAP": True, "VSTEP": 0.04}
    count, warps, row_registers = decode.program_rows(dim, many)
    rows = {"FLOAT": key_bits == 8, "ROWS": count, "WARPS": warps, "GROUPS": 1 if many else 4, "LSE_STEPS": 2}
    rows["UNROLL"] = decode.rows_in_flight(dim, count, warps)
    row_options = {"num_warps": warps, "maxnreg": row_registers}
    options = {"num_warps": 1, "maxnreg": decode.max_registers(tile, dim, key_bits)}
    return values | common | attention | rows | decode.kernel_constants(layer), row_options, options


def compile_decode(capability, case):
    from turboquant.kernels import gluon_decode, gluon_rows

    found = {}
    for many in (False, True):
        values, row_options, options = decode_arguments(*case, capability, many)
        kernels = {
            "prepare": (gluon_rows.prepare_kernel, row_options),
            "decode": (gluon_decode.decode_kernel, options),
            "merge": (gluon_rows.merge_kernel, row_options),
        }
        for name, (kernel, launch) in kernels.items():
            chosen = {argument: values[argument] for argument in kernel.arg_names}
            found[f"{name} {many}"] = resources(compile_for(kernel, chosen, capability, **launch))
    return found


HISTORIES = [(config, dim, turns) for config in ("k4v4", "prod-group") for dim in (64, 256) for turns in (False, True)]
ALGORITHM_2_TURNING = ("prod-group", 256, True)  # three operands of 16 rows: more than GPUs for graphics hold
SHARED_BYTES = 99 << 10  # of those GPUs; an A100 has 163 KiB


def compile_history(capability, config, dim, turns):
    """The portable kernel for one query row and for many."""
    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KVCodec
    from turboquant.config import TurboQuantConfig
    from turboquant.kernels import history
    from turboquant.kernels.pages import page_side

    codec = KVCodec.build(TurboQuantConfig(**CONFIGS[config]), 1, 1, dim)
    layout = KVCaptureEngine(4, 16, 8, 4).add_layer("layer", codec, 1, torch.float32).store.format
    types = {
        "*fp32": "query sketch waves key_table value_table out lse", "*fp16": "cos_sin", "*u8": "pages present",
        "*bf16": "scalars", "*i32": "block_table", "*i64": "lengths", "fp32": "softcap",
    }  # fmt: skip
    values = {name: kind for kind, names in types.items() for name in names.split()}
    integers = ("table_stride", "present_stride", "rows", "query_len", "splits", "spans")
    values |= dict.fromkeys((*integers, "sliding"), 1001) | {"page_stride": 4096, "head_stride": 2048}
    values |= {"H": 1, "D": dim, "DIMS": dim, "BS": 16, "COLUMNS": 20, "SINKS": 4, "TURNS": turns}
    values |= {side: page_side(layout, side.lower(), getattr(codec, side.lower())) for side in ("KEY", "VALUE")}
    found = {}
    for rows in (1, 1000):
        tile = history.choose_tile(rows, dim, (config == "prod-group") + turns)
        chosen = values | {"ROWS": tile.rows, "T": tile.tokens}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled = compile_for(history._history_kernel, chosen, capability, integers, **options)
        asynchronous = "wgmma" in compiled.asm["ptx"]
        found[rows] = {**resources(compiled), "shared": compiled.metadata.shared, "asynchronous": asynchronous}
    return found


def compile_ring(capability):
    """The kernels that plan the exact ring, for 256 requests with windows of 128 tokens."""
    from turboquant.kernels import ring

    types = {
        "*i32": "QUERY_START SEQ_LENS TABLE NUMBER LINES",
        "*i64": "ENTRY_OF_PART OWNER USED INDEX",
        "*u8": "WRITTEN PRESENT",
    }
    values = {name: kind for kind, names in types.items() for name in names.split()}
    sizes = {"W": 128, "BS": 32, "ES": 16, "COLS": 16, "ROWS": ring.REQUESTS, "CAPACITY": 2560, "ENTRIES": 4096}
    values |= (
        dict.fromkeys(ring.COUNTS, 1001) | sizes | {"RETIRED": 0, "SINKS": 16, "C": 144, "COLUMNS": 256, "BYTES": 16}
    )
    kernels = {"plan": (ring._plan_kernel, 8), "locate": (ring._locate_kernel, 4)}
    return {
        name: resources(compile_for(kernel, {a: values[a] for a in kernel.arg_names}, capability, num_warps=warps))
        for name, (kernel, warps) in kernels.items()
    }


def compile_without_a_device():
    """What `compile_together` does with two launches of one kernel for 64 and two for 128 numbers, without a device."""
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from turboquant.kernels.compilation import compile_together

    class NoDriver:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    @triton.jit
    def kernel(X, SIZE: tl.constexpr):
        tl.store(X + tl.arange(0, SIZE), 1)

    compiled, launches, x = [], [], torch.zeros(128, dtype=torch.int32)
    driver.set_active(NoDriver())
    triton.knobs.runtime.jit_post_compile_hook = lambda **call: compiled.append(call["fn"].name)

    def launch():
        for size in (64, 128, 64, 128):
            kernel[(1,)](x, size)
            launches.append(size)

    original = triton.JITFunction.run
    compile_together(launch)
    restored = triton.JITFunction.run is original
    return {"compiled": len(compiled), "launches": len(launches), "written": int(x.sum()), "restored": restored}


def in_a_process(what, capability):
    """What this file, run as a program without the interpreter, reports."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, what, str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


needs_tools = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton brings no CUDA tools")


@needs_tools
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_encode(capability):
    found = in_a_process("encode", capability)
    assert found.keys() == {f"{config} {tokens}" for config, tokens in CASES}
    for case, kernels in found.items():
        many = case in ("k4v4 16384", "k3v2 16384", "k8v4 16384") and GLUON
        assert kernels.keys() == {"_encode_kernel", *(["encode_kernel"] if many else [])}
        for usage in kernels.values():
            assert usage["STACK"] <= ONE_REGISTER and usage["LOCAL"] == 0, (case, usage)
            assert not usage["ftz"], case
        assert not kernels["_encode_kernel"]["contracted"]


@needs_tools
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_fast_decode(capability):
    pytest.importorskip("triton.experimental.gluon")
    found = in_a_process("decode", capability)
    assert len(found) == (len(DECODES) if capability >= 90 else len(DECODES) - 1)
    for case, kernels in found.items():
        for name, usage in kernels.items():
            assert usage["STACK"] <= MAX_STACK[name.split()[0]] and usage["LOCAL"] == 0, (case, name, usage)


@needs_tools
@pytest.mark.parametrize("capability", [80, 90])
def test_history(capability):
    """Hopper's asynchronous products stay away: see `history.MAX_ROWS`."""
    found = in_a_process("history", capability)
    assert len(found) == len(HISTORIES)
    for case, kernels in found.items():
        for rows, usage in kernels.items():
            assert usage["LOCAL"] == 0 and not usage["asynchronous"], (case, rows, usage)
            assert usage["shared"] <= SHARED_BYTES or case == str(ALGORITHM_2_TURNING), (case, rows, usage)


@needs_tools
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_ring(capability):
    found = in_a_process("ring", capability)
    assert set(found) == {"plan", "locate"}
    assert all(usage["STACK"] == usage["LOCAL"] == 0 for usage in found.values())


@needs_tools
def test_kernels_compile_together_and_are_not_launched():
    assert in_a_process("together", 90) == {"compiled": 2, "launches": 4, "written": 0, "restored": True}


if __name__ == "__main__":
    chosen = int(sys.argv[2])
    if sys.argv[1] == "together":
        report = compile_without_a_device()
    elif sys.argv[1] == "encode":
        report = {f"{config} {tokens}": compile_encode(chosen, config, tokens) for config, tokens in CASES}
    elif sys.argv[1] == "history":
        report = {str(case): compile_history(chosen, *case) for case in HISTORIES}
    elif sys.argv[1] == "ring":
        report = compile_ring(chosen)
    else:
        cases = [case for case in DECODES if case[0] != 8 or chosen >= 90]  # fp8 keys from 8.9
        report = {str(case): compile_decode(chosen, case) for case in cases}
    sys.stdout.write(json.dumps(report) + "\n")
