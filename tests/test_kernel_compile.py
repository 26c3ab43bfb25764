"""Kernels compile for the GPUs that we serve, without one: at most one spill, no contraction, no flush to zero.

Compilation needs Triton outside its interpreter, which is decided at its import: hence processes of their own, which
run this file.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.uint8: "*u8"}
CONFIGS = {
    "k4v4": {},
    "k3v2": {"key_bits": 3, "value_bits": 2},
    "k8v4": {"key_bits": 8},
    "prod-group": {"key_quantizer": "prod", "value_quantizer": "group"},
}
CASES = [("k4v4", 64), *((config, 16384) for config in CONFIGS)]  # a decode step, and long prompts

ONE_REGISTER = 8  # ptxas aims at 128 registers a thread, and may set one aside outside the loop (k8v4 on sm_90)


def signature_of(kernel, values, unspecialised):
    """Signature, constants and attributes that a launch with these arguments would have."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
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

    source = ASTSource(kernel, *signature_of(kernel, values, unspecialised))
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
    options = {"num_warps": values.pop("num_warps"), "enable_fp_fusion": False}
    compiled = compile_for(encode._encode_kernel, values, capability, encode.UNSPECIALISED, **options)
    ptx = compiled.asm["ptx"]
    return {
        **resources(compiled),
        "ftz": ".ftz" in ptx,
        "contracted": "fma.rn.f32" in ptx,
        "warps": options["num_warps"],
    }


@pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton brings no CUDA tools")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_encode(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.keys() == {f"{config} {tokens}" for config, tokens in CASES}
    for usage in found.values():
        assert usage["STACK"] <= ONE_REGISTER and usage["LOCAL"] == 0
        assert not usage["ftz"] and not usage["contracted"]


if __name__ == "__main__":
    report = {f"{config} {tokens}": compile_encode(int(sys.argv[1]), config, tokens) for config, tokens in CASES}
    sys.stdout.write(json.dumps(report) + "\n")
