"""Group F, the steps."""

from __future__ import annotations

import pytest

from normkit.inspection.rules.rule import NO_RUN, NotChecked
from normkit.inspection.rules.stepping import RULES
from watched_runs import calm, facts, parameter, series, training

PILED, UPHILL, STILL = RULES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_healthy_run_is_clean(rule):
    run = training(
        series("gradient left", [0.0] * 60),
        calm("update cosine", level=-0.3),
        calm("update ratio", level=1e-3),
    )
    assert rule.check(facts(run)) is None
    assert rule.check(facts(None)) is NO_RUN
    assert isinstance(rule.check(facts(training())), NotChecked)


@pytest.mark.parametrize(
    ("shares", "is_found"), [([1.0] * 9, True), ([1.0] * 5 + [0.0] * 30, False), ([1.0, 0.0], True)]
)
def test_gradients_that_pile_up(shares, is_found):
    found = PILED.check(facts(training(series("gradient left", shares), calm("gradient norm"))))
    assert (found is not None) == is_found
    if found is not None:
        assert f"not cleared in {len(shares) - 1} of {len(shares) - 1} step" in found.measured


def test_updates_that_go_up():
    found = UPHILL.check(facts(training(series("update cosine", [0.9] * 8 + [-0.1]), calm("loss"))))
    assert found.severity == "error"
    assert "between updates and gradients is 0.9" in found.measured
    assert isinstance(UPHILL.check(facts(training(series("update cosine", [0.9] * 7)))), NotChecked)


@pytest.mark.parametrize(
    ("measured", "dtype", "reason"),
    [
        (series("learning rate", [0.0] * 9), "float32", "the learning rate is 0"),
        (series("gradient kept", [1e-6] * 9), "float32", "clipping leaves 1e-06 of the gradient"),
        (calm("loss"), "bfloat16", "updates are lost in the rounding of 16-bit weights"),
        (calm("loss"), "float32", "the updates are too small beside the weights"),
    ],
)
def test_why_nothing_moves(measured, dtype, reason):
    run = training(series("update ratio", [0.0] * 9), measured, parameters=(parameter("w", dtype=dtype),))
    found = STILL.check(facts(run))
    assert found.measured == f"in 9 steps the median weight did not move at all: {reason}"
    slow = training(series("update ratio", [0.0] * 8 + [1e-9]), measured, parameters=run.parameters)
    assert "moved by at most 1e-09 of its length" in STILL.check(facts(slow)).measured
    # A schedule may end at 0.
    assert STILL.check(facts(training(series("update ratio", [1e-5] + [0.0] * 9)))) is None
