"""Group F, the run: spikes, gradients at its end, the optimizer's eps, updates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit.rules.optimizer_steps import RULES, dominant_optimizer_eps, large_updates, rising_gradient, spikes
from normkit.rules.precision import out_of_range
from normkit.rules.rule import NO_RUN, NO_TRAINING, NotChecked
from normkit.watching.onset import origin
from watched_runs import VOCABULARY, Tiny, calm, facts, parameter, raised, series, trained, training


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_without_a_run_nothing_is_checked(rule):
    # One step shows whether the loss is finite, and nothing of the others.
    assert rule.check(facts(None)) is (NO_TRAINING if rule is spikes else NO_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_healthy_run_is_clean(rule):
    outcome = rule.check(facts(trained(Tiny())))
    assert outcome is None or isinstance(outcome, NotChecked)


@pytest.mark.slow
def test_a_bad_batch_is_a_spike():
    def poisoned(step, targets):
        return torch.randint(VOCABULARY, targets.shape) if step == 110 else targets

    outcome = spikes.check(facts(trained(Tiny(), steps=120, break_at=poisoned)))
    assert outcome.severity == "warning"
    assert "in step 110" in outcome.measured


def test_what_moved_first_is_named():
    run = training(
        raised(calm("loss"), at_50=5.0),
        raised(calm("gradient norm"), at_50=20.0),
        raised(calm("update ratio", "layers.1.weight", level=1e-3), at_48=0.02),
    )
    outcome = spikes.check(facts(run))
    assert (outcome.severity, outcome.sites) == ("warning", ("layers.1.weight",))
    assert outcome.evidence[0].startswith("first to move: update ratio of layers.1.weight 0.02 in step 48")


def test_a_spike_that_stays_is_an_error():
    def lifted(steps):
        return training(raised(calm("loss"), **{f"at_{40 + step}": 4.0 for step in range(steps)}))

    assert spikes.check(facts(lifted(7))).severity == "warning"
    assert spikes.check(facts(lifted(8))).severity == "error"


def test_a_gradient_alone_can_spike():
    outcome = spikes.check(facts(training(calm("loss"), raised(calm("gradient norm"), at_50=20.0))))
    assert outcome.measured.startswith("1 spike, the largest: gradient norm 20 in step 50")
    assert outcome.sites == ()


def test_a_loss_that_is_not_finite():
    outcome = spikes.check(facts(training(raised(calm("loss"), at_58=math.nan, at_59=math.inf), calm("gradient norm"))))
    assert outcome.severity == "error"
    assert outcome.measured == "the loss is NaN or infinite in 2 steps, first in step 58"


def test_skipped_steps_of_a_loss_scaler_are_a_note():
    def verdicts(**changes):
        run = training(calm("loss"), raised(calm("gradient norm"), **changes))
        run = replace(run, origin=origin(run))
        return [rule.check(facts(run)).severity for rule in (spikes, out_of_range)]

    assert verdicts(at_0=math.inf, at_30=math.nan) == ["note", "note"]
    assert verdicts(**{f"at_{step}": math.inf for step in range(8)}) == ["note", "note"]
    assert verdicts(at_59=math.nan) == ["error", "error"]


def late(rise=2.0, slow=0.25, loss=1.0, steps=160):
    """A schedule's end: the last eighth has this gradient norm, these updates and this loss, relative to before."""
    start = steps - steps // 8
    norms = [rise if step >= start else 1.0 for step in range(steps)]
    losses = [loss if step >= start else 1.0 for step in range(steps)]
    speeds = [1e-2 * (slow if step >= start else 1.0) for step in range(0, steps, 5)]
    return training(
        series("loss", losses),
        series("gradient norm", norms),
        series("update ratio", speeds, "a", every=5),
        parameters=(parameter("a"),),
    )


def test_gradients_that_rise_as_the_rate_falls_are_expected():
    outcome = rising_gradient.check(facts(late()))
    assert outcome.severity == "note"
    assert outcome.measured == "the gradient norm rose 2 times, the updates shrank 4 times"


@pytest.mark.parametrize("changes", [{"rise": 1.4}, {"slow": 0.6}, {"loss": 1.1}])
def test_other_gradients_are_not(changes):
    assert rising_gradient.check(facts(late(**changes))) is None


def test_a_short_run_has_no_late_part():
    assert isinstance(rising_gradient.check(facts(late(steps=100))), NotChecked)


def with_shares(*shares, **changes):
    parameters = [parameter(f"layer.{index}", optimizer_eps_share=v, **changes) for index, v in enumerate(shares)]
    return facts(training(parameters=tuple(parameters)))


def test_an_eps_that_drowns_gradients():
    outcome = dominant_optimizer_eps.check(with_shares(0.0, 0.1, 0.9, 0.3))
    assert (outcome.severity, outcome.sites) == ("warning", ("layer.2", "layer.3"))
    assert "90 % of its elements" in outcome.evidence[0]
    assert dominant_optimizer_eps.check(with_shares(0.0, 0.1, 0.9, 0.19)) is None
    assert dominant_optimizer_eps.check(with_shares(0.2, 0.2, 0.2, 0.2)) is None


@pytest.mark.parametrize("changes", [{"kind": "bias"}, {"kind": "embedding"}, {"gradient_steps": 15}])
def test_biases_embeddings_and_first_steps_have_small_gradients(changes):
    assert isinstance(dominant_optimizer_eps.check(with_shares(1.0, 1.0, **changes)), NotChecked)


def test_an_optimizer_without_eps_is_not_checked():
    assert isinstance(dominant_optimizer_eps.check(with_shares(math.nan)), NotChecked)


def test_thirty_times_the_learning_rate():
    outcome = large_updates.check(facts(trained(Tiny(), learning_rate=9e-2)))
    assert outcome.severity == "error"
    assert "times the limit of" in outcome.measured


def with_ratios(*ratios):
    return facts(training(series("update ratio", ratios, "a", every=5), parameters=(parameter("a"),)))


def test_how_bad_an_update_is():
    assert large_updates.check(with_ratios(*[0.01] * 9)) is None
    assert large_updates.check(with_ratios(*[0.01] * 9, 0.06)) is None
    often = large_updates.check(with_ratios(*[0.01] * 9, *[0.05] * 3, 0.06))
    assert (often.severity, often.sites) == ("warning", ("a",))
    assert often.measured == "step 60 changed the median weight by 6 %, 1.3 times the limit of 4.5 %"
    assert often.evidence[0] == "step 60 changed the median weight by 6 %, a by 6 %"
    assert often.evidence[1] == "4 of 13 measured steps past a limit, the first of them step 45"
    assert large_updates.check(with_ratios(0.17, *[0.01] * 9)).severity == "warning"
    assert large_updates.check(with_ratios(*[0.01] * 9, 0.6)).severity == "error"
    assert large_updates.check(with_ratios(*[0.01] * 4, *[0.06] * 6)).severity == "error"


def test_first_steps_of_adam_are_borne_where_the_loss_falls():
    def outcome(optimizer="AdamW", fallen=0.5, ratios=(*[0.06] * 6, *[0.01] * 9)):
        loss = series("loss", [2.0 - (2.0 - 2.0 * fallen) * step / 14 for step in range(15)])
        updates = series("update ratio", ratios, "a")
        return large_updates.check(
            facts(training(loss, updates, parameters=(parameter("a"),), optimizers=(f"{optimizer}: 5 parameters",)))
        )

    assert outcome() is None
    assert outcome("SGD").severity == outcome(fallen=1.0).severity == "warning"
    # Later steps, and one that is four times too large, count as before.
    assert outcome(ratios=(*[0.01] * 10, *[0.06] * 5)).severity == "warning"
    assert outcome(ratios=(0.2, *[0.01] * 14)).severity == "warning"


def test_the_group_of_parameters_is_named():
    def measured(*groups):
        ratios = {"a": 0.01, "b": 0.5, "c": 0.3, "d": 0.01}
        parameters = [
            parameter(path, group=group, learning_rate=0.03 if group else 1e-3)
            for path, group in zip(ratios, groups, strict=True)
        ]
        updates = [series("update ratio", [ratio] * 9, path, every=5) for path, ratio in ratios.items()]
        return large_updates.check(facts(training(*updates, parameters=tuple(parameters))))

    assert measured(0, 1, 1, 0).measured.endswith("; group 2 of 2, lr 0.03, 2 parameters")
    assert measured(0, 1, 1, 0).evidence[2].startswith("group 2 of 2, lr 0.03, 2 parameters: nearly all that is past")
    assert "group" not in measured(0, 0, 1, 1).measured
    assert "group" not in measured(0, 0, 0, 0).measured


def test_updates_that_were_not_measured_are_not_checked():
    assert isinstance(large_updates.check(facts(training())), NotChecked)
