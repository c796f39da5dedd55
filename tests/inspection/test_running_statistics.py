import pytest
import torch
from torch import nn

from normkit.identification.passport import Passport
from normkit.identification.sites import OtherNorm
from normkit.inspection.running_statistics import ungathered


def found(norm):
    model = nn.Sequential(norm)
    passport = Passport(verdict="batch", spec=None, readings={}, shape=(2, 4))
    return ungathered(model, [OtherNorm(path="0", reason="BatchNorm1d: batch norm", passport=passport)])


def moved(name, **options):
    norm = nn.BatchNorm1d(4, **options)
    with torch.no_grad():
        getattr(norm, name)[1] += 0.5
    return norm


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gain_or_bias_that_moved_beside_statistics_that_did_not(name):
    assert found(moved(name)) == ("0",)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_that_moved_in_one_channel(name):
    norm = moved("weight")
    getattr(norm, name)[2] += 0.1
    assert found(norm) == ()


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), moved("weight", track_running_stats=False)]
)
def test_what_was_not_trained_or_keeps_no_statistics(norm):
    assert found(norm) == ()
