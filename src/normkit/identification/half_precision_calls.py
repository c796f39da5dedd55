"""Calls of a norm in 16 bits, and how many of their outputs a compute program gives bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.affine import Affine
from normkit.identification.arithmetic import DEFINITION, outputs
from normkit.identification.specimen import Specimen
from normkit.spec import NormSpec

HALF = (torch.bfloat16, torch.float16)
_ELEMENTS = 8192
_ENTRIES = 64
_SHORT = 8
_SMALL_WEIGHT = 0.08
"""1 + w loses the last four bits of a w of 0.04 to 0.12 where it is added in w's own 16-bit dtype."""
_LARGE = 1000.0
"""A magnitude whose square overflows float16."""
_PERFECT = 0.9998
_NEAR = 0.98
"""In float32 the order of operations moves a few in ten thousand; below this, no order makes a program match."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One call of a norm in 16 bits."""

    x: Tensor
    y: Tensor | None
    """None where the norm does not run in these dtypes."""
    weight: Tensor | None
    """In the dtype of the run's parameters."""
    bias: Tensor | None
    """In the dtype of the run's parameters."""

    def match(self, expected: Tensor) -> float:
        """Share of the outputs that are as expected: the same 16-bit number, or in float32 equal to within 8 roundings.

        A rounding is measured on the terms of an output, because a bias may cancel nearly all of it.
        """
        assert self.y is not None
        if self.y.dtype == torch.float32:
            size = self.y.abs() + self.y.square().nanmean().sqrt()
            close = (self.y - expected).abs_() <= 8 * torch.finfo(torch.float32).eps * size
        else:
            close = self.y == expected
        same = int(close.count_nonzero())
        if same < close.numel():
            same += int((self.y.isnan() & expected.isnan()).count_nonzero())
        return same / close.numel()


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How well the casts of a spec explain some runs."""

    share: float
    """Share of the outputs that are equal bit for bit, in the order of operations that explains most."""
    order: str
    """The order of operations that explains most."""


def make_runs(
    specimen: Specimen, spec: NormSpec, affine: Affine, shape: Sequence[int], generator: torch.Generator
) -> list[Run]:
    """Calls in bfloat16 and in float16: parameters and input, then one of the two in float32; under several draws."""
    entries = sum(parameter.numel() for parameter in specimen.parameters.values()) or _ENTRIES
    # One entry may happen to need no rounding: a short weight is drawn again.
    draws = max(1, min(4, _ENTRIES // entries))
    runs = []
    for half in HALF:
        pairs = [(half, half)]
        if affine.weight is not None or affine.bias is not None:
            pairs += [(torch.float32, half), (half, torch.float32)]
        for _ in range(draws):
            specimen.draw(generator)
            if spec.weight_offset and isinstance(affine.weight, str):
                specimen.parameters[affine.weight].mul_(_SMALL_WEIGHT)
            runs += [
                make_run(specimen, spec, affine, shape, generator, parameters, x, _ELEMENTS // draws)
                for parameters, x in pairs
            ]
    return runs


def make_run(
    specimen: Specimen,
    spec: NormSpec,
    affine: Affine,
    shape: Sequence[int],
    generator: torch.Generator,
    parameters: torch.dtype,
    dtype: torch.dtype,
    elements: int = _ELEMENTS,
) -> Run:
    """One call with parameters and input of these dtypes, on about this number of elements."""
    samples = max(2, elements // math.prod(shape[1:]))
    x = torch.randn(samples, *shape[1:], generator=generator)
    eps = reference.machine_eps(x, spec)
    felt = math.sqrt(abs(eps)) if spec.eps_placement == "inside" else abs(eps)
    if reference.to_rows(x, spec).shape[-1] <= _SHORT and felt > 2.0**-10:
        # Two features are +-1 whatever they were, and exact in any dtype, unless eps shortens them.
        x[::2] *= 2 * felt
    x = x.to(specimen.device, dtype)
    weight, bias = (
        None if part is None else part.detach().to(parameters, copy=True) for part in affine.of(specimen.module)
    )
    return Run(x=x, y=specimen.call_in(parameters, x), weight=weight, bias=bias)


def rate(runs: Sequence[Run], spec: NormSpec) -> Rate:
    """How well a program explains runs, of as many outputs each."""
    shares = [run.match(reference.forward(run.x, spec, run.weight, run.bias)) for run in runs]
    by_definition = Rate(share=sum(shares) / len(runs), order=DEFINITION)
    if by_definition.share >= _PERFECT or (by_definition.share < _NEAR and spec.statistics_dtype == "float32"):
        return by_definition
    first, *rest = runs
    found = {order: first.match(expected) for order, expected in outputs(first.x, spec, first.weight, first.bias)}
    order = max(found, key=lambda each: found[each])
    if order == DEFINITION:
        return by_definition
    shares = [found[order]]
    for run in rest:
        expected = next(y for each, y in outputs(run.x, spec, run.weight, run.bias) if each == order)
        shares.append(run.match(expected))
    return Rate(share=sum(shares) / len(runs), order=order)


def overflows(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> bool:
    """In float16, rows of magnitude 1000 come out not finite, or as if they were zero."""
    samples = (16, *shape[1:])
    signs = torch.randn(samples, generator=generator).sign()
    x = (_LARGE * signs * (1 + 0.5 * torch.rand(samples, generator=generator))).to(specimen.device, torch.float16)
    plus, minus = (specimen.call_in(torch.float16, sign * x) for sign in (1, -1))
    if plus is None or minus is None:
        return False
    # A short row may by chance have one sign only, and then little variance.
    return bool((~torch.isfinite(plus)).any() or (plus == minus).double().mean() > 0.5)
