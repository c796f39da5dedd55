"""`normkit figures`: writes every figure of the gallery as a file, and one page with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit.cli.options import json_option, out_option, quiet_option
from normkit.cli.terminal import given_parameters, note, print_json, progress, results, shows_progress
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.cli.terminal import Progress
    from normkit.plots.gallery import Twin
    from normkit.show.drawing import Drawing, Format
    from normkit.show.theme import Scheme


@click.command("figures", short_help="Draw the geometry of normalization, for lessons and papers.")
@out_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["svg", "png", "pdf"]),
    default="svg",
    show_default=True,
    help="Format of the files.",
)
@click.option(
    "--scheme",
    type=click.Choice(["light", "dark", "both"]),
    default="light",
    show_default=True,
    help="Colours for a white page, a dark page, or one file for each.",
)
@click.option("--film", "is_film", is_flag=True, help="Instead, one film of a minute with captions: MP4 and GIF.")
@json_option
@quiet_option
@click.pass_context
def make_figures(
    ctx: click.Context, out: Path, kind: Format, scheme: str, is_film: bool, as_json: bool, quiet: bool
) -> None:
    """Draw what a norm does to vectors: its three steps in space, invariances, epsilons, and the gains of real models.

    Each figure is a file in DIR/figures, with its title and caption; DIR/figures/index.html shows them all. The same
    version of normkit writes the same bytes. --film writes DIR/figures/film.mp4, which
    needs ffmpeg, film.gif, and film.png with a frame of each chapter.
    """
    from normkit import files
    from normkit.cli.reports import output_folder
    from normkit.plots.gallery import page
    from normkit.show import theme

    out = output_folder(out, "figures")
    with theme.style():
        schemes: tuple[Scheme, ...] = (
            ("light", "dark") if scheme == "both" else ("light" if scheme == "light" else "dark",)
        )
    if is_film:
        if "kind" in [each.name for each in given_parameters(ctx)]:
            raise click.UsageError("--film writes MP4 and GIF, and --format is of figures; leave one out.", ctx)
        _make_film(out, schemes, as_json=as_json, quiet=quiet)
        return
    with progress(shown=shows_progress(quiet=quiet or as_json)) as told:
        figures = list(_written(out, kind, schemes, told))
    drawings, names = zip(*figures, strict=True)
    index = files.write_text(out / "index.html", page("The geometry of normalization", drawings, names))
    _print(out, index, figures, as_json=as_json)


def _make_film(out: Path, schemes: tuple[Scheme, ...], *, as_json: bool, quiet: bool) -> None:
    """Write the film in each scheme; as a GIF alone, with a note, where there is no ffmpeg."""
    from normkit import files
    from normkit.plots.film import film, poster
    from normkit.show import animation

    names = []
    try:
        animation.ffmpeg()
    except InputError:
        has_mp4 = False
        note('film.gif only: MP4 needs ffmpeg; pip install "normkit[video]" and run this again')
    else:
        has_mp4 = True
    for scheme in schemes:
        with progress(shown=shows_progress(quiet=quiet or as_json)) as told:
            clips = (poster(scheme), *film(scheme, told, has_mp4=has_mp4))
        for ending, content in zip(("png", "gif", "mp4"), clips, strict=True):
            if content is not None:
                name = f"film{'-dark' if scheme == 'dark' else ''}.{ending}"
                names.append(files.write_bytes(out / name, content).name)
    if as_json:
        print_json({"schema_version": 1, "folder": str(out), "film": names})
    else:
        results().print(*(str(out / name) for name in names), sep="\n", soft_wrap=True)


def _written(
    out: Path, kind: Format, schemes: tuple[Scheme, ...], told: Progress
) -> Iterator[tuple[Drawing, list[str]]]:
    """Each figure in the first scheme, and the names of its files."""
    from normkit import files
    from normkit.plots.gallery import gallery
    from normkit.show import theme

    drawers = gallery({name: _twin(name, told) for name in ("layernorm", "rmsnorm")})
    for done, draw in enumerate(drawers):
        told("figures", done, len(drawers))
        drawings, names = [], []
        for scheme in schemes:
            with theme.style(scheme):
                drawing = draw()
            name = f"{drawing.name}{'-dark' if scheme == 'dark' else ''}.{kind}"
            files.write_bytes(out / name, drawing.file(kind))
            drawings.append(drawing)
            names.append(name)
        yield drawings[0], names


def _twin(name: str, told: Progress) -> Twin:
    from normkit import demo
    from normkit.checkpoint.loading import load_model
    from normkit.cli.demonstration import demo_batches
    from normkit.cli.measurement import measure
    from normkit.plots.gallery import Twin

    loaded = load_model(str(demo.directory(name)))
    inspection = measure(loaded, demo_batches(loaded), progress=told)
    gains = {site.path: loaded.model.get_submodule(site.path).weight.detach() for site in inspection.sites}
    return Twin(inspection=inspection, gains=gains)


def _print(out: Path, index: Path, figures: list[tuple[Drawing, list[str]]], *, as_json: bool) -> None:
    if as_json:
        listed: list[dict[str, Any]] = [
            {
                "name": drawing.name,
                "title": drawing.title,
                "caption": drawing.caption,
                "description": drawing.description,
                "files": names,
            }
            for drawing, names in figures
        ]
        document = {"schema_version": 1, "folder": str(out), "index": index.name, "figures": listed}
        print_json(document)
        return
    console = results()
    width = max(len(name) for _, names in figures for name in names)
    for drawing, names in figures:
        console.print(f"{names[0]:{width}}  {drawing.title}", overflow="ellipsis", no_wrap=True)
    console.print(f"\nall on one page: {index}", soft_wrap=True)
