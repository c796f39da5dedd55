"""`normkit inspect` without a model: what a norm does, and what a report says when one is wrong, in a minute.

The two models that ship are measured; then faults are planted in copies of one. The faults are the
show's own, so they do not make the exit code 1.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from rich.console import Console

    from normkit.inspection.result import Finding, Inspection

_TOKENS, _BATCH_SIZE = 4096, 8
_ROWS = 8192


def run(*, out: Path | None, report: bool, as_json: bool, shown: bool) -> None:
    """Run the show.

    Args:
        out: Folder for the reports of both models; None is `normkit-report`.
        report: Write them.
        as_json: Print one JSON document with both models' results instead.
        shown: Show progress.
    """
    twins = [load_model(str(demo.directory(name))) for name in ("layernorm", "rmsnorm")]
    batches = {twin.name: _demo_batches(twin) for twin in twins}
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


def _demo_batches(twin: LoadedModel) -> Batches:
    return from_text(
        demo.text(),
        "demo text",
        twin.model,
        twin.tokenizer,
        length=None,
        max_tokens=_TOKENS,
        batch_size=_BATCH_SIZE,
    )


def _with_faults(twin: LoadedModel, batches: Batches, told: Progress) -> list[tuple[str, Inspection]]:
    """What was planted, and what an inspection of it says, for each fault."""
    planted = (
        ("every eps is 1e-2, not the configuration's 1e-5", faults.wrong_eps),
        ("the norm after the last block is gone", faults.without_final_norm),
    )
    return [
        (what, measure(twin, batches, model=plant(copy.deepcopy(twin.model)), progress=told)) for what, plant in planted
    ]


def _print_walk(console: Console, inspection: Inspection) -> None:
    _introduce(
        console,
        "What a norm does to one token",
        "A small language model reads a text. Before each of its blocks a norm rewrites the vector of every token. "
        "Here is one token's vector on its way through one norm:",
    )
    if inspection.walk is not None:
        console.print(text.walk_table(inspection.walk))


def _print_verdicts(console: Console, inspections: list[Inspection]) -> None:
    _introduce(
        console,
        "Two healthy models",
        "The same architecture size and training, once with LayerNorm (a GPT-2), once with RMSNorm (a Llama). Every "
        "norm was measured on the text and held against the rules:",
    )
    console.print(text.side_by_side(inspections))


def _print_faults(console: Console, healthy: Inspection, faulty: list[tuple[str, Inspection]]) -> None:
    known = {finding.rule for finding in healthy.findings}
    for number, (what, inspection) in enumerate(faulty):
        title = "The same weights with a fault" if number == 0 else "And with another"
        _introduce(
            console, title, f"Planted in the LayerNorm model, as happens in a port: {what}. What the report says:"
        )
        for finding in inspection.findings:
            if finding.rule not in known:
                _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{finding.severity}: {finding.title}", "bold red"))
    lines = Table.grid(padding=(0, 2, 0, 0))
    for label, words in (
        ("where", f"{finding.sites[0]}, {len(finding.sites)} in all" if finding.sites else "the model"),
        ("measured", finding.measured),
        ("evidence", finding.evidence[0] if finding.evidence else ""),
        ("why", finding.why),
        ("do", finding.remedy[0]),
        ("confirm", finding.confirm),
    ):
        lines.add_row(Text(label, "dim"), Text(words))
    console.print(lines)


def _print_gradient(console: Console) -> None:
    import torch

    measured = _bias_gradient(_ROWS)
    verdict = "right" if measured == _ROWS else f"wrong: each of the {_ROWS} rows adds exactly 1"
    _introduce(
        console,
        "And the PyTorch of this machine",
        f"Bias gradient of its bfloat16 LayerNorm over {_ROWS:,} rows, from gradients of 1: right is {_ROWS}; "
        f"torch {torch.__version__} on {torch.get_num_threads()} thread(s) returns {measured:g}, {verdict}.",
    )


def _bias_gradient(rows: int) -> float:
    """What torch's LayerNorm on the CPU returns for its bias in bfloat16 where every output's gradient is 1."""
    import torch

    layer = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    layer(torch.randn(rows, 64, generator=generator).bfloat16()).sum().backward()
    assert layer.bias.grad is not None
    return float(layer.bias.grad[0])


def _print_reports(console: Console, pages: list[Path]) -> None:
    if not pages:
        return
    _introduce(console, "The whole reports", "Every norm, figure and rule, one page a model; open them in a browser:")
    for page in pages:
        console.print(str(page), soft_wrap=True)


def _introduce(console: Console, title: str, words: str) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(title, "bold"))
    console.print(Text(words))
    console.print()
