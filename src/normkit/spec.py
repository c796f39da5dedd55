"""NormSpec: the conventions of one normalization layer as a frozen value.

Every per-sample norm is one point in this small space. Layers are built from a spec, the reference
computes it, the identifier recovers it, findings compare two of them. Norms that need more than
their own row (batch, running statistics) or a second input (gated, adaptive) are not specs.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from normkit.conventions.casts import Cast, Casts, OutputDtype, StatisticsDtype
from normkit.conventions.divisor import DIVISORS, Correction, Divisor, Multiplier, Reduction
from normkit.conventions.eps import PLACEMENTS, EpsPlacement, Placement
from normkit.conventions.gain import Gain, OffsetDtype, WeightPlacement
from normkit.conventions.rows import CENTRINGS, Axes, Centring, Rows, Samples
from normkit.errors import SpecError

_CHOICES: dict[str, tuple[object, ...]] = {
    "eps_placement": tuple(PLACEMENTS),
    "correction": get_args(Correction),
    "reduction": get_args(Reduction),
    "multiplier": get_args(Multiplier),
    "offset_dtype": get_args(OffsetDtype),
    "weight_placement": get_args(WeightPlacement),
    "statistics_dtype": get_args(StatisticsDtype),
    "cast": get_args(Cast),
    "output_dtype": get_args(OutputDtype),
}
_FLAGS = ("centre_numerator", "centre_statistics", "has_weight", "has_bias", "round_rstd")


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """How one norm turns a row x of n features into y.

    y = multiplier * (x - m) / s * (weight + weight_offset) + bias, where m is mean(x) if
    `centre_numerator`, else 0, and s is built from v = sum((x - mean(x))**2) / (n - correction)
    (`centre_statistics`) or v = sum(x**2) / (n - correction) as sqrt(v + eps) (eps "inside"),
    sqrt(v) + eps ("outside") or max(sqrt(v), eps) ("clamp"). The defaults are `torch.nn.LayerNorm`.

    Attributes:
        centre_numerator: The row's mean is subtracted from what is scaled.
        centre_statistics: The scale is a standard deviation about the mean, not a root mean square.
        eps: In units of x squared ("inside") or of x ("outside", "clamp"). None means the machine
            epsilon of the arithmetic: 2**-23 for 16- and 32-bit input, 2**-52 for float64.
        eps_placement: Where eps enters: "inside" the root, "outside" it, or as a lower "clamp".
        correction: 0 divides by n; 1 by n - 1 (Bessel), which is what `Tensor.var` does by default.
        reduction: "mean" divides the sum of squares by n - correction; "sum" leaves it (L2 norm).
        multiplier: "sqrt_n" multiplies the normalized row by sqrt(n) (L2 norms with RMSNorm's length).
        axes: What is one row: trailing axes such as (-1,), the channel axis (1,), or every axis but
            the first ("all_but_batch", GroupNorm). Gain and bias of the last two lie along axis 1; those of
            "all_but_batch_channels_last" (GroupNorm of Keras) lie along the last axis, as its groups do.
        groups: The features of a row are split into so many rows with statistics of their own.
        has_weight: There is a gain.
        has_bias: There is a bias.
        weight_offset: Added to the stored gain: 1.0 in the Gemma family.
        offset_dtype: Where the offset is added: in "float32" (or wider), or in the "parameter"'s dtype.
        weight_placement: The gain multiplies "after" normalizing, or "before" it.
        statistics_dtype: "float32" (or wider), or the "input"'s own 16-bit dtype.
        round_rstd: 1/s is rounded to the input's dtype before it multiplies the row.
        cast: When the normalized row is rounded to 16 bits: "early", before the affine part (Llama);
            "late", once, at the end (torch, Gemma); "weight", early and to the weight's dtype if
            that is 16-bit (T5); "input", early, gain and bias to the input's dtype as well (T5X,
            usual in JAX); "none", nothing is ever wider than the input.
        output_dtype: dtype of y: the "input"'s, the "promote"d dtype of all, the "weight"'s, or always
            "float32" (or wider); gain and bias then act in it too.
    """

    centre_numerator: bool = True
    centre_statistics: bool = True
    eps: float | None = 1e-5
    eps_placement: EpsPlacement = "inside"
    correction: Correction = 0
    reduction: Reduction = "mean"
    multiplier: Multiplier = "one"
    axes: Axes = (-1,)
    groups: int = 1
    has_weight: bool = True
    has_bias: bool = True
    weight_offset: float = 0.0
    offset_dtype: OffsetDtype = "float32"
    weight_placement: WeightPlacement = "after"
    statistics_dtype: StatisticsDtype = "float32"
    round_rstd: bool = False
    cast: Cast = "late"
    output_dtype: OutputDtype = "input"

    def __post_init__(self) -> None:
        """Refuse values that do not exist and combinations that contradict each other."""
        for name, choices in _CHOICES.items():
            given = getattr(self, name)
            # By type too: True == 1, but it is no divisor.
            if not any(type(given) is type(choice) and given == choice for choice in choices):
                raise SpecError(f"{name} must be one of {_quoted(choices)}, got {given!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} must be True or False, got {getattr(self, name)!r}")
        # As floats, 0 and 0.0 are one spec with one JSON text.
        if self.eps is not None:
            object.__setattr__(self, "eps", _finite("eps", self.eps, " or None"))
        object.__setattr__(self, "weight_offset", _finite("weight_offset", self.weight_offset))
        samples = get_args(Samples)
        if self.axes not in samples and not _is_axes(self.axes):
            raise SpecError(
                "axes must be trailing axes such as (-1,) or (-2, -1), the channel axis (1,), "
                f"or one of {_quoted(samples)}, got {self.axes!r}"
            )
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise SpecError(f"groups must be a whole number of at least 1, got {self.groups!r}")
        if self.groups > 1 and self.axes not in ((-1,), *samples):
            raise SpecError(f"groups need axes (-1,) or one of {_quoted(samples)}, got axes {self.axes!r}")
        if self.reduction == "sum" and self.correction:
            raise SpecError("correction=1 divides by n - 1; with reduction='sum' nothing is divided")
        if not self.has_weight and (self.weight_offset or self.weight_placement == "before"):
            raise SpecError("weight_offset and weight_placement='before' need has_weight=True")
        if self.cast == "none" and self.statistics_dtype != "input":
            raise SpecError("cast='none' keeps everything in the input's dtype: statistics_dtype='input'")

    @property
    def placement(self) -> Placement:
        """The placement of eps."""
        return PLACEMENTS[self.eps_placement]

    @property
    def divisor(self) -> Divisor:
        """The divisor of the sum of squares, and the multiplier of the row."""
        return DIVISORS[self.correction, self.reduction, self.multiplier]

    @property
    def rows(self) -> Rows:
        """The axes of one row."""
        return Rows(self.axes, self.groups)

    @property
    def centring(self) -> Centring:
        """The places where the mean is subtracted."""
        return CENTRINGS[self.centre_numerator, self.centre_statistics]

    @property
    def gain(self) -> Gain:
        """Gain and bias."""
        return Gain(self.has_weight, self.weight_offset, self.offset_dtype, self.weight_placement, self.has_bias)

    @property
    def casts(self) -> Casts:
        """The places where it rounds."""
        return Casts(self.statistics_dtype, self.round_rstd, self.cast, self.output_dtype)

    def __str__(self) -> str:
        """One readable line: the formula, then what is unusual about axes and casts."""
        row, divisor, is_centred = self.gain.row, self.divisor, self.centre_statistics
        scale = root = divisor.plain_root(row, is_centred=is_centred)
        if self.eps != 0:
            scale = self.placement.plain(divisor.plain_square(row, is_centred=is_centred), root, self.eps)
        numerator = self.centring.plain(row)
        numerator = f"sqrt(n) * {numerator}" if divisor.is_multiplied else numerator
        casts = self.casts
        notes = [*self.rows.notes(), *casts.notes(), *self.gain.notes(), *casts.output_notes()]
        formula = f"y = {self.gain.plain(f'{numerator} / {scale}')}"
        return f"{formula} [{', '.join(notes)}]" if notes else formula

    def _repr_latex_(self) -> str:
        """The formula for a notebook."""
        row = self.gain.row
        square = self.divisor.latex_square(row, is_centred=self.centre_statistics)
        scale = rf"\sqrt{{{square}}}" if self.eps == 0 else self.placement.latex(square, self.eps)
        fraction = rf"\frac{{{self.centring.latex(row)}}}{{{scale}}}"
        if self.divisor.is_multiplied:
            fraction = rf"\sqrt{{n}}\,{fraction}"
        return f"${self.gain.latex(fraction)}$"

    def mathml(self) -> str:
        """The formula as the content of a `math` element: mu is the row's mean, w its gain, b its bias."""
        row = self.gain.row
        square = self.divisor.mathml_square(row, is_centred=self.centre_statistics)
        scale = f"<msqrt>{square}</msqrt>" if self.eps == 0 else self.placement.mathml(square, self.eps)
        numerator = self.centring.mathml(row)
        if self.divisor.is_multiplied:
            numerator = f"<mrow><msqrt><mi>n</mi></msqrt>{numerator}</mrow>"
        return self.gain.mathml(f"<mfrac>{numerator}{scale}</mfrac>")

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary of all conventions, ready for `json.dumps`."""
        values = dataclasses.asdict(self)
        values["axes"] = self.axes if isinstance(self.axes, str) else list(self.axes)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NormSpec:
        """The spec that `to_json` described; names left out take their defaults.

        Raises:
            SpecError: If a name or a value does not exist.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise SpecError(f"a NormSpec has no {_quoted(unknown)}; it has {', '.join(known)}")
        axes = values.get("axes", (-1,))
        return cls(**{**values, "axes": tuple(axes) if isinstance(axes, list) else axes})

    def replace(self, **changes: Any) -> NormSpec:
        """This spec with some conventions changed.

        Example:
            >>> print(NormSpec().replace(eps=1e-12))
            y = weight * (x - mean(x)) / sqrt(var(x) + 1e-12) + bias
        """
        return dataclasses.replace(self, **changes)


def _quoted(values: Any) -> str:
    return ", ".join(repr(value) for value in values)


def _finite(name: str, value: Any, alternative: str = "") -> float:
    """The value as a float, if it is a finite number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and -math.inf < value < math.inf):
        raise SpecError(f"{name} must be a finite number{alternative}, got {value!r}")
    return float(value)


def _is_axes(axes: object) -> bool:
    if not isinstance(axes, tuple) or not axes or not all(type(axis) is int for axis in axes):
        return False
    return axes in {(1,), tuple(range(-len(axes), 0))}
