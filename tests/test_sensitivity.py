"""What few bits cost in single layers: attention that stands in for a layer's own, and the file that keeps the cost."""

from types import SimpleNamespace

import pytest
import torch
from helpers import normal

from turboquant.calibration import SINKS, LayerTransforms
from turboquant.codec import KeyTransform
from turboquant.config import TurboQuantConfig
from turboquant.integration.calibration_file import load_damages, load_transforms, save_transforms

sensitivity = pytest.importorskip("turboquant.integration.sensitivity")

HEADS, GROUP, DIM, TOKENS = 2, 3, 16, 200
SCALE = DIM**-0.5


def standing(window=0, softcap=0.0):
    """An attention that has seen keys and values of all tokens, in two steps."""
    layer = SimpleNamespace(
        impl=SimpleNamespace(scale=SCALE, logits_soft_cap=softcap), sliding_window=window, num_kv_heads=HEADS,
        head_size=DIM,
    )  # fmt: skip
    attention = sensitivity.CachedAttention(layer, None)
    keys, values = (normal(TOKENS, HEADS * DIM, seed=seed) * 3 for seed in (1, 2))
    for part in torch.arange(TOKENS).split(90):
        attention.positions = part
        query, output = normal(len(part), HEADS * GROUP * DIM, seed=9), torch.empty(len(part), HEADS * GROUP * DIM)
        layer.impl.forward(layer, query, keys[part], values[part], None, None, output)
    attention.growing = False
    return layer, attention


def run(layer, attention, rows):
    """Outputs [N, H_q, d], and the queries."""
    attention.positions = torch.tensor(rows)
    query, output = normal(len(rows), HEADS * GROUP * DIM, seed=3), torch.empty(len(rows), HEADS * GROUP * DIM)
    layer.impl.forward(layer, query, query[:, : HEADS * DIM], query[:, : HEADS * DIM], None, None, output)
    return output.view(len(rows), -1, DIM), query.view(len(rows), -1, DIM)


def one_by_one(attention, query, row, window, softcap, fakes):
    """[H_q, d] of a row: token by token."""
    (keys, values), outputs = attention.kept, []
    for head, q in enumerate(query):
        logits, seen = [], range(max(0, row - window + 1) if window else 0, row + 1)
        pick = [SINKS <= token < row - sensitivity.RECENT for token in seen]
        for token, fake in zip(seen, pick, strict=True):
            key = (fakes["keys"] if fake and "keys" in fakes else keys)[token, head // GROUP]
            logit = float(q @ key) * SCALE
            logits.append(softcap * torch.tanh(torch.tensor(logit / softcap)).item() if softcap else logit)
        rows = [
            (fakes["values"] if fake and "values" in fakes else values)[token, head // GROUP]
            for token, fake in zip(seen, pick, strict=True)
        ]
        outputs.append(torch.tensor(logits).softmax(0) @ torch.stack(rows))
    return torch.stack(outputs)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (120, 0.0), (0, 2.0)], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("faked", [(), ("keys",), ("values",)], ids=str)
def test_rows_attend_as_decode_steps_do(window, softcap, faked):
    layer, attention = standing(window, softcap)
    fakes = attention.fakes = {side: normal(TOKENS, HEADS, DIM, seed=7) for side in faked}
    rows = [0, 5, 100, TOKENS - 1]
    found, query = run(layer, attention, rows)
    for output, q, row in zip(found, query, rows, strict=True):
        torch.testing.assert_close(output, one_by_one(attention, q, row, window, softcap, fakes), rtol=1e-4, atol=1e-5)


def test_layers_that_share_a_cache_see_its_fakes():
    layer, owner = standing()
    sharing = SimpleNamespace(**vars(layer) | {"impl": SimpleNamespace(scale=SCALE)})
    attention = sensitivity.CachedAttention(sharing, owner)
    torch.testing.assert_close(run(sharing, attention, [150])[0], run(layer, owner, [150])[0])
    before = run(sharing, attention, [150])[0]
    owner.fakes = {"values": normal(TOKENS, HEADS, DIM, seed=7)}
    assert (run(sharing, attention, [150])[0] - before).norm() > 0.1 * before.norm()


def test_what_stood_in_is_gone():
    layer, attention = standing()
    attention.remove()
    assert "forward" not in vars(layer.impl)


def test_fakes_are_what_the_codec_decodes():
    """Nearer with more bits; a transform with the keys' mean makes them nearer."""
    _, attention = standing()
    attention.kept = (attention.kept[0] + 20, attention.kept[1])

    def error(bits, transform=None):
        fakes = sensitivity.fakes(attention, TurboQuantConfig(bits, bits), 0, transform)
        pairs = zip(("keys", "values"), attention.kept, strict=True)
        return [float((fakes[side] - rows).norm() / rows.norm()) for side, rows in pairs]

    center = KeyTransform(attention.kept[0].mean(0), torch.ones(HEADS, DIM))
    assert all(fine < coarse for fine, coarse in zip(error(4), error(2), strict=True))
    assert error(2, center)[0] < 0.5 * error(2)[0] and error(2, center)[1] == error(2)[1]


@pytest.mark.parametrize(("tokens", "count"), [(1315, 32), (512, 32), (200, 256), (100, 32), (1, 32)])
def test_rows_lie_where_something_is_compressed(tokens, count):
    rows = sensitivity.choose_rows(tokens, count)
    assert 1 <= len(rows) <= count and rows == sorted(set(rows)) and rows[-1] < tokens
    if tokens > SINKS + sensitivity.RECENT + 1:
        assert rows[0] == SINKS + sensitivity.RECENT + 1 and tokens - rows[-1] <= max(1, tokens // count + 1)


def test_divergence_is_the_square_of_the_mean_root():
    reference, tested = (normal(4, 9, seed=seed).log_softmax(-1) for seed in (1, 2))
    rows = torch.nn.functional.kl_div(tested, reference, reduction="none", log_target=True).sum(-1)
    assert sensitivity.divergence(reference, tested) == pytest.approx(float(rows.sqrt().mean()) ** 2, rel=1e-5)
    assert sensitivity.divergence(None, tested) == sensitivity.divergence(reference, reference) == 0


# ---- the file --------------------------------------------------------------------------------------------------
def transforms():
    return {f"model.layers.{i}.attn": LayerTransforms(KeyTransform.identity(HEADS, DIM)) for i in range(2)}


def test_the_file_keeps_what_bits_cost(tmp_path):
    damages = {name: {"keys": 0.25 + i, "values": 1e-9 + i} for i, name in enumerate(transforms())}
    path = save_transforms(tmp_path / "c.safetensors", transforms(), damages)
    assert load_damages(path) == damages == sensitivity.load(str(path), damages)
    assert load_transforms(path).keys() == damages.keys()
    with pytest.raises(ValueError, match=r"no layer 'model\.layers\.2\.attn'; it was made for another model"):
        sensitivity.load(str(path), ["model.layers.0.attn", "model.layers.2.attn"])


def test_a_file_without_it_says_so(tmp_path):
    path = save_transforms(tmp_path / "c.safetensors", transforms())
    with pytest.raises(ValueError, match="does not say what few bits cost, as 'auto' presets need"):
        load_damages(path)
    with pytest.raises(ValueError, match="does not exist"):
        load_damages(tmp_path / "none")
