"""`normkit study`: published claims about normalization, rerun; a table, pages, and all numbers as JSON."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit.cli.options import json_option, out_option, quiet_option, resume_option
from normkit.cli.terminal import given_parameters, one_line, print_json, progress_of_tasks, results, shows_progress
from normkit.errors import InputError, LostRankError, NormkitError
from normkit.text import counted

if TYPE_CHECKING:
    from normkit.study.arm_context import Settings
    from normkit.study.catalogue import Budget
    from normkit.study.ranks import Ranks
    from normkit.study.result import Study, StudyResult
    from normkit.study.running import Progress
    from normkit.study.workers import Crew


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request to `normkit study`."""

    studies: tuple[tuple[Study, Settings], ...]
    """Each study with all of its settings."""
    out: Path
    """The folder that holds the folders of the studies."""
    resume: bool
    device: str
    dtype: str
    """The name of a torch dtype."""

    @property
    def seconds(self) -> dict[str, float]:
        """Expected computing time of each study, from the catalogue's figure for the seeds of the quick budget."""
        from normkit.study.catalogue import CATALOGUE

        return {
            study.name: CATALOGUE[study.name].seconds * float(str(settings["seeds"])) / float(str(study.quick["seeds"]))
            for study, settings in self.studies
        }


def requested(
    names: tuple[str, ...],
    budget: Budget,
    seeds: int | None,
    changed: tuple[str, ...],
    *,
    out: Path,
    resume: bool,
    device: str,
    dtype: str,
) -> Request:
    """Check a request completely, before any time is spent on it.

    Raises:
        InputError: If a study, a setting or the device is unknown, or the folder cannot be used.
    """
    from normkit.cli.reports import require_writable
    from normkit.study.catalogue import NAMES, assignments, load, settings_of

    studies = [load(name) for name in dict.fromkeys(names or NAMES)]
    texts = assignments(changed, studies)
    if seeds is not None:
        texts["seeds"] = str(seeds)
    chosen = tuple((study, settings_of(study, budget, texts)) for study in studies)

    from normkit.study.running import require_device
    from normkit.study.store import require_new

    require_writable(out)
    # Under torchrun each process gets its device later, and the first may already have begun to write.
    if not _is_one_of_many():
        require_device(device)
        for study in () if resume else studies:
            require_new(out / study.name)
    return Request(studies=chosen, out=out, resume=resume, device=device, dtype=dtype)


def _is_one_of_many() -> bool:
    return "WORLD_SIZE" in os.environ


def jobs_of(asked: int | None, threads: int, device: str) -> int:
    """How many arms are measured at a time.

    Args:
        asked: The value of --jobs, or None.
        threads: Threads of each arm.
        device: Its name in torch.

    Raises:
        InputError: If it is more than one under torchrun.
    """
    if _is_one_of_many():
        if asked not in (None, 1):
            raise InputError(f"--jobs {asked}: the processes of torchrun share every arm; leave --jobs out")
        return 1
    if asked is not None:
        return asked
    return 1 if device.startswith("cuda") else max(1, len(os.sched_getaffinity(0)) // threads)


_DTYPES = ("float32", "float64", "bfloat16")
# The first line keeps click from joining the others.
_EXAMPLES = """\b
normkit study warmup
normkit study --all --resume
normkit study depth --set width=512 --device cuda
torchrun --nproc-per-node 2 -m normkit study warmup"""

_NOT_RUN, _BUG, _INTERRUPTED = 2, 101, 130


@dataclass(kw_only=True)
class _Done:
    """The outcome of a command."""

    results: list[StudyResult] = field(default_factory=list)
    page: Path | None = None
    unwritten: str = ""
    is_bug: bool = False

    @property
    def troubled(self) -> list[str]:
        """Names of the studies that were not run, or not completely."""
        return [result.study.name for result in self.results if result.trouble]

    @property
    def code(self) -> int:
        """The exit code: 0 if everything was run, whatever the verdicts."""
        return _BUG if self.is_bug else _NOT_RUN if self.troubled or self.unwritten else 0

    def failure(self, error: Exception) -> str:
        """One line on why something failed; also records whether it is a bug of normkit."""
        from normkit.study.workers import in_a_line

        if os.environ.get("NORMKIT_TRACEBACK"):
            traceback.print_exception(error)
        self.is_bug |= not isinstance(error, NormkitError | OSError)
        return in_a_line(error)


def _names(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from normkit.study.catalogue import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


@click.command("study", short_help="Rerun published claims about norms, with numbers.", epilog=_EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=_names)
@click.option(
    "--list", "listed", is_flag=True, help="List the studies and how long each takes.  [default without NAME]"
)
@click.option("--all", "everything", is_flag=True, help="Run every study.")
@click.option(
    "--budget",
    type=click.Choice(["quick", "standard", "full"]),
    default="standard",
    show_default=True,
    help="quick: 3 seeds, indicative; standard: 10; full: larger, up to ten times as long.",
)
@out_option
@resume_option
@click.option(
    "--seeds", type=click.IntRange(min=1), metavar="N", help="Seeds per arm, paired.  [default: the budget's]"
)
@click.option("--first-seed", type=click.IntRange(min=0), metavar="N", default=0, help="The first of the seeds.")
@click.option(
    "--set", "changed", multiple=True, metavar="NAME=VALUE", help="Change a setting, such as steps=100; repeatable."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes, each of which runs one arm.  [default: one per core; 1 on CUDA and under torchrun]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads of each process; the last bits depend on it.",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="Run on this torch device: cpu, cuda, cuda:1."
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="float32",
    show_default=True,
    help="Compute in this dtype; bfloat16 is autocast.",
)
@json_option
@quiet_option
@click.pass_context
def run_studies(
    ctx: click.Context,
    names: tuple[str, ...],
    listed: bool,
    everything: bool,
    budget: Budget,
    out: Path,
    resume: bool,
    seeds: int | None,
    first_seed: int,
    changed: tuple[str, ...],
    jobs: int | None,
    threads: int,
    device: str,
    dtype: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure what papers claim about normalization: each claim has conditions fixed in advance, over paired seeds.

    Nothing is downloaded. The models are small and learn the source code of Python's standard library, the digits of
    scikit-learn, or tasks whose best loss is known. The results are in DIR/study/NAME. An interrupted study continues
    with --resume and ends with the same bytes in results.json. The verdicts do not change the exit code.
    """
    out = out / "study"
    if listed or not (names or everything):
        if any(parameter.name not in ("listed", "as_json", "quiet") for parameter in given_parameters(ctx)):
            raise click.UsageError("--list stands alone." if listed else "give NAMEs, or --all.", ctx)
        _print_list(as_json=as_json)
        return
    if names and everything:
        raise click.UsageError("give NAMEs or --all, not both.", ctx)
    request = requested(names, budget, seeds, changed, out=out, resume=resume, device=device, dtype=dtype)
    jobs = jobs_of(jobs, threads, device)

    from normkit.study.ranks import joined
    from normkit.study.workers import Crew

    speaks = int(os.environ.get("RANK", "0")) == 0
    try:
        with (
            joined(device) as ranks,
            Crew(jobs, threads) as crew,
            progress_of_tasks(request.seconds, shown=speaks and shows_progress(quiet=quiet or as_json)) as begin,
        ):
            done = _run(request, first_seed, crew, ranks, begin)
    except LostRankError as error:
        if speaks:
            click.echo(f"normkit: {one_line(str(error))}", err=True)
        # Threads of the backend still wait for the lost process; a normal exit could abort on them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_NOT_RUN)
    except KeyboardInterrupt:
        if speaks:
            click.echo(f"normkit: interrupted; finished arms are kept in {out}: --resume goes on from there", err=True)
        ctx.exit(_INTERRUPTED)
    if speaks:
        _print(done, out, as_json=as_json)
    ctx.exit(done.code)


def _run(request: Request, first_seed: int, crew: Crew, ranks: Ranks, begin: Callable[[str], Progress]) -> _Done:
    """Run every study; if there are several, one that fails does not stop the others."""
    import torch

    from normkit.study.report import write, write_index
    from normkit.study.running import not_run, run

    done = _Done()
    for study, settings in request.studies:
        try:
            result = run(
                study,
                settings,
                out=request.out,
                first_seed=first_seed,
                resume=request.resume,
                device=request.device,
                dtype=getattr(torch, request.dtype),
                progress=begin(study.name),
                crew=crew,
                ranks=ranks,
            )
        except Exception as error:
            # Processes that share their work would wait for this one.
            if len(request.studies) == 1 or ranks.size > 1:
                raise
            done.results.append(not_run(study, settings, done.failure(error)))
            continue
        done.results.append(result)
        if ranks.writes:
            _show(done, partial(write, result, request.out / study.name))
    if ranks.writes and len(request.studies) > 1:
        _show(done, partial(write_index, done.results, request.out))
    return done


def _show(done: _Done, write: Callable[[], Path]) -> None:
    """Write a page; if that fails, the numbers are still printed."""
    try:
        done.page = write()
    except Exception as error:
        done.unwritten = done.failure(error)


def _print_list(*, as_json: bool) -> None:
    from normkit.study.catalogue import CATALOGUE

    if as_json:
        listed = [{"name": name, "asks": entry.asks, "seconds": entry.seconds} for name, entry in CATALOGUE.items()]
        print_json({"schema_version": 1, "studies": listed})
        return
    for name, entry in CATALOGUE.items():
        click.echo(f"{name:<16}{entry.seconds:>4} s  {entry.asks}")
    cores = len(os.sched_getaffinity(0))
    seconds = sum(entry.seconds for entry in CATALOGUE.values()) / cores
    words = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    here = counted(cores, "core")
    click.echo(
        f"\nSeconds of one core, with --budget quick (3 seeds, indicative); all take {words} on the {here} here."
    )
    click.echo("Run: normkit study NAME ..., or normkit study --all, with ten seeds; --budget full takes longer.")


def _print(done: _Done, out: Path, *, as_json: bool) -> None:
    if as_json:
        studies = [result.to_json() for result in done.results]
        content: dict[str, Any] = {"schema_version": 1, "folder": str(out), "studies": studies}
        print_json(content)
    else:
        from normkit.study.report import summary

        console = results()
        console.print(summary(done.results))
        if done.page is not None and not done.unwritten:
            console.print(f"\npage: {done.page}", soft_wrap=True)
    if done.unwritten:
        click.echo(f"normkit: {one_line(done.unwritten)}", err=True)
    if done.troubled:
        click.echo(f"normkit: not run, or not all of it: {', '.join(done.troubled)}; --resume tries again", err=True)
