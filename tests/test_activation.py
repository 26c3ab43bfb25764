"""How the native route is asked for, and what cannot be meant."""

import re
from types import SimpleNamespace

import pytest
import torch

from turboquant import enable_no_alloc
from turboquant.config import TurboQuantConfig
from turboquant.integration import activation


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without our variables, restored afterwards."""
    for name in (activation.PRESET, activation.OPTIONS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("value", [None, "", "0", "off", "OFF"])
def test_not_asked_for(environment, value):
    if value is not None:
        environment.setenv("TURBOQUANT", value)
    assert activation.requested() is activation.requested({}) is activation.requested({"other": 1}) is None


def test_the_variable_names_a_preset(environment):
    environment.setenv("TURBOQUANT", "k3v2")
    assert activation.requested() == TurboQuantConfig.from_options("k3v2", ring_share=activation.RING_SHARE)


def test_options_are_json(environment):
    environment.setenv("TURBOQUANT", "k4v4")
    environment.setenv("TURBOQUANT_OPTIONS", '{"buffer_size": 64, "skip_layers": [0, -1], "ring_share": 0.2}')
    config = activation.requested()
    assert (config.buffer_size, config.skip_layers, config.ring_share) == (64, (0, -1), 0.2)


def test_additional_config_wins(environment):
    environment.setenv("TURBOQUANT", "k4v4")
    assert activation.requested({"turboquant": "k2v2"}).name == "k2v2"
    assert activation.requested({"turboquant": {"preset": "k3v2", "buffer_size": 0}}).buffer_size == 0
    assert activation.requested({"turboquant": {}}).name == "k4v4"


def test_enable_no_alloc_reaches_other_processes_and_is_undone():
    config = enable_no_alloc("k3v2", buffer_size=64)
    assert activation.requested() == config and config.buffer_size == 64
    enable_no_alloc(key_bits=4, value_bits=2)
    assert activation.requested().name == "k4v2"
    assert enable_no_alloc("auto:3.5") == activation.requested() and activation.requested().auto_bits == 3.5
    assert enable_no_alloc(layer_bits=[(8, 4)]) == activation.requested()
    activation.disable()
    assert activation.requested() is None


REFUSED = [
    ({"TURBOQUANT": "k4v5"}, ["'k4v5'", "did you mean 'k4v"]),
    ({"TURBOQUANT_PRESET": "k4v4"}, ["'TURBOQUANT_PRESET'", "TURBOQUANT_OPTIONS"]),
    ({"TURBOQUANT": "k4v4", "TURBOQUANT_OPTION": "{}"}, ["did you mean 'TURBOQUANT_OPTIONS'"]),
    ({"TURBOQUANT": "k4v4", "TURBOQUANT_OPTIONS": "buffer_size=3"}, ["buffer_size=3", "is not JSON"]),
    ({"TURBOQUANT": "k4v4", "TURBOQUANT_OPTIONS": "[1]"}, ["must be a JSON object"]),
    ({"TURBOQUANT": "k4v4", "TURBOQUANT_OPTIONS": '{"bufer_size": 3}'}, ["did you mean 'buffer_size'"]),
    ({"TURBOQUANT": "k4v4", "TURBOQUANT_OPTIONS": '{"buffer_size": -3}'}, ["buffer_size=-3"]),
]


@pytest.mark.parametrize(("variables", "said"), REFUSED)
def test_what_cannot_be_meant_is_refused(environment, variables, said):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError) as error:
        activation.requested()
    for part in said:
        assert part in str(error.value)


def test_an_entry_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="must be a preset"):
        activation.requested({"turboquant": 4})
    with pytest.raises(ValueError, match="unknown preset"):
        enable_no_alloc("k9v9")
    assert activation.requested() is None


# ---- what needs vLLM -------------------------------------------------------------------------------------------
def arguments(**changed):
    """What a layer of a plain decoder is made with."""
    given = {
        "head_size": 64, "head_size_v": None, "cache_config": SimpleNamespace(cache_dtype="auto", sliding_window=None),
        "alibi_slopes": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None, "attn_backend": None,
        "per_layer_sliding_window": None, "extra_impl_args": {}, "prefix": "model.layers.3.self_attn.attn",
    }  # fmt: skip
    return given | changed


OBJECTIONS = [
    ({"alibi_slopes": [0.5]}, "ALiBi"),
    ({"extra_impl_args": {"sinks": object()}}, "sinks"),
    ({"extra_impl_args": {"chunk_lookback": 3}}, "chunk_lookback=3"),
    ({"cache_config": SimpleNamespace(cache_dtype="fp8", sliding_window=None)}, "kv_cache_dtype='fp8'"),
    ({"head_size_v": 128}, "value head size 128"),
]


@pytest.mark.parametrize(("changed", "said"), OBJECTIONS)
def test_layers_that_can_neither_be_compressed_nor_stay(monkeypatch, changed, said):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend, compat
    from turboquant.integration.vllm import UnsupportedEngineError

    monkeypatch.setattr(compat, "layer_place", lambda prefix: compat.LayerPlace(3, 12))
    with pytest.raises(UnsupportedEngineError, match=re.escape(said)) as error:
        backend.backend_for(TurboQuantConfig(), Attention, arguments(**changed))
    assert "model.layers.3" in str(error.value) and "skip_layers" in str(error.value)
    assert backend.backend_for(TurboQuantConfig(skip_layers=(3,)), Attention, arguments(**changed)) == "skip_layers"


def test_layers_that_stay_native(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend, compat

    class ChunkedAttention(Attention):
        pass

    monkeypatch.setattr(compat, "layer_place", lambda prefix: compat.LayerPlace(3, 12))
    config = TurboQuantConfig()
    assert backend.backend_for(config, ChunkedAttention, arguments()) == "is ChunkedAttention"
    own = SimpleNamespace(get_name=lambda: "MINE")
    assert "MINE" in backend.backend_for(config, Attention, arguments(attn_backend=own))
    assert "encoder" in backend.backend_for(config, Attention, arguments(attn_type="encoder_only"))
    chosen = backend.backend_for(config, Attention, arguments())
    assert issubclass(chosen, backend.TurboQuantBackend)
    assert (chosen.key_bits, chosen.token_bytes(64), chosen.token_bytes(128)) == (4, 68, 132)
    first = TurboQuantConfig(initial_layers_count=4, initial_layers_key_bits=8)
    assert backend.backend_for(first, Attention, arguments()).token_bytes(128) == 132 + 64


def test_layers_that_share_a_cache_are_served_like_its_owner(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend, compat
    from turboquant.integration.vllm import UnsupportedEngineError

    theirs, its_backend = SimpleNamespace(impl=object()), backend.backend_of(TurboQuantConfig(), 3, 4)
    ours = SimpleNamespace(impl=object.__new__(backend.TurboQuantImpl), get_attn_backend=lambda: its_backend)
    monkeypatch.setattr(compat, "layer_place", lambda prefix: compat.LayerPlace(3, 12))
    shared, skipping = arguments(kv_sharing_target_layer_name="model.layers.1"), TurboQuantConfig(skip_layers=(3,))
    monkeypatch.setattr(compat, "current_layer", lambda name: ours)
    assert backend.backend_for(TurboQuantConfig(), Attention, shared) is its_backend
    with pytest.raises(UnsupportedEngineError, match=r"model\.layers\.3.* reads the cache of model\.layers\.1"):
        backend.backend_for(skipping, Attention, shared)
    monkeypatch.setattr(compat, "current_layer", lambda name: theirs)
    assert backend.backend_for(skipping, Attention, shared) == "skip_layers"
    with pytest.raises(UnsupportedEngineError, match="put both layers into skip_layers"):
        backend.backend_for(TurboQuantConfig(), Attention, shared)


def test_layers_of_a_draft_model_are_all_alike(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend, compat

    config = TurboQuantConfig(skip_layers=(0,), initial_layers_count=2, initial_layers_key_bits=8)
    monkeypatch.setattr(compat, "layer_place", lambda prefix: compat.LayerPlace(0, 12, draft=True))
    assert backend.backend_for(config, Attention, arguments()).key_bits == config.key_bits


def engine_config(**changed):
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_dbo": False}
    parts = {
        "parallel_config": SimpleNamespace(**parallel | changed.pop("parallel", {})),
        "kv_transfer_config": None,
        "speculative_config": None,
        "cache_config": SimpleNamespace(),
        "model_config": SimpleNamespace(enable_sleep_mode=False, use_mla=False),
    }
    return SimpleNamespace(**parts | changed)


ENGINES = [
    ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
    ({"parallel": {"enable_dbo": True}}, "enable_dbo=True"),
    ({"kv_transfer_config": object()}, "kv_transfer_config"),
    ({"speculative_config": SimpleNamespace(method="medusa")}, "'medusa'"),
    ({"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}, "kv_sharing_fast_prefill"),
    ({"model_config": SimpleNamespace(enable_sleep_mode=False, use_mla=True)}, "MLA"),
    ({"model_config": SimpleNamespace(is_mm_prefix_lm=True)}, "both directions"),
]


@pytest.mark.parametrize(("changed", "said"), ENGINES)
def test_engines_that_cannot_be_served_are_refused_by_name(environment, changed, said):
    pytest.importorskip("vllm")
    from turboquant.integration import plugin
    from turboquant.integration.vllm import UnsupportedEngineError

    environment.setenv("TURBOQUANT", "k4v4")
    with pytest.raises(UnsupportedEngineError, match=re.escape(said)):
        plugin.activate(SimpleNamespace(additional_config={}, **vars(engine_config(**changed))))


def test_attention_is_vllms_own_unless_asked_for(environment):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import Attention

    from turboquant.integration import backend, plugin

    before = dict(vars(Attention))
    plugin.register()
    plugin.activate(SimpleNamespace(additional_config={}))
    assert dict(vars(Attention)) == before
    environment.setenv("TURBOQUANT", "k4v4")
    plugin.activate(SimpleNamespace(additional_config={}, **vars(engine_config())))
    assert Attention.__init__ is not before["__init__"]
    backend.uninstall()
    assert dict(vars(Attention)) == before


def test_lens_on_host_pad_what_is_shorter_than_the_batch():
    from turboquant.integration import compat

    step = SimpleNamespace(
        num_reqs=5,
        query_start_loc_cpu=torch.tensor([0, 1, 4, 4]),
        seq_lens_cpu_upper_bound=torch.tensor([9, 3, 0]),
        seq_lens=None,
    )
    assert compat.lens_on_host(step) == [(0, 1, 8), (1, 3, 0), (4, 0, 0), (4, 0, 0), (4, 0, 0)]
    step = SimpleNamespace(num_reqs=1, query_start_loc_cpu=torch.tensor([0, 2]), seq_lens=torch.tensor([7, 5]))
    assert compat.lens_on_host(step) == [(0, 2, 5)]
