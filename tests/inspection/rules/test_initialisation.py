"""Group F, the start: what the first step says of the initialisation."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.inspection.rules.initialisation import RULES, start_of
from normkit.inspection.rules.rule import NO_TRAINING, NotChecked
from watched_runs import VOCABULARY, Tiny, calm, facts, parameter, series, trained, training

(START,) = RULES
UNIFORM = math.log(VOCABULARY)


def test_a_real_start_and_one_ten_times_as_large():
    assert START.check(facts(trained(Tiny(), steps=2))) is None
    model = Tiny()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor *= 30
    outcome = START.check(facts(trained(model, steps=2)))
    assert outcome.severity == "error"
    assert f"one that guesses all {VOCABULARY} entries alike has {UNIFORM:.3g}" in outcome.evidence[0]


@pytest.mark.parametrize(("ratio", "severity"), [(1.0, None), (1.2, None), (1.3, "warning"), (2.1, "error")])
def test_how_large_the_first_loss_is(ratio, severity):
    outcome = START.check(facts(training(series("loss", [ratio * UNIFORM, 1.0]))))
    assert (None if outcome is None else outcome.severity) == severity


def test_large_logits_of_an_untrained_model():
    logits = series("logit bound", [440.0], "attention")
    outcome = START.check(facts(training(series("loss", [UNIFORM]), logits)))
    assert (outcome.severity, outcome.sites) == ("warning", ("attention",))
    # A trained one, which is trained on, may have them.
    assert START.check(facts(training(series("loss", [0.5 * UNIFORM]), logits))) is None


def test_steep_gradients_of_an_untrained_model():
    steep = [series("activation gradient", [value], f"blocks.{place}") for place, value in enumerate((1e-4, 1e-2))]
    outcome = START.check(facts(training(series("loss", [UNIFORM]), *steep)))
    assert outcome.severity == "warning"
    assert outcome.evidence == ("the first gradient is 100 times as large behind the last block as behind the first",)


def test_a_start_that_was_not_seen_is_not_checked():
    assert START.check(facts(None)) is NO_TRAINING
    assert isinstance(START.check(facts(training(calm("loss"), vocabulary=0))), NotChecked)
    assert isinstance(START.check(facts(training(series("loss", [9 * UNIFORM], first=1)))), NotChecked)
    assert isinstance(START.check(facts(training(series("loss", [math.nan])))), NotChecked)


def test_a_summed_loss_is_not_judged():
    assert isinstance(START.check(facts(training(series("loss", [512 * UNIFORM])))), NotChecked)


@pytest.mark.parametrize(("spread", "mean", "is_fresh"), [(0.1, 0.4, False), (0.0, 1.0, True), (0.02, 0.002, True)])
def test_a_loss_above_chance_of_trained_weights_is_no_initialisation(spread, mean, is_fresh):
    gain = parameter("norm.weight", "gain", site="norm", first_spread=spread)
    measured = series("loss", [3 * UNIFORM]), series("gain mean", [mean], "norm")
    outcome = START.check(facts(training(*measured, parameters=(gain,))))
    assert isinstance(outcome, NotChecked) != is_fresh


def test_the_start_of_a_series():
    assert start_of(training(series("loss", [3.0, 2.0])), "loss") == 3.0
    assert math.isnan(start_of(training(series("loss", [3.0], first=4)), "loss"))
