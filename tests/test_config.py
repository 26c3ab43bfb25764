"""Configuration: presets, refusals that name the value and what is allowed, modes and their old names."""

import dataclasses
import re

import pytest

from turboquant.codec import KVCodec
from turboquant.config import (
    DEFAULT_PRESET,
    MODE_POLICIES,
    PRESETS,
    Mode,
    SkippedLayer,
    TurboQuantConfig,
    parse_mode,
)

DOCUMENTED_PRESETS = {"k8v4", "k4v4", "k4v3", "k3v4", "k3v3", "k4v2", "k3v2", "k2v2"}


def test_presets_are_the_documented_ones():
    assert set(PRESETS) == DOCUMENTED_PRESETS and DEFAULT_PRESET == "k4v4"


@pytest.mark.parametrize("preset", sorted(DOCUMENTED_PRESETS))
def test_preset_name_says_its_bits(preset):
    config = TurboQuantConfig.from_options(preset)
    assert (config.key_bits, config.value_bits) == (int(preset[1]), int(preset[3]))
    assert config.name == preset
    codec = KVCodec.build(config, 0, 1, 64)
    assert (codec.key.bits, codec.value.bits) == (config.key_bits, config.value_bits)


def test_defaults():
    config = TurboQuantConfig()
    assert config == TurboQuantConfig.from_options() == TurboQuantConfig.from_options("k4v4")
    assert (config.key_quantizer, config.value_quantizer, config.buffer_size) == ("mse", "lloyd", 112)


def test_options_win_over_the_preset():
    config = TurboQuantConfig.from_options("k3v2", value_bits=4, buffer_size=0, seed=None, rotation="haar")
    assert (config.key_bits, config.value_bits, config.buffer_size) == (3, 4, 0)
    assert (config.seed, config.rotation) == (0, "haar")


def test_a_preset_may_have_its_own_window():
    """The windows that benchmarks/results/quality-h200-*.json were measured with."""
    assert TurboQuantConfig.from_options("k3v2").buffer_size == 96
    assert TurboQuantConfig.from_options("k3v2", buffer_size=128).buffer_size == 128
    assert TurboQuantConfig.from_options(key_bits=3, value_bits=2).buffer_size == 112


def test_config_is_frozen_and_hashable():
    config = TurboQuantConfig(skip_layers=[0, -1])
    assert config.skip_layers == (0, -1)
    assert hash(config) == hash(TurboQuantConfig(skip_layers=(0, -1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.key_bits = 2


REFUSED = [
    ({"key_bits": 5}, ["key_bits=5", "(2, 3, 4, 8)"]),
    ({"key_bits": 1}, ["key_bits=1", "(2, 3, 4, 8)"]),
    ({"calibration": 3}, ["calibration=3", "path of a calibration file"]),
    ({"key_bits": "4"}, ["key_bits='4'", "(2, 3, 4, 8)"]),
    ({"initial_layers_key_bits": 16}, ["initial_layers_key_bits=16", "(2, 3, 4, 8)"]),
    ({"value_bits": 8}, ["value_bits=8", "'lloyd'", "(2, 3, 4)"]),
    ({"value_bits": 1, "value_quantizer": "group"}, ["value_bits=1", "'group'", "(2, 3, 4, 8)"]),
    ({"key_quantizer": "msee"}, ["key_quantizer", "'msee'", "mse, prod", "did you mean 'mse'"]),
    ({"value_quantizer": "groups"}, ["value_quantizer", "'groups'", "lloyd, group", "did you mean 'group'"]),
    ({"rotation": "hadamart"}, ["rotation", "'hadamart'", "auto, hadamard, haar", "did you mean 'hadamard'"]),
    ({"buffer_size": -1}, ["buffer_size=-1", "at least 0"]),
    ({"buffer_size": 1.5}, ["buffer_size=1.5", "integer"]),
    ({"initial_layers_count": -2}, ["initial_layers_count=-2"]),
    ({"shadow_interval": -2}, ["shadow_interval=-2"]),
    ({"seed": -3}, ["seed=-3"]),
    ({"ring_share": 0}, ["ring_share=0", "above 0 and at most 1"]),
    ({"ring_share": 1.01}, ["ring_share=1.01", "above 0 and at most 1"]),
    ({"scale_candidates": 4}, ["scale_candidates=4", "odd"]),
    ({"scale_candidates": 0}, ["scale_candidates=0", "at least 1"]),
    ({"value_group": 0}, ["value_group=0"]),
    ({"value_group": -32}, ["value_group=-32"]),
    ({"value_group": 2.5}, ["value_group=2.5"]),
    ({"scale_candidates": 2.5}, ["scale_candidates=2.5"]),
    ({"key_bits": 4.0}, ["key_bits=4.0"]),
    ({"layer_bits": [4, 4]}, ["layer_bits=[4, 4]", "pairs", "[[8, 4], [4, 4]]"]),
    ({"layer_bits": [[4, 4], [5, 4]]}, ["layer 1", "5 and 4", "(2, 3, 4, 8)"]),
    ({"layer_bits": [[8, 8]]}, ["layer 0", "8 and 8", "'lloyd'", "(2, 3, 4)"]),
    ({"layer_bits": 4}, ["layer_bits=4"]),
    ({"auto_bits": 1}, ["auto_bits=1", "2 to 8"]),
    ({"auto_bits": 8.5}, ["auto_bits=8.5", "2 to 8"]),
    ({"auto_bits": float("nan")}, ["auto_bits=nan", "2 to 8"]),
    ({"auto_bits": True}, ["auto_bits=True", "number"]),
    ({"auto_bits": "4"}, ["auto_bits='4'", "number"]),
]


@pytest.mark.parametrize(("options", "parts"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_refusals_name_the_value_and_what_is_allowed(options, parts):
    """Invariant 6."""
    with pytest.raises(ValueError) as caught:
        TurboQuantConfig(**options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_unknown_option_and_preset():
    with pytest.raises(ValueError, match=r"unknown option 'buffersize'.*buffer_size.*did you mean 'buffer_size'"):
        TurboQuantConfig.from_options(buffersize=3)
    with pytest.raises(ValueError, match=r"unknown preset 'k4v5'; allowed: k8v4, k4v4.*did you mean 'k4v"):
        TurboQuantConfig.from_options("k4v5")


def test_a_budget_instead_of_bits():
    config = TurboQuantConfig.from_options("auto:3.5", buffer_size=64)
    assert (config.auto_bits, config.name, config.buffer_size) == (3.5, "auto:3.5", 64)
    assert config == TurboQuantConfig.from_options(auto_bits=3.5, buffer_size=64)
    with pytest.raises(ValueError, match=r"'auto:many' needs a number of 2 to 8"):
        TurboQuantConfig.from_options("auto:many")
    with pytest.raises(ValueError, match=r"unknown preset 'auto'; allowed: k8v4.*auto:BITS"):
        TurboQuantConfig.from_options("auto")


@pytest.mark.parametrize("options", [{"key_bits": 8}, {"value_bits": 2}, {"layer_bits": [[4, 4]]}])
def test_bits_beside_a_budget_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*auto_bits chooses it"):
        TurboQuantConfig.from_options("auto:4", **options)


@pytest.mark.parametrize("options", [
    {"key_bits": bits, "value_bits": value, "key_quantizer": key, "value_quantizer": quantizer}
    for bits in (2, 3, 4, 8) for key in ("mse", "prod") for quantizer in ("lloyd", "group") for value in (2, 4)
    if (bits, key) != (8, "prod")
], ids=str)  # fmt: skip
def test_whatever_is_accepted_can_be_built(options):
    codec = KVCodec.build(TurboQuantConfig(**options), 0, 1, 80)
    assert codec.page_format(16).page_bytes > 0


def test_layer_key_bits():
    config = TurboQuantConfig(key_bits=3, initial_layers_count=2)
    assert [config.layer_key_bits(i) for i in range(4)] == [8, 8, 3, 3]
    assert TurboQuantConfig(key_bits=3).layer_key_bits(0) == 3


def test_bits_of_single_layers():
    config = TurboQuantConfig(key_bits=3, layer_bits=[[8, 4], [2, 2]])
    assert [(config.layer_key_bits(i), config.layer_value_bits(i)) for i in range(3)] == [(8, 4), (2, 2), (3, 4)]
    assert config.formats(range(4)) == {"k8v4": 1, "k2v2": 1, "k3v4": 2}
    assert hash(config) == hash(TurboQuantConfig(key_bits=3, layer_bits=((8, 4), (2, 2))))
    for index, bits in enumerate([(8, 4), (2, 2), (3, 4)]):
        codec = KVCodec.build(config, index, 1, 64)
        assert (codec.key.bits, codec.value.bits) == bits


def test_uniform_bits_are_those_of_every_layer():
    config = TurboQuantConfig(key_quantizer="prod", layer_bits=[[8, 4]], initial_layers_count=1, buffer_size=7)
    assert config.uniform(2, 3) == TurboQuantConfig(2, 3, key_quantizer="prod", buffer_size=7)
    assert config.uniform(8, 4).key_quantizer == "mse"


@pytest.mark.parametrize(
    ("skip_layers", "skipped"),
    [((), []), ((0, 5), [0, 5]), ((-1,), [5]), ((-6, -2), [0, 4]), ((6, 99, -7), []), ([1], [1])],
)
def test_skip_layers(skip_layers, skipped):
    """Negative indices count from the last attention layer; those of other models are none."""
    config = TurboQuantConfig(skip_layers=skip_layers)
    assert [i for i in range(6) if config.skips(i, 6)] == skipped


@pytest.mark.parametrize("mode", Mode)
def test_modes_by_name(mode):
    assert parse_mode(mode) is mode
    assert parse_mode(mode.value) is mode
    assert parse_mode(mode.value.upper()) is mode


@pytest.mark.parametrize(
    ("old", "mode"), [("active", Mode.HYBRID), ("shadow", Mode.CAPTURE_ONLY), ("accumulate", Mode.CAPTURE_ONLY)]
)
def test_old_mode_names(old, mode):
    """MODE_ACTIVE = hybrid, MODE_SHADOW = MODE_ACCUMULATE = capture_only."""
    assert parse_mode(old) is mode and parse_mode(old.upper()) is mode


@pytest.mark.parametrize("bad", ["hybird", "", "none", None, 3])
def test_unknown_mode(bad):
    with pytest.raises(
        ValueError, match=re.escape(f"unknown mode {str(bad)!r}; allowed: off, capture_only, hybrid, full_tq")
    ):
        parse_mode(bad)
    if bad == "hybird":
        with pytest.raises(ValueError, match="did you mean 'hybrid'"):
            parse_mode(bad)


# mode: native write, compressed write, decode reads native, prefill reads native.
MODE_TABLE = {
    "off": (True, False, True, True),
    "capture_only": (True, True, True, True),
    "hybrid": (True, True, False, True),
    "full_tq": (False, True, False, False),
}


@pytest.mark.parametrize("mode", Mode)
def test_mode_table(mode):
    policy = MODE_POLICIES[mode]
    assert dataclasses.astuple(policy) == MODE_TABLE[mode.value]
    assert policy.reads_native == (mode is not Mode.FULL_TQ)
    assert policy.needs_native_cache == (mode in (Mode.OFF, Mode.CAPTURE_ONLY))


def test_hybrid_without_native_cache():
    """After free_kv_cache nothing is written natively, and prefill reads what decode reads."""
    freed = MODE_POLICIES[Mode.HYBRID].without_native_cache()
    assert dataclasses.astuple(freed) == (False, True, False, False)
    assert MODE_POLICIES[Mode.FULL_TQ].without_native_cache() == MODE_POLICIES[Mode.FULL_TQ]


def test_skipped_layer():
    assert SkippedLayer("model.layers.0", "sliding window").reason == "sliding window"
    assert SkippedLayer("model.layers.0").reason == ""
