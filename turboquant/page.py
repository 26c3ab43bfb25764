"""The byte layout of a compressed page: one class that every writer and reader asks.

A page holds `block_size` tokens of one KV head as planes, in this order: key codes, value codes, key scalars, value
scalars (3-bit codes take two planes).  Key planes and scalars are token-major; value codes are dimension-major, so
that the tokens of one coordinate are neighbours.  Every plane starts on a multiple of 16 bytes
and so does the next page.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from turboquant.checks import check_int, is_int
from turboquant.packing import plane_bytes, plane_widths

ALIGNMENT = 16
SCALAR_BYTES = 2  # bfloat16
GIB = 2**30


def check_head_dim(head_dim: int) -> None:
    """ValueError for head sizes of which no page can be made."""
    if not is_int(head_dim) or head_dim < 16 or head_dim % 8:
        raise ValueError(f"head size {head_dim!r} is not supported; it must be a multiple of 8 and at least 16")


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plane:
    """`token_bytes` bytes per token from byte `offset` of the page; dimension-major planes are [byte][token]."""

    name: str
    offset: int
    token_bytes: int
    dimension_major: bool


@dataclass(frozen=True)
class PageFormat:
    """Layout of a page of `block_size` tokens of one KV head.

    key_scalars, value_scalars: bf16 numbers per token (1 for Lloyd-Max and fp8, 2 for "prod", 2 per group of
    group-quantised values).
    """

    head_dim: int
    block_size: int
    key_bits: int
    value_bits: int
    key_scalars: int = 1
    value_scalars: int = 1

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim)
        for name in ("block_size", "key_scalars", "value_scalars"):
            check_int(name, getattr(self, name), least=1)
        for bits in (self.key_bits, self.value_bits):
            plane_widths(bits)  # refuses those of which no plane can be made

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """All planes in page order."""
        sizes = [
            *self._code_sizes("key_codes", self.key_bits),
            *self._code_sizes("value_codes", self.value_bits),
            ("key_scalars", self.key_scalars * SCALAR_BYTES),
            ("value_scalars", self.value_scalars * SCALAR_BYTES),
        ]
        planes, offset = [], 0
        for name, token_bytes in sizes:
            planes.append(Plane(name, offset, token_bytes, name.startswith("value_codes")))
            offset = align(offset + token_bytes * self.block_size)
        return tuple(planes)

    def _code_sizes(self, name: str, bits: int) -> list[tuple[str, int]]:
        return [(f"{name}_{i}", plane_bytes(w, self.head_dim)) for i, w in enumerate(plane_widths(bits))]

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 16."""
        last = self.planes[-1]
        return align(last.offset + last.token_bytes * self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes per token and KV head without padding (132 for k4v4 at head size 128)."""
        return sum(plane.token_bytes for plane in self.planes)

    def bytes_per_token(self, num_kv_heads: int, num_layers: int = 1) -> float:
        """Bytes that one token takes in pages of all heads and layers, padding included."""
        check_int("num_kv_heads", num_kv_heads, least=1)
        check_int("num_layers", num_layers, least=1)
        return self.page_bytes / self.block_size * num_kv_heads * num_layers

    def tokens_per_gib(self, num_kv_heads: int, num_layers: int) -> int:
        return int(GIB / self.bytes_per_token(num_kv_heads, num_layers))

    def group(self, prefix: str) -> list[Plane]:
        """Planes whose name starts with `prefix`, in page order."""
        return [plane for plane in self.planes if plane.name.startswith(prefix)]

    def view(self, pages: torch.Tensor, plane: Plane) -> torch.Tensor:
        """The plane in uint8 pages [..., page_bytes]: a view [..., token, byte], whatever the memory order."""
        self.check(pages)
        part = pages[..., plane.offset : plane.offset + plane.token_bytes * self.block_size]
        if plane.dimension_major:
            return part.unflatten(-1, (plane.token_bytes, self.block_size)).transpose(-1, -2)
        return part.unflatten(-1, (self.block_size, plane.token_bytes))

    def check(self, pages: torch.Tensor) -> None:
        """Raise ValueError unless `pages` has this format's dtype and page size, pages contiguous in memory."""
        expected = f"pages must be uint8 [..., {self.page_bytes}] with contiguous pages for {self}; got"
        if not isinstance(pages, torch.Tensor):
            raise TypeError(f"{expected} a {type(pages).__name__}")
        fits = pages.dtype == torch.uint8 and pages.shape[-1:] == (self.page_bytes,) and pages.stride(-1) == 1
        if not fits:
            raise ValueError(f"{expected} {pages.dtype} {tuple(pages.shape)} with strides {pages.stride()}")
