"""Where a run began to break."""

from __future__ import annotations

import math

import pytest
import torch

from normkit.watching.onset import origin
from watched_runs import VOCABULARY, Tiny, calm, parameter, raised, series, trained, training


@pytest.mark.slow
def test_a_healthy_run_has_no_origin():
    assert origin(trained(Tiny())) is None
    assert origin(training()) is None


@pytest.mark.slow
def test_a_bad_batch_begins_with_the_loss():
    def poisoned(step, targets):
        return torch.randint(VOCABULARY, targets.shape) if step == 110 else targets

    began = origin(trained(Tiny(), steps=120, break_at=poisoned))
    assert (began.kind, began.step, began.path) == ("loss", 110, "")


@pytest.mark.slow
def test_a_rate_that_is_too_high_begins_with_an_update():
    began = origin(trained(Tiny(), learning_rate=9e-2))
    assert (began.kind, began.step) == ("update", 0)
    assert "one step changed the median weight by" in began.detail


QUIET = (calm("loss"), calm("gradient norm"), calm("non-finite", "a", level=0.0), calm("non-finite", "b", level=0.0))


def broken(**at):
    """QUIET with NaN at a step of loss, norm, a, b: `broken(a=50, loss=50)`."""
    names = {"loss": 0, "norm": 1, "a": 2, "b": 3}
    found = list(QUIET)
    for name, step in at.items():
        place = names[name]
        found[place] = raised(found[place], **{f"at_{step}": math.nan if place < 2 else 65.0})
    return found


@pytest.mark.parametrize(
    ("at", "kind", "step", "path"),
    [
        ({"a": 50, "b": 50, "loss": 50, "norm": 50}, "non-finite in the forward pass", 50, "a"),
        ({"a": 51, "b": 50, "loss": 50, "norm": 50}, "non-finite in the forward pass", 50, "b"),
        ({"a": 51, "loss": 50, "norm": 50}, "non-finite loss", 50, ""),
        ({"a": 51, "loss": 51, "norm": 50}, "non-finite in the backward pass", 50, ""),
    ],
)
def test_the_first_value_that_is_not_finite(at, kind, step, path):
    began = origin(training(*broken(**at)))
    assert (began.kind, began.step, began.path) == (kind, step, path)


def test_a_sentinel_that_writes_nan_alone():
    began = origin(training(calm("loss"), series("non-finite", [math.nan], "b", first=41)))
    assert (began.kind, began.step, began.path) == ("non-finite in the forward pass", 41, "b")
    assert began.detail == "NaN or infinity in step 41, here first in forward order"


def test_the_way_back_begins_at_the_last_block():
    gradients = [
        raised(calm("activation gradient", "blocks.0"), at_50=math.nan),
        raised(calm("activation gradient", "blocks.1"), at_50=math.nan),
        calm("activation gradient", "blocks.2"),
        series("activation gradient", [math.nan] * 60, "blocks.3"),
    ]
    began = origin(training(calm("loss"), raised(calm("gradient norm"), at_50=math.nan), *gradients))
    assert (began.kind, began.path) == ("non-finite in the backward pass", "blocks.1")


def test_a_parameter_is_named_where_no_block_is():
    run = training(calm("loss"), raised(calm("parameter gradient", "w"), at_50=math.inf))
    assert origin(run).path == "w"


def test_a_frozen_block_has_no_gradient_and_that_is_no_fault():
    assert origin(training(calm("loss"), series("activation gradient", [math.nan] * 60, "blocks.0"))) is None


def test_a_rise_before_the_first_nan_is_its_cause():
    climbing = {f"at_{step}": 10.0 ** (step - 44) for step in range(45, 50)}
    run = training(*broken(a=50, loss=50), raised(calm("stream rms", "blocks.1"), **climbing))
    began = origin(run)
    assert (began.kind, began.step, began.path) == ("stream", 45, "blocks.1")
    assert began.detail.endswith("the first value that is not finite came in step 50 at a")


def test_a_rise_long_before_is_not():
    run = training(*broken(a=50), raised(calm("stream rms", "blocks.1"), at_17=50.0))
    assert origin(run).kind == "non-finite in the forward pass"


def test_an_old_blip_is_not_the_origin_where_a_later_step_explains_more():
    blip, rise = {"at_23": 4.0}, {"at_50": 40.0, "at_51": 40.0}
    run = training(raised(calm("loss"), **blip, **rise), series("learning rate", [1e-3] * 50 + [3e-2] * 10))
    began = origin(run)
    assert (began.kind, began.step) == ("learning rate", 50)
    assert origin(training(raised(calm("loss"), **blip))).step == 23


def test_the_update_that_moved_before_the_loss():
    run = training(
        raised(calm("loss"), at_50=5.0),
        raised(calm("gradient norm"), at_50=20.0),
        raised(calm("update ratio", "w", level=1e-3), at_48=0.02),
        parameters=(parameter("w"),),
    )
    began = origin(run)
    assert (began.kind, began.step, began.path) == ("update", 48, "w")
    assert began.detail.startswith("the update ratio rose from a usual 0.001 to 0.02 in step 48")


def test_a_spike_of_everything_at_once_is_the_batch():
    run = training(
        raised(calm("loss"), at_50=5.0),
        raised(calm("logit bound", "attention"), at_50=50.0),
        raised(calm("parameter gradient", "w"), at_50=50.0),
    )
    began = origin(run)
    assert (began.kind, began.path) == ("loss", "")


def test_an_update_that_was_too_large_comes_before_the_spike_it_leads_to():
    fast = series("update ratio", [0.01] * 8 + [0.3] * 4, "w", every=5)
    began = origin(training(raised(calm("loss"), at_50=5.0), fast, parameters=(parameter("w"),)))
    assert (began.kind, began.step, began.path) == ("update", 40, "w")


def test_an_attention_that_exploded_without_a_spike():
    logits = series("logit bound", [10.0, 100.0, 1001.0, 9000.0], "attention", every=5)
    began = origin(training(calm("loss"), calm("gradient norm"), logits))
    assert (began.kind, began.step, began.path) == ("attention logits", 10, "attention")
    assert origin(training(calm("loss"), series("logit bound", [999.0], "attention"))) is None


def test_a_gradient_that_jumps_alone():
    began = origin(training(calm("loss"), raised(calm("gradient norm"), at_50=30.0)))
    assert (began.kind, began.step, began.path) == ("gradient", 50, "")
