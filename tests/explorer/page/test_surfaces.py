"""Surfaces: that their places lie where they should, and that the outline is where the eye's rays touch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytestmark = pytest.mark.browser

MATRIX = np.array([[1.9, 0.3, 0], [-0.4, 0.9, 0.2], [0, 0.5, -1.3]])
CENTRE = np.array([0.5, -0.3, 0.8])
EYE = np.array([9.0, -4.0, 5.0])
LIGHT = [-0.48, 0.64, 0.6]


def visible(modules, matrix=MATRIX):
    quadric = {"centre": CENTRE.tolist(), "matrix": np.asarray(matrix).tolist()}
    return modules("surfaces.js", "visible", quadric, EYE.tolist(), LIGHT)


def test_the_mesh_and_the_graticule_lie_on_the_ellipsoid(modules):
    units = np.linalg.solve(MATRIX, (np.array(visible(modules)["places"]) - CENTRE).T)
    np.testing.assert_allclose(np.linalg.norm(units, axis=0), 1, atol=1e-12)


def test_the_eye_looks_along_the_surface_at_its_outline(modules):
    outline = np.array(visible(modules)["outline"])
    normals = (outline - CENTRE) @ np.linalg.inv(MATRIX @ MATRIX.T)
    np.testing.assert_allclose(np.einsum("ij,ij->i", normals, EYE - outline), 0, atol=1e-11)


def test_faces_cover_the_sphere_once_and_are_seen_convex(modules):
    mesh = visible(modules, np.eye(3))
    places = np.array(mesh["places"]) - CENTRE
    area = 0
    for face in mesh["faces"]:
        corners = places[face]
        sides = np.cross(np.roll(corners, -1, 0) - corners, np.roll(corners, -2, 0) - np.roll(corners, -1, 0))
        turns = np.einsum("ij,ij->i", sides, corners - (EYE - CENTRE))
        assert (turns > -1e-12).all() or (turns < 1e-12).all()
        area += np.linalg.norm(sum(np.cross(corners[k], corners[k + 1]) for k in range(-1, len(face) - 1))) / 2
    edges = Counter(frozenset((face[k - 1], face[k])) for face in mesh["faces"] for k in range(len(face)))
    assert set(edges.values()) == {2}
    # Chords of 20 degrees lie a hundredth inside.
    assert 0.96 * 4 * np.pi < area < 4 * np.pi


def test_a_ball_is_densest_at_its_rim_and_away_from_the_light(modules):
    mesh = visible(modules, np.eye(3))
    places, density = np.array(mesh["places"]) - CENTRE, np.array(mesh["density"])
    normals = np.array([places[face].mean(0) / np.linalg.norm(places[face].mean(0)) for face in mesh["faces"]])
    towards = (EYE - CENTRE) / np.linalg.norm(EYE - CENTRE)
    edge_on = 1 - np.abs(normals @ towards)
    assert density[edge_on > 0.7].mean() > density[edge_on < 0.2].mean() + 0.3
    rim = edge_on > 0.7
    assert np.corrcoef(density[rim], normals[rim] @ LIGHT)[0, 1] < -0.3
    assert (density > 0).all()


def test_lines_are_faint_on_the_far_side(modules):
    mesh = visible(modules, np.eye(3))
    places, front = np.array(mesh["places"]) - CENTRE, np.array(mesh["front"])
    along = places @ (EYE - CENTRE)
    assert set(front[along > 1 + 1e-9]) == {1}
    assert set(front[along < 1 - 1e-9]) == {0.35}
    assert {index for line in mesh["lines"] for index in line} <= set(range(len(places)))


@pytest.mark.parametrize("flat", [np.diag([1.7, 1.7, 0]), np.diag([0, 2, 0]), np.outer([1, 2, 3], [1, 0, 1])])
def test_a_flattened_ball_is_still_drawn(modules, flat):
    mesh = visible(modules, flat)
    places = np.array(mesh["places"])
    assert np.isfinite(places).all()
    assert np.isfinite(mesh["density"]).all()
    # No farther from the flat image than the thickness that it is given.
    distances = [np.linalg.norm(flat @ np.linalg.lstsq(flat, p - CENTRE, rcond=None)[0] - (p - CENTRE)) for p in places]
    assert max(distances) < 2e-3 * np.abs(flat).max()


def test_an_image_that_is_a_point_has_no_faces_to_draw(modules):
    mesh = visible(modules, np.zeros((3, 3)))
    assert not np.isfinite(np.array(mesh["places"])[np.unique(np.concatenate(mesh["faces"]))]).any()


def test_a_plane_is_a_grid_of_cells(modules):
    u, v = np.array([0, 0.6, 0.8]), np.array([1, 0, 0])
    mesh = modules("surfaces.js", "plane", CENTRE.tolist(), u.tolist(), v.tolist(), 2)
    places = np.array(mesh["places"]) - CENTRE
    assert np.abs(places @ np.cross(u, v)).max() < 1e-15
    assert (places @ u).min() == pytest.approx(-2)
    assert (places @ v).max() == pytest.approx(2)
    cells = [places[face] for face in mesh["faces"]]
    areas = [np.linalg.norm(np.cross(cell[1] - cell[0], cell[3] - cell[0])) for cell in cells]
    assert sum(areas) == pytest.approx(16)
    for line in mesh["lines"]:
        ends = places[[line[0], line[-1]]]
        assert np.linalg.norm(ends[1] - ends[0]) == pytest.approx(4)
    assert len({(line[0], line[-1]) for line in mesh["lines"]}) == 14
    corners = np.array(mesh["outline"]) - CENTRE
    np.testing.assert_allclose(np.abs(corners @ np.stack([u, v], 1)), 2)


def test_an_ellipse_runs_round_once_and_across_is_at_right_angles(modules):
    places = np.array(modules("surfaces.js", "ellipse", [1, 2, 3], [2, 0, 0], [0, 0, 1], 40)) - [1, 2, 3]
    np.testing.assert_allclose((places[:, 0] / 2) ** 2 + places[:, 2] ** 2, 1)
    angles = np.unwrap(np.arctan2(places[:, 2], places[:, 0] / 2))
    np.testing.assert_allclose(np.diff(angles), 2 * np.pi / 40)
    directions = [*np.eye(3), [1, 1, 1], [-0.01, 0, 5], [3, -2, 0.1], [0, 0.8, 0.6]]
    for direction in directions:
        u, v = np.array(modules("surfaces.js", "across", np.array(direction, float).tolist()))
        basis = np.stack([u, v, direction / np.linalg.norm(direction)])
        np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-15)
        assert np.linalg.det(basis) == pytest.approx(1)
