"""The operations that fold in each declared family, and their error: docs/reference/folding.md.

python census/folding.py            write the page (a minute on one core)
python census/folding.py --check    say whether it is up to date
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.checkpoint.folding import fold as fold_checkpoint
from normkit.checkpoint.limits import LIMITS, by_limit
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.migration import asked_scales
from normkit.checkpoint.opening import open_checkpoint, open_model
from normkit.checkpoint.plan import ALL, FoldPlan, Refusal
from normkit.checkpoint.planning import make_plan
from normkit.models.family import declared_types
from pages import settle

# The tiny models are a part of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from folding_cases import difference, results
from tiny_models import RECIPES, configuration, gain_offset, norms, tiny

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "folding.md"

INTRODUCTION = """\
# What folds where

`normkit fold` and `nk.fold` know {families} families, each as a graph of readers and writers in
`src/normkit/models/*.toml`. What may be done is derived from that graph ([why](../explanation/folding.md)); a
family or a tensor that is not declared is an error that names it.

    python census/folding.py           # writes this page
    python census/folding.py --check   # says whether it is up to date

Each row is a tiny model with random weights: gains of both signs and one zero, biases and embeddings with a mean, no
two sizes alike. All operations of `--ops all` are asked for at once, with the head untied.

- **gains**, **biases**: those that left their norm, of those that there are; of the biases, "kept" are those that stay
  as b / g, as a reader has none to take them.
- **centred**: writers whose mean is gone.
- **RMS**: LayerNorms that became RMSNorms with the same eps, of all LayerNorms.
- **values**: attentions whose value bias moved behind them.
- **scale**, **rotate**: whether the residual stream can be halved, and rotated, each asked for alone; of those that can
  not, the reasons stand below.
- **migrate**: gains that were divided by scales, drawn at random; `exponent` moves powers of two out of the same.
- **unoffset**: the stock family with plain gains, loaded from disk and run; "no" where none computes the same, "-"
  where gains are plain already.
- **error**: the largest difference of a logit or an embedding in float64, of all of these folds, with nothing on the
  way rounded to less; logits reach 0.3 to 10. Given as the next power of ten above it, from 1e-13 on: what is below
  depends on the order of sums.

| model | gains | biases | centred | RMS | values | scale | rotate | migrate | unoffset | error |
|---|---|---|---|---|---|---|---|---|---|---|
"""

LIMITED = """
## What a verified fold does not prove

`normkit verify SRC DST` derives every byte of DST anew from SRC. It does not prove these:

{limits}

Nor these, of single operations:

{by_operation}
"""

REASONS = """
## What is left, and why

"""


def main() -> None:
    rows: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in RECIPES:
        row, left = examined(name)
        rows.append(row)
        # Families that differ by their names alone have the same reasons.
        reasons.setdefault(left, []).append(title(name))
        print(row, file=sys.stderr)
    introduction = INTRODUCTION.format(families=len(declared_types()))
    text = introduction + "\n".join(rows) + "\n" + REASONS
    text += "".join(f"- {'; '.join(names)}\n{left}\n" for left, names in reasons.items() if left)
    text += LIMITED.format(
        **{
            key: "\n".join(f"- {limit};" for limit in limits[:-1]) + f"\n- {limits[-1]}."
            for key, limits in (("limits", LIMITS), ("by_operation", by_limit()))
        }
    )
    settle(PAGE, text, check="--check" in sys.argv)


def examined(name: str) -> tuple[str, str]:
    """The row of one model, and what is left of it."""
    model, inputs = drawn(name)
    scaled, scale = streamed(model, inputs, "scale", halvings=3)
    rotated, rotate = streamed(without_zero_gains(name), inputs, "rotate")
    migrated, migrate = migration(name)
    plain, unoffset, against = unoffsetting(name)
    folded, plan = changed(model, inputs, operations=ALL)
    error = max(scaled, rotated, migrated, plain, folded)
    cells = (
        *counts(plan),
        values(plan),
        *("no" if each else "yes" for each in (scale, rotate)),
        migrate,
        unoffset,
        f"< 1e{max(-13, math.ceil(math.log10(error or 1e-13)))}",
    )
    refused = dataclasses.replace(plan, refusals=(*plan.refusals, *scale, *rotate, *against))
    return f"| {title(name)} | {' | '.join(cells)} |", left(refused)


def drawn(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The model of a recipe with its head untied, if it has one."""
    return tiny(name, tied=False if False in RECIPES[name].ties else None)


def changed(model: Any, inputs: dict[str, Tensor], **choices: Any) -> tuple[float, FoldPlan]:
    """The largest change of a model's results by a fold of a copy; 0 where all is refused."""
    opened, folded = open_model(model), copy.deepcopy(model)
    plan = make_plan(
        opened,
        untie=True,
        **{key: value for key, value in choices.items() if key != "scales"},
        scales=asked_scales(choices.get("scales")),
    )
    if not any(edit.relation != "identical" for edit in plan.edits):
        return 0.0, plan
    fold(folded, untie=True, **choices)
    return difference(results(model, inputs), results(folded, inputs)), plan


def without_zero_gains(name: str) -> Any:
    """The model of a recipe; a gain of zero beside a bias cannot leave a norm whose reader has no bias."""
    model, _ = drawn(name)
    with torch.no_grad():
        for norm in norms(model).values():
            if getattr(norm, "weight", None) is not None:
                norm.weight += 0.1 * (norm.weight == -gain_offset(norm))
    return model


def streamed(
    model: Any, inputs: dict[str, Tensor], operation: str, **options: int
) -> tuple[float, tuple[Refusal, ...]]:
    """The largest change of the results by scaling or rotating, and the refusals of the stream."""
    heads = {attention.name for attention in open_model(model).graph.attentions}
    error, plan = changed(model, inputs, operations=[operation], **options)
    return error, tuple(each for each in plan.refusals if each.operation == operation and each.place not in heads)


def migration(name: str) -> tuple[float, str]:
    """The change of the results by dividing gains by random scales, and how many of all gains were divided."""
    model, inputs = drawn(name)
    generator = torch.Generator().manual_seed(7)
    graph, state = open_model(model).graph, model.state_dict()
    scales = {
        norm.name: torch.exp2(6 * torch.rand(len(state[norm.weight]), generator=generator, dtype=torch.float64) - 3)
        for norm in graph.norms
        if norm.weight is not None and graph.readers(norm.gives)
    }
    if not scales:
        return 0.0, "-"
    error, plan = changed(model, inputs, operations=["migrate"], scales=scales)
    fates = [norm.gain for norm in plan.norms if norm.gain != "none"]
    return error, f"{fates.count('scaled')} of {len(fates)}"


def unoffsetting(name: str) -> tuple[float, str, tuple[Refusal, ...]]:
    """The change of the results by plain gains in another class, its family or "no", and the refusals."""
    model, inputs = drawn(name)
    if not any(norm.offset for norm in open_model(model).graph.norms):
        return 0.0, "-", ()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/source")
        with open_checkpoint(Path(folder, "source")) as opened:
            plan = make_plan(opened, operations=["unoffset"])
        if not any(edit.relation != "identical" for edit in plan.edits):
            return 0.0, "no", plan.refusals
        fold_checkpoint(f"{folder}/source", f"{folder}/plain", operations=["unoffset"])
        made = load(f"{folder}/plain").eval()
    return difference(results(model, inputs), results(made, inputs)), str(made.config.model_type), ()


def title(name: str) -> str:
    """The model type, with what the variant sets."""
    recipe = RECIPES[name]
    variant = name.removeprefix(str(configuration(recipe).model_type)).strip("_").replace("_", " ")
    kind = configuration(recipe).model_type
    return f"{kind}, {variant}" if variant and kind != name else str(kind)


def counts(plan: FoldPlan) -> tuple[str, str, str, str]:
    gains = [norm.gain for norm in plan.norms if norm.gain != "none"]
    biases = [norm.bias for norm in plan.norms if norm.bias != "none"]
    kept = biases.count("divided")
    layers = sum(norm.becomes_rms for norm in plan.norms) + sum(
        refusal.operation == "rms" and refusal.place != plan.architecture for refusal in plan.refusals
    )
    return (
        f"{gains.count('folded')} of {len(gains)}" if gains else "-",
        (f"{biases.count('folded')} of {len(biases)}" + (f", {kept} kept" if kept else "")) if biases else "-",
        str(len(plan.centred)) if plan.centred else "-",
        f"{sum(norm.becomes_rms for norm in plan.norms)} of {layers}" if layers else "-",
    )


def values(plan: FoldPlan) -> str:
    moved = sum(
        term.vector.is_folded for edit in plan.edits for term in getattr(getattr(edit, "value", None), "terms", ())
    )
    refused = sum(refusal.operation == "value" for refusal in plan.refusals)
    return f"{moved} of {moved + refused}" if moved + refused else "-"


def left(plan: FoldPlan) -> str:
    """Reasons of the refusals, each once, with stars for layers."""
    found = {}
    for refusal in plan.refusals:
        if refusal.reason != "its norms are RMSNorms" and "is an RMSNorm, which sees" not in refusal.reason:
            found[refusal.operation, starred(refusal.place), starred(refusal.reason)] = None
    lines = [f"  - {operation}, `{place}`: {reason}" for operation, place, reason in found]
    return "\n".join(lines)


def starred(text: str) -> str:
    return re.sub(r"\.\d+(?=[.,;:\s]|$)", ".*", text)


if __name__ == "__main__":
    main()
