"""Observations of a training run as frozen values with JSON out: the part of an `Inspection` that a watch adds.

Nothing here computes more than a lookup. Every number is a Python float or int; what was not measured is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Quantity = Literal[
    "loss",
    "loss z",
    "gradient norm",
    "parameter gradient",
    "activation gradient",
    "update ratio",
    "stream rms",
    "input rms",
    "kurtosis",
    "eps share",
    "headroom",
    "logit bound",
    "gain mean",
    "bias rms",
    "non-finite",
    "learning rate",
    "gradient kept",
    "gradient left",
    "update cosine",
    "batch digest",
    "batch distinct",
    "batch copies",
    "batch rms",
    "id rms",
    "batch largest",
    "labels",
    "labels copied",
    "labels next",
    "labels back",
    "labels then",
    "label spread",
]
"""The quantities that a series can have:

loss                  as given to `step`, mean over the ranks; of the whole run
loss z                robust standard deviations of a loss above those before it, as in `history.height`; from the 17th
gradient norm         of all parameters together, before any clipping that follows `step`
parameter gradient    norm of one parameter's gradient
activation gradient   root mean square of the loss's gradient with respect to what leaves a block
update ratio          rms of one parameter's change in an optimizer step over its own rms, on a fixed sample; at
                      reports, and where it is past its limit; without a path the median weight's, at every step
stream rms            median row's rms of a block's output
input rms             median row's rms of what enters a norm
kurtosis              mean over the rows of what enters a norm of E[(x - mean)^4] / var^2; 3 for Gaussian rows
eps share             share of the rows entering a norm that its eps shortens by more than 1 %
headroom              log2 of the input dtype's largest number over the largest magnitude that entered or left a norm
logit bound           largest |q| times largest |k| times the softmax scale of an attention
gain mean             mean of a norm's effective gain
bias rms              root mean square of a norm's bias
non-finite            NaN or infinite elements that entered or left a norm
learning rate         the largest of all groups, as an optimizer had it in its step
gradient kept         norm of the gradients that an optimizer got over that of the complete ones; below 1: clipped
gradient left         share of the gradients as an optimizer got them that is still there when the next backward pass
                      begins: 0 where they are cleared
update cosine         between an optimizer's update and the gradients that it got; below 0 where it goes down
batch digest          a number that another batch hardly shares
batch distinct        values that differ in a sample of a batch, of 16 elements or more
batch copies          share of the samples of a batch but the first that are equal to an earlier one, where any is
batch rms             of what the model is fed, where that is no ids
id rms                of a sample of the ids that the model is fed
batch largest         magnitude of the largest element that the model is fed; NaN or infinite where one is
labels                labels looked at, a sample of each batch
labels copied         share of them that are the input at their own place
labels next           share that are the next input
labels back           share that are the input before
labels then           share that are the next input but one
label spread          largest less smallest label
"""

ParameterKind = Literal["gain", "bias of a norm", "weight", "bias", "embedding", "output"]

OriginKind = Literal[
    "non-finite in the forward pass",
    "non-finite in the backward pass",
    "non-finite loss",
    "attention logits",
    "update",
    "gradient",
    "stream",
    "loss",
    "input data",
    "parameter",
    "norm",
    "block",
    "learning rate",
]

Verdict = Literal["yes", "no", "unknown"]

CUT = 0.99
"""Share of the gradient below which it was clipped: a sample of it is read twice, and may be rounded in between."""

# Gains that are drawn at all are drawn within 2 % of 1, or around 0, where the mean of n of them is 1 / sqrt(n) of it.
_FRESH_SPREAD, _AROUND_ZERO = 0.05, 4.0

QUIET = ("asked", "a look on the way", "end of the run")
"""Reasons to write that are no alarm."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity at one place over the steps at which it was measured."""

    quantity: Quantity
    path: str
    """The place: a module, or a parameter; "" for the whole model."""
    steps: tuple[int, ...]
    """Optimizer steps, from 0, in ascending order."""
    values: tuple[float, ...]
    """One a step; NaN or infinite where the number itself was."""

    @property
    def last(self) -> float:
        """The newest value; NaN without one."""
        return self.values[-1] if self.values else math.nan

    def pairs(self) -> Iterator[tuple[int, float]]:
        """Each step with its value."""
        return zip(self.steps, self.values, strict=True)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter as the optimizer has it, at the last report."""

    path: str
    """Its name in the model."""
    kind: ParameterKind
    """"gain" and "bias of a norm" by the module that was identified, never by name."""
    site: str
    """Path of the norm it belongs to, or ""."""
    block: int | None
    """Index of its block, or None."""
    size: int
    """Number of elements, all shards together."""
    dtype: str
    """As in "float32"."""
    trained: bool
    """It requires a gradient and one of the optimizers holds it."""
    gradient_steps: int
    """Steps in which it had a gradient."""
    learning_rate: float
    """Learning rate of its group; NaN outside the optimizers."""
    weight_decay: float
    """Weight decay of its group; NaN outside the optimizers."""
    rms: float
    """Root mean square of its elements."""
    gradient_rms: float
    """Gradient rms of its gradient's elements at the last report; NaN without one."""
    update_ratio: float
    """rms of the last measured update over its own rms; NaN where none was measured."""
    first_update_ratio: float
    """The same ratio of the first measured update."""
    optimizer_eps_share: float = math.nan
    """Share of its elements whose gradient rms, as Adam holds it, is below ten times Adam's eps; NaN for other
    optimizers."""
    first_spread: float = math.nan
    """First spread of a gain, the standard deviation of its elements at the first report; NaN of others."""
    moved_steps: int = -1
    """Steps in which an optimizer changed at least one element of a sample of it; -1: not counted."""
    unmoved_share: float = math.nan
    """Unmoved share of its elements: of a sample with gradients, how many are bit for bit as they were when the watch
    began; NaN but for 16-bit parameters of norms."""
    is_scale_invariant: bool = False
    """Verified by behaviour: the model's output does not change when it is scaled."""
    cosine: float = math.nan
    """Between its elements and their gradient, where it is scale invariant; else NaN."""
    group: int = -1
    """Index of its group among those of all optimizers; -1 outside them."""
    rank_spread: float = 0.0
    """Largest relative difference of its elements' checksum between ranks that should hold the same; 0 in one process.
    """
    gradient_rank_spread: float = 0.0
    """The same spread of its gradient, before the optimizer's step."""

    @property
    def is_bias(self) -> bool:
        """Whether it is the bias of a layer or of a norm; these begin at 0."""
        return self.kind in ("bias", "bias of a norm")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A parameter that was another when a step's gradients were complete than the optimizer had left it."""

    step: int
    """The step before whose gradients it was changed."""
    path: str
    """The parameter."""
    ratio: float
    """rms of the change over its rms before."""
    factor: float
    """Its rms after over its rms before."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A plain number of a norm's module, such as its eps, that is another than when the watch began."""

    path: str
    name: str
    """Name of the module's attribute."""
    before: float
    """The value before."""
    after: float
    """The value after."""
    step: int
    """The first measured step behind which it was seen."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A norm or block that ran, or a weight that had a gradient, and no longer does."""

    kind: Literal["norm", "block", "gradient"]
    """"norm", "block" or "gradient"."""
    path: str
    """The norm, block or parameter."""
    step: int
    """The first step without."""
    before: int
    """Steps in which it did."""
    since: int
    """Steps in which it did not, up to the last that was measured."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first place and step of a deviation."""

    kind: OriginKind
    """The quantity that moved first."""
    step: int
    """In which optimizer step, from 0."""
    path: str
    """At which norm, block, attention or parameter; "" where only the whole model tells."""
    detail: str
    """The measured values, in words."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One of the five questions, answered with numbers."""

    question: str
    """As it is asked."""
    verdict: Verdict
    """"yes", "no" or "unknown"."""
    detail: str
    """The numbers, in a sentence or two; what is missing where it is unknown."""
    places: tuple[str, ...] = ()
    """Paths it is about, the worst first."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run as it was watched."""

    steps: int
    """Optimizer steps seen."""
    every: int
    """Steps between two measurements of all norms."""
    reports: int
    """Measurements of all norms."""
    reason: str
    """Why this was written: one of `QUIET`, what broke, or the title of the worst error of the rules."""
    reason_step: int
    """The step at which that was noticed."""
    ranks: int
    """Processes whose numbers are pooled here."""
    observer: str
    """The watch's test of itself at the start, in one line."""
    remarks: tuple[str, ...]
    """The parts that could not be watched, with the reason, one line each."""
    optimizers: tuple[str, ...]
    """One line each: class, learning rate, parameters."""
    series: tuple[Series, ...]
    """All series, of the whole run or its last part."""
    parameters: tuple[Parameter, ...]
    """In the model's order."""
    vocabulary: int
    """Entries of the output, where the loss can be compared with the logarithm of that; else 0."""
    worst: str = ""
    """The worst severity of its findings, or ""."""
    tokens: int = 0
    """Tokens that the run was trained on, or samples where they are no tokens; 0 where that is not known."""
    changes: tuple[Change, ...] = ()
    """Parameters that were changed by something else than an optimizer."""
    settings: tuple[Setting, ...] = ()
    """Settings of norms that changed."""
    stopped: tuple[Stop, ...] = ()
    """Norms and blocks that no longer run, and weights that no longer have a gradient."""
    skipped: tuple[int, ...] = ()
    """Steps with NaN or infinite gradients that no optimizer took."""
    broken: tuple[str, ...] = ()
    """Parameters that held NaN or infinity already when such a value was first seen, in the model's order."""
    origin: Origin | None = None
    """The origin, or None if nothing moved."""
    answers: tuple[Answer, ...] = ()
    """The five questions in order."""
    first_change: tuple[str, ...] = ()
    """Remedies, the most likely first."""
    confirm: str = ""
    """The test that confirms the remedy."""

    @property
    def has_skipped(self) -> bool:
        """Gradients that were NaN or infinite reached no weight, as where a loss scaler skips its first steps.

        An optimizer that had taken such a step would have left NaN in the weights, and so in the loss and in later
        gradients.
        """
        forward = any(not math.isfinite(value) or value != 0 for one in self.of("non-finite") for value in one.values)
        losses = all(math.isfinite(value) for series in self.of("loss") for value in series.values)
        return not forward and losses and all(math.isfinite(series.last) for series in self.of("gradient norm"))

    @property
    def began_trained(self) -> bool:
        """The run began with trained weights: most gains neither alike in all elements, nor drawn around 0."""
        means = {series.path: series.values[0] for series in self.of("gain mean") if series.steps[:1] == (0,)}
        spreads = [(each.first_spread, abs(means[each.site])) for each in self.parameters if each.site in means]
        known = [(spread, mean) for spread, mean in spreads if not math.isnan(spread)]
        learnt = [mean for spread, mean in known if _FRESH_SPREAD * mean < spread < _AROUND_ZERO * mean]
        return 2 * len(learnt) > len(known)

    @property
    def was_noticed(self) -> bool:
        """Something broke while the run was watched: `reason` says what, and `reason_step` when that was seen."""
        return self.reason not in QUIET

    def of(self, quantity: Quantity) -> tuple[Series, ...]:
        """The series of one quantity, in the model's order."""
        return tuple(series for series in self.series if series.quantity == quantity)

    def largest(self, quantity: Quantity) -> tuple[list[int], list[float]]:
        """Steps, and the largest value of a quantity's series at each; NaN if one of them is."""
        at: dict[int, list[float]] = {}
        for series in self.of(quantity):
            for step, value in series.pairs():
                at.setdefault(step, []).append(value)
        steps = sorted(at)
        return steps, [math.nan if any(map(math.isnan, at[step])) else max(at[step]) for step in steps]

    @property
    def worst_update(self) -> Series | None:
        """The update ratios of one parameter: the origin's, else the highest at the end; biases come last."""
        series = [each for each in self.of("update ratio") if each.values and each.path]
        if self.origin is not None:
            for each in series:
                if each.path == self.origin.path:
                    return each
        biases = {parameter.path for parameter in self.parameters if parameter.is_bias}
        weights = [each for each in series if each.path not in biases]
        return max(weights or series, key=lambda each: finite_or_highest(each.last), default=None)


def finite_or_highest(value: float) -> float:
    """The value to rank by; a value that is not finite ranks highest."""
    return value if math.isfinite(value) else math.inf
