"""`centring`: is LayerNorm's centring needed, is all-ones a special direction, and does training drift along it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.identification.state import hooked
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, Curves, arm_lines, arm_values
from normkit.study.corpus import held_out_loss
from normkit.study.model_parts import Centring, HyperplaneNorm, NormLayer, random_hyperplanes
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, Statistic, difference, largest, padded, share_of_effect
from normkit.study.transformer import Residual, Transformer, branch_ends

_SHALLOW = ("LayerNorm", "RMSNorm", "hyperplane", "own hyperplanes", "16 directions", "centring only")
_DEEP = ("LayerNorm", "RMSNorm", "hyperplane", "own hyperplanes", "16 directions", "centring only", "no norm")
_POINTS = 20
_DRIFTING = ("LayerNorm", "RMSNorm", "hyperplane")
# Norms, and the direction that they remove.
_REMOVED = (("LayerNorm", "all-ones"), ("hyperplane", "its normal"))


def _arms(settings: Settings) -> tuple[Arm, ...]:
    deep = settings["deep_layers"]
    return (
        *(Arm(name=norm, choices={"norm": norm, "layers": settings["layers"]}) for norm in _SHALLOW),
        *(Arm(name=f"{norm}, deep", choices={"norm": norm, "layers": deep}, cost=1.5) for norm in _DEEP),
    )


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """Train with one norm; losses, and shares of energy along the directions that the norms project out."""
    norms: Mapping[str, NormLayer] = {
        "LayerNorm": specs.TORCH_LAYER_NORM,
        "RMSNorm": specs.TORCH_RMS_NORM.replace(eps=1e-5),
        "hyperplane": random_hyperplanes(seed=context.seed),
        "own hyperplanes": random_hyperplanes(seed=context.seed, is_shared=False),
        "16 directions": random_hyperplanes(16, seed=context.seed),
        "centring only": Centring,
        "no norm": None,
    }
    name, layers = arm.choices["norm"], arm.choices["layers"]
    placement = "none" if name == "no norm" else "pre"
    model = context.transformer(layers=layers, norm=norms[name], placement=placement).to(context.device)
    steps = context["deep_steps" if arm.name.endswith("deep") else "steps"]
    recipe = context.recipe(steps=steps)
    directions = removed_directions(model)
    start = {path: writer.detach().clone() for path, writer in writers(model).items()}
    ids = context.text_ids(batch=8)[:, :-1]
    stream_start = stream_share(model, ids, directions)
    every = max(1, steps // _POINTS)
    at = list(range(every, steps, every)) or [0]

    def changes() -> float:
        return share((writer.detach() - start[path] for path, writer in writers(model).items()), directions)

    def observe(_model: nn.Module, step: int) -> Mapping[str, Any]:
        if step - 1 not in at:
            return {}
        return {"changes": changes(), "gradients": share(writing_gradients(model), directions)}

    run = context.train_on_text(model, recipe, observe=observe)
    biases = (module.bias.detach()[:, None] for _, module in branch_ends(model))
    return run.measurement(
        steps,
        held_out=run.capped(held_out_loss(model)),
        diverged=run.diverged,
        chance=1 / model.config.width,
        at=at,
        changes=padded(run.observed("changes"), len(at)),
        gradients=padded(run.observed("gradients"), len(at)),
        update=changes(),
        biases=share(biases, directions),
        stream_start=stream_start,
        stream_end=stream_share(model, ids, directions),
    )


def removed_directions(model: Transformer) -> Tensor:
    """The directions that the norms project out, as orthonormal columns: all-ones, except for `HyperplaneNorm`."""
    for module in model.modules():
        if isinstance(module, HyperplaneNorm):
            return module.directions.detach()
    embedding = model.embedding.weight.detach()
    return torch.full_like(embedding[0, :, None], 1 / math.sqrt(embedding.shape[1]))


def writers(model: Transformer) -> dict[str, Tensor]:
    """The matrices (n, inputs) that write to the residual stream, by path: embeddings and the ends of branches."""
    embeddings = {name: model.get_parameter(f"{name}.weight").mT for name in ("embedding", "position")}
    return {**embeddings, **{path: module.weight for path, module in branch_ends(model)}}


def writing_gradients(model: Transformer) -> list[Tensor]:
    """The gradients of `writers`, in their order and shape."""
    embeddings = [module.weight.grad for module in (model.embedding, model.position)]
    others = [module.weight.grad for _, module in branch_ends(model)]
    return [grad.mT for grad in embeddings if grad is not None] + [grad for grad in others if grad is not None]


def share(matrices: Iterable[Tensor], directions: Tensor) -> float:
    """Mean over matrices W (n, inputs) of |Q^T W|^2 / (k |W|^2): their energy along one of k directions.

    A matrix without a preferred direction has 1 / n; a matrix of zeros does not count.
    """
    wide = directions.double()
    shares = [
        ((wide.mT @ matrix.double()).square().sum() / matrix.double().square().sum()).item() / wide.shape[1]
        for matrix in matrices
        if bool(matrix.any())
    ]
    return sum(shares) / len(shares) if shares else math.nan


@torch.no_grad()
def stream_share(model: nn.Module, ids: Tensor, directions: Tensor) -> float:
    """`share` of the residual stream before each residual branch: mean over branches and rows."""
    found: list[float] = []

    def record(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].double().flatten(0, -2)
        along = (rows @ directions.double()).square().sum(-1) / directions.shape[1]
        found.append((along / rows.square().sum(-1)).mean().item())

    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    with hooked(module.register_forward_pre_hook(record) for module in residuals):
        model(ids)
    return sum(found) / len(found)


_NEEDED = Condition(
    says="in the deep model no norm ends at least 0.2 nats a byte above LayerNorm",
    statistic=difference("no norm, deep", "LayerNorm, deep", "held_out"),
    low=0.2,
    source="a task that needs no norm cannot tell one norm from another",
)


def _equal(arm: str, words: str, published: str = "") -> tuple[Condition, ...]:
    return (
        Condition(
            says=f"in the deep model {words} differs by less than a quarter of what a norm gains",
            statistic=share_of_effect(f"{arm}, deep", "LayerNorm, deep", "no norm, deep", "held_out"),
            low=-0.25,
            high=0.25,
            published=published,
            source="two one-sided tests of the difference over that of no norm",
        ),
        Condition(
            says=f"{words} in the shallow model, where no norm does well: loss above LayerNorm",
            statistic=difference(arm, "LayerNorm", "held_out"),
        ),
    )


def _of_chance(arm: str, name: str) -> Statistic:
    """A share over that of a matrix without a preferred direction."""
    return lambda paired: float(paired[arm][name]) / float(paired[arm]["chance"])


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    losses: dict[str, Any] = {
        "caption": "Every arm of one seed has the same initial weights and batches; points are seeds.",
        "label": "held-out loss (nats a byte)",
    }

    def shares(quantity: str, title: str, description: str) -> Curves:
        return Curves(
            name=f"centring-{quantity}",
            title=title,
            caption="Mean over the matrices that write to the residual stream; the line is chance, 1/n.",
            description=description,
            x_label="step",
            y_label="share of the energy",
            panels=(("", arm_lines(seeds, _DRIFTING, quantity, seeds[0][_DRIFTING[0]]["at"])),),
            y_log=True,
            reference=(1 / settings["width"], "chance, 1/n"),
        )

    return (
        Bars(
            name="centring-loss",
            title="Held-out loss by what is projected out",
            description="All norms that divide by a length end at the same loss, whatever direction they centre along.",
            values=arm_values(seeds, _SHALLOW, "held_out"),
            **losses,
        ),
        Bars(
            name="centring-loss-deep",
            title="Held-out loss in the deep model",
            description="Norms that divide by a length end at the same loss; the others are far above.",
            values=arm_values(seeds, [f"{norm}, deep" for norm in _DEEP], "held_out"),
            log=True,
            **losses,
        ),
        shares(
            "changes",
            "Energy of the change of weights along all-ones, or the norm's own direction",
            "The change stays near chance with RMSNorm, and far below it where the norm removes the direction.",
        ),
        shares(
            "gradients",
            "Energy of their gradients along it",
            "Near chance with RMSNorm; zero but for rounding where the norm removes the direction.",
        ),
    )


STUDY = Study(
    name="centring",
    title="Centring",
    question="Is LayerNorm's centring needed, is all-ones a special direction, and does training drift along it?",
    claims=(
        Claim(
            says="Centring is dispensable: RMSNorm works as well as LayerNorm",
            source="Zhang & Sennrich 2019, arXiv:1910.07467, abstract",
            control=_NEEDED,
            conditions=_equal("RMSNorm", "RMSNorm", published="comparable performance"),
            ledger=("C72",),
        ),
        Claim(
            says="All-ones is no special direction: centring along others works as well",
            source="asked here; in theory a rotation of the basis, up to the gain",
            control=_NEEDED,
            conditions=(
                *_equal("hyperplane", "one random hyperplane"),
                *_equal("own hyperplanes", "a random hyperplane of its own for each norm"),
                *_equal("16 directions", "projecting out 16 random directions of 64"),
            ),
            ledger=("C72",),
        ),
        Claim(
            says="Invariance to scale matters more than centring",
            source="Zhang & Sennrich 2019, arXiv:1910.07467, abstract: what they suppose",
            conditions=(
                Condition(
                    says="centring without division ends at least 0.2 nats above LayerNorm in the shallow model",
                    statistic=difference("centring only", "LayerNorm", "held_out"),
                    low=0.2,
                    source="4 times the bound of equivalence",
                    regime="the model is shallow",
                ),
                Condition(
                    says="... in the deep model",
                    statistic=difference("centring only, deep", "LayerNorm, deep", "held_out"),
                    low=0.2,
                    source="4 times the bound of equivalence",
                    regime="the model is deep",
                ),
            ),
            ledger=("C72",),
        ),
        Claim(
            says="Training makes use of recentring invariance: weights drift along all-ones",
            source="the use that one could make of the invariance in Ba et al. 2016, arXiv:1607.06450, table 1",
            conditions=tuple(
                Condition(
                    says=f"with {arm} the change of what writes to the stream has at least twice the chance share "
                    "along all-ones",
                    statistic=_of_chance(arm, "update"),
                    low=2.0,
                    source="share over 1/n; of a random matrix with 64 columns it is 1 +- 0.2 (deviation "
                    "sqrt(2 / columns))",
                )
                for arm in ("LayerNorm", "RMSNorm")
            ),
            ledger=("C73",),
        ),
        Claim(
            says="A norm that centres takes all gradient along its direction from what writes to the stream",
            source="derived here: an invariance has no gradient along itself",
            conditions=(
                *(
                    Condition(
                        says=f"with {arm} no gradient of what writes to the stream goes along {what}",
                        statistic=largest(arm, "gradients"),
                        high=1e-9,
                        source="theory: 0; float32 rounds to about 1e-7 of the length, 1e-14 of the energy",
                    )
                    for arm, what in _REMOVED
                ),
                *(
                    Condition(
                        says=f"with {arm} the share of the change along {what} is below half of chance",
                        statistic=_of_chance(arm, "update"),
                        high=0.5,
                        source="share over 1/n; plain gradient descent would leave 0, Adam's division by element does "
                        "not keep it at 0",
                    )
                    for arm, what in _REMOVED
                ),
            ),
            ledger=("C73",),
        ),
        Claim(
            says="Hidden vectors are orthogonal to all-ones with and without centring, which makes it redundant",
            source="Gupta et al. 2024, arXiv:2409.12951, as reported",
            conditions=tuple(
                Condition(
                    says=f"the stream of a model trained with {arm} has at most 4 times the chance share along "
                    "all-ones",
                    statistic=_of_chance(arm, "stream_end"),
                    high=4.0,
                    published="hidden vectors are orthogonal to all-ones, with either norm",
                    source="share over 1/n; 4/n at n = 64 is an angle of 75.5 degrees, and chance is 82.8",
                )
                for arm in ("LayerNorm", "RMSNorm")
            ),
            ledger=("C73",),
        ),
    ),
    quick=budget(
        seeds=3,
        layers=4,
        deep_layers=12,
        width=64,
        batch=8,
        window=64,
        steps=200,
        deep_steps=80,
        warmup=20,
        learning_rate=1e-3,
    ),
    full=budget(seeds=10, steps=600, deep_steps=300),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="Pre-LN models of 4 and 12 layers of width 64, a few hundred steps of AdamW at 1e-3 without weight decay",
)
