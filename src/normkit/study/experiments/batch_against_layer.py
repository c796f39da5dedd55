"""`batch-vs-layer`: statistics over the batch against statistics over single samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

from normkit.study.arm_context import Settings
from normkit.study.chart import Bars, Chart, Curves, Line, Marks, arm_lines, loss_line, swept_lines
from normkit.study.experiments import batch_models as models
from normkit.study.result import Claim, Condition, Study, budget
from normkit.study.statistics import Paired, difference, gap, range_of, ratio

_COUPLINGS = ("samples", "batch size", "future", "padding")
_TEXT_ARM = "Transformer: BatchNorm, rate 0.003"
_THEORY = tuple(math.sqrt(2 / (size - 1)) for size in models.VARIANCE_SIZES)
_NATS = "a tenth of a nat is above the spread of seeds here"
_WU = "10.6 points more than GroupNorm (ResNet-50 on ImageNet, 2 images a batch)"


def _errs(says: str, arm: str, other: str, published: str = "", regime: str = "", **bound: float) -> Condition:
    """A condition on the error of one arm minus that of another, in points."""
    return Condition(
        says=says,
        statistic=difference(arm, other, "error"),
        published=published,
        regime=regime,
        source="over 450 images an error rate of 10 % has a standard deviation of 1.4 points",
        **bound,  # type: ignore[arg-type]
    )


_CLAIMS = (
    Claim(
        says="BatchNorm fails at small batches, where norms of single samples do not",
        source="Wu & He 2018, arXiv:1803.08494, abstract",
        conditions=(
            _errs(
                "MLP, 2 images a batch: BatchNorm errs at least 5 points more than LayerNorm",
                "MLP: BatchNorm, batch 2",
                "MLP: LayerNorm, batch 2",
                low=5.0,
                published=_WU,
                regime="a sample is one row of the batch, as in an MLP",
            ),
            _errs(
                "CNN, 2 images a batch: BatchNorm errs at least 5 points more than LayerNorm",
                "CNN: BatchNorm, batch 2",
                "CNN: LayerNorm, batch 2",
                low=5.0,
                published=_WU,
                regime="every position of an image is a row, as in a CNN",
            ),
            _errs(
                "MLP, 64 images a batch: BatchNorm errs at most 2 points more than LayerNorm",
                "MLP: BatchNorm, batch 64",
                "MLP: LayerNorm, batch 64",
                high=2.0,
                published="as good as any other norm at 32 images a batch",
            ),
        ),
        ledger=("C75", "C53", "C54", "C55", "C59"),
    ),
    Claim(
        says="A net with BatchNorm is another function in evaluation than in training, the more so the smaller its "
        "batches",
        source="Ioffe 2017, arXiv:1702.03275, sections 1 and 2",
        conditions=(
            Condition(
                says="BatchNorm, batches of 2 or 4: the losses of the two modes differ by at least 0.1 nats",
                statistic=models.mode_gap("BatchNorm", (2, 4)),
                low=0.1,
                source=_NATS,
            ),
            Condition(
                says="BatchNorm, batches of 64: they differ by at most 0.1 nats",
                statistic=models.mode_gap("BatchNorm", (64,)),
                high=0.1,
                source="what small batches must exceed",
            ),
            Condition(
                says="LayerNorm, every batch size: they differ by rounding only, at most 0.00001 nats",
                statistic=models.mode_gap("LayerNorm", (1, 2, 4, 16, 64)),
                high=1e-5,
                source="theory: none; float32 sums of another order",
            ),
        ),
        ledger=("C47",),
    ),
    Claim(
        says="BatchNorm fails inside a recurrence, LayerNorm does not",
        source="Ba et al. 2016, arXiv:1607.06450, sections 1 and 3.1; against it Cooijmans et al. 2016, "
        "arXiv:1603.09025",
        conditions=(
            _errs(
                "one BatchNorm for all times errs at least 5 points more than LayerNorm in evaluation",
                "RNN: one BatchNorm",
                "RNN: LayerNorm",
                low=5.0,
                regime="one set of running statistics serves all times",
            ),
            _errs(
                "a BatchNorm for each time errs at least 5 points more than LayerNorm in evaluation",
                "RNN: a BatchNorm for each time",
                "RNN: LayerNorm",
                low=5.0,
                published="no failure: better than without a norm (sequential MNIST, Penn Treebank)",
                regime="each time has running statistics of its own",
            ),
            Condition(
                says="a BatchNorm for each time errs at least 5 points more than LayerNorm on longer sequences",
                statistic=lambda paired: float(
                    paired["RNN: a BatchNorm for each time"]["errors"][-1] - paired["RNN: LayerNorm"]["errors"][-1]
                ),
                low=5.0,
                regime="sequences are longer than in training",
                source="over 450 images an error rate of 10 % has a standard deviation of 1.4 points",
            ),
        ),
        ledger=("C75",),
    ),
    Claim(
        says="BatchNorm trains CNNs well",
        source="Ioffe & Szegedy 2015, arXiv:1502.03167, abstract",
        conditions=(
            _errs(
                "32 images a batch: BatchNorm errs at most 2 points more than LayerNorm",
                "CNN: BatchNorm, batch 32",
                "CNN: LayerNorm, batch 32",
                high=2.0,
            ),
            Condition(
                says="32 images a batch: BatchNorm errs at most as often as no norm",
                statistic=difference("CNN: BatchNorm, batch 32", "CNN: no norm, batch 32", "error"),
                high=0.0,
                source="the claim",
            ),
        ),
        ledger=("C75", "C60"),
    ),
    Claim(
        says="A CNN with BatchNorm takes fewer steps than one without a norm",
        source="Ioffe & Szegedy 2015, arXiv:1502.03167, abstract",
        conditions=(
            Condition(
                says=f"without a norm a loss of {models.REACHED_LOSS} takes at least 1.2 times as many steps",
                statistic=models.speed_up,
                low=1.2,
                published="14 times as many (Inception on ImageNet, each at a rate of its own)",
                source="a fifth more steps is above what the choice of batches does",
            ),
        ),
        ledger=("C71",),
    ),
    Claim(
        says="BatchNorm makes an output depend on other samples, batch size, later tokens and padding; LayerNorm "
        "does not",
        source="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3; Ba et al. 2016, arXiv:1607.06450, section 3",
        conditions=(
            Condition(
                says="BatchNorm in training: every dependence, and the difference of the modes, is at least 0.001",
                statistic=lambda paired: min(
                    float(paired["dependence: BatchNorm, training"][name]) for name in (*_COUPLINGS, "mode")
                ),
                low=1e-3,
                source="theory: of the order of 1 / rows; here 24 rows",
            ),
            Condition(
                says="BatchNorm in evaluation: no dependence above 1e-10",
                statistic=models.greatest_dependence(("BatchNorm, evaluation",), _COUPLINGS),
                high=1e-10,
                source="theory: 0; float64 sums of another order",
            ),
            Condition(
                says="LayerNorm, RMSNorm: no dependence above 1e-10 in either mode, and no difference of the modes",
                statistic=models.greatest_dependence(
                    tuple(
                        f"{norm}, {mode}" for norm in ("LayerNorm", "RMSNorm") for mode in ("training", "evaluation")
                    ),
                    (*_COUPLINGS, "mode"),
                ),
                high=1e-10,
                source="theory: 0; float64 sums of another order",
            ),
        ),
        ledger=("C47", "C53", "C56", "C57", "C58"),
    ),
    Claim(
        says="BatchNorm makes a Transformer on text worse than LayerNorm does",
        source="Shen et al. 2020, arXiv:2003.07845, section 1",
        conditions=(
            Condition(
                says="each at its best rate: BatchNorm ends at least 0.1 nats a byte above LayerNorm in evaluation",
                statistic=lambda paired: models.best_loss(paired, "BatchNorm") - models.best_loss(paired, "LayerNorm"),
                low=0.1,
                regime="each trains at its best rate",
                source=_NATS,
            ),
            Condition(
                says="both at a rate of 0.001: BatchNorm ends at least 0.1 nats a byte above LayerNorm in evaluation",
                statistic=difference(
                    "Transformer: BatchNorm, rate 0.001", "Transformer: LayerNorm, rate 0.001", "held_out"
                ),
                low=0.1,
                regime="both train at 0.001",
                source=_NATS,
            ),
        ),
        ledger=("C75",),
    ),
    Claim(
        says="Batch statistics of text fluctuate more than those of images, and running ones do not stand in for them",
        source="Shen et al. 2020, arXiv:2003.07845, section 3 and figure 1",
        conditions=(
            Condition(
                says="the Transformer's loss in evaluation lies at least 0.1 nats above that of training mode, same "
                "text",
                statistic=gap(_TEXT_ARM, "held_out", "held_out_training_mode"),
                low=0.1,
                source=_NATS,
            ),
            Condition(
                says="the variance of a batch scatters more in the Transformer (512 tokens) than in the CNN (32 "
                "images)",
                statistic=ratio(_TEXT_ARM, "CNN: BatchNorm, batch 32", "scatter"),
                low=1.0,
                source="the claim",
            ),
            Condition(
                says="the fall of the evaluation loss when statistics are recomputed under the final weights, in nats",
                statistic=gap(_TEXT_ARM, "held_out", "held_out_new_statistics"),
            ),
        ),
        ledger=("C75",),
    ),
    Claim(
        says="The variance that BatchNorm estimates scatters as sqrt(2 / (N - 1)) over batches of N rows",
        source="the variance of a chi-squared distribution",
        conditions=(
            Condition(
                says="2 to 128 independent Gaussian rows: within 5 % of theory",
                statistic=lambda paired: max(
                    abs(float(value) / expected - 1)
                    for value, expected in zip(paired["variance: Gaussian rows"]["scatter"], _THEORY, strict=True)
                ),
                high=0.05,
                source="theory; at 2 rows 20,000 batches leave 1.3 %, one standard deviation",
            ),
        ),
        ledger=("C59",),
    ),
)


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    rate = settings["text_rates"][-1]
    recurrent = {
        norm: f"RNN: {norm}" for norm in ("one BatchNorm", "a BatchNorm for each time", "LayerNorm", "no norm")
    }
    rows = tuple(f"{norm}, {mode}" for norm in models.NORMS for mode in ("training", "evaluation"))

    def over_sizes(norms: Iterable[str], name: str) -> tuple[Line, ...]:
        return swept_lines(seeds, norms, "MLP: {}, batch {}", name, settings["batch_sizes"], math.nan)

    def held_out(norm: str, name: str) -> tuple[float, ...]:
        return tuple(paired[f"Transformer: {norm}, rate {rate:g}"][name] for paired in seeds)

    def cell(row: str, name: str) -> tuple[bool | None, float]:
        middle, _, _ = range_of([float(paired[f"dependence: {row}"][name]) for paired in seeds])
        # Above the rounding of float64 sums in another order, below anything that statistics of a batch would do.
        return (None if math.isnan(middle) else middle > 1e-8), middle

    theory = Line(label="sqrt(2 / (N - 1))", x=tuple(map(float, models.VARIANCE_SIZES)), y=_THEORY)
    scatter = (*arm_lines(seeds, {"measured": "variance: Gaussian rows"}, "scatter", models.VARIANCE_SIZES), theory)
    return (
        Curves(
            name="batch-size-error",
            title="Error of an MLP by batch size",
            caption="All arms take the same number of steps on the same batches; chance is 90 %.",
            description="BatchNorm's curve rises steeply below 16 images, the others slowly.",
            x_label="images in a batch",
            y_label="held-out error (%)",
            panels=(("", over_sizes(models.NORMS, "error")),),
            x_log=True,
        ),
        Curves(
            name="mode-gap",
            title="Loss in evaluation mode against training mode",
            caption="The same trained MLP on the same held-out images, in batches of the size it was trained with.",
            description="LayerNorm's line is zero; BatchNorm's leaves zero at small batches.",
            x_label="images in a batch",
            y_label="evaluation less training (nats)",
            panels=(("", over_sizes(("BatchNorm", "LayerNorm"), "gap")),),
            x_log=True,
        ),
        Curves(
            name="recurrent-error",
            title="A recurrent net on sequences longer than those it was trained on",
            caption="Blank rows precede each digit; at 0 the sequences are as long as in training.",
            description="One BatchNorm for all times starts highest.",
            x_label="blank rows more than in training",
            y_label="held-out error (%)",
            panels=(("", arm_lines(seeds, recurrent, "errors", settings["extra_rows"])),),
        ),
        Curves(
            name="cnn-loss",
            title="A small CNN with each norm",
            caption="Loss of the training batches, means over steps; LayerNorm is over all of an image.",
            description="With 32 images BatchNorm and LayerNorm fall together and faster than no norm.",
            x_label="step",
            y_label="loss (nats)",
            panels=tuple(
                (
                    f"{size} images in a batch",
                    tuple(
                        loss_line(norm, f"CNN: {norm}, batch {size}", seeds, settings["image_steps"])
                        for norm in ("BatchNorm", "LayerNorm", "no norm")
                    ),
                )
                for size in settings["image_batch_sizes"]
            ),
        ),
        Bars(
            name="transformer-loss",
            title=f"BatchNorm in a Transformer, learning rate {rate:g}",
            caption="The same held-out text each time; new statistics are those of 16 batches under the final weights.",
            description="BatchNorm's bars are close together, a little above LayerNorm's.",
            label="held-out loss (nats a byte)",
            values=(
                ("LayerNorm", held_out("LayerNorm", "held_out")),
                ("BatchNorm, evaluation", held_out("BatchNorm", "held_out")),
                ("BatchNorm, new statistics", held_out("BatchNorm", "held_out_new_statistics")),
                ("BatchNorm, training mode", held_out("BatchNorm", "held_out_training_mode")),
            ),
        ),
        Marks(
            name="dependence",
            title="What a causal Transformer's output depends on beside its own past",
            caption="Yes where it does, with the number that says how much; the last column compares the two modes.",
            description="Only the rows of BatchNorm hold a yes: all columns in training, the modes' in evaluation.",
            rows=rows,
            columns=("other samples", "batch size", "later tokens", "padding", "mode"),
            cells=tuple(tuple(cell(row, name) for name in (*_COUPLINGS, "mode")) for row in rows),
        ),
        Curves(
            name="batch-variance",
            title="How far the variance of a batch scatters",
            caption="Standard deviation of the variance of N independent Gaussian rows over its mean.",
            description="Measured points on the line of theory, from 1.4 at 2 rows to 0.13 at 128.",
            x_label="rows in a batch",
            y_label="relative deviation",
            panels=(("", scatter),),
            x_log=True,
            y_log=True,
        ),
    )


STUDY = Study(
    name="batch-vs-layer",
    title="BatchNorm against LayerNorm",
    question="Where do statistics over the batch fail where those of single samples serve, and where not?",
    claims=_CLAIMS,
    quick=budget(
        seeds=3,
        width=64,
        layers=3,
        steps=600,
        learning_rate=1e-3,
        batch_sizes=(1, 2, 4, 16, 64, 256),
        channels=16,
        image_steps=500,
        image_rate=1e-3,
        image_batch_sizes=(2, 32),
        sequence_steps=600,
        sequence_rate=3e-3,
        sequence_batch=32,
        extra_rows=(0, 1, 2, 4, 8),
        text_layers=4,
        text_steps=250,
        text_rates=(1e-3, 3e-3),
        text_batch=8,
        window=64,
    ),
    full=budget(seeds=10, steps=3000, image_steps=2000, sequence_steps=2000, text_steps=1000),
    arms=models.arms,
    measure=models.measure,
    charts=_charts,
    data="scikit-learn's digits, the last 450 of 1,797 held out; bytes of Python's standard library",
    regime="nets of width 64 or 16 to 64 channels, a few hundred steps of AdamW, images of 8 x 8 pixels; the same rate "
    "for all norms of a kind of net; BatchNorm with a momentum of 0.1. At 1 row a batch BatchNorm cannot be trained",
    needs=("sklearn",),
)
