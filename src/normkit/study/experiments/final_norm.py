"""`final-norm`: the effect of the norm before the unembedding on logits, gradients and the choice of learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, Line, arm_lines
from normkit.study.corpus import MarkovChain, next_token_loss
from normkit.study.propagation import gradient_norm, last_token_gradient, mean_square
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, excess, exponent

_START_VOCABULARY = 256


_BARE = "no norm at all"


def _arms(_settings: Settings) -> tuple[Arm, ...]:
    return (
        *(
            Arm(name=f"{placement}, {words}", choices={"placement": placement, "final_norm": final})
            for placement in ("pre", "post")
            for words, final in (("final norm", True), ("none", False))
        ),
        Arm(name=_BARE, choices={"placement": "none", "norm": None}),
    )


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    depths, rates = context["depths"], context["rates"]
    starts = [_start(context, arm, layers) for layers in depths if arm.name != _BARE]
    chain = MarkovChain(window=context["window"])
    losses, firsts = [], []
    findings: list[dict[str, Any]] = []
    for done, rate in enumerate(rates, start=1):
        batches = chain.batches(batch=context["batch"], seed=context.seed)
        model, recipe = context.transformer(vocabulary=chain.symbols, **arm.choices), context.recipe(learning_rate=rate)
        run = context.train(model, recipe, batches, next_token_loss, name=f"rate {rate:g}")
        losses.append(run.mean_of_last())
        firsts.append(run.points[0].loss)
        findings.extend({"rate": rate, **finding} for finding in run.findings)
        context.report(done / len(rates))
    return {
        "depths": depths,
        "rates": rates,
        **{name: [start[name] for start in starts] for name in (starts or [{}])[0]},
        "losses": losses,
        "first": firsts[0],
        "findings": findings,
    }


def _start(context: ArmContext, arm: Arm, layers: int) -> dict[str, float]:
    """Rms of the logits and two gradient norms before any training, on random ids."""
    window = context["start_window"]
    sizes = {"context": window, "width": context["start_width"], "layers": layers}
    model = context.transformer(vocabulary=_START_VOCABULARY, **sizes, **arm.choices)
    context.move(model)
    rows = max(1, context["start_tokens"] // window)
    ids, _ = context.random_ids(_START_VOCABULARY, rows=rows, tokens=window)
    logits: list[Tensor] = []
    model.unembedding.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    last = last_token_gradient(model, ids)
    return {
        "logits": math.sqrt(mean_square(logits[0])),
        "unembedding_gradient": gradient_norm(model.unembedding),
        "last_gradient": last,
    }


def _without(of_losses: Callable[[list[float]], float], paired: Paired, arm: str = "pre, none") -> float:
    """A number of the losses over the rates of Pre-LN without the final norm, minus that number with it."""
    return float(of_losses(paired[arm]["losses"]) - of_losses(paired["pre, final norm"]["losses"]))


def _farthest(paired: Paired) -> float:
    """The loss of Post-LN without the final norm minus that with it, at the rate where it is greatest in magnitude."""
    pairs = zip(paired["post, none"]["losses"], paired["post, final norm"]["losses"], strict=True)
    return float(max((without - kept for without, kept in pairs), key=abs))


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    def lines(places: str, quantity: str) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        names = [arm.name for arm in _arms(settings) if arm.name != _BARE or places == "rates"]
        return (("", arm_lines(seeds, names, quantity, settings[places])),)

    return (
        Curves(
            name="final-norm-logits",
            title="Logits at the start",
            caption="Root mean square of the logits of untrained models; both axes are logarithmic.",
            description="Pre-norm without a final norm rises like the root of the depth; the other three are level.",
            x_label="layers",
            y_label="rms of the logits",
            panels=lines("depths", "logits"),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="final-norm-gradient",
            title="Gradient of the last MLP at the start",
            caption="Norm of the gradient of its two matrices under the loss of one token; both axes are logarithmic.",
            description="Pre-norm with a final norm falls like the inverse root of the depth; without one it is level.",
            x_label="layers",
            y_label="gradient norm",
            panels=lines("depths", "last_gradient"),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="final-norm-rates",
            title="Loss after short training, by learning rate",
            caption="Mean of the last 20 steps; each rate starts from the same weights and sees the same batches.",
            description="How far the curves are above the floor, and how wide their minima are.",
            x_label="peak learning rate",
            y_label="loss (nats a token)",
            panels=lines("rates", "losses"),
            x_log=True,
            reference=(MarkovChain(window=settings["window"]).floor, "entropy of the chain"),
        ),
    )


def _exponent_of(name: str, quantity: str, words: str, theory: float, why: str, published: str = "") -> Condition:
    return Condition(
        says=f"{words}: exponent {theory:g} within 0.1",
        statistic=exponent(name, quantity),
        low=theory - 0.1,
        high=theory + 0.1,
        published=published,
        source=f"{why}; windows are short, so that layers add alike, and 12 layers and more are fitted",
    )


_XIONG = "Xiong et al. 2020, arXiv:2002.04745"
_STREAM = "the stream's rms grows like the root of L, lemma 2"

STUDY = Study(
    name="final-norm",
    title="The final norm",
    question="What does the norm before the unembedding do in Pre-LN and in Post-LN?",
    claims=(
        Claim(
            says="Without a final norm the logits of an untrained Pre-LN model grow with depth; with it they do not",
            source=f"follows from {_XIONG}, lemma 2; Radford et al. 2019 (GPT-2) add a norm after the last block",
            conditions=(
                _exponent_of("pre, none", "logits", "Pre-LN without, rms of the logits", 0.5, _STREAM),
                _exponent_of("pre, final norm", "logits", "Pre-LN with, rms of the logits", 0, "the norm sets its rms"),
                _exponent_of("post, none", "logits", "Post-LN without, rms of the logits", 0, "its last norm does"),
                Condition(
                    says="Pre-LN without, gradient of the unembedding: exponent",
                    statistic=exponent("pre, none", "unembedding_gradient"),
                ),
                Condition(
                    says="Pre-LN with, gradient of the unembedding: exponent",
                    statistic=exponent("pre, final norm", "unembedding_gradient"),
                ),
            ),
        ),
        Claim(
            says="It is the final norm that makes the last MLP's gradient in Pre-LN fall like 1/sqrt(L)",
            source=f"{_XIONG}, theorem 1, of Pre-LN with a final norm",
            conditions=(
                _exponent_of(
                    "pre, final norm", "last_gradient", "Pre-LN with", -0.5, "its Jacobian divides by the rms", "-1/2"
                ),
                _exponent_of("pre, none", "last_gradient", "Pre-LN without", 0, "nothing divides by the rms"),
            ),
            ledger=("C70",),
        ),
        Claim(
            says="Pre-LN needs its final norm to train well",
            source="common practice since Radford et al. 2019 (GPT-2), without a published ablation known to us",
            control=Condition(
                says="At its best rate a model without any norm ends at least 0.05 nats a token higher",
                statistic=partial(_without, min, arm=_BARE),
                low=0.05,
                source="a twentieth of a nat; a task that needs no norm cannot tell whether it needs the last one",
            ),
            conditions=(
                Condition(
                    says="At its best rate Pre-LN without the norm loses at least a quarter of what all norms gain",
                    statistic=lambda paired: _without(min, paired) / _without(min, paired, _BARE),
                    low=0.25,
                    source="a share of the loss above Pre-LN of a model without any norm",
                    regime="the training is short: the loss at the best rate",
                ),
                Condition(
                    says="Over all rates its loss lies at least 0.05 nats farther above the loss at its best rate",
                    statistic=partial(_without, excess),
                    low=0.05,
                    source="the sensitivity of Wortsman et al. 2023, arXiv:2309.14322, as reported; the same twentieth",
                    regime="the rate may be off: the mean over all rates",
                ),
            ),
        ),
        Claim(
            says="Post-LN gains nothing from a norm after its last",
            source="two norms in a row are one, but for eps, gain and bias",
            conditions=(
                Condition(
                    says="No rate has a loss that differs by more than 0.05 nats a token",
                    statistic=_farthest,
                    low=-0.05,
                    high=0.05,
                    source="the same twentieth of a nat",
                ),
            ),
        ),
    ),
    quick=budget(
        seeds=3,
        depths=(2, 4, 6, 12, 24, 48),
        start_width=128,
        start_window=8,
        start_tokens=128,
        rates=(1e-3, 5e-3, 2.5e-2),
        layers=4,
        width=64,
        batch=8,
        window=32,
        steps=80,
        warmup=10,
    ),
    full=budget(seeds=10, layers=12, steps=300, warmup=30),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="a Markov chain over 32 symbols of known entropy; random token ids for what is measured at the start",
    regime="4 layers of width 64, 80 steps of AdamW; the start: 2 to 48 layers of width 128, windows of 8",
)
