"""`initialisation`: gain 1 and bias 0 against other starts, and scaled outputs of the branches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normkit.study.chart import Bars, Chart, Curves, line
from normkit.study.curves import curve, mean_of_last, padded
from normkit.study.experiments.initialisation_arms import DEEP, SHALLOW, VOCABULARY, begin, configuration
from normkit.study.growth import Statistic, exponent
from normkit.study.laboratory import Laboratory
from normkit.study.loop import Recipe
from normkit.study.propagation import propagate
from normkit.study.result import Arm, Claim, Condition, Measurement, Paired, Settings, Study, integer
from normkit.study.tasks import Task, markov_chain
from normkit.study.transformer import Transformer
from normkit.study.windows import next_token_loss

_REFERENCE = SHALLOW[0]


def _arms(settings: Settings) -> tuple[Arm, ...]:
    del settings
    return tuple(Arm(name=name, choices={"deep": False}) for name in SHALLOW) + tuple(
        Arm(name=name, choices={"deep": True}, cost=2.5) for name in DEEP
    )


def _task(window: int) -> Task:
    return markov_chain(symbols=VOCABULARY, window=window, sharpness=2.0)


def _model(lab: Laboratory, arm: Arm, layers: int) -> Transformer:
    config = configuration(arm.name, layers, width=lab.integer("width"), context=lab.integer("window"))
    model = Transformer(config, seed=lab.seed)
    begin(model, arm.name, lab.seed)
    return model


def _measure(lab: Laboratory, arm: Arm) -> Measurement:
    layers = lab.integer("deep_layers" if arm.choices["deep"] else "layers")
    steps = lab.integer("steps")
    model = _model(lab, arm, layers)
    task = _task(lab.integer("window"))
    moved = _moved(model, next(task.batches(batch=lab.integer("batch"), seed=lab.seed))[0])
    recipe = Recipe(steps=steps, learning_rate=lab.number("learning_rate"))
    run = lab.train(model, recipe, task.batches(batch=lab.integer("batch"), seed=lab.seed), next_token_loss)
    return {
        **moved,
        **({} if arm.choices["deep"] else _streams(lab, arm)),
        "losses": padded(run, steps),
        "loss": mean_of_last(run),
        "first": run.points[0].loss,
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


@torch.no_grad()
def _moved(model: Transformer, ids: Tensor) -> dict[str, float]:
    """How far the norm of the first block takes its rows, and how far its gain and bias do, over the rows' length."""
    calls: list[tuple[Tensor, Tensor]] = []
    norm = model.get_submodule("blocks.0.attention.norm")
    handle = norm.register_forward_hook(lambda _module, inputs, output: calls.append((inputs[0], output)))
    model(ids[:, :-1])
    handle.remove()
    ((x, normalized),) = calls
    assert isinstance(norm, nn.LayerNorm)
    bare = nn.functional.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    affine = norm.weight * bare + norm.bias
    return {
        "whole": ((normalized - x).norm() / x.norm()).item(),
        "affine": ((affine - bare).norm() / bare.norm()).item(),
    }


def _streams(lab: Laboratory, arm: Arm) -> dict[str, list[float]]:
    """E|x|^2 / n after the last block at several depths, before any training."""
    depths = lab.settings["depths"]
    assert isinstance(depths, tuple)
    found = []
    for layers in depths:
        model = _model(lab, arm, int(layers))
        lab.place(model)
        generator = torch.Generator().manual_seed(lab.seed)
        shape = (lab.integer("batch"), lab.integer("window") + 1)
        ids = torch.randint(VOCABULARY, shape, generator=generator).to(lab.device)
        found.append(propagate(model, ids, generator).stream[-1])
    return {"depths": list(depths), "stream": found}


def _above(name: str, reference: str = _REFERENCE) -> Statistic:
    """How far an arm's loss lies above another's."""
    return lambda paired: float(paired[name]["loss"] - paired[reference]["loss"])


def _charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    seeds = list(measured.values())
    floor = _task(integer(settings, "window")).floor
    steps = range(1, integer(settings, "steps") + 1)
    return (
        Curves(
            name="initialisation-loss",
            title="Loss from each start",
            caption="Left Pre-LN with other gains, biases and outputs; right deep Post-LN with DeepNorm's factors.",
            description="How fast each start comes down to the entropy of the chain.",
            x_label="step",
            y_label="loss (nats a token)",
            panels=tuple(
                (title, tuple(line(name, steps, [curve(paired[name]["losses"]) for paired in seeds]) for name in names))
                for title, names in (("Pre-LN", SHALLOW), ("deep Post-LN", DEEP))
            ),
            reference=(floor, "entropy of the chain"),
        ),
        Bars(
            name="initialisation-end",
            title="Loss after short training",
            caption=f"Mean of the last 20 steps; no model can be below {floor:.2f} for long.",
            description="Each start with its three seeds or more.",
            label="loss (nats a token)",
            values=tuple((name, tuple(float(paired[name]["loss"]) for paired in seeds)) for name in SHALLOW + DEEP),
        ),
    )


def _worse(name: str) -> Condition:
    return Condition(
        says=f"{name[0].upper()}{name[1:]}: ends at least 0.05 nats a token above gain 1 and bias 0",
        statistic=_above(name),
        low=0.05,
        source="a twentieth of a nat; runs of one seed share weights and batches, so that less would be seen",
        regime=f"the other start is {name}",
    )


STUDY = Study(
    name="initialisation",
    title="Initialisation",
    question="Is gain 1 and bias 0 the right start, and what do scaled outputs of the branches do?",
    claims=(
        Claim(
            says="With gain 1 and bias 0 a norm starts as the identity",
            source="common in tutorials",
            conditions=(
                Condition(
                    says="Gain and bias move the rows by at most a millionth of their length",
                    statistic=lambda paired: float(paired[_REFERENCE]["affine"]),
                    high=1e-6,
                    source="the definition, exactly 0",
                    regime="only its affine part is meant",
                ),
                Condition(
                    says="The norm moves the rows by at most a millionth of their length",
                    statistic=lambda paired: float(paired[_REFERENCE]["whole"]),
                    high=1e-6,
                    source="the definition; rows of another length than the root of n cannot stay",
                ),
            ),
        ),
        Claim(
            says="Training from gain 1 and bias 0 is better than from other gains and biases",
            source="the start of Ba et al. 2016, arXiv:1607.06450, and of every library since",
            conditions=tuple(_worse(name) for name in ("gain 0.1", "gain 0.5", "gain 2", "random bias")),
        ),
        Claim(
            says="Outputs over sqrt(2 L) keep the stream of an untrained Pre-LN model from growing with depth",
            source="Radford et al. 2019 (GPT-2), section 2.3",
            conditions=(
                Condition(
                    says="With outputs over sqrt(2 L): exponent of the stream's rms 0 within 0.1",
                    statistic=exponent("outputs over sqrt(2L)", "stream", 0.5),
                    low=-0.1,
                    high=0.1,
                    source="2 L branches of variance v / (2 L) add v; fitted on 12 layers and more",
                ),
                Condition(
                    says="Without: at least 0.4",
                    statistic=exponent(_REFERENCE, "stream", 0.5),
                    low=0.4,
                    source="1/2 if all layers add alike (Xiong et al. 2020, arXiv:2002.04745, lemma 2); more where "
                    "tokens become alike, so that attention averages less",
                ),
                Condition(
                    says="Loss after short training, over that of outputs as drawn",
                    statistic=_above("outputs over sqrt(2L)"),
                    judged=False,
                ),
            ),
        ),
        Claim(
            says="A Pre-LN model trains as well when every branch starts at 0",
            source="Goyal et al. 2017, arXiv:1706.02677, and Bachlechner et al. 2020, arXiv:2003.04887, start so",
            conditions=(
                Condition(
                    says="Outputs at 0: ends at most 0.05 nats a token above outputs as drawn",
                    statistic=_above("outputs at 0"),
                    high=0.05,
                    source="the same twentieth of a nat",
                ),
            ),
        ),
        Claim(
            says="DeepNorm's factors let a deep Post-LN model train without warm-up",
            source="Wang et al. 2022, arXiv:2203.00555",
            conditions=(
                Condition(
                    says="Alpha and beta: ends at least 0.2 nats a token below Post-LN",
                    statistic=_above("DeepNorm", "post"),
                    high=-0.2,
                    source="a fifth of a nat; Post-LN without warm-up stays near the entropy of single symbols",
                ),
                Condition(
                    says="Beta, the start, alone: loss over that of Post-LN",
                    statistic=_above("beta alone", "post"),
                    judged=False,
                ),
                Condition(
                    says="Alpha, the factor on the stream, alone: loss over that of Post-LN",
                    statistic=_above("alpha alone", "post"),
                    judged=False,
                ),
            ),
            ledger=("C70",),
        ),
    ),
    quick={
        "seeds": 3,
        "layers": 4,
        "deep_layers": 12,
        "depths": (12, 24, 48),
        "width": 64,
        "batch": 8,
        "window": 32,
        "steps": 100,
        "learning_rate": 1e-3,
    },
    full={"seeds": 8, "width": 128, "steps": 400},
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="a Markov chain over 32 symbols of known entropy; random token ids for the stream at the start",
    regime="4 layers (12 of Post-LN) of width 64, 100 steps of AdamW at 1e-3 without warm-up",
)
