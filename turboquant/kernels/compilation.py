"""Compile kernels before they are needed, side by side."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # 3.4 and older
    AsyncCompileMode = None

MOST_WORKERS = 16
_under_way = 0


def compile_together(launch: Callable[[], object]) -> None:
    """Compile the kernels that `launch` launches, several at a time, and run none of them.

    What torch does in it is done, on memory that the kernels have not written.  Does nothing where this Triton compiles
    one kernel after the other.
    """
    if AsyncCompileMode is None:
        return
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool), _without_launching():
        launch()


@contextmanager
def _without_launching() -> Iterator[None]:
    global _under_way
    original = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        return original(self, *args, **options | {"warmup": True})

    JITFunction.run = run
    _under_way += 1
    try:
        yield
    finally:
        JITFunction.run = original
        _under_way -= 1


def is_under_way() -> bool:
    """Whether launches compile only."""
    return _under_way > 0
