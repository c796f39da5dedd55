import numpy as np
import pytest
import torch

from normkit import NormSpec, specs
from normkit.plots import film, theme
from normkit.plots.film import SIZE, Film
from normkit.plots.stages import course_of
from normkit.plots.timeline import Moment, timeline

# Draws whole frames; the parts it is made of have quick tests.
pytestmark = pytest.mark.slow

GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
SPEC, RMS = NormSpec(), specs.LLAMA
X = torch.randn(14, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.4


@pytest.fixture(scope="module")
def layer():
    with theme.style():
        yield Film(course_of(X, [0] * 7 + [1] * 7, SPEC, GAIN, BIAS))


@pytest.fixture(scope="module")
def rms():
    with theme.style():
        yield Film(course_of(X, None, RMS, GAIN, None))


def at_rest(stage):
    return Moment(stage, stage, 1.0, 1.0, 0.25)


def words(made):
    return [text.get_text() for text in made._figure.texts]


def dots(made):
    """Places of the points of the cloud, in one order."""
    places = np.concatenate([part.get_offsets().data for part in made._ax.collections if part.get_label() == "points"])
    return places[np.lexsort(places.round(9).T)]


@pytest.mark.parametrize("stage", range(5))
def test_at_rest_the_points_are_those_of_the_stage(layer, stage):
    layer.picture(at_rest(stage))
    camera = film.Camera(film._AZIMUTH + film._SWAY, film._ELEVATION)
    expected = camera.paper(layer._course.stages[stage].points)
    assert dots(layer) == pytest.approx(expected[np.lexsort(expected.round(9).T)], abs=1e-12)
    assert layer._course.stages[stage].name in words(layer)
    assert layer._course.stages[stage].formula in words(layer)
    assert layer._course.stages[stage].holds in words(layer)


def test_on_the_way_points_go_straight(layer):
    layer.picture(Moment(1, 2, 0.5, 0.0, 0.0))
    camera = film.Camera(film._AZIMUTH, film._ELEVATION)
    before, after = (layer._course.stages[k].points for k in (1, 2))
    expected = camera.paper((before + after) / 2)
    assert dots(layer) == pytest.approx(expected[np.lexsort(expected.round(9).T)], abs=1e-12)


def test_a_picture_has_the_size_that_a_film_needs(layer):
    picture = layer.picture(at_rest(0))
    assert (picture.size, picture.mode) == (SIZE, "RGB")
    assert not any(side % 2 for side in SIZE)


def test_drawing_leaves_nothing_behind_for_the_next(layer):
    first = layer.picture(at_rest(0))
    layer.picture(at_rest(4))
    assert layer.picture(at_rest(0)).tobytes() == first.tobytes()


def sheets(made):
    return len([patch for patch in made._ax.patches if len(patch.get_xy()) == 5])


def test_plane_and_sphere_come_with_their_steps(layer, rms):
    seen = []
    for stage in range(5):
        layer.picture(at_rest(stage))
        seen.append((sheets(layer), len(layer._ax.patches)))
    # A sheet is three polygons, the ball one.
    assert seen == [(0, 0), (3, 3), (3, 4), (3, 4), (3, 4)]
    rms.picture(at_rest(1))
    assert (sheets(rms), len(rms._ax.patches)) == (0, 1)


def test_the_circle_becomes_an_ellipse_on_which_points_lie_at_eps_0():
    with theme.style():
        made = Film(course_of(X, None, SPEC.replace(eps=0.0), GAIN, BIAS))
        for stage in (2, 3, 4):
            made.picture(at_rest(stage))
            lines = [line for line in made._ax.lines if line.get_linewidth() == 1.6]
            curve = np.concatenate([np.column_stack(line.get_data()) for line in lines])
            curve = curve[np.isfinite(curve).all(1)]
            # Vertices of a polygon of 120 sides: half a side is 0.06 at the longest semi-axis.
            assert np.linalg.norm(dots(made)[:, None] - curve, axis=-1).min(1).max() < 0.06


@pytest.mark.exhaustive
def test_everything_stays_within_its_window(layer, rms):
    for made, stages in ((layer, 5), (rms, 3)):
        for moment in timeline(stages, 23):
            made.picture(moment)
            (left, right), (low, high) = made._ax.get_xlim(), made._ax.get_ylim()
            assert ((dots(made) > (left, low)) & (dots(made) < (right, high))).all()
            # One dot to the right is as long as one dot up.
            box = made._ax.get_window_extent()
            assert (right - left) / box.width == pytest.approx((high - low) / box.height)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [SPEC, RMS, SPEC.replace(eps_placement="clamp", eps=1.25e-5, correction=1)])
def test_words_do_not_overlap_or_leave_the_picture(spec):
    with theme.style():
        made = Film(course_of(X, None, spec, GAIN, BIAS))
        for stage in range(len(made._course.stages)):
            made.picture(at_rest(stage))
            boxes = [text.get_window_extent() for text in made._figure.texts]
            for k, box in enumerate(boxes):
                assert box.x0 >= 0, words(made)[k]
                assert box.x1 <= SIZE[0]
                assert box.y0 >= 0
                assert box.y1 <= SIZE[1], words(made)[k]
                assert not any(box.overlaps(other) for other in boxes[k + 1 :]), words(made)[k]


def test_the_camera_comes_back(layer):
    first = layer.picture(Moment(0, 0, 1.0, 0.0, 0.0))
    last = layer.picture(Moment(0, 0, 1.0, 0.0, 1.0))
    # Rounding of the sine moves a few dots by one shade.
    assert np.abs(np.asarray(first).astype(int) - np.asarray(last)).max() <= 2


def test_a_gain_through_zero_and_rows_of_no_direction_are_drawn():
    rows = [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]
    with theme.style("dark"):
        made = Film(course_of(rows, None, SPEC.replace(eps=0.0), torch.tensor([-1.0, 0.0, 2.0]).double(), BIAS))
        for moment in timeline(5, 11):
            made.picture(moment)
    assert len(dots(made)) == 3


def test_in_the_dark_the_paper_is_dark():
    with theme.style("dark"):
        picture = Film(course_of(X, None, RMS, None, None)).picture(at_rest(0))
    assert "#{:02x}{:02x}{:02x}".format(*picture.getpixel((1, 1))) == theme.DARK["paper"]
