"""`epsilon`: how eps shortens rows, by place and size, in which dtype it survives, and whether training notices it."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

import torch

from normkit import reference
from normkit.conventions.eps import PLACEMENTS, EpsPlacement
from normkit.spec import NormSpec
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, Marks, arm_lines, line
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired

_PLACEMENTS = {name: f"eps {placement.words}" for name, placement in PLACEMENTS.items()}
_HALF, _WIDE = "statistics in float16", "statistics in float32"
_SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 10**-2.5, 1e-2, 1e-1, 1.0)
_SIZES = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
_TRAINED = (1e-12, 1e-8, 1e-5, 1e-3)
_LAST = 20
"""Steps at the end of a run whose mean loss is compared."""


def _arms(settings: Settings) -> tuple[Arm, ...]:
    short = [Arm(name=words, cost=0.05, choices={"placement": placement}) for placement, words in _PLACEMENTS.items()]
    halves = [Arm(name=words, cost=0.05, choices={"wide": words == _WIDE}) for words in (_HALF, _WIDE)]
    trained = [
        Arm(name=_trained(eps, small), choices={"eps": eps, "small": small})
        for small in (False, True)
        for eps in settings["trained_sizes"]
    ]
    return (*short, *halves, *trained)


def _trained(eps: float, small: bool) -> str:
    return f"trained with eps {eps:g}{', small embeddings' if small else ''}"


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    if "eps" in arm.choices:
        return _train(context, arm)
    # Rows of mean 0 and rms 1.
    generator = torch.Generator().manual_seed(context.seed)
    x = torch.randn(64, context["width"], generator=generator, dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    if "wide" in arm.choices:
        return _half(context, x.half(), wide=arm.choices["wide"])
    conventions = PLACEMENTS[arm.choices["placement"]].conventions(1e-5)
    spec = NormSpec(**conventions, has_weight=False, has_bias=False)
    scales = context["scales"]
    return {"kept": [reference.forward(scale * x, spec).square().mean().sqrt().item() for scale in scales]}


def _half(context: ArmContext, x: torch.Tensor, *, wide: bool) -> Measurement:
    """For each eps: distance from 1 of the rms after a float16 LayerNorm, and whether a constant row stays finite."""
    off, finite = [], []
    for eps in context["sizes"]:
        narrow: dict[str, Any] = {} if wide else {"statistics_dtype": "input", "cast": "none"}
        spec = NormSpec(eps=eps, has_weight=False, has_bias=False, **narrow)
        rms = reference.forward(x, spec).double().square().mean().sqrt().item()
        off.append(abs(rms - 1))
        finite.append(bool(reference.forward(torch.ones_like(x), spec).isfinite().all()))
    return {"off": off, "constant row finite": finite}


def _train(context: ArmContext, arm: Arm) -> Measurement:
    model = context.transformer(norm=NormSpec(eps=arm.choices["eps"]))
    if arm.choices["small"]:
        with torch.no_grad():
            for embedding in (model.embedding, model.position):
                embedding.weight.mul_(context["small_scale"])
    run = context.train_on_text(model, context.recipe(warmup=10))
    return run.measurement(last=run.mean_of_last(_LAST))


def _length(placement: EpsPlacement, scale: float, kept: float, words: str, regime: str = "") -> Condition:
    return Condition(
        says=f"eps 1e-5 {words}: a row of rms {scale:g} keeps {kept:.4f} of its length",
        statistic=lambda paired: float(paired[_PLACEMENTS[placement]]["kept"][_SCALES.index(scale)]),
        low=kept - 5e-5,
        high=kept + 5e-5,
        regime=regime,
        source="r / sqrt(r^2 + eps) inside, r / (r + eps) outside",
    )


def _share_finite(arm: str, paired: Paired) -> float:
    return fmean(paired[arm]["constant row finite"])


def _apart(paired: Paired, *, small: bool) -> float:
    """Largest difference of final losses between the sizes of eps."""
    ends = [paired[_trained(eps, small)]["last"] for eps in _TRAINED]
    return float(max(ends) - min(ends))


_CLAIMS = (
    Claim(
        says="eps does nothing but to rows that are about as short as eps",
        source="said of eps outside the root; the default of torch stands inside",
        conditions=(
            _length("outside", 1e-2, 0.9990, "outside", "eps stands outside the root"),
            _length("inside", 1e-2, 1.0, "inside"),
        ),
    ),
    Claim(
        says="Inside the root eps takes hold at rows of length sqrt(eps n), outside at eps sqrt(n)",
        source="algebra",
        conditions=(
            _length("inside", 10**-2.5, 0.7071, "inside"),
            _length("outside", 1e-5, 0.5, "outside"),
            _length("inside", 1.0, 1.0, "inside"),
        ),
    ),
    Claim(
        says="An eps as small as 1e-12 is valid",
        source="the default of BERT",
        conditions=tuple(
            Condition(
                says=f"{arm}: share of eps from 1e-12 to 1e-3 with which a constant float16 row stays finite is 1",
                statistic=partial(_share_finite, arm),
                low=1.0,
                regime=regime,
                source="2^-24 = 6e-8 is the smallest float16; what is below becomes 0, and 0 / 0 is NaN",
            )
            for arm, regime in ((_WIDE, "the statistics are float32"), (_HALF, ""))
        ),
    ),
    Claim(
        says="The size of eps does not matter to training, from 1e-12 to 1e-3",
        source="public models use 1e-12, 1e-8, 1e-6 and 1e-5",
        conditions=tuple(
            Condition(
                says=f"{words}: final losses with all sizes lie within 0.05 nats a byte",
                statistic=partial(_apart, small=small),
                high=0.05,
                regime=regime,
                source="seeds differ by more than that",
            )
            for small, words, regime in (
                (False, "embeddings of rms 0.7", "rows are long beside the root of eps"),
                (True, "embeddings a thousand times shorter", ""),
            )
        ),
    ),
)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    sizes, trained = settings["sizes"], settings["trained_sizes"]
    return (
        Curves(
            name="epsilon-length",
            title="How much eps shortens short rows",
            caption="Length that a LayerNorm of eps 1e-5 keeps, over the rms of its input row.",
            description="Inside the root half of the energy is gone at rms 0.003, outside half the length at 1e-5.",
            x_label="rms of the row",
            y_label="share of the length",
            panels=(("", arm_lines(seeds, _PLACEMENTS.values(), "kept", settings["scales"])),),
            x_log=True,
        ),
        Curves(
            name="epsilon-training",
            title="Loss at the end over eps",
            caption=f"Mean of the last {_LAST} steps; embeddings of the usual size, and a thousand times shorter.",
            description="With embeddings of the usual size eps changes nothing; short ones learn slower.",
            x_label="eps",
            y_label="loss (nats a byte)",
            panels=(
                (
                    "",
                    tuple(
                        line(
                            words,
                            trained,
                            [[paired[_trained(eps, small)]["last"] for eps in trained] for paired in seeds],
                        )
                        for small, words in ((False, "usual embeddings"), (True, "small embeddings"))
                    ),
                ),
            ),
            x_log=True,
        ),
        Marks(
            name="epsilon-float16",
            title="Constant float16 rows",
            caption="A full disc: a LayerNorm of this eps turns a constant row into zeros; a ring: into NaN.",
            description="With float16 statistics every eps below 6e-8 gives NaN.",
            rows=(_HALF, _WIDE),
            columns=tuple(f"{eps:g}" for eps in sizes),
            cells=tuple(
                tuple(
                    (all(paired[arm]["constant row finite"][place] for paired in seeds), eps)
                    for place, eps in enumerate(sizes)
                )
                for arm in (_HALF, _WIDE)
            ),
        ),
    )


STUDY = Study(
    name="epsilon",
    title="Epsilon",
    question="Where does eps act, in which dtype does it survive, and does training notice it?",
    claims=_CLAIMS,
    quick=budget(
        seeds=3,
        width=64,
        layers=2,
        batch=8,
        window=64,
        steps=100,
        learning_rate=1e-3,
        small_scale=1e-3,
        scales=_SCALES,
        sizes=_SIZES,
        trained_sizes=_TRAINED,
    ),
    full=budget(seeds=10, steps=1000, layers=6),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="random rows, and bytes of Python's standard library",
    regime="Trained in float32 at two layers; in 16-bit training short rows come up more often.",
)
