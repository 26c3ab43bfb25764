"""Checks of what a caller hands over: each names the value and what is allowed.

Of a tensor only what the host knows is looked at (class, layout, dtype, device, shape), so that nothing waits for a
device and a step costs some microseconds.
"""

import math
from typing import TypeGuard

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what a model computes in
INDICES = (torch.int64, torch.int32)
Shape = tuple[int | None, ...]  # None: any size


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(name: str, value: object, least: int = 0) -> None:
    """ValueError unless value is an integer of at least `least`."""
    if not is_int(value) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """ValueError unless value is a finite number of at least `least`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name}={value!r} must be a finite number{bound}")


def check_instance(name: str, value: object, kind: type) -> None:
    """TypeError unless value is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be a {kind.__name__}, not a {type(value).__name__}")


def check_float_dtype(dtype: object) -> None:
    """ValueError unless dtype is one of FLOATS."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype={dtype!r} is not supported; allowed: {', '.join(map(str, FLOATS))}")


def check_device(device: object) -> None:
    """ValueError unless torch knows the name of the device."""
    try:
        torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is unknown: {error}") from None


def check_tensor(name: str, x: object) -> None:
    """TypeError unless x is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a Tensor, not a {type(x).__name__}")


def has_shape(x: torch.Tensor, shape: Shape) -> bool:
    found = x.shape
    if len(found) != len(shape):
        return False
    for size, wanted in zip(found, shape, strict=True):  # noqa: SIM110  # twice as fast as any()
        if wanted is not None and size != wanted:
            return False
    return True


def check_shape(name: str, x: torch.Tensor, shape: Shape, axes: str) -> None:
    """ValueError unless x has these sizes; axes: their names for the message, such as "[N, H_kv, d]"."""
    if not has_shape(x, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} is {tuple(x.shape)}, expected {axes} = ({sizes})")


def check_rows(name: str, x: torch.Tensor, shape: Shape, axes: str, device: torch.device) -> None:
    """Refuse all but dense floating-point tensors of this shape on the device."""
    check_floats(name, x)
    check_shape(name, x, shape, axes)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, the cache on {device}")


def check_floats(name: str, x: torch.Tensor) -> None:
    """TypeError or ValueError unless x is a dense floating-point tensor."""
    check_tensor(name, x)
    if not x.dtype.is_floating_point or x.layout is not torch.strided:
        raise ValueError(f"{name} is {x.dtype} in {x.layout}, expected floating-point numbers in torch.strided")


def check_float32(name: str, x: torch.Tensor) -> None:
    """TypeError or ValueError unless x is a dense tensor of torch.float32."""
    check_floats(name, x)
    if x.dtype != torch.float32:
        raise ValueError(f"{name} is {x.dtype}, expected torch.float32")


def check_indices(name: str, x: torch.Tensor, shape: Shape | None = None, axes: str = "") -> None:
    """Refuse all but tensors of INDICES of this shape; any shape for None."""
    check_tensor(name, x)
    if x.dtype not in INDICES:
        raise ValueError(f"{name} is {x.dtype}, expected one of {', '.join(map(str, INDICES))}")
    if shape is not None:
        check_shape(name, x, shape, axes)
