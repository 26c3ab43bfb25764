"""The rotary embedding at the middles of spans of positions: what turns a layer's mean key from place to place.

A key is R(p) k, and so is the mean key, whose direction therefore depends on the position p.  One centre for all
positions leaves most of it in the keys of a long context.  Here the centre of a token is R(m) c, with m the middle of
the token's span of SPAN positions: pairs of coordinates that turn by less than a radian within a span are right
everywhere, and faster ones have no mean to speak of.  What a span's centre adds to a query's logits is one number,
the product of the query's `waves` with the span's row of `cos_sin`.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import torch

SPAN = 32  # positions; a tile of the fast decode lies within one


@dataclass(frozen=True, eq=False)
class Rotary:
    """cos_sin: float16 [S, d], cosines of the d/2 pairs and then their sines, at the middle of each span; these rounded
    numbers are what centres are turned by, on both sides.  pairs: int64 [2, d/2], coordinates of each pair.
    """

    cos_sin: torch.Tensor
    pairs: torch.Tensor

    def __post_init__(self) -> None:
        self.wide.size()  # made now: nothing is to grow when steps run

    @classmethod
    def of_cache(cls, cache: torch.Tensor, head_dim: int, interleaved: bool, context: int) -> "Rotary":
        """From cosines and sines [positions, rotary size] of an embedding, for `context` positions.

        interleaved: pairs are neighbours (GPT-J), not half the rotary size apart (NeoX).  Coordinates beyond the rotary
        size do not turn.
        """
        size, device = cache.shape[1], cache.device
        middles = torch.arange(SPAN // 2, max(context, 1) + SPAN // 2, SPAN, device=device).clamp(max=len(cache) - 1)
        cosines, sines = cache[middles].float().chunk(2, 1)
        still = cosines.new_ones(len(middles), (head_dim - size) // 2)
        turning = torch.arange(size, device=device)
        turning = turning.view(-1, 2).T if interleaved else turning.view(2, -1)
        pairs = torch.cat((turning, torch.arange(size, head_dim, device=device).view(2, -1)), 1)
        return cls(torch.cat((cosines, still, sines, still * 0), 1).half(), pairs)

    @property
    def turns(self) -> bool:
        return len(self.cos_sin) > 1

    @property
    def nbytes(self) -> int:
        return self.cos_sin.nbytes + self.pairs.nbytes + self.wide.nbytes

    @cached_property
    def wide(self) -> torch.Tensor:
        """float16 [S, 2, d]: cosine and sine of every coordinate."""
        half = self.pairs.shape[1]
        wide = self.cos_sin.new_empty(len(self.cos_sin), 2, 2 * half)
        for side in self.pairs:
            wide[:, 0, side], wide[:, 1, side] = self.cos_sin[:, :half], self.cos_sin[:, half:]
        return wide

    def to(self, device: torch.device | str) -> "Rotary":
        """On a device; the same object where it is there already, as layers share it."""
        if self.cos_sin.device == torch.empty(0, device=device).device:
            return self
        return Rotary(self.cos_sin.to(device), self.pairs.to(device))

    def spans(self, positions: torch.Tensor) -> torch.Tensor:
        """Row of `cos_sin` int64 for positions of any shape."""
        return (positions.long() // SPAN).clamp(0, len(self.cos_sin) - 1)

    def span_range(self, first: int, last: int) -> tuple[int, int]:
        """First row of `cos_sin`, and the one behind the last, of the positions [first, last)."""
        stop = min((last - 1) // SPAN + 1, len(self.cos_sin))
        return min(first // SPAN, stop - 1), stop

    def quarter(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d], every pair turned by a right angle."""
        turned = torch.empty_like(x)
        turned[..., self.pairs[0]], turned[..., self.pairs[1]] = -x[..., self.pairs[1]], x[..., self.pairs[0]]
        return turned

    def turn(self, center: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Centres float32 [N, H, d] at positions [N] of center float32 [H, d]."""
        cosine, sine = self.wide[self.spans(positions)].float().unsqueeze(2).unbind(1)
        return cosine * center + sine * self.quarter(center)

    def waves(self, query: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """Products of the pairs of query and centre [..., d] (shapes that broadcast): factors of `cos_sin` rows."""
        (qx, qy), (cx, cy) = (x[..., self.pairs].unbind(-2) for x in (query, center))
        return torch.cat((qx * cx + qy * cy, qy * cx - qx * cy), -1)


@cache
def still(head_dim: int, device: torch.device) -> Rotary:
    """Centres do not turn: one span of all positions."""
    half = head_dim // 2
    cos_sin = torch.cat((torch.ones(half), torch.zeros(half)))[None].half()
    return Rotary(cos_sin.to(device), torch.arange(head_dim, device=device).view(2, half))
