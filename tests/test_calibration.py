"""Key transforms from moments, the file that keeps them, and their part in the codec's error."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import FakeLayer, causal_attention
from helpers import make_rotary, normal

from turboquant import TurboQuantConfig
from turboquant.calibration import MAX_GAIN, PARTS, SINKS, TEXT, LayerTransforms, Moments, balanced_gain, of_layer
from turboquant.codec import KeyTransform, KVCodec
from turboquant.integration.calibration_file import load_transforms, save_transforms

HEADS, GROUP, DIM = 2, 3, 64


def make_rows(seed, tokens=600):
    """Keys with a large mean and uneven channels, and queries with uneven channels of their own."""
    sizes = torch.logspace(-1, 1, DIM)
    keys = normal(tokens, HEADS, DIM, seed=seed) * sizes + normal(HEADS, DIM, seed=99) * 8
    query = normal(tokens, HEADS * GROUP, DIM, seed=seed + 1) * sizes.flip(0).roll(7)
    return keys, query


def moments_of(keys, query, parts=1, rotary=None):
    moments = Moments.empty(HEADS, DIM, rotary)
    rows = (keys, query, torch.arange(len(keys)))
    for part in zip(*(x.chunk(parts) for x in rows), strict=True):
        moments.add(*part)
    return moments


def turning_rows(seed, rotary, tokens=600):
    """Rows whose mean key turns with the position, and that mean."""
    keys, query = make_rows(seed, tokens)
    center = normal(HEADS, DIM, seed=98) * 8
    return keys - normal(HEADS, DIM, seed=99) * 8 + rotary.turn(center, torch.arange(tokens)), query, center


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


def test_a_center_that_turns_is_found():
    """By a least-squares fit, whose error is that of the noise's mean; a constant centre leaves the energy in."""
    rotary = make_rotary(DIM, 600)
    keys, query, center = turning_rows(3, rotary)
    moments = moments_of(keys, query, rotary=rotary)
    transform = moments.transform()
    sizes = keys - rotary.turn(center, torch.arange(600))
    assert ((transform.center - center).norm() / sizes.std(0).norm()) < 3 / 600**0.5
    left = (keys - rotary.turn(transform.center, torch.arange(600))).square().mean(0)
    gain = balanced_gain(left.double(), query.unflatten(1, (HEADS, GROUP)).square().mean((0, 2)).double()) ** 0.5
    torch.testing.assert_close(transform.gain, gain.float(), rtol=1e-3, atol=0)
    constant = moments_of(keys, query)
    assert moments.error(transform) < 0.5 * constant.error(constant.transform())


def test_error_is_the_logits_energy():
    """Of the keys without their centres, in the gain's metric, times the queries': mean over heads."""
    rotary = make_rotary(DIM, 600)
    keys, query, _ = turning_rows(4, rotary)
    transform = replace(moments_of(keys, query, rotary=rotary).transform(), rotary=rotary)
    rows = (keys - rotary.turn(transform.center, torch.arange(600))) * transform.gain
    seen = query.unflatten(1, (HEADS, GROUP)) / transform.gain[:, None]
    expected = (rows.square().sum(-1).mean(0) * seen.square().sum(-1).mean((0, 2))).mean()
    assert moments_of(keys, query, rotary=rotary).error(transform) == pytest.approx(float(expected), rel=1e-4)


def test_a_layer_turns_where_that_is_better():
    """Some layers have an embedding that they do not use."""
    layer_moments = pytest.importorskip("turboquant.integration.selfcalibration").LayerMoments
    rotary, layer = make_rotary(DIM, 600), SimpleNamespace(num_kv_heads=HEADS, head_size=DIM)
    for rows, turns in ((turning_rows(5, rotary)[:2], True), (make_rows(5), False)):
        moments = layer_moments(layer, rotary)
        moments.add(*rows, torch.arange(600))
        found = moments.transforms()
        assert (found.turning is not None) == turns
        assert found.best(None) is found.constant
        assert (found.best(rotary).rotary is rotary) == turns
    moments = layer_moments(layer, None)
    moments.add(*make_rows(5), torch.arange(600))
    assert moments.transforms().turning is None


@pytest.mark.parametrize("tokens", [1, SINKS, SINKS + 3])
def test_short_pieces_are_computed_and_their_sinks_left_out(tokens):
    """The last piece of a text may be shorter than the sinks."""
    plain = pytest.importorskip("turboquant.integration.selfcalibration").PlainAttention
    layer = FakeLayer(HEADS * GROUP, HEADS, DIM)
    attention = plain(layer, None, make_rotary(DIM, 600))
    query, key, value = (normal(tokens, heads, DIM, seed=heads) for heads in (HEADS * GROUP, HEADS, HEADS))
    output = torch.empty_like(query)
    layer.impl.forward(layer, query, key, value, None, None, output)
    torch.testing.assert_close(output, causal_attention(query, key, value, DIM**-0.5), rtol=1e-4, atol=1e-5)
    assert [moments.tokens for moments in attention.moments.kinds] == [max(0, tokens - SINKS)] * 2
    attention.remove()
    assert "forward" not in vars(layer.impl)


def test_nothing_seen_is_refused():
    with pytest.raises(ValueError, match="no tokens were seen"):
        Moments.empty(HEADS, DIM).transform()


# ---- the file --------------------------------------------------------------------------------------------------
def layer_transforms(seed, turning):
    transform = moments_of(*make_rows(seed)).transform()
    return LayerTransforms(transform, KeyTransform(transform.center / 2, transform.gain * 2) if turning else None)


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("safetensors")
    transforms = {f"model.layers.{i}.attn": layer_transforms(i, turning=i == 1) for i in range(2)}
    return save_transforms(tmp_path / "c.safetensors", transforms, model="M"), transforms


def test_file_keeps_everything(saved):
    path, transforms = saved
    loaded = load_transforms(path)
    assert list(loaded) == list(transforms)
    for name, wanted in transforms.items():
        found, wanted = loaded[name].tensors(), wanted.tensors()
        assert list(found) == list(wanted) and all(torch.equal(found[side], wanted[side]) for side in wanted)


def test_parts_of_a_layer_are_complete():
    parts = layer_transforms(1, turning=True).tensors()
    assert tuple(parts) == PARTS
    for missing in PARTS:
        with pytest.raises(ValueError, match=r"are not center, gain \(and turning_center, turning_gain\)"):
            LayerTransforms.of_tensors({side: x for side, x in parts.items() if side != missing})


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
    with pytest.raises(ValueError, match="not a calibration file of version 2; make it again"):
        load_transforms(tmp_path / "other")


def test_heads_of_a_rank():
    transform = KeyTransform(torch.arange(8.0)[:, None].expand(8, DIM), torch.ones(8, DIM))
    turning = KeyTransform(transform.center + 10, transform.gain)
    transforms = {"layer": LayerTransforms(transform, turning)}

    def heads(rank, ranks, count):
        found = of_layer(transforms, "layer", (rank, ranks), count)
        assert torch.equal(found.turning.center, found.constant.center + 10)
        return found.constant.center[:, 0].tolist()

    assert [heads(rank, 4, 2) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [heads(rank, 16, 1) for rank in range(16)] == [[rank // 2] for rank in range(16)]
    with pytest.raises(ValueError, match="no layer 'other'"):
        of_layer(transforms, "other", (0, 1), 8)
    with pytest.raises(ValueError, match="8 KV heads for 'layer', this rank has 3"):
        of_layer(transforms, "layer", (0, 1), 3)


def test_workers_are_merged_to_all_heads():
    pytest.importorskip("vllm")
    from turboquant.integration.calibrate import merge_workers

    def figures(*heads):
        return {"layer": {side: [[h + float(i)] * 4 for h in heads] for i, side in enumerate(PARTS, start=1)}}

    for workers in ([figures(0, 1, 2, 3)], [figures(0, 1), figures(2, 3)], [figures(h // 2) for h in range(8)]):
        merged = merge_workers(workers, 4)["layer"].tensors()
        assert [x[:, 0].tolist() for x in merged.values()] == [[i, i + 1, i + 2, i + 3] for i in range(1, 5)]
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
