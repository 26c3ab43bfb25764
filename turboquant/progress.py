"""Progress of what takes longer than two seconds: on stderr, where that is a terminal, and gone when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Told = Callable[[str], None]


@contextmanager
def progress_bar(steps: int) -> Iterator[Told]:
    """A function that is told what is done next, at most `steps` times."""
    with shown(BarColumn()) as bar:
        task, done = bar.add_task("", total=steps), iter(range(steps))
        yield lambda what: bar.update(task, description=what, completed=next(done))


@contextmanager
def working(what: str) -> Iterator[None]:
    """The time that one thing takes."""
    with shown() as bar:
        bar.add_task(what, total=None)
        yield


def shown(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal, redirect_stdout=False, redirect_stderr=False,  # pipes stay pipes
    )  # fmt: skip
