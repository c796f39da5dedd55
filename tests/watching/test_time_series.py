"""Series over the steps, and the alarm."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from normkit.measurement.history import height
from normkit.watching.time_series import _SKIPPED
from small_training import Run, Transformer

pytestmark = pytest.mark.slow


def told(losses: list[float | None]) -> Run:
    """A run whose watch is told of these losses."""
    left = iter(losses)

    def body(each: Run) -> None:
        each.loss(each.model, each.batch()).backward()
        each.watch.step(next(left))
        each.optimizer.step()
        each.optimizer.zero_grad()

    return Run(partial(Transformer, blocks=1), rate=1e-4).go(body=body, steps=len(losses), every=5)


def test_series_hold_each_step_or_each_report():
    run = Run().go(steps=7, every=3)
    training = run.watch.inspection().training
    assert training.of("loss")[0].steps == training.of("gradient norm")[0].steps == tuple(range(7))
    assert training.of("loss")[0].values == pytest.approx(run.losses, rel=1e-6)
    assert {each.steps for each in training.of("stream rms")} == {(0, 3, 6)}
    assert {each.steps for each in training.of("parameter gradient")} == {tuple(range(7))}


def test_the_headroom_of_each_norm_at_each_report():
    inspection = Run().go(steps=5, every=2).watch.inspection()
    series = inspection.training.of("headroom")
    assert [each.path for each in series] == [site.path for site in inspection.sites]
    assert {each.steps for each in series} == {(0, 2, 4)}
    # The last report's, of which the sites are made.
    assert [each.last for each in series] == pytest.approx([site.headroom_bits for site in inspection.sites])
    assert {value for each in series for value in each.values if not 100 < value < 128} == set()


def test_the_z_score_of_each_loss():
    losses = [2.0 + 0.01 * math.sin(step) for step in range(20)]
    training = told([*losses, math.inf, None, 9.0]).watch.inspection().training
    (series,) = training.of("loss z")
    # The first that has 16 before it, and of what is no finite number none.
    assert series.steps == (16, 17, 18, 19, 22)
    assert series.values[0] == pytest.approx(height("loss", losses[:16], losses[16]), rel=1e-5)
    assert series.last == pytest.approx(height("loss", losses, 9.0), rel=1e-5)


@pytest.mark.parametrize(
    ("last", "reason"), [(9.0, "a spike of the loss"), (2.3, ""), (math.inf, "an infinite loss"), (None, "")]
)
def test_an_alarm_is_raised_for_what_leaves_the_range(last: float | None, reason: str):
    run = told([2.0 + 0.01 * math.sin(step) for step in range(20)] + [last])
    training = run.watch.inspection().training
    assert training.reason == (reason or "asked")
    if reason:
        assert training.reason_step == 20
        assert any(f"step 20: {reason}" in line for line in run.said)


def test_the_first_alarm_stays():
    run = told([*[2.0] * 16, 9.0, 2.0, math.inf])
    training = run.watch.inspection().training
    assert (training.reason, training.reason_step) == ("a spike of the loss", 16)


def test_gradients_that_overflow_too_often_are_not_the_scalers_fault():
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)

    def body(each: Run) -> None:
        each.model.head.weight.grad = torch.full_like(each.model.head.weight, math.inf)
        each.watch.step(1.0)

    run.model(run.batch())
    run.go(body=body, steps=_SKIPPED + 1, scaler=scaler, batch=(run.batch(),))
    training = run.watch.inspection().training
    assert (training.reason, training.reason_step) == ("non-finite gradients", _SKIPPED - 1)
