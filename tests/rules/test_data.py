"""Group F, the data of a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from normkit.rules.data import RULES
from normkit.rules.rule import NO_RUN, NotChecked
from watched_runs import calm, facts, raised, series, training

RANGE, CONSTANT, REPEATED, LABELS = RULES
WELL = (
    series("batch digest", range(60)),
    *(calm("batch distinct", level=90.0), calm("batch rms"), calm("batch largest")),
    *(series("labels", [32.0] * 60), series("label spread", [9.0] * 60)),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_healthy_run_is_clean(rule):
    assert rule.check(facts(training(*WELL))) is None
    assert rule.check(facts(None)) is NO_RUN
    assert isinstance(rule.check(facts(training())), NotChecked)


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        (RANGE, raised(calm("batch largest"), at_20=math.nan)),
        (RANGE, raised(calm("batch rms"), at_20=1e4)),
        (CONSTANT, series("batch distinct", [90.0] * 20 + [1.0] * 40)),
        (REPEATED, series("batch digest", [*range(20), *[7] * 40])),
        (LABELS, series("labels copied", [0.0] * 20 + [1.0] * 40)),
    ],
)
def test_each_flaw_is_found_with_its_step(rule, flaw):
    found = rule.check(facts(training(*(each for each in WELL if each.quantity != flaw.quantity), flaw)))
    assert (found.severity, found.sites) == ("error", ())
    assert "step 20" in found.evidence[0]


def test_one_batch_for_good_is_a_note():
    found = REPEATED.check(facts(training(series("batch digest", [7] * 60))))
    assert (found.severity, found.measured) == ("note", "all 60 steps are on the same batch")


def test_an_inspection_on_one_token_again_and_again_says_so_first():
    seen = facts(None)
    same = replace(seen, model=replace(seen.model, distinct=1))
    found = CONSTANT.check(same)
    assert (found.severity, found.sites) == ("warning", ())
    assert found.measured == "all 100 tokens of the text are the same token"
    assert CONSTANT.check(replace(same, model=replace(same.model, tokens=1))) is NO_RUN
    assert CONSTANT.check(replace(same, model=replace(same.model, distinct=2))) is NO_RUN
