"""Whether the native route is asked for, and with which configuration; the same answer in every process of an engine.

    TURBOQUANT=k4v4 vllm serve MODEL
    TURBOQUANT=k3v2 TURBOQUANT_OPTIONS='{"buffer_size": 64, "skip_layers": [0]}' vllm serve MODEL
    vllm serve MODEL --additional-config '{"turboquant": {"preset": "k4v4"}}'

`enable_no_alloc` sets the two variables, because engine and workers are processes of their own.
"""

import json
import os
from typing import Any

from turboquant.config import AUTO, DEFAULT_PRESET, PRESETS, TurboQuantConfig, choice_error

PRESET, OPTIONS = "TURBOQUANT", "TURBOQUANT_OPTIONS"
METRICS_FOLDER = "TURBOQUANT_METRICS_FOLDER"  # set by us for the processes of an engine (`telemetry`)
OTHERS = (
    METRICS_FOLDER,
    "TURBOQUANT_CACHE",
    "TURBOQUANT_RESULTS",
)  # the demo model's folder; where tests write figures
NOT_ASKED = ("", "0", "off")
# The ring is taken from the memory that pages could have: at most so much of what the engine may use.
RING_SHARE = 0.01


def requested(additional_config: object = None) -> TurboQuantConfig | None:
    """The configuration of the native route, None if it is not asked for; ValueError for what cannot be meant.

    additional_config: vLLM's, whose entry "turboquant" is a preset or a dictionary of options; it wins.
    """
    check_variables()
    entry = additional_config.get("turboquant") if isinstance(additional_config, dict) else None
    if entry is not None:
        return from_entry(entry)
    preset = os.environ.get(PRESET, "")
    if preset.lower() in NOT_ASKED:
        return None
    return from_entry({"preset": preset, **parse_options(os.environ.get(OPTIONS, "{}"))})


def check_variables() -> None:
    for name in os.environ:
        if name.startswith(PRESET) and name not in (PRESET, OPTIONS, *OTHERS):
            raise choice_error("environment variable", name, (PRESET, OPTIONS))


def parse_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPTIONS}={text!r} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f'{OPTIONS}={text!r} must be a JSON object such as {{"buffer_size": 64}}')
    return options


def from_entry(entry: object) -> TurboQuantConfig:
    """A preset's name, or a dictionary of options with or without "preset"."""
    if isinstance(entry, str):
        entry = {"preset": entry}
    if not isinstance(entry, dict):
        raise ValueError(
            f"turboquant={entry!r} must be a preset ({', '.join(PRESETS)}, {AUTO}BITS) or an object of options"
        )
    return TurboQuantConfig.from_options(**{"ring_share": RING_SHARE, **entry})


def enable(preset: str | None = None, **options: Any) -> TurboQuantConfig:
    """Ask for the native route in this process and in those that it starts."""
    config = from_entry({"preset": preset, **options})
    text = json.dumps(options)  # fails before anything is set
    os.environ[PRESET], os.environ[OPTIONS] = preset or DEFAULT_PRESET, text
    return config


def disable() -> None:
    """Undo `enable` for engines that are built from now on."""
    for name in (PRESET, OPTIONS):
        os.environ.pop(name, None)
