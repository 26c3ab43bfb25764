"""Bits per layer under a byte budget: the exact optimum, what a choice costs, and budgets that cannot be met."""

import re
from itertools import product

import pytest
from helpers import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from turboquant.allocation import (
    MOST_FORMATS,
    PROBE_BITS,
    SIDES,
    Choice,
    LayerDamage,
    allocate,
    best_of_few,
    choices,
    row_bytes,
    squared_errors,
)
from turboquant.codec import KVCodec
from turboquant.config import PRESETS, TurboQuantConfig

AUTO = TurboQuantConfig.from_options("auto:4.25")
PAIRS = [(preset["key_bits"], preset["value_bits"]) for preset in PRESETS.values()]
damages = st.floats(0, 1, allow_subnormal=False)


def layers_of(*pairs, heads=2, dim=128):
    """A layer for every pair of damages."""
    return [LayerDamage(index, heads, dim, *pair) for index, pair in enumerate(pairs)]


def auto(average, **options):
    return TurboQuantConfig.from_options(f"auto:{average}", **options)


def cost(options, found):
    """(damage, bytes) of bits that were picked."""
    pairs = zip(options, found, strict=True)
    return total([next(choice for choice in layer if choice.bits == bits) for layer, bits in pairs])


@st.composite
def problems(draw):
    """Choices of some layers, the same bits in all of them, and a budget that the smallest fit."""
    bits = draw(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=4, unique=True))
    unit = draw(st.integers(1, 16))
    options = [
        [Choice(pair, unit * draw(st.integers(1, 40)), draw(damages)) for pair in bits]
        for _ in range(draw(st.integers(1, 4)))
    ]
    least, most = (sum(bound(c.size for c in layer) for layer in options) for bound in (min, max))
    return options, draw(st.integers(least, most))


def total(picked):
    """(damage, bytes) of a choice for every layer."""
    return sum(choice.damage for choice in picked), sum(choice.size for choice in picked)


@PROPERTY
@given(problems(), st.integers(1, 5))
def test_no_other_choice_is_better(problem, formats):
    options, budget = problem
    others = [total(p) for p in product(*options) if len({choice.bits for choice in p}) <= formats]
    fitting = [damage for damage, size in others if size <= budget]
    if not fitting:
        with pytest.raises(ValueError, match=f"no {formats} kinds of bits serve all layers"):
            best_of_few(options, budget, formats)
        return
    found = best_of_few(options, budget, formats)
    damage, size = total(found)
    assert size <= budget and len({choice.bits for choice in found}) <= formats
    assert damage == pytest.approx(min(fitting), abs=1e-12)


def test_layers_that_must_be_alike_get_the_same():
    layers = layers_of((1e-6, 1e-6), (0.1, 0.1))
    assert len(set(allocate(auto(4), layers).layer_bits)) == 2
    assert set(allocate(auto(4), layers, alike=True).layer_bits) == {(4, 3)}
    with pytest.raises(ValueError, match="no 1 kinds of bits"):
        allocate(auto(4.5, initial_layers_count=1), layers, alike=True)


def test_a_model_has_few_different_bits():
    found = allocate(auto(3.5), layers_of(*[(2.0**-i, 1.5**-i) for i in range(40)])).layer_bits
    assert len(set(found)) == MOST_FORMATS


@PROPERTY
@given(st.lists(st.tuples(damages, damages), min_size=1, max_size=8), st.sampled_from(PAIRS))
def test_never_worse_than_a_preset_of_the_same_bytes(pairs, bits):
    """And it keeps within them."""
    layers, config = layers_of(*pairs), AUTO
    options = [choices(config, layer) for layer in layers]
    uniform_damage, uniform_bytes = cost(options, [bits] * len(layers))
    average = 8 * uniform_bytes / sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    damage, size = cost(options, allocate(auto(average), layers).layer_bits)
    assert size <= uniform_bytes and damage <= uniform_damage + 1e-12


def test_layers_that_lose_most_get_most():
    found = allocate(auto(3.2), layers_of((1e-6, 1e-6), (0.1, 1e-6), (1e-6, 1e-6), (1e-6, 0.1))).layer_bits
    assert found[1][0] > max(found[0][0], found[2][0]) and found[3][1] > max(found[0][1], found[2][1])


def test_a_choice_costs_what_was_measured_at_the_probed_bits():
    (layer,) = layers_of((0.3, 0.2))
    found = {choice.bits: choice for choice in choices(AUTO, layer)}
    assert found[PROBE_BITS, PROBE_BITS].damage == pytest.approx(0.5)
    assert list(found) == PAIRS
    for bits, choice in found.items():
        page = KVCodec.build(AUTO.uniform(*bits), 0, 1, 128).page_format(32)
        assert choice.size == 2 * page.token_bytes


@pytest.mark.parametrize("side", SIDES)
def test_errors_fall_with_the_bits(side):
    """About fourfold a bit, as rate-distortion theory has it; fp8 keys are no Lloyd-Max codes."""
    errors = squared_errors(AUTO.uniform(2, 2), 128, side)
    assert 3 < errors[2] / errors[3] < 4.5 and 3 < errors[3] / errors[4] < 4.5
    assert sorted(errors.values(), reverse=True) == list(errors.values())
    sizes = row_bytes(AUTO.uniform(2, 2), 128, side)
    assert sorted(sizes.values()) == list(sizes.values())


def test_three_bits_only_where_the_fast_decode_has_them():
    def bits(dim):
        return {number for choice in choices(AUTO, layers_of((1, 1), dim=dim)[0]) for number in choice.bits}

    assert bits(64) == {2, 4, 8} and bits(128) == {2, 3, 4, 8}


def test_first_layers_keep_the_bits_that_were_asked_for():
    found = allocate(auto(4, initial_layers_count=2, initial_layers_key_bits=8), layers_of(*[(0.1, 0.1)] * 8))
    assert [found.layer_key_bits(index) for index in range(3)] == [8, 8, found.layer_bits[2][0]]
    assert found.layer_bits[0][0] == 8 and found.layer_bits[2][0] < 8


def test_layers_that_stay_native_have_no_part():
    """Their places in the list are filled with the preset's own bits."""
    layers = [LayerDamage(index, 2, 128, 0.1, 0.1) for index in (1, 3)]
    assert len(allocate(auto(2.25), layers).layer_bits) == 4
    assert allocate(auto(2.25), layers).layer_bits[1::2] == ((2, 2), (2, 2))


@pytest.mark.parametrize("average, dim", [(2, 128), (2.1, 128), (2.2, 64), (6.2, 128), (8, 64)])
def test_budgets_that_cannot_be_met_name_the_least_and_the_most(average, dim):
    said = {128: "2.125 to 6.125", 64: "2.25 to 6.25"}[dim]
    with pytest.raises(ValueError, match=re.escape(f"auto_bits={average:g}") + f".*{said}"):
        allocate(auto(average), layers_of((1, 1), (2, 2), dim=dim))


@pytest.mark.parametrize("average, bits", [(2.125, (2, 2)), (6.125, (8, 4))])
def test_the_least_and_the_most_can_be_met(average, bits):
    assert allocate(auto(average), layers_of((1, 1), (2, 2))).layer_bits == (bits, bits)
