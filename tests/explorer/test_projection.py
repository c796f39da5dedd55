"""The basis of the projected points, and that the page's formulas on the embedded floats give the norm itself."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normkit import reference, specs
from normkit.explorer.conventions import convention_of
from normkit.explorer.projection import principal_basis, site_record
from normkit.spec import NormSpec

SPECS = {
    "LayerNorm": NormSpec(eps=1e-3),
    "LayerNorm, eps outside": NormSpec(eps=1e-3, eps_placement="outside"),
    "RMSNorm": NormSpec(centre_numerator=False, centre_statistics=False, eps=1e-3),
    "length": specs.L2_NORM.replace(eps=1e-3, eps_placement="inside", has_weight=True, has_bias=True),
}


def stages(site: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled, times gain, plus bias in the basis, as the page computes them from a site."""
    numbers = np.frombuffer(base64.b64decode(site["floats"]), "<f4").astype(np.float64).reshape(site["count"], 7)
    c, r, d = numbers[:, :3], numbers[:, 3:4], numbers[:, 4:]
    across = np.sqrt((c[:, 1:] ** 2).sum(1, keepdims=True) + r**2)
    mean = c[:, :1] / math.sqrt(site["n"])
    is_centred = site["mode"] == "layer"
    size = across if is_centred else np.hypot(c[:, :1], across)
    size = size if site["mode"] == "length" else size / math.sqrt(site["n"])
    s = np.sqrt(size**2 + site["eps"]) if site["place"] == "inside" else size + site["eps"]
    scaled = (c * [0, 1, 1] if is_centred else c) / s
    gained = (d if is_centred else d + mean * site["gain"]) / s
    return scaled, gained, gained + site["bias"]


def record(rows: torch.Tensor, spec: NormSpec, gain: torch.Tensor, bias: torch.Tensor) -> dict:
    return site_record(
        path="norm",
        formula=str(spec),
        convention=convention_of(spec, rows.shape[1]),
        layer=0,
        rows=rows,
        tokens=range(len(rows)),
        basis=principal_basis(rows),
        gain=gain,
        bias=bias,
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_pages_formulas_on_the_embedded_floats_give_the_norm_projected(spec: NormSpec, n: int) -> None:
    rows = torch.randn(40, n, dtype=torch.float64) * torch.logspace(-2, 2, 40, dtype=torch.float64)[:, None] + 0.3
    gain, bias = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    basis = principal_basis(rows).rows
    scaled, gained, out = stages(record(rows, spec, gain, bias))
    bare = spec.replace(has_weight=False, has_bias=False)
    expected = reference.forward(rows, bare)
    # The embedded floats are rounded to 24 bits; of a vector of length sqrt(n) |g|, a few of those remain.
    close = 8 * 2**-24 * math.sqrt(n)
    np.testing.assert_allclose(scaled, (expected @ basis.T).numpy(), rtol=0, atol=close)
    close *= max(1.0, float(gain.abs().max()))
    np.testing.assert_allclose(gained, ((gain * expected) @ basis.T).numpy(), rtol=0, atol=close)
    whole = reference.forward(rows, spec, gain, bias)
    np.testing.assert_allclose(out, (whole @ basis.T).numpy(), rtol=0, atol=close)


@pytest.mark.parametrize(("count", "n"), [(500, 12), (9, 30), (2, 5), (1, 5), (3, 3), (0, 4)])
def test_the_basis_is_orthonormal_with_the_all_ones_direction_first(count: int, n: int) -> None:
    basis = principal_basis(torch.randn(count, n, dtype=torch.float64)).rows
    torch.testing.assert_close(basis @ basis.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(basis[0], torch.full((n,), n**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2])
def test_few_features_have_fewer_directions(n: int) -> None:
    basis = principal_basis(torch.randn(7, n, dtype=torch.float64))
    expected = torch.diag(torch.tensor([1.0, n - 1, 0], dtype=torch.float64))
    torch.testing.assert_close(basis.rows @ basis.rows.T, expected, rtol=0, atol=1e-14)
    assert basis.explained == pytest.approx((float(n > 1), 0.0))


@pytest.mark.parametrize(("count", "n"), [(500, 12), (9, 30)])
def test_the_directions_are_those_of_the_singular_value_decomposition(count: int, n: int) -> None:
    rows = torch.randn(count, n, dtype=torch.float64) * torch.arange(1, n + 1)
    basis = principal_basis(rows)
    centred = F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    torch.testing.assert_close((basis.rows[1:] @ directions[:2].T).abs(), torch.eye(2, dtype=torch.float64))
    whole = rows - rows.mean(1, keepdim=True)
    along = (whole @ basis.rows[1:].T).square().sum(0) / whole.square().sum()
    assert basis.explained == pytest.approx(along.tolist()), "squares are summed, not shares averaged"
    largest = basis.rows[1:].abs().argmax(1)
    assert bool((basis.rows[1:].gather(1, largest[:, None]) > 0).all())


def test_every_row_counts_the_same_however_long() -> None:
    rows = torch.randn(30, 6, dtype=torch.float64)
    lengths = torch.logspace(-9, 9, 30, dtype=torch.float64)[:, None]
    torch.testing.assert_close(principal_basis(lengths * rows).rows, principal_basis(rows).rows)


@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e37])
def test_the_scale_of_the_rows_is_no_matter(scale: float) -> None:
    rows = torch.randn(20, 6, dtype=torch.float64)
    torch.testing.assert_close(principal_basis(scale * rows).rows, principal_basis(rows).rows)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_rows_have_no_direction_of_their_own(value: float) -> None:
    basis = principal_basis(torch.full((4, 5), value, dtype=torch.float64))
    assert basis.explained == (0.0, 0.0)
    assert basis.rows[1].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0, 0])


def test_the_shadow_of_the_ellipsoid_holds_every_output() -> None:
    spec = NormSpec(eps=0)
    n = 8
    rows = torch.randn(4000, n, dtype=torch.float64)
    gain, bias = torch.rand(n, dtype=torch.float64) + 0.5, torch.zeros(n, dtype=torch.float64)
    site = record(rows, spec, gain, bias)
    square = np.zeros((3, 3))
    square[np.triu_indices(3)] = site["square"]
    square = np.triu(square) + np.triu(square, 1).T
    image = n * (square - np.outer(site["gain"], site["gain"]) / n)
    out = stages(site)[2]
    depth = np.einsum("ni,ij,nj->n", out, np.linalg.inv(image), out)
    # Points on the sphere of 7 dimensions have shadows all over the ellipsoid's, up to its edge and never outside.
    assert depth.max() <= 1 + 1e-6
    assert depth.max() > 0.95
