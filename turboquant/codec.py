"""The codec of one attention layer: a key quantiser, a value quantiser, and the affine key transform."""

import math
from dataclasses import dataclass

import torch

from turboquant.config import TurboQuantConfig
from turboquant.page import PageFormat
from turboquant.quantizer import FP8Quantizer, GroupQuantizer, Quantized, Quantizer, TurboQuantMSE, TurboQuantProd
from turboquant.rotation import Rotation, make_rotation, qjl_matrix

KEY_STREAM, VALUE_STREAM, SKETCH_STREAM = 1, 2, 3


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """Affine map of a layer's keys before the rotation: k -> (k - center) * gain, and q -> q / gain.

    center, gain: float32 [H_kv, d].  The centre shifts the logits of all cached tokens of a query equally, by a number
    that is added once per query (`KVCodec.center_logit`), never per token.  Part of the cache's identity: fixed while
    pages live.
    """

    center: torch.Tensor
    gain: torch.Tensor

    @classmethod
    def identity(cls, num_kv_heads: int, head_dim: int) -> "KeyTransform":
        return cls(torch.zeros(num_kv_heads, head_dim), torch.ones(num_kv_heads, head_dim))

    def __post_init__(self) -> None:
        if self.center.shape != self.gain.shape or self.center.dim() != 2:
            raise ValueError(
                f"center and gain must both be [H_kv, d]; got {tuple(self.center.shape)} and {tuple(self.gain.shape)}"
            )
        if not (torch.isfinite(self.center).all() and torch.isfinite(self.gain).all() and (self.gain != 0).all()):
            raise ValueError("the key transform needs a finite center and a finite gain without zeros")

    def to(self, device: torch.device | str) -> "KeyTransform":
        return KeyTransform(self.center.to(device), self.gain.to(device))


class KVCodec:
    """Encode and decode rows of keys and values, and take queries and outputs through the same bases.

    Keys and values are [..., H_kv, d]; queries and outputs [..., H_kv, G, d] with G query heads per KV head.
    """

    def __init__(self, key: Quantizer, value: Quantizer, transform: KeyTransform):
        self.key, self.value = key, value
        self.query_matrix = key.rotation.matrix.T / transform.gain[:, :, None]
        self.transform = transform

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
        transform = transform or KeyTransform.identity(num_kv_heads, head_dim)
        if transform.center.shape != (num_kv_heads, head_dim):
            raise ValueError(f"key transform is {tuple(transform.center.shape)}, expected {(num_kv_heads, head_dim)}")
        key = key_quantizer(config, layer_index, head_dim).to(device)
        value = value_quantizer(config, layer_index, head_dim).to(device)
        return cls(key, value, transform.to(device))

    def page_format(self, block_size: int) -> PageFormat:
        return PageFormat(
            self.key.dim, block_size, self.key.bits, self.value.bits, self.key.num_scalars, self.value.num_scalars
        )

    def encode_keys(self, keys: torch.Tensor) -> Quantized:
        """float [N, H_kv, d] -> Quantized, centred and rotated in float32."""
        rows = (keys.float() - self.transform.center) * self.transform.gain
        return self.key.encode(self.key.rotation.forward(rows))

    def encode_values(self, values: torch.Tensor) -> Quantized:
        """float [N, H_kv, d] -> Quantized."""
        return self.value.encode(self.value.rotation.forward(values))

    def decode_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Decoded rows [..., H_kv, d] of the rotated basis -> keys in the original basis."""
        plain = self.key.rotation.inverse(rows)
        return plain / self.transform.gain + self.transform.center

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """float [..., H_kv, G, d] -> float32, in the basis in which decoded keys are scored."""
        return query.float() @ self.query_matrix

    def center_logit(self, query: torch.Tensor) -> torch.Tensor:
        """What the centre adds to every logit of query float32 [..., H_kv, G, d]: float32 [..., H_kv, G]."""
        return (query @ self.transform.center[:, :, None]).squeeze(-1)

    def output(self, output: torch.Tensor) -> torch.Tensor:
        """Sums of decoded values [..., d] -> the original basis."""
        return self.value.rotation.inverse(output)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's tables."""
        own = [self.query_matrix, self.transform.center, self.transform.gain]
        return sum(table.nbytes for table in own + self.key.tables() + self.value.tables())


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
