"""What a loop does with its gradients: clips them, hands them to an optimizer, or leaves the step out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normkit.watching.loop import describe_optimizers, learning_rates
from small_training import Run, Transformer, assert_same

pytestmark = pytest.mark.slow


def test_how_much_of_the_gradient_is_left():
    def clip(run: Run) -> None:
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 1.2)
        run.shares.append(min(1.0, 1.2 / float(norm)))

    def go(*, watched: bool) -> Run:
        run = Run()
        run.shares = []
        return run.go(watched=watched, body=lambda each: each.step(after_tell=clip), steps=6)

    plain, run = go(watched=False), go(watched=True)
    (kept,) = run.watch.inspection().training.of("gradient kept")
    assert kept.steps == tuple(range(6))
    # A sample of all gradients is cut as all of them are.
    assert kept.values == pytest.approx(run.shares, rel=1e-4)
    assert min(kept.values) < 0.99
    assert_same(plain, run)


def test_gradients_that_a_scaler_multiplied_are_not_clipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = Run().go(body=lambda run: run.step(scaler=scaler), scaler=scaler)
    (kept,) = run.watch.inspection().training.of("gradient kept")
    assert kept.values == pytest.approx([1.0] * 4, rel=1e-5)


def test_the_rate_of_each_step():
    def body(run: Run) -> None:
        run.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + len(run.losses))
        run.step()

    (rates,) = Run().go(body=body, steps=5, every=25).watch.inspection().training.of("learning rate")
    assert rates.values == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_step_that_no_optimizer_takes_is_left_out(is_taken: bool):
    def body(run: Run) -> None:
        loss = run.loss(run.model, run.batch())
        run.optimizer.zero_grad()
        loss.backward()
        is_bad = len(run.losses) < 3
        if is_bad:
            run.model.head.weight.grad[0, 0] = math.inf
        run.tell(loss)
        if is_taken or not is_bad:
            run.optimizer.step()

    run = Run(rate=1e-3).go(body=body, steps=6)
    inspection = run.watch.inspection()
    rules = {finding.rule: finding.severity for finding in inspection.findings}
    if is_taken:
        assert inspection.training.reason_step == 0
        assert rules["F5"] == rules["E3"] == "error"
    else:
        assert inspection.training.skipped == (0, 1, 2)
        assert inspection.training.origin is None
        assert (rules["F5"], rules.get("E3")) == ("note", None)


def test_every_step_and_token_is_counted():
    run = Run(rate=1e-3).go(steps=7, every=3)
    inspection = run.watch.inspection()
    assert (inspection.training.steps, inspection.model.tokens) == (7, 7 * run.batch()[:, :-1].numel())


def test_an_optimizer_keeps_no_hook():
    run = Run().go()
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks


def test_gradients_that_are_not_cleared():
    def body(run: Run) -> None:
        loss = run.loss(run.model, run.batch())
        loss.backward()
        run.tell(loss)
        run.optimizer.step()

    inspection = Run(rate=1e-4).go(body=body, steps=12).watch.inspection()
    assert inspection.findings[0].rule == "F23"
    assert not any("learning rate" in change for change in inspection.training.first_change)
    (left,) = Run(rate=1e-4).go(steps=12).watch.inspection().training.of("gradient left")
    assert set(left.values) == {0.0}


@pytest.mark.parametrize(("maximize", "cosine"), [(True, 1.0), (False, -1.0)])
def test_the_direction_of_updates(maximize: bool, cosine: float):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3, maximize=maximize)
    training = run.go(steps=9).watch.inspection().training
    assert training.of("update cosine")[0].values == pytest.approx([cosine] * 9, abs=1e-3)


@pytest.mark.parametrize(("rate", "dtype", "rule"), [(0.0, torch.float32, "F25"), (1e-4, torch.bfloat16, "B15")])
def test_updates_that_are_zero_or_rounded_away(rate: float, dtype: torch.dtype, rule: str):
    run = Run(lambda: Transformer().to(dtype), rate=rate)
    findings = run.go(steps=11, every=5).watch.inspection().findings
    finding = next(each for each in findings if each.rule in ("F25", "B8", "B15"))
    assert finding.rule == rule
    expected = "the learning rate is 0" if rate == 0 else "bfloat16 loses any change below"
    assert expected in finding.measured + finding.evidence[0]


def test_optimizers_are_described():
    weight = nn.Parameter(torch.ones(1500, 2))
    sgd = torch.optim.SGD([{"params": [weight], "lr": 0.25}], lr=1.0, weight_decay=0.125)
    peaks = learning_rates([sgd])
    assert describe_optimizers([sgd], peaks) == ("SGD: 3,000 parameters with rate 0.25, decay 0.125",)
    sgd.param_groups[0]["lr"] = 0.125
    assert describe_optimizers([sgd], peaks) == ("SGD: 3,000 parameters with rate up to 0.25, decay 0.125",)
    sgd.param_groups[0]["lr"] = None
    assert describe_optimizers([sgd], peaks) == ("SGD: 3,000 parameters with decay 0.125",)
