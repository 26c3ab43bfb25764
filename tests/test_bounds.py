"""The interpreter's accesses are watched in all tests (`conftest.py`): kernels that leave their tensors are noticed."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted here", allow_module_level=True)


@triton.jit
def copy_kernel(source, target, count, first: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + first + at, mask=at < count, other=0), mask=at < count)


def copy(count, first, source=16, target=16):
    rows = torch.arange(source, dtype=torch.float32)
    out = torch.zeros(target)
    copy_kernel[(1,)](rows, out, count, first, 16)
    return out


def test_accesses_within_the_tensors_pass():
    assert copy(12, 4)[:12].tolist() == list(range(4, 16))


@pytest.mark.parametrize(("count", "first"), [(13, 4), (16, 100000), (1, -1)])
def test_loads_outside_are_noticed(count, first):
    with pytest.raises(Exception, match=r"create_masked_load: .* addresses are in no argument"):
        copy(count, first, source=16)


def test_stores_outside_are_noticed():
    with pytest.raises(Exception, match="create_masked_store: 8 of 16 addresses are in no argument"):
        copy(16, 0, target=8)
