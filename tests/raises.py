"""Refusals of the package that no test reaches.

    python -m coverage run -m pytest && python -m coverage combine && python tests/raises.py

Prints file, line and source of every `raise` that was not run, and leaves with status 1 if there is one.  Re-raises and
`raise NotImplementedError` have no message and do not count, nor do lines that coverage excludes.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent


def refusals(path: Path) -> Iterator[ast.Raise]:
    """`raise` statements with a message."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node


def uncovered(measured: coverage.Coverage, path: Path) -> list[ast.Raise]:
    _, _, _, missing, _ = measured.analysis2(str(path))
    return [node for node in refusals(path) if node.lineno in missing]


def main() -> int:
    measured = coverage.Coverage()
    measured.load()
    found = [(path, node) for path in sorted((ROOT / "turboquant").rglob("*.py")) for node in uncovered(measured, path)]
    for path, node in found:
        sys.stdout.write(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
