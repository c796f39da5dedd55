"""The modulation of the output of norms for each sample, as in a DiT: y (1 + scale) + shift, seen where it is read.

The input of the next module that takes a tensor of that shape is held against the norm's output: where each channel of
each sample is a straight line of it, slope and constant are the factor and the shift.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, is_within
from normkit.identification.state import undisturbed
from normkit.identification.tracing import first_tensor
from normkit.measurement.hooks import Listener, every_module, observed
from normkit.measurement.running import Batch, evaluating, first_of, rows, runner, tensors
from normkit.measurement.structure import Structure
from normkit.reference import HALF

_SAMPLES = 8
# Modules between a norm and what reads it, such as those that compute scale and shift.
_MOST_CALLS = 8
# Two numbers are fitted to a channel of a sample.
_FEWEST_PLACES = 4
# Rounding of a product and a sum, beside cancelled terms; anything bent leaves 1 % and more.
_FITS = 1e-3
# Of 16 bits: what is left of a line through rounded numbers, and how far that moves its slope.
_OF_HALF = 2e-2, 4e-3
# Ids and masks tell of tokens, labels are no input.
_NO_CONDITION = ("mask", "ids", "labels")


@dataclass(frozen=True, kw_only=True)
class Modulation:
    """The modulation of the output of a norm, for each sample and channel: times a factor, plus a shift."""

    path: str
    """Path of the norm."""
    reader: str
    """Path of the module that reads the result."""
    samples: int
    """Samples that were seen."""
    factors: tuple[float, float, float]
    """5 %, 50 % and 95 % quantile of the factors, 1 + scale in a DiT, over samples and channels."""
    centre: float
    """Mean of the factors."""
    varied: float
    """How far the factors of a sample are from their mean over samples, root mean square."""
    shift: float
    """Root mean square of the shifts, in deviations of the norm's output."""
    shift_varied: float
    """How far the shifts of a sample are from their mean over samples, in the same unit."""


def find_modulations(model: nn.Module, structure: Structure, batch: Batch) -> tuple[Modulation, ...] | None:
    """Run up to eight samples of a batch, and see what is done to the outputs of norms for each of them.

    Returns:
        Norms whose output is changed so, in forward order, and those without a gain of their own whose output is not;
        None where no sample differs from another in a condition, as a timestep or a class is, and no norm's output
        is changed differently.
    """
    bare = {site.path for site in structure.sites if site.gain is None}
    is_given = has_conditions(batch)
    # A model without either has a gain behind each norm, and nothing else.
    if not (is_given or bare):
        return ()
    if len(first_of(batch)) < 2:
        return None
    found = read_outputs(model, structure, batch)
    is_varied = any(each.varied > 0 or each.shift_varied > 0 for each in found.values())
    if not (is_given or is_varied):
        return None
    kept = (found[site.path] for site in structure.sites if site.path in found)
    return tuple(each for each in kept if each.path in bare or each.varied > 0 or each.shift_varied > 0)


def has_conditions(batch: Batch) -> bool:
    """Some sample of a batch differs from another in an argument of its own, as a timestep or a class is."""
    samples = first_of(batch)
    return any(
        bool((value != value[:1]).any())
        for name, value in tensors(rows(batch, 0, _SAMPLES))
        if value.dim() in (1, 2)
        and len(value) == min(len(samples), _SAMPLES) > 1
        and not name.endswith(_NO_CONDITION)
        and not (value.shape[1:] == samples.shape[1:] or (value.dim() == 2 and not value.is_floating_point()))
    )


def read_outputs(model: nn.Module, structure: Structure, batch: Batch) -> dict[str, Modulation]:
    """The modulation of each norm's output before a module reads it, by path, on up to eight samples of a batch."""
    seen = _Readers()
    callers = {site.parent for site in structure.sites if site.function is not None}
    listening = observed(model, structure.sites, (), callers, seen)
    reading = every_module(model, seen.before_module, seen.after)
    few = rows(batch, 0, _SAMPLES)
    # Any third-party forward runs here, on other samples than it was surveyed with.
    with undisturbed(), evaluating(model), torch.no_grad(), suppress(Exception), reading, listening:
        runner(model, few)()
    return seen.found


class _Readers(Listener):
    """Holds the output of each norm until a module reads it, and what was done to it in between."""

    def __init__(self) -> None:
        self.found: dict[str, Modulation] = {}
        self._waiting: dict[str, tuple[Tensor, int]] = {}
        self._entered: dict[str, Tensor] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        self._entered[site.path] = x

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> Tensor | None:
        if site.path not in self.found and y.dim() > 2 and len(y) > 1:
            self._waiting[site.path] = y.detach().clone(), _MOST_CALLS
        return None

    def before_module(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        x = first_tensor(args, kwargs)
        for norm, (y, left) in [*self._waiting.items()]:
            if is_within(path, norm.partition(":")[0]) and ":" not in norm:
                continue
            found = None
            # A branch beside the norm reads the norm's input: that is a straight line of its output, too.
            if x is not None and x.shape == y.shape and not torch.equal(x, self._entered[norm]):
                found = modulation_of(norm, path, y, x)
            if found is not None:
                self.found[norm] = found
            if found is not None or left == 0:
                del self._waiting[norm]
            else:
                self._waiting[norm] = y, left - 1

    def after(self, _path: str, _output: object) -> None:
        """Outputs of modules tell nothing."""


def modulation_of(norm: str, reader: str, left: Tensor, read: Tensor) -> Modulation | None:
    """Factor and shift by which each channel of each sample that is read is made of what left the norm.

    None where it is made otherwise, beyond the rounding of its type.
    """
    fits, varies = _OF_HALF if left.dtype in HALF or read.dtype in HALF else (_FITS, _FITS)
    y, x = (each.detach().double().cpu() for each in (left, read))
    for axis in (-1, 1):
        # Shape (B, channels, places).
        one, other = (each.movedim(axis, 1).flatten(2) for each in (y, x))
        if one.shape[2] < _FEWEST_PLACES:
            continue
        centred, moved = (each - each.mean(2, keepdim=True) for each in (one, other))
        size = centred.square().sum(2)
        told = size > _FITS * size.mean()
        factors = torch.where(told, (centred * moved).sum(2) / size, 1.0)
        residue = (moved - factors[..., None] * centred)[told].square().mean().sqrt()
        if not told.any() or not residue <= fits * other.square().mean().sqrt():
            continue
        deviation = centred.square().mean().sqrt()
        shifts = torch.where(told, other.mean(2) - factors * one.mean(2), 0.0) / deviation
        low, middle, high = factors[told].quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        varied, shift_varied = (float((each - each.mean(0)).square().mean().sqrt()) for each in (factors, shifts))
        return Modulation(
            path=norm,
            reader=reader,
            samples=len(y),
            factors=(low, middle, high),
            centre=float(factors[told].mean()),
            varied=varied if varied > varies else 0.0,
            shift=float(shifts.square().mean().sqrt()),
            shift_varied=shift_varied if shift_varied > varies else 0.0,
        )
    return None
