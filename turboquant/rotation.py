"""Random rotations and the QJL sketch matrix.

Drawn with numpy's PCG64 from integer seeds, so that every rank and every process holds the same matrix.
Streams of different purposes (`STREAMS`) do not coincide, and test data drawn from a plain `default_rng` with a small
seed are not the rotation's own numbers: sharing them has manufactured results elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

STREAMS = {"haar": 0x7151, "hadamard": 0x7152, "qjl": 0x7153}
Seed = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal map of R^d; `matrix` is float32 [d, d], y = matrix @ x."""

    kind: str
    matrix: torch.Tensor

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate rows: float [..., d] -> float32 [..., d], the same bits for a row in any batch."""
        if self.kind == "identity":
            return x.float()
        if self.kind == "hadamard":
            return butterflies(x.float() * self.matrix[0].sign()) * self.dim**-0.5
        return batch_invariant_matmul(x, self.matrix.T)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Rotate rows back: float [..., d] -> float32 [..., d]."""
        return y.float() if self.kind == "identity" else y.float() @ self.matrix

    def to(self, device: torch.device | str) -> "Rotation":
        return Rotation(self.kind, self.matrix.to(device))


def butterflies(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of rows float32 [..., 2^m], in Sylvester order."""
    width = 1
    while width < x.shape[-1]:
        pairs = x.unflatten(-1, (-1, 2, width))
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).flatten(-3)
        width *= 2
    return x


def batch_invariant_matmul(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [..., d] @ matrix [d, e] in float32, summed in float64: BLAS orders its sums by the size of the batch."""
    return (x.double() @ matrix.double()).float()


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension: [..., d] -> [..., 1], padded to a power of two and folded half on half.

    The order depends on d alone, and a kernel can follow it.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


def _rng(stream: str, seed: Seed) -> np.random.Generator:
    parts = [seed] if isinstance(seed, int) else list(seed)
    return np.random.default_rng([STREAMS[stream], *parts])


def _float32(matrix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix, dtype=np.float32))


def is_power_of_two(dim: int) -> bool:
    return dim > 0 and dim & (dim - 1) == 0


def sylvester_hadamard(dim: int) -> np.ndarray:
    """Orthonormal Sylvester-Hadamard matrix, float64 [dim, dim]; `dim` must be a power of two."""
    if not is_power_of_two(dim):
        raise ValueError(f"a Hadamard rotation needs a power of two, got {dim}; use rotation='haar'")
    h = np.ones((1, 1))
    while h.shape[0] < dim:
        h = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), h)
    return h / np.sqrt(dim)


def hadamard_rotation(dim: int, seed: Seed) -> Rotation:
    """Random signs, then Hadamard.  The signs are mandatory: without them a constant vector becomes one-hot."""
    signs = _rng("hadamard", seed).choice([-1.0, 1.0], dim)
    return Rotation("hadamard", _float32(sylvester_hadamard(dim) * signs))


def haar_rotation(dim: int, seed: Seed) -> Rotation:
    """Haar-distributed orthogonal matrix: QR of a Gaussian with the signs of R moved into Q (TurboQuant, Alg. 1)."""
    q, r = np.linalg.qr(_rng("haar", seed).standard_normal((dim, dim)))
    return Rotation("haar", _float32(q * np.sign(np.diag(r))))


def identity_rotation(dim: int) -> Rotation:
    return Rotation("identity", torch.eye(dim))


def make_rotation(kind: str, dim: int, seed: Seed) -> Rotation:
    """`kind`: "hadamard", "haar", or "auto" (Hadamard where `dim` is a power of two, else Haar)."""
    if kind == "auto":
        kind = "hadamard" if is_power_of_two(dim) else "haar"
    if kind == "hadamard":
        return hadamard_rotation(dim, seed)
    if kind == "haar":
        return haar_rotation(dim, seed)
    raise ValueError(f"unknown rotation {kind!r}; allowed: 'auto', 'hadamard', 'haar'")


def qjl_matrix(dim: int, seed: Seed) -> torch.Tensor:
    """Gaussian sketch S of the quantised Johnson-Lindenstrauss transform, float32 [dim, dim], iid N(0, 1)."""
    return _float32(_rng("qjl", seed).standard_normal((dim, dim)))
