"""`normkit identify`: the passports of a model's norms, and the comparison of a model with its reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit.cli import options, terminal
from normkit.errors import InputError, NormkitError

if TYPE_CHECKING:
    from normkit.checkpoint.loading import LoadedModel
    from normkit.cli.texts import Batches
    from normkit.comparison.differences import Comparison
    from normkit.comparison.recording import Recording
    from normkit.identification.book import PassportBook

_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")
# Enough tokens that every norm is called.
_TOKENS = 16
# The options that only a run on a text needs.
_WITH_AGAINST = {"text", "max_tokens", "seq_length", "batch_size"}
# The options that work with the shipped models.
_WITHOUT_MODEL = {"model", "out", "no_report", "as_json", "quiet"}


@click.command("identify", short_help="Find what each norm really computes; compare a port with its reference.")
@options.model_argument("model", "[MODEL]", required=False)
@click.option(
    "--against", metavar="MODEL", help="Compare with this reference: another model, or a passports.json of one."
)
@options.site_option
@options.run_options
@options.out_option
@options.no_report_option
@options.json_option
@options.source_options
@options.quiet_option
@click.pass_context
def identify_norms(
    ctx: click.Context,
    model: str | None,
    against: str | None,
    site: str | None,
    text: str | None,
    max_tokens: int,
    seq_length: int | None,
    batch_size: int,
    dtype: str,
    out: Path,
    no_report: bool,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Find out what every norm of MODEL computes and write it down; or compare MODEL with its reference.

    Norms are found by calling copies of them on chosen inputs, not by their names. MODEL is a folder with a
    transformers model, a config.json or model.safetensors in one, or else a Hub id such as org/name[@revision]; code
    that comes with a model is never run. The result is DIR/NAME/passports.json. Without MODEL, the two small models
    that ship. A recording, as normkit.record(model) or any other runtime writes it, is identified from its rows alone.

    With --against, norms are paired by path, or by order where the paths differ. The result says which conventions
    differ, how much that changes the rows that arrive there, and where the first difference appears when both models
    run on one text; it is DIR/NAME/comparison.json. A passports.json cannot be run: only formulas are compared. Exit
    code 1 if anything differs.
    """
    shown = terminal.shows_progress(quiet=quiet or as_json)
    if model is None:
        terminal.refuse_options_but(ctx, _WITHOUT_MODEL)
        _show(None if no_report else out, as_json=as_json, shown=shown)
        return
    if against is None:
        for parameter in terminal.given_parameters(ctx):
            if parameter.name in _WITH_AGAINST:
                raise click.UsageError(f"{parameter.opts[0]} needs --against: formulas alone need no text.", ctx)
    _refuse_passports(model)
    if Path(model).suffix == ".safetensors" and against is None:
        from normkit.comparison.recording import opened

        if Path(model).is_file() and (recording := opened(model)) is not None:
            _identify_recording(recording, Path(model), None if no_report else out, site, as_json=as_json)
            return
    from normkit.cli.reports import output_folder
    from normkit.cli.texts import batches_for, load, read_text
    from normkit.files import json_text, write_text

    words = None if text is None else read_text(text, max_tokens)
    # Read before the model is, so that a wrong path of the reference is reported at once.
    book = None if against is None else _passports(against)
    loaded = load(model, dtype=dtype, revision=revision, local_files_only=local_files_only, shown=shown)
    folder = None if no_report else output_folder(out, loaded.name, source=loaded.path)
    other = None
    if against is not None and book is None:
        other = load(against, dtype=dtype, local_files_only=local_files_only, shown=shown)
        if folder is not None:
            output_folder(out, loaded.name, source=other.path)
    for each in (loaded, other):
        for remark in () if quiet or each is None else each.notes:
            terminal.note(remark)
    if against is None:
        found = _survey(loaded, site, shown=shown)
        if as_json:
            terminal.print_json(found.to_json())
        _give_passports(found, folder, as_json=as_json)
        return
    batches = batches_for(loaded, text, words, length=seq_length, max_tokens=max_tokens, batch_size=batch_size)
    reference = other.name if other else book.model if book else ""
    # Their own names, or if these are equal those that the user gave.
    names = (loaded.name, reference) if loaded.name != reference else (model, against)
    comparison = _compare(loaded, other.model if other else book, batches, names, site, shown=shown)
    if as_json:
        terminal.print_json(comparison.to_json())
    else:
        from normkit.comparison.report import describe_comparison
        from normkit.show.terminal import section

        terminal.results().print(section(describe_comparison(comparison), most=16))
    if folder is not None:
        path = write_text(folder / "comparison.json", json_text(comparison.to_json()))
        _say_where("comparison", path, as_json=as_json)
    if comparison.differs:
        ctx.exit(1)


def _identify_recording(recording: Recording, path: Path, out: Path | None, site: str | None, *, as_json: bool) -> None:
    """Identify the norms of a recording from their rows."""
    from normkit.cli.reports import output_folder

    folder = None if out is None else output_folder(out, path.stem, source=path)
    found = recording.book.only(site)
    if as_json:
        terminal.print_json(found.to_json())
    _give_passports(found, folder, as_json=as_json)


def _show(out: Path | None, *, as_json: bool, shown: bool) -> None:
    """Identify the shipped models."""
    from normkit import demo
    from normkit.checkpoint.loading import load_model
    from normkit.cli.reports import output_folder

    twins = [load_model(str(demo.directory(name))) for name in ("layernorm", "rmsnorm")]
    folders = [None if out is None else output_folder(out, twin.name, source=twin.path) for twin in twins]
    books = [_survey(twin, None, shown=shown) for twin in twins]
    if as_json:
        terminal.print_json({"schema_version": 1, "models": [book.to_json() for book in books]})
    for book, folder in zip(books, folders, strict=True):
        _give_passports(book, folder, as_json=as_json)
        click.echo("", nl=not as_json)


def _refuse_passports(model: str) -> None:
    """Refuse a file of passports as first argument, with the option it belongs to."""
    path = Path(model)
    if path.suffix != ".json" or path.name in _OF_A_MODEL or not path.is_file():
        return
    try:
        _passports(model)
    except NormkitError:
        return
    raise InputError(f"{model} holds passports, and the first argument is a model; give it as --against {model}")


def _passports(name: str) -> PassportBook | None:
    """The passports in a file; None if the name is that of a model."""
    path = Path(name).expanduser()
    if not path.is_file() or path.name in _OF_A_MODEL:
        return None
    from normkit.identification.book import PassportBook

    return PassportBook.read(path)


def _survey(loaded: LoadedModel, site: str | None, *, shown: bool) -> PassportBook:
    from normkit.checkpoint.build_model import quiet_libraries
    from normkit.cli.texts import batches_for, check_runs
    from normkit.identification.book import survey
    from normkit.measurement.running import evaluating, first_tokens, runner

    batch = batches_for(loaded, None, None, length=None, max_tokens=_TOKENS, batch_size=1).batches[0]
    with terminal.progress(shown=shown) as report, quiet_libraries(), evaluating(loaded.model):
        report(f"{loaded.name}: norms", 0, 0)
        check_runs(loaded.model, batch)
        return survey(loaded.model, runner(loaded.model, first_tokens(batch)), name=loaded.name).only(site)


def _compare(
    loaded: LoadedModel, reference: Any, batches: Batches, names: tuple[str, str], site: str | None, *, shown: bool
) -> Comparison:
    from normkit.checkpoint.build_model import quiet_libraries
    from normkit.cli.texts import check_runs
    from normkit.comparison.comparing import compare

    with terminal.progress(shown=shown) as report, quiet_libraries():
        check_runs(loaded.model, batches.batches[0])
        return compare(
            loaded.model,
            reference,
            batches.batches,
            name=names[0],
            reference_name=names[1],
            source=batches.source,
            site=site,
            progress=lambda stage, done, total: report(f"{names[0]}: {stage}", done, total),
        )


def _give_passports(found: PassportBook, folder: Path | None, *, as_json: bool) -> None:
    """Print them, if not as JSON, and write them to a folder."""
    if not as_json:
        from normkit.identification.report import describe_book
        from normkit.show.terminal import section

        terminal.results().print(section(describe_book(found)))
    if folder is not None:
        _say_where("passports", found.write(folder / "passports.json"), as_json=as_json)


def _say_where(what: str, path: Path, *, as_json: bool) -> None:
    if not as_json:
        terminal.results().print(f"\n{what}: {path}", soft_wrap=True)
