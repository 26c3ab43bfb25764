"""Marks and settings of the cases."""

import os

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreter: runs Triton kernels in Triton's interpreter; skipped with a GPU")


@pytest.fixture(autouse=True)
def quick_kernels(request, monkeypatch):
    """The interpreter runs programs one by one: few splits of a history, many tokens in a program."""
    if request.node.get_closest_marker("interpreter"):
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton's interpreter is off")
        from turboquant.kernels import encode, history

        monkeypatch.setattr(history, "MAX_SPLITS", 3)
        monkeypatch.setattr(encode, "tile", lambda *_: (8, 4))
