"""`python tests/cases/report.py` runs the cases and writes their table into README.md beside this file."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # run as a module, this folder is not on the path
from register import CASES, COVERED_ELSEWHERE, HERE, case_of, case_tests

README = HERE / "README.md"
HEAD = """# Cases

Public bug reports about quantised KV caches as small inputs, each compared with a plain list of tokens per request and
float64 softmax attention. Kind: `CPU`; `interpreter` (also the portable Triton kernels, in Triton's interpreter);
`refused` (the feature is not served, and that is said by name); `results` (from an H200's result files); `engine`.
Tests named under "elsewhere" need an engine or a device and are not run for this table, which
`python tests/cases/report.py` writes. References are issues and pull requests; `vllm` is vllm-project/vllm.

| id | case | reports | test | elsewhere | kind | result |
|---|---|---|---|---|---|---|
"""


class Outcomes:
    """What happened to the tests of every case; a pytest plugin."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {case: Counter() for case in CASES}

    def pytest_runtest_logreport(self, report: Any) -> None:
        case = case_of(report.nodeid.split("::")[-1].split("[")[0])
        if case and (report.when == "call" or report.outcome != "passed"):
            outcome = "known gap" if hasattr(report, "wasxfail") else report.outcome
            self.counts[case][outcome] += 1


def result(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), reverse=True)) or "see elsewhere"


def table(counts: dict[str, Counter[str]]) -> str:
    lines, tests = [], case_tests()
    for name, case in CASES.items():
        here = ", ".join(f"`{test}`" for test in tests[name]) or "-"
        elsewhere = f"`{COVERED_ELSEWHERE[name]}`" if name in COVERED_ELSEWHERE else "-"
        cells = (name, case.title, case.reports, here, elsewhere, case.kind, result(counts[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    outcomes = Outcomes()
    about_the_table = str(HERE / "test_register.py")
    status = pytest.main(["-q", "--durations=15", "--ignore", about_the_table, str(HERE)], plugins=[outcomes])
    README.write_text(table(outcomes.counts))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
