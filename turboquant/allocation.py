"""A preset for every layer under a byte budget, from what few bits cost there.

What a layer's keys lose hardly depends on the other layers: their divergences add up, and each is proportional to the
quantiser's squared error.  One measurement a layer and side, at PROBE_BITS, therefore says what every width costs, and
the least sum under a budget is a knapsack with one preset to pick for every layer, solved exactly.  Layers have a few
different presets only: each costs kernels to compile and a plan a step, and three lose a tenth at most against all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import ceil, floor, gcd

import torch

from turboquant.codec import KVCodec
from turboquant.config import KEY_BITS, PRESETS, VALUE_BITS, TurboQuantConfig
from turboquant.quantizer import Quantizer

PROBE_BITS = 2  # where damages are measured: the larger, the further above the rounding of 16-bit models
MOST_FORMATS = 3  # different bits in one model
THREE_BITS_FROM = 128  # head size from which the fast decode serves 3 bits
SIDES = ("keys", "values")
Bits = tuple[int, int]  # of keys and of values


@dataclass(frozen=True)
class LayerDamage:
    """An attention layer, and what it costs (divergence in nats) that its keys, or its values, have PROBE_BITS."""

    index: int
    num_kv_heads: int
    head_dim: int
    keys: float
    values: float


@dataclass(frozen=True)
class Choice:
    """Bits that a layer could have: bytes of a token in all heads, and the damage."""

    bits: Bits
    size: int
    damage: float


def allocate(config: TurboQuantConfig, layers: Sequence[LayerDamage], alike: bool = False) -> TurboQuantConfig:
    """The configuration with the bits of all layers in `layer_bits`: the least damage with `auto_bits` on average.

    alike: give all layers the same, where pages of different sizes would be padded to the largest.
    ValueError if `auto_bits` is less than the fewest, or more than the most that the layers can have.
    """
    options = [choices(config, layer) for layer in layers]
    numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    check_budget(config.auto_bits, options, numbers)
    budget = floor(round(numbers * config.auto_bits / 8, 6))  # a product that is whole stays so
    found = best_of_few(options, budget, 1 if alike else MOST_FORMATS)
    by_index = {layer.index: choice.bits for layer, choice in zip(layers, found, strict=True)}
    rest = config.key_bits, config.value_bits
    return replace(config, layer_bits=tuple(by_index.get(index, rest) for index in range(max(by_index) + 1)))


def check_budget(average: float, options: Sequence[Sequence[Choice]], numbers: int) -> None:
    """ValueError unless the layers can have so many bits per number, of which a token has `numbers`."""
    sizes = [[choice.size for choice in layer] for layer in options]
    least, most = (8 * sum(map(bound, sizes)) / numbers for bound in (min, max))
    if not least <= average <= most:
        allowed = f"{ceil(1000 * least) / 1000:g} to {floor(1000 * most) / 1000:g}"
        raise ValueError(f"auto_bits={average:g} cannot be met: the layers of this model can have {allowed}")


# ---- what bits cost --------------------------------------------------------------------------------------------
def choices(config: TurboQuantConfig, layer: LayerDamage) -> list[Choice]:
    """What the layer can have; the probed bits cost what was measured."""
    plain = config.uniform(PROBE_BITS, PROBE_BITS)
    key_rows, value_rows = (row_bytes(plain, layer.head_dim, side) for side in SIDES)
    key_errors, value_errors = (squared_errors(plain, layer.head_dim, side) for side in SIDES)
    return [
        Choice(
            (key, value),
            layer.num_kv_heads * (key_rows[key] + value_rows[value]),
            layer.keys * key_errors[key] / key_errors[PROBE_BITS]
            + layer.values * value_errors[value] / value_errors[PROBE_BITS],
        )
        for key, value in bits_of(config, layer)
    ]


def bits_of(config: TurboQuantConfig, layer: LayerDamage) -> list[Bits]:
    """Those of the presets, which all kernels serve."""
    pairs = [(preset["key_bits"], preset["value_bits"]) for preset in PRESETS.values()]
    if layer.head_dim < THREE_BITS_FROM:
        pairs = [pair for pair in pairs if 3 not in pair]
    if layer.index < config.initial_layers_count:
        return [(config.initial_layers_key_bits, value) for value in sorted({value for _, value in pairs})]
    return pairs


def quantizers(config: TurboQuantConfig, head_dim: int, side: str) -> dict[int, Quantizer]:
    """By their bits."""
    if side == "keys":
        return {bits: KVCodec.build(config.uniform(bits, PROBE_BITS), 0, 1, head_dim).key for bits in KEY_BITS}
    allowed = VALUE_BITS[config.value_quantizer]
    return {bits: KVCodec.build(config.uniform(PROBE_BITS, bits), 0, 1, head_dim).value for bits in allowed}


@cache
def row_bytes(config: TurboQuantConfig, head_dim: int, side: str) -> dict[int, int]:
    """Bytes of a token in one head, by the bits."""
    return {bits: quantizer.row_bytes for bits, quantizer in quantizers(config, head_dim, side).items()}


@cache
def squared_errors(config: TurboQuantConfig, head_dim: int, side: str) -> dict[int, float]:
    """Squared error on normal rows, relative to their energy, by the bits."""
    rows = torch.randn(256, 1, head_dim, generator=torch.Generator().manual_seed(0))
    return {
        bits: float((quantizer.dequantize(quantizer.quantize(rows)) - rows).square().sum() / rows.square().sum())
        for bits, quantizer in quantizers(config, head_dim, side).items()
    }


# ---- the knapsack ----------------------------------------------------------------------------------------------
def best_of_few(options: Sequence[Sequence[Choice]], budget: int, formats: int) -> list[Choice]:
    """A choice for every layer with so many different bits at most: the least damage within the budget.

    ValueError if no so few bits serve all layers.
    """
    kinds = sorted({choice.bits for layer in options for choice in layer})
    found = []
    for few in combinations(kinds, min(formats, len(kinds))):
        kept = [[choice for choice in layer if choice.bits in few] for layer in options]
        if all(kept) and sum(min(choice.size for choice in layer) for layer in kept) <= budget:
            found.append(best(kept, budget))
    if not found:
        raise ValueError(f"no {formats} kinds of bits serve all layers within auto_bits and initial_layers_key_bits")
    return min(found, key=lambda picked: sum(choice.damage for choice in picked))


def best(options: Sequence[Sequence[Choice]], budget: int) -> list[Choice]:
    """A choice for every layer: the least damage within the budget, which is at least the sum of the smallest sizes.

    Dynamic programming over the bytes that are left, in units of what two choices can differ by.
    """
    least = [min(choice.size for choice in layer) for layer in options]
    extras = [[choice.size - low for choice in layer] for layer, low in zip(options, least, strict=True)]
    unit = max(1, gcd(*(extra for layer in extras for extra in layer)))
    left = (budget - sum(least)) // unit
    reached, picks = torch.zeros(left + 1, dtype=torch.float64), []
    for layer, steps in zip(options, extras, strict=True):
        table = [shifted(reached, step // unit) + choice.damage for choice, step in zip(layer, steps, strict=True)]
        reached, pick = torch.stack(table).min(0)
        picks.append(pick.tolist())
    found = []
    for layer, steps, pick in zip(reversed(options), reversed(extras), reversed(picks), strict=True):
        found.append(layer[pick[left]])
        left -= steps[pick[left]] // unit
    return found[::-1]


def shifted(damages: torch.Tensor, by: int) -> torch.Tensor:
    """Damages by what is left [C], after `by` units were spent; infinite where they are not there."""
    return torch.nn.functional.pad(damages, (by, 0), value=torch.inf)[: len(damages)]
