import re
from itertools import product

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch.nn.functional import layer_norm, rms_norm

from normkit import NormSpec, specs
from normkit.errors import InputError, ShapeError
from normkit.geometry import figures
from normkit.geometry.figures import (
    interlacing,
    invariance_marks,
    jacobian_spectra,
    normalized_together,
    quotient_paths,
    two_epsilons,
)
from normkit.geometry.invariance import invariances
from normkit.show import theme
from normkit.show.axes import new_axes, panels
from normkit.text import significant

X = torch.tensor([2.1, 0.9, -0.6, 1.4, -1.1, 0.3, 1.7], dtype=torch.float64)


@pytest.mark.slow
def test_each_invariance_is_marked_and_numbered_in_its_cell_and_described():
    table = invariances()
    with theme.style("dark"):
        given = new_axes()
        drawing = invariance_marks(table, given)
    assert (drawing.figure, drawing.scheme) == (given.figure, "dark")
    marks = {
        (round(float(line.get_xdata()[0]) + 0.22), int(line.get_ydata()[0])): line.get_markerfacecolor()
        for line in given.get_lines()
        if line.get_marker() == "o" and line.get_ydata()[0] == int(line.get_ydata()[0])
    }
    words = {text.get_position(): text.get_text() for text in given.texts}
    assert len(marks) == len(table.rows) * len(table.norms) == 24
    for place, row in enumerate(table.rows):
        for column, cell in enumerate(row.cells):
            assert (marks[column, place] != "none") is cell.is_invariant
            assert words[column - 0.05, place] == significant(cell.error)
    assert "W′ = W + 1 vᵀ" in words.values()
    assert not [word for word in words.values() if "^" in word or "_" in word]
    ignored = "RMSNorm ignores weight matrix re-scaling, dataset re-scaling, single case re-scaling."
    assert ignored in drawing.description


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1])
def test_the_curves_of_eps_are_the_two_formulas(eps):
    kept, lost = two_epsilons(eps).figure.axes
    inside, outside = kept.get_lines()[:2]
    scale = inside.get_xdata()
    assert inside.get_ydata() == pytest.approx(scale / np.sqrt(scale**2 + eps))
    assert outside.get_ydata() == pytest.approx(scale / (scale + eps))
    for curve, missing in zip((inside, outside), lost.get_lines()[:2], strict=True):
        # One minus a number near 1 keeps its absolute digits only.
        assert missing.get_ydata() == pytest.approx(1 - curve.get_ydata(), abs=1e-15)
    assert {text.get_text().split(":")[0] for text in kept.texts} == {"inside", "outside"}


def test_the_two_epsilons_agree_at_the_ring_and_lose_half_where_the_words_say():
    drawing = two_epsilons(1e-5)
    (ring,) = [line for line in drawing.figure.axes[1].get_lines() if line.get_marker() == "o"]
    (scale,), (loss,) = ring.get_data()
    assert scale == (1 - 1e-5) / 2
    assert loss == pytest.approx(1e-5 / (scale + 1e-5), rel=1e-9)
    assert loss == pytest.approx(1 - scale / np.sqrt(scale**2 + 1e-5), rel=1e-9)
    # (eps / 3)**0.5 and eps, on a grid of 400 steps over 8.5 decades.
    assert "rms of 0.00182, outside at 1.02e-5" in drawing.description


@pytest.mark.parametrize(("panel", "norm"), [(0, layer_norm), (1, rms_norm)])
def test_the_marks_of_a_jacobian_are_the_singular_values_that_autograd_gives(panel, norm):
    ax = jacobian_spectra(X, 0.5).figure.axes[panel]
    damped, bare = ax.get_lines()
    for line, eps in ((bare, 0.0), (damped, 0.5)):
        jacobian = torch.func.jacrev(lambda x, eps=eps: norm(x, (7,), eps=eps))(X)
        assert line.get_ydata() == pytest.approx(torch.linalg.svdvals(jacobian).flip(0).numpy(), abs=1e-12)
    stems = np.array([segment[:, 1] for segment in ax.collections[0].get_segments()])
    assert stems[:, 0].tolist() == [0.0] * 7
    assert stems[:, 1] == pytest.approx(damped.get_ydata())


@pytest.mark.slow
def test_the_description_of_a_jacobian_counts_equal_values():
    words = jacobian_spectra(torch.tensor([1.0, 1.0, 3.0, 3.0]).double(), 3.0).description
    assert words.startswith("LayerNorm: 0 (2 times), 1.00 (2 times) at eps 0, 0, 0.375, 0.500 (2 times) with eps.")


def test_the_dots_of_interlacing_are_singular_values_and_lie_on_their_bars():
    gain = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    (ax,) = interlacing(gain, NormSpec()).figure.axes
    (dots,) = ax.get_lines()
    matrix = torch.diag(gain) @ (torch.eye(20, dtype=torch.float64) - 1 / 20)
    assert dots.get_ydata() == pytest.approx(torch.linalg.svdvals(matrix)[:-1].flip(0).numpy())
    bars = np.array([segment[:, 1] for segment in ax.collections[0].get_segments()])
    assert bars[:, 0] == pytest.approx(gain.sort().values[:-1].numpy())
    assert bars[:, 1] == pytest.approx(gain.sort().values[1:].numpy())
    assert (bars[:, 0] <= dots.get_ydata()).all()
    assert (dots.get_ydata() <= bars[:, 1]).all()


def test_interlacing_draws_the_effective_gain_and_gains_of_zero_as_axes_of_length_0():
    def lengths(gain, spec):
        (dots,) = interlacing(gain, spec).figure.axes[0].get_lines()
        return dots.get_ydata()

    stored = torch.linspace(-0.5, 0.5, 8, dtype=torch.float64)
    assert lengths(stored, specs.NEMOTRON) == pytest.approx(lengths(stored + 1, NormSpec()))
    found = lengths(torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64), NormSpec())
    assert len(found) == 5
    assert found[:2] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert found[2] > 0.1


@pytest.mark.slow
def test_batchnorm_takes_one_feature_of_all_and_layernorm_all_features_of_one():
    samples, features, tokens = map(range, (figures._SAMPLES, figures._FEATURES, figures._TOKENS))
    slab = [(sample, 1, token) for sample, token in product(samples, tokens)]
    bar = [(samples[-1], feature, tokens[-1]) for feature in features]
    # The sides of the block that face the reader.
    sides = ((0, samples[-1], 1), (1, 0, 0), (2, tokens[-1], 1))
    assert (figures._CAMERA.nearness(np.diag([1.0, -1.0, 1.0])) > 0).all()
    for ax, cells in zip(normalized_together().figure.axes, (slab, bar), strict=True):
        assert {"samples", "features", "tokens"} <= {text.get_text() for text in ax.texts}
        coloured = [patch for patch in ax.patches if to_hex(patch.get_facecolor()) == theme.LIGHT["accent"]]
        found = np.array([patch.get_xy()[:4].mean(0) for patch in coloured])
        middles = []
        for cell, (axis, edge, way) in product(cells, sides):
            if cell[axis] == edge:
                middle = np.array(cell) + 0.5
                middle[axis] = cell[axis] + way
                middles.append(middle)
        expected = figures._CAMERA.paper(np.array(middles))
        assert len(found) == len(expected)
        for places in (found, expected):
            places[:] = places[np.lexsort(places.round(9).T)]
        assert np.abs(found - expected).max() < 1e-12


@pytest.mark.slow
def test_figures_draw_into_given_axes():
    with theme.style():
        given = panels(1, 7, 3.0)
    for drawing in (
        two_epsilons(axes=given[:2]),
        jacobian_spectra(X, 0.5, given[2:4]),
        normalized_together(given[4:6]),
        interlacing(torch.ones(5).double(), NormSpec(), "a norm", given[6]),
    ):
        assert drawing.figure is given[0].figure
    assert drawing.caption.endswith("by size. Here: a norm.")


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        *((lambda eps=eps: two_epsilons(eps), InputError, "eps must lie between 0 and 1") for eps in (0.0, 1.0, -1e-5)),
        (lambda: two_epsilons(float("nan")), InputError, "eps must lie between 0 and 1"),
        (lambda: interlacing(torch.ones(5), specs.LLAMA), InputError, "give a norm that centres"),
        (lambda: jacobian_spectra(X[:3], 0.5), ShapeError, re.escape("one row of shape (n,) with n >= 4")),
        (lambda: jacobian_spectra(X[None], 0.5), ShapeError, re.escape("one row of shape (n,) with n >= 4")),
    ],
)
def test_other_numbers_norms_and_rows_are_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


def test_paths_lie_on_the_circle_without_eps_and_straight_inside_it_with_eps():
    x, y = torch.tensor([[2.2, -1.6, 0.3], [2.0, 2.1, -1.6]], dtype=torch.float64)
    drawing = quotient_paths(x, y, 0.5)
    first, second, third = drawing.figure.axes
    paths = [
        np.array(next(line for line in ax.get_lines() if line.get_linewidth() == 2.2).get_xydata())
        for ax in (first, second)
    ]
    assert np.linalg.norm(paths[0], axis=1) == pytest.approx(np.full(61, 3**0.5))
    ends = layer_norm(torch.stack([x, y]), (3,), eps=0.5)
    chord = paths[1][-1] - paths[1][0]
    assert float((ends[1] - ends[0]).norm()) == pytest.approx(np.hypot(*chord))
    assert paths[1] == pytest.approx(paths[1][0] + np.linspace(0, 1, 61)[:, None] * chord)
    assert f"chord of length {significant(np.hypot(*chord))}" in drawing.description
    # A step half as long at twice the length turns by the arc tangent of a quarter.
    assert [text.get_text() for text in third.texts[2:]] == [
        f"{np.degrees(np.arctan(t)):.0f}°" for t in (2, 0.5, 0.125)
    ]
    with pytest.raises(ShapeError, match=r"two rows of shape \(3,\) are needed, got \(4,\) and \(3,\)"):
        quotient_paths(torch.ones(4), y, 0.5)
