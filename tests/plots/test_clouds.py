import numpy as np
import pytest
import torch

from normkit.errors import ShapeError
from normkit.plots import clouds, theme
from normkit.plots.camera import upright
from normkit.plots.clouds import centred_clusters


@pytest.fixture(scope="module")
def x():
    drawn = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn + torch.tensor([1.0, 2.0, -0.5])


def places(ax):
    found = np.concatenate([artist.get_offsets().data for artist in ax.collections if artist.get_label() == "points"])
    return found[np.lexsort(found.round(9).T)]


@pytest.mark.slow
def test_nine_views_show_the_cloud_and_its_two_centrings(x):
    panels = centred_clusters(x).figure.axes
    kinds = [x, x - x.mean(0), x - x.mean(1, keepdim=True)]
    for row, camera in enumerate((clouds._SIDE, clouds._ALONG, clouds._ABOVE)):
        for ax, cloud in zip(panels[3 * row : 3 * row + 3], kinds, strict=True):
            expected = camera.paper((cloud @ upright()).numpy())
            assert places(ax) == pytest.approx(expected[np.lexsort(expected.round(9).T)], abs=1e-12)


@pytest.mark.slow
def test_along_the_plane_only_layernorms_points_are_on_one_line(x):
    heights = [np.abs(places(ax)[:, 1]).max() for ax in centred_clusters(x).figure.axes[3:6]]
    assert heights[2] < 1e-12
    assert min(heights[:2]) > 0.5


def test_the_cross_is_the_mean_of_each_cloud_and_only_batchnorm_moves_it_to_the_origin(x):
    panels = centred_clusters(x).figure.axes[6:]
    crosses = [
        np.array(line.get_data()).ravel() for ax in panels for line in ax.get_lines() if line.get_marker() == "x"
    ]
    assert crosses[1] == pytest.approx([0.0, 0.0], abs=1e-12)
    level = (x.mean(0) - x.mean()) @ upright()
    assert crosses[2] == pytest.approx(level[:2].numpy(), abs=1e-12)
    assert crosses[0] == pytest.approx(crosses[2], abs=1e-12)


def test_given_axes_and_wrong_points(x):
    with theme.style():
        given = theme.panels(3, 3, 6.0)
    assert centred_clusters(x, axes=given).figure is given[0].figure
    with pytest.raises(ShapeError, match=r"shape \(N, 3\) are needed, got \(12, 2\)"):
        centred_clusters(x[:, :2])
