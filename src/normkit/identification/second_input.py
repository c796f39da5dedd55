"""A second input: which one a norm takes, and its effect on the output of rows too long to feel eps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError
from normkit.identification.elementwise import ACTIVATIONS
from normkit.identification.precision import precision_of
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of

_GATES = ("none", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True, eq=False)
class Second:
    """One or more further arguments with which a norm runs."""

    names: tuple[str, ...]
    """The arguments, all given tensors of the same shape."""
    shape: tuple[int, ...]

    def of(self, x: Tensor, values: Tensor | float) -> dict[str, Tensor]:
        """The arguments for the samples x: one number, or one sample's values for each of them."""
        whole = torch.as_tensor(values, dtype=x.dtype, device=x.device).expand(len(x), *self.shape[1:])
        return dict.fromkeys(self.names, whole.contiguous())


def second_that_works(specimen: Specimen, shape: Sequence[int]) -> Second | None:
    """The further arguments that make it return a tensor of x's shape, or None.

    Given are all arguments that have no default, or else the first that has None for one: as tensors of x's shape,
    with a row for each sample, or with as many features as a linear layer inside takes.
    """
    required = tuple(each.name for each in specimen.further if each.default is inspect.Parameter.empty)
    optional = tuple(each.name for each in specimen.further if each.default is None)
    x = torch.ones(tuple(shape), device=specimen.device, dtype=specimen.dtype)
    for names in (required, optional[:1]):
        for sizes in _shapes(specimen, shape) if names else ():
            second = Second(names=names, shape=sizes)
            try:
                holding(specimen, second, 0.5)(x)
            except (UnrecognisedError, NormkitError):
                continue
            return second
    return None


class Probe:
    """A norm far from eps, called with second inputs of many kinds."""

    def __init__(self, specimen: Specimen, second: Second, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.specimen, self.second, self.shape, self._generator = specimen, second, shape, generator
        precision = precision_of(specimen.dtype)
        self._far, self._fits = precision.far, precision.fits
        self.x = self._far * self._normal(shape)

    def __call__(self, x: Tensor, values: Tensor | float) -> Tensor:
        """The output in float64; the values have a sample's shape, or are one number."""
        return holding(self.specimen, self.second, values)(x).double()

    def constant(self, level: float) -> Tensor:
        """One sample's second input: this number, and noise about it."""
        return level + 0.25 * self._normal(self.second.shape[1:])

    def felt(self) -> bool:
        """The output depends on the second input."""
        base = self(self.x, self.constant(0.75))
        return not self._close(self(self.x, self.constant(-0.75)), base)

    def gate(self) -> tuple[str, str | None] | None:
        """Where the second input multiplies ("before" or "after" the norm) and through which function; or None."""
        at = torch.linspace(-3, 3, 25, dtype=torch.float64)
        one, gates = self(self.x, 1.0), self._normal(self.second.shape[1:])
        outputs = torch.stack([self(self.x, float(level)) for level in at])
        factors = (outputs * one).flatten(1).sum(1) / one.square().sum()
        explained = factors.reshape(-1, *(1,) * one.dim()) * one
        if not self._close(outputs, explained):
            return None
        spread = self(self.x, gates)
        for name in _GATES:
            function = ACTIVATIONS[name]
            unit = function(torch.ones((), dtype=torch.float64))
            if self._close(spread, function(gates.double()) / unit * one):
                return "after", name
            # The norm does not feel the length of what it is given, only its sign.
            scaled = (self.x.double() * function(gates.double()) / unit).to(self.x.dtype)
            if self._close(spread, self(scaled, 1.0)) and not self._close(spread, one):
                return "before", name
        return None if self._reaches_others(gates) else ("after", None)

    def adds(self) -> bool:
        """f(x, z) = f(x + z, 0)."""
        other = self._far * self._normal(self.second.shape[1:])
        return self._close(self(self.x, other), self(self.x + other, 0.0))

    def steers(self) -> tuple[bool, bool]:
        """Whether the second input changes the scale, and the shift."""
        odds, evens = [], []
        for level in (0.75, -0.75):
            values = self.constant(level)
            plus, minus = self(self.x, values), self(-self.x, values)
            odds.append(plus - minus)
            evens.append(plus + minus)
        size = float(odds[0].norm() + odds[1].norm())
        scale, shift = (float((one - other).norm()) > self._fits * size for one, other in (odds, evens))
        return scale, shift

    def _reaches_others(self, gates: Tensor) -> bool:
        """Whether one entry of the second input moves outputs at other places."""
        other = gates.clone()
        other.view(-1)[0] += 1.0
        moved = (self(self.x, other) - self(self.x, gates)).abs().flatten(1)
        return bool(moved[:, 1:].max() > self._fits * moved.max())

    def _close(self, values: Tensor, expected: Tensor) -> bool:
        return float((values - expected).norm()) <= self._fits * float(expected.norm())

    def _normal(self, sizes: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(sizes), generator=self._generator)
        return values.to(self.specimen.device, self.specimen.dtype)


def holding(specimen: Specimen, second: Second, values: Tensor | float) -> Specimen:
    """The norm with its second input held constant, whatever the number of samples."""
    return specimen.adapted(lambda run, x: one_of(run(x, **second.of(x, values))))


def _shapes(specimen: Specimen, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    widths = [shape[-1]]
    if specimen.module is not None:
        linear = (part for part in specimen.module.modules() if isinstance(part, nn.Linear))
        widths += [part.in_features for part in linear]
    candidates = [tuple(shape)]
    for width in widths:
        candidates += [(shape[0], width), (shape[0], *(1,) * (len(shape) - 2), width), (*shape[:-1], width)]
    yield from dict.fromkeys(candidates)
