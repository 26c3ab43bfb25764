"""Without a GPU, Triton kernels run in its interpreter; that is decided when Triton is first imported.

One thread for numpy's matrices: its threads wait for one another, seconds for a matrix of 576 on two busy cores.
"""

import os
from pathlib import Path

import pytest

GAPS = Path(__file__).with_name("hostile_gaps.txt")

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    """Refusals that are still missing: a listed test that passes fails the run, so the list can only shrink."""
    gaps = set(GAPS.read_text().splitlines())
    for item in items:
        if item.nodeid.removeprefix("tests/") in gaps:
            item.add_marker(pytest.mark.xfail(strict=True, reason="not refused by name yet"))
