"""Violation: one way in which a norm is not what its spec says; and the names of all checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.spec import NormSpec

CHECKS: dict[str, str] = {
    "call": "it runs in every dtype asked for, and returns one tensor of the input's shape",
    "rows": "which elements share statistics: no other axis, sample or position",
    "formula": "what is wrong with the formula where none of the next six names it",
    "centring": "whether the mean is subtracted, and what divides: a standard deviation or a root mean square",
    "divisor": "the sum of squares over n, over n - 1, or as it is",
    "eps": "its value, and whether it is inside the root, outside, or a lower bound",
    "gain": "whether there is one, and where it multiplies",
    "offset": "what is added to the stored gain",
    "bias": "whether there is one",
    "cancelling variance": "the variance of rows whose mean is far larger than their deviations",
    "statistics dtype": "mean and scale of 16-bit rows are taken in float32, where the spec says so",
    "casts": "where 16-bit rows are rounded: the outputs are those of the spec's cast program",
    "offset dtype": "whether the offset is added in float32 or in the gain's own dtype",
    "output dtype": "the output's dtype, also for a float32 gain and 16-bit input",
    "residual": "a fused addition returns x + residual, rounded to the residual's dtype",
    "residual dtype": "a fused addition returns the residual in its own dtype, also float32 beside 16-bit input",
    "residual sum": "a fused addition normalizes that sum, in 16 bits rounded before the statistics or not, as asked",
    "input kept": "the input is not written to",
    "repeated calls": "the same input gives the same again, bit for bit, and an earlier output is not written to",
    "modes": "training mode and eval mode give the same, to rounding",
    "layout": "transposed, strided, sliced and expanded tensors give what contiguous ones give, gradients included",
    "batch position": "a row gives the same alone, first or last in a batch, to rounding; each of many rows is right",
    "batch invariance": "if asked for: a row gives the same bits alone, and at any place in a batch of any size",
    "row isolation": "a NaN shows in its row and stays there, in the output and in the gradient of the input",
    "constant rows": "zero and constant rows give finite outputs and gradients",
    "input gradient": "the derivative by the input",
    "gain gradient": "the derivative by the gain, over up to 65,536 rows",
    "bias gradient": "the derivative by the bias, over as many",
}
"""Every check by name, causes first; `skip` takes these names."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One way in which a norm is not what its spec says."""

    check: str
    """The name of the check, one of `CHECKS`."""
    expected: str
    """The behaviour that the spec asks for."""
    found: str
    """The norm's behaviour."""
    confirm: str
    """How to see it by hand."""

    def __str__(self) -> str:
        """All of it on one line."""
        return f"{self.check}: expected {self.expected}; found {self.found}; to confirm: {self.confirm}"


class ConformanceError(AssertionError):
    """A norm does not compute what its spec says."""

    def __init__(self, name: str, spec: NormSpec, violations: Sequence[Violation]) -> None:
        super().__init__(name, spec, tuple(violations))
        self.name = name
        self.spec = spec
        """The formula that it should compute."""
        self.violations = tuple(violations)
        """In what way it does not, the cause first."""

    def __str__(self) -> str:
        """The expected formula, then one line per violation, then the way to leave one out."""
        names = ", ".join(repr(violation.check) for violation in self.violations)
        lines = [f"{self.name} is not {self.spec}", *(f"  {violation}" for violation in self.violations)]
        return "\n".join([*lines, f"  (a check is left out by its name: skip=({names},))"])
