"""Rotations as 16-bit matrices, for tensor cores."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class SplitMatrix:
    """A float32 matrix as scale * (parts[0] + parts[1]) in a 16-bit dtype, off by 2^-17 (bf16) at most.

    A Hadamard matrix is +-1 times a number, so one part is exact and the second is left out.
    """

    parts: torch.Tensor
    scale: float
    exact: bool

    @classmethod
    def of(cls, matrix: torch.Tensor, dtype: torch.dtype) -> "SplitMatrix":
        scale = float(matrix.abs().max())
        unit = matrix / scale
        high = unit.to(dtype)
        low = (unit - high.float()).to(dtype)
        exact = not bool(low.any())
        return cls(torch.stack([high] if exact else [high, low]), scale, exact)

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., m, k] in the parts' dtype, times the matrix [..., n, k]: [..., m, n], still to be scaled."""
        high = rows @ self.parts[0].mT
        return high if self.exact else high + rows @ self.parts[1].mT
