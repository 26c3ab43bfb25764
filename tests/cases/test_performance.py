"""Cases of slowness: what decides it is counted here, and what an H200 measured is read from the result files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lists import Lists, encode_kernel

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows_of(name, **wanted):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in rows if wanted.items() <= row.items()]


def decode_times(hq, hkv, d):
    """{(batch, length): {contender: microseconds}} of decode steps of one row a request."""
    times = {}
    for row in rows_of("h200-kernels", hq=hq, hkv=hkv, d=d, q_rows=1):
        times.setdefault((row["batch"], row["length"]), {})[row["contender"]] = row["us"]
    return times


def test_p1_time_grows_no_faster_with_the_context_than_over_fp8():
    times = decode_times(32, 8, 128)
    slopes = {}
    for name in ("fa3-fp8", "k4v4"):
        slopes[name] = (times[1, 131072][name] - times[1, 4096][name]) / (131072 - 4096)
    assert slopes["k4v4"] <= 1.1 * slopes["fa3-fp8"]


def test_p2_small_heads_in_a_large_batch():
    """14 query heads on 2 KV heads of 64, as Qwen2.5-0.5B has: no slower than the native caches at any size."""
    for shape, times in decode_times(14, 2, 64).items():
        assert times["k4v4"] <= min(times["fa3-bf16"], times["fa3-fp8"]), shape


# ---- the portable kernels, counted -------------------------------------------------------------------------------
@pytest.fixture
def loaded(monkeypatch):
    """Bytes of pages and scalars that kernels read through masks."""
    from triton.runtime.interpreter import InterpreterBuilder

    original, counts = InterpreterBuilder.create_masked_load, []

    def create_masked_load(self, pointers, mask, *rest):
        result = original(self, pointers, mask, *rest)
        if result.data.dtype in (np.uint8, np.uint16):
            counts.append(int(mask.data.sum()) * result.data.dtype.itemsize)
        return result

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    return counts


@pytest.mark.interpreter
def test_p3_query_heads_of_a_group_read_the_cache_once(loaded):
    """As many bytes with one query head as with eight, and no more than the tokens take."""
    found = {}
    for group in (1, 8):
        lists = Lists(kernels=True, group=group, num_blocks=8, key_bits=4, value_bits=4)
        request = lists.prefilled(45)
        loaded.clear()
        lists.run({request: 1})
        found[group] = sum(loaded)
        lists.assert_compressed(45)
    token_bytes = lists.layer.store.format.token_bytes
    assert 45 * token_bytes <= found[1] == found[8] <= 45 * 4 * token_bytes


class Launches:
    """Stands in for a kernel and remembers its grids."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.interpreter
def test_p4_the_launch_does_not_depend_on_the_lengths(monkeypatch):
    """A captured launch serves sequences of any length, so that nothing is frozen at that of the capture."""
    from turboquant.kernels import history

    store, launches = Lists(num_blocks=4).layer.store, Launches()
    monkeypatch.setattr(history, "_history_kernel", launches)
    for length in (1, 129, 40_000):
        query, none = torch.zeros(2, 1, 2, 1, 64), torch.zeros(2, 0, dtype=torch.bool)
        table, lengths = torch.zeros(2, 2500, dtype=torch.int32), torch.full((2,), length)
        history.history_attention(store, query, query[..., 0], table, lengths, none)
    assert len(set(launches.grids)) == 1


@pytest.mark.interpreter
def test_p5_one_long_sequence_is_split(monkeypatch):
    """A single request of one KV head takes as many programs as a device is filled with, and they add up."""
    from turboquant.kernels import history

    monkeypatch.setattr(history, "MAX_SPLITS", 32)
    launches, query, none = Launches(), torch.zeros(1, 1, 2, 1, 64), torch.zeros(1, 0, dtype=torch.bool)
    lists = Lists(kernels=True, num_blocks=24)
    request = lists.prefilled(330, room=6)
    lists.run({request: 1})
    lists.assert_compressed(330)
    monkeypatch.setattr(history, "_history_kernel", launches)
    table, lengths = torch.tensor([request.blocks]), torch.tensor([330])
    history.history_attention(lists.layer.store, query, query[..., 0], table, lengths, none)
    assert launches.grids == [(1, 32, 1)]


def test_p6_chunks_behind_a_long_prefix():
    """A chunk of 2048 tokens behind 32768 compressed ones takes about what it takes over a bf16 cache."""
    measured = rows_of("h200-prefill", rows=2048, cached=32768)
    assert {row["preset"] for row in measured} == {"k4v4", "k3v2"}
    for row in measured:
        assert row["attend_us"] + row["encode_us"] <= 1.1 * row["fa3_bf16_us"]


def unspecialised(kernel):
    """Arguments for whose values no kernel is compiled anew."""
    options = getattr(kernel, "kwargs", {})
    return set(options.get("do_not_specialize") or getattr(kernel, "do_not_specialize", None) or ())


@pytest.mark.interpreter
def test_p7_no_step_compiles_for_its_lengths():
    """Triton compiles apart for 1, for multiples of 16, and for others: what a step counts is left out of that."""
    from turboquant.kernels import encode, history, prefill, ring, transcode

    assert unspecialised(encode._encode_kernel) >= {"count", "key_stride", "value_stride"}
    assert unspecialised(history._history_kernel) >= {"table_stride", "present_stride", "rows", "query_len", "splits"}
    assert unspecialised(ring._plan_kernel) >= {"table_stride", "columns", "requests", "step"}
    assert unspecialised(ring._locate_kernel) >= {"table_stride", "columns", "requests"}
    assert unspecialised(transcode._decode_kernel) >= {"first", "count"}
    for kernel in (prefill._rotate_kernel, prefill._fold_kernel, prefill._finish_kernel):
        assert unspecialised(kernel) >= {"tokens"}


def test_p8_break_even_context():
    """No measured decode of a common shape is slower than over bf16 or fp8; the shortest has 2048 tokens."""
    times = decode_times(32, 8, 128)
    assert min(length for _, length in times) == 2048
    for shape, found in times.items():
        assert found["k4v4"] <= min(found["fa3-bf16"], found["fa3-fp8"]), shape


@pytest.mark.interpreter
def test_p9_launches_of_a_layer(monkeypatch):
    """One to write a step's tokens, and one for the compressed history of all its requests."""
    from triton.runtime.interpreter import InterpretedFunction

    original, names = InterpretedFunction.run, []

    def run(self, *args, **kwargs):
        names.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    lists = Lists(kernels=True, num_blocks=16)
    requests = [lists.prefilled(length, room=4) for length in (20, 9, 33)]
    names.clear()
    lists.run(dict.fromkeys(requests, 1))
    assert names == [encode_kernel().__globals__["_encode_kernel"].fn.__name__, "_history_kernel"]
    lists.assert_compressed(62)
