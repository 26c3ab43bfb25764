"""The codec of one attention layer: a key quantiser, a value quantiser, and the affine key transform."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from turboquant.checks import check_device, check_float32, check_instance, check_int
from turboquant.config import TurboQuantConfig
from turboquant.page import PageFormat, check_head_dim
from turboquant.quantizer import FP8Quantizer, GroupQuantizer, Quantized, Quantizer, TurboQuantMSE, TurboQuantProd
from turboquant.rotary import SPAN, Rotary, still
from turboquant.rotation import Rotation, make_rotation, qjl_matrix

KEY_STREAM, VALUE_STREAM, SKETCH_STREAM = 1, 2, 3


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """Affine map of a layer's keys before the rotation: k -> (k - R(position) center) * gain, and q -> q / gain.

    center, gain: float32 [H_kv, d]; rotary: what turns the centre, None for one centre of all positions.  A centre
    shifts the logits of all tokens of its span equally, by a number that is added once per query and span
    (`KVCodec.center_logits`).  Part of the cache's identity: fixed while pages live.
    """

    center: torch.Tensor
    gain: torch.Tensor
    rotary: Rotary | None = None

    @classmethod
    def identity(cls, num_kv_heads: int, head_dim: int) -> "KeyTransform":
        return cls(torch.zeros(num_kv_heads, head_dim), torch.ones(num_kv_heads, head_dim))

    def __post_init__(self) -> None:
        check_float32("center", self.center)
        check_float32("gain", self.gain)
        if self.center.shape != self.gain.shape or self.center.dim() != 2:
            raise ValueError(
                f"center and gain must both be [H_kv, d]; got {tuple(self.center.shape)} and {tuple(self.gain.shape)}"
            )
        if not (torch.isfinite(self.center).all() and torch.isfinite(self.gain).all() and (self.gain != 0).all()):
            raise ValueError("the key transform needs a finite center and a finite gain without zeros")

    def to(self, device: torch.device | str) -> "KeyTransform":
        rotary = self.rotary and self.rotary.to(device)
        return KeyTransform(self.center.to(device), self.gain.to(device), rotary)


class KVCodec:
    """Encode and decode rows of keys and values, and take queries and outputs through the same bases.

    Keys and values are [..., H_kv, d]; queries and outputs [..., H_kv, G, d] with G query heads per KV head.
    Positions int64 [N] are of the keys' tokens in their sequences; not needed where centres do not turn.
    center: float32 [2, H_kv, d], the transform's centre, and the same turned by a right angle in every pair.
    """

    def __init__(self, key: Quantizer, value: Quantizer, transform: KeyTransform):
        self.key, self.value = key, value
        self.query_matrix = key.rotation.matrix.T / transform.gain[:, :, None]
        self.transform = transform
        self.rotary = transform.rotary or still(key.dim, transform.center.device)
        self.center = torch.stack((transform.center, self.rotary.quarter(transform.center)))

    @classmethod
    def build(
        cls,
        config: TurboQuantConfig,
        layer_index: int,
        num_kv_heads: int,
        head_dim: int,
        transform: KeyTransform | None = None,
        device: torch.device | str = "cpu",
    ) -> "KVCodec":
        """The codec of an attention layer; the same for every rank and process that names the same layer."""
        check_instance("config", config, TurboQuantConfig)
        check_int("layer_index", layer_index)
        check_int("num_kv_heads", num_kv_heads, least=1)
        check_head_dim(head_dim)
        check_device(device)
        transform = KeyTransform.identity(num_kv_heads, head_dim) if transform is None else transform
        check_instance("transform", transform, KeyTransform)
        if transform.center.shape != (num_kv_heads, head_dim):
            raise ValueError(f"key transform is {tuple(transform.center.shape)}, expected {(num_kv_heads, head_dim)}")
        key = key_quantizer(config, layer_index, head_dim).to(device)
        value = value_quantizer(config, layer_index, head_dim).to(device)
        return cls(key, value, transform.to(device))

    @property
    def num_kv_heads(self) -> int:
        return len(self.transform.gain)

    def page_format(self, block_size: int) -> PageFormat:
        return PageFormat(
            self.key.dim, block_size, self.key.bits, self.value.bits, self.key.num_scalars, self.value.num_scalars
        )

    def encode_keys(self, keys: torch.Tensor, positions: torch.Tensor | None = None) -> Quantized:
        """float [N, H_kv, d] -> Quantized, centred and rotated in float32."""
        rows = (keys.float() - self.centers(positions)) * self.transform.gain
        return self.key.encode(self.key.rotation.forward(rows))

    def encode_values(self, values: torch.Tensor) -> Quantized:
        """float [N, H_kv, d] -> Quantized."""
        return self.value.encode(self.value.rotation.forward(values))

    def decode_keys(self, rows: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Decoded rows [N, H_kv, d] of the rotated basis -> keys in the original basis."""
        plain = self.key.rotation.inverse(rows)
        return plain / self.transform.gain + self.centers(positions)

    def centers(self, positions: torch.Tensor | None) -> torch.Tensor:
        """Centres float32 [N, H_kv, d] of tokens at positions [N]; [H_kv, d] where they do not turn."""
        if not self.rotary.turns:
            return self.transform.center
        if positions is None:
            raise ValueError("the key transform turns with the position, so positions must be given")
        return self.rotary.turn(self.transform.center, positions)

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """float [..., H_kv, G, d] -> float32, in the basis in which decoded keys are scored."""
        return query.float() @ self.query_matrix

    def waves(self, query: torch.Tensor) -> torch.Tensor:
        """`Rotary.waves` of query float32 [..., H_kv, G, d] with the centres, in the same shape."""
        return self.rotary.waves(query, self.transform.center[:, None])

    def center_logits(self, waves: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the centres of keys at `positions` [T] add to the logits of queries: waves [..., d] -> [..., T]."""
        return waves @ self.rotary.cos_sin[self.rotary.spans(positions)].float().T

    def lift(self, first: int, last: int) -> torch.Tensor:
        """What decoded keys at positions [first, last) lack, in their basis: float32 [spans, H_kv, d], a row a span."""
        start, stop = self.rotary.span_range(first, last)
        positions = torch.arange(start, stop, device=self.center.device) * SPAN
        centers = self.rotary.turn(self.transform.center, positions)
        return (centers * self.transform.gain) @ self.key.rotation.matrix.T

    def output(self, output: torch.Tensor) -> torch.Tensor:
        """Sums of decoded values [..., d] -> the original basis."""
        return self.value.rotation.inverse(output)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's tables, without those of the rotary embedding, which layers share."""
        own = [self.query_matrix, self.center, self.transform.center, self.transform.gain]
        return sum(table.nbytes for table in own + self.key.tables() + self.value.tables())


def rotary_bytes(codecs: Iterable[KVCodec]) -> int:
    """Bytes of the rotary tables of layers, which share them."""
    return sum(rotary.nbytes for rotary in {id(codec.rotary): codec.rotary for codec in codecs}.values())


def layer_rotation(config: TurboQuantConfig, layer_index: int, head_dim: int, stream: int) -> Rotation:
    return make_rotation(config.rotation, head_dim, [config.seed, layer_index, stream])


def key_quantizer(config: TurboQuantConfig, layer_index: int, head_dim: int) -> Quantizer:
    """Key quantiser of a layer: fp8 for 8 bits, else Algorithm 1 or 2."""
    bits = config.layer_key_bits(layer_index)
    if bits == 8:
        return FP8Quantizer(head_dim)
    rotation = layer_rotation(config, layer_index, head_dim, KEY_STREAM)
    if config.key_quantizer == "prod":
        sketch = qjl_matrix(head_dim, [config.seed, layer_index, SKETCH_STREAM])
        return TurboQuantProd(head_dim, bits, rotation, sketch)
    return TurboQuantMSE(head_dim, bits, rotation, config.scale_candidates)


def value_quantizer(config: TurboQuantConfig, layer_index: int, head_dim: int) -> Quantizer:
    """Value quantiser of a layer."""
    bits = config.layer_value_bits(layer_index)
    if config.value_quantizer == "group":
        return GroupQuantizer(head_dim, bits, math.gcd(config.value_group, head_dim))
    rotation = layer_rotation(config, layer_index, head_dim, VALUE_STREAM)
    return TurboQuantMSE(head_dim, bits, rotation, config.scale_candidates)
