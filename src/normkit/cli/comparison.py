"""`normkit compare`: a port against its reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from normkit.cli import options, terminal


@click.command("compare", short_help="Say where and how a port differs from its reference.")
@options.model_argument("port", "PORT")
@options.model_argument("reference", "REFERENCE")
@options.text_option
@click.option(
    "--max-tokens",
    type=click.IntRange(min=8),
    metavar="N",
    default=256,
    show_default=True,
    help="Stop after this many tokens.",
)
@options.images_option
@options.audio_option
@options.batch_option
@click.option("--no-run", is_flag=True, help="Look at what is stored; run no model.")
@options.dtype_option
@options.site_option
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
    text: str | None,
    max_tokens: int,
    images: Path | None,
    audio: tuple[Path, ...],
    batch: str | None,
    no_run: bool,
    dtype: str,
    site: str | None,
    out: Path,
    no_report: bool,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Say where and how PORT differs from REFERENCE, and exit with 1 unless they are shown to be the same.

    Each of the two is a model's folder (of transformers, or another with safetensors), a Hub id such as
    org/name[@revision], a .safetensors, .gguf, .onnx or .npz file, a recording (normkit record), a passports.json
    (normkit identify), or FILE.py:NAME, a function that returns a model of torch. Code that you name is run; code that
    comes with a model never is.

    Every level that both offer is looked at: stored gains and biases, without running anything; what each norm
    computes; the rows of both on one text, on images or sound, and where the first difference appears; which norm
    stands for which. The result says which levels were not looked at, and why. It is DIR/PORT/comparison.json.

    Exit codes: 0 the same, as far as both offer it; 1 different, or undecided: what can be read allows both (the key
    "verdict" of the JSON tells these two apart); 2 wrong usage or input.
    """
    shown = terminal.shows_progress(quiet=quiet or as_json)
    from normkit.cli.reports import output_folder
    from normkit.cli.texts import batches_for, read_text

    if batch is not None and (text is not None or images is not None or audio):
        given = "--text" if text is not None else "--images" if images is not None else "--audio"
        raise click.UsageError(f"--batch and {given}: give one of the two.", ctx)
    words = None if text is None else read_text(text, max_tokens)
    from normkit.comparison.comparing import compare_sides
    from normkit.comparison.sides import called, open_side

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
    chosen = partial(
        batches_for,
        path=text,
        words=words,
        max_tokens=max_tokens,
        batch_size=max_tokens,
        images=images,
        sound=audio,
    )
    inputs = chosen if batch is None else called(batch)
    with terminal.progress(shown=shown) as report:
        found = compare_sides(*sides, inputs, site=site, run=not no_run, progress=report)
    for remark in () if quiet else found.notes:
        terminal.note(remark)
    if as_json:
        terminal.print_json(found.to_json())
    else:
        from normkit.comparison.report import describe_comparison
        from normkit.show.terminal import section

        terminal.results().print(section(describe_comparison(found), most=5))
    if folder is not None:
        from normkit.files import json_text, write_text

        path = write_text(folder / "comparison.json", json_text(found.to_json()))
        if not as_json:
            terminal.results().print(f"\ncomparison: {path}", soft_wrap=True)
    if found.verdict != "the same":
        ctx.exit(1)
