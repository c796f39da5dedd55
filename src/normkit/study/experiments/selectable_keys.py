"""`selectable-keys`: what centring and scaling do for trained attention: majorities, and keys out of reach."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import specs
from normkit.geometry import attention_entropy, selectable
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, loss_line
from normkit.study.model_parts import Centring, NormLayer
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference, value_of
from normkit.study.training_run import Batch
from normkit.study.transformer import Transformer, attention_scores

NORMS: dict[str, NormLayer] = {
    "LayerNorm": specs.TORCH_LAYER_NORM,
    "scaling only": specs.TORCH_RMS_NORM.replace(eps=1e-5),
    "centring only": Centring,
    "no norm": None,
}


def majority_batches(settings: Settings, seed: int) -> Iterator[Batch]:
    """Endless batches (batch, window) of classes of equal probability, and the class (batch,) that is most frequent.

    A tie goes to the least class of it.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(settings["classes"], (settings["batch"], settings["window"]), generator=generator)
        yield ids, F.one_hot(ids, settings["classes"]).sum(1).argmax(-1)


def majority_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the majority under the logits of the last token."""
    ids, majority = batch
    return F.cross_entropy(model(ids)[:, -1], majority)


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """Train one layer of one head on a task; then how even its attention is, and which keys no query can prefer."""
    norm, recipe = NORMS[arm.choices["norm"]], context.recipe()
    sizes = {"heads": 1, "layers": 1, "norm": norm, "placement": "pre", "final_norm": False}
    if arm.choices["task"] == "majority":
        model = context.transformer(vocabulary=context["classes"], causal=False, **sizes)
        batches = majority_batches(context.settings, context.seed)
        run = context.train(model, recipe, batches, majority_loss)
        ids, _ = next(majority_batches(context.settings, context.seed + 1_000_003))
    else:
        model = context.transformer(context=context["text_window"], **sizes)
        run = context.train_on_text(model, recipe, batch=4)
        ids = context.text_ids(batch=4, window=context["text_window"])[:, :-1]
    evenness, hidden = of_attention(model.eval(), ids.to(context.device))
    return run.measurement(recipe.steps, loss=run.mean_of_last(), evenness=evenness, hidden=hidden)


@torch.no_grad()
def of_attention(model: Transformer, ids: Tensor) -> tuple[float, float]:
    """The mean entropy of attention to all tokens over that of attention to all alike, and the share of hidden keys.

    A key is hidden if no query gives it the largest score: if it lies inside the convex hull of the others. The keys
    are the rows that the attention reads; its key matrix, if it is invertible, hides none and shows none.
    """
    x = model.embed(ids)
    scores, _ = attention_scores(model, 0, x)
    uniform = torch.tensor(float(ids.shape[-1])).log().item()
    norm, _ = model.attention(0)
    # Keys of one row that are equal are one key; positions keep them apart.
    hidden = [1 - selectable(keys).double().mean().item() for keys in norm(x[:4])]
    return attention_entropy(scores).mean().item() / uniform, sum(hidden) / len(hidden)


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    return tuple(
        Arm(name=f"{task}, {norm}", choices={"task": task, "norm": norm})
        for task, norms in (("majority", tuple(NORMS)), ("text", ("LayerNorm", "scaling only", "no norm")))
        for norm in norms
    )


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    steps = settings["steps"]
    lines = tuple(loss_line(norm, f"majority, {norm}", seeds, steps) for norm in NORMS)
    return (
        Curves(
            name="majority-loss",
            title="Learning which class is most frequent",
            caption="One layer of one head; means over blocks of steps, medians and ranges over seeds.",
            description="How fast attention learns to count all tokens alike, with each part of a norm.",
            x_label="step",
            y_label="loss (nats)",
            panels=(("", lines),),
        ),
    )


_BRODY = "Brody, Alon & Yahav 2023, arXiv:2305.02582"


def _faster(arm: str, other: str, name: str, says: str, *, above: bool = False) -> Condition:
    return Condition(
        says=says,
        statistic=difference(f"majority, {arm}", f"majority, {other}", name),
        **({"low": 0.0} if above else {"high": 0.0}),  # type: ignore[arg-type]
        published="converges faster",
        bound="paper",
    )


STUDY = Study(
    name="selectable-keys",
    title="Selectable keys",
    question="Does centring help attention to count a majority, and does scaling bring every key within reach?",
    claims=(
        Claim(
            says="Centring helps attention to attend to all keys equally, and so to find a majority",
            source=f"{_BRODY}, abstract and section 4.1",
            conditions=(
                _faster("LayerNorm", "scaling only", "loss", "LayerNorm ends at a lower loss than scaling alone"),
                _faster("centring only", "no norm", "loss", "centring alone ends at a lower loss than no norm"),
                _faster(
                    "LayerNorm",
                    "scaling only",
                    "evenness",
                    "attention is more even with LayerNorm than with scaling",
                    above=True,
                ),
            ),
        ),
        Claim(
            says="Scaling leaves no key that no query can select",
            source=f"{_BRODY}, abstract and section 4.2",
            control=Condition(
                says="without a norm at least a tenth of the keys of the trained model cannot be selected",
                statistic=value_of("text, no norm", "hidden"),
                low=0.1,
                source="there must be hidden keys for scaling to show; a tenth is ours",
            ),
            conditions=tuple(
                Condition(
                    says=f"{norm}: at most a hundredth of the keys",
                    statistic=value_of(f"text, {norm}", "hidden"),
                    high=0.01,
                    published="none",
                    source="points of an ellipsoid are corners of their hull, but for eps and equal keys",
                )
                for norm in ("LayerNorm", "scaling only")
            ),
        ),
    ),
    quick=budget(
        seeds=3, width=8, classes=10, batch=32, window=40, text_window=256, steps=250, warmup=10, learning_rate=1e-2
    ),
    full=budget(seeds=10, steps=3000),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="classes of equal probability and their majority; bytes of Python's standard library",
    regime="one layer of one head of width 8, as the paper's, 250 steps of AdamW at 0.01",
)
