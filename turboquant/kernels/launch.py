"""Launches without Triton's binder, which takes longer than many of the kernels run.

At every launch Triton looks at all arguments to find the code that it compiled for their like.  A model's layers launch
the same few kernels again and again; which properties of their arguments tell codes apart is in the kernels'
declarations, so that the code is found by these alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from turboquant.kernels import compilation

ALIGNMENT = 16  # bytes; Triton compiles other code where a pointer is no multiple
_codes: dict[tuple[object, ...], Any] = {}  # by kernel and what is told apart; kernels live as long as their modules
_told: dict[int, "ToldApart | None"] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int | float],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """`kernel[grid](*tensors, *numbers, **constants, **options)`.

    constants: all constexpr arguments, in the kernel's order; options: the compiler's.
    """
    told = told_apart(kernel, len(tensors))
    if told is None or compilation.is_under_way():
        kernel[grid](*tensors, *numbers, **constants, **options)
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    values = constants.values()
    key = (
        id(kernel), tensors[0].get_device(), *[tensor.dtype for tensor in tensors],
        *[numbers[i] for i in told.numbers], *values, *options.values(),
    )  # fmt: skip
    code = _codes.get(key)
    if code is not None and not any([pointers[i] % ALIGNMENT for i in told.aligned]):  # noqa: C419  # faster
        code[(*grid, 1, 1)[:3]](*pointers, *numbers, *values)
        return
    code = kernel[grid](*tensors, *numbers, **constants, **options)
    if not any(pointers[i] % ALIGNMENT for i in told.aligned):
        _codes[key] = code


@dataclass(frozen=True)
class ToldApart:
    """Arguments of a kernel by which Triton's codes differ: tensors by alignment, numbers by value."""

    aligned: tuple[int, ...]
    numbers: tuple[int, ...]


def told_apart(kernel: Any, tensors: int) -> ToldApart | None:
    """Of a kernel whose first so many arguments are tensors, and whose next ones numbers.

    None where there are no codes to find (Triton's interpreter), or where more tells them apart (AMD's).
    """
    if id(kernel) not in _told:
        found = isinstance(kernel, JITFunction) and not torch.version.hip
        _told[id(kernel)] = declared(kernel, tensors) if found else None
    return _told[id(kernel)]


def declared(kernel: JITFunction[Any], tensors: int) -> ToldApart:
    operands = [x for x in kernel.params if not x.is_constexpr]
    if any(x.is_constexpr for x in kernel.params[: len(operands)]):
        raise TypeError(f"{kernel.fn.__name__}: constexpr arguments must come last")
    aligned = (i for i, x in enumerate(operands[:tensors]) if not x.do_not_specialize_on_alignment)
    numbers = (i for i, x in enumerate(operands[tensors:]) if not x.do_not_specialize)
    return ToldApart(tuple(aligned), tuple(numbers))


@cache
def power_of_2(size: int) -> int:
    """The least that is no smaller; Triton's own is a kernel's function, slow on the host."""
    return 1 << (size - 1).bit_length()
