"""`warmup`: Post-LN needs a learning rate that rises slowly, Pre-LN does not."""

from __future__ import annotations

from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Bars, Chart, Curves, arm_lines, arm_values
from normkit.study.corpus import MarkovChain, next_token_loss
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, difference
from normkit.study.transformer import Transformer, deep_norm

_FASTER = "post, warm-up, 3 times the rate"


def _arms(settings: Settings) -> tuple[Arm, ...]:
    def arm(name: str, norm: str, warmup: object = 0, faster: float = 1.0) -> Arm:
        return Arm(name=name, choices={"norm": norm, "warmup": warmup, "faster": faster})

    warmup = settings["warmup"]
    return (
        arm("pre, no warm-up", "pre"),
        arm("pre, warm-up", "pre", warmup),
        arm("post, no warm-up", "post"),
        arm("post, warm-up", "post", warmup),
        arm(_FASTER, "post", warmup, 3.0),
        arm("peri, no warm-up", "peri"),
        arm("DeepNorm, no warm-up", "DeepNorm"),
    )


def build(context: ArmContext, name: str, vocabulary: int) -> Transformer:
    """The model of an arm: the name is a placement, or DeepNorm."""
    factors = deep_norm(context["layers"]) if name == "DeepNorm" else {}
    return context.transformer(vocabulary=vocabulary, placement="post" if factors else name, **factors)


def _measure(context: ArmContext, arm: Arm) -> Measurement:
    chain = MarkovChain(window=context["window"])
    rate = arm.choices["faster"] * context["learning_rate"]
    recipe = context.recipe(learning_rate=rate, warmup=arm.choices["warmup"])
    batches = chain.batches(batch=context["batch"], seed=context.seed)
    run = context.train(build(context, arm.choices["norm"], chain.symbols), recipe, batches, next_token_loss)
    loss = run.mean_of_last()
    return run.measurement(recipe.steps, loss=loss, above_floor=loss - chain.floor)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    steps = range(1, settings["steps"] + 1)
    return (
        Curves(
            name="warmup-loss",
            title="Loss with and without warm-up",
            caption="Medians over seeds, with their intervals; all see the same batches.",
            description="Post-norm without warm-up stays at the loss after the first steps; the others keep falling.",
            x_label="step",
            y_label="loss (nats a token)",
            panels=tuple(
                (
                    f"{name}-norm",
                    arm_lines(
                        seeds, {words: f"{name}, {words}" for words in ("no warm-up", "warm-up")}, "losses", steps
                    ),
                )
                for name in ("pre", "post")
            ),
            reference=(MarkovChain(window=settings["window"]).floor, "entropy of the chain"),
        ),
        Bars(
            name="warmup-end",
            title="Loss above the entropy of the chain",
            caption="Mean of the last 20 steps; 0 is what no model can beat.",
            description="Each arm with its seeds.",
            label="nats a token above the floor",
            values=arm_values(seeds, [arm.name for arm in _arms(settings)], "above_floor"),
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
                    statistic=difference("post, no warm-up", "post, warm-up", "loss"),
                    low=0.2,
                    published="8.45 BLEU without, about 34 with (IWSLT14 German to English)",
                    source="a fifth of a nat; runs of one seed share weights and batches",
                ),
                Condition(
                    says="Pre-LN ends within 0.1 nats a token with and without",
                    statistic=difference("pre, no warm-up", "pre, warm-up", "loss"),
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
                    statistic=difference("post, warm-up", "pre, no warm-up", "loss"),
                    high=0.1,
                    source="as for Pre-LN with and without",
                ),
                Condition(
                    says="At 3 times the rate Post-LN with warm-up ends at least 0.2 nats below what it does without",
                    statistic=difference(_FASTER, "post, no warm-up", "loss"),
                    high=-0.2,
                    source="the same fifth of a nat",
                ),
            ),
            ledger=("C70",),
        ),
        Claim(
            says="Peri-LN and DeepNorm, like Pre-LN, train without warm-up",
            source="Wang et al. 2022, arXiv:2203.00555 (DeepNorm); Peri-LN by its similarity to Pre-LN",
            conditions=tuple(
                Condition(
                    says=f"{words} without warm-up ends at least 0.2 nats a token below Post-LN without",
                    statistic=difference(f"{name}, no warm-up", "post, no warm-up", "loss"),
                    high=-0.2,
                    source="the same fifth of a nat",
                )
                for name, words in (("peri", "Peri-LN"), ("DeepNorm", "DeepNorm"))
            ),
            ledger=("C70",),
        ),
    ),
    quick=budget(seeds=3, layers=12, width=64, batch=8, window=32, steps=250, warmup=100, learning_rate=1e-3),
    standard=budget(steps=1500, warmup=300),
    full=budget(seeds=10, steps=5000, warmup=1000),
    arms=_arms,
    measure=_measure,
    charts=_charts,
    data="a Markov chain over 32 symbols of known entropy",
    regime="12 layers of width 64, 1,500 steps of AdamW at 1e-3, 300 of them warm-up (quick: 250 and 100)",
)
