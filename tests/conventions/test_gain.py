"""Gain and bias: on which side of the norm the gain is, and what a spec knows of both."""

from __future__ import annotations

import pytest
import torch

from helpers import PRESETS
from normkit.conventions.gain import Gain
from normkit.spec import NormSpec


@pytest.mark.parametrize("spec", PRESETS.values(), ids=PRESETS)
def test_a_spec_is_made_of_its_conventions(spec):
    parts = [spec.placement.conventions(spec.eps), spec.centring.conventions(), spec.divisor.conventions()]
    parts.append(spec.gain.conventions())
    made = NormSpec(axes=spec.axes, groups=spec.groups).replace(**{key: part[key] for part in parts for key in part})
    assert made.replace(cast="none", statistics_dtype="input", output_dtype="input", round_rstd=False) == spec.replace(
        cast="none", statistics_dtype="input", output_dtype="input", round_rstd=False
    )


@pytest.mark.parametrize("is_before", [False, True])
def test_a_gain_multiplies_on_one_side(is_before):
    gain = Gain(placement="before" if is_before else "after")
    before, after = gain.sides(torch.full((3,), 2.0))
    assert gain.is_before == is_before
    assert (before * torch.ones(3)).tolist() == [1.0 + is_before] * 3
    assert (after * torch.ones(3)).tolist() == [2.0 - is_before] * 3
