"""Key transforms from moments, the file that keeps them, and their part in the codec's error."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import normal

from turboquant import TurboQuantConfig
from turboquant.calibration import MAX_GAIN, TEXT, Moments, balanced_gain, of_layer
from turboquant.codec import KeyTransform, KVCodec
from turboquant.integration.calibration_file import load_transforms, save_transforms

HEADS, GROUP, DIM = 2, 3, 64


def make_rows(seed, tokens=600):
    """Keys with a large mean and uneven channels, and queries with uneven channels of their own."""
    sizes = torch.logspace(-1, 1, DIM)
    keys = normal(tokens, HEADS, DIM, seed=seed) * sizes + normal(HEADS, DIM, seed=99) * 8
    query = normal(tokens, HEADS * GROUP, DIM, seed=seed + 1) * sizes.flip(0).roll(7)
    return keys, query


def moments_of(keys, query, parts=1):
    moments = Moments.empty(HEADS, DIM)
    for k, q in zip(keys.chunk(parts), query.chunk(parts), strict=True):
        moments.add(k, q)
    return moments


def test_moments_do_not_depend_on_the_parts():
    keys, query = make_rows(1)
    whole, parts = moments_of(keys, query).transform(), moments_of(keys, query, 7).transform()
    torch.testing.assert_close(whole.center, keys.double().mean(0).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.center, whole.center)
    torch.testing.assert_close(parts.gain, whole.gain)


def test_gain_is_a_minimum():
    """Of sum(a^2 k^2) * sum(q^2 / a^2): no small change of any channel lowers it."""
    k, q = normal(1, DIM, seed=3).double().square() + 0.1, normal(1, DIM, seed=4).double().square() + 0.1
    gain = balanced_gain(k, q)

    def error(a):
        return float((a.square() * k).sum() * (q / a.square()).sum())

    least = error(gain)
    assert least < error(torch.ones_like(gain))
    for channel in range(DIM):
        for factor in (0.99, 1.01):
            changed = gain.clone()
            changed[0, channel] *= factor
            assert error(changed) > least


def test_channels_without_energy_stay_bounded():
    k, q = torch.ones(1, DIM).double(), torch.ones(1, DIM).double()
    k[0, 3] = q[0, 5] = 0
    gain = balanced_gain(k, q)
    assert torch.isfinite(gain).all() and (gain > 0).all()
    assert gain.max() <= MAX_GAIN * 1.0001 and gain.min() >= 1 / MAX_GAIN / 1.0001


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_logits_get_better_on_rows_that_were_not_seen(bits):
    transform = moments_of(*make_rows(1)).transform()
    keys, query = make_rows(5, 200)
    grouped = query.unflatten(1, (HEADS, GROUP))
    want = torch.einsum("qhgd,khd->hgqk", grouped, keys)
    want = want - want.mean(-1, keepdim=True)  # softmax ignores what all keys share
    errors = []
    for chosen in (None, KeyTransform(transform.center, torch.ones_like(transform.gain)), transform):
        codec = KVCodec.build(TurboQuantConfig(key_bits=bits), 0, HEADS, DIM, chosen)
        quantised = codec.decode_keys(codec.key.decode(codec.encode_keys(keys)))
        got = torch.einsum("qhgd,khd->hgqk", grouped, quantised)
        errors.append(float((got - got.mean(-1, keepdim=True) - want).norm() / want.norm()))
    assert errors[2] < 0.7 * errors[1] < 0.7 * errors[0]


def test_nothing_seen_is_refused():
    with pytest.raises(ValueError, match="no tokens were seen"):
        Moments.empty(HEADS, DIM).transform()


# ---- the file --------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("safetensors")
    transforms = {f"model.layers.{i}.attn": moments_of(*make_rows(i)).transform() for i in range(2)}
    return save_transforms(tmp_path / "c.safetensors", transforms, model="M"), transforms


def test_file_keeps_everything(saved):
    path, transforms = saved
    loaded = load_transforms(path)
    assert list(loaded) == list(transforms)
    for name, transform in transforms.items():
        assert torch.equal(loaded[name].center, transform.center) and torch.equal(loaded[name].gain, transform.gain)


def test_damage_is_noticed(saved):
    path, _ = saved
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        load_transforms(path)


def test_other_files_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(ValueError, match="does not exist"):
        load_transforms(tmp_path / "none")
    (tmp_path / "text").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_transforms(tmp_path / "text")
    safetensors.save_file({"a": torch.zeros(2)}, str(tmp_path / "other"))
    with pytest.raises(ValueError, match="not a calibration file of version 1"):
        load_transforms(tmp_path / "other")


def test_heads_of_a_rank():
    transforms = {"layer": KeyTransform(torch.arange(8.0)[:, None].expand(8, DIM), torch.ones(8, DIM))}
    heads = [of_layer(transforms, "layer", (rank, 4), 2).center[:, 0].tolist() for rank in range(4)]
    assert heads == [[0, 1], [2, 3], [4, 5], [6, 7]]
    heads = [of_layer(transforms, "layer", (rank, 16), 1).center[:, 0].tolist() for rank in range(16)]
    assert heads == [[rank // 2] for rank in range(16)]
    with pytest.raises(ValueError, match="no layer 'other'"):
        of_layer(transforms, "other", (0, 1), 8)
    with pytest.raises(ValueError, match="8 KV heads for 'layer', this rank has 3"):
        of_layer(transforms, "layer", (0, 1), 3)


def test_workers_are_merged_to_all_heads():
    pytest.importorskip("vllm")
    from turboquant.integration.calibrate import merge_workers

    def figures(*heads):
        return {"layer": ([[float(h)] * 4 for h in heads], [[h + 1.0] * 4 for h in heads])}

    for workers in ([figures(0, 1, 2, 3)], [figures(0, 1), figures(2, 3)], [figures(h // 2) for h in range(8)]):
        merged = merge_workers(workers, 4)["layer"]
        assert merged.center[:, 0].tolist() == [0, 1, 2, 3] and merged.gain[:, 0].tolist() == [1, 2, 3, 4]
    stages = merge_workers([{"a": figures(0)["layer"]}, {"b": figures(1)["layer"]}], 1)
    assert list(stages) == ["a", "b"]


def test_the_text_is_in_the_package_and_long_enough():
    assert len(TEXT.read_text(encoding="utf-8").split()) > 700


@pytest.mark.parametrize(
    ("context", "starts"),
    [(8192, [0, 512, 1024, 2048, 4096, 7680]), (1000, [0, 488]), (512, [0]), (300, [0])],
)
def test_pieces_lie_in_every_octave_of_the_context(context, starts):
    selfcalibration = pytest.importorskip("turboquant.integration.selfcalibration")
    assert selfcalibration.first_positions(512, context) == starts


def test_pieces_stay_within_the_context(monkeypatch):
    selfcalibration = pytest.importorskip("turboquant.integration.selfcalibration")
    texts = [[1] * 512, [2] * 512, [3] * 100]
    monkeypatch.setattr(selfcalibration, "pieces", lambda _: texts)
    for context in (512, 600, 4096):
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context))
        placed = selfcalibration.placed_pieces(config)
        assert {ids[0] for ids, _ in placed} == {1, 2, 3}
        assert all(first >= 0 and first + len(ids) <= context for ids, first in placed)
    assert {first for _, first in placed} == {0, 512, 1024, 2048, 3584}
