"""The file that keeps a model's key transforms: safetensors with a checksum in the header."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from turboquant.allocation import SIDES
from turboquant.calibration import LayerTransforms

VERSION = 2
DAMAGE = "damage"  # name of a layer's tensor beside those of its transforms: float64 [2], by SIDES


def save_transforms(
    path: str | Path,
    transforms: dict[str, LayerTransforms],
    damages: Mapping[str, Mapping[str, float]] | None = None,
    **about: Any,
) -> Path:
    """Write key transforms by layer name as safetensors; `about` goes into the header, as does a checksum.

    damages: what few bits cost by layer name and side (`turboquant.integration.sensitivity`), for "auto" presets.
    """
    from safetensors.torch import save_file

    tensors = {f"{name}.{side}": x.cpu() for name, layer in transforms.items() for side, x in layer.tensors().items()}
    for name, damage in (damages or {}).items():
        tensors[f"{name}.{DAMAGE}"] = torch.tensor([damage[side] for side in SIDES], dtype=torch.float64)
    header = {"turboquant_calibration": str(VERSION), "sha256": checksum(tensors), "about": json.dumps(about)}
    save_file(tensors, str(path), header)
    return Path(path)


def load_transforms(path: str | Path) -> dict[str, LayerTransforms]:
    """Key transforms by layer name; ValueError that names the file if it is not one of ours, or damaged."""
    tensors = read_tensors(path)
    try:
        return as_transforms(tensors)
    except (ValueError, TypeError) as error:
        raise ValueError(f"calibration={str(path)!r} holds no key transforms: {error}") from None


def load_damages(path: str | Path) -> dict[str, dict[str, float]]:
    """What few bits cost by layer name and side; ValueError as for `load_transforms`, and if the file does not say."""
    ending = f".{DAMAGE}"
    found = {name.removesuffix(ending): x for name, x in read_tensors(path).items() if name.endswith(ending)}
    if not found:
        raise ValueError(
            f"calibration={str(path)!r} does not say what few bits cost, as 'auto' presets need; write it again with "
            "turboquant.calibrate on an engine without data or pipeline parallelism"
        )
    for name, x in found.items():
        if x.shape != (len(SIDES),) or not x.dtype.is_floating_point or not x.isfinite().all():
            raise ValueError(f"calibration={str(path)!r}: {name}{ending} is {x}, expected two finite numbers")
    return {name: dict(zip(SIDES, x.tolist(), strict=True)) for name, x in found.items()}


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"calibration={str(path)!r} does not exist")
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"calibration={str(path)!r} is not a safetensors file: {error}") from None
    if header.get("turboquant_calibration") != str(VERSION):
        raise ValueError(f"calibration={str(path)!r} is not a calibration file of version {VERSION}; make it again")
    if header.get("sha256") != checksum(tensors):
        raise ValueError(f"calibration={str(path)!r} is damaged: its checksum does not match")
    return tensors


def as_transforms(tensors: dict[str, torch.Tensor]) -> dict[str, LayerTransforms]:
    """Transforms by layer name; ValueError where a tensor is no layer's, or a layer lacks one."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, part = full_name.rpartition(".")
        if part != DAMAGE:
            layers.setdefault(name, {})[part] = tensor
    return {name: LayerTransforms.of_tensors(parts) for name, parts in layers.items()}


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
