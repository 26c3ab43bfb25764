"""Codebooks against printed tables, a closed-form special case, and the files that ship."""

import math
from pathlib import Path

import numpy as np
import pytest

from turboquant import codebook

SHIPPED = [(dim, bits) for dim in codebook.SHIPPED_DIMS for bits in codebook.SHIPPED_BITS]
FOLDER = Path(codebook.__file__).parent.parent / "codebooks"

# D per width for source variance 1, printed to five digits.
MSE = {
    64: (0.35839, 0.11453, 0.033391, 0.0091315),
    80: (0.35939, 0.11511, 0.033620, 0.0092045),
    96: (0.36006, 0.11551, 0.033773, 0.0092534),
    128: (0.36089, 0.11600, 0.033966, 0.0093148),
    192: (0.36172, 0.11649, 0.034159, 0.0093765),
    256: (0.36214, 0.11674, 0.034256, 0.0094075),
    576: (0.36283, 0.11715, 0.034418, 0.0094594),
}
UPPER_HALF = {
    (64, 2): (0.45212, 1.49997),
    (64, 4): (0.12735, 0.38472, 0.65049, 0.93189, 1.23940, 1.59085, 2.02331, 2.64637),
    (128, 1): (0.79944,),
    (128, 2): (0.45245, 1.50519),
    (128, 3): (0.24442, 0.75333, 1.33660, 2.13147),
    (128, 4): (0.12787, 0.38638, 0.65362, 0.93710, 1.24777, 1.60434, 2.04593, 2.68886),
}
ENTROPY_128 = (1.0, 1.9145, 2.8314, 3.7739)
GAUSSIAN_MSE = (0.36338, 0.11748, 0.034548, 0.0095010)


@pytest.mark.parametrize("dim", MSE)
def test_mse_is_the_printed_one(dim):
    found = [codebook.load(dim, bits).mse for bits in codebook.SHIPPED_BITS]
    assert found == pytest.approx(MSE[dim], rel=6e-5)


@pytest.mark.parametrize("key", UPPER_HALF)
def test_centroids_are_the_printed_ones(key):
    centroids = codebook.load(*key).centroids
    assert centroids[len(centroids) // 2 :] == pytest.approx(UPPER_HALF[key], abs=6e-6)


def test_entropy_is_the_printed_one():
    found = [codebook.load(128, bits).entropy for bits in codebook.SHIPPED_BITS]
    assert found == pytest.approx(ENTROPY_128, abs=6e-5)


@pytest.mark.parametrize("bits", codebook.SHIPPED_BITS)
def test_high_dimension_is_the_gaussian_quantiser(bits):
    # The Beta law's D differs from the Gaussian's by less than 4/d.
    assert codebook.solve(10_000, bits).mse == pytest.approx(GAUSSIAN_MSE[bits - 1], rel=5e-4)


@pytest.mark.parametrize(("dim", "bits"), [*SHIPPED, (4, 4), (5, 3), (7, 4), (40, 4), (1024, 4)])
def test_solution_is_stationary(dim, bits):
    centroids = np.array(codebook.solve(dim, bits).centroids)
    half = centroids[len(centroids) // 2 :]
    assert np.abs(codebook._cells(half, dim).means - half).max() < 1e-12


@pytest.mark.parametrize("bits", codebook.SHIPPED_BITS)
def test_five_dimensions_in_closed_form(bits):
    """d = 5 has the polynomial density 3/4 (1 - x^2): masses, means, D and entropy without any quadrature."""
    book = codebook.solve(5, bits)
    x = np.array([-1, *np.array(book.thresholds) / math.sqrt(5), 1])
    mass = 0.75 * np.diff(x - x**3 / 3)
    means = math.sqrt(5) * 0.75 * np.diff(x**2 / 2 - x**4 / 4) / mass
    assert np.abs(means - book.centroids).max() < 1e-12
    assert book.mse == pytest.approx(1 - mass @ means**2, abs=1e-14)
    assert book.entropy == pytest.approx(-mass @ np.log2(mass), abs=1e-13)


@pytest.mark.parametrize(("dim", "bits"), [*SHIPPED, (4, 4), (5, 2), (100, 3)])
def test_book_is_symmetric_and_ascending(dim, bits):
    book = codebook.load(dim, bits)
    assert (book.dim, book.bits, len(book.centroids)) == (dim, bits, 2**bits)
    assert book.centroids == tuple(-c for c in reversed(book.centroids))
    assert all(lo < hi for lo, hi in zip(book.centroids, book.centroids[1:], strict=False))
    assert book.centroids[-1] < math.sqrt(dim)


def test_thresholds_are_midpoints():
    book = codebook.Codebook(dim=64, bits=2, centroids=(-2.0, -1.0, 1.0, 4.0), mse=0.1, entropy=2.0)
    assert book.thresholds == (-1.5, 0.0, 2.5)


def test_shipped_files_are_regenerated_byte_for_byte(tmp_path):
    codebook.main(["--out", str(tmp_path / "new")])
    names = {f"d{dim}.json" for dim in codebook.SHIPPED_DIMS}
    assert {path.name for path in FOLDER.iterdir()} == names
    for name in names:
        assert (tmp_path / "new" / name).read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("error", [1e-12, -1e-12])
def test_another_machines_rounding_leaves_the_files_alone(error):
    """The solver repeats to 2e-13 under another quadrature; five times that moves no printed digit."""
    for dim, bits in SHIPPED:
        book = codebook.solve(dim, bits)
        for value in (*book.centroids, book.mse, book.entropy):
            assert codebook._rounded(value * (1 + error)) == codebook._rounded(value)


def test_shipped_book_is_the_solution():
    for dim, bits in SHIPPED:
        shipped, solved = codebook.load(dim, bits), codebook.solve(dim, bits)
        assert shipped.centroids == pytest.approx(solved.centroids, rel=5e-9)
        assert (shipped.mse, shipped.entropy) == pytest.approx((solved.mse, solved.entropy), rel=5e-9)


def test_load_is_cached_and_frozen():
    book = codebook.load(128, 4)
    assert book is codebook.load(128, 4)
    with pytest.raises(AttributeError):
        book.bits = 3


def test_unshipped_dimension_is_solved_and_not_written():
    before = sorted(FOLDER.iterdir())
    assert codebook.load(72, 3) == codebook.solve(72, 3)
    assert sorted(FOLDER.iterdir()) == before


@pytest.mark.parametrize("bits", [0, 5, 8, -1])
@pytest.mark.parametrize("function", [codebook.load, codebook.solve])
def test_unknown_width_is_refused(function, bits):
    with pytest.raises(ValueError, match=rf"bits={bits}.*1, 2, 3, 4"):
        function(128, bits)


@pytest.mark.parametrize("function", [codebook.load, codebook.solve])
def test_tiny_dimension_is_refused(function):
    with pytest.raises(ValueError, match=r"dim=3.*dim >= 4"):
        function(3, 2)


@pytest.mark.parametrize("inside_package", [True, False])
def test_files_are_found_in_a_wheel_and_in_a_source_tree(tmp_path, monkeypatch, inside_package):
    package = tmp_path / "pkg"
    folder = (package if inside_package else tmp_path) / "codebooks"
    folder.mkdir(parents=True)
    (folder / "d64.json").write_text((FOLDER / "d64.json").read_text())
    monkeypatch.setattr(codebook, "__file__", str(package / "codebook.py"))
    assert codebook.shipped_file(64) == folder / "d64.json"
    assert codebook.load.__wrapped__(64, 2) == codebook.load(64, 2)
