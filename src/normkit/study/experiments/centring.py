"""`centring`: is LayerNorm's centring of any use, is its hyperplane a special one, and does training drift along it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from normkit.study.chart import Bars, Chart, Curves, line
from normkit.study.curves import curve
from normkit.study.experiments.centring_arms import arms, measure
from normkit.study.result import Claim, Condition, Paired, Settings, Study, integer

_DRIFTING = ("LayerNorm", "RMSNorm", "hyperplane")


def _difference(arm: str, other: str) -> Callable[[Paired], float]:
    return lambda paired: float(paired[arm]["held_out"] - paired[other]["held_out"])


def _equal(arm: str, other: str, words: str, published: str = "") -> Condition:
    return Condition(
        says=f"{words} ends within 0.05 nats a byte of {other}",
        statistic=_difference(arm, other),
        low=-0.05,
        high=0.05,
        published=published,
        source="set beforehand: about the spread of one arm over seeds",
    )


def _of_chance(arm: str, name: str) -> Callable[[Paired], float]:
    """A share in units of what a matrix without a preferred direction has."""

    def statistic(paired: Paired) -> float:
        measured = paired[arm]
        value = measured[name]
        return float(value[-1] if isinstance(value, list) else value) / float(measured["chance"])

    return statistic


def _drift(arm: str) -> Condition:
    return Condition(
        says=f"with {arm} the change of what writes to the stream has at least twice the chance share along all-ones",
        statistic=_of_chance(arm, "update"),
        low=2.0,
        source="share over 1/n; of a random matrix with 64 columns it is 1 +- 0.2 (deviation sqrt(2 / columns))",
    )


def _vanishes(arm: str, what: str) -> Condition:
    return Condition(
        says=f"with {arm} no gradient of what writes to the stream goes along {what}",
        statistic=lambda paired: max(paired[arm]["gradients"]),
        high=1e-9,
        source="theory: 0; float32 rounds to about 1e-7 of the length, 1e-14 of the energy",
    )


def _fades(arm: str, what: str) -> Condition:
    return Condition(
        says=f"with {arm} the share of the change along {what} is below half of chance",
        statistic=_of_chance(arm, "update"),
        high=0.5,
        source="share over 1/n; plain gradient descent would leave 0, Adam's division by element does not keep it at 0",
    )


def _orthogonal(arm: str) -> Condition:
    return Condition(
        says=f"the stream of a model trained with {arm} has at most 4 times the chance share along all-ones",
        statistic=_of_chance(arm, "stream_end"),
        high=4.0,
        published="hidden vectors are orthogonal to all-ones, with either norm",
        source="share over 1/n; 4/n at n = 64 is an angle of 75.5 degrees, and chance is 82.8",
    )


def _charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    seeds = list(measured.values())
    whole = [arm.name for arm in arms(settings) if all(arm.name in paired for paired in seeds)]
    deep = [arm for arm in whole if arm.endswith("deep")]
    return (
        _losses(
            "centring-loss",
            "Held-out loss by what is projected out",
            "All norms that divide by a length end alike, whatever they centre along.",
            {arm: [paired[arm]["held_out"] for paired in seeds] for arm in whole if arm not in deep},
        ),
        _losses(
            "centring-loss-deep",
            "Held-out loss in the deep model",
            "LayerNorm and RMSNorm end alike; centring without division does not hold the stream.",
            {arm: [paired[arm]["held_out"] for paired in seeds] for arm in deep},
            log=True,
        ),
        _shares(
            "centring-changes",
            "Energy of the change of weights along all-ones, or the norm's own direction",
            "The change stays near chance with RMSNorm, and far below it where the norm removes the direction.",
            "changes",
            settings,
            seeds,
        ),
        _shares(
            "centring-gradients",
            "Energy of their gradients along it",
            "Near chance with RMSNorm; zero but for rounding where the norm removes the direction.",
            "gradients",
            settings,
            seeds,
        ),
    )


def _losses(
    name: str, title: str, description: str, values: Mapping[str, list[float | None]], *, log: bool = False
) -> Bars:
    return Bars(
        name=name,
        title=title,
        caption="Every arm of one seed has the same initial weights and batches; points are seeds.",
        description=description,
        label="held-out loss (nats a byte)",
        values=tuple((arm, tuple(curve(of_seeds))) for arm, of_seeds in values.items()),
        log=log,
    )


def _shares(name: str, title: str, description: str, quantity: str, settings: Settings, seeds: list[Paired]) -> Curves:
    """One line a norm through the shares of energy that its seeds gave."""
    lines = tuple(
        line(norm, seeds[0][norm]["at"], [curve(paired[norm][quantity]) for paired in seeds]) for norm in _DRIFTING
    )
    return Curves(
        name=name,
        title=title,
        caption="Mean over the matrices that write to the residual stream; the line is chance, 1/n.",
        description=description,
        x_label="step",
        y_label="share of the energy",
        panels=(("", lines),),
        y_log=True,
        reference=(1 / integer(settings, "width"), "chance, 1/n"),
    )


STUDY = Study(
    name="centring",
    title="Centring",
    question="Is LayerNorm's centring needed, is all-ones a special direction, and does training drift along it?",
    claims=(
        Claim(
            says="Centring is dispensable: RMSNorm works as well as LayerNorm",
            source="Zhang & Sennrich 2019, arXiv:1910.07467, abstract",
            conditions=(
                _equal("RMSNorm", "LayerNorm", "RMSNorm", published="comparable performance"),
                _equal("RMSNorm, deep", "LayerNorm, deep", "RMSNorm in a deep model"),
            ),
            ledger=("C72",),
        ),
        Claim(
            says="All-ones is no special direction: centring along others works as well",
            source="asked here; in theory a rotation of the basis, up to the gain",
            conditions=(
                _equal("hyperplane", "LayerNorm", "one random hyperplane"),
                _equal("own hyperplanes", "LayerNorm", "a random hyperplane of its own for each norm"),
                _equal("16 directions", "LayerNorm", "projecting out 16 random directions of 64"),
            ),
            ledger=("C72",),
        ),
        Claim(
            says="Invariance to scale matters more than centring",
            source="Zhang & Sennrich 2019, arXiv:1910.07467, abstract: what they suppose",
            conditions=(
                Condition(
                    says="centring without division ends at least 0.2 nats above LayerNorm in the shallow model",
                    statistic=_difference("centring only", "LayerNorm"),
                    low=0.2,
                    source="4 times the bound of equivalence",
                    regime="the model is shallow",
                ),
                Condition(
                    says="... in the deep model",
                    statistic=_difference("centring only, deep", "LayerNorm, deep"),
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
            conditions=(_drift("LayerNorm"), _drift("RMSNorm")),
            ledger=("C73",),
        ),
        Claim(
            says="A norm that centres takes all gradient along its direction from what writes to the stream",
            source="derived here: an invariance has no gradient along itself",
            conditions=(
                _vanishes("LayerNorm", "all-ones"),
                _vanishes("hyperplane", "its normal"),
                _fades("LayerNorm", "all-ones"),
                _fades("hyperplane", "its normal"),
            ),
            ledger=("C73",),
        ),
        Claim(
            says="Hidden vectors are orthogonal to all-ones with and without centring, which makes it redundant",
            source="Gupta et al. 2024, arXiv:2409.12951, as reported",
            conditions=(_orthogonal("LayerNorm"), _orthogonal("RMSNorm")),
            ledger=("C73",),
        ),
    ),
    quick={
        "seeds": 3,
        "layers": 4,
        "deep_layers": 12,
        "width": 64,
        "batch": 8,
        "window": 64,
        "steps": 200,
        "deep_steps": 80,
        "warmup": 20,
        "learning_rate": 1e-3,
    },
    full={"seeds": 8, "steps": 600, "deep_steps": 300},
    arms=arms,
    measure=measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="Pre-LN models of 4 and 12 layers of width 64, a few hundred steps of AdamW at 1e-3 without weight decay",
)
