"""What is asserted of a norm that `identify` must recognise."""

from __future__ import annotations

import torch
from torch import nn

from normkit import identify
from normkit.identification.spec_readings import CONVENTIONS


def assert_recognised(norm, shape, spec, undecided=()):
    """It is a norm with this spec, in all fields but those of the readings that may be open."""
    passport = identify(norm, shape)
    assert passport.verdict == "norm"
    assert passport.spec is not None, passport.evidence
    open_readings = set(passport.undecidable) & set(CONVENTIONS)
    assert open_readings <= set(undecided), passport.undecidable
    open_fields = {field for name in open_readings for field in CONVENTIONS[name]}
    expected, found = spec.to_json(), passport.spec.to_json()
    assert {name: found[name] for name in found if name not in open_fields} == {
        name: expected[name] for name in expected if name not in open_fields
    }
    # Open or not, the passport computes what the norm computes.
    module = norm.float().eval() if isinstance(norm, nn.Module) else norm
    x = torch.randn(3, *shape[1:], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(passport(x), module(x).detach(), rtol=1e-5, atol=1e-5)
