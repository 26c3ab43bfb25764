"""Texts of the command line as values, with errors that name the text and what is allowed, as Typer's do not."""

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any

import typer

from turboquant.config import TurboQuantConfig, choice_error

UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}
OPTION_HELP = "An option of turboquant as NAME=VALUE, such as buffer_size=64 or skip_layers=0,-1; may be repeated."
Options = Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help=OPTION_HELP)]
COUNT, SHARE = "INTEGER", "NUMBER"  # what help calls the texts of `parse_count` and `parse_share`
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def parse_size(what: str, text: str) -> int:
    """Bytes of a size such as 24GiB, 24GB or 1073741824; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not float(match[1]):
        allowed = ", ".join(unit for unit in UNITS if unit)
        raise ValueError(f"{what} {text!r} is no size; allowed: a number above 0 with one of {allowed}, or bytes")
    return int(float(match[1]) * UNITS[match[2]])


def parse_count(what: str, text: str) -> int:
    """An integer of at least 1; ValueError otherwise."""
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{what} {text!r} must be an integer of at least 1")
    return int(text)


def parse_share(what: str, text: str) -> float:
    """A number above 0 and at most 1; ValueError otherwise."""
    if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) <= 1:
        raise ValueError(f"{what} {text!r} must be a number above 0 and at most 1")
    return float(text)


def parse_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """Options of `TurboQuantConfig` from NAME=VALUE; ValueError for names and values that cannot be meant."""
    options = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} must be NAME=VALUE, such as buffer_size=64")
        options[name] = parse_value(name, value)
    return options


def config_from(preset: str | None, texts: Iterable[str] | None) -> TurboQuantConfig:
    """The native route's configuration with a preset and NAME=VALUE options; ValueError for what cannot be meant."""
    from turboquant.integration import activation

    return activation.from_entry({"preset": preset, **parse_options(texts)})


def parse_value(name: str, text: str) -> Any:
    """The value of an option, of the type that its default has."""
    defaults = {field.name: field.default for field in fields(TurboQuantConfig)}
    if name not in defaults:
        raise choice_error("option", name, defaults)
    kind: Any = type(defaults[name])
    try:
        if kind is tuple:
            return tuple(parse_part(part) for part in text.strip("()[] ").split(",") if part.strip())
        return kind(text)
    except ValueError:
        wanted = {tuple: "integers, or pairs such as 8/4, with commas", int: "an integer", float: "a number"}[kind]
        raise ValueError(f"option {name}={text!r} must be {wanted}") from None


def parse_part(text: str) -> int | tuple[int, ...]:
    """An integer, or those of a pair such as 8/4."""
    numbers = tuple(int(number) for number in text.split("/"))
    return numbers if len(numbers) > 1 else numbers[0]
