"""The `turboquant` command, one module per subcommand.

Only Typer and Rich are imported here; a command imports vLLM and torch's users when it runs, so that help is quick.
"""

import typer

from turboquant.cli import codebook, doctor, plan, serve, verify

app = typer.Typer(
    name="turboquant",
    help="A compressed KV cache for vLLM: plan what fits, check an installation, verify and serve a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.add_typer(codebook.app, name="codebook")
