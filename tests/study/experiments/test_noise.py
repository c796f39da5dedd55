import math

import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.noise import STUDY, fewest_steps, nets, sufficient_noise
from tiny_study import decided_claim, judged_condition

TINY = {**STUDY.quick, "layers": 2, "width": 8, "steps": 12, "rates": (0.1,), "noises": (0.5, 2.0), "probe": 32}


def net(steps, shift, *, change=0.5, smoothness=5.0):
    return {
        "steps_to": steps,
        "losses": [1.0],
        # The last observation is below the loss that is to be reached and counts for nothing.
        "at": [1, 11],
        "loss_at": [2.0, 0.1],
        "shift": [shift, 100.0],
        "gradient_change": [change, 100.0],
        "smoothness": [smoothness, 100.0],
        "error": 30.0,
        "training_mode_error": 10.0,
    }


def as_claimed():
    return {
        "BatchNorm, rate 0.1": net(30, 0.01),
        "BatchNorm, rate 0.3": net(20, math.nan),
        "noise 0.5, rate 0.1": net(24, 0.4),
        "noise 1, rate 0.1": net(28, 0.8),
        "noise 1, rate 0.3": net(None, math.nan),
        "noise 2, rate 0.1": net(45, 1.6),
        "LayerNorm, rate 0.1": net(30, 0.02),
        "no norm, rate 0.1": net(60, 0.6, change=1.0, smoothness=20.0),
        "no norm, rate 0.3": net(None, math.nan),
    }


def verdicts(measured):
    decided = [decided_claim(claim, dict.fromkeys(range(3), measured)) for claim in STUDY.claims]
    return [(each.verdict, each.only_if) for each in decided]


def test_verdicts_where_all_is_as_claimed_and_where_nothing_was_run():
    assert verdicts(as_claimed()) == [("reproduced", "")] * 5
    assert {verdict for verdict, _ in verdicts({})} == {"not run"}
    judged = judged_condition(STUDY.claims[2].conditions[0], {0: {**as_claimed(), "no norm, rate 0.1": net(None, 0.6)}})
    assert judged.middle == math.inf
    assert judged.holds


@pytest.mark.parametrize(
    ("place", "arm", "new", "verdict"),
    [
        (0, "BatchNorm, rate 0.1", net(20, 0.01, change=0.9), "reproduced only if"),
        (0, "BatchNorm, rate 0.1", net(20, 0.9, change=0.9), "not reproduced"),
        (2, "noise 1, rate 0.1", net(58, 0.8), "reproduced only if"),
        (2, "noise 0.5, rate 0.1", net(59, 0.4), "reproduced only if"),
        (2, "no norm, rate 0.1", net(23, 0.6), "not reproduced"),
        (3, "noise 1, rate 0.1", net(32, 0.8), "reproduced only if"),
        (3, "noise 0.5, rate 0.1", net(32, 0.7), "not reproduced"),
        (4, "no norm, rate 0.1", net(60, 0.6, smoothness=4.0), "not reproduced"),
    ],
)
def test_a_claim_falls_with_its_conditions(place, arm, new, verdict):
    assert verdicts({**as_claimed(), arm: new})[place][0] == verdict


def test_the_least_noise_that_shifts_enough_is_taken():
    measured = as_claimed()
    assert sufficient_noise(measured) == "noise 1"
    assert sufficient_noise({**measured, "noise 0.5, rate 0.1": net(24, 0.61)}) == "noise 0.5"
    measured = {**as_claimed(), "no norm, rate 0.1": net(60, 9.0)}
    with pytest.raises(KeyError, match="large enough"):
        sufficient_noise(measured)
    assert verdicts(measured)[2][0] == "undecided"


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.1,), (0.5,)])
def test_nets_are_observed_at_one_rate_which_is_always_there(rates):
    arms = STUDY.arms({**TINY, "rates": rates})
    assert len(arms) == 5 * len({*rates, 0.1})
    assert len({arm.name for arm in arms}) == len(arms)
    observed, *others = (
        STUDY.measure(ArmContext(settings={**TINY, "rates": rates}, seed=0), arm)
        for arm in arms
        if arm.name.startswith("noise 2, ")
    )
    assert observed["at"] == [1, 11]
    assert len(observed["shift"]) == len(observed["loss_at"]) == 2
    assert all(other["at"] == [] for other in others)


@pytest.mark.slow
def test_arms_start_from_the_same_weights_and_see_the_same_batches():
    lab = ArmContext(settings={**TINY, "steps": 1}, seed=0)
    first = {arm.name: STUDY.measure(lab, arm)["losses"][0] for arm in STUDY.arms(TINY)}
    again = {arm.name: STUDY.measure(lab, arm)["losses"][0] for arm in STUDY.arms(TINY)}
    assert first == again
    assert len(set(first.values())) == len(first)


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on_with_the_same_noise(tmp_path):
    arm = next(arm for arm in STUDY.arms(TINY) if arm.name.startswith("noise 2"))
    told = []

    def stop(share):
        told.append(share)
        if len(told) == 7:
            raise InterruptedError

    whole = STUDY.measure(ArmContext(settings=TINY, seed=0), arm)
    with pytest.raises(InterruptedError):
        STUDY.measure(ArmContext(settings=TINY, seed=0, checkpoints=tmp_path, checkpoint_seconds=0, report=stop), arm)
    assert list(tmp_path.iterdir())
    told.clear()
    context = ArmContext(settings=TINY, seed=0, checkpoints=tmp_path, checkpoint_seconds=0, report=told.append)
    assert STUDY.measure(context, arm) == whole
    assert len(told) < TINY["steps"]


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
    return {chart.name: chart for chart in STUDY.charts(SETTINGS, [of_seed(seed) for seed in range(3)])}


def test_nets_follow_the_settings_and_their_best_rate_counts():
    assert nets(SETTINGS) == ("BatchNorm", "noise 0.5", "noise 2", "LayerNorm", "no norm")
    assert fewest_steps(of_seed(0), "BatchNorm") == 30
    assert fewest_steps(of_seed(0), "no norm") == math.inf
    with pytest.raises(KeyError):
        fewest_steps({}, "BatchNorm")


def test_charts_show_losses_speed_and_courses(drawn):
    panels = drawn["noise-loss"].panels
    assert [title for title, _ in panels] == ["learning rate 0.1", "learning rate 0.3"]
    (_, slow), (_, fast) = panels
    assert slow[0].y == (4.0, 2.0, 4.0)
    assert fast[0].y == (4.0, 2.0, math.inf)
    assert (fast[0].low[1], fast[0].high[1]) == (1.0, 3.0)
    noisy, without = drawn["noise-speed"].panels[0][1]
    assert noisy.x == without.x == (0.0, 0.5, 2.0)
    assert noisy.y == (31.0, 31.0, 31.0)
    assert without.y == (math.inf,) * 3
    lines = drawn["noise-shift"].panels[0][1]
    assert lines[0].x == (1, 2)
    assert lines[0].y[0] == 1.5
    assert all(math.isnan(line.y[1]) for line in lines)
    assert set(drawn) == {"noise-loss", "noise-speed", "noise-shift", "noise-gradient-change", "noise-smoothness"}
