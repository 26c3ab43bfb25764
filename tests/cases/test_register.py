"""The register is complete: every case has its test, every test named elsewhere exists, and README.md lists them."""

import re
import subprocess
import sys
from collections import Counter

import pytest
from register import CASES, COVERED_ELSEWHERE, HERE, KINDS, ROOT, case_of, case_tests, functions_of


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_one_test_or_is_covered_elsewhere(case):
    tests = case_tests()[case]
    assert len(tests) == 1 or (not tests and case in COVERED_ELSEWHERE)
    assert CASES[case].kind in KINDS


@pytest.mark.parametrize(("case", "where"), COVERED_ELSEWHERE.items())
def test_tests_named_elsewhere_exist(case, where):
    file, function = where.split("::")
    assert case in CASES and function in functions_of(ROOT / file)


def test_the_readme_lists_every_case_and_its_test():
    rows = re.findall(r"^\| ([A-Z]\d+) \|(.*)\|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(CASES)
    for name, cells in rows:
        case = CASES[name]
        for part in (case.title, case.reports, f" {case.kind} ", *case_tests()[name], COVERED_ELSEWHERE.get(name, "")):
            assert part in cells, f"{name}: run python tests/cases/report.py"


def test_the_readme_counts_the_tests_of_every_case():
    """None of which failed when it was written."""
    command = [sys.executable, "-m", "pytest", "--collect-only", str(HERE), "--ignore", __file__]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    found = Counter(case_of(name) for name in re.findall(r"::(test_\w+)", listed))
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]+) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    for name, result in rows:
        counted = sum(int(number) for number in re.findall(r"(\d+) (?:passed|skipped|known gap)", result))
        assert "failed" not in result and counted == found[name], f"{name}: run python tests/cases/report.py"
