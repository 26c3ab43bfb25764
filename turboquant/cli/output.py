"""What commands print: tables, JSON, and refusals of one line."""

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

FAILED, REFUSED = 1, 2  # exit status of what does not work here, and of input that cannot be meant
GIB, MIB = 2**30, 2**20
WIDEST = 200  # characters of a line


def refusing(command: Callable[..., None]) -> Callable[..., None]:
    """The command with errors of its input as one line on stderr and exit status 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(REFUSED) from None
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            typer.echo("error: this command needs vLLM, which is not installed: pip install 'vllm>=0.26'", err=True)
            raise typer.Exit(FAILED) from None

    return run


def quiet_vllm() -> None:
    """vLLM logs to stdout when it is imported, where JSON and tables go."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with its first column to the left and numbers to the right."""
    table = Table(*columns[:1], box=None, pad_edge=False, header_style="bold")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)  # a narrow terminal wraps, nothing is cut


def size(size_bytes: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{size_bytes / GIB:.2f} GiB" if abs(size_bytes) >= GIB else f"{size_bytes / MIB:.1f} MiB"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as 0-3, 5, 7-8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)
