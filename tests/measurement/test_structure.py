"""What one forward pass says a model is made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.measurement.running import evaluating
from normkit.measurement.structure import survey


class Shared(nn.Module):
    """One norm module at two places, and a norm called as a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.linear(self.norm(x))
        return F.rms_norm(self.norm(x), (8,))


def surveyed(model, x, progress=None):
    with evaluating(model), torch.no_grad():
        return survey(model, lambda: model(x), progress)


@pytest.mark.slow
def test_norms_blocks_and_roles_of_a_model_that_ships(twins):
    ids = torch.arange(16)[None]
    structure = surveyed(twins["layernorm"], ids)
    assert len(structure.sites) == 13
    assert [block.path for block in structure.blocks] == [f"transformer.h.{index}" for index in range(6)]
    assert len(structure.sweeps) == len(structure.blocks)
    assert {sweep.placement for sweep in structure.sweeps} == {"pre"}
    assert structure.final_norm == "transformer.ln_f"
    assert structure.roles["transformer.h.0.ln_1"] == "pre"
    assert set(structure.forward_calls.values()) == {1}


@pytest.mark.slow
def test_calls_of_one_forward_pass_are_counted_by_norm():
    structure = surveyed(Shared(), torch.randn(2, 3, 8))
    assert structure.forward_calls == {"norm": 2, ":rms_norm": 1}


@pytest.mark.slow
def test_the_stages_are_told_in_order():
    stages = []
    surveyed(Shared(), torch.randn(2, 3, 8), lambda stage, done, total: stages.append((stage, done, total)))
    assert stages == [("structure", 0, 3), ("norms", 1, 3), ("placement", 2, 3)]


def test_norms_that_no_spec_describes_keep_their_passport():
    structure = surveyed(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8))
    (other,) = structure.others
    assert (other.path, other.passport.verdict) == ("1", "batch")
    assert other.reason.startswith("BatchNorm1d: batch norm")
