"""Arguments and options that several verbs share: each has one meaning and one wording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

OUT = Path("normkit-out")

text_option = click.option(
    "--text", metavar="FILE", help="UTF-8 text to run on; - reads stdin.  [default: a text that ships]"
)

images_option = click.option(
    "--images",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A folder of images, or one, to run a vision model on.  [default: photographs of matplotlib and scikit-learn]",
)
audio_option = click.option(
    "--audio",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="A .wav file or a folder of some, for a speech model; may be repeated.  [default: a synthesized signal]",
)
batch_option = click.option(
    "--batch", metavar="FILE.py:NAME", help="Run on what this function returns, for models in code."
)

_RUN = (
    text_option,
    click.option(
        "--max-tokens",
        type=click.IntRange(min=8),
        metavar="N",
        default=4096,
        show_default=True,
        help="Stop after this many tokens.",
    ),
    click.option(
        "--seq-length",
        type=click.IntRange(min=2),
        metavar="N",
        help="Tokens per sequence.  [default: 256, or the model's context if shorter]",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        metavar="N",
        default=8,
        show_default=True,
        help="Sequences per batch.",
    ),
)

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Load the weights in this dtype; auto keeps the checkpoint's.",
)

_SOURCE = (
    click.option("--revision", metavar="REV", help="Branch, tag or commit, if the model is on the Hub."),
    click.option(
        "--local-files-only", is_flag=True, help="Do not use the network: take the model from the Hub's cache."
    ),
)


def model_argument(name: str, metavar: str, *, required: bool = True) -> Callable[[Any], Any]:
    """An argument for a model: a folder or a file in it, else a Hub id; a shell completes paths."""
    return click.argument(
        name,
        metavar=metavar,
        required=required,
        shell_complete=lambda _ctx, _parameter, incomplete: [CompletionItem(incomplete, type="file")],
    )


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options for what a model is run on, and for its dtype."""
    for option in reversed((*_RUN, dtype_option)):
        function = option(function)
    return function


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options for the version of a model on the Hub, and for use of the network."""
    for option in reversed(_SOURCE):
        function = option(function)
    return function


site_option = click.option(
    "--site",
    metavar="GLOB",
    help="Show only norms whose path matches, such as 'model.layers.*.input_layernorm'.  [default: all]",
)

out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    shell_complete=lambda _ctx, _parameter, incomplete: [CompletionItem(incomplete, type="dir")],
    metavar="DIR",
    default=OUT,
    show_default=True,
    help="Write files below this folder.",
)

no_report_option = click.option("--no-report", is_flag=True, help="Write no files.")

resume_option = click.option("--resume", is_flag=True, help="Finish what an interrupted run has begun.")

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", default=2, show_default=True, help="Threads that compute."
)

scales_option = click.option(
    "--scales",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="For migrate: a safetensors file, a vector for each norm, or the file of inspect --activations.",
)

matrix_option = click.option(
    "--matrix",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="For rotate: orthogonal matrices R1 and PATH.R2 of a safetensors file, in place of a seed.",
)

metadata_option = click.option(
    "--metadata",
    type=click.Path(path_type=Path),
    metavar="FILE.gguf",
    help="For DST.gguf: a GGUF file of SRC, quantized or not, that tokenizer and settings are taken from.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress and no notes.")
