"""Key transforms from measured keys and queries.

Keys have a large mean, which no query needs token by token, and channels of very different size; a rotation spreads
the error of quantisation evenly over channels, also over those that large queries meet.  Hence the affine map
k -> (k - center) * gain.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turboquant.codec import KeyTransform
from turboquant.config import TurboQuantConfig

TEXT = Path(__file__).parent / "data" / "calibration.txt"
CHUNK = 512  # tokens of a sequence made of it
SINKS = TurboQuantConfig().sink_size  # first tokens of a sequence, left out: they are kept exactly, far from all others
# Power of the optimal gain that is used.  The optimum supposes that every query meets every key; on SmolLM2 and
# Qwen2.5-Coder half of it (in logarithms) loses less (issue 5).
STRENGTH = 0.5
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
    """Sums over tokens of one layer, float64: of keys and of their squares [H_kv, d], of squared queries [H_kv, d]."""

    tokens: int
    keys: torch.Tensor
    key_squares: torch.Tensor
    query_squares: torch.Tensor

    @classmethod
    def empty(cls, num_kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> "Moments":
        sums = (torch.zeros(num_kv_heads, head_dim, dtype=torch.float64, device=device) for _ in range(3))
        return cls(0, *sums)

    def add(self, keys: torch.Tensor, query: torch.Tensor) -> None:
        """Keys [N, H_kv, d] and queries [N, H_q, d] of N tokens."""
        grouped = query.double().unflatten(1, (keys.shape[1], -1))
        self.tokens += len(keys)
        self.keys += keys.double().sum(0)
        self.key_squares += keys.double().square().sum(0)
        self.query_squares += grouped.square().mean(2).sum(0)

    def transform(self) -> KeyTransform:
        """Centre: the mean key.  Gain: `balanced_gain` to the power of STRENGTH."""
        if not self.tokens:
            raise ValueError("no tokens were seen; there is nothing to calibrate with")
        center = self.keys / self.tokens
        variance = (self.key_squares / self.tokens - center.square()).clamp(min=0)
        gain = balanced_gain(variance, self.query_squares / self.tokens) ** STRENGTH
        return KeyTransform(center.float(), gain.float())


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


def of_layer(transforms: dict[str, KeyTransform], name: str, place: tuple[int, int], num_kv_heads: int) -> KeyTransform:
    """A layer's transform for the KV heads of one rank; ValueError if the file does not know it.

    place: rank and number of tensor-parallel ranks; where these outnumber the heads, neighbours hold the same one.
    """
    if name not in transforms:
        raise ValueError(f"the calibration file has no layer {name!r}; it was made for another model")
    transform = transforms[name]
    heads = len(transform.center)
    if heads % num_kv_heads:
        raise ValueError(f"the calibration file has {heads} KV heads for {name!r}, this rank has {num_kv_heads}")
    first = place[0] * heads // place[1]
    part = slice(first, first + num_kv_heads)
    return KeyTransform(transform.center[part], transform.gain[part])
