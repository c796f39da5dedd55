"""`normkit explore`: writes the interactive page and opens it, or writes an animation as GIF or MP4."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from normkit.cli.options import (
    json_option,
    model_argument,
    out_option,
    quiet_option,
    run_options,
    site_option,
    source_options,
)
from normkit.cli.terminal import note, print_json, progress, refuse_options_but, results, shows_progress
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.checkpoint.loading import LoadedModel
    from normkit.cli.terminal import Progress
    from normkit.explorer.activations import Activations
    from normkit.explorer.exploration import Exploration
    from normkit.measurement.texts import Batches

# The options that work with the shipped models; every other option needs a MODEL.
_WITHOUT_MODEL = {"model", "out", "animation", "no_open", "as_json", "quiet"}
_CLIPS = (".gif", ".mp4")


@click.command("explore", short_help="Open the geometry of normalization as an interactive page.")
@model_argument("model", "[MODEL]", required=False)
@run_options
@site_option
@out_option
@click.option(
    "--animation",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead of the page, write a clip of the four steps to this .gif or .mp4.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@json_option
@source_options
@quiet_option
@click.pass_context
def explore_norms(
    ctx: click.Context,
    model: str | None,
    text: str | None,
    max_tokens: int,
    seq_length: int | None,
    batch_size: int,
    dtype: str,
    site: str | None,
    out: Path,
    animation: Path | None,
    no_open: bool,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Write one HTML page that shows what a norm does to vectors, and open it. It works offline.

    With MODEL, the page also shows what enters each of its norms for some tokens of a text. MODEL is a folder with a
    transformers model, a config.json or model.safetensors in one, or else a Hub id such as org/name[@revision].
    Without MODEL, the two small models that ship. The page is DIR/explorer.html, or DIR/NAME/explorer.html.
    """
    shown = shows_progress(quiet=quiet or as_json)
    if animation is not None:
        if model is not None:
            raise InputError(
                f"--animation shows points of three features and takes no MODEL, got {model}; leave one out"
            )
        refuse_options_but(ctx, _WITHOUT_MODEL)
        with progress(shown=shown) as told:
            _animate(animation, told)
        if as_json:
            print_json({"schema_version": 1, "animation": str(animation)})
        else:
            results().print(f"animation: {animation}", soft_wrap=True)
        return
    from normkit.cli.reports import output_folder

    if model is None:
        refuse_options_but(ctx, _WITHOUT_MODEL)
        folder = output_folder(out)
        from normkit import demo
        from normkit.checkpoint.loading import load_model
        from normkit.cli.demonstration import demo_batches
        from normkit.explorer.exploration import explore_models

        with progress(shown=shown) as told:
            twins = [load_model(str(demo.directory(name))) for name in ("layernorm", "rmsnorm")]
            gathered = [_gathered(twin, demo_batches(twin), None, told) for twin in twins]
            page = explore_models(gathered, start_there=False)
    else:
        from normkit.cli.texts import batches_for, load, read_text
        from normkit.explorer.exploration import explore_models

        words = None if text is None else read_text(text, max_tokens)
        loaded = load(model, dtype=dtype, revision=revision, local_files_only=local_files_only, shown=shown)
        folder = output_folder(out, loaded.name, source=loaded.path)
        batches = batches_for(loaded, text, words, length=seq_length, max_tokens=max_tokens, batch_size=batch_size)
        with progress(shown=shown) as told:
            page = explore_models([_gathered(loaded, batches, site, told)], title=f"The norms of {loaded.name}")
    path = page.write_html(folder / "explorer.html")
    for remark in () if quiet or as_json else page.notes:
        note(remark)
    _print(path, page, as_json=as_json)
    if not no_open and not as_json:
        open_page(path)


def open_page(path: Path) -> None:
    """Open a page in the user's browser if there is a display; a failure is ignored."""
    has_display = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    # Without a display Python would start a text browser, which takes over the terminal and waits.
    if not has_display:
        return
    import webbrowser
    from contextlib import suppress

    with suppress(webbrowser.Error, OSError):
        webbrowser.open(path.resolve().as_uri())


def _gathered(loaded: LoadedModel, batches: Batches, site: str | None, told: Progress) -> Activations:
    from normkit.checkpoint.build_model import quiet_libraries
    from normkit.explorer.activations import activations
    from normkit.measurement.texts import check_runs

    total = len(batches.batches)
    with quiet_libraries():
        check_runs(loaded.model, batches.batches[0])
        found = activations(
            loaded.model,
            batches.batches,
            name=loaded.name,
            decode=batches.decode,
            site=site,
            progress=lambda stage, done, steps: told(f"{loaded.name}: {stage}", done, steps or total),
        )
    return replace(found, notes=(*loaded.notes, *found.notes))


def _animate(path: Path, told: Progress) -> None:
    if path.suffix.lower() not in _CLIPS:
        raise InputError(f"--animation writes .gif or .mp4, got {path.name}; choose one of these suffixes")
    # Imported here because they bring torch, and a wrong suffix is reported at once.
    import torch

    from normkit import specs
    from normkit.cli.reports import require_file
    from normkit.explorer.document import BIAS, GAIN, cloud
    from normkit.geometry.animation import write_animation

    require_file(path)
    scatter = cloud("scatter")
    gain, bias = (torch.tensor(values, dtype=torch.float64) for values in (GAIN, BIAS))
    write_animation(
        path, scatter.points, scatter.groups, spec=specs.TORCH_LAYER_NORM, weight=gain, bias=bias, progress=told
    )


def _print(path: Path, page: Exploration, *, as_json: bool) -> None:
    if as_json:
        models = [
            {
                "name": model["name"],
                "sites": [
                    {key: site[key] for key in ("path", "formula", "n", "layer", "explained", "count")}
                    for site in model["sites"]
                ],
            }
            for model in page.data["models"]
        ]
        document = {"schema_version": 1, "page": str(path), "models": models, "notes": list(page.notes)}
        print_json(document)
        return
    results().print(f"explorer: {path}", soft_wrap=True)
