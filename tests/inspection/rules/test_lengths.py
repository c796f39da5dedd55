"""Group F, lengths: inputs that shrink towards eps, weights whose length should not matter."""

from __future__ import annotations

import math

import pytest

from normkit.inspection.result import Attenuation
from normkit.inspection.rules.lengths import RULES
from normkit.inspection.rules.rule import NO_RUN, NO_TRAINING, NotChecked
from watched_runs import facts, parameter, series, site, training

SMALL, ORTHOGONAL = RULES


def shrinking(first, last, below_90=0.0, median=0.99):
    attenuation = Attenuation(median=median, smallest=0.5, share_below_99=last, share_below_90=below_90)
    run = training(series("eps share", [first, last], "a", every=25), series("eps share", [0.0, 0.0], "b", every=25))
    return facts(run, sites=(site("a", attenuation=attenuation), site("b", order=1)))


def test_rows_that_shrink_towards_eps():
    outcome = SMALL.check(shrinking(0.0, 0.3))
    assert (outcome.severity, outcome.sites) == ("warning", ("a",))
    assert "eps shortens 30 % of the rows" in outcome.evidence[0]
    assert SMALL.check(shrinking(0.0, 0.005)) is None


def test_rows_that_started_short_are_a_note():
    assert SMALL.check(shrinking(0.5, 0.4)).severity == "note"


def test_far_shorter_rows_are_left_to_the_rule_on_eps():
    # Without a config A1 reports rows that lose more than 10 %: one cause, one finding.
    assert SMALL.check(shrinking(0.0, 0.3, below_90=0.05)) is None
    assert SMALL.check(shrinking(0.0, 0.9, below_90=0.9, median=0.3)) is None


def test_without_a_run_or_a_norm_nothing_is_checked():
    assert SMALL.check(facts(None)) is NO_TRAINING
    assert ORTHOGONAL.check(facts(None)) is NO_RUN
    assert isinstance(SMALL.check(facts(training())), NotChecked)


def weight(cosine, is_scale_invariant=True):
    return facts(training(parameters=(parameter("w", cosine=cosine, is_scale_invariant=is_scale_invariant),)))


@pytest.mark.parametrize(("cosine", "is_hit"), [(1e-6, False), (-9e-3, False), (0.011, True), (-0.5, True)])
def test_a_weight_before_a_norm_is_orthogonal_to_its_gradient(cosine, is_hit):
    outcome = ORTHOGONAL.check(weight(cosine))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert (outcome.severity, outcome.sites) == ("warning", ("w",))
        assert f"cosine {cosine:.2g}" in outcome.measured


def test_other_weights_are_not_held_to_it():
    assert isinstance(ORTHOGONAL.check(weight(0.5, is_scale_invariant=False)), NotChecked)
    assert isinstance(ORTHOGONAL.check(weight(math.nan)), NotChecked)
