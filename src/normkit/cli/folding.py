"""`normkit fold`: a checkpoint in, an exactly folded one out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit.checkpoint.plan import OPERATIONS, Plan
from normkit.cli.terminal import progress, results, shell_word, shows_progress

if TYPE_CHECKING:
    from normkit.checkpoint.source import CheckpointSource

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

_HELP = """Fold the checkpoint in the folder SRC into the new folder DST, which loads in the stock class.

\b
gain    W (g * z) = (W diag(g)) z: gains go into the matrices that read them
bias    W b goes into their biases; where there are none, it stays as b / g
final   both, for the norm before the head; a tied head needs --untie
centre  what is added to a sum that only LayerNorms read loses its mean
rms     such LayerNorms become RMSNorms, with the same eps
value   the bias of values moves behind the attention

What would change the model's answers is not done, and named. The weights are streamed, so that memory does not
grow with them; DST appears when all is done. `normkit verify SRC DST` proves it from the files.
"""


def _bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A number of bytes, as in 1GB or 800MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", value.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"expected a size such as 1GB or 800MB, got {value!r}", ctx, parameter)
    return int(float(match[1]) * _UNITS[match[2]])


def _operations(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Names with commas between them, or all."""
    if value is None:
        return None
    given = tuple(name.strip() for name in value.split(",") if name.strip())
    if given == ("all",):
        return OPERATIONS
    if not given or not set(given) <= set(OPERATIONS):
        wrong = next((name for name in given if name not in OPERATIONS), value)
        expected = f"expected all, or some of {','.join(OPERATIONS)}, got {wrong!r}"
        raise click.BadParameter(expected, ctx, parameter)
    return given


@click.command("fold", help=_HELP, short_help="Fold the norms of a checkpoint into its matrices, with a certificate.")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="[DST]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--ops",
    callback=_operations,
    metavar="LIST",
    help="Some of gain,bias,final,centre,rms,value, or all.  [default: gain,bias,final]",
)
@click.option("--untie", is_flag=True, help="Give a tied head a table of its own.")
@click.option(
    "--dtype",
    type=click.Choice(["same", "float32"]),
    default="same",
    show_default=True,
    help="Of what is written.",
)
@click.option("--max-memory", callback=_bytes, metavar="SIZE", help="That the process may occupy, as in 1GB.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", default=2, show_default=True, help="Threads.")
@click.option("--resume", is_flag=True, help="Finish a fold that was interrupted.")
@click.option("--plan", "only_plan", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--for-training", is_flag=True, help="Refuse a model with dropout: it would train differently.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def fold_checkpoint(
    source: Path,
    destination: Path | None,
    ops: tuple[str, ...] | None,
    untie: bool,
    dtype: str,
    max_memory: int | None,
    threads: int,
    resume: bool,
    only_plan: bool,
    for_training: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fold a checkpoint, or say what folding would do."""
    asked: dict[str, Any] = {"operations": ops, "untie": untie, "dtype": dtype, "for_training": for_training}
    if only_plan:
        with _planned(source, asked) as (plan, checkpoint):
            if as_json:
                _print_json({"schema_version": 1, **plan.to_json()})
                return
            from normkit.checkpoint.writing import memory_needed

            _print_plan(plan, checkpoint, memory_needed(plan, checkpoint, threads))
        return
    if destination is None:
        raise click.UsageError("Missing argument 'DST', the folder to write; --plan needs none.")
    from normkit.checkpoint.folding import fold

    with progress(shown=shows_progress(quiet=quiet or as_json)) as report:
        certificate = fold(
            source, destination, max_memory=max_memory, threads=threads, resume=resume, progress=report, **asked
        )
    if as_json:
        _print_json(certificate.to_json())
        return
    with _planned(source, asked) as (plan, checkpoint):
        _print_plan(plan, checkpoint)
    folders = shell_word(source), shell_word(destination)
    results().print(f"\nfolded: {folders[1]}\nproof:  normkit verify {' '.join(folders)}", soft_wrap=True)


@contextmanager
def _planned(source: Path, asked: dict[str, Any]) -> Iterator[tuple[Plan, CheckpointSource]]:
    """The plan of a checkpoint, and its tensors."""
    from normkit.checkpoint.carrying import code
    from normkit.checkpoint.opening import open_checkpoint
    from normkit.checkpoint.planning import make_plan

    with open_checkpoint(source) as opened:
        names = code(opened.states)
        yield make_plan(opened.graph, opened.config, opened.source, code=names, **asked), opened.source


def _print_plan(plan: Plan, source: CheckpointSource, memory: int | None = None) -> None:
    from normkit.report.folding import plan_summary

    results().print(plan_summary(plan, source.tensors, memory))


def _print_json(document: dict[str, object]) -> None:
    from normkit.files import json_text

    click.echo(json_text(document), nl=False)
