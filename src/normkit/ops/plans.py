"""A spec in the terms of the operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from normkit.kernels import support
from normkit.kernels.signatures import Conventions, unpacked
from normkit.spec import NormSpec


class Plan(NamedTuple):
    """A spec as the operators take it.

    Attributes:
        spec: The conventions in words.
        conventions: The same in one number.
        eps: As in the spec; 0.0 for None, which is one of the conventions.
        weight_offset: As in the spec.
        unsupported: Why no kernel computes this spec, or None.
        is_plain: Whether one row is the last axis, and the kernels compute it of nearly every tensor.
        features_last: For a row along the channels: the plan of the same norm of an input with these moved last.
    """

    spec: NormSpec
    conventions: int
    eps: float
    weight_offset: float
    unsupported: str | None
    is_plain: bool
    features_last: Plan | None


_plans: dict[NormSpec, Plan] = {}


def plan(spec: NormSpec) -> Plan:
    """The plan of a spec, made once."""
    if torch.compiler.is_compiling():
        return _plan(spec)
    found = _plans.get(spec)
    if found is None:
        found = _plans[spec] = _plan(spec)
    return found


def _plan(spec: NormSpec) -> Plan:
    unsupported = support.supports_spec(spec)
    conventions = Conventions(
        centre=int(spec.centre_statistics),
        eps_placement={"inside": 0, "outside": 1, "clamp": 2}[spec.eps_placement],
        divisor=2 if spec.reduction == "sum" else spec.correction,
        sqrt_n=int(spec.multiplier == "sqrt_n"),
        # Values that have no number are not supported.
        cast={"late": 0, "early": 1, "weight": 2, "none": 1}.get(spec.cast, 0),
        round_rstd=int(spec.round_rstd),
        offset_in_parameter_dtype=int(spec.offset_dtype == "parameter"),
        machine_eps=int(spec.eps is None),
        output={"input": 0, "promote": 1, "weight": 2}.get(spec.output_dtype, 0),
        axes=len(spec.axes) if unsupported is None else 0,
    )
    return Plan(
        spec=spec,
        conventions=conventions.packed(),
        eps=0.0 if spec.eps is None else spec.eps,
        weight_offset=spec.weight_offset,
        unsupported=unsupported,
        is_plain=unsupported is None and spec.axes == (-1,) and spec.statistics_dtype == "float32",
        features_last=_plan(spec.replace(axes=(-1,))) if spec.axes == (1,) else None,
    )


def spec_of(conventions: int, eps: float, weight_offset: float, *, has_weight: bool, has_bias: bool) -> NormSpec:
    """The spec of what an operator takes: the formula of the spec that `plan` made it of."""
    found = unpacked(conventions)
    return NormSpec(
        centre_numerator=bool(found.centre),
        centre_statistics=bool(found.centre),
        eps=None if found.machine_eps else eps,
        eps_placement=("inside", "outside", "clamp")[found.eps_placement],
        correction=1 if found.divisor == 1 else 0,
        reduction="sum" if found.divisor == 2 else "mean",
        multiplier=("one", "sqrt_n")[found.sqrt_n],
        axes=tuple(range(-found.axes, 0)),
        has_weight=has_weight,
        has_bias=has_bias,
        weight_offset=weight_offset if has_weight else 0.0,
        offset_dtype="parameter" if found.offset_in_parameter_dtype else "float32",
        round_rstd=bool(found.round_rstd),
        cast=("late", "early", "weight")[found.cast],
        output_dtype=("input", "promote", "weight")[found.output],
    )
