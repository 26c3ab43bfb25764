"""Without a GPU, Triton kernels run in its interpreter; that is decided when Triton is first imported.

One thread for numpy's matrices: its threads wait for one another, seconds for a matrix of 576 on two busy cores.
"""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    import bounds

    bounds.watch()
