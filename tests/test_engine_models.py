"""The native route on models that are more than a stack of equal layers: sliding windows, shared caches, drafts."""

import json

import pytest
import torch
from engine_helpers import alone, divergences, engine, prompts

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

from turboquant.demo import smollm2  # noqa: E402

LENGTHS = [20, 65, 200]


def run(model, preset, batch_of, tokens=8, options=None, **engine_options):
    """(outputs of the requests alone, statistics, metrics) of an engine with compressed pages, or native ones."""
    with engine(preset, options, model, **engine_options) as llm:
        outputs = alone(llm, batch_of(llm), tokens, logprobs=1024)
        stats = llm.collective_rpc("tq_stats")[0] if preset else None
        return outputs, stats, {m.name: getattr(m, "value", None) for m in llm.get_metrics()}


def distance(reference, tested):
    found = [kld for a, b in zip(reference, tested, strict=True) for kld in divergences(a, b)]
    assert len(found) >= 0.4 * sum(len(a.token_ids) for a in reference)
    return sum(found) / len(found)


# ---- layers that share a cache, and sliding windows ------------------------------------------------------------
@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory):
    """Random weights: 8 layers, of which 6 have a window of 64 tokens and the last 3 read the caches of others."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3nTextConfig(
        vocab_size=1024, vocab_size_per_layer_input=1024, hidden_size=128, hidden_size_per_layer_input=16,
        intermediate_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=1024, sliding_window=64, layer_types=kinds, num_kv_shared_layers=3,
        altup_num_inputs=2, laurel_rank=16, activation_sparsity_pattern=[0.0] * 8, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("gemma3n")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def numbers(llm):
    return [
        {"prompt_token_ids": [(31 * i * j + i + j // 3) % 1000 + 3 for j in range(n)]} for i, n in enumerate(LENGTHS)
    ]


def test_layers_that_share_a_cache(gemma3n):
    """The layers that share read the tokens of their step exactly, as those whose caches they read do."""
    limits = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5}
    native, _, _ = run(gemma3n, None, numbers, **limits)
    outputs, stats, _ = run(gemma3n, "k4v4", numbers, **limits)
    assert len(stats["layers"]) == 8 and not stats["skipped"] and stats["calibrated_layers"] == 5
    assert stats["bytes_per_token_compressed"] == 5 * 2 * 68  # of the 5 layers that have a cache
    assert distance(native, outputs) <= 0.02
    short = slice(2)  # all that their first tokens read is exact
    assert [o.token_ids[0] for o in outputs[short]] == [o.token_ids[0] for o in native[short]]


def test_layers_with_windows_get_the_same_bits(gemma3n):
    """Beside full attention, where vLLM pads all pages to the largest."""
    limits = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5}
    outputs, stats, _ = run(gemma3n, "auto:4.9", numbers, **limits)
    assert stats["formats"] == {"k4v4": 5} and stats["preset"] == "auto:4.9"
    assert all(len(output.token_ids) == 8 for output in outputs)


# ---- attention beside recurrent layers -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    """Random weights: 2 layers with a recurrent state of 23 x 256 numbers, as large as the pages of many tokens, and 2
    of attention.
    """
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, layer_types=["conv", "full_attention"] * 2,
        full_attn_idxs=[1, 3], conv_L_cache=24, block_ff_dim=512, block_auto_adjust_ff_dim=False,
        initializer_range=256**-0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("lfm2")
    transformers.Lfm2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    vllms = {"conv_dim": 256, "conv_dim_out": 256, "block_dim": 256, "block_multiple_of": 256}  # names that vLLM reads
    (folder / "config.json").write_text(json.dumps(stored | vllms | {"block_ffn_dim_multiplier": 1.0}))
    return folder


def test_attention_beside_recurrent_layers(lfm2):
    """Their states decide how large a block is: 192 tokens of ours instead of 32."""
    limits = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64}
    native, _, _ = run(lfm2, None, numbers, **limits)
    options = {"buffer_size": 64, "ring_share": 0.1}
    outputs, stats, _ = run(lfm2, "k4v4", numbers, options=options, **limits)
    assert len(stats["layers"]) == 2 and stats["window"] == 64 and stats["calibrated_layers"] == 0
    assert stats["bytes_per_token_compressed"] == 2 * 2 * 68 and stats["capacity_tokens"] % 192 == 0
    assert distance(native, outputs) <= 0.002


# ---- speculative decoding --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A draft head of one layer with random weights: its drafts are all wrong."""
    from safetensors.torch import save_file

    folder, target = tmp_path_factory.mktemp("eagle"), smollm2()
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], 64
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    torch.manual_seed(0)
    shapes = {
        "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    weights = {f"layers.0.{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    weights |= {"layers.0.post_attention_layernorm.weight": torch.ones(hidden)}
    save_file(weights | {"fc.weight": torch.eye(hidden).repeat(1, 2)}, folder / "model.safetensors")
    return folder


def sentences(llm):
    return prompts(llm, LENGTHS)


def speculate(method, model):
    options = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    outputs, stats, metrics = run(smollm2(), "k4v4", sentences, tokens=16, speculative_config=options)
    assert not stats["skipped"]
    accepted, drafted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    return outputs, len(stats["layers"]), accepted / drafted


def test_drafts_cost_and_gain_nothing_but_time(eagle):
    """The same answers where the model drafts for itself and all drafts are right, and where all are wrong."""
    right, layers, accepted = speculate("draft_model", smollm2())
    assert layers == 60 and accepted >= 0.85
    wrong, layers, accepted = speculate("eagle", eagle)
    assert layers == 31 and accepted <= 0.2
    assert distance(right, wrong) <= 0.02
