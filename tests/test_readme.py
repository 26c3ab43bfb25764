"""The README's tables are what the result files say, the commands that made those are quoted, and CI runs its tests."""

import json
import sys
from pathlib import Path

import pytest

from turboquant.config import PRESETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
PAGES = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
sys.path.insert(0, str(ROOT / "docs"))
import make  # noqa: E402


def test_tables_are_what_the_results_say():
    assert make.with_tables(README) == README
    rows = json.loads((ROOT / "benchmarks/results/h200-kernels.json").read_text())["rows"]
    assert all(row["rel_err"] < 5e-3 for row in rows if row["contender"] in PRESETS)


def test_a_changed_figure_is_seen():
    """In the first row of the first table."""
    head, rest = README.split("|---|\n", 1)
    assert make.with_tables(head + "|---|\n" + rest.replace("834,544", "834,545", 1)) == README != head


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_commands_of_results_are_quoted(path):
    command = json.loads(path.read_text()).get("command", path.name).replace("=DIR ", "=benchmarks/results ")
    assert command in PAGES.replace("\n", " "), f"no page says that {path.name} was made by {command}"


def test_ci_runs_the_test_command_and_the_transcript():
    assert README.count("<!-- test command -->") == 1
    script = (ROOT / ".ci/run").read_text()
    assert "<!-- test command -->" in script and "\npython docs/transcript.py\n" in script
