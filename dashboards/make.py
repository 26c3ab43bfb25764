#!/usr/bin/env python3
"""The Grafana dashboard beside this file: `python dashboards/make.py` writes it anew."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("turboquant.json")
COLUMNS, HEIGHT = 2, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
# title, unit of Grafana's, (legend, expression) of every line
PANELS = [
    ("Layers by cache", "short", [("{{cache}}", "max by (cache) (turboquant_layers)")]),
    ("What is on", "short", [("{{preset}}, {{route}}, calibrated: {{calibration}}", "turboquant_info")]),
    ("Times smaller than bf16", "none",
     [("{{engine}}/{{rank}}",
       'turboquant_token_bytes{cache="native"} / ignoring(cache) turboquant_token_bytes{cache="compressed"}')]),
    ("Tokens that the pages hold", "short", [("engine {{engine}}", "min by (engine) (turboquant_capacity_tokens)")]),
    ("Share of the pages in use", "percentunit", [("engine {{engine}}", "vllm:kv_cache_usage_perc")]),
    ("Memory", "bytes", [("{{part}}", "sum by (part) (turboquant_memory_bytes)")]),
    ("Tokens encoded per second", "short",
     [("{{group}}", 'max by (group) (rate(turboquant_tokens_encoded_total[$__rate_interval]))')]),
    ("Cached tokens read per second", "short",
     [("{{kind}}", "sum by (kind) (rate(turboquant_tokens_read_total[$__rate_interval]))")]),
    ("Share of reads that are exact", "percentunit",
     [("exact", 'sum(rate(turboquant_tokens_read_total{kind="exact"}[$__rate_interval]))'
                " / sum(rate(turboquant_tokens_read_total[$__rate_interval]))")]),
    ("Requests whose exact tokens fit", "short",
     [("fit", 'min(turboquant_exact_tokens{of="engine"}) / max(turboquant_exact_tokens{of="request"})'),
      ("running", "sum(vllm:num_requests_running)")]),
    ("Error of attention, worst layers (capture_only)", "percentunit",
     [("{{layer}}", "topk(8, turboquant_layer_error)")]),
    ("Preemptions per minute", "short", [("", "60 * sum(rate(vllm:num_preemptions_total[$__rate_interval]))")]),
]  # fmt: skip


def panel(number: int, title: str, unit: str, lines: list[tuple[str, str]]) -> dict[str, Any]:
    width = 24 // COLUMNS
    place = {"x": number % COLUMNS * width, "y": number // COLUMNS * HEIGHT, "w": width, "h": HEIGHT}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for i, (legend, expression) in enumerate(lines)
    ]
    return {
        "id": number + 1, "type": "timeseries", "title": title, "gridPos": place, "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []}, "targets": targets,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "turboquant", "uid": "turboquant", "schemaVersion": 39, "refresh": "10s", "tags": ["vllm"],
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [source]},
        "panels": [panel(number, *described) for number, described in enumerate(PANELS)],
    }  # fmt: skip


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
