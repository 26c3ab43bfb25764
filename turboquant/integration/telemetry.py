"""Figures of the compressed cache in vLLM's own /metrics.

A worker writes its numbers into files that are mapped into memory, in the format of prometheus_client's multiprocess
mode; the process with the endpoint, of which all workers are children, reads them when it is scraped.  A write is a
copy of 16 bytes: no other process is called, and nothing waits for the device.
"""

import atexit
import glob
import multiprocessing
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turboquant.integration import compat
from turboquant.integration.activation import METRICS_FOLDER

LABELS = ("engine", "rank")  # of every metric: data-parallel engine, worker of it


@dataclass(frozen=True)
class Metric:
    """kind: gauge or counter; labels: besides LABELS."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "turboquant_info": Metric("gauge", "1; what the labels say.", ("preset", "route", "calibration")),
    "turboquant_layers": Metric("gauge", "Attention layers by the cache that they have.", ("cache",)),
    "turboquant_token_bytes": Metric("gauge", "Bytes of a token in all compressed layers.", ("cache",)),
    "turboquant_memory_bytes": Metric("gauge", "Bytes of pages, exact tokens, and tables.", ("part",)),
    "turboquant_capacity_tokens": Metric("gauge", "Tokens that the pages hold."),
    "turboquant_exact_tokens": Metric("gauge", "Exact tokens: room for all, and of a request.", ("of",)),
    "turboquant_layer_error": Metric("gauge", "Mean relative error of attention, where it is sampled.", ("layer",)),
    "turboquant_tokens_encoded": Metric("counter", "Tokens written, by KV-cache group.", ("group",)),
    "turboquant_tokens_read": Metric("counter", "Cached tokens read by requests' steps.", ("group", "kind")),
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What does not change from step to step; bytes per token and memory in bytes, the rest in tokens and layers."""

    preset: str
    route: str
    calibration: str
    layers_compressed: int
    layers_native: int
    token_bytes: float
    native_token_bytes: float
    capacity_tokens: int
    page_bytes: int
    exact_bytes: int
    table_bytes: int
    exact_tokens: int
    exact_tokens_per_request: int


# ---- in the worker ---------------------------------------------------------------------------------------------
class Writer:
    """Numbers of one worker; does nothing where no process with an endpoint has started this one."""

    def __init__(self, place: Mapping[str, str]):
        self.place, self.files, self.keys = dict(place), {}, dict[tuple[str, ...], tuple[Any, str]]()
        if folder := compat.prometheus_folder() or os.environ.get(METRICS_FOLDER):
            from prometheus_client.mmap_dict import MmapedDict

            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {"gauge": "gauge_mostrecent", "counter": "counter"}
            pid = f"turboquant-{os.getpid()}-{secrets.token_hex(4)}"  # engines of one process must not share a file
            self.files = {kind: MmapedDict(f"{folder}/{name}_{pid}.db") for kind, name in names.items()}

    def write(self, name: str, value: float, *labels: str) -> None:
        """Set a metric with the values of its own labels."""
        if not self.files:
            return
        known = (name, *labels)
        if known not in self.keys:
            self.keys[known] = self._key(name, labels)
        file, key = self.keys[known]
        file.write_value(key, value, time.time())

    def _key(self, name: str, labels: Iterable[str]) -> tuple[Any, str]:
        """The file of a metric, and its place there."""
        from prometheus_client.mmap_dict import mmap_key

        metric = METRICS[name]
        values = {**self.place, **dict(zip(metric.labels, labels, strict=True))}
        sample = f"{name}_total" if metric.kind == "counter" else name
        return self.files[metric.kind], mmap_key(name, sample, list(values), list(values.values()), metric.help)


def write_figures(writer: Writer, figures: Figures) -> None:
    writer.write("turboquant_info", 1, figures.preset, figures.route, figures.calibration)
    writer.write("turboquant_layers", figures.layers_compressed, "compressed")
    writer.write("turboquant_layers", figures.layers_native, "native")
    writer.write("turboquant_token_bytes", figures.token_bytes, "compressed")
    writer.write("turboquant_token_bytes", figures.native_token_bytes, "native")
    writer.write("turboquant_memory_bytes", figures.page_bytes, "pages")
    writer.write("turboquant_memory_bytes", figures.exact_bytes, "exact")
    writer.write("turboquant_memory_bytes", figures.table_bytes, "tables")
    writer.write("turboquant_capacity_tokens", figures.capacity_tokens)
    writer.write("turboquant_exact_tokens", figures.exact_tokens, "engine")
    writer.write("turboquant_exact_tokens", figures.exact_tokens_per_request, "request")


def write_counters(writer: Writer, group: str, encoded: int, read: int, exact: int) -> None:
    """Of a KV-cache group since the start; read: cached tokens, `exact` of them exactly."""
    writer.write("turboquant_tokens_encoded", encoded, group)
    writer.write("turboquant_tokens_read", exact, group, "exact")
    writer.write("turboquant_tokens_read", read - exact, group, "compressed")


class Meter:
    """Tokens that a KV-cache group wrote, and cached ones that its queries read, per layer; dummy steps included.

    Only the device knows which are read exactly: its count is copied to the host behind a step, and written by a later
    step, once it is there.
    """

    def __init__(self, writer: Writer, group: str, device: torch.device):
        self.writer, self.group, on_gpu = writer, group, device.type == "cuda"
        self.tokens_encoded = self.tokens_read = 0
        self.exact, self.last = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.arrived, self.sent = torch.zeros((), dtype=torch.int64, pin_memory=on_gpu), (0, 0)
        self.copied = torch.cuda.Event() if on_gpu else None

    @property
    def tokens_read_exact(self) -> int:
        """Waits for the device."""
        return int(self.exact)

    def step(self, lens: list[tuple[int, int, int]], present: torch.Tensor) -> None:
        """lens: first row, rows and cached tokens of every request; present: bool [R, C], what they read exactly."""
        self.tokens_encoded += sum(new for _, new, _ in lens)
        self.tokens_read += sum(cached for _, new, cached in lens if new)
        torch.sum(present, (0, 1), dtype=torch.int64, out=self.last)
        self.exact += self.last
        if self.copied is None or self.copied.query():
            self._write()

    def _write(self) -> None:
        """What was sent for has arrived; send for what there is now."""
        write_counters(self.writer, self.group, *self.sent, int(self.arrived))
        self.arrived.copy_(self.exact, non_blocking=True)
        self.sent = self.tokens_encoded, self.tokens_read
        if self.copied is not None:
            self.copied.record()


# ---- in the process with the endpoint --------------------------------------------------------------------------
class FolderCollector:
    """What workers have written, for prometheus_client's registry."""

    def __init__(self, folder: str):
        self.folder = folder

    def collect(self) -> Iterable[Any]:
        from prometheus_client.multiprocess import MultiProcessCollector

        return MultiProcessCollector.merge(glob.glob(f"{self.folder}/*.db"))


_collectors: list[FolderCollector] = []


def offer() -> None:
    """Where this process is nobody's child, it may have an endpoint: name a folder to its children, and read it.

    The folder is made by the first worker that writes.  Endpoints of several processes read vLLM's own folder.
    """
    if _collectors or multiprocessing.parent_process() is not None or compat.prometheus_folder():
        return
    folder = os.path.join(tempfile.gettempdir(), f"turboquant-{secrets.token_hex(8)}")
    os.environ[METRICS_FOLDER] = folder
    _collectors.append(FolderCollector(folder))
    compat.prometheus_registry().register(_collectors[0])
    atexit.register(remove, folder, os.getpid())


def remove(folder: str, owner: int) -> None:
    """At the end of the process that named the folder; forked children run this too."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
