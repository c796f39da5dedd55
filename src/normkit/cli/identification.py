"""`normkit identify`: the passports of the norms of a model or of a recording; of a file of tensors, how gains are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from normkit.cli import options, terminal
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.checkpoint.loading import LoadedModel
    from normkit.comparison.sides import Side
    from normkit.identification.book import PassportBook

# Enough tokens that every norm is called.
_TOKENS = 16
# The options that work with the shipped models.
_WITHOUT_MODEL = {"model", "out", "no_report", "as_json", "quiet"}


def _compare_instead(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"--against has gone: normkit compare PORT {value} compares with a reference.", ctx)


@click.command("identify", short_help="Find what each norm of a model or of a recording really computes.")
@options.model_argument("model", "[MODEL]", required=False)
@click.option("--against", hidden=True, expose_value=False, callback=_compare_instead)
@options.site_option
@options.dtype_option
@options.out_option
@options.no_report_option
@options.json_option
@options.source_options
@options.quiet_option
@click.pass_context
def identify_norms(
    ctx: click.Context,
    model: str | None,
    site: str | None,
    dtype: str,
    out: Path,
    no_report: bool,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Find out what every norm of MODEL computes, and write it down.

    Norms are found by calling copies of them on chosen inputs, not by their names. MODEL is a folder with a
    transformers model, a config.json or model.safetensors in one, or else a Hub id such as org/name[@revision]; code
    that comes with a model is never run. The result is DIR/NAME/passports.json. Without MODEL, the two small models
    that ship. A recording, as normkit.record(model) or any other runtime writes it, is identified from its rows alone,
    a .onnx file by running its norms in onnxruntime. A file of tensors alone, .gguf or .safetensors, or a quantized
    folder, as of MLX, says how its gains are stored: with the 1 that some models add, without it, or with 1 too much,
    and ends with 1 if its runtime computes other gains from them.

    `normkit compare PORT REFERENCE` compares the norms of two models.
    """
    shown = terminal.shows_progress(quiet=quiet or as_json)
    if model is None:
        terminal.refuse_options_but(ctx, _WITHOUT_MODEL)
        _show(None if no_report else out, as_json=as_json, shown=shown)
        return
    from normkit.cli.reports import output_folder

    path = Path(model).expanduser()
    if path.exists():
        from normkit.comparison.sides import file_side, open_side
        from normkit.comparison.weights import is_quantized

        side = open_side(model) if is_quantized(path) else file_side(model)
        if side is not None:
            ctx.exit(_identify_side(side, path, None if no_report else out, site, as_json=as_json, shown=shown))
    from normkit.cli.texts import load

    loaded = load(model, dtype=dtype, revision=revision, local_files_only=local_files_only, shown=shown)
    folder = None if no_report else output_folder(out, loaded.name, source=loaded.path)
    for remark in () if quiet else loaded.notes:
        terminal.note(remark)
    _give_passports(_survey(loaded, site, shown=shown), folder, as_json=as_json)


def _identify_side(side: Side, path: Path, out: Path | None, site: str | None, *, as_json: bool, shown: bool) -> int:
    """The norms of a recording or an ONNX file, or how the gains of tensors are stored; gives the exit code."""
    from normkit.cli.reports import output_folder

    if side.book is not None:
        raise InputError(f"{path} holds passports, and the first argument is a model; give it to normkit compare")
    folder = None if out is None else output_folder(out, path.stem, source=path)
    if side.recording is not None:
        _give_passports(side.recording.book.only(site), folder, as_json=as_json)
        return 0
    if side.onnx is not None:
        with terminal.progress(shown=shown) as report:
            book = side.onnx.norms(lambda done, count: report(f"{path.name}: norms", done, count))
        _give_passports(book.only(site), folder, as_json=as_json)
        return 0
    if site is not None:
        raise InputError(f"{path} holds tensors alone, and all its gains are read; leave --site out")
    from normkit.comparison.stored_gains import describe_gains, stored_gains
    from normkit.files import json_text, write_text
    from normkit.show.terminal import section

    assert side.weights is not None
    found = stored_gains(side.weights)
    document = {"schema_version": 1, **found.to_json()}
    if as_json:
        terminal.print_json(document)
    else:
        terminal.results().print(section(describe_gains(found)))
    if folder is not None:
        _say_where("gains", write_text(folder / "gains.json", json_text(document)), as_json=as_json)
    return 1 if found.is_right is False else 0


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
        _give_passports(book, folder, as_json=as_json, is_printed=as_json)
        click.echo("", nl=not as_json)


def _survey(loaded: LoadedModel, site: str | None, *, shown: bool) -> PassportBook:
    from normkit.checkpoint.build_model import quiet_libraries
    from normkit.cli.texts import batches_for
    from normkit.identification.book import survey
    from normkit.measurement.running import evaluating, first_tokens, runner
    from normkit.measurement.texts import check_runs

    batch = batches_for(loaded, None, None, length=None, max_tokens=_TOKENS, batch_size=1).batches[0]
    with terminal.progress(shown=shown) as report, quiet_libraries(), evaluating(loaded.model):
        report(f"{loaded.name}: norms", 0, 0)
        check_runs(loaded.model, batch)
        return survey(loaded.model, runner(loaded.model, first_tokens(batch)), name=loaded.name).only(site)


def _give_passports(found: PassportBook, folder: Path | None, *, as_json: bool, is_printed: bool = False) -> None:
    """Print them, if they are not printed yet, and write them to a folder."""
    if as_json and not is_printed:
        terminal.print_json(found.to_json())
    elif not as_json:
        from normkit.identification.report import describe_book
        from normkit.show.terminal import section

        terminal.results().print(section(describe_book(found)))
    if folder is not None:
        _say_where("passports", found.write(folder / "passports.json"), as_json=as_json)


def _say_where(what: str, path: Path, *, as_json: bool) -> None:
    if not as_json:
        terminal.results().print(f"\n{what}: {path}", soft_wrap=True)
