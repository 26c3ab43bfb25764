"""Launches without Triton's binder, which takes longer than many of the kernels run.

At every launch Triton looks at all arguments to find the code that it compiled for their like.  `launch` looks only at
what the kernels' declarations say that codes are told apart by.  `Launch` does not even that: the layers of a step
launch the same kernels with the same sizes, so that the first one plans them, and the others fill in their tensors.
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
_kinds: dict[tuple[object, ...], int] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int | float],
    constants: dict[str, Any],
    **options: Any,
) -> Any:
    """`kernel[grid](*tensors, *numbers, **constants, **options)`; returns its code, None where it may not be repeated.

    constants: all constexpr arguments, in the kernel's order; options: the compiler's.
    """
    told = told_apart(kernel, len(tensors))
    if told is None or compilation.is_under_way():
        kernel[grid](*tensors, *numbers, **constants, **options)
        return None
    pointers = [tensor.data_ptr() for tensor in tensors]
    values = constants.values()
    key = (
        id(kernel), tensors[0].get_device(), *[tensor.dtype for tensor in tensors],
        *[numbers[i] for i in told.numbers], *values, *options.values(),
    )  # fmt: skip
    if any([pointers[i] % ALIGNMENT for i in told.aligned]):  # noqa: C419  # faster
        kernel[grid](*tensors, *numbers, **constants, **options)
        return None
    code = _codes.get(key)
    if code is None:
        code = _codes[key] = kernel[grid](*tensors, *numbers, **constants, **options)
    else:
        code[(*grid, 1, 1)[:3]](*pointers, *numbers, *values)
    return code


def kind_of(*facts: object) -> int:
    """One number for equal facts, quick to compare."""
    return _kinds.setdefault(facts, len(_kinds))


Operand = torch.Tensor | float


class Operands:
    """Tensors and numbers of a layer by the names that its launches have for them.

    raw: the same with addresses for tensors; aligned: whether all of these are multiples of ALIGNMENT.
    """

    def __init__(self, values: dict[str, Operand]):
        self.values: dict[str, Operand] = values
        self.raw = {name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in values.items()}
        self.aligned = not any(self.raw[name] % ALIGNMENT for name, x in values.items() if isinstance(x, torch.Tensor))

    def named(self, x: Any) -> Any:
        """What a name stands for; all else for itself."""
        return self.values[x] if isinstance(x, str) else x

    def joined(self, **tensors: torch.Tensor) -> "Operands":
        """With further tensors."""
        more = object.__new__(Operands)
        raw = {name: x.data_ptr() for name, x in tensors.items()}
        more.values, more.raw = {**self.values, **tensors}, {**self.raw, **raw}
        more.aligned = self.aligned and not any([pointer % ALIGNMENT for pointer in raw.values()])  # noqa: C419
        return more


class Launch:
    """A launch that layers of the same kind repeat with their own operands.

    tensors, numbers: as for `launch`, or names of operands; constants: in any order.  What names stand for must be
    alike in all layers that repeat the launch: tensors of one dtype, and floats.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor | str],
        numbers: Sequence[float | str],
        constants: dict[str, Any],
        **options: Any,
    ):
        self.kernel, self.grid, self.tensors, self.numbers = kernel, grid, tensors, numbers
        told = told_apart(kernel, len(tensors))
        self.constants = constants if told is None else {name: constants[name] for name in told.constants}
        self.options = options
        arguments = [*tensors, *numbers]
        self.named = [(place, name) for place, name in enumerate(arguments) if isinstance(name, str)]
        fixed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        self.arguments: list[Any] = [*fixed, *self.constants.values()]
        self.again: Any = None

    def __call__(self, operands: Operands) -> None:
        if self.again is None or not operands.aligned or compilation.is_under_way():
            self._launch(operands)
            return
        arguments, raw = self.arguments.copy(), operands.raw
        for place, name in self.named:
            arguments[place] = raw[name]
        self.again(*arguments)

    def _launch(self, operands: Operands) -> None:
        tensors, numbers = ([operands.named(x) for x in given] for given in (self.tensors, self.numbers))
        code = launch(self.kernel, self.grid, tensors, numbers, self.constants, **self.options)
        if code is not None:
            self.again = code[(*self.grid, 1, 1)[:3]]


@dataclass(frozen=True)
class ToldApart:
    """Arguments of a kernel by which Triton's codes differ: tensors by alignment, numbers by value, constants."""

    aligned: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: tuple[str, ...]


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
    return ToldApart(tuple(aligned), tuple(numbers), tuple(x.name for x in kernel.params[len(operands) :]))


@cache
def power_of_2(size: int) -> int:
    """The least that is no smaller; Triton's own is a kernel's function, slow on the host."""
    return 1 << (size - 1).bit_length()
