"""`TurboQuantCache`: generation of a real model with transformers alone, against its own cache."""

import pytest
import torch
from helpers import normal

transformers = pytest.importorskip("transformers")

from turboquant import TurboQuantConfig  # noqa: E402
from turboquant.demo import cache_dir  # noqa: E402
from turboquant.transformers import TurboQuantCache, TurboQuantLayer, measure  # noqa: E402

FOLDER = cache_dir() / "smollm2-135m-instruct"
real = pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason="the demo model has not been built")


def layer(**options):
    return TurboQuantLayer(TurboQuantConfig.from_options(None, **{"buffer_size": 8, "sink_size": 2} | options), 0)


def grown(lengths, batch=2, **options):
    """A layer after steps of so many tokens, all keys and values that went in, and what it returned last."""
    mine, parts = layer(**options), []
    for step, length in enumerate(lengths):
        parts.append([normal(batch, 3, length, 64, seed=10 * step + side) for side in range(2)])
        returned = mine.update(*parts[-1])
    keys, values = (torch.cat(side, -2) for side in zip(*parts, strict=True))
    return mine, (keys, values), returned


# ---- one layer -------------------------------------------------------------------------------------------------
def test_first_recent_and_own_tokens_are_exact_and_the_others_near():
    mine, given, returned = grown([50, 1, 30])
    for got, want in zip(returned, given, strict=True):
        assert got.shape == want.shape and mine.get_seq_length() == 81
        exact = [*range(2), *range(43, 81)]  # sinks; the window before the step; the step's own
        assert torch.equal(got[..., exact, :], want[..., exact, :])
        others = slice(2, 43)
        error = (got[..., others, :] - want[..., others, :]).norm() / want[..., others, :].norm()
        assert 0.05 < error < 0.12  # 4 bits


def test_short_sequences_are_exact():
    _, given, returned = grown([4, 3, 1, 1])
    assert all(torch.equal(got, want) for got, want in zip(returned, given, strict=True))


@pytest.mark.parametrize("options", [{"buffer_size": 0, "sink_size": 0}, {"buffer_size": 0}, {"sink_size": 0}])
def test_windows_can_be_switched_off(options):
    mine, given, returned = grown([40, 1], **options)
    sinks, recent = mine.config.sink_size, mine.config.buffer_size
    assert mine.keys.shape[-2] == sinks + recent
    assert torch.equal(returned[0][..., :sinks, :], given[0][..., :sinks, :])
    assert torch.equal(returned[0][..., 40 - recent :, :], given[0][..., 40 - recent :, :])
    assert not torch.equal(returned[0][..., sinks, :], given[0][..., sinks, :])


def test_pages_hold_what_was_written_however_it_came():
    one, _, _ = grown([90])
    many, given, _ = grown([90])
    many.reset()
    assert many.get_seq_length() == 0
    for start, end in ((0, 7), (7, 64), (64, 65), (65, 90)):
        many.update(*(x[..., start:end, :] for x in given))
    assert all(torch.equal(a, b) for a, b in zip(one._cached(), many._cached(), strict=True))
    assert one.memory_bytes()["pages"] >= 2 * 3 * 96 * 68


@pytest.mark.parametrize("crop", [-5, 85])
def test_cropping_forgets_the_last_tokens(crop):
    """What comes then stands where they were; the window loses what it no longer has."""
    mine, given, _ = grown([90])
    mine.crop(crop)
    assert mine.get_seq_length() == 85
    more = [normal(2, 3, 4, 64, seed=99 + side) for side in range(2)]
    keys, _ = mine.update(*more)
    assert torch.equal(keys[..., 82:85, :], given[0][..., 82:85, :])  # 8 were exact, 5 of them are gone
    assert torch.equal(keys[..., 85:, :], more[0]) and keys.shape[-2] == 89
    mine.crop(-88)
    assert mine.get_seq_length() == 1 and torch.equal(mine._cached()[0], given[0][..., :1, :])


def test_sequences_are_selected_and_repeated():
    mine, _, _ = grown([50], batch=3)
    before = mine._cached()
    mine.reorder_cache(torch.tensor([2, 0, 0]))
    assert all(torch.equal(a, b[[2, 0, 0]]) for a, b in zip(mine._cached(), before, strict=True))
    mine.batch_select_indices(torch.tensor([1]))
    mine.batch_repeat_interleave(2)
    assert all(torch.equal(a, b[[0, 0]]) for a, b in zip(mine._cached(), before, strict=True))
    mine.update(*(normal(2, 3, 40, 64, seed=side) for side in range(2)))
    assert mine.get_seq_length() == 90


def test_values_of_another_size_are_refused():
    with pytest.raises(ValueError, match="layer 0 has values of size 32 and keys of size 64"):
        layer().update(normal(1, 1, 4, 64, seed=0), normal(1, 1, 4, 32, seed=1))


# ---- configurations --------------------------------------------------------------------------------------------
def config(**more):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.AutoConfig.for_model(**{"model_type": "qwen2", "vocab_size": 64} | sizes | more)


def test_layers_that_are_compressed():
    names = [type(layer).__name__ for layer in TurboQuantCache(config(), "k3v2", skip_layers=[0, -1]).layers]
    assert names == ["DynamicLayer", "TurboQuantLayer", "TurboQuantLayer", "DynamicLayer"]
    windows = config(
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16, use_sliding_window=True
    )
    names = [type(layer).__name__ for layer in TurboQuantCache(windows).layers]
    assert names == ["DynamicSlidingWindowLayer", "TurboQuantLayer"] * 2
    assert TurboQuantCache(windows).memory_bytes()["total"] == 0


def test_what_cannot_be_meant():
    with pytest.raises(ValueError, match="did you mean 'k4v4'"):
        TurboQuantCache(config(), "k4v44")
    with pytest.raises(ValueError, match="no layer can be compressed: the model's are DynamicLayer"):
        TurboQuantCache(config(), skip_layers=[0, 1, 2, 3])


# ---- a real model ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model():
    loaded = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return loaded, transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def transforms(model):
    return measure(*model, context=1024)


QUESTION = [{"role": "user", "content": "Name the capital of France, and say in one sentence what it is known for."}]


@real
def test_generation_is_that_of_the_plain_cache(model, transforms):
    """Greedy, with beams, and two sequences of different length at once; everything compressed but the sinks."""
    lm, tokenizer = model
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    limits = {"max_new_tokens": 24, "do_sample": False}
    for more in ({}, {"num_beams": 2}):
        plain = lm.generate(**inputs, **limits, **more)
        cache = TurboQuantCache(lm.config, "k4v4", transforms=transforms, buffer_size=0)
        ours = lm.generate(**inputs, **limits, **more, past_key_values=cache)
        assert "Paris" in tokenizer.decode(ours[0]) and torch.equal(plain[0][:60], ours[0][:60])
    both = tokenizer(["Two and two is", "The sun rises in the"], padding=True, padding_side="left", return_tensors="pt")
    found = [lm.generate(**both, **limits, past_key_values=cache) for cache in (None, TurboQuantCache(lm.config))]
    assert torch.equal(*found)


def divergence(lm, ids, cache):
    """KL divergence of each token's logits behind the first 512, in chunks of 64, from those of the plain cache."""
    logits = []
    for store in (transformers.DynamicCache(config=lm.config), cache):
        lm(ids[:, :512], past_key_values=store)
        chunks = [lm(part, past_key_values=store).logits[0] for part in ids[:, 512:].split(64, dim=1)]
        logits.append(torch.cat(chunks).log_softmax(-1))
    return (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean()


@real
@pytest.mark.parametrize(("preset", "most", "smaller"), [("k4v4", 0.01, 7.4), ("k2v2", 0.2, 13.7)])
def test_divergence_and_memory(model, transforms, preset, most, smaller):
    """smaller: than float32, as pages alone; without exact tokens, so that the history is compressed."""
    import argparse
    from pathlib import Path

    lm, tokenizer = model
    ids = tokenizer(Path(argparse.__file__).read_text(), return_tensors="pt").input_ids[:, :768]
    cache = TurboQuantCache(lm.config, preset, transforms=transforms, buffer_size=0)
    with torch.inference_mode():
        assert 1e-5 < divergence(lm, ids, cache) < most
    memory = cache.memory_bytes()
    plain = 30 * 2 * 3 * 64 * 4 * 768
    assert plain / memory["pages"] > 0.85 * smaller and memory["total"] == sum(list(memory.values())[:-1])


@real
def test_measuring_restores_attention_and_refuses_what_it_cannot_observe(model, transforms):
    lm, tokenizer = model
    assert len(transforms) == 30 and transforms[0].center.shape == (3, 64)
    name = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[lm.config._attn_implementation].__name__
    assert name == "sdpa_attention_forward"
    lm.config._attn_implementation = "eager"
    try:
        with pytest.raises(ValueError, match=r"attn_implementation='eager' cannot be observed; allowed: .*sdpa"):
            measure(lm, tokenizer)
    finally:
        lm.config._attn_implementation = "sdpa"
