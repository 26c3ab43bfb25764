"""Compressed pages of one attention layer, addressed by physical block id."""

from collections.abc import Sequence

import torch

from turboquant.checks import check_device, check_indices, check_instance, check_int, check_rows
from turboquant.codec import KVCodec
from turboquant.packing import pack, unpack
from turboquant.quantizer import Quantized, Quantizer, bytes_to_scalars, scalars_to_bytes


class CompressedBlockStore:
    """Pages uint8 [num_blocks, H_kv, page_bytes] with the codec that writes and reads them.

    There is one page per physical block and KV head, so prefix sharing, preemption and block reuse need no
    bookkeeping here: whoever owns the block owns the page.
    """

    def __init__(
        self,
        codec: KVCodec,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        device: torch.device | str = "cpu",
        pages: torch.Tensor | None = None,
    ):
        check_instance("codec", codec, KVCodec)
        check_int("num_blocks", num_blocks)
        check_device(device)
        if num_kv_heads != codec.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads!r}, but the codec is for {codec.num_kv_heads} heads")
        self.codec = codec
        self.block_size = block_size
        self.format = codec.page_format(block_size)
        shape = (num_blocks, num_kv_heads, self.format.page_bytes)
        self.pages = torch.zeros(shape, dtype=torch.uint8, device=device) if pages is None else pages
        self.format.check(self.pages)
        if self.pages.shape != shape:
            raise ValueError(f"pages are {tuple(self.pages.shape)}, expected {shape}")

    @property
    def num_blocks(self) -> int:
        return self.pages.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return self.pages.nbytes

    def check_tokens(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse what `write` cannot take: slots int64 [n], keys and values float [N, H_kv, d] on the pages' device.

        The values of slots are not looked at, nor are n and N compared: batches are padded on either side.
        """
        check_indices("slots", slots, (None,), "[n]")
        check_rows("keys", keys, (None, self.num_kv_heads, self.codec.key.dim), "[N, H_kv, d]", self.pages.device)
        check_rows("values", values, (*keys.shape,), "[N, H_kv, d]", self.pages.device)

    def write(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None = None
    ) -> None:
        """Encode keys and values float [N, H_kv, d] into `slots` int64 [N]; slots below 0 are padding and skipped.

        positions: int64 [N] of the tokens in their sequences, where the codec's centres turn (`KVCodec`).
        """
        self.check_tokens(slots, keys, values)
        slots = slots[: len(keys)]
        valid = slots >= 0
        if positions is not None:
            positions = positions[: len(slots)][valid]
        slots, keys, values = slots[valid], keys[: len(slots)][valid], values[: len(slots)][valid]
        if not len(slots):
            return
        self._scatter(slots, "key", self.codec.key, self.codec.encode_keys(keys, positions))
        self._scatter(slots, "value", self.codec.value, self.codec.encode_values(values))

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode whole blocks: int64 [..., n] -> keys and values float32 [..., H_kv, n * block_size, d].

        Both stay in the codec's bases (`KVCodec.query`, `KVCodec.output`).
        """
        check_indices("blocks", blocks)
        pages = self.pages[blocks].transpose(-3, -2)  # [..., H_kv, n, page_bytes]
        return self._decode(pages, "key", self.codec.key), self._decode(pages, "value", self.codec.value)

    def read_slots(
        self, slots: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode single tokens: int64 [N] -> keys and values float32 [N, H_kv, d] in the original basis."""
        check_indices("slots", slots, (None,), "[N]")
        blocks, local = slots // self.block_size, slots % self.block_size
        unique, where = blocks.unique(return_inverse=True)
        keys, values = self.read(unique[:, None])  # [U, H_kv, block_size, d]
        return self.codec.decode_keys(keys[where, :, local], positions), self.codec.output(values[where, :, local])

    def _planes(self, prefix: str) -> Sequence[torch.Tensor]:
        return [self.format.view(self.pages, plane) for plane in self.format.group(prefix)]

    def _scatter(self, slots: torch.Tensor, side: str, quantizer: Quantizer, quantized: Quantized) -> None:
        """Write the bytes of `quantized` [N, H_kv, ...] to their slots; nothing else changes."""
        blocks, local = slots // self.block_size, slots % self.block_size
        rows = [*pack(quantized.codes, quantizer.bits), scalars_to_bytes(quantized.scalars)]
        planes = [*self._planes(f"{side}_codes"), *self._planes(f"{side}_scalars")]
        for plane, row in zip(planes, rows, strict=True):
            plane[blocks, :, local] = row

    def _decode(self, pages: torch.Tensor, side: str, quantizer: Quantizer) -> torch.Tensor:
        """Gathered pages [..., n, page_bytes] -> decoded rows float32 [..., n * block_size, d]."""
        planes = [self.format.view(pages, p).flatten(-3, -2) for p in self.format.group(f"{side}_codes")]
        (scalars,) = (self.format.view(pages, p).flatten(-3, -2) for p in self.format.group(f"{side}_scalars"))
        return quantizer.decode(Quantized(unpack(planes, quantizer.bits), bytes_to_scalars(scalars)))
