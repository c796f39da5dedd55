from itertools import product

import numpy as np
import pytest
from matplotlib.colors import to_hex

from normkit.plots import axes, theme
from normkit.plots.axes import normalized_together


def coloured(ax):
    """The middles of the coloured faces."""
    faces = [patch for patch in ax.patches if to_hex(patch.get_facecolor()) == theme.LIGHT["accent"]]
    return np.array([patch.get_xy()[:4].mean(0) for patch in faces])


def seen_middles(cells):
    """The middles of the faces of these cells that lie on the three sides of the block that are seen."""
    found = []
    for cell in cells:
        for axis, edge, way in ((0, axes._SAMPLES - 1, 1), (1, 0, 0), (2, axes._TOKENS - 1, 1)):
            if cell[axis] == edge:
                middle = np.array(cell) + 0.5
                middle[axis] = cell[axis] + way
                found.append(middle)
    return axes._CAMERA.paper(np.array(found))


def in_order(places):
    return places[np.lexsort(places.round(9).T)]


@pytest.mark.slow
def test_batchnorm_takes_one_feature_of_all_and_layernorm_all_features_of_one():
    batch, layer = normalized_together().figure.axes
    samples, tokens = range(axes._SAMPLES), range(axes._TOKENS)
    slab = [(sample, 1, token) for sample, token in product(samples, tokens)]
    bar = [(axes._SAMPLES - 1, feature, axes._TOKENS - 1) for feature in range(axes._FEATURES)]
    for ax, cells in ((batch, slab), (layer, bar)):
        assert np.abs(in_order(coloured(ax)) - in_order(seen_middles(cells))).max() < 1e-12


def test_the_seen_sides_are_those_that_face_the_reader():
    ways = np.array([[1.0, 0, 0], [0, -1, 0], [0, 0, 1]])
    assert (axes._CAMERA.nearness(ways) > 0).all()


@pytest.mark.slow
def test_the_edges_are_named_and_axes_can_be_given():
    with theme.style():
        given = theme.panels(1, 2, 3.0)
    drawing = normalized_together(given)
    assert drawing.figure is given[0].figure
    assert {"samples", "features", "tokens"} <= {text.get_text() for text in given[0].texts}
