"""What was seen of a training run, as frozen values with JSON out: the part of an `Inspection` that a watch adds.

Nothing here computes more than a lookup. Every number is a Python float or int; what was not measured is NaN.
"""

from __future__ import annotations

import math
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
]
"""What a series is of:

loss                  as given to `step`, mean over the ranks; of the whole run
loss z                robust standard deviations of a loss above those before it, as in `history.height`; from the 17th
gradient norm         of all parameters together, before any clipping that follows `step`
parameter gradient    norm of one parameter's gradient
activation gradient   root mean square of the loss's gradient with respect to what leaves a block
update ratio          rms of one parameter's change in an optimizer step over its own rms, on a fixed sample
stream rms            median row's rms of what leaves a block
input rms             median row's rms of what enters a norm
kurtosis              mean over the rows of what enters a norm of E[(x - mean)^4] / var^2; 3 for Gaussian rows
eps share             share of the rows entering a norm that its eps shortens by more than 1 %
headroom              log2 of the input dtype's largest number over the largest magnitude that entered or left a norm
logit bound           largest |q| times largest |k| times the softmax scale of an attention
gain mean             mean of a norm's effective gain
bias rms              root mean square of a norm's bias
non-finite            NaN or infinite elements that entered or left a norm
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
]

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity at one place over the steps at which it was measured.

    Attributes:
        quantity: What.
        path: Where: a module, or a parameter; "" for the whole model.
        steps: Optimizer steps, from 0, in ascending order.
        values: One a step; NaN or infinite where the number itself was.
    """

    quantity: Quantity
    path: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The newest value; NaN without one."""
        return self.values[-1] if self.values else math.nan


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter as the optimizer has it, at the last report.

    Attributes:
        path: Its name in the model.
        kind: "gain" and "bias of a norm" by the module that was identified, never by name.
        site: Path of the norm it belongs to, or "".
        block: Index of its block, or None.
        size: Number of elements, all shards together.
        dtype: As in "float32".
        trained: It requires a gradient and one of the optimizers holds it.
        gradient_steps: Steps in which it had a gradient.
        learning_rate: Of its group; NaN outside the optimizers.
        weight_decay: Of its group; NaN outside the optimizers.
        rms: Of its elements.
        gradient_rms: Of its gradient's elements at the last report; NaN without one.
        update_ratio: rms of the last measured update over its own rms; NaN where none was measured.
        first_update_ratio: The same of the first measured update.
        optimizer_eps_share: Share of its elements whose gradient rms, as Adam holds it, is below ten times Adam's eps;
            NaN for other optimizers.
        is_scale_invariant: Verified by behaviour: the model's output does not change when it is scaled.
        cosine: Between its elements and their gradient, where it is scale invariant; else NaN.
        rank_spread: Largest relative difference of its elements' checksum between ranks that should hold the same; 0
            in one process.
        gradient_rank_spread: The same of its gradient, before the optimizer's step.
    """

    path: str
    kind: ParameterKind
    site: str
    block: int | None
    size: int
    dtype: str
    trained: bool
    gradient_steps: int
    learning_rate: float
    weight_decay: float
    rms: float
    gradient_rms: float
    update_ratio: float
    first_update_ratio: float
    optimizer_eps_share: float = math.nan
    is_scale_invariant: bool = False
    cosine: float = math.nan
    rank_spread: float = 0.0
    gradient_rank_spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where and when it began.

    Attributes:
        kind: What moved first.
        step: In which optimizer step, from 0.
        path: At which norm, block, attention or parameter; "" where only the whole model tells.
        detail: The measured values, in words.
    """

    kind: OriginKind
    step: int
    path: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One of the four questions, answered with numbers.

    Attributes:
        question: As it is asked.
        verdict: "yes", "no" or "unknown".
        detail: The numbers, in a sentence or two; what is missing where it is unknown.
        places: Paths it is about, the worst first.
    """

    question: str
    verdict: Verdict
    detail: str
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run as it was watched.

    Attributes:
        steps: Optimizer steps seen.
        every: Steps between two measurements of all norms.
        reports: Measurements of all norms.
        reason: Why this was written: "asked", "end of the run", "loss spike", "non-finite values", ...
        reason_step: The step at which that was noticed.
        ranks: Processes whose numbers are pooled here.
        observer: What the watch proved of itself at the start, in one line.
        remarks: What could not be watched, and why, one line each.
        optimizers: One line each: class, learning rate, parameters.
        series: All series, of the whole run or its last part.
        parameters: In the model's order.
        broken: Parameters that held NaN or infinity already when such a value was first seen, in the model's order.
        vocabulary: Entries of the output, where the loss can be compared with the logarithm of that; else 0.
        origin: Where it began, or None where nothing moved.
        answers: The four questions in order.
        first_change: What to change first, most likely cure first.
        confirm: How to confirm it.
    """

    steps: int
    every: int
    reports: int
    reason: str
    reason_step: int
    ranks: int
    observer: str
    remarks: tuple[str, ...]
    optimizers: tuple[str, ...]
    series: tuple[Series, ...]
    parameters: tuple[Parameter, ...]
    vocabulary: int
    broken: tuple[str, ...] = ()
    origin: Origin | None = None
    answers: tuple[Answer, ...] = ()
    first_change: tuple[str, ...] = ()
    confirm: str = ""

    @property
    def has_skipped(self) -> bool:
        """Gradients that were NaN or infinite reached no weight, as where a loss scaler skips its first steps.

        An optimizer that had taken such a step would have left NaN in the weights, and so in the loss and in later
        gradients.
        """
        forward = any(not math.isfinite(value) or value != 0 for one in self.of("non-finite") for value in one.values)
        losses = all(math.isfinite(value) for series in self.of("loss") for value in series.values)
        return not forward and losses and all(math.isfinite(series.last) for series in self.of("gradient norm"))

    def of(self, quantity: Quantity) -> tuple[Series, ...]:
        """The series of one quantity, in the model's order."""
        return tuple(series for series in self.series if series.quantity == quantity)
