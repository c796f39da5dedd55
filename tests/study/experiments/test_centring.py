import math

import pytest

from normkit.study.experiments.centring import STUDY
from normkit.study.judging import decide

NAMES = [arm.name for arm in STUDY.arms(STUDY.quick)]


def one_seed(losses=(), update=1.0, gradients=1e-15, stream=1.0):
    """Every arm alike, but for the held-out losses that are named; shares are in units of chance."""
    return {
        name: {
            "held_out": dict(losses).get(name, 2.0),
            "chance": 0.25,
            "at": [0, 5],
            "changes": [0.25, 0.2],
            "gradients": [0.0, gradients],
            "update": 0.25 * update,
            "stream_end": 0.25 * stream,
        }
        for name in NAMES
    }


def verdict(words, **measured):
    (claim,) = (claim for claim in STUDY.claims if words in claim.says)
    decided = decide(claim, {seed: one_seed(**measured) for seed in range(3)})
    return decided.verdict, decided.only_if


@pytest.mark.parametrize(
    ("words", "measured", "expected"),
    [
        ("dispensable", {}, "reproduced"),
        ("dispensable", {"losses": {"RMSNorm, deep": 2.06}}, "not reproduced"),
        ("dispensable", {"losses": {"RMSNorm": 1.94}}, "not reproduced"),
        ("no special direction", {"losses": {"16 directions": 2.04}}, "reproduced"),
        ("no special direction", {"losses": {"own hyperplanes": 2.06}}, "not reproduced"),
        ("scale matters", {}, "not reproduced"),
        ("scale matters", {"losses": {"centring only": 2.3, "centring only, deep": 9.0}}, "reproduced"),
        ("drift", {"update": 1.1}, "not reproduced"),
        ("drift", {"update": 2.5}, "reproduced"),
        ("takes all gradient", {"update": 0.1}, "reproduced"),
        ("takes all gradient", {"update": 0.1, "gradients": 1e-3}, "not reproduced"),
        ("takes all gradient", {"update": 0.9}, "not reproduced"),
        ("orthogonal", {}, "reproduced"),
        ("orthogonal", {"stream": 6.0}, "not reproduced"),
    ],
)
def test_verdicts(words, measured, expected):
    assert verdict(words, **measured) == (expected, "")


def test_scale_may_matter_in_deep_models_only():
    assert verdict("scale matters", losses={"centring only, deep": 9.0}) == (
        "reproduced only if",
        "the model is deep",
    )


def test_charts_show_every_arm_and_the_drift():
    shallow, deep, changes, gradients = STUDY.charts(STUDY.quick, {0: one_seed(), 1: one_seed()})
    assert [name for name, _ in shallow.values + deep.values] == NAMES
    for chart in (changes, gradients):
        ((_, lines),) = chart.panels
        assert [line.label for line in lines] == ["LayerNorm", "RMSNorm", "hyperplane"]
        assert chart.reference == (1 / 64, "chance, 1/n")
    assert changes.panels[0][1][0].y == (0.25, 0.2)


def test_charts_hold_runs_that_diverged():
    seed = one_seed(losses={"centring only, deep": None})
    seed["hyperplane"]["gradients"] = [0.1, None]
    _, deep, _, gradients = STUDY.charts(STUDY.quick, {0: seed})
    assert deep.values[-1] == ("centring only, deep", (math.inf,))
    assert gradients.panels[0][1][-1].y == (0.1, math.inf)
