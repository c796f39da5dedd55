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
from typing import Any, Literal

from normkit.errors import SpecError

EpsPlacement = Literal["inside", "outside", "clamp"]
Reduction = Literal["mean", "sum"]
Multiplier = Literal["one", "sqrt_n"]
Axes = tuple[int, ...] | Literal["all_but_batch"]
OffsetDtype = Literal["float32", "parameter"]
WeightPlacement = Literal["after", "before"]
StatisticsDtype = Literal["float32", "input"]
Cast = Literal["early", "late", "weight", "input", "none"]
OutputDtype = Literal["input", "promote", "weight", "float32"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "eps_placement": ("inside", "outside", "clamp"),
    "correction": (0, 1),
    "reduction": ("mean", "sum"),
    "multiplier": ("one", "sqrt_n"),
    "offset_dtype": ("float32", "parameter"),
    "weight_placement": ("after", "before"),
    "statistics_dtype": ("float32", "input"),
    "cast": ("early", "late", "weight", "input", "none"),
    "output_dtype": ("input", "promote", "weight", "float32"),
}
_CAST_NOTES = {
    "early": "early cast",
    "weight": "cast to the weight's dtype",
    "input": "early cast, gain and bias too",
    "none": "no cast",
}
_OUTPUT_NOTES = {
    "promote": "promoted output",
    "weight": "output in the weight's dtype",
    "float32": "output in float32",
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
            the first ("all_but_batch", GroupNorm). Gain and bias of the last two lie along axis 1.
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
    correction: Literal[0, 1] = 0
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
        if self.axes != "all_but_batch" and not _is_axes(self.axes):
            raise SpecError(
                "axes must be trailing axes such as (-1,) or (-2, -1), the channel axis (1,), "
                f"or 'all_but_batch', got {self.axes!r}"
            )
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise SpecError(f"groups must be a whole number of at least 1, got {self.groups!r}")
        if self.groups > 1 and self.axes not in ((-1,), "all_but_batch"):
            raise SpecError(f"groups need axes (-1,) or 'all_but_batch', got axes {self.axes!r}")
        if self.reduction == "sum" and self.correction:
            raise SpecError("correction=1 divides by n - 1; with reduction='sum' nothing is divided")
        if not self.has_weight and (self.weight_offset or self.weight_placement == "before"):
            raise SpecError("weight_offset and weight_placement='before' need has_weight=True")
        if self.cast == "none" and self.statistics_dtype != "input":
            raise SpecError("cast='none' keeps everything in the input's dtype: statistics_dtype='input'")

    def __str__(self) -> str:
        """One readable line: the formula, then what is unusual about axes and casts."""
        row = "u" if self.weight_placement == "before" else "x"
        formula = _affine(self, f"{_numerator(self, row)} / {_denominator(self, row)}")
        notes = ", ".join(_notes(self))
        return f"y = {formula} [{notes}]" if notes else f"y = {formula}"

    def _repr_latex_(self) -> str:
        """The formula for a notebook."""
        row = "u" if self.weight_placement == "before" else "x"
        fraction = rf"\frac{{{_latex_numerator(self, row)}}}{{{_latex_denominator(self, row)}}}"
        if self.multiplier == "sqrt_n":
            fraction = rf"\sqrt{{n}}\,{fraction}"
        gain = rf"({self.weight_offset:g} + w)" if self.weight_offset else "w"
        if self.weight_placement == "before":
            return rf"$y = {fraction}{' + b' if self.has_bias else ''},\quad u = {gain} \odot x$"
        scaled = rf"{gain} \odot {fraction}" if self.has_weight else fraction
        return rf"$y = {scaled}{' + b' if self.has_bias else ''}$"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary of all conventions, ready for `json.dumps`."""
        values = dataclasses.asdict(self)
        values["axes"] = self.axes if self.axes == "all_but_batch" else list(self.axes)
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


def _plus_epsilon(spec: NormSpec) -> str:
    if spec.eps is None:
        return "+ machine_eps"
    return f"{'-' if spec.eps < 0 else '+'} {abs(spec.eps):g}"


def _numerator(spec: NormSpec, row: str) -> str:
    centred = f"({row} - mean({row}))" if spec.centre_numerator else row
    return f"sqrt(n) * {centred}" if spec.multiplier == "sqrt_n" else centred


def _square(spec: NormSpec, row: str) -> str:
    """The quantity under the root."""
    deviation = f"({row} - mean({row}))" if spec.centre_statistics else row
    if spec.reduction == "sum":
        return f"sum({deviation}^2)"
    if spec.centre_statistics:
        return f"var({row}{', correction=1' if spec.correction else ''})"
    return f"sum({row}^2) / (n - 1)" if spec.correction else f"mean({row}^2)"


def _root(spec: NormSpec, row: str) -> str:
    """The root of that quantity, by its usual name where it has one."""
    if spec.reduction == "sum":
        return f"norm({row} - mean({row}))" if spec.centre_statistics else f"norm({row})"
    if spec.centre_statistics:
        return f"std({row}{', correction=1' if spec.correction else ''})"
    return f"sqrt({_square(spec, row)})" if spec.correction else f"rms({row})"


def _denominator(spec: NormSpec, row: str) -> str:
    if spec.eps == 0:
        return _root(spec, row)
    match spec.eps_placement:
        case "inside":
            return f"sqrt({_square(spec, row)} {_plus_epsilon(spec)})"
        case "outside":
            return f"({_root(spec, row)} {_plus_epsilon(spec)})"
        case "clamp":
            return f"max({_root(spec, row)}, {'machine_eps' if spec.eps is None else f'{spec.eps:g}'})"


def _affine(spec: NormSpec, normalized: str) -> str:
    gain = f"({spec.weight_offset:g} + weight)" if spec.weight_offset else "weight"
    bias = " + bias" if spec.has_bias else ""
    if spec.weight_placement == "before":
        return f"{normalized}{bias}, u = {gain} * x"
    return f"{gain} * {normalized}{bias}" if spec.has_weight else f"{normalized}{bias}"


def _notes(spec: NormSpec) -> list[str]:
    notes = []
    if spec.axes == "all_but_batch":
        notes.append("over all axes but the first")
    elif spec.axes != (-1,):
        plural = "axis" if len(spec.axes) == 1 else "axes"
        notes.append(f"over {plural} {', '.join(map(str, spec.axes))}")
    if spec.groups > 1:
        notes.append(f"{spec.groups} groups")
    if spec.cast != "late":
        notes.append(_CAST_NOTES[spec.cast])
    if spec.statistics_dtype == "input" and spec.cast != "none":
        notes.append("statistics in the input's dtype")
    if spec.round_rstd:
        notes.append("rounded rstd")
    if spec.weight_offset and spec.offset_dtype == "parameter":
        notes.append("offset added in the weight's dtype")
    if spec.output_dtype != "input":
        notes.append(_OUTPUT_NOTES[spec.output_dtype])
    return notes


def _latex_numerator(spec: NormSpec, row: str) -> str:
    return rf"{row} - \mu_{row}" if spec.centre_numerator else row


def _latex_denominator(spec: NormSpec, row: str) -> str:
    deviation = rf"({row}_i - \mu_{row})" if spec.centre_statistics else f"{row}_i"
    divisor = {"sum": "", "mean": r"\tfrac{1}{n - 1}" if spec.correction else r"\tfrac{1}{n}"}
    square = rf"{divisor[spec.reduction]}\sum_i {deviation}^2"
    if spec.eps == 0:
        return rf"\sqrt{{{square}}}"
    eps = r"\epsilon_{\mathrm{machine}}" if spec.eps is None else _latex_number(spec.eps)
    plus = f" - {eps[1:]}" if eps.startswith("-") else f" + {eps}"
    match spec.eps_placement:
        case "inside":
            return rf"\sqrt{{{square}{plus}}}"
        case "outside":
            return rf"\sqrt{{{square}}}{plus}"
        case "clamp":
            return rf"\max(\sqrt{{{square}}}, {eps})"


def _latex_number(value: float) -> str:
    digits, _, exponent = f"{value:g}".partition("e")
    if not exponent:
        return digits
    power = f"10^{{{int(exponent)}}}"
    return {"1": power, "-1": f"-{power}"}.get(digits, rf"{digits} \cdot {power}")
