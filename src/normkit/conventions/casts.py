"""The places where a norm rounds: its statistics, 1/s, the normalized row, gain and bias, and the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

StatisticsDtype = Literal["float32", "input"]
Cast = Literal["early", "late", "weight", "input", "none"]
OutputDtype = Literal["input", "promote", "weight", "float32"]

CASTS: dict[str, str] = {
    "early": "rounded before the gain",
    "late": "rounded once at the end",
    "weight": "rounded before the gain to the weight's dtype",
    "input": "rounded before the gain, gain and bias too",
    "none": "rounded at every step",
}
"""Each cast in words."""

OUTPUTS: dict[str, str] = {
    "input": "in the input's dtype",
    "promote": "in the wider dtype of input and parameters",
    "weight": "in the weight's dtype",
    "float32": "in float32",
}
"""Each output dtype in words."""

_NOTES = {
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

PROGRAMS: tuple[tuple[Cast, StatisticsDtype], ...] = (
    ("late", "float32"),
    ("early", "float32"),
    ("weight", "float32"),
    ("input", "float32"),
    ("none", "input"),
    ("late", "input"),
)
"""Casts and statistics that `identify` tries, simplest first: it reports the first of those that give the same bits."""

# The kernels' numbers. In a row that is kept in 16 bits, no cast is an early one.
_CODES = {"late": 0, "early": 1, "weight": 2, "input": 3, "none": 1}
_OUTPUT_CODES = {"input": 0, "promote": 1, "weight": 2}


@dataclass(frozen=True, slots=True)
class Casts:
    """The roundings of one spec."""

    statistics: StatisticsDtype = "float32"
    round_rstd: bool = False
    cast: Cast = "late"
    output: OutputDtype = "input"

    def conventions(self) -> dict[str, Any]:
        """As fields of `NormSpec`."""
        return {
            "statistics_dtype": self.statistics,
            "round_rstd": self.round_rstd,
            "cast": self.cast,
            "output_dtype": self.output,
        }

    @property
    def no_kernel(self) -> str | None:
        """Why no kernel rounds so; None if some do."""
        return None if self.output in _OUTPUT_CODES else "an output that is always float32"

    @property
    def codes(self) -> tuple[int, int]:
        """The kernels' numbers for the cast and for the output's dtype; 0 where no kernel does it."""
        return _CODES[self.cast], _OUTPUT_CODES.get(self.output, 0)

    @classmethod
    def of_codes(cls, cast: int, output: int, *, round_rstd: bool) -> Casts:
        """The casts that kernels with these numbers follow."""
        casts: tuple[Cast, ...] = ("late", "early", "weight", "input")
        outputs: tuple[OutputDtype, ...] = ("input", "promote", "weight")
        return cls(round_rstd=round_rstd, cast=casts[cast], output=outputs[output])

    @property
    def has_narrow_statistics(self) -> bool:
        """Whether mean and scale stay in the input's own 16 bits."""
        return self.statistics == "input"

    def narrow_dtypes(self, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype) -> set[torch.dtype]:
        """The 16-bit dtypes that y is rounded to on its way, given the dtypes of x, weight (None without) and y."""
        dtypes = {y}
        if self.cast in ("early", "input", "none") or self.round_rstd or self.has_narrow_statistics:
            dtypes.add(x)
        if self.cast == "weight" and weight is not None:
            dtypes.add(weight)
        return {dtype for dtype in dtypes if dtype.itemsize == 2}

    def arithmetic(self, x: Tensor) -> torch.dtype:
        """The dtype in which the reference computes: float64, or x's own 16 bits where the statistics stay there."""
        import torch

        if self.has_narrow_statistics and x.dtype.itemsize == 2:
            return x.dtype
        # MPS has no float64; float32 is the widest it offers.
        return torch.float32 if x.device.type == "mps" else torch.float64

    def early(self, dtype: torch.dtype, weight: Tensor | None) -> torch.dtype | None:
        """The dtype that the normalized row is rounded to before gain and bias, for an input of this dtype; or None."""
        if self.cast == "weight":
            return weight.dtype if weight is not None and weight.dtype.itemsize == 2 else None
        return None if self.cast == "late" else dtype

    def parameter(self, part: Tensor, dtype: torch.dtype, work: torch.dtype | None) -> Tensor:
        """Gain or bias in the dtype it acts in: `work`, or where the row was rounded early (None) as the spec says."""
        import torch

        if work is None and self.cast == "input":
            part = part.to(dtype)
        if work is None and self.output == "float32":
            work = torch.promote_types(torch.float32, part.dtype)
        return part if work is None else part.to(work)

    def output_dtype(self, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
        """dtype of y for an input of this dtype and these parameters."""
        import torch

        if self.output == "weight" and weight is not None:
            return weight.dtype
        if self.output == "float32":
            return torch.promote_types(dtype, torch.float32)
        if self.output == "promote":
            for parameter in (weight, bias):
                dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
        return dtype

    @property
    def is_late(self) -> bool:
        """Whether the row is rounded once, at the end."""
        return self.cast == "late"

    def order(self, *, has_wide_weight: bool) -> tuple[str, bool, str]:
        """The key that decides the bits: where gain and input have one dtype, all early casts are one."""
        is_early = self.cast in ("weight", "input") and not has_wide_weight
        return "early" if is_early else self.cast, self.round_rstd, self.statistics

    @property
    def statistics_words(self) -> str:
        """The dtype in which mean and scale are computed."""
        return "statistics in float32" if self.statistics == "float32" else "statistics in the input's dtype"

    @property
    def roundings(self) -> tuple[str, ...]:
        """The values that are rounded after the statistics and before the output."""
        return ("1/s rounded", CASTS[self.cast]) if self.round_rstd else (CASTS[self.cast],)

    @property
    def parts(self) -> tuple[str, ...]:
        """Statistics and roundings."""
        return (self.statistics_words, *self.roundings)

    @property
    def words(self) -> str:
        """Statistics and roundings as one text."""
        return ", ".join(self.parts)

    @property
    def output_words(self) -> str:
        """The output's dtype."""
        return OUTPUTS[self.output]

    def notes(self) -> list[str]:
        """The unusual parts, for the one line of a spec; the output comes last, after the notes of the gain."""
        notes = [_NOTES[self.cast]] if self.cast != "late" else []
        if self.has_narrow_statistics and self.cast != "none":
            notes.append(self.statistics_words)
        if self.round_rstd:
            notes.append("rounded rstd")
        return notes

    def output_notes(self) -> list[str]:
        """The output's dtype, where it is not the input's."""
        return [_OUTPUT_NOTES[self.output]] if self.output != "input" else []
