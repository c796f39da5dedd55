"""The claims of the study `batch-vs-layer`: published statements about BatchNorm, as conditions with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from normkit.study.experiments.batch_models import VARIANCE_SIZES
from normkit.study.result import Claim, Condition
from normkit.study.statistics import Paired, Statistic, difference, steps_to

_REACHED_LOSS = 0.5
_TEXT_ARM = "Transformer: BatchNorm, rate 0.003"
_COUPLINGS = ("samples", "batch size", "future", "padding")

_POINTS = "over 450 images an error rate of 10 % has a standard deviation of 1.4 points"
_NATS = "a tenth of a nat is above the spread of seeds here"


def _gap(norm: str, sizes: Iterable[int]) -> Statistic:
    """The largest difference between the losses of the two modes over some batch sizes."""
    return lambda paired: max(abs(paired[f"MLP: {norm}, batch {size}"]["gap"]) for size in sizes)


def _faster(paired: Paired) -> float:
    """Steps to the loss without a norm over those with BatchNorm; infinite if only BatchNorm reaches it."""
    without, batch = (
        steps_to(paired[f"CNN: {norm}, batch 32"]["losses"], _REACHED_LOSS) for norm in ("no norm", "BatchNorm")
    )
    return (math.inf if without is None else without) / (math.inf if batch is None else batch)


def _least_dependence(paired: Paired) -> float:
    measured = paired["dependence: BatchNorm, training"]
    return min(float(measured[name]) for name in (*_COUPLINGS, "mode"))


def _greatest_dependence(rows: tuple[str, ...], names: tuple[str, ...]) -> Statistic:
    return lambda paired: max(float(paired[f"dependence: {row}"][name]) for row in rows for name in names)


def _scatter(paired: Paired) -> float:
    """Largest relative error of sqrt(2 / (N - 1)) for the measured scatter of the variance."""
    measured = paired["variance: Gaussian rows"]["scatter"]
    theory = [math.sqrt(2 / (size - 1)) for size in VARIANCE_SIZES]
    return max(abs(float(value) / expected - 1) for value, expected in zip(measured, theory, strict=True))


def _best(paired: Paired, norm: str) -> float:
    """The least held-out loss of a Transformer over the learning rates; NaN if none was run."""
    losses = [measured["held_out"] for arm, measured in paired.items() if arm.startswith(f"Transformer: {norm}, ")]
    return float(min(losses, default=math.nan))


_SMALL_BATCHES = Claim(
    says="BatchNorm fails at small batches, where norms of single samples do not",
    source="Wu & He 2018, arXiv:1803.08494, abstract",
    conditions=(
        Condition(
            says="MLP, 2 images a batch: BatchNorm errs at least 5 points more than LayerNorm",
            statistic=difference("MLP: BatchNorm, batch 2", "MLP: LayerNorm, batch 2", "error"),
            low=5.0,
            published="10.6 points more than GroupNorm (ResNet-50 on ImageNet, 2 images a batch)",
            regime="a sample is one row of the batch, as in an MLP",
            source=_POINTS,
        ),
        Condition(
            says="CNN, 2 images a batch: BatchNorm errs at least 5 points more than LayerNorm",
            statistic=difference("CNN: BatchNorm, batch 2", "CNN: LayerNorm, batch 2", "error"),
            low=5.0,
            published="10.6 points more than GroupNorm (ResNet-50 on ImageNet, 2 images a batch)",
            regime="every position of an image is a row, as in a CNN",
            source=_POINTS,
        ),
        Condition(
            says="MLP, 64 images a batch: BatchNorm errs at most 2 points more than LayerNorm",
            statistic=difference("MLP: BatchNorm, batch 64", "MLP: LayerNorm, batch 64", "error"),
            high=2.0,
            published="as good as any other norm at 32 images a batch",
            source=_POINTS,
        ),
    ),
    ledger=("C75", "C53", "C54", "C55", "C59"),
)

_MODES = Claim(
    says="A net with BatchNorm is another function in evaluation than in training, the more so the smaller its batches",
    source="Ioffe 2017, arXiv:1702.03275, sections 1 and 2",
    conditions=(
        Condition(
            says="BatchNorm, batches of 2 or 4: the losses of the two modes differ by at least 0.1 nats",
            statistic=_gap("BatchNorm", (2, 4)),
            low=0.1,
            source=_NATS,
        ),
        Condition(
            says="BatchNorm, batches of 64: they differ by at most 0.1 nats",
            statistic=_gap("BatchNorm", (64,)),
            high=0.1,
            source="what small batches must exceed",
        ),
        Condition(
            says="LayerNorm, every batch size: they differ by rounding only, at most 0.00001 nats",
            statistic=_gap("LayerNorm", (1, 2, 4, 16, 64)),
            high=1e-5,
            source="theory: none; float32 sums of another order",
        ),
    ),
    ledger=("C47",),
)

_RECURRENCE = Claim(
    says="BatchNorm fails inside a recurrence, LayerNorm does not",
    source="Ba et al. 2016, arXiv:1607.06450, sections 1 and 3.1; against it Cooijmans et al. 2016, arXiv:1603.09025",
    conditions=(
        Condition(
            says="one BatchNorm for all times errs at least 5 points more than LayerNorm in evaluation",
            statistic=difference("RNN: one BatchNorm", "RNN: LayerNorm", "error"),
            low=5.0,
            regime="one set of running statistics serves all times",
            source=_POINTS,
        ),
        Condition(
            says="a BatchNorm for each time errs at least 5 points more than LayerNorm in evaluation",
            statistic=difference("RNN: a BatchNorm for each time", "RNN: LayerNorm", "error"),
            low=5.0,
            published="no failure: better than without a norm (sequential MNIST, Penn Treebank)",
            regime="each time has running statistics of its own",
            source=_POINTS,
        ),
        Condition(
            says="a BatchNorm for each time errs at least 5 points more than LayerNorm on longer sequences",
            statistic=lambda paired: float(
                paired["RNN: a BatchNorm for each time"]["errors"][-1] - paired["RNN: LayerNorm"]["errors"][-1]
            ),
            low=5.0,
            regime="sequences are longer than in training",
            source=_POINTS,
        ),
    ),
    ledger=("C75",),
)

_IMAGES = Claim(
    says="BatchNorm trains CNNs well",
    source="Ioffe & Szegedy 2015, arXiv:1502.03167, abstract",
    conditions=(
        Condition(
            says="32 images a batch: BatchNorm errs at most 2 points more than LayerNorm",
            statistic=difference("CNN: BatchNorm, batch 32", "CNN: LayerNorm, batch 32", "error"),
            high=2.0,
            source=_POINTS,
        ),
        Condition(
            says="32 images a batch: BatchNorm errs at most as often as no norm",
            statistic=difference("CNN: BatchNorm, batch 32", "CNN: no norm, batch 32", "error"),
            high=0.0,
            source="the claim",
        ),
    ),
    ledger=("C75", "C60"),
)

_SPEED = Claim(
    says="A CNN with BatchNorm takes fewer steps than one without a norm",
    source="Ioffe & Szegedy 2015, arXiv:1502.03167, abstract",
    conditions=(
        Condition(
            says=f"without a norm a loss of {_REACHED_LOSS} takes at least 1.2 times as many steps",
            statistic=_faster,
            low=1.2,
            published="14 times as many (Inception on ImageNet, each at a rate of its own)",
            source="a fifth more steps is above what the choice of batches does",
        ),
    ),
    ledger=("C71",),
)

_DEPENDENCE = Claim(
    says="BatchNorm makes an output depend on other samples, batch size, later tokens and padding; LayerNorm does not",
    source="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3; Ba et al. 2016, arXiv:1607.06450, section 3",
    conditions=(
        Condition(
            says="BatchNorm in training: every dependence, and the difference of the modes, is at least 0.001",
            statistic=_least_dependence,
            low=1e-3,
            source="theory: of the order of 1 / rows; here 24 rows",
        ),
        Condition(
            says="BatchNorm in evaluation: no dependence above 1e-10",
            statistic=_greatest_dependence(("BatchNorm, evaluation",), _COUPLINGS),
            high=1e-10,
            source="theory: 0; float64 sums of another order",
        ),
        Condition(
            says="LayerNorm, RMSNorm: no dependence above 1e-10 in either mode, and no difference of the modes",
            statistic=_greatest_dependence(
                tuple(f"{norm}, {mode}" for norm in ("LayerNorm", "RMSNorm") for mode in ("training", "evaluation")),
                (*_COUPLINGS, "mode"),
            ),
            high=1e-10,
            source="theory: 0; float64 sums of another order",
        ),
    ),
    ledger=("C47", "C53", "C56", "C57", "C58"),
)

_TEXT = Claim(
    says="BatchNorm makes a Transformer on text worse than LayerNorm does",
    source="Shen et al. 2020, arXiv:2003.07845, section 1",
    conditions=(
        Condition(
            says="each at its best rate: BatchNorm ends at least 0.1 nats a byte above LayerNorm in evaluation",
            statistic=lambda paired: _best(paired, "BatchNorm") - _best(paired, "LayerNorm"),
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
)

_FLUCTUATION = Claim(
    says="Batch statistics of text fluctuate more than those of images, and running ones do not stand in for them",
    source="Shen et al. 2020, arXiv:2003.07845, section 3 and figure 1",
    conditions=(
        Condition(
            says="the Transformer's loss in evaluation lies at least 0.1 nats above that of training mode, same text",
            statistic=lambda paired: float(paired[_TEXT_ARM]["held_out"] - paired[_TEXT_ARM]["held_out_training_mode"]),
            low=0.1,
            source=_NATS,
        ),
        Condition(
            says="the variance of a batch scatters more in the Transformer (512 tokens) than in the CNN (32 images)",
            statistic=lambda paired: float(
                paired[_TEXT_ARM]["scatter"] / paired["CNN: BatchNorm, batch 32"]["scatter"]
            ),
            low=1.0,
            source="the claim",
        ),
        Condition(
            says="the fall of the evaluation loss when statistics are recomputed under the final weights, in nats",
            statistic=lambda paired: float(
                paired[_TEXT_ARM]["held_out"] - paired[_TEXT_ARM]["held_out_new_statistics"]
            ),
            judged=False,
        ),
    ),
    ledger=("C75",),
)

_VARIANCE = Claim(
    says="The variance that BatchNorm estimates scatters as sqrt(2 / (N - 1)) over batches of N rows",
    source="the variance of a chi-squared distribution",
    conditions=(
        Condition(
            says="2 to 128 independent Gaussian rows: within 5 % of theory",
            statistic=_scatter,
            high=0.05,
            source="theory; at 2 rows 20,000 batches leave 1.3 %, one standard deviation",
        ),
    ),
    ledger=("C59",),
)

CLAIMS = (_SMALL_BATCHES, _MODES, _RECURRENCE, _IMAGES, _SPEED, _DEPENDENCE, _TEXT, _FLUCTUATION, _VARIANCE)
"""In the order in which they are shown."""
