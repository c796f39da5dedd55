import math

import pytest

from normkit.study.experiments.noise_charts import charts, fewest_steps, nets

SETTINGS = {"noises": (0.5, 2.0), "rates": (0.1, 0.3), "steps": 3}


def of_seed(seed):
    return {
        f"{net} , rate {rate}".replace(" ,", ","): {
            "losses": [4.0, 1.0 + seed, None][: 2 if rate == 0.3 else 3],
            "steps_to": None if net == "no norm" else 20 + seed + 100 * rate,
            "at": [1, 2] if rate == 0.1 else [],
            "shift": [0.5 + seed, None][: 2 if net == "BatchNorm" else 1],
            "gradient_change": [0.5, 0.4],
            "smoothness": [5.0, 4.0],
        }
        for net in nets(SETTINGS)
        for rate in (0.1, 0.3)
    }


@pytest.fixture
def drawn():
    return {chart.name: chart for chart in charts(SETTINGS, {seed: of_seed(seed) for seed in range(3)})}


def test_nets_follow_the_settings():
    assert nets(SETTINGS) == ("BatchNorm", "noise 0.5", "noise 2", "no norm")


def test_the_best_rate_counts():
    assert fewest_steps(of_seed(0), "BatchNorm") == 30
    assert fewest_steps(of_seed(0), "no norm") == math.inf
    with pytest.raises(KeyError):
        fewest_steps({}, "BatchNorm")


def test_losses_stand_in_a_panel_for_each_rate(drawn):
    panels = drawn["noise-loss"].panels
    assert [title for title, _ in panels] == ["learning rate 0.1", "learning rate 0.3"]
    (_, slow), (_, fast) = panels
    assert slow[0].y == (4.0, 2.0, 4.0)
    assert fast[0].y == (4.0, 2.0, math.inf)
    assert (fast[0].low[1], fast[0].high[1]) == (1.0, 3.0)


def test_speed_is_drawn_over_the_noise(drawn):
    noisy, without = drawn["noise-speed"].panels[0][1]
    assert noisy.x == without.x == (0.0, 0.5, 2.0)
    assert noisy.y == (31.0, 31.0, 31.0)
    assert without.y == (math.inf,) * 3


def test_a_course_has_gaps_where_numbers_are_missing(drawn):
    lines = drawn["noise-shift"].panels[0][1]
    assert lines[0].x == (1, 2)
    assert lines[0].y[0] == 1.5
    assert all(math.isnan(line.y[1]) for line in lines)
    assert set(drawn) == {"noise-loss", "noise-speed", "noise-shift", "noise-gradient-change", "noise-smoothness"}
