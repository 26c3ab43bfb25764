"""What the hooks assume about vLLM, compared with the installed one: fails on the day vLLM drifts."""

import inspect
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm")

from turboquant.integration import compat, plugin


def backends():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    return [CPUAttentionBackendImpl, FlashAttentionImpl]


@pytest.mark.parametrize("impl", backends(), ids=lambda impl: impl.__name__)
def test_hooked_methods_have_the_parameters_that_the_hooks_pass(impl):
    for name, expected in compat.HOOKED_METHODS.items():
        parameters = list(inspect.signature(getattr(impl, name)).parameters)[1:]
        assert tuple(parameters[: len(expected)]) == expected
    assert parameters == list(compat.HOOKED_METHODS["do_kv_cache_update"])


def test_metadata_has_the_fields_that_make_a_batch():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    for metadata in (CPUAttentionMetadata, FlashAttentionMetadata):
        assert {"query_start_loc", "seq_lens", "block_table", "causal"} <= set(metadata.__dataclass_fields__)


def test_the_layer_looks_its_methods_up_dynamically():
    """Instance patches work because the custom ops call `impl.forward` and `impl.do_kv_cache_update` by attribute."""
    from vllm.model_executor.layers.attention import attention

    assert "impl.do_kv_cache_update(" in inspect.getsource(attention.unified_kv_cache_update)
    assert "self.impl.forward(" in inspect.getsource(attention.unified_attention_with_output)


def test_worker_methods_do_not_clash_and_register_is_idempotent():
    from vllm.v1.worker.worker_base import WorkerBase

    plugin.register()
    plugin.register()
    assert all(getattr(WorkerBase, method.__name__) is method for method in plugin.WORKER_METHODS)


def test_a_foreign_worker_method_of_the_same_name_is_refused(monkeypatch):
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.setattr(WorkerBase, "tq_free", lambda self: None, raising=False)
    with pytest.raises(RuntimeError, match="tq_free"):
        plugin.register()


def test_the_entry_point_is_installed():
    names = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert names.get("turboquant") == "turboquant.integration.plugin:register"
