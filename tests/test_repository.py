"""The files around the package agree with it: GitHub's, CITATION.cff, pyproject.toml, the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from helpers import ROOT
from normkit.cli.entry import verbs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ACTION, CITATION, HOOKS, CI = "action.yml", "CITATION.cff", ".pre-commit-config.yaml", ".github/workflows/ci.yml"
FORMS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def scripts(steps: list[dict[str, Any]]) -> list[str]:
    return [step["run"] for step in steps if "run" in step]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(verb, its options) of each call of normkit in a text."""
    found = [(verb, rest) for verb, rest in re.findall(r"normkit\"? (\w+)\b([^|\n`]*)", text) if verb in verbs.commands]
    return [(verb, re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) for verb, rest in found]


def test_every_option_that_the_files_name_exists() -> None:
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in (ACTION, CI, *FORMS, "SECURITY.md"))
    action = next(script for script in scripts(read(ACTION)["runs"]["steps"]) if "inspect" in script)
    given = [*commands(text), ("inspect", re.findall(r"(?<![\w-])--[a-z][\w-]+", action))]
    assert {verb for verb, _ in given} == {"env", "inspect", "fold"}
    for verb, options in given:
        known = {option for parameter in verbs.commands[verb].params for option in parameter.opts}
        assert set(options) <= known, verb


def test_every_form_asks_for_the_environment() -> None:
    assert len(FORMS) == 2
    for name in FORMS:
        form = read(name)
        fields = {field["id"]: field for field in form["body"]}
        assert fields["environment"]["attributes"]["label"] == "normkit env --json"
        assert all(field["validations"]["required"] for field in fields.values())


def test_the_citation_and_the_hooks() -> None:
    assert read(CITATION)["version"] == PROJECT["project"]["version"]
    assert read(CITATION)["repository-code"] == PROJECT["project"]["urls"]["Repository"]
    assert {hook["entry"].split()[0] for repo in read(HOOKS)["repos"] for hook in repo["hooks"]} == {".venv/bin/ruff"}


def test_the_workflow_runs_what_the_package_promises() -> None:
    jobs = read(CI)["jobs"]
    matrix = jobs["installed"]["strategy"]["matrix"]
    classified = [name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if ":: 3." in name]
    assert matrix["python"] == classified
    (torch,) = [name for name in PROJECT["project"]["dependencies"] if name.startswith("torch")]
    assert matrix["torch"] == ["==2.10.*", torch.removeprefix("torch")]
    for script in (script for job in jobs.values() for script in scripts(job["steps"])):
        for path in re.findall(r"(?:^|\s)((?:tests|\.ci)/[\w/.]+)", script):
            assert (ROOT / path).exists(), path
    for needed in (need for job in jobs.values() for need in [job.get("needs", "whole")]):
        assert needed in jobs


def test_what_the_makefile_installs_is_declared_and_the_oldest_transformers_is_the_one_that_is_taken() -> None:
    assert set(re.findall(r"--group (\w+)", MAKEFILE)) == PROJECT["dependency-groups"].keys()
    assert set(re.findall(r"normkit\[(\w+)", MAKEFILE)) <= PROJECT["project"]["optional-dependencies"].keys()
    (bound,) = re.findall(r"transformers>=(\d+\.\d+)", " ".join(PROJECT["project"]["dependencies"]))
    assert f"transformers=={bound}." in MAKEFILE


STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$ARGUMENTS"
echo "| rule | finding |"
exit "$CODE"
"""


@pytest.mark.parametrize(("code", "intent"), [(0, ""), (1, "intent file.json")])
def test_the_action_hands_on_its_inputs_and_the_exit_code(code: int, intent: str, tmp_path: Path) -> None:
    action = read(ACTION)
    script = next(step for step in action["runs"]["steps"] if step.get("name") == "Inspect")
    values = {"model": "a model", "fail-on": "warning", "text": "", "intent": intent, "report": "out", "package": ""}
    assert values.keys() == action["inputs"].keys()
    given = {name: values[value.split("inputs.")[1].rstrip(" }")] for name, value in script["env"].items()}
    program = tmp_path / "normkit/bin/normkit"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "intent file.json").touch()
    places = {"RUNNER_TEMP": tmp_path, "GITHUB_STEP_SUMMARY": tmp_path / "summary", "ARGUMENTS": tmp_path / "arguments"}
    environment = {**os.environ, **given, **{name: str(path) for name, path in places.items()}, "CODE": str(code)}
    # As GitHub calls it.
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script["run"]]
    done = subprocess.run(shell, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "summary").read_text() == done.stdout == "| rule | finding |\n"
    arguments = (tmp_path / "arguments").read_text().splitlines()
    context = verbs.commands["inspect"].make_context("inspect", arguments[1:])
    assert isinstance(context, click.Context)
    assert (context.params["model"], context.params["fail_on"]) == ("a model", "warning")
    assert (str(context.params["intent"] or ""), str(context.params["out"])) == (intent, "out")


def test_the_action_refuses_an_intent_file_that_is_not_there(tmp_path: Path) -> None:
    script = next(step["run"] for step in read(ACTION)["runs"]["steps"] if step.get("name") == "Inspect")
    given = {"INTENT": "none.json", "MODEL": "m", "FAIL_ON": "error", "TEXT": "", "REPORT": "out", "RUNNER_TEMP": "."}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], env=given, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "::error::there is no intent file none.json\n")
