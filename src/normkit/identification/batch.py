"""Batch norms: over which axes samples share statistics, in training mode or always, and with which conventions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.conventions.gain import NO_GAIN
from normkit.errors import ShapeError
from normkit.identification import coupling
from normkit.identification.maps import FallbackVerdict, affine_map
from normkit.identification.passport import Passport, Reading
from normkit.identification.specimen import Specimen, UnrecognisedError

Recover = Callable[[Specimen, tuple[int, ...]], Passport | None]
"""The passport of a norm of this input shape, or None where no spec describes it."""

_ENOUGH = 32
"""Elements that share statistics, at least: with two, the length of a row tells little."""


def running(
    specimen: Specimen, shape: Sequence[int], generator: torch.Generator, recover: Recover
) -> FallbackVerdict | None:
    """The batch norm behind a map that is elementwise in eval mode, from its training mode; None if there is none."""
    if not specimen.has_running_statistics:
        return None
    training = specimen.in_mode(training=True)
    try:
        shared = _shared(training, shape, generator)
    except (ShapeError, UnrecognisedError):
        return None
    if shared is None or math.prod(shape[axis] for axis in shared) == 1:
        return None
    line = "in eval mode a straight line of each input, from running statistics"
    if 0 in shared:
        seen = "in training mode, changing one sample moves the others"
    else:
        seen = "in training mode, a sample is normalized by its own statistics"
    evidence, reading = _conventions(training, shape, shared, "training", recover)
    line_map = affine_map(specimen, shape)
    kind = Reading(value="batch", evidence=(seen, line, *line_map.readings["kind"].evidence, *evidence))
    return FallbackVerdict(
        verdict="batch",
        readings={"kind": kind, "batch": reading},
        weight=line_map.weight,
        bias=line_map.bias,
    )


def always(
    specimen: Specimen, shape: Sequence[int], generator: torch.Generator, seen: str, recover: Recover
) -> FallbackVerdict:
    """The norm that couples samples in eval mode too."""
    shared = _shared(specimen, shape, generator)
    if shared is None:
        return FallbackVerdict.of("batch", f"{seen}, in eval mode too")
    evidence, reading = _conventions(specimen, shape, shared, "always", recover)
    return FallbackVerdict.of("batch", f"{seen}, in eval mode too", *evidence, batch=reading)


def _shared(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> tuple[int, ...] | None:
    """The axes along which one element moves others; None if it moves nothing."""
    reach = coupling.reach(specimen, shape, generator)
    return None if reach is None else tuple(axis for axis, size in enumerate(reach) if size > 1)


def _conventions(
    specimen: Specimen, shape: Sequence[int], shared: tuple[int, ...], mode: str, recover: Recover
) -> tuple[tuple[str, ...], Reading]:
    """The conventions of a batch norm: all elements that share statistics are taken for one row of a norm."""
    rows = _Rows(specimen, shape, shared)
    passport = recover(Specimen(rows, dtype=specimen.dtype, device=specimen.device), (2, rows.length))
    value: dict[str, Any] = {"axes": list(shared), "mode": mode}
    axes = ", ".join(map(str, shared))
    if passport is None or passport.spec is None:
        return (f"statistics over axes {axes}; no formula of a norm explains them",), Reading(value=value)
    # Gain and bias are the channels', not the rows'.
    spec = passport.spec.replace(**NO_GAIN.conventions())
    value["centred"] = spec.centring.is_full
    conventions = {"eps": spec.placement.conventions(spec.eps), "divisor": {"correction": spec.divisor.correction}}
    for reading, fields in conventions.items():
        if reading in passport.readings and reading not in passport.undecidable:
            value |= fields
    return (f"over axes {axes}, as rows: {spec}",), Reading(value=value)


class _Rows:
    """A batch norm as a norm of rows: a row is all that shares one set of statistics."""

    def __init__(self, specimen: Specimen, shape: Sequence[int], shared: tuple[int, ...]) -> None:
        own = tuple(axis for axis in range(len(shape)) if axis not in shared)
        sizes = list(shape)
        elements = math.prod(shape[axis] for axis in shared)
        if 0 in shared and elements < _ENOUGH:
            sizes[0] = shape[0] * math.ceil(_ENOUGH / elements)
        self.specimen = specimen
        self.order = (*own, *shared)
        self.sizes = [sizes[axis] for axis in self.order]
        self.count = math.prod(sizes[axis] for axis in own)
        self.length = math.prod(sizes[axis] for axis in shared)
        for parameter in specimen.parameters.values():
            # All rows get one gain and one bias.
            parameter.fill_(1.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of shape (rows, length), in chunks of as many rows as the batch norm has channels."""
        return torch.cat([self._called(chunk) for chunk in torch.split(x, self.count)])

    def _called(self, rows: Tensor) -> Tensor:
        filled = torch.cat([rows, rows[:1].expand(self.count - len(rows), -1)])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        y = self.specimen(filled.reshape(self.sizes).permute(inverse))
        return y.permute(self.order).reshape(self.count, self.length)[: len(rows)]
