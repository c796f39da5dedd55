"""`normkit inspect` without a model: a GPT-2 with one wrong tensor, its healthy twin, and a count of PyTorch's."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.text import Text

from normkit import demo
from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.cli.measurement import measure
from normkit.cli.reports import output_folder, write_report
from normkit.cli.terminal import print_json, progress, results, shell_word
from normkit.demo import write_twins
from normkit.inspection.report.description import describe
from normkit.layers import LayerNorm
from normkit.measurement.texts import Batches, from_text
from normkit.show.parts import Fact
from normkit.show.terminal import lines, marked
from normkit.text import shortened

if TYPE_CHECKING:
    from normkit.inspection.result import Inspection

_TOKENS, _BATCH_SIZE = 4096, 8
_ROWS = 8192


def run(*, out: Path, report: bool, as_json: bool, shown: bool) -> None:
    """Inspect both models, count rows with PyTorch, and print one screen of 80 columns by 40 lines.

    The fault is planted by the demo, so it does not make the exit code 1.

    Args:
        out: The models are written to its folder `demo`, and the page of the faulty one beside it.
        report: Write these files; else nothing is left behind.
        as_json: Print one JSON document instead.
        shown: Show progress.
    """
    counts = {"torch": _counted(torch.nn.LayerNorm), "normkit": _counted(LayerNorm)}
    with ExitStack() as stack:
        # These models are too small for several threads: on busy cores, threads wait for each other.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        home = output_folder(out, "demo") if report else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = write_twins(home)
        told = stack.enter_context(progress(shown=shown))
        inspections = []
        for folder in folders:
            told(f"{folder.name}: loading", 0, 0)
            twin = load_model(str(folder))
            inspections.append(measure(twin, demo_batches(twin), progress=told))
        told("writing the page", 0, 0)
        page = write_report(inspections[0], out / folders[0].name) if report else None
    if as_json:
        models = [inspection.to_json() for inspection in inspections]
        document = {"schema_version": 1, "models": models, "bias_gradient": {"rows": _ROWS, **counts}}
        print_json(document)
        return
    names = [shell_word(folder) if report else folder.name for folder in folders]
    _print(inspections, names, counts, page)


def demo_batches(twin: LoadedModel) -> Batches:
    """The shipped text, in batches for one of the shipped models."""
    return from_text(
        demo.text(),
        "demo text",
        twin.model,
        twin.tokenizer,
        length=None,
        max_tokens=_TOKENS,
        batch_size=_BATCH_SIZE,
    )


def _print(inspections: list[Inspection], names: list[str], counts: dict[str, int], page: Path | None) -> None:
    faulty, healthy = map(describe, inspections)
    losses = [f"{inspection.model.loss:.3f}" for inspection in inspections]
    found = faulty.findings[0]
    facts = {
        "  evidence": found.evidence[0],
        "  where": shortened(found.sites, 2),
        "  do": found.remedy[0],
        "  more": f"normkit rule {found.rule}",
    }
    console = results()
    console.print("This GPT-2 looks fine. It is not.\n", style="bold")
    console.print(
        f"It has {inspections[0].model.parameters:,} parameters and went through a converter with a bug. It loads "
        "without a warning, every name and shape is right, and its loss is "
        f"{losses[0]} nats per token; the original's is {losses[1]}.\n"
    )
    console.print(f"$ normkit inspect {names[0]}", soft_wrap=True)
    console.print(marked(found.severity, f"{found.severity}  {found.rule}  {found.title}"))
    console.print(lines(Fact(label, value) for label, value in facts.items()))
    console.print(f"\n$ normkit inspect {names[1]}", soft_wrap=True)
    console.print(
        Text.assemble(marked(healthy.verdict.tone, healthy.verdict.headline), f"  {healthy.verdict.detail}\n")
    )
    headline, count = _count_in_words(counts)
    console.print(headline, style="bold")
    console.print(f"{count}\n")
    if page is not None:
        console.print(f"report      {shell_word(page)}  (for a browser)", soft_wrap=True)
    console.print("one token   normkit inspect --token  (what a norm does to its vector)")
    console.print("your model  normkit inspect MODEL  (a folder or a Hugging Face id)")


def _count_in_words(counts: dict[str, int]) -> tuple[str, str]:
    is_right = counts["torch"] == _ROWS
    threads = torch.get_num_threads()
    count = (
        f"In training, the bias of a LayerNorm adds up one gradient per row. For {_ROWS:,} rows with gradient 1, "
        f"torch {torch.__version__} returns {counts['torch']:,} (CPU, bfloat16, {threads} "
        f"thread{'s' * (threads > 1)}); nk.LayerNorm returns {counts['normkit']:,}."
    )
    rows = f"{_ROWS:,} rows"
    return ("This PyTorch counts rows right" if is_right else f"PyTorch counts {rows} as {counts['torch']:,}"), count


def _counted(layer: type[torch.nn.LayerNorm], dtype: torch.dtype = torch.bfloat16) -> int:
    """The bias gradient of a LayerNorm on the CPU for output gradients of 1; the right value is the number of rows."""
    module = layer(64, dtype=dtype)
    rows = torch.randn(_ROWS, 64, generator=torch.Generator().manual_seed(0))
    module(rows.to(dtype)).sum().backward()
    assert module.bias.grad is not None
    return int(module.bias.grad[0])
