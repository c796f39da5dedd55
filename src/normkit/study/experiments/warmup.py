"""`warmup`: Post-LN needs a learning rate that rises slowly, Pre-LN does not."""

from __future__ import annotations

from collections.abc import Mapping

from normkit.study.chart import Bars, Chart, Curves, line
from normkit.study.curves import curve, mean_of_last, padded
from normkit.study.growth import Statistic
from normkit.study.laboratory import Laboratory
from normkit.study.loop import Recipe
from normkit.study.result import Arm, Claim, Condition, Measurement, Paired, Settings, Study, integer
from normkit.study.tasks import Task, markov_chain
from normkit.study.transformer import Transformer, TransformerConfig
from normkit.study.windows import next_token_loss

_VOCABULARY = 32
_JUDGED = ("pre", "post")
_SHOWN = ("peri", "DeepNorm")
_FASTER = "post, warm-up, 3 times the rate"


def _arms(settings: Settings) -> tuple[Arm, ...]:
    warmup = settings["warmup"]
    both = tuple(
        Arm(name=f"{name}, {words}", choices={"norm": name, "warmup": steps, "faster": 1.0})
        for name in _JUDGED
        for words, steps in (("no warm-up", 0), ("warm-up", warmup))
    )
    others = tuple(
        Arm(name=f"{name}, no warm-up", choices={"norm": name, "warmup": 0, "faster": 1.0}) for name in _SHOWN
    )
    return (*both, Arm(name=_FASTER, choices={"norm": "post", "warmup": warmup, "faster": 3.0}), *others)


def _task(window: int) -> Task:
    return markov_chain(symbols=_VOCABULARY, window=window, sharpness=2.0)


def configuration(name: str, layers: int, *, width: int, context: int) -> TransformerConfig:
    """What an arm's model is built from; DeepNorm has alpha = (2 L)^(1/4) and beta = (8 L)^(-1/4).

    Args:
        name: A placement, or DeepNorm.
        layers: L.
        width: Of the stream.
        context: Tokens that are read.
    """
    deep = name == "DeepNorm"
    return TransformerConfig(
        vocabulary=_VOCABULARY,
        context=context,
        width=width,
        layers=layers,
        placement="post" if deep or name == "post" else "peri" if name == "peri" else "pre",
        residual_scale=(2 * layers) ** 0.25 if deep else 1.0,
        branch_gain=(8 * layers) ** -0.25 if deep else 1.0,
    )


def _measure(lab: Laboratory, arm: Arm) -> Measurement:
    window, steps = lab.integer("window"), lab.integer("steps")
    config = configuration(arm.choices["norm"], lab.integer("layers"), width=lab.integer("width"), context=window)
    recipe = Recipe(
        steps=steps,
        learning_rate=arm.choices["faster"] * lab.number("learning_rate"),
        warmup=int(arm.choices["warmup"]),
    )
    task = _task(window)
    batches = task.batches(batch=lab.integer("batch"), seed=lab.seed)
    run = lab.train(Transformer(config, seed=lab.seed), recipe, batches, next_token_loss)
    return {
        "losses": padded(run, steps),
        "loss": mean_of_last(run),
        "above_floor": mean_of_last(run) - task.floor,
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


def _above(name: str, reference: str) -> Statistic:
    """How far the loss of an arm lies above that of another."""
    return lambda paired: float(paired[name]["loss"] - paired[reference]["loss"])


def _charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    seeds = list(measured.values())
    steps = range(1, integer(settings, "steps") + 1)
    floor = _task(integer(settings, "window")).floor
    return (
        Curves(
            name="warmup-loss",
            title="Loss with and without warm-up",
            caption="Medians over seeds, with their intervals; all see the same batches.",
            description="Post-norm without warm-up stays where the first steps brought it; the others go on falling.",
            x_label="step",
            y_label="loss (nats a token)",
            panels=tuple(
                (
                    f"{name}-norm",
                    tuple(
                        line(words, steps, [curve(paired[f"{name}, {words}"]["losses"]) for paired in seeds])
                        for words in ("no warm-up", "warm-up")
                    ),
                )
                for name in _JUDGED
            ),
            reference=(floor, "entropy of the chain"),
        ),
        Bars(
            name="warmup-end",
            title="Loss above the entropy of the chain",
            caption="Mean of the last 20 steps; 0 is what no model can beat.",
            description="Each arm with its seeds.",
            label="nats a token above the floor",
            values=tuple(
                (arm.name, tuple(float(paired[arm.name]["above_floor"]) for paired in seeds)) for arm in _arms(settings)
            ),
        ),
    )


_XIONG = "Xiong et al. 2020, arXiv:2002.04745"

STUDY = Study(
    name="warmup",
    title="Warm-up",
    question="Does a Post-LN transformer need learning-rate warm-up, and a Pre-LN one not?",
    claims=(
        Claim(
            says="Post-LN transformers need warm-up, Pre-LN transformers do not",
            source=f"{_XIONG}, figure 2",
            conditions=(
                Condition(
                    says="Post-LN ends at least 0.2 nats a token higher without warm-up than with",
                    statistic=_above("post, no warm-up", "post, warm-up"),
                    low=0.2,
                    published="8.45 BLEU without, about 34 with (IWSLT14 German to English)",
                    source="a fifth of a nat; runs of one seed share weights and batches",
                ),
                Condition(
                    says="Pre-LN ends within 0.1 nats a token with and without",
                    statistic=_above("pre, no warm-up", "pre, warm-up"),
                    low=-0.1,
                    high=0.1,
                    published="no loss without warm-up",
                    source="half of what Post-LN must lose",
                ),
            ),
            ledger=("C70",),
        ),
        Claim(
            says="Warm-up makes Post-LN as good as Pre-LN",
            source=f"what is often concluded from {_XIONG}",
            conditions=(
                Condition(
                    says="With warm-up Post-LN ends within 0.1 nats a token of Pre-LN without",
                    statistic=_above("post, warm-up", "pre, no warm-up"),
                    high=0.1,
                    source="as for Pre-LN with and without",
                ),
                Condition(
                    says="At 3 times the rate Post-LN with warm-up ends at least 0.2 nats below what it does without",
                    statistic=_above(_FASTER, "post, no warm-up"),
                    high=-0.2,
                    source="the same fifth of a nat",
                ),
            ),
            ledger=("C70",),
        ),
        Claim(
            says="Peri-LN and DeepNorm, like Pre-LN, train without warm-up",
            source="Wang et al. 2022, arXiv:2203.00555 (DeepNorm); Peri-LN by its likeness to Pre-LN",
            conditions=tuple(
                Condition(
                    says=f"{words} without warm-up ends at least 0.2 nats a token below Post-LN without",
                    statistic=_above(f"{name}, no warm-up", "post, no warm-up"),
                    high=-0.2,
                    source="the same fifth of a nat",
                )
                for name, words in (("peri", "Peri-LN"), ("DeepNorm", "DeepNorm"))
            ),
            ledger=("C70",),
        ),
    ),
    quick={
        "seeds": 3,
        "layers": 12,
        "width": 64,
        "batch": 8,
        "window": 32,
        "steps": 250,
        "warmup": 100,
        "learning_rate": 1e-3,
    },
    full={"seeds": 8, "steps": 600, "warmup": 200},
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="a Markov chain over 32 symbols of known entropy",
    regime="12 layers of width 64, 250 steps of AdamW at 1e-3, warm-up over 100 of them",
)
