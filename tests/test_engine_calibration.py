"""Calibration through a real engine, and what it is worth with both routes."""

import os
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import alone, engine, prompts

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant import attach, calibrate  # noqa: E402
from turboquant.calibration import CHUNK, LayerTransforms, sequences, text_ids  # noqa: E402
from turboquant.demo import smollm2  # noqa: E402
from turboquant.integration import ab, backend, compat  # noqa: E402
from turboquant.integration.calibration_file import load_transforms, save_transforms  # noqa: E402
from turboquant.integration.vllm import UnsupportedEngineError  # noqa: E402

OPTIONS = {"preset": "k3v4", "buffer_size": 0}
LENGTHS = [70, 130, 200]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(file, KL divergence of hooks without it and with it, outputs with it, file of observed prompts)."""
    path = tmp_path_factory.mktemp("calibration") / "smollm2.safetensors"
    observed = path.with_name("observed.safetensors")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # else the pool takes the memory that the hooks need beside it
    llm = ab.Engine(str(smollm2()), dtype="float32").start()
    assert calibrate(llm, path) == path
    calibrate(llm, observed, sequences(text_ids(llm.get_tokenizer()), CHUNK))
    windows = ab.text_windows(llm)[:1]
    llm.collective_rpc("tqab_start")
    ab.score(llm, windows)
    llm.collective_rpc("tqab_keep_reference")
    found = []
    for options in ({}, {"calibration": str(path)}):
        llm.reset_prefix_cache()
        with attach(llm, mode="full_tq", **OPTIONS, **options):
            found.append(ab.compare(llm, windows, 0).mean_kld)
            if options:
                outputs = alone(llm, prompts(llm, LENGTHS), 8)
    with pytest.raises(ValueError, match="does not exist"):
        attach(llm, calibration="/nowhere")
    llm.llm_engine.engine_core.shutdown()
    return path, found, outputs, observed


def test_the_file_names_every_layer_and_head(calibrated):
    transforms = load_transforms(calibrated[0])
    assert len(transforms) == 30
    tensors = [x for layer in transforms.values() for x in layer.tensors().items()]
    assert all(x.shape == (3, 64) for _, x in tensors)
    assert all(float(x.norm()) > 1 for side, x in tensors if side.endswith("center"))
    assert sum(layer.turning is not None for layer in transforms.values()) > 15


def test_calibration_lowers_the_divergence(calibrated):
    plain, with_file = calibrated[1]
    assert with_file < 0.85 * plain


def test_the_native_route_takes_the_file(calibrated, tmp_path):
    """Centres that turn where the file has them; without them, token for token what the hooks give with it."""
    path, _, outputs, _ = calibrated
    expected = load_transforms(path)
    constant = tmp_path / "constant.safetensors"
    save_transforms(constant, {name: LayerTransforms(layer.constant) for name, layer in expected.items()})
    for file, turns in ((path, True), (constant, False)):
        options = OPTIONS | {"calibration": str(file)}
        with engine(options.pop("preset"), options, max_num_batched_tokens=ab.CHUNK_TOKENS) as llm:
            used = llm.collective_rpc("tqtest_transforms")[0]
            found = alone(llm, prompts(llm, LENGTHS), 8)
        assert {n: t for n, (t, *_) in used.items()} == {
            n: turns and x.turning is not None for n, x in expected.items()
        }
    assert [o.token_ids for o in found] == [o.token_ids for o in outputs]


def test_the_native_route_calibrates_itself(calibrated):
    """What it measures before it serves is what prompts on a running engine show, here where they reach everywhere."""
    expected = load_transforms(calibrated[3])
    with engine("k4v4", max_model_len=CHUNK) as llm:
        found = llm.collective_rpc("tqtest_transforms")[0]
        assert llm.collective_rpc("tq_stats")[0]["calibrated_layers"] == 30
    assert found.keys() == expected.keys()
    for name, (turns, *sides) in found.items():
        assert turns == (expected[name].turning is not None)
        wanted = expected[name].turning if turns else expected[name].constant
        for measured, side in zip(sides, (wanted.center, wanted.gain), strict=True):
            assert (torch.tensor(measured) - side).norm() <= 1e-3 * side.norm(), name


def test_biased_keys_that_cannot_be_calibrated_are_refused():
    projection = torch.nn.Linear(4, 4)
    runner = SimpleNamespace(
        get_model=lambda: torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"k_proj": projection})})
    )
    with pytest.raises(UnsupportedEngineError, match=r"layer\.k_proj and 0 more.*calibration='none'"):
        backend.refuse_biased(runner, "data_parallel_size=2")
    projection.bias.data.zero_()
    backend.refuse_biased(runner, "data_parallel_size=2")


def test_what_cannot_be_calibrated_at_the_start():
    parallel, compilation = SimpleNamespace(data_parallel_size=2), SimpleNamespace(static_forward_context={})
    config = SimpleNamespace(parallel_config=parallel, compilation_config=compilation)
    assert compat.run_objection(config) == "data_parallel_size=2"
    parallel.data_parallel_size = 1
    assert compat.run_objection(config) is None
