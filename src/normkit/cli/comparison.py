"""`normkit compare`: a port against its reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from normkit.cli import options, terminal


@click.command("compare", short_help="Say where and how a port differs from its reference.")
@options.model_argument("port", "PORT")
@options.model_argument("reference", "REFERENCE")
@options.site_option
@options.run_options
@options.out_option
@options.no_report_option
@options.json_option
@options.source_options
@options.quiet_option
@click.pass_context
def compare_with_reference(
    ctx: click.Context,
    port: str,
    reference: str,
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
    """Say where and how PORT differs from REFERENCE, and exit with 1 if it does.

    PORT is a model; REFERENCE is a model, or a passports.json of one, which `normkit identify` writes. A model is a
    folder of transformers, or a Hub id such as org/name[@revision]; code that comes with a model is never run.

    Norms are paired by path, or by order where the paths differ. The result says which conventions differ, how much
    that changes the rows that arrive there, and where the first difference appears when both models run on one text; it
    is DIR/PORT/comparison.json. A passports.json cannot be run: only formulas are compared.
    """
    shown = terminal.shows_progress(quiet=quiet or as_json)
    from normkit.cli.reports import output_folder
    from normkit.cli.texts import batches_for, read_text

    words = None if text is None else read_text(text, max_tokens)
    from normkit.comparison.comparing import compare_sides
    from normkit.comparison.sides import open_side

    opened = []
    # The reference first: a file is read at once, and a wrong path of it is reported before the port is loaded.
    for given, version in ((reference, None), (port, revision)):
        if shown:
            click.echo(f"opening {given}", err=True)
        opened.append(
            open_side(given, dtype=dtype, revision=version, local_files_only=local_files_only, show_downloads=shown)
        )
    sides = (opened[1], opened[0])
    folder = None if no_report else output_folder(out, sides[0].name)
    for side in sides:
        if folder is not None and side.path is not None:
            output_folder(out, sides[0].name, source=side.path)
        for remark in () if quiet else side.notes:
            terminal.note(remark)
    batches = partial(
        batches_for, path=text, words=words, length=seq_length, max_tokens=max_tokens, batch_size=batch_size
    )
    with terminal.progress(shown=shown) as report:
        found = compare_sides(*sides, batches, site=site, progress=report)
    if as_json:
        terminal.print_json(found.to_json())
    else:
        from normkit.comparison.report import describe_comparison
        from normkit.show.terminal import section

        terminal.results().print(section(describe_comparison(found), most=16))
    if folder is not None:
        from normkit.files import json_text, write_text

        path = write_text(folder / "comparison.json", json_text(found.to_json()))
        if not as_json:
            terminal.results().print(f"\ncomparison: {path}", soft_wrap=True)
    if found.differs:
        ctx.exit(1)
