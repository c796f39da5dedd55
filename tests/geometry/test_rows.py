"""Which norms have a geometry of rows, and the length that a normalized row really has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import PRESETS, valid_specs
from normkit import NormSpec, reference
from normkit.errors import DtypeError, ShapeError, SpecError
from normkit.geometry.rows import require_features, require_floating, require_row, sphere_radius


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_is_the_last_axis_in_one_group(name):
    spec = PRESETS[name]
    if spec.axes == (-1,) and spec.groups == 1:
        require_row(spec)
    else:
        with pytest.raises(SpecError, match=r"spec\.rows\.split"):
            require_row(spec)


@pytest.mark.parametrize(
    "spec", [NormSpec(axes=(1,)), NormSpec(axes=(-2, -1)), NormSpec(axes="all_but_batch"), NormSpec(groups=2)]
)
def test_other_rows_are_refused(spec):
    with pytest.raises(SpecError, match=f"{spec.groups} groups"):
        require_row(spec)


def test_floating_rows_of_some_features_come_back_as_they_are():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.zeros(2, 3, dtype=dtype)
        assert require_floating(x) is x
        # No rows at all are fine; rows without features are not.
        assert require_floating(x[:0]).shape == (0, 3)
    assert require_features(x, 3) is x
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(DtypeError, match="floating"):
            require_floating(torch.zeros(3, dtype=dtype))
    for shape in ((), (0,), (2, 0)):
        with pytest.raises(ShapeError, match="shape"):
            require_floating(torch.zeros(shape))
    with pytest.raises(ShapeError, match=r"rows of 3 features are needed, got shape \(2, 4\)"):
        require_features(torch.zeros(2, 4), 3)


@given(spec=valid_specs(eps=st.just(0.0)), n=st.integers(2, 40), seed=st.integers(0, 99))
def test_the_radius_is_the_length_of_a_normalized_row(spec, n, seed):
    spec = spec.replace(axes=(-1,), groups=1)
    if spec.centre_numerator != spec.centre_statistics:
        with pytest.raises(SpecError, match="no sphere"):
            sphere_radius(spec, n)
        return
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    lengths = torch.linalg.vector_norm(reference.forward(x, spec), dim=-1)
    # Sums of up to 40 float64 terms.
    assert torch.allclose(lengths, torch.full_like(lengths, sphere_radius(spec, n)), rtol=1e-13, atol=0.0)
