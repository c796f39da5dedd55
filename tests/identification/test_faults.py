"""The fault catalogue, from outside: every faulty norm is recognised as what it is, not as what it should be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import (
    FAULTS,
    EpsOfTheDtype,
    N,
    OverAxes,
)
from normkit.identification.behaviour import identify
from normkit.identification.spec_readings import CONVENTIONS

SHAPE = (4, 3, N)


def decided(passport, spec):
    """The conventions that the passport decides, as it has them and as the spec has them."""
    names = [name for reading in CONVENTIONS if reading not in passport.undecidable for name in CONVENTIONS[reading]]
    return {name: getattr(passport.spec, name) for name in names}, {name: getattr(spec, name) for name in names}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_recognised_as_what_it_is(fault):
    passport = identify(fault.build(), SHAPE)
    assert passport.verdict == fault.verdict
    assert any(fault.evidence in line for line in passport.evidence)
    if fault.found is None:
        assert passport.spec is None
        return
    seen, expected = decided(passport, fault.meant.replace(**fault.found))
    assert seen == expected
    # What differs from what was meant is a finding, so it must not be among what was left open.
    names = [name for reading in passport.undecidable for name in CONVENTIONS.get(reading, ())]
    assert {name for name in fault.found if getattr(fault.meant, name) is not None}.isdisjoint(names)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_an_eps_that_follows_the_dtype_is_read_in_it(dtype, eps):
    passport = identify(EpsOfTheDtype(), SHAPE, dtype=dtype)
    assert passport.verdict == "norm"
    assert passport.spec.eps == pytest.approx(eps, rel=0.01)


def test_statistics_over_time_leak_the_future():
    assert any("future" in line for line in identify(OverAxes(1, 2), SHAPE).readings["time"].evidence)
    assert not any("future" in line for line in identify(nn.LayerNorm(N), SHAPE).readings["time"].evidence)
