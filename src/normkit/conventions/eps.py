"""The placement of eps in the number s that a row is divided by: inside the root, outside it, or as a lower bound.

Throughout, v is the mean of squares (or their sum) that the spec takes, root = sqrt(v), and eps a number:
`machine_epsilon` where the spec has None.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

EpsPlacement = Literal["inside", "outside", "clamp"]
Number = TypeVar("Number", float, "Tensor")


class Placement(ABC):
    """One place of eps."""

    name: ClassVar[EpsPlacement]
    code: ClassVar[int]
    """The kernels' number for it; any number where no kernel computes it."""
    no_kernel: ClassVar[str | None] = None
    """Why no kernel computes it; None if some do."""
    power: ClassVar[Literal[1, 2]]
    """eps is in units of x to this power."""
    words: ClassVar[str]
    """Follows "eps is added" or a value of eps."""
    shortens_every_row: ClassVar[bool] = True
    """Whether eps > 0 shortens rows of any length; if not, only those whose root is below eps."""

    def conventions(self, eps: float | None) -> dict[str, Any]:
        """This place of an eps, as fields of `NormSpec`."""
        return {"eps": eps, "eps_placement": self.name}

    def length(self, eps: float) -> float:
        """|eps| in units of x: the root at which eps begins to count."""
        return math.sqrt(abs(eps)) if self.power == 2 else abs(eps)

    def rescaled(self, eps: float, factor: Number) -> Number:
        """The eps that does to rows `factor` times as long what `eps` does to these."""
        return eps * factor * factor if self.power == 2 else eps * factor

    @property
    def argument(self) -> str:
        """As an argument of `NormSpec`."""
        return f"eps_placement={self.name!r}"

    def parts(self, eps: float | None) -> tuple[str, ...]:
        """eps in words: its value and its place."""
        if eps == 0:
            return ("none",)
        return ("the machine epsilon" if eps is None else f"{eps:.6g}", self.words)

    def label(self, eps: float | None) -> str:
        """eps as part of a short name; inside the root its place is left out."""
        if eps is None:
            return "machine eps"
        if eps == 0:
            return "no eps"
        digits, _, power = f"{eps:g}".partition("e")
        value = f"{digits}e{int(power)}" if power else digits
        return f"eps {value}" + ("" if self.name == "inside" else f" {self.name}")

    @abstractmethod
    def scale(self, value: Tensor, eps: float | Tensor) -> Tensor:
        """s, given v where `power` is 2 and the root where it is 1."""

    @abstractmethod
    def scale_of_root(self, root: Tensor, eps: float) -> Tensor:
        """s, given the root; no square of the root overflows or vanishes."""

    @abstractmethod
    def slope(self, root: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """q and where s does not change with v: elsewhere ds/dv = 1 / (2 q)."""

    @abstractmethod
    def remainder(self, root: Tensor, scale: Tensor, eps: float) -> Tensor:
        """1 - v / (s q), the share of a scaling of the row that eps lets through."""

    @abstractmethod
    def shrink(self, ratio: Tensor) -> Tensor:
        """How much eps shortens a row, root / s, for ratio = root / `length(eps)`."""

    @abstractmethod
    def ratio_at(self, shrink: float) -> float:
        """The inverse of `shrink`."""

    @abstractmethod
    def eps_of(self, root: Tensor, shrink: Tensor) -> Tensor:
        """The eps that shortens rows of this root so much: how `identify` tells one place from the others."""

    @abstractmethod
    def scale_below(self, room: Tensor, eps: float) -> Tensor:
        """s of a row that eps shortens to the share 1 - room."""

    @abstractmethod
    def plain(self, square: str, root: str, eps: float | None) -> str:
        """s in plain text, given the texts of v and of its root."""

    @abstractmethod
    def latex(self, square: str, eps: float | None) -> str:
        """s in LaTeX."""

    @abstractmethod
    def mathml(self, square: str, eps: float | None) -> str:
        """s in MathML."""


class Inside(Placement):
    """s = sqrt(v + eps)."""

    name, code, power, words = "inside", 0, 2, "inside the root"

    def scale(self, value: Tensor, eps: float | Tensor) -> Tensor:
        return (value + eps).sqrt()

    def scale_of_root(self, root: Tensor, eps: float) -> Tensor:
        size = math.sqrt(abs(eps))
        # A spec may hold a negative eps, which is the side of no triangle.
        return root.hypot(root.new_full((), size)) if eps >= 0 else ((root - size) * (root + size)).sqrt()

    def slope(self, root: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return scale, scale.new_zeros(scale.shape).bool()

    def remainder(self, root: Tensor, scale: Tensor, eps: float) -> Tensor:
        return eps / scale / scale

    def shrink(self, ratio: Tensor) -> Tensor:
        return ratio / ratio.hypot(ratio.new_ones(()))

    def ratio_at(self, shrink: float) -> float:
        return shrink / math.sqrt(1 - shrink**2)

    def eps_of(self, root: Tensor, shrink: Tensor) -> Tensor:
        return root.square() * (shrink.reciprocal().square() - 1)

    def scale_below(self, room: Tensor, eps: float) -> Tensor:
        return math.sqrt(eps) / (room * (2.0 - room)).sqrt()

    def plain(self, square: str, root: str, eps: float | None) -> str:
        return f"sqrt({square} {_plus(eps)})"

    def latex(self, square: str, eps: float | None) -> str:
        return rf"\sqrt{{{square}{_latex_plus(eps)}}}"

    def mathml(self, square: str, eps: float | None) -> str:
        return f"<msqrt><mrow>{square}<mo>+</mo>{_mathml(eps)}</mrow></msqrt>"


class Outside(Placement):
    """s = sqrt(v) + eps. Its kink at v = 0 counts as flat."""

    name, code, power, words = "outside", 1, 1, "outside the root"

    def scale(self, value: Tensor, eps: float | Tensor) -> Tensor:
        return value + eps

    def scale_of_root(self, root: Tensor, eps: float) -> Tensor:
        return root + eps

    def slope(self, root: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return root, root == 0

    def remainder(self, root: Tensor, scale: Tensor, eps: float) -> Tensor:
        return eps / scale

    def shrink(self, ratio: Tensor) -> Tensor:
        return ratio / (ratio + 1)

    def ratio_at(self, shrink: float) -> float:
        return shrink / (1 - shrink)

    def eps_of(self, root: Tensor, shrink: Tensor) -> Tensor:
        return root * (shrink.reciprocal() - 1)

    def scale_below(self, room: Tensor, eps: float) -> Tensor:
        return eps / room

    def plain(self, square: str, root: str, eps: float | None) -> str:
        return f"({root} {_plus(eps)})"

    def latex(self, square: str, eps: float | None) -> str:
        return rf"\sqrt{{{square}}}{_latex_plus(eps)}"

    def mathml(self, square: str, eps: float | None) -> str:
        return f"<mrow><msqrt>{square}</msqrt><mo>+</mo>{_mathml(eps)}</mrow>"


class Clamp(Placement):
    """s = max(sqrt(v), eps)."""

    name, code, power, words = "clamp", 2, 1, "as a lower bound"
    shortens_every_row = False

    def scale(self, value: Tensor, eps: float | Tensor) -> Tensor:
        return value.clamp_min(eps)

    def scale_of_root(self, root: Tensor, eps: float) -> Tensor:
        return root.clamp_min(eps)

    def slope(self, root: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return root, root < eps

    def remainder(self, root: Tensor, scale: Tensor, eps: float) -> Tensor:
        return (root < eps).to(root.dtype)

    def shrink(self, ratio: Tensor) -> Tensor:
        return ratio.clamp_max(1.0)

    def ratio_at(self, shrink: float) -> float:
        return shrink

    def eps_of(self, root: Tensor, shrink: Tensor) -> Tensor:
        return root / shrink

    def scale_below(self, room: Tensor, eps: float) -> Tensor:
        return room.new_full(room.shape, eps)

    def plain(self, square: str, root: str, eps: float | None) -> str:
        return f"max({root}, {'machine_eps' if eps is None else f'{eps:g}'})"

    def latex(self, square: str, eps: float | None) -> str:
        return rf"\max(\sqrt{{{square}}}, {_latex(eps)})"

    def mathml(self, square: str, eps: float | None) -> str:
        return f"<mrow><mi>max</mi><mo>(</mo><msqrt>{square}</msqrt><mo>,</mo>{_mathml(eps)}<mo>)</mo></mrow>"


PLACEMENTS: Mapping[str, Placement] = MappingProxyType({each.name: each for each in (Inside(), Outside(), Clamp())})
"""By name, in the order of their codes."""


EPS: Mapping[str, float] = MappingProxyType(
    {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
)
"""Machine epsilon by the name of a dtype: twice the largest relative error of one rounding."""


def eps_in(dtype: torch.dtype | str, eps: float | None) -> float:
    """eps as a number for an input of this dtype, also where it is None."""
    return machine_epsilon(is_float64=str(dtype).endswith("float64")) if eps is None else eps


def machine_epsilon(*, is_float64: bool) -> float:
    """The value of eps=None: the machine epsilon of torch's arithmetic, float32 also for 16-bit input."""
    return EPS["float64" if is_float64 else "float32"]


def _plus(eps: float | None) -> str:
    if eps is None:
        return "+ machine_eps"
    return f"{'-' if eps < 0 else '+'} {abs(eps):g}"


def _latex_plus(eps: float | None) -> str:
    text = _latex(eps)
    return f" - {text[1:]}" if text.startswith("-") else f" + {text}"


def _latex(eps: float | None) -> str:
    if eps is None:
        return r"\epsilon_{\mathrm{machine}}"
    digits, _, exponent = f"{eps:g}".partition("e")
    if not exponent:
        return digits
    power = f"10^{{{int(exponent)}}}"
    return {"1": power, "-1": f"-{power}"}.get(digits, rf"{digits} \cdot {power}")


def _mathml(eps: float | None) -> str:
    if eps is None:
        return "<msub><mi>ε</mi><mtext>machine</mtext></msub>"
    digits, _, exponent = f"{eps:g}".partition("e")
    if not exponent:
        return f"<mn>{digits}</mn>"
    sign = "<mo>−</mo>" if int(exponent) < 0 else ""
    power = f"<msup><mn>10</mn><mrow>{sign}<mn>{abs(int(exponent))}</mn></mrow></msup>"
    return power if digits == "1" else f"<mrow><mn>{digits}</mn><mo>·</mo>{power}</mrow>"
