"""`normkit record --template`: the file that records norms in a runtime where normkit is not installed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from normkit import files
from normkit.errors import InputError

_NAME = "normkit_recorder.py"


@click.command("record", short_help="Write the file that records the norms of any runtime.")
@click.option(
    "--template",
    type=click.Path(dir_okay=False, allow_dash=True),
    is_flag=False,
    flag_value=_NAME,
    metavar="[FILE]",
    help=f"Write it to this file, {_NAME} by default; - prints it.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def write_recorder(template: str | None, overwrite: bool) -> None:
    """Write a Python file of about 50 lines that records what enters and leaves each norm.

    It needs numpy and safetensors, not normkit: copy it beside a model in MLX, JAX, vLLM or any other runtime. Its
    recordings are read by `normkit identify`. A model in torch is recorded by nk.record(model, FILE), in Python.
    """
    if template is None:
        raise click.UsageError("give --template; a model in torch is recorded in Python: nk.record(model, FILE)")
    text = resources.files("normkit.comparison").joinpath(_NAME).read_text(encoding="utf-8")
    if template == "-":
        click.echo(text, nl=False)
        return
    path = Path(template)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; give another FILE, or --overwrite to replace it")
    files.write_text(path, text)
    click.echo(f"wrote {path}; it needs numpy and safetensors alone")
