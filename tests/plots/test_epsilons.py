import numpy as np
import pytest

from normkit.errors import InputError
from normkit.plots import theme
from normkit.plots.epsilons import two_epsilons


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1])
def test_the_curves_are_the_two_formulas(eps):
    kept, lost = two_epsilons(eps).figure.axes
    inside, outside = kept.get_lines()[:2]
    scale = inside.get_xdata()
    assert inside.get_ydata() == pytest.approx(scale / np.sqrt(scale**2 + eps))
    assert outside.get_ydata() == pytest.approx(scale / (scale + eps))
    for curve, missing in zip((inside, outside), lost.get_lines()[:2], strict=True):
        # One minus a number near 1 keeps its absolute digits only.
        assert missing.get_ydata() == pytest.approx(1 - curve.get_ydata(), abs=1e-15)
    assert {text.get_text().split(":")[0] for text in kept.texts} == {"inside", "outside"}


def test_they_agree_where_the_ring_is():
    lost = two_epsilons(1e-5).figure.axes[1]
    (ring,) = [line for line in lost.get_lines() if line.get_marker() == "o"]
    (scale,), (loss,) = ring.get_data()
    assert scale == (1 - 1e-5) / 2
    assert loss == pytest.approx(1e-5 / (scale + 1e-5), rel=1e-9)
    assert loss == pytest.approx(1 - scale / np.sqrt(scale**2 + 1e-5), rel=1e-9)


def test_the_words_name_the_scales_at_which_half_is_lost():
    # (eps / 3)**0.5 and eps, on a grid of 400 steps over 8.5 decades.
    assert "rms of 0.00182, outside at 1.02e-5" in two_epsilons(1e-5).description


def test_given_axes_and_numbers_that_agree_nowhere():
    with theme.style():
        given = theme.panels(1, 2, 3.0)
    assert two_epsilons(axes=given).figure is given[0].figure
    for eps in (0.0, 1.0, -1e-5, float("nan")):
        with pytest.raises(InputError, match="eps must lie between 0 and 1"):
            two_epsilons(eps)
