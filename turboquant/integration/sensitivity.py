"""What few bits cost in every layer of a loaded model: the divergence of its logits, one layer and side at a time.

The model runs over the package's text once, with plain attention that keeps every layer's keys and values.  Rows all
over the text are then run again as decode steps, each with the exact cache of the tokens before it but for one layer,
whose keys or values are what its codec makes of them; the first tokens and the last ones before a row stay exact, as in
the ring.  A step starts at the block whose cache changed, from what the blocks before it gave.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from turboquant.allocation import PROBE_BITS, SIDES
from turboquant.calibration import CHUNK, SINKS
from turboquant.codec import KeyTransform, KVCodec
from turboquant.config import TurboQuantConfig
from turboquant.integration import compat
from turboquant.integration.calibration_file import load_damages
from turboquant.integration.selfcalibration import pieces

RECENT = 64  # tokens before a row that stay exact
ROWS = {"cpu": 64, "cuda": 256}  # that are measured: what a second, or a fraction of one, can hold
Damages = dict[str, dict[str, float]]  # layer -> side -> mean divergence in nats


class CachedAttention:
    """Stands in for the attention of one layer: rows of one sequence on plain keys and values, kept here.

    positions int64 [N]: of the rows; growing: whether their keys and values are kept, in order, for later rows.
    """

    positions: torch.Tensor
    growing = True

    def __init__(self, layer: Any, target: "CachedAttention | None"):
        self.impl, self.target = layer.impl, target
        self.parameters = compat.attention_parameters(layer)
        self.kept = [torch.empty(0)] * 2
        self.fakes: list[torch.Tensor | None] = [None, None]
        self.replaced = vars(self.impl).get("forward")  # of hooks, where they are installed
        self.impl.forward = self.attend

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        heads = layer.num_kv_heads
        if self.target is None:
            self.own = [rows.view(len(rows), heads, -1).float() for rows in (key, value)]
            if self.growing:
                self.kept = (
                    [torch.cat([old.to(new), new]) for old, new in zip(self.kept, self.own, strict=True)]
                    if len(self.kept[0])
                    else self.own
                )
        found = self.attention(query.view(len(query), heads, -1, layer.head_size).float())
        return output.view(len(query), -1).copy_(found.flatten(1)).view(output.shape)

    def attention(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [N, H_kv, G, d] over the tokens before every row, and the row itself."""
        source = self.target or self
        (keys, values), (fake_keys, fake_values) = source.kept, source.fakes
        seen, exact = self.masks(len(keys))
        logits = self.logits(query, keys)
        if fake_keys is not None:
            logits = torch.where(exact, logits, self.logits(query, fake_keys))
        own = self.capped((query * source.own[0][:, :, None]).sum(-1, keepdim=True))
        weights = torch.cat([logits.masked_fill(~seen, -torch.inf), own], -1).softmax(-1)
        past, last = weights[..., :-1], weights[..., -1:]
        found = last * source.own[1][:, :, None]
        if fake_values is not None:
            found = found + torch.einsum("nhgt,thd->nhgd", past * ~exact, fake_values)
            past = past * exact
        return found + torch.einsum("nhgt,thd->nhgd", past, values)

    def logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.capped(torch.einsum("nhgd,thd->nhgt", query, keys))

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        scaled, cap = products * self.parameters.scale, self.parameters.softcap
        return cap * torch.tanh(scaled / cap) if cap else scaled

    def masks(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [N, 1, 1, T]: cached tokens that a row sees, and those that are exact for it."""
        row, token = self.positions[:, None, None, None], torch.arange(tokens, device=self.positions.device)
        seen = token < row
        if self.parameters.window:
            seen = seen & (token > row - self.parameters.window)
        return seen, (token < SINKS) | (token >= row - RECENT)

    def remove(self) -> None:
        del self.impl.forward
        if self.replaced is not None:
            self.impl.forward = self.replaced


class Blocks:
    """The model's transformer blocks, in order: what they gave for the rows, and a way to start behind some of them."""

    def __init__(self, runner: Any, names: list[str]):
        found = {name: compat.block_of(runner, name) for name in names}
        self.of_layer = {name: block for name, block in found.items() if block is not None}
        self.blocks = list(dict.fromkeys(self.of_layer.values()))
        self.given: dict[torch.nn.Module, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what the blocks give within this context."""

        def keep(block: torch.nn.Module, _: Any, output: Any) -> None:
            self.given[block] = copied(output)

        handles = [block.register_forward_hook(keep) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def skipped(self, name: str) -> Iterator[None]:
        """Blocks before that of this layer give what they gave, without running."""
        block = self.of_layer.get(name)
        before = self.blocks[: self.blocks.index(block)] if block in self.given else []
        for earlier in before:
            earlier.forward = replay(self.given[earlier])
        try:
            yield
        finally:
            for earlier in before:
                del earlier.forward


def replay(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: copied(output)


def copied(output: Any) -> Any:
    """A copy of tensors in tuples: models add to them in place."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return type(output)(map(copied, output)) if isinstance(output, tuple | list) else output


def measure(
    runner: Any, config: TurboQuantConfig, transforms: Mapping[str, KeyTransform], places: Mapping[str, int]
) -> Damages:
    """Damages of PROBE_BITS in the layers that `places` names, with their indices; the same on all ranks.

    transforms: key transforms of this worker's KV heads, identity where absent.
    """
    standing = stand_in(runner)
    ids = [token for piece in pieces(runner.vllm_config) for token in piece]
    try:
        probe = Probe(runner, standing, ids[: runner.vllm_config.model_config.max_model_len])
        return compat.agreed(probe.damages(config.uniform(PROBE_BITS, PROBE_BITS), transforms, places))
    finally:
        for attention in standing.values():
            attention.remove()


def load(path: str, names: Iterable[str]) -> Damages:
    """Damages of these layers from a calibration file; ValueError if it does not have them."""
    damages = load_damages(path)
    if missing := [name for name in names if name not in damages]:
        raise ValueError(f"calibration={path!r} has no layer {missing[0]!r}; it was made for another model")
    return damages


def stand_in(runner: Any) -> dict[str, CachedAttention]:
    standing: dict[str, CachedAttention] = {}
    for name, layer in compat.attention_layers(runner.vllm_config).items():  # behind the one whose cache it reads
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        standing[name] = CachedAttention(layer, standing[target] if target else None)
    return standing


class Probe:
    """Rows of the package's text on a cache of plain keys and values."""

    def __init__(self, runner: Any, standing: dict[str, CachedAttention], ids: list[int]):
        self.runner, self.standing, self.ids = runner, standing, ids
        size = min(CHUNK, runner.vllm_config.scheduler_config.max_num_batched_tokens)
        for first in range(0, len(self.ids), size):
            self.run(range(first, min(first + size, len(self.ids))))
        for attention in standing.values():
            attention.growing = False
        self.rows = self.choose_rows(min(size, ROWS.get(runner.device.type, CHUNK)))
        self.blocks = Blocks(runner, list(standing))
        with self.blocks.recorded():
            self.reference = self.log_probabilities()

    def choose_rows(self, count: int) -> list[int]:
        """Positions evenly over the text, from where something is not exact."""
        first = min(SINKS + RECENT + 1, len(self.ids) - 1)
        step = max(1, (len(self.ids) - first) // count)
        return list(range(len(self.ids) - 1, first - 1, -step))[::-1]

    def run(self, positions: Any) -> Any:
        at = torch.tensor(list(positions), device=self.runner.device)
        for attention in self.standing.values():
            attention.positions = at
        return compat.run_rows(self.runner, [self.ids[i] for i in positions], list(positions))

    def log_probabilities(self) -> torch.Tensor | None:
        logits = compat.logits_of(self.runner, self.run(self.rows))
        return None if logits is None else logits.float().log_softmax(-1)

    def damages(
        self, config: TurboQuantConfig, transforms: Mapping[str, KeyTransform], places: Mapping[str, int]
    ) -> Damages:
        return {
            name: self.damage(name, fakes(self.standing[name], config, index, transforms.get(name)))
            for name, index in places.items()
        }

    def damage(self, name: str, fake: dict[str, torch.Tensor]) -> dict[str, float]:
        attention, found = self.standing[name], {}
        for number, side in enumerate(SIDES):
            attention.fakes[number] = fake[side]
            with self.blocks.skipped(name):
                found[side] = divergence(self.reference, self.log_probabilities())
            attention.fakes[number] = None
        return found


def fakes(
    attention: CachedAttention, config: TurboQuantConfig, index: int, transform: KeyTransform | None
) -> dict[str, torch.Tensor]:
    """What a layer's codec makes of its keys and values [T, H_kv, d]."""
    keys, values = attention.kept
    _, heads, dim = keys.shape
    with compat.default_dtype(torch.float32):
        codec = KVCodec.build(config, index, heads, dim, transform, keys.device)
    at = torch.arange(len(keys), device=keys.device)
    decoded = codec.decode_keys(codec.key.decode(codec.encode_keys(keys, at)), at)
    return {"keys": decoded, "values": codec.output(codec.value.decode(codec.encode_values(values)))}


def divergence(reference: torch.Tensor | None, tested: torch.Tensor | None) -> float:
    """Mean Kullback-Leibler divergence in nats of log-probabilities [N, V]; 0 on ranks that have none."""
    if reference is None or tested is None:
        return 0.0
    return float((reference.exp() * (reference - tested)).sum(-1).mean().clamp(min=0))
