import math

import numpy as np
import pytest
import torch

from normkit.plots.camera import Camera, array, helmert, nearest_basis, upright

EXACT = 1e-14


@pytest.mark.parametrize(("azimuth", "elevation"), [(-60.0, 20.0), (0.0, 0.0), (35.0, 90.0), (200.0, -40.0)])
def test_the_paper_and_the_way_to_the_reader_are_one_orthonormal_frame(azimuth, elevation):
    camera = Camera(azimuth, elevation)
    frame = np.column_stack([camera.paper(np.eye(3)), camera.nearness(np.eye(3))])
    assert np.abs(frame.T @ frame - np.eye(3)).max() < EXACT
    # Right-handed: no mirror image.
    assert np.linalg.det(frame) == pytest.approx(1.0)


def test_the_third_coordinate_goes_up_and_a_look_from_above_shows_the_first_two():
    right, up = Camera(12.0, 30.0).paper(np.array([0.0, 0.0, 1.0]))
    assert right == pytest.approx(0.0, abs=EXACT)
    assert up == pytest.approx(math.cos(math.radians(30)))
    assert Camera(-90.0, 90.0).paper(np.array([2.0, 3.0, 9.0])) == pytest.approx([2.0, 3.0])
    assert Camera(12.0, 30.0).upwards @ np.array([0.0, 0.0, 1.0]) == pytest.approx(up)


@pytest.mark.parametrize("n", [2, 3, 4, 9])
def test_the_helmert_basis_is_orthonormal_and_has_mean_zero(n):
    basis = helmert(n)
    assert basis.shape == (n, n - 1)
    assert (basis.mT @ basis - torch.eye(n - 1)).abs().max() < EXACT
    assert basis.sum(0).abs().max() < EXACT
    assert basis[:, -1].tolist() == pytest.approx([1 / math.sqrt(n * (n - 1))] * (n - 1) + [-math.sqrt((n - 1) / n)])


def test_upright_turns_all_ones_into_up():
    assert (torch.ones(3).double() @ upright()).tolist() == pytest.approx([0.0, 0.0, math.sqrt(3)], abs=EXACT)
    assert (upright().mT @ upright() - torch.eye(3)).abs().max() < EXACT


def test_the_nearest_basis_spans_the_same_plane_and_is_no_further_than_any_other():
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(4, 3, generator=generator, dtype=torch.float64)).Q
    nearest = nearest_basis(plane, helmert(4))
    assert (plane @ plane.mT - nearest @ nearest.mT).abs().max() < EXACT * 10
    distance = (nearest - helmert(4)).norm()
    for _ in range(50):
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
        assert distance <= (plane @ turn - helmert(4)).norm()
    assert (nearest_basis(helmert(4), helmert(4)) - helmert(4)).abs().max() < EXACT * 10


def test_a_tensor_with_a_gradient_becomes_an_array():
    assert array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
