"""The cases: public bug reports about quantised KV caches, and where each of them is tested.

Each has one test here, `test_<id>_...`, or is covered by tests elsewhere that need an engine or a device, or both.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS = ("CPU", "interpreter", "refused", "results", "engine", "GPU")


@dataclass(frozen=True)
class Case:
    """kind: how it is tested here (interpreter: also on the CPU; results: from an H200's result files)."""

    title: str
    kind: str
    reports: str


CASES = {
    "C1": Case("kernels read 3-bit codes as 2-bit ones", "interpreter", "vllm#38479"),
    "C2": Case("head sizes that are no power of two", "CPU", "vllm#41413"),
    "C3": Case("tail of a head beyond the last whole group lost", "interpreter", "TheTom/turboquant_plus#29"),
    "C4": Case("heads of 192 and 576: worse, and counted wrongly", "CPU", "TheTom/llama-cpp-turboquant#13, #30"),
    "C5": Case("half of a value never decoded", "interpreter", "TheTom/llama-cpp-turboquant#207"),
    "C6": Case("packing of a single width is wrong", "CPU", "TheTom/llama-cpp-turboquant#241, #311"),
    "C7": Case("norms of 0, tiny, huge; NaN and Inf", "interpreter", "TheTom/turboquant_plus#15"),
    "C8": Case("stale bytes of a block become NaN outputs", "interpreter", "vllm#35219, #47574"),
    "C9": Case("strides taken from shapes", "interpreter", "vllm#49716, #55109"),
    "C10": Case("slot -1 written", "interpreter", "vllm#43810"),
    "C11": Case("32-bit overflow of page offsets", "interpreter", "vllm#47671"),
    "C12": Case("residual sketch without effect or counted twice", "CPU", "quantumaikr/quant.cpp#14"),
    "C13": Case("key biases of Qwen2 models", "CPU", "ggml-org/llama.cpp#21385, vllm#41343"),
    "C14": Case("attention sinks left out of the softmax", "refused", "kekzl/imp#1345, vllm#28589"),
    "C15": Case("sliding windows and rings that wrap", "interpreter", "vllm#41497, ekryski/mlx-swift-lm#210"),
    "C16": Case("shared caches, head sizes per layer", "CPU", "vllm#40108, Alberto-Codes/turboquant-vllm#70"),
    "C17": Case("latents of MLA", "refused", "vllm#41803"),
    "C18": Case("soft cap left out", "interpreter", "vllm#9922"),
    "C19": Case("baseline and codec are the same run", "CPU", "Pushkinist/rMLX#409"),
    "S1": Case("mixed batch drops a cached prefix", "CPU", "vllm#46460"),
    "S2": Case("verify rows under captured graphs", "interpreter", "vllm#40831, #52475"),
    "S3": Case("host waits where a graph is captured", "interpreter", "vllm#40807"),
    "S4": Case("late prefill beside running drafts", "interpreter", "weicj/vLLM-2080Ti-Definitive#210"),
    "S5": Case("scratch too small after warm-up", "CPU", "vllm#41565, #46767"),
    "S6": Case("buffers that grow while serving", "CPU", "vllm#40420"),
    "S7": Case("scratch for every layer", "CPU", "vllm#40655"),
    "S8": Case("whole cache decoded for each chunk", "CPU", "vllm#43878, jundot/omlx#717"),
    "S9": Case("page sizes of hybrid models", "CPU", "Alberto-Codes/turboquant-vllm#76, vllm#41123"),
    "S10": Case("cache dtype 'auto' unknown after an upgrade", "CPU", "vllm#50709"),
    "S11": Case("first layer taken for all", "CPU", "vllm#54599, #48842"),
    "S12": Case("allocated and viewed sizes differ", "CPU", "vllm#41726"),
    "S13": Case("prefix hits in a full pool", "CPU", "vllm#50702"),
    "S14": Case("prefix hits and skipped layers disagree", "CPU", "jundot/omlx#1793, #3690"),
    "S15": Case("preemption, recompute, abort", "CPU", "jundot/omlx#2381, vllm#16832"),
    "S16": Case("prefix hits of huge blocks", "CPU", "vllm#53749"),
    "S17": Case("KV connectors", "refused", "LMCache/LMCache#4744, vllm#40858"),
    "S18": Case("cache of drafters", "refused", "vllm#24505, #32165"),
    "S19": Case("capacity reported wrongly", "CPU", "vllm-project/vllm-metal#468"),
    "S20": Case("silent bypass on hybrid models", "CPU", "sgl-project/sglang#23135"),
    "S21": Case("unusual block sizes", "interpreter", "vllm#42510, #39810"),
    "S22": Case("profiling without a cache", "CPU", "Alberto-Codes/turboquant-vllm#57"),
    "P1": Case("slower the longer the context", "results", "vllm#55610"),
    "P2": Case("small heads in large batches", "results", "vllm#53060"),
    "P3": Case("cache loaded once per query head", "interpreter", "vllm#40792"),
    "P4": Case("launch frozen at the captured length", "interpreter", "vllm#44053"),
    "P5": Case("one long sequence on one program", "interpreter", "pytorch/executorch#20385"),
    "P6": Case("chunks slow down behind a cached prefix", "results", "vllm#43878"),
    "P7": Case("compilation while serving", "interpreter", "vllm#43009"),
    "P8": Case("context from which it pays", "results", "TheTom/llama-cpp-turboquant#44"),
    "P9": Case("launches of a layer and step", "interpreter", "vllm#38479"),
    "P10": Case("what latency to expect", "results", "vLLM's blog of 2026-05-11"),
    "U1": Case("nobody says which layers are served", "CPU", "vllm#38479, #40069"),
    "U2": Case("one reason hides the next", "CPU", "vllm#40094"),
    "U3": Case("signature changed by an upgrade", "CPU", "flagos-ai/FlagGems#1155"),
    "U4": Case("patch that is never called", "CPU", "noonghunna/club-3090, docs/UPSTREAM.md"),
    "U5": Case("numbers missing from the front page", "CPU", "vllm#42621"),
    "U6": Case("right kernels, wrong engine", "engine", "varjoranta/turboquant-vllm"),
    "H1": Case("fp8 on GPUs without it", "interpreter", "vllm#26431, #39908"),
    "H2": Case("Intel GPUs, heads of 512", "CPU", "vllm#44053, #40108"),
    "H3": Case("presets refused on other GPUs", "interpreter", "MooreThreads/vllm-musa#35"),
}  # fmt: skip

COVERED_ELSEWHERE = {
    "C13": "tests/test_engine_calibration.py::test_biased_keys_that_cannot_be_calibrated_are_refused",
    "C16": "tests/test_engine_models.py::test_layers_that_share_a_cache",
    "S1": "tests/test_engine_native.py::test_busy_engine_stays_close_to_requests_run_alone",
    "S2": "tests/test_gpu_kernels.py::test_graph_replay_with_other_lengths",
    "S3": "tests/test_gpu_native.py::test_graphs_and_runners_change_nothing",
    "S4": "tests/test_engine_models.py::test_drafts_cost_and_gain_nothing_but_time",
    "S5": "tests/test_gpu_native.py::test_nothing_is_compiled_and_nothing_grows_once_the_engine_has_started",
    "S6": "tests/test_gpu_native.py::test_nothing_is_compiled_and_nothing_grows_once_the_engine_has_started",
    "S9": "tests/test_engine_models.py::test_attention_beside_recurrent_layers",
    "S13": "tests/test_engine_native.py::test_no_request_sees_the_tokens_of_another",
    "S14": "tests/test_engine_hooks.py::test_prefix_hits_read_the_compressed_cache_after_free",
    "S15": "tests/test_gpu_native.py::test_a_full_pool_preempts",
    "S16": "tests/test_engine_models.py::test_attention_beside_recurrent_layers",
    "S18": "tests/test_engine_models.py::test_drafts_cost_and_gain_nothing_but_time",
    "S19": "tests/test_engine_native.py::test_the_pool_counts_compressed_pages",
    "P4": "tests/test_gpu_kernels.py::test_graph_replay_with_other_lengths",
    "P7": "tests/test_gpu_native.py::test_nothing_is_compiled_and_nothing_grows_once_the_engine_has_started",
    "P10": "tests/test_readme.py::test_tables_are_what_the_results_say",
    "U1": "tests/test_engine_server.py::test_the_log_names_layers_bytes_and_capacity",
    "U3": "tests/test_contract.py::test_hooked_methods_have_the_parameters_that_the_hooks_pass",
    "U4": "tests/test_engine_hooks.py::test_every_codec_runs_in_the_engine",
    "U6": "tests/test_engine_native.py::test_outputs_stay_close_to_the_native_cache",
    "H1": "tests/test_kernel_compile.py::test_encode",
}


def functions_of(path: Path) -> list[str]:
    """Names of the test functions of a file, as its source has them."""
    found = (node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return [name for name in found if name.startswith("test_")]


def case_of(test: str) -> str | None:
    """The case that a test's name begins with, None if it is none."""
    identifier = test.removeprefix("test_").split("_")[0].upper()
    return identifier if identifier in CASES else None


@cache
def case_tests() -> dict[str, list[str]]:
    """Tests here of every case, as file::function."""
    found: dict[str, list[str]] = {case: [] for case in CASES}
    for path in sorted(HERE.glob("test_*.py")):
        for test in functions_of(path):
            if case := case_of(test):
                found[case].append(f"{path.name}::{test}")
    return found
