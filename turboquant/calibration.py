"""Key transforms from measured keys and queries.

Keys have a large mean, which no query needs token by token, and channels of very different size; a rotation spreads
the error of quantisation evenly over channels, also over those that large queries meet.  Hence the affine map
k -> (k - center) * gain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turboquant.codec import KeyTransform
from turboquant.config import TurboQuantConfig
from turboquant.rotary import Rotary, still

TEXT = Path(__file__).parent / "data" / "calibration.txt"
CHUNK = 512  # tokens of a sequence made of it
SINKS = TurboQuantConfig().sink_size  # first tokens of a sequence, left out: they are kept exactly, far from all others
# Power of the optimal gain that is used.  The optimum supposes that every query meets every key; on SmolLM2 and
# Qwen2.5-Coder half of it (in logarithms) loses less (issue 5).
STRENGTH = 0.5
PARTS = ("center", "gain", "turning_center", "turning_gain")  # names of a layer's tensors in calibration files
MAX_GAIN = 16.0  # of a channel over the geometric mean, and its inverse: channels without energy have no optimum


def text_ids(tokenizer: Any) -> list[int]:
    """Token ids of the package's text."""
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return ids


def sequences(ids: list[int], most: int) -> list[list[int]]:
    """Sequences of CHUNK of the ids each, or of `most` where an engine takes no longer ones."""
    size = min(CHUNK, most)
    return [ids[first : first + size] for first in range(0, len(ids), size)]


@dataclass(eq=False)
class Moments:
    """Sums over the tokens of one layer, float64 [H_kv, d]: of squared keys and of squared queries, of keys times the
    cosine and times the sine of their span; and [3, d] of cosines squared, sines squared, and cosines times sines.
    """

    rotary: Rotary
    tokens: int
    key_squares: torch.Tensor
    query_squares: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    turns: torch.Tensor

    @classmethod
    def empty(cls, num_kv_heads: int, head_dim: int, rotary: Rotary | None = None) -> "Moments":
        squares, queries, cosines, sines = torch.zeros(4, num_kv_heads, head_dim, dtype=torch.float64)
        rotary = (rotary or still(head_dim, torch.device("cpu"))).to("cpu")
        return cls(rotary, 0, squares, queries, cosines, sines, torch.zeros(3, head_dim, dtype=torch.float64))

    def add(self, keys: torch.Tensor, query: torch.Tensor, positions: torch.Tensor) -> None:
        """Keys [N, H_kv, d] and queries [N, H_q, d] of N tokens at positions int64 [N] of their sequences."""
        keys, grouped = keys.cpu().double(), query.cpu().double().unflatten(1, (keys.shape[1], -1))
        cosine, sine = self.rotary.wide[self.rotary.spans(positions.cpu())].double().unbind(1)
        self.tokens += len(keys)
        self.key_squares += keys.square().sum(0)
        self.query_squares += grouped.square().mean(2).sum(0)
        self.cosines += (keys * cosine[:, None]).sum(0)
        self.sines += (keys * sine[:, None]).sum(0)
        self.turns += torch.stack((cosine.square(), sine.square(), cosine * sine)).sum(1)

    def transform(self) -> KeyTransform:
        """Centre: the mean key, turned back.  Gain: `balanced_gain` to the power of STRENGTH."""
        if not self.tokens:
            raise ValueError("no tokens were seen; there is nothing to calibrate with")
        # The least squares of keys - (cosine + sine quarter) center.
        center = (self.cosines - self.rotary.quarter(self.sines)) / (self.turns[0] + self.turns[1])
        gain = balanced_gain(self._variance(center), self.query_squares / self.tokens) ** STRENGTH
        return KeyTransform(center.float(), gain.float())

    def error(self, transform: KeyTransform) -> float:
        """What logits lose by quantised keys, up to the quantiser's factor: mean over heads (`balanced_gain`)."""
        gain = transform.gain.double().square()
        keys = (self._variance(transform.center.double()) * gain).sum(-1)
        return float((keys * (self.query_squares / self.tokens / gain).sum(-1)).mean())

    def _variance(self, center: torch.Tensor) -> torch.Tensor:
        """Mean square [H_kv, d] of the keys without their centres."""
        quarter, (cosine, sine, both) = self.rotary.quarter(center), self.turns
        energy = center.square() * cosine + quarter.square() * sine + 2 * center * quarter * both
        squares = self.key_squares - 2 * (center * self.cosines + quarter * self.sines) + energy
        return (squares / self.tokens).clamp(min=0)


@dataclass(frozen=True, eq=False)
class LayerTransforms:
    """The key transforms of a layer: with one centre for all positions, and with one that turns where that is better
    (without the rotary embedding, which belongs to the model).
    """

    constant: KeyTransform
    turning: KeyTransform | None = None

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "LayerTransforms":
        """The inverse of `tensors`; ValueError where a tensor is missing or unknown."""
        if tensors.keys() not in (set(PARTS[:2]), set(PARTS)):
            raise ValueError(f"{sorted(tensors)} are not {', '.join(PARTS[:2])} (and {', '.join(PARTS[2:])})")
        pairs = [
            KeyTransform(tensors[center], tensors[gain]) for center, gain in (PARTS[:2], PARTS[2:]) if center in tensors
        ]
        return cls(*pairs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """float32 [H_kv, d] by name."""
        transforms = [self.constant] if self.turning is None else [self.constant, self.turning]
        return dict(zip(PARTS, (x for each in transforms for x in (each.center, each.gain)), strict=False))

    def best(self, rotary: Rotary | None) -> KeyTransform:
        """The transform of a cache that knows the positions of what it holds, and the layer's embedding if any."""
        if rotary is None or self.turning is None:
            return self.constant
        return replace(self.turning, rotary=rotary)


def balanced_gain(key_variance: torch.Tensor, query_energy: torch.Tensor) -> torch.Tensor:
    """Gain a [H_kv, d] with the least logit error, from second moments per channel [H_kv, d].

    A rotated key's error is spread evenly over channels and proportional to its size, so a query sees
    sum(a^2 k^2) * sum(q^2 / a^2), which is least where a^2 is proportional to |q| / |k| (Cauchy-Schwarz).
    """
    tiny = 1e-12 * key_variance.mean(-1, keepdim=True) + 1e-30
    log_gain = (query_energy.clamp(min=1e-30).log() - key_variance.clamp(min=tiny).log()) / 4
    log_gain = log_gain - log_gain.mean(-1, keepdim=True)
    limit = torch.tensor(MAX_GAIN, dtype=log_gain.dtype).log()
    return log_gain.clamp(-limit, limit).exp()


def of_layer(
    transforms: dict[str, LayerTransforms], name: str, place: tuple[int, int], num_kv_heads: int
) -> LayerTransforms:
    """A layer's transforms for the KV heads of one rank; ValueError if the file does not know it.

    place: rank and number of tensor-parallel ranks; where these outnumber the heads, neighbours hold the same one.
    """
    if name not in transforms:
        raise ValueError(f"the calibration file has no layer {name!r}; it was made for another model")
    tensors = transforms[name].tensors()
    heads = len(tensors["center"])
    if heads % num_kv_heads:
        raise ValueError(f"the calibration file has {heads} KV heads for {name!r}, this rank has {num_kv_heads}")
    first = place[0] * heads // place[1]
    return LayerTransforms.of_tensors({side: x[first : first + num_kv_heads] for side, x in tensors.items()})
