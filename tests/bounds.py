"""Every address that an interpreted kernel reads or writes lies in a tensor that it was given.

On a device such an access is an illegal one at best, and someone else's memory at worst; in the interpreter it would
mostly go unseen.  `watch` hooks the interpreter of Triton 3.6 to 3.9.
"""

from functools import wraps

import numpy as np
from triton.runtime import interpreter

extents = np.empty((0, 2), np.uint64)  # first and last address, of the tensors of the running launch


def watch():
    """Check all launches from now on."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    executor._init_args_hst = noting(executor._init_args_hst)
    builder.create_masked_load = checking(builder.create_masked_load, mask_of=lambda mask, *rest: mask)
    builder.create_masked_store = checking(builder.create_masked_store, mask_of=lambda value, mask, *rest: mask)


def noting(arguments_on_host):
    @wraps(arguments_on_host)
    def note(self, arguments, options):
        global extents
        on_host = arguments_on_host(self, arguments, options)
        storages = [storage_of(x) for x in (*on_host[0], *on_host[1].values()) if hasattr(x, "data_ptr")]
        spans = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        extents = np.array(spans, np.uint64).reshape(-1, 2)
        return on_host

    return note


def storage_of(tensor):
    return interpreter._unwrap_tensor(tensor).untyped_storage()


def checking(access, mask_of):
    @wraps(access)
    def check(self, pointers, *arguments):
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        addresses, mask = np.broadcast_arrays(pointers.data, mask_of(*arguments).data)
        outside = ~lie_within(addresses[mask.astype(bool)].astype(np.uint64), size)
        assert not outside.any(), f"{access.__name__}: {outside.sum()} of {outside.size} addresses are in no argument"
        return access(self, pointers, *arguments)

    return check


def lie_within(addresses, size):
    """Whether `size` bytes at each address lie in one of the extents."""
    if not len(extents):
        return np.zeros(addresses.shape, bool)
    nearest = np.searchsorted(extents[:, 0], addresses, side="right") - 1
    return (nearest >= 0) & (addresses + np.uint64(size) <= extents[np.maximum(nearest, 0), 1])
