"""The divisor against the reference, for every convention that enters it."""

from __future__ import annotations

import math

import pytest
import torch

from normkit import reference, specs
from normkit.inspection.rules.scale import divisor, eps_of, output_ratio
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
    from dataclasses import replace

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
    assert divisor(spec, site_of(row), float(row.square().mean().sqrt())) == pytest.approx(expected, rel=1e-13)


def test_the_default_eps_is_the_machines():
    assert eps_of(specs.TORCH_RMS_NORM, "bfloat16") == 2**-23
    assert eps_of(specs.TORCH_RMS_NORM, "float64") == 2**-52
    assert eps_of(specs.LLAMA, "bfloat16") == specs.LLAMA.eps


def test_a_larger_eps_shortens(site_of):
    site = site_of(torch.randn(24) - 0.0)
    plain = specs.LLAMA.replace(eps=0.0)
    assert output_ratio(plain.replace(eps=3.0), plain, site, 1.0) == pytest.approx(0.5)
    assert output_ratio(plain, plain, site, 0.0) == 1.0
    assert output_ratio(plain, plain.replace(eps=1.0), site, 0.0) == math.inf
