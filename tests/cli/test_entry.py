"""The command as a whole: help, what it imports, and an exit code for each kind of end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

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


def test_help_lists_the_verbs_in_their_groups() -> None:
    shown = CliRunner().invoke(verbs, ["--help"], prog_name="normkit")
    assert shown.exit_code == 0
    assert "See:\n  inspect  " in shown.output
    assert "\n  rule     " in shown.output
    assert "\n  explore  " in shown.output
    assert "\n  study    " in shown.output
    assert "\n  figures  " in shown.output
    assert "Check:\n  identify  " in shown.output
    assert "This machine:\n  env  " in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["-h"],
        ["inspect", "-h"],
        ["rule", "-h"],
        ["identify", "-h"],
        ["explore", "-h"],
        ["study", "-h"],
        ["figures", "-h"],
        ["env", "-h"],
    ],
)
def test_every_verb_has_help_that_fits_a_terminal(arguments: list[str]) -> None:
    shown = CliRunner().invoke(verbs, arguments, prog_name="normkit")
    assert shown.exit_code == 0
    assert shown.output.startswith("Usage: normkit")
    assert max(map(len, shown.output.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", "--help"],
        ["rule", "--help"],
        ["identify", "--help"],
        ["explore", "--help"],
        ["study", "--help"],
        ["figures", "--help"],
        ["--version"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    listing = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    done = normkit(*arguments, before=listing)
    loaded = set(done.stderr.split())
    assert done.returncode == 0
    assert "click" in loaded
    assert not HEAVY & loaded


@pytest.mark.slow
def test_that_test_would_see_a_heavy_import() -> None:
    listing = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\nimport numpy"
    assert "numpy" in normkit("--help", before=listing).stderr.split()


@pytest.mark.slow
def test_help_is_immediate() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        normkit("--help")
        return time.perf_counter() - start

    # 0.07 s on an idle machine; importing torch alone takes more than a second.
    assert min(seconds() for _ in range(5)) < 0.6


def test_version() -> None:
    done = normkit("--version")
    assert done.stdout.startswith("normkit 0.")


def test_python_m_normkit_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "normkit", "-h"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: normkit ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspct"], "Did you mean 'inspect'"),
        (["inspect", "--no-such-option"], "No such option"),
        (["inspect", "--fail-on", "fatal"], "'fatal' is not one of"),
        (["inspect", "--max-tokens", "none"], "'none' is not a valid integer"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    done = normkit(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_bad_input_is_one_line_and_exits_with_2() -> None:
    listing = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))"
    done = normkit("inspect", "./no/such/model", before=listing)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("normkit: expected a model directory")
    assert done.stderr.count("\n") == 1


def test_a_bug_is_one_line_and_exits_with_101() -> None:
    done = normkit("env", before=FAILING.format("raise RuntimeError('two\\nlines')"))
    assert (done.returncode, done.stdout) == (101, "")
    assert (
        done.stderr == "normkit: this is a bug of normkit: RuntimeError: two lines; NORMKIT_TRACEBACK=1 shows where\n"
    )


def test_the_traceback_is_shown_where_asked_for() -> None:
    done = normkit("env", before=FAILING.format("raise RuntimeError('x')"), NORMKIT_TRACEBACK="1")
    assert done.returncode == 101
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("normkit: this is a bug of normkit: RuntimeError: x\n")


def test_an_interrupt_exits_with_130() -> None:
    done = normkit("env", before=FAILING.format("import os, signal; os.kill(os.getpid(), signal.SIGINT)"))
    assert (done.returncode, done.stderr) == (130, "normkit: interrupted\n")


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


def test_an_error_of_the_system_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(environment, "_environment", fail)
    shown = CliRunner().invoke(verbs, ["env"])
    assert (shown.exit_code, shown.stderr) == (2, "normkit: report.html: No space left on device\n")


def test_a_message_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise InputError("\x1b[31mred\r\nnext\u202e")

    monkeypatch.setattr(environment, "_environment", fail)
    shown = CliRunner().invoke(verbs, ["env"])
    assert (shown.exit_code, shown.stderr) == (2, "normkit:  [31mred  next \n")
