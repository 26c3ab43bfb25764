"""Centres that turn with the position: the rotary embedding at the middles of spans, against complex numbers."""

import numpy as np
import pytest
import torch
from helpers import cosine, make_rotary, normal

from turboquant import TurboQuantConfig
from turboquant.codec import KeyTransform, KVCodec
from turboquant.rotary import SPAN, Rotary, still
from turboquant.store import CompressedBlockStore

BASE = 1e4
LAYOUTS = [  # head size, coordinates that turn, whether pairs are neighbours
    (64, 64, False),
    (64, 64, True),
    (80, 32, False),
    (80, 32, True),
    (128, 128, False),
]
layouts = pytest.mark.parametrize(("dim", "size", "interleaved"), LAYOUTS)


def rope(dim, context, size, interleaved=False):
    return make_rotary(dim, context, base=BASE, fastest=1.0, size=size, interleaved=interleaved)


def pairs_of(dim, size, interleaved):
    """Coordinates of each pair that turns, and its angle per position."""
    firsts = range(0, size, 2) if interleaved else range(size // 2)
    second = 1 if interleaved else size // 2
    return [(i, i + second, BASE ** (-2 * j / size)) for j, i in enumerate(firsts)]


def turned(center, positions, dim, size, interleaved):
    """Centres float64 [N, H, d]: every pair a complex number, times e^(i angle) at the middle of the span."""
    result = center.double().expand(len(positions), *center.shape).clone()
    middles = positions // SPAN * SPAN + SPAN // 2
    for x, y, frequency in pairs_of(dim, size, interleaved):
        angle = (middles.float() * frequency)[:, None]
        cos, sin = (f(angle).half().double() for f in (torch.cos, torch.sin))
        result[..., x] = center[:, x] * cos - center[:, y] * sin
        result[..., y] = center[:, y] * cos + center[:, x] * sin
    return result


@layouts
def test_centers_turn(dim, size, interleaved):
    rotary = rope(dim, 416, size, interleaved)
    center, positions = normal(3, dim, seed=1), torch.tensor([0, 31, 32, 200, 383, 399])
    expected = turned(center, positions, dim, size, interleaved)
    # cosines and sines of float32 angles, which may round to either neighbour
    torch.testing.assert_close(rotary.turn(center, positions).double(), expected, rtol=0, atol=2e-3)
    assert torch.equal(rotary.turn(center, positions[:1]), rotary.turn(center, positions[1:2]))  # one span


def test_positions_beyond_the_table_take_its_last_row():
    rotary = make_rotary(64, 100)
    assert len(rotary.cos_sin) == 4
    assert rotary.spans(torch.tensor([[0, 99, 127], [128, 10**6, -1]])).tolist() == [[0, 3, 3], [3, 3, 0]]


@layouts
def test_a_quarter_turn(dim, size, interleaved):
    rotary, x = rope(dim, 64, size, interleaved), normal(2, dim, seed=2)
    for first, second, _ in pairs_of(dim, size, interleaved):
        assert torch.equal(rotary.quarter(x)[:, first], -x[:, second])
        assert torch.equal(rotary.quarter(x)[:, second], x[:, first])
    assert torch.equal(rotary.quarter(rotary.quarter(x)), -x)


@layouts
def test_waves_give_the_logits_of_centers(dim, size, interleaved):
    rotary = rope(dim, 400, size, interleaved)
    center, query, positions = normal(dim, seed=3), normal(7, dim, seed=4), torch.arange(0, 400, 9)
    found = rotary.waves(query, center) @ rotary.cos_sin[rotary.spans(positions)].float().T
    expected = query.double() @ rotary.turn(center[None], positions)[:, 0].double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * dim**0.5)


def test_still_centers_stay():
    rotary, center = still(64, torch.device("cpu")), normal(2, 64, seed=5)
    assert not rotary.turns and make_rotary(64, 64).turns and not make_rotary(64, SPAN).turns
    assert torch.equal(rotary.turn(center, torch.arange(0, 9999, 1000)), center.expand(10, -1, -1))


def test_tables_are_shared_and_counted():
    rotary = make_rotary(64, 320)
    assert rotary.to("cpu") is rotary
    assert rotary.nbytes == 2 * 10 * 64 * 3 + 8 * 64
    assert rotary.to("meta").cos_sin.device.type == "meta"


def test_a_mean_key_that_turns_costs_nothing():
    """A mean of 40 times the rest, in pairs that turn within the context: codes of constant centres lose the rest."""
    rotary, positions = make_rotary(64, 4096, base=1e6, fastest=1.0), torch.arange(0, 4096, 16)
    center = torch.zeros(1, 64)
    center[:, 12:20], center[:, 44:52] = 40.0, -40.0
    rest = normal(len(positions), 1, 64, seed=6)
    keys = rest + rotary.turn(center, positions)
    mean = KeyTransform(keys.mean(0), torch.ones(1, 64))
    found = {}
    for name, transform in (("constant", mean), ("turning", KeyTransform(center, torch.ones(1, 64), rotary))):
        codec = KVCodec.build(TurboQuantConfig(key_bits=3), 0, 1, 64, transform)
        decoded = codec.decode_keys(codec.key.decode(codec.encode_keys(keys, positions)), positions)
        found[name] = float(cosine(decoded - keys + rest, rest).mean())
    assert found["turning"] > 0.97 > 0.8 > found["constant"]


def test_positions_must_be_given_where_centers_turn():
    transform = KeyTransform(normal(2, 64, seed=7), torch.ones(2, 64), make_rotary(64, 200))
    codec = KVCodec.build(TurboQuantConfig(), 0, 2, 64, transform)
    rows, slots = normal(4, 2, 64, seed=8), torch.arange(4)
    store = CompressedBlockStore(codec, 2, 2, 16)
    before = store.pages.clone()
    for call in (
        lambda: codec.encode_keys(rows),
        lambda: codec.decode_keys(rows),
        lambda: store.write(slots, rows, rows),
        lambda: store.read_slots(slots),
    ):
        with pytest.raises(ValueError, match="turns with the position, so positions must be given"):
            call()
    assert torch.equal(store.pages, before)


def test_slots_keep_their_positions():
    """Tokens written at far positions in any slots come back with their own centres; padding is skipped."""
    transform = KeyTransform(50 * normal(2, 64, seed=7), torch.ones(2, 64), make_rotary(64, 4096))
    store = CompressedBlockStore(KVCodec.build(TurboQuantConfig(), 0, 2, 64, transform), 4, 2, 16)
    slots, positions = torch.tensor([5, -1, 60, 17]), torch.tensor([4000, 7, 0, 900])
    rest, values = normal(4, 2, 64, seed=8), normal(4, 2, 64, seed=9)
    keys = rest + transform.rotary.turn(transform.center, positions)
    store.write(slots, keys, values, positions)
    real = slots >= 0
    found, _ = store.read_slots(slots[real], positions[real])
    assert cosine(found - keys[real] + rest[real], rest[real]).min() > 0.97


@layouts
def test_lift_is_what_decoded_keys_lack(dim, size, interleaved):
    """Added to rows of the codec's basis, a span's row gives logits with the centre."""
    rotary = rope(dim, 400, size, interleaved)
    transform = KeyTransform(normal(2, dim, seed=10), normal(2, dim, seed=11).exp(), rotary)
    codec = KVCodec.build(TurboQuantConfig(), 0, 2, dim, transform)
    query = normal(2, 3, dim, seed=12)
    lift = codec.lift(40, 130)
    assert len(lift) == 4  # spans 1 to 4
    found = torch.einsum("hgd,shd->shg", codec.query(query), lift)
    expected = torch.einsum("hgd,shd->shg", query, rotary.turn(transform.center, torch.arange(32, 160, 32)))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_table_of_an_embedding_is_rounded_to_half():
    """As on both sides of a product; coordinates beyond the rotary size get cosine 1 and sine 0."""
    rotary = rope(80, 64, 32)
    assert rotary.cos_sin.dtype == torch.float16 and rotary.cos_sin.shape == (2, 80)
    assert (rotary.cos_sin[:, 16:40] == 1).all() and (rotary.cos_sin[:, 56:] == 0).all()
    assert sorted(rotary.pairs.flatten().tolist()) == list(range(80))
    angles = np.array([16, 48])[:, None] * 1e4 ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(rotary.cos_sin[:, :16].numpy(), np.cos(angles), atol=5e-4)


def test_short_tables_and_contexts():
    """An embedding may have fewer rows than the last middle asks for."""
    cache = torch.cat([torch.arange(20.0)[:, None]] * 2, 1) / 100
    rotary = Rotary.of_cache(cache, 2, False, 20)
    assert rotary.cos_sin.tolist() == [[torch.tensor(0.16).half().item()] * 2]
    assert len(Rotary.of_cache(cache, 2, False, 0).cos_sin) == 1
