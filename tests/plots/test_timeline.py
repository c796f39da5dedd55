import numpy as np
import pytest

from normkit.plots.timeline import eased, timeline


@pytest.fixture(scope="module")
def moments():
    return timeline(5, 500)


def test_there_are_as_many_moments_as_asked_for(moments):
    assert len(moments) == 500
    assert [len(timeline(3, frames)) for frames in (2, 7, 60)] == [2, 7, 60]


def test_every_stage_is_gone_through_in_its_order(moments):
    ways = list(dict.fromkeys((moment.before, moment.after) for moment in moments))
    assert ways == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def test_it_rests_at_each_stage(moments):
    for stage in range(5):
        rests = [moment for moment in moments if moment.after == stage and moment.way == 1.0]
        # A rest is near a tenth of the whole.
        assert 40 < len(rests) < 60


def test_places_never_jump(moments):
    # As a point that each stage moves by 1 and the way back by 4; the first follows on the last.
    places = [moment.between(moment.before, moment.after) for moment in [*moments, moments[0]]]
    assert np.abs(np.diff(places)).max() < 0.2
    assert np.abs(np.diff(places[:-60])).max() < 0.05


def test_what_is_shown_comes_and_goes_without_a_jump(moments):
    shown = [moment.opacity(moment.before > 1, moment.after > 1) for moment in [*moments, moments[0]]]
    assert (min(shown), max(shown)) == (0.0, 1.0)
    assert np.abs(np.diff(shown)).max() < 0.1


def test_the_ways_are_slow_at_both_ends():
    assert [eased(way) for way in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    step = 1e-4
    assert eased(step) / step < 1e-6
    assert (1 - eased(1 - step)) / step < 1e-6
    assert (eased(0.5 + step) - eased(0.5 - step)) / (2 * step) == pytest.approx(15 / 8, rel=1e-6)


def test_turns_are_even_and_stop_short_of_the_whole(moments):
    assert [moment.turn for moment in moments] == pytest.approx(np.arange(500) / 500)
