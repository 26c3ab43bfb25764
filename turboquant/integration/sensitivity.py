"""What few bits cost in every layer of a loaded model: the divergence of its logits, one layer and side at a time.

The model runs over the package's text once, with plain attention that keeps every layer's keys and values.  Rows all
over the text are then run again as decode steps on this cache, but for one layer, whose keys or values are what its
codec makes of them; the first tokens and the last ones before a row stay exact, as in the ring.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from turboquant.allocation import PROBE_BITS, SIDES
from turboquant.calibration import CHUNK, SINKS
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat
from turboquant.integration.calibration_file import load_damages
from turboquant.integration.selfcalibration import pieces
from turboquant.integration.standin import StandIn, standing

RECENT = 64  # tokens before a row that stay exact: fewer than in a cache, so that more of the short text counts
ROWS, CPU_ROWS = 256, 32  # that are measured
Damages = dict[str, dict[str, float]]  # layer -> side -> mean divergence in nats


class CachedAttention(StandIn):
    """Stands in for the attention of one layer over one sequence, whose keys and values are kept here.

    positions int64 [N]: of the rows; growing: whether their keys and values are kept, in order, for later rows.
    """

    positions: torch.Tensor
    growing = True

    def __init__(self, layer: Any, target: "CachedAttention | None"):
        self.target, self.parameters = target, compat.attention_parameters(layer)
        self.kept: tuple[torch.Tensor, ...] = ()
        self.fakes: dict[str, torch.Tensor] = {}
        super().__init__(layer)

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        heads = layer.num_kv_heads
        if self.target is None and self.growing:
            new = [rows.view(len(rows), heads, -1).clone() for rows in (key, value)]
            self.kept = tuple(map(torch.cat, zip(self.kept, new, strict=True))) if self.kept else tuple(new)
        found = self.attention(query.view(len(query), heads, -1, layer.head_size).float())
        output.view(len(query), -1).copy_(found.flatten(1))
        return output

    def attention(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [N, H_kv, G, d] over the tokens up to every row."""
        source = self.target or self
        keys, values = (rows.float() for rows in source.kept)
        seen, exact = self.masks(len(keys))
        logits = self.logits(query, keys)
        if "keys" in source.fakes:
            logits = torch.where(exact, logits, self.logits(query, source.fakes["keys"]))
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        if "values" not in source.fakes:
            return weighted(weights, values)
        return weighted(weights * exact, values) + weighted(weights * ~exact, source.fakes["values"])

    def logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scaled, cap = torch.einsum("nhgd,thd->nhgt", query, keys) * self.parameters.scale, self.parameters.softcap
        return cap * torch.tanh(scaled / cap) if cap else scaled

    def masks(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [N, 1, 1, T]: tokens that a row sees, and those that are exact for it."""
        row, token = self.positions[:, None, None, None], torch.arange(tokens, device=self.positions.device)
        seen = token <= row
        if self.parameters.window:
            seen = seen & (token > row - self.parameters.window)
        return seen, (token < SINKS) | (token >= row - RECENT)


def weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[N, H_kv, G, T] and [T, H_kv, d] -> [N, H_kv, G, d]"""
    return torch.einsum("nhgt,thd->nhgd", weights, values)


def measure(
    runner: Any, config: TurboQuantConfig, transforms: Mapping[str, KeyTransform], places: Mapping[str, int]
) -> Damages:
    """Damages of PROBE_BITS in the layers that `places` names, with their indices; the same on all ranks.

    transforms: key transforms of this worker's KV heads, identity where absent.
    """
    ids = [token for piece in pieces(runner.vllm_config) for token in piece]
    ids = ids[: runner.vllm_config.model_config.max_model_len]
    rows = choose_rows(len(ids), CPU_ROWS if runner.device.type == "cpu" else ROWS)
    with cached_attention(runner) as layers:
        probe = Probe(runner, layers, ids, rows)
        return compat.agreed(probe.damages(config.uniform(PROBE_BITS, PROBE_BITS), transforms, places))


def load(path: str, names: Iterable[str]) -> Damages:
    """Damages of these layers from a calibration file; ValueError if it does not have them."""
    damages = load_damages(path)
    if missing := [name for name in names if name not in damages]:
        raise ValueError(f"calibration={path!r} has no layer {missing[0]!r}; it was made for another model")
    return damages


def cached_attention(runner: Any) -> AbstractContextManager[dict[str, CachedAttention]]:
    """In the place of every attention layer's own."""
    return standing(runner, lambda _, layer, target: CachedAttention(layer, target))


def choose_rows(tokens: int, count: int) -> list[int]:
    """Positions evenly over a text, from where something is not exact."""
    first = min(SINKS + RECENT + 1, tokens - 1)
    return list(range(first, tokens, max(1, -(-(tokens - first) // count))))


class Probe:
    """Some rows of a text on a cache of plain keys and values of all its tokens.

    reference: their log-probabilities, float32 [N, vocabulary]; None on ranks that have none.
    """

    def __init__(self, runner: Any, standing: dict[str, CachedAttention], ids: list[int], rows: Sequence[int]):
        self.runner, self.standing, self.ids, self.rows = runner, standing, ids, rows
        size = min(CHUNK, runner.vllm_config.scheduler_config.max_num_batched_tokens)
        for first in range(0, len(ids), size):
            self.run(range(first, min(first + size, len(ids))))
        for attention in standing.values():
            attention.growing = False
        self.reference = self.log_probabilities()

    def run(self, positions: Sequence[int]) -> Any:
        at = torch.tensor(positions, device=self.runner.device)
        for attention in self.standing.values():
            attention.positions = at
        return compat.run_rows(self.runner, [self.ids[i] for i in positions], positions)

    def log_probabilities(self) -> torch.Tensor | None:
        """Of the rows, with what the layers' caches are now."""
        logits = compat.logits_of(self.runner, self.run(self.rows))
        return None if logits is None else logits.float().log_softmax(-1)

    def damages(
        self, config: TurboQuantConfig, transforms: Mapping[str, KeyTransform], places: Mapping[str, int]
    ) -> Damages:
        return {
            name: self.damage(self.standing[name], fakes(self.standing[name], config, index, transforms.get(name)))
            for name, index in places.items()
        }

    def damage(self, attention: CachedAttention, fakes: dict[str, torch.Tensor]) -> dict[str, float]:
        found = {}
        for side in SIDES:
            attention.fakes = {side: fakes[side]}
            found[side] = divergence(self.reference, self.log_probabilities())
        attention.fakes = {}
        return found


def fakes(
    attention: CachedAttention, config: TurboQuantConfig, index: int, transform: KeyTransform | None
) -> dict[str, torch.Tensor]:
    """What a layer's codec makes of its keys and values [T, H_kv, d]."""
    keys, values = (rows.float() for rows in attention.kept)
    _, heads, dim = keys.shape
    with compat.default_dtype(torch.float32):
        codec = KVCodec.build(config, index, heads, dim, transform, keys.device)
    at = torch.arange(len(keys), device=keys.device)
    decoded = codec.decode_keys(codec.key.decode(codec.encode_keys(keys, at)), at)
    return {"keys": decoded, "values": codec.output(codec.value.decode(codec.encode_values(values)))}


def divergence(reference: torch.Tensor | None, tested: torch.Tensor | None) -> float:
    """Kullback-Leibler divergence in nats of log-probabilities [N, V]; 0 on ranks that have none.

    The square of the rows' mean root: a few rows diverge far more than all others, so that a mean of so few says
    little.  On SmolLM2, bits by 32 rows' mean roots lose as little on other rows as those by 64 rows' means.
    """
    if reference is None or tested is None:
        return 0.0
    rows = (reference.exp() * (reference - tested)).sum(-1)
    return float(rows.clamp(min=0).sqrt().mean().square())
