"""What to compress and how: presets, the configuration, and the mode table."""

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from turboquant.checks import check_int, is_int

KEY_BITS = (2, 3, 4, 8)
VALUE_BITS = {"lloyd": (2, 3, 4), "group": (2, 3, 4, 8)}
NO_CALIBRATION = "none"
VALUE_GROUPS = (8, 16, 32, 64, 128)
KEY_QUANTIZERS = ("mse", "prod")
ROTATIONS = ("auto", "hadamard", "haar")

PRESETS: dict[str, dict[str, int]] = {
    "k8v4": {"key_bits": 8, "value_bits": 4},
    "k4v4": {"key_bits": 4, "value_bits": 4},
    "k4v3": {"key_bits": 4, "value_bits": 3},
    "k3v4": {"key_bits": 3, "value_bits": 4},
    "k3v3": {"key_bits": 3, "value_bits": 3},
    "k4v2": {"key_bits": 4, "value_bits": 2},
    "k3v2": {"key_bits": 3, "value_bits": 2},
    "k2v2": {"key_bits": 2, "value_bits": 2},
}
# Where another window than the usual one is worth its bytes (benchmarks/results/quality-h200-*.json).
PRESET_WINDOWS = {"k3v2": {"buffer_size": 96}}
DEFAULT_PRESET = "k4v4"
AUTO = "auto:"  # before the average bits of a number: preset "auto:3.5"
AUTO_BITS = (2, 8)  # what an average can be


class Mode(StrEnum):
    """How far the compressed cache has taken over."""

    OFF = "off"
    CAPTURE_ONLY = "capture_only"
    HYBRID = "hybrid"
    FULL_TQ = "full_tq"


@dataclass(frozen=True)
class ModePolicy:
    """What a mode writes and what its decode and prefill rows read; False means compressed."""

    native_write: bool
    compressed_write: bool
    native_decode: bool
    native_prefill: bool

    @property
    def reads_native(self) -> bool:
        return self.native_decode or self.native_prefill

    @property
    def needs_native_cache(self) -> bool:
        """Whether nothing replaces the native cache once it is freed (hybrid prefill falls back to compressed)."""
        return self.native_decode

    def without_native_cache(self) -> "ModePolicy":
        """The policy after `free_kv_cache`."""
        return replace(self, native_write=False, native_prefill=False)


MODE_POLICIES: dict[Mode, ModePolicy] = {
    Mode.OFF: ModePolicy(native_write=True, compressed_write=False, native_decode=True, native_prefill=True),
    Mode.CAPTURE_ONLY: ModePolicy(native_write=True, compressed_write=True, native_decode=True, native_prefill=True),
    Mode.HYBRID: ModePolicy(native_write=True, compressed_write=True, native_decode=False, native_prefill=True),
    Mode.FULL_TQ: ModePolicy(native_write=False, compressed_write=True, native_decode=False, native_prefill=False),
}
# Names of the prototype's modes that keep working.
MODE_ALIASES = {"active": Mode.HYBRID, "shadow": Mode.CAPTURE_ONLY, "accumulate": Mode.CAPTURE_ONLY}


def choice_error(what: str, value: object, allowed: Iterable[object]) -> ValueError:
    """ValueError that names the value, what is allowed, and the nearest allowed name."""
    names = [str(a) for a in allowed]
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {str(value)!r}; allowed: {', '.join(names)}{hint}")


def format_name(key_bits: int, value_bits: int) -> str:
    return f"k{key_bits}v{value_bits}"


def mixture(formats: dict[str, int]) -> str:
    """{"k8v4": 2, "k4v4": 28} -> "2 k8v4, 28 k4v4" """
    return ", ".join(f"{count} {name}" for name, count in formats.items())


def is_preset(name: object) -> bool:
    """Whether this can be the name of a preset; `preset_options` checks the rest."""
    return isinstance(name, str) and (name in PRESETS or name.startswith(AUTO))


def preset_options(name: object) -> dict[str, Any]:
    """Options that a preset stands for; ValueError for a name that is none."""
    if not is_preset(name):
        raise choice_error("preset", name, (*PRESETS, f"{AUTO}BITS"))
    if name in PRESETS:
        return PRESETS[str(name)] | PRESET_WINDOWS.get(str(name), {})
    return {"auto_bits": parse_average(str(name).removeprefix(AUTO))}


def parse_average(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        least, most = AUTO_BITS
        raise ValueError(f"preset '{AUTO}{text}' needs a number of {least} to {most} after {AUTO!r}") from None


def parse_mode(mode: "Mode | str") -> Mode:
    """Mode from its name or an old name; ValueError otherwise."""
    name = str(mode).lower()
    if name in MODE_ALIASES:
        return MODE_ALIASES[name]
    if name not in set(Mode):
        raise choice_error("mode", mode, Mode)
    return Mode(name)


def is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_int, value))


MOST_CANDIDATES = 99  # more pre-scales than that gain nothing


@dataclass(frozen=True)
class TurboQuantConfig:
    """Codec, ring and layer choices; validated on construction.

    buffer_size: recent tokens of a sequence that are read exactly; 0 for none.
    sink_size: first tokens of a sequence that are read exactly, a block of them at most; 0 for none.
    ring_share: upper bound of the exact ring's memory, as a share of the native KV cache.
    scale_candidates: pre-scales that the encoder tries per row (odd); the decoder does not depend on it.
    skip_layers: indices of attention layers that stay native; negative ones count from the last.
    layer_bits: (key bits, value bits) of the first layers; those beyond have key_bits and value_bits.
    auto_bits: average bits per number of keys and values, scalars included, under which an engine chooses the bits of
        every layer by what they cost (`turboquant.allocation`); 0 for not at all.  The choice is put into layer_bits.
    initial_layers_count, initial_layers_key_bits: so many first layers get this key width, whatever else is said.
    value_group: coordinates per group of "group" values; reduced to a divisor of the head size where it is none.
    shadow_interval: in capture_only, score every n-th step both ways and record the error; 0 for never.
    calibration: file with key transforms (`turboquant.calibrate`); "" calibrates when the engine starts, on the native
        route, and "none" never does.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_quantizer: str = "mse"
    value_quantizer: str = "lloyd"
    value_group: int = 32
    rotation: str = "auto"
    seed: int = 0
    scale_candidates: int = 5
    buffer_size: int = 112
    sink_size: int = 16
    ring_share: float = 0.25
    skip_layers: tuple[int, ...] = ()
    layer_bits: tuple[tuple[int, int], ...] = ()
    auto_bits: float = 0.0
    initial_layers_count: int = 0
    initial_layers_key_bits: int = 8
    shadow_interval: int = 0
    calibration: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.skip_layers, list | tuple) or not all(map(is_int, self.skip_layers)):
            raise ValueError(f"skip_layers={self.skip_layers!r} must be a list of integers, such as [0, -1]")
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))
        self._check_codec()
        self._check_layer_bits()
        self._check_sizes()

    def _check_codec(self) -> None:
        for name in ("key_bits", "initial_layers_key_bits"):
            if not is_int(getattr(self, name)) or getattr(self, name) not in KEY_BITS:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported; allowed: {KEY_BITS}")
        if self.key_quantizer not in KEY_QUANTIZERS:
            raise choice_error("key_quantizer", self.key_quantizer, KEY_QUANTIZERS)
        if self.key_quantizer == "prod" and self.key_bits == 8:
            raise ValueError("key_bits=8 are fp8 keys, which have no key_quantizer='prod'; allowed: 2, 3, 4")
        if not isinstance(self.value_quantizer, str) or self.value_quantizer not in VALUE_BITS:
            raise choice_error("value_quantizer", self.value_quantizer, VALUE_BITS)
        if not is_int(self.value_bits) or self.value_bits not in VALUE_BITS[self.value_quantizer]:
            allowed = VALUE_BITS[self.value_quantizer]
            raise ValueError(f"value_bits={self.value_bits!r} with {self.value_quantizer!r} values; allowed: {allowed}")
        if self.rotation not in ROTATIONS:
            raise choice_error("rotation", self.rotation, ROTATIONS)

    def _check_layer_bits(self) -> None:
        values = VALUE_BITS[self.value_quantizer]
        if not isinstance(self.layer_bits, list | tuple) or not all(map(is_pair, self.layer_bits)):
            raise ValueError(f"layer_bits={self.layer_bits!r} must be pairs of key and value bits: [[8, 4], [4, 4]]")
        for layer, (key, value) in enumerate(self.layer_bits):
            if key not in KEY_BITS or value not in values:
                raise ValueError(
                    f"layer_bits gives layer {layer} {key} and {value} bits; allowed: {KEY_BITS} for keys, "
                    f"{values} for {self.value_quantizer!r} values"
                )
        object.__setattr__(self, "layer_bits", tuple(map(tuple, self.layer_bits)))
        least, most = AUTO_BITS
        if isinstance(self.auto_bits, bool) or not isinstance(self.auto_bits, int | float):
            raise ValueError(f"auto_bits={self.auto_bits!r} must be a number of {least} to {most}, or 0")
        if self.auto_bits and not least <= self.auto_bits <= most:
            raise ValueError(f"auto_bits={self.auto_bits:g} must be {least} to {most}, or 0")

    def _check_sizes(self) -> None:
        if not isinstance(self.calibration, str):
            raise ValueError(f"calibration={self.calibration!r} must be the path of a calibration file")
        for name in ("buffer_size", "sink_size", "initial_layers_count", "shadow_interval", "seed"):
            check_int(name, getattr(self, name))
        if not isinstance(self.ring_share, int | float) or self.ring_share is True or not 0 < self.ring_share <= 1:
            raise ValueError(f"ring_share={self.ring_share!r} must be above 0 and at most 1")
        if not is_int(self.value_group) or self.value_group not in VALUE_GROUPS:
            raise ValueError(f"value_group={self.value_group!r} is not supported; allowed: {VALUE_GROUPS}")
        if not is_int(self.scale_candidates) or self.scale_candidates not in range(1, MOST_CANDIDATES + 1, 2):
            raise ValueError(
                f"scale_candidates={self.scale_candidates!r} must be odd, at least 1 and at most {MOST_CANDIDATES}"
            )

    @classmethod
    def from_options(cls, preset: str | None = None, **options: Any) -> "TurboQuantConfig":
        """Configuration from a preset name and single options, which win; unknown names are refused."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise choice_error("option", name, known)
        given = preset_options(DEFAULT_PRESET if preset is None else preset)
        chosen = {name: value for name, value in options.items() if value is not None}
        options = {**given, **chosen}
        for name in ("key_bits", "value_bits", "layer_bits"):
            if name in chosen and options.get("auto_bits"):
                raise ValueError(f"{name}={chosen[name]!r} was given, but auto_bits chooses it; leave out one")
        return cls(**options)

    @property
    def name(self) -> str:
        if self.auto_bits:
            return f"{AUTO}{self.auto_bits:g}"
        return format_name(self.key_bits, self.value_bits)

    @property
    def calibration_file(self) -> str | None:
        return self.calibration if self.calibration not in ("", NO_CALIBRATION) else None

    def layer_key_bits(self, index: int) -> int:
        """Key bits of the attention layer with this index (0 is the first)."""
        return self.initial_layers_key_bits if index < self.initial_layers_count else self._bits(index)[0]

    def layer_value_bits(self, index: int) -> int:
        """Value bits of the attention layer with this index."""
        return self._bits(index)[1]

    def _bits(self, index: int) -> tuple[int, int]:
        return self.layer_bits[index] if index < len(self.layer_bits) else (self.key_bits, self.value_bits)

    def check_chosen(self) -> None:
        """ValueError where the bits are left to an engine of vLLM, for caches outside of one."""
        if self.auto_bits and not self.layer_bits:
            raise ValueError(f"auto_bits={self.auto_bits:g} needs vLLM to choose the bits; give layer_bits instead")

    def formats(self, indices: Iterable[int]) -> dict[str, int]:
        """How many of the attention layers with these indices have which bits: {"k8v4": 2, "k4v4": 28}."""
        return dict(Counter(format_name(self.layer_key_bits(i), self.layer_value_bits(i)) for i in indices))

    def uniform(self, key_bits: int, value_bits: int) -> "TurboQuantConfig":
        """The same with these bits in every layer."""
        quantizer = "mse" if key_bits == 8 else self.key_quantizer  # fp8 keys have none
        return replace(
            self, key_bits=key_bits, value_bits=value_bits, key_quantizer=quantizer, layer_bits=(), auto_bits=0.0,
            initial_layers_count=0,
        )  # fmt: skip

    def skips(self, index: int, num_layers: int) -> bool:
        """Whether the attention layer with this index stays native."""
        return index in {i % num_layers for i in self.skip_layers if -num_layers <= i < num_layers}


@dataclass(frozen=True)
class SkippedLayer:
    """An attention layer that stays native, and why."""

    name: str
    reason: str = field(default="")
