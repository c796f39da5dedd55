import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from normkit.errors import ShapeError
from normkit.plots import theme
from normkit.plots.spectrum import jacobian_spectra

X = torch.tensor([2.1, 0.9, -0.6, 1.4, -1.1, 0.3, 1.7], dtype=torch.float64)


@pytest.mark.parametrize(("panel", "norm"), [(0, layer_norm), (1, rms_norm)])
def test_the_marks_are_the_singular_values_that_autograd_gives(panel, norm):
    ax = jacobian_spectra(X, 0.5).figure.axes[panel]
    damped, bare = ax.get_lines()
    for line, eps in ((bare, 0.0), (damped, 0.5)):
        jacobian = torch.func.jacrev(lambda x, eps=eps: norm(x, (7,), eps=eps))(X)
        assert line.get_ydata() == pytest.approx(torch.linalg.svdvals(jacobian).flip(0).numpy(), abs=1e-12)


def test_stems_reach_from_zero_to_the_filled_marks():
    ax = jacobian_spectra(X, 0.5).figure.axes[0]
    stems = np.array([segment[:, 1] for segment in ax.collections[0].get_segments()])
    assert stems[:, 0].tolist() == [0.0] * 7
    assert stems[:, 1] == pytest.approx(ax.get_lines()[0].get_ydata())


@pytest.mark.slow
def test_the_description_counts_equal_values():
    words = jacobian_spectra(torch.tensor([1.0, 1.0, 3.0, 3.0]).double(), 3.0).description
    assert words.startswith("LayerNorm: 0 (2 times), 1.00 (2 times) at eps 0, 0, 0.375, 0.500 (2 times) with eps.")


def test_given_axes_and_rows_too_short():
    with theme.style():
        given = theme.panels(1, 2, 3.0)
    assert jacobian_spectra(X, 0.5, given).figure is given[0].figure
    for x in (X[:3], X[None]):
        with pytest.raises(ShapeError, match=r"one row of shape \(n,\) with n >= 4"):
            jacobian_spectra(x, 0.5)
