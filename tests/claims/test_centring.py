"""Claims C14 to C27, and what C73 knows so far: the first map, what it removes, and what that buys."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import below
from normkit import NormSpec, geometry, reference

N = 12
PLAIN = NormSpec(eps=0.0, has_weight=False, has_bias=False)


@pytest.fixture
def x():
    return torch.randn(64, N, dtype=torch.float64) + 0.5


def test_c14_centring_is_a_projection_in_three_forms(x, measured):
    unit = torch.full((N,), 1 / math.sqrt(N), dtype=torch.float64)
    by_mean = x - x.mean(-1, keepdim=True)
    by_projection = x - (x @ unit)[:, None] * unit
    by_matrix = x @ geometry.centring_matrix(N)
    ours = geometry.centre(x)
    difference = torch.stack([ours - form for form in (by_mean, by_projection, by_matrix)])
    measured(f"the three forms differ by {below(difference, 1e-14)}")


def test_c15_the_matrix_of_means_projects_onto_the_all_ones_line(measured):
    means = torch.eye(N, dtype=torch.float64) - geometry.centring_matrix(N)
    below(means @ means - means, 1e-15)
    values = torch.linalg.eigvalsh(means)
    below(values[:-1], 1e-14)
    below(values[-1] - 1, 1e-14)
    measured("eigenvalues of 11^T/n: 1 once, 0 n - 1 times")


def test_c16_variance_does_not_see_a_translation(x, measured):
    variance = [values.var(-1, correction=0) for values in (x, geometry.centre(x), x + 3)]
    measured("error " + below(torch.stack(variance[1:]) - variance[0], 1e-13))


def test_c17_variance_is_the_centred_length_squared_over_n(x, measured):
    variance = geometry.centre(x).square().sum(-1) / N
    measured("error " + below(variance - x.var(-1, correction=0), 1e-14))


def test_c18_centring_loses_one_dimension(measured):
    rank = torch.linalg.matrix_rank(geometry.centring_matrix(N)).item()
    assert rank == N - 1
    measured("rank n - 1")


@pytest.mark.slow
def test_c19_centring_need_not_shorten(x, inspections, measured):
    ratio = geometry.centre(x).norm(dim=-1) / x.norm(dim=-1)
    below(ratio - geometry.angle_to_ones(x).sin().abs(), 1e-14)
    near = geometry.centre(x) * 1e12 + 1
    assert (geometry.centre(near).norm(dim=-1) / near.norm(dim=-1) > 1 - 1e-12).all()
    kept = [1 - site.input.mean_energy for site in inspections["layernorm"].sites]
    measured(
        "length is multiplied by the sine of the angle to all-ones; in the shipped GPT-2 every norm keeps "
        f"at least {100 * min(kept):.1f} % of the energy"
    )


def test_c20_another_hyperplane_is_a_rotation_if_the_gain_is_one_number(x, measured):
    normal = torch.randn(N, dtype=torch.float64)
    reflected = torch.full((N,), 1 / math.sqrt(N), dtype=torch.float64) - normal / normal.norm()
    rotation = torch.eye(N, dtype=torch.float64) - 2 * torch.outer(reflected, reflected) / reflected.square().sum()
    onto_another = geometry.to_sphere(geometry.project_out(x, normal))
    through_ones = reference.forward(x @ rotation, PLAIN) @ rotation
    same = below(onto_another - through_ones, 1e-13)
    gain = torch.linspace(0.5, 2, N, dtype=torch.float64)
    with_gain = gain * onto_another - (gain * reference.forward(x @ rotation, PLAIN)) @ rotation
    assert with_gain.abs().max() > 0.1
    measured(f"rotated, normalized and rotated back: {same}; with a gain a feature the two differ by over 0.1")


def test_c21_recentring_the_weights_changes_nothing(measured):
    cells = {cell.norm: cell for cell in recentring().cells}
    assert cells["layer"].is_invariant
    assert not cells["rms"].is_invariant
    measured(f"LayerNorm {below(cells['layer'].error, 1e-12)}; RMSNorm changes by {cells['rms'].error:.2f}")


def recentring():
    return next(row for row in geometry.invariances().rows if row.transformation == "weight matrix re-centring")


def test_c22_a_sum_readout_gives_every_unit_the_same_gradient(x, measured):
    hidden = x.clone().requires_grad_()
    hidden.sum().backward()
    assert (hidden.grad == 1).all()
    behind = geometry.vjp(x, torch.ones_like(x), PLAIN)
    measured(f"1 for each unit; behind a centring norm {below(behind, 1e-14)}")


def test_c23_centring_makes_the_sum_constant_if_the_gain_is_one_number(x, measured):
    gain = torch.linspace(0.5, 2, N, dtype=torch.float64)
    spread = (gain * reference.forward(x, PLAIN)).sum(-1).std().item()
    assert spread > 0.5
    constant = below(reference.forward(x, PLAIN).sum(-1), 1e-13)
    measured(f"sum {constant} without a gain; with gains from 0.5 to 2 it spreads by {spread:.1f}")


def clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[3.0, 1, 0], [0, 3, 1], [4, 4, 1]], dtype=torch.float64)
    return centres[:, None] + 0.2 * torch.randn(3, 200, 3, generator=generator, dtype=torch.float64)


def test_c24_clusters_centred_like_layer_norm_stay_off_the_origin(measured):
    cloud = clusters()
    rows = geometry.centre(cloud)
    flat = below(rows.sum(-1), 1e-14)
    nearest = rows.mean(1).norm(dim=-1).min().item()
    assert nearest > 1
    measured(f"all in one plane (sum of entries {flat}); the nearest cluster's centre is {nearest:.1f} from the origin")


def test_c25_batch_norm_centres_the_cloud_on_the_origin(measured):
    points = clusters().flatten(0, 1)
    centred = geometry.centre_over_batch(points)
    theirs = torch.nn.BatchNorm1d(3, affine=False, dtype=torch.float64)(points)
    below(geometry.scale_over_batch(centred, 1e-5) - theirs, 1e-12)
    measured(f"mean of the cloud {below(centred.mean(0), 1e-14)}; scaled as well it is torch's BatchNorm1d")


def test_c26_scaling_keeps_the_direction_of_the_centred_vector(x, measured):
    centred = geometry.centre(x)
    measured(f"angle {below(geometry.angle_between(centred, reference.forward(x, PLAIN)), 1e-14)} rad")


def test_c27_the_normal_of_every_plane_of_constant_sum_is_all_ones(measured):
    plane = geometry.Hyperplane(torch.ones(N, dtype=torch.float64), torch.full((N,), 0.5, dtype=torch.float64))
    points = plane.project(torch.randn(64, N, dtype=torch.float64))
    measured(f"x1 + ... + xn = k for k = 6: {below(points.sum(-1) - 6, 1e-13)} off")


@pytest.mark.slow
def test_c73_the_shipped_models_make_little_use_of_recentring(inspections, measured):
    words = []
    for name, inspection in inspections.items():
        energies = sorted(site.input.mean_energy for site in inspection.sites)
        chance = 1 / inspection.sites[0].input.features
        words.append(f"{name} {100 * energies[0]:.2f} to {100 * energies[-1]:.2f} % (chance {100 * chance:.2f} %)")
    measured("energy along all-ones before the norms of the two shipped models: " + "; ".join(words))
