"""The command as a whole: help, what it imports, and an exit code for each kind of end."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from normkit.cli import environment
from normkit.cli.entry import verbs
from normkit.errors import InputError

HEAVY = {"torch", "numpy", "transformers", "rich", "jinja2", "matplotlib", "safetensors"}


def normkit(*arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `normkit` in a process of its own, after some Python if `before` is given."""
    program = f"{before}\nfrom normkit.cli.entry import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        timeout=120,
        check=False,
    )


FAILING = "import normkit.cli.environment as e\ndef fail(): {}\ne._environment = fail"


def test_help_lists_every_verb_in_its_group() -> None:
    shown = CliRunner().invoke(verbs, ["--help"], prog_name="normkit")
    assert shown.exit_code == 0
    groups = re.findall(r"^(\S[\w ]+):\n((?:  \w.*\n|   +.*\n)+)", shown.output, re.MULTILINE)
    found = {heading: re.findall(r"^  (\w+)", body, re.MULTILINE) for heading, body in groups}
    assert found == {
        "See": ["inspect", "rule", "explore", "study", "figures"],
        "Check": ["compare", "identify", "record", "verify"],
        "Change": ["fold"],
        "This machine": ["env", "bench", "completion"],
    }
    assert sum(map(len, found.values())) == len(verbs.commands)


@pytest.mark.parametrize("verb", verbs.commands)
def test_every_verb_has_help_that_fits_a_terminal(verb: str) -> None:
    shown = CliRunner().invoke(verbs, [verb, "-h"], prog_name="normkit")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: normkit {verb}")
    assert max(map(len, shown.output.splitlines())) <= 100


def test_one_spelling_is_one_option_everywhere() -> None:
    """An option of several verbs has one type, one default and one meaning; where not, the reason is here."""
    different = {
        "--dtype": "that of a model, of a fold, of a study and of a timing",
        "--format": "of printed text and of figures",
        "--max-tokens": "a comparison needs a few rows of each norm",
        "--device": "a study takes any of torch's, bench measures two",
        "--threads": "a study and bench have defaults of their own",
    }
    options: dict[str, set[tuple[object, ...]]] = {}
    for command in verbs.commands.values():
        for option in command.params:
            if isinstance(option, click.Option):
                said = (repr(option.type), repr(option.default), option.multiple, option.is_flag, option.help)
                options.setdefault(option.opts[0], set()).add(said)
    assert {name for name, meanings in options.items() if len(meanings) > 1} == different.keys()
    # Everything is written below one folder; every verb that tells something tells it as JSON.
    named = {name: {each.name: each for each in verb.params} for name, verb in verbs.commands.items()}
    assert {each["out"].default for each in named.values() if "out" in each} == {Path("normkit-out")}
    assert {name for name, each in named.items() if "as_json" not in each} == {"completion", "record"}


EVERY_HELP = """
import sys
from click.testing import CliRunner
from normkit.cli.entry import verbs
for arguments in ["--help"], ["--version"], *([verb, "--help"] for verb in verbs.commands):
    done = CliRunner().invoke(verbs, arguments)
    print(*arguments, done.exit_code, *sys.modules)
"""


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(verbs.commands)
    for line in lines:
        assert " 0 sys " in line
        assert "click" in line.split()
        assert not HEAVY & set(line.split()), line.partition(" 0 ")[0]


@pytest.mark.slow
def test_that_test_would_see_a_heavy_import_and_python_m_normkit_is_the_same_command() -> None:
    listing = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\nimport numpy"
    done = normkit("--version", before=listing)
    assert "numpy" in done.stderr.split()
    assert done.stdout.startswith("normkit 0.")
    done = subprocess.run([sys.executable, "-m", "normkit", "-h"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: normkit ")


@pytest.mark.slow
def test_help_is_immediate() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        normkit("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # 0.07 s of a processor; importing torch alone takes more than a second.
    assert min(seconds() for _ in range(2)) < 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inpsect"], "normkit: no command is called 'inpsect'; did you mean inspect?\n"),
        (["wathc"], "normkit: no command is called 'wathc'; did you mean watch?\n"),
        (["xyzzy"], "normkit: no command is called 'xyzzy'; `normkit --help` lists them\n"),
        (["watch", "--help"], "normkit: watch is no command, it works in Python: nk.watch(model, optimizer)"),
        (["inspect", "--no-such-option"], "No such option"),
        (["inspect", "--no-repotr"], "Did you mean '--no-report'"),
        (["inspect", "--fail-on", "fatal"], "'fatal' is not one of"),
        (["inspect", "--max-tokens", "none"], "'none' is not a valid integer"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(verbs, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.slow
def test_bad_input_is_one_line_and_exits_with_2() -> None:
    listing = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))"
    done = normkit("inspect", "./no/such/model", before=listing)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("normkit: expected a model directory")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_bug_is_one_line_and_exits_with_101_and_an_interrupt_with_130() -> None:
    done = normkit("env", before=FAILING.format("raise RuntimeError('two\\nlines')"))
    told = "normkit: this is a bug of normkit: RuntimeError: two lines"
    assert (done.returncode, done.stdout) == (101, "")
    assert done.stderr == f"{told}; NORMKIT_TRACEBACK=1 shows where\n"
    done = normkit("env", before=FAILING.format("raise RuntimeError('two\\nlines')"), NORMKIT_TRACEBACK="1")
    assert done.returncode == 101
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith(f"{told}\n")
    done = normkit("env", before=FAILING.format("import os, signal; os.kill(os.getpid(), signal.SIGINT)"))
    assert (done.returncode, done.stderr) == (130, "normkit: interrupted\n")


@pytest.mark.slow
def test_a_stream_that_has_no_sign_for_plus_or_minus_gets_a_question_mark() -> None:
    done = normkit("rule", "B2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert re.search(r"1 \? [\d.]+ more than it starts with", " ".join(done.stdout.split()))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "normkit", "env"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        # An error of the system is no bug; a message cannot steer the terminal.
        (OSError(28, "No space left on device", "report.html"), "report.html: No space left on device"),
        (InputError("\x1b[31mred\r\nnext\u202e"), " [31mred  next "),
    ],
)
def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(environment, "_environment", fail)
    shown = CliRunner().invoke(verbs, ["env"])
    assert (shown.exit_code, shown.stderr) == (2, f"normkit: {line}\n")
