"""`normkit inspect`: its options, the run and the exit code."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from normkit.cli.options import (
    audio_option,
    batch_option,
    images_option,
    json_option,
    model_argument,
    no_report_option,
    out_option,
    quiet_option,
    run_options,
    site_option,
    source_options,
)
from normkit.cli.terminal import (
    given_parameters,
    note,
    print_json,
    progress,
    refuse_options_but,
    results,
    shows_progress,
)
from normkit.errors import InputError
from normkit.text import installed_version, own_version

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

_WORST_FIRST = ("error", "warning", "note")
# The options that work with the demo; every other option needs a MODEL.
_WITHOUT_MODEL = {"model", "out", "no_report", "as_json", "quiet"}
# The options that say what a model is run on, beside --batch; and those that say how a checkpoint is loaded.
_INPUTS = {"text", "images", "audio", "max_tokens", "seq_length", "batch_size", "train_step"}
_LOADING = {"dtype", "revision", "local_files_only", "offload"}


@click.command("inspect", short_help="Measure and check every norm of a model; without MODEL, a demo.")
@model_argument("model", "[MODEL]", required=False)
@run_options
@images_option
@audio_option
@batch_option
@site_option
@click.option("--token", is_flag=True, help="Also print what the norm does to one token, step by step.")
@click.option("--train-step", is_flag=True, help="Also run one training step on one batch; no weight changes.")
@click.option(
    "--offload", is_flag=True, help="Leave the weights in the files and read them for each call: for large models."
)
@out_option
@no_report_option
@click.option(
    "--fail-on",
    type=click.Choice([*_WORST_FIRST, "never"]),
    default="error",
    show_default=True,
    help="Exit with 1 if a finding is this severe or worse.",
)
@click.option(
    "--intent",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Compare with what the model is meant to be, as this file says; if there is no such file, write it.",
)
@click.option(
    "--activations",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the largest and the mean |x| of each channel that linear maps read from a norm (safetensors).",
)
@json_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
    help="Format of what is printed; markdown is for an issue.",
)
@source_options
@quiet_option
@click.pass_context
def inspect_model(
    ctx: click.Context,
    model: str | None,
    text: str | None,
    images: Path | None,
    audio: tuple[Path, ...],
    batch: str | None,
    max_tokens: int,
    seq_length: int | None,
    batch_size: int,
    dtype: str,
    site: str | None,
    token: bool,
    train_step: bool,
    offload: bool,
    out: Path,
    no_report: bool,
    fail_on: str,
    intent: Path | None,
    activations: Path | None,
    as_json: bool,
    form: str,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Run MODEL on a text, images or sound, measure every norm in it, check it against the rules, and write a report.

    MODEL is a folder with a transformers model, a config.json or model.safetensors in one, or else a Hub id such as
    org/name[@revision]. Images and sound go through the model's own processor. Only safetensors are read, and code that
    comes with a model is never run. MODEL may be FILE.py:NAME, too, a function that returns a model of torch; then
    --batch names one that returns its batches. Code that you name is run.

    Without MODEL, the demo: a small GPT-2 with one fault, and its healthy twin. With --token and without MODEL, the
    healthy twin. The report is DIR/NAME/report.html and report.json; with --site it still holds all norms.
    """
    form = "json" if as_json else form
    shown = shows_progress(quiet=quiet or form == "json")
    if model is None and token:
        from normkit import demo

        model = str(demo.directory("layernorm"))
    if model is None:
        refuse_options_but(ctx, _WITHOUT_MODEL)
        from normkit.cli.demonstration import run

        run(out=out, report=not no_report, as_json=as_json, shown=shown)
        return
    from normkit.cli.reports import output_folder, write_report
    from normkit.cli.texts import batches_for, batches_from_code, load, model_from_code, read_text
    from normkit.measurement import baseline

    is_code = ":" in model and not Path(model).exists()
    if is_code and batch is None:
        raise InputError(f"{model} needs --batch FILE.py:NAME, a function that returns its batches")
    for parameter in given_parameters(ctx) if batch is not None else ():
        if parameter.name in _INPUTS or (is_code and parameter.name in _LOADING):
            beside = "a model in code" if parameter.name in _LOADING else "--batch"
            raise InputError(f"{parameter.opts[0]} does not go with {beside}; leave it out")

    if activations is not None and is_code:
        raise InputError("--activations needs a checkpoint, whose readers of each norm are known; leave it out")
    if offload and train_step:
        raise InputError("--train-step does not go with --offload, which keeps no weights for a backward pass")
    # Read before the model is, so that a mistake in the file is reported at once.
    _, unwritten = baseline.declared(intent)
    words = None if text is None else read_text(text, max_tokens)
    loaded = (
        model_from_code(model)
        if is_code
        else load(
            model,
            dtype=dtype,
            revision=revision,
            local_files_only=local_files_only,
            shown=shown,
            text_only=False,
            offload=offload,
        )
    )
    folder = None if no_report else output_folder(out, loaded.name, source=loaded.path)
    meter = None
    if activations is not None:
        from normkit.checkpoint.activations import ActivationMeter
        from normkit.checkpoint.opening import open_checkpoint

        # Before the run, so that a family that is not declared is reported at once.
        with open_checkpoint(loaded.path) as opened:
            meter = ActivationMeter(loaded.model, opened.graph)
    batches = (
        batches_from_code(loaded.model, batch)
        if batch is not None
        else batches_for(
            loaded,
            text,
            words,
            length=seq_length,
            max_tokens=max_tokens,
            batch_size=batch_size,
            images=images,
            sound=audio,
        )
    )
    if not quiet:
        for remark in loaded.notes:
            note(remark)
    # Imported here because it brings torch, and a wrong path is reported at once.
    from normkit.cli.measurement import measure

    with progress(shown=shown) as report:
        if train_step:
            from normkit.cli.training import draws_labels, joined, training_step

            report(f"{loaded.name}: one training step", 0, 1)
            # First, so that a model without a loss is reported at once.
            step = training_step(loaded, batches)
            if draws_labels(batches.batches[0]):
                batches = replace(batches, source=f"{batches.source}; one training step on classes drawn at random")
        inspection = measure(loaded, batches, site=site, intent=intent, during=meter, progress=report)
        if train_step:
            inspection = joined(inspection, step)
    if meter is not None and activations is not None:
        told = {"model": loaded.name, "architecture": loaded.architecture, "text": batches.source}
        meter.statistics(told).save(activations)
    if unwritten is not None and not quiet:
        bad = sum(finding.severity != "note" for finding in inspection.findings)
        warning = f"; it may hold faults, as there {'is' if bad == 1 else 'are'} {bad} above a note" if bad else ""
        note(f"{unwritten} says what this run saw; later runs with --intent are held to it{warning}")
    _print(inspection, form, _origin(ctx), site=site, token=token)
    if folder is not None:
        page = write_report(inspection, folder)
        if form == "text":
            results().print(f"\nreport: {page}", soft_wrap=True)
    if activations is not None and form == "text":
        results().print(f"\nactivations: {activations}", soft_wrap=True)
    if _fails(inspection, fail_on):
        ctx.exit(1)


def _print(inspection: Inspection, form: str, origin: str, *, site: str | None, token: bool) -> None:
    if form == "json":
        print_json(inspection.to_json())
    elif form == "markdown":
        from normkit.inspection.report.printing import markdown

        click.echo(markdown(inspection, origin), nl=False)
    else:
        from normkit.inspection.report.printing import summary, walk_table

        console = results()
        console.print(summary(inspection, site))
        if token and inspection.walk is not None:
            console.print("", walk_table(inspection.walk), sep="\n")


def _origin(ctx: click.Context) -> str:
    """The command as it was typed, and the versions that matter."""
    words = [ctx.command_path]
    for parameter in given_parameters(ctx):
        value = ctx.params[parameter.name or ""]
        option = [] if isinstance(parameter, click.Argument) else [parameter.opts[-1]]
        for each in value if isinstance(value, tuple) else [value]:
            words += option if each is True else [*option, str(each)]
    packages = ", ".join(f"{package} {installed_version(package)}" for package in ("torch", "transformers"))
    return f"{words[0]} {shlex.join(words[1:])} (normkit {own_version()}, {packages})"


def _fails(inspection: Inspection, fail_on: str) -> bool:
    if fail_on == "never" or inspection.worst is None:
        return False
    return _WORST_FIRST.index(inspection.worst) <= _WORST_FIRST.index(fail_on)
