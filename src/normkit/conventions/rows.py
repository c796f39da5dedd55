"""The definition of a row: axes that share statistics, their groups, and where the mean is subtracted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

Samples = Literal["all_but_batch", "all_but_batch_channels_last"]
Axes = tuple[int, ...] | Samples

CHANNELS_LAST: Samples = "all_but_batch_channels_last"
"""Rows of a whole sample whose groups, gain and bias follow the last axis."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Trailing axes, the channel axis (1,) or all axes but the first, split into groups."""

    axes: Axes = (-1,)
    groups: int = 1

    @property
    def are_last(self) -> bool:
        """Whether one row is the last axis, whole."""
        return self.axes == (-1,) and self.groups == 1

    @property
    def channel_axis(self) -> int | None:
        """The one axis along which gain and bias lie, 1 or -1; None where they span the axes of a row."""
        if self.axes == CHANNELS_LAST:
            return -1
        return 1 if self.are_places or self.are_samples else None

    @property
    def are_channels(self) -> bool:
        """Whether gain and bias lie along the channels, whatever axes a row spans."""
        return self.channel_axis is not None

    @property
    def are_samples(self) -> bool:
        """Whether a row is a whole sample, or a group of its channels."""
        return self.axes in get_args(Samples)

    @property
    def are_places(self) -> bool:
        """Whether a row is axis 1, the channels, at one place."""
        return self.axes == (1,)

    @property
    def num_trailing(self) -> int | None:
        """How many trailing axes make a row; None where other axes do."""
        return None if self.are_channels else len(self.axes)

    @property
    def parameter_dim(self) -> int:
        """How many axes gain and bias have."""
        return 1 if self.are_channels else len(self.axes)

    def parameter_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of gain and bias for an input of this shape: its channels, or its trailing sizes."""
        if self.channel_axis is not None:
            return (shape[self.channel_axis],)
        return tuple(shape[len(shape) - len(self.axes) :])

    @property
    def no_kernel(self) -> str | None:
        """Why no kernel computes such rows; None if some do."""
        return "rows that are not the trailing axes" if self.are_channels or self.groups > 1 else None

    def conventions(self) -> dict[str, Any]:
        """As fields of `NormSpec`."""
        return {"axes": self.axes, "groups": self.groups}

    def split(self, x: Tensor) -> Tensor:
        """x as rows of shape (..., groups, m): one row is what shares one set of statistics."""
        if self.axes == CHANNELS_LAST:
            x = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), self.groups, x.shape[-1] // self.groups).movedim(2, 1)
        if self.are_samples:
            return x.reshape(x.shape[0], self.groups, math.prod(x.shape[1:]) // self.groups)
        if self.are_places:
            x = x.movedim(1, -1)
        kept = x.dim() - len(self.axes)
        size = math.prod(x.shape[kept:])
        return x.reshape(*x.shape[:kept], self.groups, size // self.groups)

    def joined(self, rows: Tensor, x: Tensor) -> Tensor:
        """The inverse of `split`: rows in the layout of x."""
        if self.are_places:
            return rows.reshape(x.movedim(1, -1).shape).movedim(-1, 1)
        if self.axes == CHANNELS_LAST:
            sizes = (x.shape[0], self.groups, math.prod(x.shape[1:-1]), x.shape[-1] // self.groups)
            rows = rows.reshape(sizes).movedim(1, 2)
        return rows.reshape(x.shape)

    def numbers(self, x: Tensor) -> Tensor:
        """For every element of x the number of the row that it belongs to."""
        import torch

        rows = self.split(x)
        numbers = torch.arange(rows[..., 0].numel()).reshape(*rows.shape[:-1], 1)
        return self.joined(numbers.expand(rows.shape), x)

    def aligned(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Gain or bias in the shape that broadcasts against x."""
        if self.channel_axis is None:
            return parameter
        return parameter.reshape(-1) if self.channel_axis == -1 else parameter.reshape(-1, *(1,) * (x.dim() - 2))

    def notes(self) -> list[str]:
        """The unusual parts, for the one line of a spec."""
        notes = []
        if self.are_samples:
            notes.append("over all axes but the first")
        elif self.axes != (-1,):
            plural = "axis" if len(self.axes) == 1 else "axes"
            notes.append(f"over {plural} {', '.join(map(str, self.axes))}")
        return [*notes, *self.labels]

    @property
    def labels(self) -> tuple[str, ...]:
        """The unusual parts, for a short name."""
        return (*self._channels, *((f"{self.groups} groups",) if self.groups > 1 else ()))

    @property
    def _channels(self) -> tuple[str, ...]:
        return ("channels last",) if self.axes == CHANNELS_LAST else ()

    @property
    def words(self) -> str:
        """The definition of a row, in words."""
        return ", ".join(self.parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """The definition of a row, the axis of the channels if it is not axis 1, and the number of groups."""
        if self.are_samples:
            words = "a whole sample"
        elif self.are_places:
            words = "axis 1"
        else:
            words = "the last axis" if len(self.axes) == 1 else f"the last {len(self.axes)} axes"
        return (words, *self._channels, *((f"in {self.groups} groups",) if self.groups > 1 else ()))


@dataclass(frozen=True, slots=True)
class Centring:
    """Whether the mean of a row is subtracted from what is scaled, and from what its scale is taken of."""

    numerator: bool = True
    statistics: bool = True

    @property
    def is_half(self) -> bool:
        """Whether the mean counts in one of the two only."""
        return self.numerator != self.statistics

    @property
    def is_full(self) -> bool:
        """Whether the mean is subtracted from both."""
        return self.numerator and self.statistics

    def conventions(self) -> dict[str, Any]:
        """As fields of `NormSpec`."""
        return {"centre_numerator": self.numerator, "centre_statistics": self.statistics}

    @property
    def no_kernel(self) -> str | None:
        """Why no kernel centres so; None if some do."""
        return "centring of the numerator or of the statistics alone" if self.is_half else None

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The numerator x - m, and the d of which the scale is taken, of rows of shape (..., n)."""
        if not (self.numerator or self.statistics):
            return rows, rows
        centred = rows - rows.mean(-1, keepdim=True)
        if rows.dtype.itemsize > 2:
            # A mean is rounded in proportion to itself; where it dwarfs the deviations, what it leaves counts.
            centred = centred - centred.mean(-1, keepdim=True)
        return centred if self.numerator else rows, centred if self.statistics else rows

    def projected(self, rows: Tensor) -> Tensor:
        """The numerator's map applied to a direction or a gradient: its mean taken out, or nothing."""
        return rows - rows.mean(-1, keepdim=True) if self.numerator else rows

    @property
    def words(self) -> str:
        """The treatment of the mean, in words."""
        if self.is_half:
            return "subtracted, but not for the statistics" if self.numerator else "subtracted for the statistics only"
        return "subtracted" if self.numerator else "not subtracted"

    def plain(self, row: str) -> str:
        """The numerator in plain text."""
        return f"({row} - mean({row}))" if self.numerator else row

    def latex(self, row: str) -> str:
        """The numerator in LaTeX."""
        return rf"{row} - \mu_{row}" if self.numerator else row

    def mathml(self, row: str) -> str:
        """The numerator in MathML."""
        return f"<mrow><mi>{row}</mi><mo>−</mo><mi>μ</mi></mrow>" if self.numerator else f"<mi>{row}</mi>"


CENTRINGS: Mapping[tuple[bool, bool], Centring] = MappingProxyType(
    {(above, below): Centring(above, below) for above in (True, False) for below in (True, False)}
)
"""All four, by numerator and statistics."""
