"""Bits for every layer's keys and values under a byte budget, from what few bits cost.

What a layer's keys lose hardly depends on the other layers: their divergences add up, and each is proportional to the
quantiser's squared error.  One measurement a layer and side, at PROBE_BITS, therefore says what every width costs, and
the least sum under a budget is a knapsack with one width to pick from every group, solved exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

import torch

from turboquant.codec import KVCodec
from turboquant.config import KEY_BITS, VALUE_BITS, TurboQuantConfig

PROBE_BITS = 2  # where damages are measured: the larger, the further above the rounding of 16-bit models
THREE_BITS_FROM = 128  # head size from which kernels serve 3 bits fast; a model has the same format everywhere
SIDES = ("keys", "values")
Bits = tuple[int, int]


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
    """A width of one layer's keys or values: bytes of a token in all heads, and the damage."""

    bits: int
    size: int
    damage: float


def allocate(config: TurboQuantConfig, layers: Sequence[LayerDamage], alike: bool = False) -> TurboQuantConfig:
    """The configuration with the bits of all layers in `layer_bits`: the least damage with `auto_bits` on average.

    alike: give all layers the same, where pages of different sizes would be padded to the largest.
    ValueError if even the fewest bits are more than `auto_bits`.
    """
    groups = [choices(config, layer, side) for layer in layers for side in SIDES]
    budget = int(sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * config.auto_bits / 8)
    check_budget(config, groups, budget)
    widths = best_alike(groups, budget) if alike else best(groups, budget)
    found = dict(zip((layer.index for layer in layers), zip(widths[::2], widths[1::2], strict=True), strict=True))
    rest = config.key_bits, config.value_bits
    return with_layer_bits(config, [found.get(index, rest) for index in range(max(found) + 1)])


def with_layer_bits(config: TurboQuantConfig, bits: Sequence[Bits]) -> TurboQuantConfig:
    return TurboQuantConfig(**{**vars(config), "layer_bits": tuple(bits)})


def check_budget(config: TurboQuantConfig, groups: Sequence[Sequence[Choice]], budget: int) -> None:
    least = sum(min(choice.size for choice in group) for group in groups)
    if least > budget:
        needed = config.auto_bits * least / budget
        raise ValueError(f"auto_bits={config.auto_bits:g} is too few: this model needs at least {needed:.3f}")


# ---- what a width costs ----------------------------------------------------------------------------------------
def choices(config: TurboQuantConfig, layer: LayerDamage, side: str) -> list[Choice]:
    """The widths that a layer's keys or values can have, the fewest bits first."""
    errors, measured = squared_errors(config.uniform(PROBE_BITS, PROBE_BITS), layer.head_dim), getattr(layer, side)
    scale = measured / errors[side, PROBE_BITS]
    return [
        Choice(bits, layer.num_kv_heads * row_bytes(config, layer.head_dim, side, bits), scale * errors[side, bits])
        for bits in widths_of(config, layer, side)
    ]


def widths_of(config: TurboQuantConfig, layer: LayerDamage, side: str) -> list[int]:
    if side == "keys" and layer.index < config.initial_layers_count:
        return [config.initial_layers_key_bits]
    return [bits for bits in allowed_bits(side) if bits != 3 or layer.head_dim >= THREE_BITS_FROM]


def allowed_bits(side: str) -> tuple[int, ...]:
    return KEY_BITS if side == "keys" else VALUE_BITS["lloyd"]


def codec_of(config: TurboQuantConfig, head_dim: int, side: str, bits: int) -> KVCodec:
    pair = (bits, PROBE_BITS) if side == "keys" else (PROBE_BITS, bits)
    return KVCodec.build(config.uniform(*pair), 0, 1, head_dim)


@cache
def row_bytes(config: TurboQuantConfig, head_dim: int, side: str, bits: int) -> int:
    codec = codec_of(config, head_dim, side, bits)
    return (codec.key if side == "keys" else codec.value).row_bytes


@cache
def squared_errors(config: TurboQuantConfig, head_dim: int) -> dict[tuple[str, int], float]:
    """Squared error of every side and width on normal rows, relative to their energy."""
    rows = torch.randn(256, 1, head_dim, generator=torch.Generator().manual_seed(0))
    found = {}
    for side in SIDES:
        for bits in allowed_bits(side):
            codec = codec_of(config, head_dim, side, bits)
            quantizer = codec.key if side == "keys" else codec.value
            error = quantizer.dequantize(quantizer.quantize(rows)) - rows
            found[side, bits] = float(error.square().sum() / rows.square().sum())
    return found


# ---- the knapsack ----------------------------------------------------------------------------------------------
def best(groups: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """A width for every group: the least damage within the budget (at least the sum of the smallest sizes).

    Dynamic programming over the bytes that are left, in units of what two widths can differ by.
    """
    least = [min(choice.size for choice in group) for group in groups]
    unit = gcd(*(choice.size - low for group, low in zip(groups, least, strict=True) for choice in group)) or 1
    capacity = (budget - sum(least)) // unit
    reached, picks = torch.zeros(capacity + 1, dtype=torch.float64), []
    for group, low in zip(groups, least, strict=True):
        options = [shifted(reached, (choice.size - low) // unit) + choice.damage for choice in group]
        reached, pick = torch.stack(options).min(0)
        picks.append(pick.tolist())
    widths, left = [], capacity
    for group, low, pick in zip(reversed(groups), reversed(least), reversed(picks), strict=True):
        choice = group[pick[left]]
        left -= (choice.size - low) // unit
        widths.append(choice.bits)
    return widths[::-1]


def shifted(damages: torch.Tensor, by: int) -> torch.Tensor:
    """Damages by what is left [C], after `by` units were spent; infinite where they are not there."""
    spent = torch.full_like(damages, torch.inf)
    if by < len(damages):
        spent[by:] = damages[: len(damages) - by]
    return spent


def best_alike(groups: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """One pair of widths for all layers: the least damage within the budget, ValueError if no pair fits all."""
    tables = [{choice.bits: choice for choice in group} for group in groups]
    shared = [sorted(set.intersection(*map(set, tables[side::2]))) for side in (0, 1)]
    found = []
    for pair in product(*shared):
        picked = [table[pair[i % 2]] for i, table in enumerate(tables)]
        if sum(choice.size for choice in picked) <= budget:
            found.append((sum(choice.damage for choice in picked), pair))
    if not found:
        raise ValueError("no bits are allowed in all layers within auto_bits; leave out initial_layers_count")
    return list(min(found)[1]) * (len(groups) // 2)
