"""Group F, the steps."""

from __future__ import annotations

import math

import pytest

from normkit.measurement.facts import Attenuation
from normkit.rules.rule import NO_RUN, NO_TRAINING, NotChecked
from normkit.rules.stepping import no_updates, not_orthogonal, small_inputs, uncleared_gradients, uphill_updates
from watched_runs import calm, facts, parameter, series, site, training


@pytest.mark.parametrize("rule", [uncleared_gradients, uphill_updates, no_updates], ids=lambda rule: rule.id)
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
    found = uncleared_gradients.check(facts(training(series("gradient left", shares), calm("gradient norm"))))
    assert (found is not None) == is_found
    if found is not None:
        assert f"not cleared in {len(shares) - 1} of {len(shares) - 1} step" in found.measured


def test_updates_that_go_up():
    found = uphill_updates.check(facts(training(series("update cosine", [0.9] * 8 + [-0.1]), calm("loss"))))
    assert found.severity == "error"
    assert "between updates and gradients is 0.9" in found.measured
    assert isinstance(uphill_updates.check(facts(training(series("update cosine", [0.9] * 7)))), NotChecked)


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
    found = no_updates.check(facts(run))
    assert found.measured == f"in 9 steps the median weight did not move at all: {reason}"
    slow = training(series("update ratio", [0.0] * 8 + [1e-9]), measured, parameters=run.parameters)
    assert "moved by at most 1e-09 of its length" in no_updates.check(facts(slow)).measured
    # A schedule may end at 0.
    assert no_updates.check(facts(training(series("update ratio", [1e-5] + [0.0] * 9)))) is None


def shrinking(first, last, below_90=0.0, median=0.99):
    attenuation = Attenuation(median=median, smallest=0.5, share_below_99=last, share_below_90=below_90)
    run = training(series("eps share", [first, last], "a", every=25), series("eps share", [0.0, 0.0], "b", every=25))
    return facts(run, sites=(site("a", attenuation=attenuation), site("b", order=1)))


def test_rows_that_shrink_towards_eps():
    outcome = small_inputs.check(shrinking(0.0, 0.3))
    assert (outcome.severity, outcome.sites) == ("warning", ("a",))
    assert "eps shortens 30 % of the rows" in outcome.evidence[0]
    assert small_inputs.check(shrinking(0.0, 0.005)) is None


def test_rows_that_started_short_are_a_note():
    assert small_inputs.check(shrinking(0.5, 0.4)).severity == "note"


def test_far_shorter_rows_are_left_to_the_rule_on_eps():
    # Without a config A1 reports rows that lose more than 10 %: one cause, one finding.
    assert small_inputs.check(shrinking(0.0, 0.3, below_90=0.05)) is None
    assert small_inputs.check(shrinking(0.0, 0.9, below_90=0.9, median=0.3)) is None


def test_without_a_run_or_a_norm_nothing_is_checked():
    assert small_inputs.check(facts(None)) is NO_TRAINING
    assert not_orthogonal.check(facts(None)) is NO_RUN
    assert isinstance(small_inputs.check(facts(training())), NotChecked)


def weight(cosine, is_scale_invariant=True):
    return facts(training(parameters=(parameter("w", cosine=cosine, is_scale_invariant=is_scale_invariant),)))


@pytest.mark.parametrize(("cosine", "is_hit"), [(1e-6, False), (-9e-3, False), (0.011, True), (-0.5, True)])
def test_a_weight_before_a_norm_is_orthogonal_to_its_gradient(cosine, is_hit):
    outcome = not_orthogonal.check(weight(cosine))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert (outcome.severity, outcome.sites) == ("warning", ("w",))
        assert f"cosine {cosine:.2g}" in outcome.measured


def test_other_weights_are_not_held_to_it():
    assert isinstance(not_orthogonal.check(weight(0.5, is_scale_invariant=False)), NotChecked)
    assert isinstance(not_orthogonal.check(weight(math.nan)), NotChecked)
