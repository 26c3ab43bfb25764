"""Lloyd-Max codebooks of one coordinate of a uniformly random unit vector (TurboQuant Lemma 1, Algorithm 1).

A random rotation turns any unit vector of R^d into a uniform point of the sphere, so one coordinate x has
the density f(x) = f(0) (1 - x^2)^((d-3)/2).  Everything here is in units of 1/sqrt(d): z = sqrt(d) x has
variance 1.
With x = sin(a) and the cell edges t the two integrals that Lloyd-Max needs are

    E[z; z > t] = sqrt(d) f(0) cos(a_t)^(d-1) / (d-1)          closed form
    P(t0 < z < t1) = f(0) * integral of cos(a)^(d-2) da          Gauss-Legendre, the integrand is entire

`python -m turboquant.codebook` writes the shipped files; nothing else does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from turboquant.checks import is_int

SHIPPED_DIMS = (64, 80, 96, 112, 128, 192, 256, 576)
SHIPPED_BITS = (1, 2, 3, 4)
MIN_DIM = 4
GRID_LEVELS = 128  # a byte without its sign bit
GRID_CENTER = (GRID_LEVELS - 1) / 2
_GRID_RESOLUTION = 1 / 32

# Nine digits hold every float32, and leave room for the rounding noise of another machine's libm.
_DIGITS = 9
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_LLOYD_SWEEPS, _NEWTON_STEPS = 100, 40

Array = NDArray[np.float64]


# Of the shipped files: a page decodes to something else with other centroids.
SHA256 = {
    64: "f7d270bbc43fdd9c7b4c03dd4fdfa97b2f2ffe76a036ce2839fc3830cca93df2",
    80: "03de30290bce0785d6cf9d0cabe61118880a152f61bb7ec0a17cbee1607bc453",
    96: "f2820d162a91608b26cc0aa38d497e38262098c2834a0a48e19c13881ea0d85b",
    112: "d8807d25bef01a7386246178dca1b17516b68046532860a610b0b1a536e5b2b7",
    128: "3b79a9e739e978e40c9e76c0ed762889765fb918696f28e79c031a52ff28b1ba",
    192: "a64003409d2323383e863660f4d07eb9b064b1686e2323ca8f8cfcb07b667bc3",
    256: "1ddd187d05af0022cd90ea92b7c134a5412e628290d3f753a753e65ffdd0e604",
    576: "939d1b5827ebf9d201f78acc727819599c6bcc3b72a54ba812082425420d9347",
}


@dataclass(frozen=True)
class Grid:
    """Centroid i is (levels[i] - GRID_CENTER) * step; levels are integers in [0, GRID_LEVELS)."""

    levels: tuple[int, ...]
    step: float

    @property
    def centroids(self) -> list[float]:
        return [(level - GRID_CENTER) * self.step for level in self.levels]


@dataclass(frozen=True)
class Codebook:
    """Symmetric scalar codebook for a unit-variance coordinate.

    `centroids` [2^bits] ascend; `mse` is the distortion D for source variance 1; `entropy` is in bits/index.
    """

    dim: int
    bits: int
    centroids: tuple[float, ...]
    mse: float
    entropy: float

    def __post_init__(self) -> None:
        if len(self.centroids) != 1 << self.bits:
            raise ValueError(f"{len(self.centroids)} centroids, {1 << self.bits} are needed")
        numbers = all(isinstance(c, float) for c in self.centroids)
        if not numbers or not np.all(np.diff(self.centroids) > 0):  # also where one is NaN
            raise ValueError(f"centroids={self.centroids} must be numbers that ascend")

    @cached_property
    def grid(self) -> Grid:
        """The centroids rounded to 128 integer levels, which byte lookups and integer tensor cores hold exactly."""
        half = np.array(self.centroids[len(self.centroids) // 2 :])
        steps = half[-1] / np.arange(GRID_LEVELS / 4, GRID_LEVELS / 2, _GRID_RESOLUTION)
        counts = np.floor(half / steps[:, None])  # half-integer multiples of the step: symmetric without a zero
        errors = (_cells(half, self.dim).mass * (half - (counts + 0.5) * steps[:, None]) ** 2).sum(1)
        best = int(errors.argmin())
        above = GRID_LEVELS // 2 + counts[best].astype(int)
        levels = (*(GRID_LEVELS - 1 - above[::-1]).tolist(), *above.tolist())
        return Grid(levels, float(steps[best]))

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Decision boundaries: the 2^bits - 1 midpoints between neighbouring centroids."""
        return tuple((lo + hi) / 2 for lo, hi in zip(self.centroids, self.centroids[1:], strict=False))


@lru_cache(maxsize=None, typed=True)  # True is not 1
def load(dim: int, bits: int) -> Codebook:
    """The codebook of (dim, bits): read from the shipped file, or solved in memory when none is shipped."""
    _validate(dim, bits)
    path = shipped_file(dim)
    if path is None:
        return solve(dim, bits)
    book = read(path, bits)
    if book.dim != dim:
        raise ValueError(f"codebook file {path} is for head size {book.dim}, not {dim}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256.get(dim):
        raise ValueError(f"codebook file {path} has other centroids than were shipped: pages would decode to others")
    return book


def read(path: Path, bits: int) -> Codebook:
    """The codebook of a file; ValueError if it holds none."""
    try:
        stored = json.loads(path.read_text())
        entry = stored["books"][str(bits)]
        return Codebook(stored["dim"], bits, tuple(entry["centroids"]), entry["mse"], entry["entropy"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"codebook file {path} holds no codebook of {bits} bits: {error}") from None


def shipped_file(dim: int) -> Path | None:
    """A wheel carries the files inside the package, a source tree and an editable install next to it."""
    folders = (Path(__file__).parent / "codebooks", _repository_folder())
    paths = (folder / _file_name(dim) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def solve(dim: int, bits: int) -> Codebook:
    """Solve the Lloyd-Max conditions c_i = E[z | cell i] to a residual below 1e-12.

    The density is log-concave for dim >= 4, so the stationary codebook is unique (Fleischer 1964) and
    symmetric: only its positive half is solved.  Lloyd sweeps bring the start into Newton's basin.
    """
    _validate(dim, bits)
    half = _companding_start(dim, 2 ** (bits - 1))
    for _ in range(_LLOYD_SWEEPS):
        half = _cells(half, dim).means
    half = _newton(half, dim)
    return _assemble(dim, bits, half)


def main(argv: Sequence[str] | None = None) -> None:
    """Regenerate the shipped codebooks, one JSON file per head dimension, byte for byte."""
    parser = argparse.ArgumentParser(prog="python -m turboquant.codebook", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=_repository_folder(), help="target folder")
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for dim in SHIPPED_DIMS:
        write_file(out, dim)


def write_file(folder: Path, dim: int) -> Path:
    """Derive the codebooks of a dimension and write them into a folder; returns the file."""
    path = folder / _file_name(dim)
    path.write_text(_serialise(dim), newline="\n")
    return path


def _validate(dim: int, bits: int) -> None:
    if not is_int(bits) or bits not in SHIPPED_BITS:
        raise ValueError(f"no Lloyd-Max codebook has bits={bits!r}; allowed: {SHIPPED_BITS}")
    if not is_int(dim) or dim < MIN_DIM:
        raise ValueError(f"no Lloyd-Max codebook has dim={dim!r}; allowed: dim >= {MIN_DIM}")


def _file_name(dim: int) -> str:
    return f"d{dim}.json"


def _repository_folder() -> Path:
    return Path(__file__).parent.parent / "codebooks"


def _serialise(dim: int) -> str:
    books = {str(bits): _entry(solve(dim, bits)) for bits in SHIPPED_BITS}
    return json.dumps({"books": books, "dim": dim}, indent=1, sort_keys=True) + "\n"


def _entry(book: Codebook) -> dict[str, float | list[float]]:
    centroids = [_rounded(value) for value in book.centroids]
    return {"centroids": centroids, "entropy": _rounded(book.entropy), "mse": _rounded(book.mse)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True)
class _Cells:
    """Positive half: lower `edges` [n] from 0 up, `mass` [n] sums to 1/2, `means` [n] = E[z | cell]."""

    edges: Array
    mass: Array
    means: Array


def _cells(half: Array, dim: int) -> _Cells:
    edges = np.append(0.0, (half[1:] + half[:-1]) / 2)
    mass = _mass(edges, dim)
    return _Cells(edges, mass, -np.diff(_upper_moment(edges, dim), append=0.0) / mass)


def _mass(edges: Array, dim: int) -> Array:
    """Cell probabilities; the unbounded last cell is what the others leave of 1/2."""
    angles = np.arcsin(edges / math.sqrt(dim))
    centre, radius = (angles[1:] + angles[:-1]) / 2, np.diff(angles) / 2
    density = _cos_power(np.sin(centre[:, None] + radius[:, None] * _NODES), dim - 2)
    inner = _density_at_zero(dim) * radius * (density @ _WEIGHTS)
    return np.append(inner, 0.5 - inner.sum())


def _upper_moment(z: Array, dim: int) -> Array:
    """E[z'; z' > z] for z in [0, sqrt(d))."""
    return math.sqrt(dim) * _density_at_zero(dim) / (dim - 1) * _cos_power(z / math.sqrt(dim), dim - 1)


def _density(z: Array, dim: int) -> Array:
    """Density of the unit-variance coordinate z."""
    return _density_at_zero(dim) / math.sqrt(dim) * _cos_power(z / math.sqrt(dim), dim - 3)


def _cos_power(sine: Array, exponent: int) -> Array:
    """cos(a)^exponent from sin(a); the power of a rounded cosine would lose log2(exponent) bits."""
    return np.asarray(np.exp(exponent / 2 * np.log1p(-sine * sine)))


@cache
def _density_at_zero(dim: int) -> float:
    """f(0) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) as a product, as differences of lgamma cancel."""
    start, value = (2, 1 / math.pi) if dim % 2 == 0 else (3, 0.5)
    return value * math.prod(k / (k - 1) for k in range(start, dim, 2))


def _companding_start(dim: int, levels: int) -> Array:
    """Panter-Dite: optimal levels have density f^(1/3), for a Gaussian another Gaussian of variance 3.

    tanh folds the Gaussian quantiles into the support |z| < sqrt(d), which matters for small d only.
    """
    compander = NormalDist(sigma=math.sqrt(3))
    quantiles = [compander.inv_cdf(0.5 + (i + 0.5) / (2 * levels)) for i in range(levels)]
    return np.asarray(math.sqrt(dim) * np.tanh(np.array(quantiles) / math.sqrt(dim)))


def _newton(half: Array, dim: int) -> Array:
    """Newton steps on E[z | cell i] - c_i = 0 until the step is at rounding level."""
    for _ in range(_NEWTON_STEPS):
        cells = _cells(half, dim)
        step = np.linalg.solve(np.eye(len(half)) - _mean_jacobian(cells, dim), cells.means - half)
        half = half + step
        if np.abs(step).max() < 1e-14:
            break
    return half


def _mean_jacobian(cells: _Cells, dim: int) -> Array:
    """d means_i / d c_j; an inner edge moves by half of what either neighbouring centroid moves."""
    inner = cells.edges[1:]
    density = _density(inner, dim) / 2
    as_upper = density * (inner - cells.means[:-1]) / cells.mass[:-1]
    as_lower = density * (cells.means[1:] - inner) / cells.mass[1:]
    diagonal = np.append(as_upper, 0.0) + np.append(0.0, as_lower)
    return np.diag(diagonal) + np.diag(as_upper, 1) + np.diag(as_lower, -1)


def _assemble(dim: int, bits: int, half: Array) -> Codebook:
    """Mirror the half book; at stationarity D = 1 - E[c^2], as E[z c] = E[c^2]."""
    mass = _cells(half, dim).mass
    mse = 1 - 2 * float(mass @ half**2)
    entropy = -2 * float(mass @ np.log2(mass))
    centroids = tuple(np.concatenate([-half[::-1], half]).tolist())
    return Codebook(dim, bits, centroids, mse, entropy)


if __name__ == "__main__":
    main()
