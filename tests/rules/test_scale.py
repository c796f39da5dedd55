"""The divisor against the reference, for every convention that enters it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit import reference, specs
from normkit.rules.scale import ratios_at, scales
from normkit.spec import NormSpec

CONVENTIONS = [
    NormSpec(),
    specs.LLAMA.replace(eps=1e-3),
    specs.ANNOTATED_TRANSFORMER.replace(eps=0.1),
    specs.SCALE_NORM.replace(eps=0.5),
    specs.SCALE_NORM.replace(eps=500.0),
    specs.POCKET_TTS,
    specs.TORCH_RMS_NORM,
    NormSpec(reduction="sum", eps=1e-2),
]


@pytest.fixture
def site_of(models, inspected):
    """`site_of(row)`: a real site whose input statistics are those of one row."""
    site = inspected(models.plain(layers=1)).sites[0]

    def of(row):
        energy = float(row.mean() ** 2 / row.square().mean())
        return replace(site, input=replace(site.input, features=row.numel(), mean_energy=energy))

    return of


@pytest.mark.parametrize("spec", CONVENTIONS, ids=str)
def test_the_divisor_is_the_references_scale(site_of, spec):
    row = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.05
    eps = reference.machine_eps(row.float(), spec)
    expected = float(reference.statistics(row, spec, eps).scale)
    # Float64 on both sides, some twenty additions.
    assert float(scales(spec, site_of(row), row.square().mean().sqrt())) == pytest.approx(expected, rel=1e-13)


def test_a_larger_eps_shortens(site_of):
    site = site_of(torch.randn(24))
    site = replace(site, input=replace(site.input, rms_quantiles=(0.0, 0.25, 1.0)))
    plain = specs.LLAMA.replace(eps=0.0)
    assert ratios_at(site, plain, plain.replace(eps=3.0)) == pytest.approx((0.0, 1 / 7, 0.5))
    assert ratios_at(site, plain, plain) == (1.0, 1.0, 1.0)
    low, _, high = ratios_at(site, plain.replace(eps=3.0), plain)
    assert (low, high) == (math.inf, pytest.approx(2.0))


def test_no_rows_tell_nothing(site_of):
    site = site_of(torch.randn(24))
    site = replace(site, input=replace(site.input, rms_quantiles=(math.nan,) * 3))
    assert ratios_at(site, specs.LLAMA) is None
