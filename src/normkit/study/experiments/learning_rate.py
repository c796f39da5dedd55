"""`learning-rate`: how sensitive training is to the learning rate, with norms, without, and with QK-norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from normkit.files import finite
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, Line, swept_lines
from normkit.study.corpus import next_token_loss, text_of_the_library
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, excess, over_rates, range_of, sensitivity
from normkit.study.training_run import Batch
from normkit.study.transformer import Transformer, attention_scores

_MODELS: Mapping[str, Mapping[str, Any]] = {
    "LayerNorm": {},
    "LayerNorm and QK-norm": {"query_key_norm": True},
    "no norm": {"norm": None, "placement": "none"},
}
_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_STEP_RATES = tuple(10 ** (quarter / 4) for quarter in range(-48, 13))
_AT_RATE = "{}, rate {:g}"
_BY_BLOCK = "one block at a time, {}"
_COMPARED = ("LayerNorm", "no norm")
_LAST = 20
"""Steps at the end of a run whose mean loss is compared."""


def _arms(settings: Settings) -> tuple[Arm, ...]:
    trained = [
        Arm(name=_AT_RATE.format(model, rate), choices={"model": model, "rate": rate})
        for model in _MODELS
        for rate in settings["rates"]
    ]
    return (*trained, *(Arm(name=_BY_BLOCK.format(name), choices={"model": name}, cost=0.7) for name in _COMPARED))


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    """A training run at one rate, or the best rate of each block."""
    is_trained = "rate" in arm.choices
    layers = context["layers" if is_trained else "deep_layers"]
    model = context.transformer(layers=layers, **_MODELS[arm.choices["model"]])
    training, _ = text_of_the_library()
    if not is_trained:
        batch = context.text_ids(training, seed=context.seed)
        # float64: the smallest steps move the loss by less than float32 resolves. Two windows are enough.
        return _step_rates(model.to(context.device, torch.float64), (batch[:2],))
    run = context.train_on_text(model, context.recipe(learning_rate=arm.choices["rate"]))
    score = _largest_score(model, context.text_ids(training, batch=4, seed=context.seed + 1_000_003)[:, :-1])
    return run.measurement(last=run.mean_of_last(_LAST), diverged=run.diverged, score=score)


@torch.no_grad()
def _largest_score(model: Transformer, ids: torch.Tensor) -> float | None:
    """The largest magnitude of an attention score that a token may see, over all blocks; None if it is not finite."""
    x = model.embed(ids)
    largest: float = 0.0
    for place, block in enumerate(model.blocks):
        scores, seen = attention_scores(model, place, x)
        largest = max(largest, float(scores[..., seen].abs().max()))
        x = block(x)
    return finite(largest)


def _step_rates(model: Transformer, batch: Batch) -> Measurement:
    """For each block, moved alone by one step of gradient descent: the lowest and the highest rate that work.

    A rate works if the loss falls at least a tenth as far as with the block's best rate. The highest is the last before
    the first that does not work: far above it a step ends at a random point, and may work by chance.
    """
    before = next_token_loss(model, batch)
    torch.autograd.backward(before)
    lowest, highest = [], []
    with torch.no_grad():
        for block in model.blocks:
            start = [weight.clone() for weight in block.parameters()]
            falls = []
            for rate in _STEP_RATES:
                for weight, was in zip(block.parameters(), start, strict=True):
                    if weight.grad is not None:
                        weight.copy_(was - rate * weight.grad)
                falls.append((before - next_token_loss(model, batch)).item())
            for weight, was in zip(block.parameters(), start, strict=True):
                weight.copy_(was)
            least = 0.1 * max(fall for fall in falls if math.isfinite(fall))
            works = [fall >= least for fall in falls]
            low = works.index(True)
            high = works.index(False, low) - 1 if False in works[low:] else len(works) - 1
            lowest.append(_STEP_RATES[low])
            highest.append(_STEP_RATES[high])
    return {"lowest": lowest, "highest": highest}


def _sensitivity_above(model: str, paired: Paired) -> float:
    """`sensitivity` over the rates from LayerNorm's best on; at lower ones all models are undertrained alike."""
    best = min(range(len(runs := over_rates(paired, "LayerNorm"))), key=lambda place: float(runs[place]["last"]))
    return excess([float(run["last"]) for run in over_rates(paired, model)[best:]])


def _growth(paired: Paired, *, model: str) -> float:
    """The largest score after training at the highest rate over that at the lowest; infinite if it is not finite."""
    first, *_, last = over_rates(paired, model)
    return math.inf if last["score"] is None else float(last["score"] / first["score"])


def _common(paired: Paired, *, model: str) -> float:
    """Decades of rates that work for every block; negative if the ranges of two blocks do not overlap."""
    windows = paired[_BY_BLOCK.format(model)]
    return math.log10(min(windows["highest"]) / max(windows["lowest"]))


_CLAIMS = (
    Claim(
        says="Attention scores grow without bound at high learning rates, and QK-norm stops that",
        source="Wortsman et al. 2023, arXiv:2309.14322",
        conditions=(
            Condition(
                says="LayerNorm: the largest score at rate 0.1 is at least 100 times that at 0.0003",
                statistic=partial(_growth, model="LayerNorm"),
                low=100.0,
                published="scores above 10,000 where training diverges",
                source="the paper's scores grow by orders of magnitude",
            ),
            Condition(
                says="LayerNorm and QK-norm: at most 20 times",
                statistic=partial(_growth, model="LayerNorm and QK-norm"),
                high=20.0,
                source="the root of the head width times the squared gain that is learned",
            ),
        ),
    ),
    Claim(
        says="QK-norm makes the final loss less sensitive to the learning rate",
        source="Wortsman et al. 2023, arXiv:2309.14322",
        conditions=(
            Condition(
                says="the mean loss above the best, over the rates from LayerNorm's best on, is lower with QK-norm",
                statistic=lambda paired: (
                    _sensitivity_above("LayerNorm", paired) - _sensitivity_above("LayerNorm and QK-norm", paired)
                ),
                low=0.0,
                published="lower at every size",
                source="at lower rates all models are undertrained alike, which dilutes the mean",
                bound="paper",
            ),
            Condition(
                says="the same over all rates",
                statistic=lambda paired: (
                    sensitivity(paired, "LayerNorm") - sensitivity(paired, "LayerNorm and QK-norm")
                ),
            ),
        ),
    ),
    Claim(
        says="With a norm training is less sensitive to the learning rate than without",
        source="Ioffe & Szegedy 2015, arXiv:1502.03167, of BatchNorm; repeated of LayerNorm",
        conditions=(
            Condition(
                says="the mean loss above the best, over all rates, is at least 0.1 nats a byte lower with LayerNorm",
                statistic=lambda paired: sensitivity(paired, "no norm") - sensitivity(paired, "LayerNorm"),
                low=0.1,
                source="several times the difference of two seeds",
            ),
        ),
        ledger=("C71",),
    ),
    Claim(
        says="Without a norm, a learning rate that works for one layer fails for another",
        source="repeated in many introductions",
        conditions=(
            Condition(
                says="no norm: the rates that work for two of the blocks lie at least a decade apart",
                statistic=partial(_common, model="no norm"),
                high=-1.0,
                source="decades that all blocks share; below 0 they share none",
            ),
            Condition(
                says="LayerNorm: some rate works for every block",
                statistic=partial(_common, model="LayerNorm"),
                low=0.0,
                source="the same number",
            ),
        ),
        ledger=("C71",),
    ),
)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    return (
        Curves(
            name="learning-rate-loss",
            title="Loss at the end over the learning rate",
            caption=f"Mean of the last {_LAST} steps; a run that diverged counts as its first loss.",
            description="All three train at low rates; they differ at high ones.",
            x_label="peak learning rate",
            y_label="loss (nats a byte)",
            panels=(("", swept_lines(seeds, _MODELS, _AT_RATE, "last", settings["rates"])),),
            x_log=True,
        ),
        Curves(
            name="learning-rate-scores",
            title="Largest attention score after training",
            caption="On windows that were not trained on; a cross: not finite.",
            description="Scores grow by orders of magnitude with the rate unless queries and keys are normalized.",
            x_label="peak learning rate",
            y_label="largest score",
            panels=(("", swept_lines(seeds, _MODELS, _AT_RATE, "score", settings["rates"])),),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="learning-rate-blocks",
            title="Rates that work for one block",
            caption="One gradient step of one block alone, before training; the middle and the range of what works.",
            description="Without a norm the rates of early blocks are far below those of late ones.",
            x_label="block",
            y_label="rate",
            panels=(("", tuple(_windows(model, seeds) for model in _COMPARED)),),
            y_log=True,
        ),
    )


def _windows(model: str, seeds: list[Paired]) -> Line:
    """The rates that work for each block, medians over seeds: geometric middle, lowest and highest."""
    found = [paired[_BY_BLOCK.format(model)] for paired in seeds]
    low, high = (
        tuple(range_of(values)[0] for values in zip(*(each[end] for each in found), strict=True))
        for end in ("lowest", "highest")
    )
    middle = tuple(math.sqrt(least * most) for least, most in zip(low, high, strict=True))
    return Line(label=model, x=tuple(range(1, len(low) + 1)), y=middle, low=low, high=high)


STUDY = Study(
    name="learning-rate",
    title="Learning rate",
    question="Which learning rates train, with a norm, without, and with normalized queries and keys?",
    claims=_CLAIMS,
    quick=budget(seeds=3, layers=4, deep_layers=12, width=64, batch=8, window=64, steps=150, warmup=10, rates=_RATES),
    standard=budget(steps=300, warmup=20),
    full=budget(seeds=10, steps=1000, warmup=50),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="bytes of Python's standard library",
    regime="4 layers of width 64, AdamW with clipping at 1; the best rates of single blocks at 12 layers, before "
    "training.",
)
