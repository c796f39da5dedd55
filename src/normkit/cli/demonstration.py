"""`normkit inspect` without a model: what a norm does, and what a report says when one is wrong, in a minute.

The two models that ship are measured; then faults are planted in copies of one. The faults are the
show's own, so they do not make the exit code 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit import demo
from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.cli.measurement import measure
from normkit.cli.reports import DEFAULT, report_folder, write_report
from normkit.cli.terminal import Progress, progress, results
from normkit.cli.texts import Batches, from_text
from normkit.demo import faults
from normkit.files import json_text
from normkit.report import text
from normkit.report.description import describe

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType

    from normkit.inspection.result import Inspection

_TOKENS, _BATCH_SIZE = 4096, 8
_ROWS = 8192

_FAULTS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (
        "The same weights with a fault",
        "A norm adds eps, a tiny number, so as never to divide by zero. In a copy of the LayerNorm model it is 1e-2, "
        "not the configuration's 1e-5: a setting overlooked in a port. What the rules say of that copy:",
        faults.wrong_eps,
    ),
    (
        "And with another",
        "In a second copy the norm behind the last block is left out. What the rules say of it:",
        faults.without_final_norm,
    ),
)
"""Of each fault: a heading, what it is, and the function that plants it."""


def run(*, out: Path | None, report: bool, as_json: bool, shown: bool) -> None:
    """Run the show.

    Args:
        out: Folder for the reports of both models; None is `normkit-report`.
        report: Write them.
        as_json: Print one JSON document with both models' results instead.
        shown: Show progress.
    """
    twins = [load_model(str(demo.directory(name))) for name in ("layernorm", "rmsnorm")]
    batches = {twin.name: demo_batches(twin) for twin in twins}
    folders = [report_folder((out or DEFAULT) / twin.name, twin.name, twin.path) for twin in twins] if report else []
    with progress(shown=shown) as told:
        inspections = [measure(twin, batches[twin.name], progress=told) for twin in twins]
        faulty = [] if as_json else _with_faults(twins[0], batches[twins[0].name], told)
    pages = [write_report(inspection, folder) for inspection, folder in zip(inspections, folders, strict=False)]
    if as_json:
        models = [inspection.to_json() for inspection in inspections]
        click.echo(json_text({"schema_version": 1, "models": models}), nl=False)
        return
    console = results()
    _print_walk(console, inspections[0])
    _print_verdicts(console, inspections)
    _print_faults(console, inspections[0], faulty)
    _print_gradient(console)
    _print_reports(console, pages)


def demo_batches(twin: LoadedModel) -> Batches:
    """The text that ships, in batches for one of the models that ship."""
    return from_text(
        demo.text(),
        "demo text",
        twin.model,
        twin.tokenizer,
        length=None,
        max_tokens=_TOKENS,
        batch_size=_BATCH_SIZE,
    )


def _with_faults(twin: LoadedModel, batches: Batches, told: Progress) -> list[Inspection]:
    """What an inspection says of a copy with each fault, in the order of `_FAULTS`."""
    return [measure(twin, batches, model=plant(copy.deepcopy(twin.model)), progress=told) for _, _, plant in _FAULTS]


def _print_walk(console: Console, inspection: Inspection) -> None:
    if inspection.walk is None:
        return
    _introduce(
        console,
        "What a norm does to one token",
        f"A language model holds every token as a vector, here of {inspection.walk.features} numbers. A norm centres "
        "it, scales it to one length, then applies a gain and a bias that were learnt. One token, stage by stage:",
        text.walk_table(inspection.walk),
    )


def _print_verdicts(console: Console, inspections: list[Inspection]) -> None:
    _introduce(
        console,
        "Two healthy models",
        "Two small language models of one size and one training text ship with normkit: one with LayerNorm (a GPT-2), "
        "one with RMSNorm (a Llama), which leaves out the centring. What the rules say of their norms:",
        text.side_by_side(inspections),
    )


def _print_faults(console: Console, healthy: Inspection, faulty: list[Inspection]) -> None:
    known = {finding.rule for finding in healthy.findings}
    for (title, words, _), inspection in zip(_FAULTS, faulty, strict=True):
        new = (finding for finding in describe(inspection).findings if finding.rule not in known)
        _introduce(console, title, words, *map(text.finding, new))


def _print_gradient(console: Console) -> None:
    import torch

    right, measured = _bias_gradient(torch.float64), _bias_gradient(torch.bfloat16)
    count = torch.get_num_threads()
    _introduce(
        console,
        "And PyTorch itself, on this machine",
        f"In training, a LayerNorm's bias sums one gradient a row. Of {_ROWS:,} rows with 1 each, right is {right:g}; "
        f"torch {torch.__version__} in bfloat16 on {count} thread{'s' * (count > 1)} returns {measured:g}.",
    )


def _bias_gradient(dtype: torch.dtype) -> float:
    """What torch's LayerNorm on the CPU returns for its bias where the gradient of every output is 1."""
    import torch

    layer = torch.nn.LayerNorm(64, dtype=dtype)
    rows = torch.randn(_ROWS, 64, generator=torch.Generator().manual_seed(0))
    layer(rows.to(dtype)).sum().backward()
    assert layer.bias.grad is not None
    return float(layer.bias.grad[0])


def _print_reports(console: Console, pages: list[Path]) -> None:
    if pages:
        _introduce(console, "The whole reports", "Every norm, figure and rule, one page a model, for a browser:")
        console.print()
    for page in pages:
        console.print(str(page), soft_wrap=True)
    _introduce(console, "Next", "normkit inspect MODEL does the same for a model of yours: a folder, or a Hub id.")


def _introduce(console: Console, title: str, words: str, *body: RenderableType) -> None:
    from rich.text import Text

    console.print(Text.assemble("\n", (title, "bold"), "\n", words))
    for part in body:
        console.print("", part, sep="\n")
