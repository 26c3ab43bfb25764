"""Calibration through a real engine, and what it is worth with both routes."""

import os

import pytest
from engine_helpers import alone, engine, prompts

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

from turboquant import attach, calibrate  # noqa: E402
from turboquant.demo import smollm2  # noqa: E402
from turboquant.integration import ab  # noqa: E402
from turboquant.integration.calibration_file import load_transforms  # noqa: E402

OPTIONS = {"preset": "k3v4", "buffer_size": 0}
LENGTHS = [70, 130, 200]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(file, KL divergence of hooks without it and with it, outputs with it)."""
    path = tmp_path_factory.mktemp("calibration") / "smollm2.safetensors"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # else the pool takes the memory that the hooks need beside it
    llm = ab.Engine(str(smollm2()), dtype="float32").start()
    assert calibrate(llm, path) == path
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
    return path, found, outputs


def test_the_file_names_every_layer_and_head(calibrated):
    transforms = load_transforms(calibrated[0])
    assert len(transforms) == 30
    assert all(t.center.shape == t.gain.shape == (3, 64) for t in transforms.values())
    assert all(float(t.center.norm()) > 1 for t in transforms.values())


def test_calibration_lowers_the_divergence(calibrated):
    plain, with_file = calibrated[1]
    assert with_file < 0.85 * plain


def test_the_native_route_takes_the_file(calibrated):
    """Token for token what the hooks give with it."""
    path, _, outputs = calibrated
    options = OPTIONS | {"calibration": str(path)}
    with engine(options.pop("preset"), options, max_num_batched_tokens=ab.CHUNK_TOKENS) as llm:
        found = alone(llm, prompts(llm, LENGTHS), 8)
    assert [o.token_ids for o in found] == [o.token_ids for o in outputs]
