"""Group E, many processes: replicas that differ, an observer that is wrong."""

from __future__ import annotations

import pytest

from normkit.rules.replicas import RULES
from normkit.rules.rule import NO_RUN, NotChecked
from watched_runs import facts, parameter, training

REPLICAS, OBSERVER = RULES


def pooled(*parameters, observer="observer verified: 6 of 6 statistics within 1e-6 of float64", ranks=2):
    return facts(training(ranks=ranks, observer=observer, parameters=parameters))


def gain(**changes):
    return parameter("norm.weight", "gain", site="norm", **changes)


@pytest.mark.parametrize(
    ("dtype", "spread", "is_hit"),
    [("float32", 9e-7, False), ("float32", 2e-6, True), ("bfloat16", 9e-4, False), ("bfloat16", 2e-3, True)],
)
def test_replicas_that_drift(dtype, spread, is_hit):
    outcome = REPLICAS.check(pooled(parameter("w"), gain(dtype=dtype, rank_spread=spread)))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert (outcome.severity, outcome.sites) == ("error", ("norm",))
        assert outcome.measured.startswith("other numbers in some of 2 processes at 1 parameter")


def test_gradients_that_were_not_reduced():
    outcome = REPLICAS.check(pooled(parameter("w", rank_spread=1e-3), gain(gradient_rank_spread=0.3, rank_spread=1e-3)))
    assert outcome.sites == ("w", "norm")
    assert outcome.measured == "gradients of 1 parameter differ between 2 processes, by up to 0.3"
    # The norm's line comes first: its gradient is the cause.
    assert outcome.evidence[0] == (
        "norm.weight (gain): its gradient differs by 0.3 before the optimizer's step, and it differs by 0.001 itself"
    )


def test_an_observer_that_failed():
    assert OBSERVER.check(pooled()) is None
    outcome = OBSERVER.check(pooled(observer="observer failed: variance 3.10, should be 3.19"))
    assert (outcome.severity, outcome.measured) == ("error", "observer failed: variance 3.10, should be 3.19")


def test_one_process_is_not_checked():
    for rule in RULES:
        assert rule.check(facts(None)) is NO_RUN
        assert isinstance(rule.check(pooled(gain(rank_spread=1.0), observer="", ranks=1)), NotChecked)
