"""`python -m turboquant.cli`: the command where its script is not on the path."""

from turboquant.cli import app

app()
