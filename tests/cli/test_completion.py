"""`normkit completion`: the scripts, and what a real bash makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from normkit.cli.entry import verbs

# What bash does at a Tab: the words of the line and the place of the last one, then the function of the script.
_TAB = """
set -e
source {script}
COMP_WORDS=({words}) COMP_CWORD={place}
_normkit_completion normkit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(*words: str) -> list[str]:
    """What a shell is offered for the last word."""
    found = ShellComplete(verbs, {}, "normkit", "_NORMKIT_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value if item.type == "plain" else item.type for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ins",), ["inspect"]),
        (("inspect", "--no"), ["--no-report"]),
        (("inspect", "--fail-on", ""), ["error", "warning", "note", "never"]),
        (("inspect", ""), ["file"]),
        (("inspect", "--out", ""), ["dir"]),
        (("fold", ""), ["file"]),
        (("rec",), ["record"]),
        (("record", "--template", ""), ["file"]),
        (("study", "w"), ["warmup"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
    ],
)
def test_verbs_options_choices_names_and_paths_are_offered(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_whole(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(verbs, ["completion", shell], prog_name="normkit")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"_NORMKIT_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        # -n: read it, run nothing.
        subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_verb(tmp_path: Path) -> None:
    command = tmp_path / "normkit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m normkit "$@"\n')
    command.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(verbs, ["completion", "bash"], prog_name="normkit").stdout)
    tab = _TAB.format(script=script, words="normkit id", place=1)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", tab], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("identify\n", "")
