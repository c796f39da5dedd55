"""The code blocks of a Markdown page, run as the page shows them.

- ```` ```python ````: runs; what it prints is in its lines that begin with `# `. The blocks of a page share names.
- ```` ```console ````: each `$ command` runs in the page's folder and prints what follows it. A line `...` stands for
  any lines, and ` ...` at the end of a line for its rest.
- a block of any language under a line of the form `` `name.py`: ``: is a file of that name, and is not run.
- any other block is only shown. In `sh` blocks the `normkit` commands are parsed, so that every option exists.

    python tests/page_blocks.py PAGE...   # write into each page what its commands print now
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from click.testing import CliRunner

from normkit.cli.entry import verbs

BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What a shell has a meaning for: such a command needs one.
SHELL = re.compile(r"[|><;&$*`\n]")
PRELUDE = """
python() { "$PYTHON" "$@"; }
normkit() { python -m normkit "$@"; }
pytest() { python -m pytest -p no:cacheprovider "$@"; }
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block, its language, the file that it is or "", and the span of its text in the page."""

    language: str
    file: str
    text: str
    start: int

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console block with the output below it."""
        parts = re.split(r"^\$ (.*(?:\\\n.*)*)\n", self.text, flags=re.MULTILINE)
        return list(zip(parts[1::2], parts[2::2], strict=True))


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order."""
    return [
        Block(language=found[2], file=found[1] or "", text=found[3], start=found.start(3))
        for found in BLOCK.finditer(page)
    ]


def run_page(path: Path) -> Iterator[tuple[Block, str, str]]:
    """Run a page in the current folder; each Python block and command with what the page shows and what it printed."""
    page = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    code = 0
    for block in blocks(page):
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            expected = [line.removeprefix("# ") for line in block.text.splitlines() if line.startswith("# ")]
            line = page.count("\n", 0, block.start)
            yield block, "\n".join(expected), _python("\n" * line + block.text, path.name, names)
        elif block.language == "console":
            for command, expected in block.commands:
                code, printed = _command(command, code)
                yield replace(block, text=command), expected, printed


def matches(expected: str, printed: str) -> bool:
    """Whether lines are those that were expected, but for times and what `...` leaves out."""
    pattern = ""
    for line in without_times(expected).splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += re.escape(line.removesuffix(" ...")) + (r" .*\n" if line.endswith(" ...") else r"\n")
    lines = "".join(f"{line.rstrip()}\n" for line in without_times(printed).splitlines())
    return re.fullmatch(pattern, lines.rstrip("\n") + "\n" if lines.strip() else "") is not None


def without_times(text: str) -> str:
    """No spaces at ends of lines, and no durations."""
    return re.sub(r"\b(in|after) \d+(\.\d+)? ?s\b", r"\1 a while", re.sub(r" +$", "", text, flags=re.MULTILINE))


def _python(code: str, name: str, names: dict[str, Any]) -> str:
    printed, threads = io.StringIO(), torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), names)
    finally:
        torch.set_num_threads(threads)
    return printed.getvalue().rstrip("\n")


def _command(command: str, code: int) -> tuple[int, str]:
    """Exit code and output of a command; `code` is that of the command before."""
    line, _, file = command.partition(" > ")
    if line.startswith("normkit ") and not SHELL.search(line + file):
        done = CliRunner().invoke(verbs, shlex.split(line)[1:], prog_name="normkit", env={"COLUMNS": None})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if file:
            Path(file).write_text(done.stdout, encoding="utf-8")
        return done.exit_code, done.stderr if file else done.output
    # On a build server pytest shortens nothing, and elsewhere to the width of the terminal.
    surroundings = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    shell = subprocess.run(
        ["bash", "-c", f"{PRELUDE}(exit {code})\n{command}"],
        env=surroundings | {"PYTHON": sys.executable, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return shell.returncode, shell.stdout


def shown_commands(page: str) -> list[list[str]]:
    """The words of every `normkit` command in the `sh` and `console` blocks of a page."""
    text = "".join(block.text for block in blocks(page) if block.language in ("sh", "console"))
    lines = [line.removeprefix("$ ").partition(" > ")[0] for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("normkit ")]


def parse(words: list[str]) -> None:
    """Refuse a command whose verb or options do not exist."""
    verb = verbs.get_command(click.Context(verbs), words[1])
    assert verb is not None, words
    verb.make_parser(click.Context(verb)).parse_args(words[2:])


def _rewrite(path: Path) -> None:
    """Write what the commands of a page print now, where it is something else."""
    page, place = path.read_text(encoding="utf-8"), 0
    for block, expected, printed in run_page(path):
        shown = f"$ {block.text}\n" if block.language == "console" else block.text
        place = page.index(shown, place) + len(shown)
        if block.language == "console" and not matches(expected, printed):
            plain = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
            page = page[:place] + plain + page[place + len(expected) :]
            place += len(plain)
        elif not matches(expected, printed):
            sys.stderr.write(f"{path}: {block.text}\n-- prints --\n{printed}\n\n")
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
            _rewrite(Path(os.environ["PWD"], name))
