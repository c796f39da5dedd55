"""The command itself: its verbs in their groups, and how each exception ends.

Exit codes: 0 done, 1 findings, 2 usage or input, 101 a bug of normkit, 130 interrupted. Nothing heavy
is imported before a verb runs, so that `--help` is immediate.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from normkit.cli.benchmark import run_benchmark
from normkit.cli.comparison import compare_with_reference
from normkit.cli.completion import print_completion
from normkit.cli.environment import show_environment
from normkit.cli.exploration import explore_norms
from normkit.cli.figures import make_figures
from normkit.cli.folding import fold_checkpoint
from normkit.cli.identification import identify_norms
from normkit.cli.inspection import inspect_model
from normkit.cli.recording import write_recorder
from normkit.cli.rules import explain_rule
from normkit.cli.study import run_studies
from normkit.cli.terminal import one_line
from normkit.cli.verification import verify_fold
from normkit.errors import InputError, NormkitError
from normkit.text import own_version

_GROUPS = {
    "See": ("inspect", "rule", "explore", "study", "figures"),
    "Check": ("compare", "identify", "record", "verify"),
    "Change": ("fold",),
    "This machine": ("env", "bench", "completion"),
}

# The first line keeps click from joining the others.
_EPILOG = """\b
MODEL is a model's folder or a file in it, else a Hub id such as org/name.
Everything is written below normkit-out, or below the folder after --out.
Exit codes: 0 done, 1 findings or a failed proof, 2 wrong usage or input,
101 a bug of normkit. Tab completion: normkit completion --help."""

# What people type here that takes a model in memory.
_IN_PYTHON = {
    "watch": "nk.watch(model, optimizer), around a training loop; normkit inspect MODEL --train-step takes one step",
    "convert": "nk.convert(model); normkit fold writes a checkpoint",
}
_USAGE, _BUG, _INTERRUPTED, _BROKEN_PIPE = 2, 101, 130, 141


class _Verbs(click.Group):
    """A group that lists its verbs under headings and gives every failure one line and its exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs, one section per group."""
        for heading, names in _GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, verb.get_short_help_str(limit=80)) for name, verb in found if verb])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the verb, and say of what works in Python alone that it does."""
        if args and args[0] in _IN_PYTHON:
            raise InputError(f"{args[0]} is no command, it works in Python: {_IN_PYTHON[args[0]]}")
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = get_close_matches(args[0], [*self.commands, *_IN_PYTHON], 1)
            advice = f"did you mean {near[0]}?" if near else "`normkit --help` lists them"
            raise InputError(f"no command is called {args[0]!r}; {advice}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except NormkitError as error:
            _fail(ctx, str(error), _USAGE)
        except BrokenPipeError:
            # The reader has closed the pipe, so what Python flushes at exit must go elsewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_BROKEN_PIPE)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", _INTERRUPTED)
        except OSError as error:
            _fail(ctx, f"{error.filename or 'system'}: {error.strerror or error}", _USAGE)
        except Exception as error:
            advice = "" if _wants_traceback() else "; NORMKIT_TRACEBACK=1 shows where"
            _fail(ctx, f"this is a bug of normkit: {type(error).__name__}: {error}{advice}", _BUG)
        return result


def _fail(ctx: click.Context, message: str, code: int) -> NoReturn:
    if _wants_traceback():
        traceback.print_exc()
    click.echo(f"normkit: {one_line(message)}", err=True)
    ctx.exit(code)


def _wants_traceback() -> bool:
    return bool(os.environ.get("NORMKIT_TRACEBACK"))


def _show_version(ctx: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"{ctx.command_path} {own_version()}")
        ctx.exit()


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def verbs() -> None:
    """Show what each normalization layer of a model does to its vectors, and say when it is wrong.

    Start with `normkit inspect`: it needs no model.
    """


verbs.add_command(inspect_model)
verbs.add_command(explain_rule)
verbs.add_command(explore_norms)
verbs.add_command(run_studies)
verbs.add_command(make_figures)
verbs.add_command(compare_with_reference)
verbs.add_command(identify_norms)
verbs.add_command(write_recorder)
verbs.add_command(verify_fold)
verbs.add_command(fold_checkpoint)
verbs.add_command(show_environment)
verbs.add_command(run_benchmark)
verbs.add_command(print_completion)


def main() -> None:
    """Run the command line; `normkit` in a shell."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character shows a replacement instead of failing.
            stream.reconfigure(errors="replace")
    # Imported packages make a million objects that stay; Python's own 700 objects between two searches for unreachable
    # ones make the imports of a verb take a quarter longer.
    gc.set_threshold(100_000)
    verbs(prog_name="normkit")
