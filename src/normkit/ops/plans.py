"""A spec in the terms of the operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from normkit.conventions.casts import Casts
from normkit.conventions.divisor import DIVISORS
from normkit.conventions.eps import PLACEMENTS
from normkit.conventions.gain import Gain
from normkit.conventions.rows import Centring
from normkit.kernels import signatures
from normkit.kernels.signatures import Conventions, unpacked
from normkit.spec import NormSpec


class KernelPlan(NamedTuple):
    """A spec as the operators take it."""

    spec: NormSpec
    conventions: int
    """The conventions of the spec, packed into one number."""
    eps: float
    """As in the spec; 0.0 for None, which is one of the conventions."""
    offset: float
    """The number that is added to the stored gain."""
    unsupported: str | None
    """Why no kernel computes this spec, or None."""
    is_plain: bool
    """One row is the last axis, and the kernels compute it for nearly every tensor."""
    features_last: KernelPlan | None
    """For rows along the channels: the plan of the same norm with the channels moved last."""


_plans: dict[NormSpec, KernelPlan] = {}


def plan(spec: NormSpec) -> KernelPlan:
    """The plan of a spec, made once."""
    if torch.compiler.is_compiling():
        return _plan(spec)
    found = _plans.get(spec)
    if found is None:
        found = _plans[spec] = _plan(spec)
    return found


def _plan(spec: NormSpec) -> KernelPlan:
    unsupported = signatures.supports_spec(spec)
    (divisor, sqrt_n), (cast, output) = spec.divisor.codes, spec.casts.codes
    conventions = Conventions(
        centre=int(spec.centre_statistics),
        placement=spec.placement.code,
        divisor=divisor,
        sqrt_n=sqrt_n,
        cast=cast,
        round_rstd=int(spec.round_rstd),
        offset_in_parameter_dtype=int(spec.offset_dtype == "parameter"),
        machine_eps=int(spec.eps is None),
        output=output,
        axes=len(spec.axes) if unsupported is None else 0,
    )
    return KernelPlan(
        spec=spec,
        conventions=conventions.packed(),
        eps=0.0 if spec.eps is None else spec.eps,
        offset=spec.gain.offset,
        unsupported=unsupported,
        is_plain=unsupported is None and spec.rows.are_last and spec.statistics_dtype == "float32",
        features_last=_plan(spec.replace(axes=(-1,))) if spec.axes == (1,) else None,
    )


def spec_of(conventions: int, eps: float, offset: float, *, has_weight: bool, has_bias: bool) -> NormSpec:
    """The spec that an operator's arguments stand for: it has the formula of the spec given to `plan`."""
    found = unpacked(conventions)
    is_centred = bool(found.centre)
    placement = next(each for each in PLACEMENTS.values() if each.code == found.placement)
    divisor = next(each for each in DIVISORS.values() if each.codes == (found.divisor, found.sqrt_n))
    gain = Gain(
        is_present=has_weight,
        offset=offset if has_weight else 0.0,
        offset_dtype="parameter" if found.offset_in_parameter_dtype else "float32",
        has_bias=has_bias,
    )
    return NormSpec(
        axes=tuple(range(-found.axes, 0)),
        **Centring(is_centred, is_centred).conventions(),
        **divisor.conventions(),
        **placement.conventions(None if found.machine_eps else eps),
        **gain.conventions(),
        **Casts.of_codes(found.cast, found.output, round_rstd=bool(found.round_rstd)).conventions(),
    )
