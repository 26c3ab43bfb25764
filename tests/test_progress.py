"""Bars are on stderr of a terminal, and nowhere else."""

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import time
from turboquant.progress import progress_bar, working
with progress_bar(2) as progress:
    for what in ("starting", "scoring"):
        progress(what)
        print("result of", what)
        time.sleep(0.3)
with working("waiting"):
    time.sleep(0.3)
"""


def run(stderr):
    done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    assert done.stdout == "result of starting\nresult of scoring\n"
    return done.stderr


def test_nothing_without_a_terminal():
    assert run(subprocess.PIPE) == ""


def test_a_bar_on_a_terminal():
    reader, writer = pty.openpty()
    run(writer)
    shown = os.read(reader, 65536).decode()
    assert "starting" in shown and "scoring" in shown and "waiting" in shown


def test_a_step_too_many():
    from turboquant.progress import progress_bar

    with progress_bar(1) as progress:
        progress("one")
        with pytest.raises(StopIteration):
            progress("two")
