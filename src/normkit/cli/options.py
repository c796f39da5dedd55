"""Options of every verb that loads a model and runs it on a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_RUN = (
    click.option("--text", metavar="FILE", help="UTF-8 text to run on, - for stdin.  [default: a text that ships]"),
    click.option(
        "--max-tokens", type=click.IntRange(min=8), metavar="N", default=4096, show_default=True, help="Tokens in all."
    ),
    click.option(
        "--seq-length", type=click.IntRange(min=2), metavar="N", help="Tokens a window.  [default: 256, or the context]"
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Windows a batch."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Of the weights; auto is the checkpoint's.",
    ),
)

_SOURCE = (
    click.option("--revision", metavar="REV", help="Branch, tag or commit of MODEL, a Hub id."),
    click.option("--local-files-only", is_flag=True, help="Ask no server."),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The text, how much of it, in what portions, and the dtype of the weights."""
    for option in reversed(_RUN):
        function = option(function)
    return function


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which version of a Hub id, and whether its server may be asked."""
    for option in reversed(_SOURCE):
        function = option(function)
    return function
