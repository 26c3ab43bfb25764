"""The twelve claims hold, and each known way to break the codec makes the claims fail that watch it."""

import dataclasses

import numpy as np
import pytest
import torch

from turboquant import claims, codebook, packing, quantizer, rotation


@pytest.mark.parametrize("seed", [0, 7])
def test_all_claims_hold(seed):
    results = claims.run_claims(seed)
    assert [int(claim.name.split()[0]) for claim in results] == list(range(1, 13))
    assert [f"{claim.name}: {claim.value}, not {claim.bound}" for claim in results if not claim.ok] == []


def skip_rotation(monkeypatch):
    def identity(dim, seed):
        return rotation.Rotation("haar", torch.eye(dim))

    monkeypatch.setattr(rotation, "haar_rotation", identity)


def sell_hadamard_as_haar(monkeypatch):
    monkeypatch.setattr(rotation, "haar_rotation", rotation.hadamard_rotation)


def replace_books(monkeypatch, centroids_of):
    exact = codebook.load
    books = {
        (dim, bits): dataclasses.replace(exact(dim, bits), centroids=centroids_of(exact(dim, bits)))
        for dim in codebook.SHIPPED_DIMS
        for bits in codebook.SHIPPED_BITS
    }
    monkeypatch.setattr(codebook, "load", lambda dim, bits: books[dim, bits])


def scale_books(monkeypatch):
    replace_books(monkeypatch, lambda book: tuple(1.12 * c for c in book.centroids))


def make_books_uniform(monkeypatch):
    replace_books(monkeypatch, lambda book: tuple(np.linspace(-2.6, 2.6, 2**book.bits).tolist()))


def drop_norm_correction(monkeypatch):
    def plain(self, norm, words, dot):
        return norm / self.dim**0.5

    monkeypatch.setattr(quantizer.TurboQuantMSE, "_scale", plain)


def store_norms_in_fp16(monkeypatch):
    limit = torch.finfo(torch.float16).max

    def to_bytes(scalars):
        return scalars.float().clamp(-limit, limit).half().contiguous().view(torch.uint8)

    def from_bytes(raw):
        return raw.contiguous().view(torch.float16).bfloat16()

    monkeypatch.setattr(quantizer, "scalars_to_bytes", to_bytes)
    monkeypatch.setattr(quantizer, "bytes_to_scalars", from_bytes)


def swap_rotation_and_inverse(monkeypatch):
    monkeypatch.setattr(rotation.Rotation, "inverse", rotation.Rotation.forward)


def shift_a_packed_byte(monkeypatch):
    exact = packing.unpack

    def unpack(planes, bits):
        if bits == 3:
            planes = [planes[0].clone(), planes[1]]
            planes[0][..., 5] >>= 1
        return exact(planes, bits)

    monkeypatch.setattr(packing, "unpack", unpack)
    monkeypatch.setattr(quantizer, "unpack", unpack)


def take_signs_without_sketch(monkeypatch):
    exact = quantizer.TurboQuantProd.encode

    def encode(self, rows):
        sketch, self.sketch = self.sketch, torch.eye(self.dim)
        quantized = exact(self, rows)
        self.sketch = sketch
        return quantized

    monkeypatch.setattr(quantizer.TurboQuantProd, "encode", encode)


def pad_rows(monkeypatch):
    pack, unpack = quantizer.Quantizer.to_bytes, quantizer.Quantizer.from_bytes

    def to_bytes(self, quantized):
        raw = pack(self, quantized)
        return torch.cat([raw, raw.new_zeros(*raw.shape[:-1], 1)], dim=-1)

    monkeypatch.setattr(quantizer.Quantizer, "to_bytes", to_bytes)
    monkeypatch.setattr(quantizer.Quantizer, "from_bytes", lambda self, raw: unpack(self, raw[..., :-1]))


def bypass_the_bytes(monkeypatch):
    exact, rows = quantizer.Quantizer.quantize, []

    def quantize(self, x):
        rows.append(x.float())
        return exact(self, x)

    monkeypatch.setattr(quantizer.Quantizer, "quantize", quantize)
    monkeypatch.setattr(quantizer.Quantizer, "dequantize", lambda self, quantized: rows[-1])


# Mutation and the claims that must notice it.
MUTATIONS = [
    (skip_rotation, (2, 3, 9)),
    (sell_hadamard_as_haar, (2, 3)),
    (scale_books, (1, 3)),
    (make_books_uniform, (1, 3, 9, 11)),
    (drop_norm_correction, (8, 9)),
    (store_norms_in_fp16, (8,)),
    (swap_rotation_and_inverse, (3, 9, 10)),
    (shift_a_packed_byte, (3, 5, 8, 9)),
    (take_signs_without_sketch, (6, 7)),
    (pad_rows, (4, 12)),
    (bypass_the_bytes, (4, 5)),
]


@pytest.mark.parametrize(("mutation", "numbers"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_mutation_is_noticed(monkeypatch, mutation, numbers):
    mutation(monkeypatch)
    survived = [number for number in numbers if claims.CLAIMS[number - 1](0).ok]
    assert survived == []


def test_data_stream_is_none_of_the_rotations():
    assert claims.DATA_STREAM not in rotation.STREAMS.values()


# Spherical-cap bound times 4^b at whole rates.
@pytest.mark.parametrize(
    ("dim", "bits", "scaled"),
    [(128, 1, 1.024), (128, 2, 1.015), (128, 3, 1.004), (128, 4, 0.993), (128, 8, 0.951), (64, 4, 0.976)],
)
def test_cap_bound_is_the_printed_one(dim, bits, scaled):
    assert claims.cap_bound(dim, bits) * 4**bits == pytest.approx(scaled, abs=6e-4)


def test_cap_bound_of_a_hemisphere():
    """One bit in all: the cap is a half sphere, whose mean has the closed form f(0) / (d - 1) * 2."""
    mean = 2 * np.exp(claims._log_sphere_constant(6)) / 5
    assert claims.cap_bound(6, 1 / 6) == pytest.approx(1 - mean**2, rel=1e-9)


def test_kolmogorov_p_value_sees_the_law():
    rows = np.random.default_rng(5).standard_normal((60, claims.DIM))
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).ravel()
    assert claims._kolmogorov_p_value(unit) > 1e-3
    assert claims._kolmogorov_p_value(1.1 * unit) < 1e-3


def test_huffman_length_of_dyadic_shares_is_their_entropy():
    assert claims._huffman_length([0.5, 0.25, 0.125, 0.125]) == 1.75
