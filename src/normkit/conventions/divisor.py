"""The divisor of a row's sum of squares, and the multiplier of the normalized row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Correction = Literal[0, 1]
Reduction = Literal["mean", "sum"]
Multiplier = Literal["one", "sqrt_n"]


@dataclass(frozen=True, slots=True)
class Divisor:
    """v = sum(d**2) / `count(n)`, and the row times `factor(n)` over s; d are deviations from the mean, or the row."""

    correction: Correction = 0
    reduction: Reduction = "mean"
    multiplier: Multiplier = "one"

    def count(self, n: int) -> int:
        """The divisor of the sum of n squares: n, n - 1 or 1."""
        return 1 if self.is_sum else n - self.correction

    def factor(self, n: int) -> float:
        """The multiplier of a row of n features: 1 or sqrt(n)."""
        return math.sqrt(n) if self.is_multiplied else 1.0

    def radius(self, n: int) -> float:
        """Length of a normalized row of n features without eps: factor * sqrt(count)."""
        return self.factor(n) * math.sqrt(self.count(n))

    @property
    def is_multiplied(self) -> bool:
        """Whether the row is multiplied by sqrt(n)."""
        return self.multiplier == "sqrt_n"

    @property
    def is_sum(self) -> bool:
        """Whether nothing is divided."""
        return self.reduction == "sum"

    @property
    def is_unit(self) -> bool:
        """Whether a normalized row has length 1."""
        return self.is_sum and not self.is_multiplied

    def rms(self, n: int) -> float:
        """Root mean square of a normalized row of n features, without eps and correction: 1, sqrt(n) or 1 / sqrt(n)."""
        return math.sqrt(n) ** (self.is_multiplied - self.is_sum)

    def of_squares(self, squares: Tensor) -> Tensor:
        """v of squares of shape (..., n), of shape (..., 1)."""
        if self.is_sum:
            return squares.sum(-1, keepdim=True)
        if self.correction == 0:
            return squares.mean(-1, keepdim=True)
        return squares.sum(-1, keepdim=True) / (squares.shape[-1] - 1)

    def multiplied(self, rows: Tensor) -> Tensor:
        """Rows of shape (..., n) times `factor(n)`."""
        return rows * self.factor(rows.shape[-1]) if self.is_multiplied else rows

    def conventions(self) -> dict[str, Any]:
        """As fields of `NormSpec`."""
        return {"correction": self.correction, "reduction": self.reduction, "multiplier": self.multiplier}

    @property
    def codes(self) -> tuple[int, int]:
        """The kernels' numbers: 0 for n, 1 for n - 1, 2 for no division; and 1 where sqrt(n) multiplies."""
        return 2 if self.is_sum else self.correction, int(self.is_multiplied)

    @property
    def words(self) -> str:
        """Follows "the sum of squares is"."""
        return ", ".join(self.parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """The divisor of the sum of squares, and the multiplier of the row."""
        divided = "not divided (L2)" if self.is_sum else f"divided by n{' - 1' if self.correction else ''}"
        return (divided, "the row multiplied by sqrt(n)") if self.is_multiplied else (divided,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The unusual parts, for a short name."""
        return ("n - 1",) if self.correction else ()

    def root_in_words(self, *, is_centred: bool) -> str:
        """The divisor of a row, apart from eps."""
        if self.is_sum:
            return "norm"
        return "standard deviation" if is_centred else "root mean square"

    @property
    def radius_in_words(self) -> str:
        """`radius` as a formula: "sqrt(n)", "sqrt(n - 1)", "1" or "n", say."""
        words = "1" if self.is_sum else "sqrt(n - 1)" if self.correction else "sqrt(n)"
        if not self.is_multiplied:
            return words
        return {"1": "sqrt(n)", "sqrt(n)": "n"}.get(words, f"{words} * sqrt(n)")

    def plain_square(self, row: str, *, is_centred: bool) -> str:
        """v in plain text."""
        if self.is_sum:
            return f"sum(({row} - mean({row}))^2)" if is_centred else f"sum({row}^2)"
        if is_centred:
            return f"var({row}{', correction=1' if self.correction else ''})"
        return f"sum({row}^2) / (n - 1)" if self.correction else f"mean({row}^2)"

    def plain_root(self, row: str, *, is_centred: bool) -> str:
        """sqrt(v) in plain text, by its usual name where it has one."""
        if self.is_sum:
            return f"norm({row} - mean({row}))" if is_centred else f"norm({row})"
        if is_centred:
            return f"std({row}{', correction=1' if self.correction else ''})"
        return f"sqrt({self.plain_square(row, is_centred=False)})" if self.correction else f"rms({row})"

    def latex_square(self, row: str, *, is_centred: bool) -> str:
        """v in LaTeX."""
        deviation = rf"({row}_i - \mu_{row})" if is_centred else f"{row}_i"
        share = r"\tfrac{1}{n - 1}" if self.correction else r"\tfrac{1}{n}"
        return rf"{'' if self.is_sum else share}\sum_i {deviation}^2"

    def mathml_square(self, row: str, *, is_centred: bool) -> str:
        """v in MathML."""
        square = f"<msubsup><mi>{row}</mi><mi>i</mi><mn>2</mn></msubsup>"
        if is_centred:
            element = f"<msub><mi>{row}</mi><mi>i</mi></msub>"
            square = f"<msup><mrow><mo>(</mo>{element}<mo>−</mo><mi>μ</mi><mo>)</mo></mrow><mn>2</mn></msup>"
        squares = f"<munder><mo>∑</mo><mi>i</mi></munder>{square}"
        if self.is_sum:
            return f"<mrow>{squares}</mrow>"
        count = "<mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow>" if self.correction else "<mi>n</mi>"
        return f"<mrow><mfrac><mn>1</mn>{count}</mfrac>{squares}</mrow>"


DIVISORS: Mapping[tuple[Correction, Reduction, Multiplier], Divisor] = MappingProxyType(
    {
        (each.correction, each.reduction, each.multiplier): each
        for each in (
            Divisor(),
            Divisor(correction=1),
            Divisor(reduction="sum"),
            Divisor(reduction="sum", multiplier="sqrt_n"),
            Divisor(multiplier="sqrt_n"),
            Divisor(correction=1, multiplier="sqrt_n"),
        )
    }
)
"""All, by correction, reduction and multiplier; the simplest first. Where nothing is divided there is no correction."""
