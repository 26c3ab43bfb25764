"""Other attention in the place of the layers' own, for as long as something is measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from turboquant.integration import compat


class StandIn(ABC):
    """Takes the place of `impl.forward` of one layer until `remove`, which restores what was there, hooks too."""

    def __init__(self, layer: Any):
        self.impl = layer.impl
        self.replaced = vars(self.impl).get("forward")  # of hooks, where they are installed
        self.impl.forward = self.attend

    @abstractmethod
    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What runs instead, with the arguments of `forward`."""

    def remove(self) -> None:
        del self.impl.forward
        if self.replaced is not None:
            self.impl.forward = self.replaced


Kind = TypeVar("Kind", bound=StandIn)


@contextmanager
def standing(runner: Any, make: Callable[[str, Any, Kind | None], Kind]) -> Iterator[dict[str, Kind]]:
    """Stand-ins for all attention layers by name, of make(name, layer, the one whose cache the layer reads or None)."""
    made: dict[str, Kind] = {}
    try:
        for name, layer in compat.attention_layers(runner.vllm_config).items():  # behind the one whose cache it reads
            target = getattr(layer, "kv_sharing_target_layer_name", None)
            made[name] = make(name, layer, made[target] if target else None)
        yield made
    finally:
        for stand_in in made.values():
            stand_in.remove()
