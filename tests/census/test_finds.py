"""Finds in other people's code: each report has its program, quotes what it prints, and its fix is a patch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finds.patching import REPORTS, diff, patched
from helpers import ROOT, SOURCE

PROGRAMS = ROOT / "census" / "finds"
NAMES = sorted(path.stem for path in REPORTS.glob("*.md") if path.stem != "struck-out")
FIELDS = ["verdict", "seen in", "effect", "known", "program"]
VERDICTS = ("bug", "difference", "disputed")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# What depends on a trained model's matrix products. A CPU with other vectors adds them in another order, and where
# results are then rounded to bfloat16 or trained on, figures were seen to differ by up to 17 % (AVX-512 and AVX2).
TRAINED = re.compile("perplexity|accuracy|gradients? of")
OFF = 0.2


def report(name):
    return (REPORTS / f"{name}.md").read_text(encoding="utf-8")


def words(line):
    return NUMBER.sub("#", line) if TRAINED.search(line) else line


def numbers(line):
    return [float(number) for number in NUMBER.findall(line)] if TRAINED.search(line) else []


def quoted(text):
    return re.search(r"^```text\n(.*?)^```$", text, re.S | re.M)[1]


def test_there_are_reports():
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_report_says_what_who_and_how(name):
    text = report(name)
    table = dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", text, re.M))
    assert list(table) == FIELDS
    assert table["verdict"].startswith(VERDICTS)
    assert table["program"] == f"`python census/finds/{name}.py`"
    assert (PROGRAMS / f"{name}.py").exists()
    assert "## To paste\n" in text
    assert quoted(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_number_of_the_effect_is_one_that_the_program_prints(name):
    effect = re.search(r"^\| effect \| (.+) \|$", report(name), re.M)[1]
    printed = [float(each) for each in re.findall(r"\d+\.?\d*(?:e-?\d+)?", quoted(report(name)))]
    for each in re.findall(r"\d+\.\d+", effect):
        assert any(abs(float(each) - number) <= 0.5 * 10 ** -len(each.split(".")[1]) for number in printed), each


@pytest.mark.parametrize("name", [name for name in NAMES if "```diff" in report(name)])
def test_a_fix_is_a_patch_of_a_few_lines(name):
    changed = [line for hunks in diff(name).values() for line in hunks.splitlines() if line.startswith(("+", "-"))]
    assert 0 < len(changed) <= 40


def test_a_patch_must_fit():
    hunks = "@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    assert patched("a\nb\n", hunks) == "a\nc\n"
    with pytest.raises(AssertionError, match="0 places"):
        patched("a\nc\n", hunks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_what_its_report_quotes(name):
    # A Python whose environment has the peers; normkit's own has few of them.
    python = os.environ.get("NORMKIT_PEERS", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    program = [python, str(PROGRAMS / f"{name}.py")]
    run = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=Path.home(), check=False)
    if any(word in run.stderr for word in ("ModuleNotFoundError", "PackageNotFoundError", "NORMKIT_REAL_MODELS")):
        pytest.skip(run.stderr.splitlines()[-1])
    expected, printed = quoted(report(name)).splitlines(), run.stdout.splitlines()
    if printed and printed[0] != expected[0]:
        pytest.skip(f"the report is of {expected[0]}, here is {printed[0]}")
    assert [words(line) for line in printed] == [words(line) for line in expected], run.stderr
    assert [numbers(line) for line in printed] == [pytest.approx(numbers(line), rel=OFF) for line in expected]
