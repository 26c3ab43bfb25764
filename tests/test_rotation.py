"""Rotations: orthonormal for every head size, the same in every process, and independent of each other."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import FLOAT32_EPS, normal

from turboquant.codec import KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.rotation import (
    STREAMS,
    haar_rotation,
    hadamard_rotation,
    identity_rotation,
    is_power_of_two,
    make_rotation,
    qjl_matrix,
    sylvester_hadamard,
)

DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 512, 576)
POWERS = (64, 128, 256, 512)
CASES = [("auto", dim) for dim in DIMS] + [("haar", dim) for dim in POWERS]


@pytest.mark.parametrize(("kind", "dim"), CASES)
def test_orthonormal(kind, dim):
    """For every head size, not only powers of two."""
    rotation = make_rotation(kind, dim, [3, 1])
    gram = rotation.matrix.double() @ rotation.matrix.double().T
    assert rotation.matrix.dtype == torch.float32 and rotation.dim == dim
    assert (gram - torch.eye(dim)).abs().max() < 4 * FLOAT32_EPS


@pytest.mark.parametrize(("kind", "dim"), CASES)
def test_forward_applies_the_matrix_and_inverse_undoes_it(kind, dim):
    """Not the transpose for the matrix."""
    rotation = make_rotation(kind, dim, 5)
    x = normal(3, 2, dim, seed=dim)
    y = rotation.forward(x)
    expected = torch.einsum("ij,...j->...i", rotation.matrix.double(), x.double())
    bound = FLOAT32_EPS * math.sqrt(dim) * x.norm(dim=-1).max()
    assert (y - expected).abs().max() < bound
    assert (rotation.inverse(y) - x).abs().max() < 2 * bound
    assert (y - x).norm() > 0.5 * x.norm()


@pytest.mark.parametrize("dim", [0, -8, 72, 80, 96, 112, 160, 192, 576])
def test_hadamard_of_no_power_of_two_is_refused(dim):
    """The overshooting Sylvester loop."""
    with pytest.raises(ValueError, match=rf"power of two, got {dim}.*rotation='haar'"):
        sylvester_hadamard(dim)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'fourier'.*'auto', 'hadamard', 'haar'"):
        make_rotation("fourier", 64, 0)


@pytest.mark.parametrize("dim", DIMS)
def test_auto_prefers_hadamard(dim):
    assert is_power_of_two(dim) == (dim in POWERS)
    assert make_rotation("auto", dim, 0).kind == ("hadamard" if dim in POWERS else "haar")


def test_sylvester_signs():
    """Entry (i, j) is (-1)^popcount(i & j) / sqrt(d)."""
    i = np.arange(64)
    parity = np.array([[(int(a) & int(b)).bit_count() % 2 for b in i] for a in i])
    assert np.array_equal(sylvester_hadamard(64), (1 - 2 * parity) / 8)


@pytest.mark.parametrize("dim", POWERS)
def test_hadamard_has_random_signs(dim):
    """Without them a constant vector becomes one-hot; a fair coin each, within 5 sigma."""
    matrix = hadamard_rotation(dim, [0, 4]).matrix
    signs = matrix[0].sign()
    assert torch.equal(matrix, torch.from_numpy(sylvester_hadamard(dim)).float() * signs)
    assert abs(signs.sum()) < 5 * math.sqrt(dim)
    spread = hadamard_rotation(dim, [0, 4]).forward(torch.ones(dim)) / math.sqrt(dim)
    assert spread.abs().max() < 6 / math.sqrt(dim)


def test_haar_has_no_preferred_direction():
    """QR alone leaves a negative diagonal; with R's signs moved into Q every entry has mean 0 and variance 1/d."""
    corner = np.array([haar_rotation(8, [9, i]).matrix.diagonal().numpy() for i in range(400)])
    standard_error = 1 / math.sqrt(8 * corner.size)
    assert abs(corner.mean()) < 4.5 * standard_error
    assert abs(corner.var() * 8 - 1) < 4.5 * math.sqrt(2 / corner.size)
    determinants = [np.linalg.det(haar_rotation(8, [9, i]).matrix.numpy()) for i in range(20)]
    assert min(determinants) < 0 < max(determinants)


FINGERPRINT = """
import hashlib
from turboquant.rotation import make_rotation, qjl_matrix
matrices = [make_rotation(kind, dim, [7, 2, 1]).matrix for kind, dim in {cases!r}]
for matrix in (*matrices, qjl_matrix(80, [7, 2, 3]), qjl_matrix(128, 0)):
    print(hashlib.sha256(matrix.numpy().tobytes()).hexdigest())
"""
FINGERPRINT_CASES = [("hadamard", 128), ("haar", 80), ("haar", 128), ("haar", 576)]


def test_same_matrices_in_every_process():
    """Ranks differ in hash seed and thread count, never in the rotation."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    threads = "2" if os.environ.get("OMP_NUM_THREADS") == "1" else "1"
    env = {**os.environ, **dict.fromkeys(names, threads), "PYTHONHASHSEED": "1"}
    code = FINGERPRINT.format(cases=FINGERPRINT_CASES)
    printed = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    matrices = [make_rotation(kind, dim, [7, 2, 1]).matrix for kind, dim in FINGERPRINT_CASES]
    matrices += [qjl_matrix(80, [7, 2, 3]), qjl_matrix(128, 0)]
    assert printed.split() == [hashlib.sha256(m.numpy().tobytes()).hexdigest() for m in matrices]
    assert len(set(printed.split())) == len(matrices)


def flat_correlation(a, b):
    return abs(float(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1]))


def test_seeds_and_purposes_have_their_own_streams():
    matrices = [haar_rotation(64, seed).matrix for seed in (0, 1, [0, 1], [1, 0, 1], [0, 0, 2])]
    matrices += [qjl_matrix(64, seed) for seed in (0, 1)] + [hadamard_rotation(64, seed).matrix for seed in (0, 1)]
    for i, a in enumerate(matrices):
        for b in matrices[:i]:
            assert flat_correlation(a, b) < 5 / 64


def test_keys_values_and_layers_have_their_own_rotations():
    codecs = [KVCodec.build(TurboQuantConfig(seed=seed), layer, 1, 80) for seed, layer in ((0, 0), (0, 1), (1, 0))]
    matrices = [q.rotation.matrix for codec in codecs for q in (codec.key, codec.value)]
    for i, a in enumerate(matrices):
        for b in matrices[:i]:
            assert flat_correlation(a, b) < 5 / 80


def test_test_data_never_see_the_rotations_numbers():
    """Data from a plain default_rng(seed) with the rotation's seed."""
    for seed in range(20):
        data = torch.from_numpy(np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32))
        assert flat_correlation(qjl_matrix(64, seed), data) < 5 / 64
        q = torch.linalg.qr(data)[0]
        assert flat_correlation(haar_rotation(64, seed).matrix.abs(), q.abs()) < 5 / 64


def test_streams_are_disjoint():
    assert len(set(STREAMS.values())) == len(STREAMS)


def test_identity():
    x = normal(2, 3, 16, seed=1)
    rotation = identity_rotation(16)
    assert torch.equal(rotation.forward(x), x) and torch.equal(rotation.inverse(x), x)
    assert torch.equal(rotation.matrix, torch.eye(16))


def test_half_precision_rows_are_rotated_in_float32():
    rotation = make_rotation("auto", 64, 0)
    x = normal(4, 64, seed=2).bfloat16()
    assert torch.equal(rotation.forward(x), rotation.forward(x.float()))
