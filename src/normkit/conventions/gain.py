"""Gain and bias: whether they are there, what is added to the stored gain, and where the gain multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OffsetDtype = Literal["float32", "parameter"]
WeightPlacement = Literal["after", "before"]


@dataclass(frozen=True, slots=True)
class Gain:
    """A row is multiplied by weight + offset, before it is normalized or after; then a bias is added."""

    is_present: bool = True
    offset: float = 0.0
    offset_dtype: OffsetDtype = "float32"
    placement: WeightPlacement = "after"
    has_bias: bool = True

    @property
    def is_before(self) -> bool:
        """Whether it multiplies the row before that is normalized."""
        return self.placement == "before"

    def conventions(self) -> dict[str, Any]:
        """As fields of `NormSpec`."""
        return {
            "has_weight": self.is_present,
            "weight_offset": self.offset,
            "offset_dtype": self.offset_dtype,
            "weight_placement": self.placement,
            "has_bias": self.has_bias,
        }

    @property
    def no_kernel(self) -> str | None:
        """Why no kernel multiplies so; None if some do."""
        return "a gain before the norm" if self.is_before else None

    @property
    def neutral(self) -> float:
        """The weight that leaves a row as it is."""
        return 1.0 - self.offset

    @property
    def is_added_narrow(self) -> bool:
        """Whether there is an offset and it is added in the weight's dtype."""
        return bool(self.offset) and self.offset_dtype == "parameter"

    def effective(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight + offset, added in `dtype`, or in the parameter's dtype where the spec says so."""
        if not self.offset:
            return weight
        if self.is_added_narrow:
            return weight + self.offset
        return weight.to(dtype) + self.offset

    def sides(self, gain: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the row before and after it is normalized: the effective gain and a one."""
        one = gain.new_ones(())
        return (gain, one) if self.is_before else (one, gain)

    @property
    def row(self) -> str:
        """The name of the normalized row in the text of a formula: x, or u = gain * x."""
        return "u" if self.is_before else "x"

    @property
    def words(self) -> str:
        """The factor of the row: weight + offset."""
        return f"{self.offset:g} + weight" if self.offset else "weight"

    @property
    def parts(self) -> tuple[str, ...]:
        """The factor of the row, and its place, if that is not after normalizing."""
        if not self.is_present:
            return ("none",)
        return (self.words, "before normalizing") if self.is_before else (self.words,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The unusual parts, for a short name."""
        offset = (self.words,) if self.offset else ()
        return (*offset, "gain before normalizing") if self.is_before else offset

    @property
    def bias_words(self) -> str:
        """The treatment of the bias, in words."""
        return "added" if self.has_bias else "none"

    @property
    def offset_words(self) -> str:
        """The place where the offset is added."""
        return "added in float32" if self.offset_dtype == "float32" else "added in the weight's dtype"

    @property
    def plain_factor(self) -> str:
        """The gain in plain text."""
        return f"({self.words})" if self.offset else self.words

    def plain(self, normalized: str) -> str:
        """The affine part in plain text."""
        bias = " + bias" if self.has_bias else ""
        if self.is_before:
            return f"{normalized}{bias}, u = {self.plain_factor} * x"
        return f"{self.plain_factor} * {normalized}{bias}" if self.is_present else f"{normalized}{bias}"

    def latex(self, fraction: str) -> str:
        """The whole formula in LaTeX, without dollar signs."""
        factor = rf"({self.offset:g} + w)" if self.offset else "w"
        bias = " + b" if self.has_bias else ""
        if self.is_before:
            return rf"y = {fraction}{bias},\quad u = {factor} \odot x"
        return rf"y = {factor} \odot {fraction}{bias}" if self.is_present else f"y = {fraction}{bias}"

    def mathml(self, fraction: str) -> str:
        """The whole formula in MathML, without the `math` element."""
        factor = f"<mrow><mo>(</mo><mn>{self.offset:g}</mn><mo>+</mo><mi>w</mi><mo>)</mo></mrow>"
        factor = factor if self.offset else "<mi>w</mi>"
        bias = "<mo>+</mo><mi>b</mi>" if self.has_bias else ""
        right = f"{factor}<mo>⊙</mo>{fraction}{bias}" if self.is_present else f"{fraction}{bias}"
        if self.is_before:
            right = f"{fraction}{bias}<mo>,</mo><mspace width='1em'/><mi>u</mi><mo>=</mo>{factor}<mo>⊙</mo><mi>x</mi>"
        return f"<mrow><mi>y</mi><mo>=</mo>{right}</mrow>"

    def notes(self) -> list[str]:
        """The unusual parts that the formula does not show, for the one line of a spec."""
        return ["offset added in the weight's dtype"] if self.is_added_narrow else []


NO_GAIN = Gain(is_present=False, has_bias=False)
"""Neither gain nor bias."""
