import math

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.study.corpus import next_token_loss
from normkit.study.training_run import (
    Point,
    Recipe,
    TrainingRun,
    build_optimizer,
    learning_rate,
    parameter_groups,
    train,
)
from study_runs import RECIPE, Model, batches, observe, state


def run_of(*losses):
    points = (
        Point(step=step, loss=loss, learning_rate=0.1, gradient_norm=1.0, observed={"odd": step} if step % 2 else {})
        for step, loss in enumerate(losses, start=1)
    )
    return TrainingRun(points=tuple(points))


def test_losses_are_capped_padded_and_averaged():
    done = run_of(3.0, 2.0, 1.5)
    assert (done.losses, done.diverged, done.observed("odd")) == ([3.0, 2.0, 1.5], False, [1, 3])
    assert run_of(9.0, 1.0, 2.0, 3.0).mean_of_last(2) == pytest.approx(2.5)
    assert run_of(2.0, 1.0).mean_of_last() == pytest.approx(1.5)
    assert run_of(4.0, 100.0, 2.0).mean_of_last(2) == pytest.approx(3.0)
    expected = {"losses": [3.0, None, None, None], "value": 1, "diverged": True, "findings": []}
    assert run_of(3.0, math.nan).measurement(4, value=1) == expected
    assert run_of(3.0, math.nan).measurement()["losses"] == [3.0, None]
    with pytest.raises(InputError, match="at least one step, got 0"):
        Recipe(steps=0, learning_rate=0.1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_counts_as_one_that_did_not_move(loss):
    done = run_of(3.0, 2.0, loss)
    assert (done.losses, done.mean_of_last(2), done.diverged) == ([3.0, 2.0, None], 3.0, True)
    assert [done.capped(value) for value in (1.0, 5.0, loss)] == [1.0, 3.0, 3.0]


def plain_training(model, recipe, supply):
    """The same run without the loop: what it must be to the last bit."""
    model.train()
    matrices = [model.mixing.weight]
    others = [p for p in model.parameters() if p is not model.mixing.weight]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(1, recipe.steps + 1):
        half_cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(step / recipe.warmup, 0.1 + 0.9 * half_cosine)
        loss = next_token_loss(model, next(supply))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_is_the_plain_one_bit_for_bit():
    plain, model = Model(), Model()
    torch.manual_seed(1)
    losses = plain_training(plain, RECIPE, batches())
    torch.manual_seed(1)
    points = train(model, RECIPE, batches(), next_token_loss, observe=observe)
    assert state(model) == state(plain)
    assert [point.loss for point in points] == losses
    assert [point.step for point in points] == list(range(1, RECIPE.steps + 1))
    assert [point.observed["odd"] for point in points[:3]] == [True, False, True]


@pytest.mark.parametrize(("clip", "moved"), [(1e-3, 1e-3), (None, 5.0)])
def test_a_gradient_is_told_before_it_is_clipped(clip, moved):
    recipe = Recipe(steps=1, learning_rate=0.1, final_rate=1.0, clip=clip, optimizer="sgd")
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.tensor([[3.0, 0.0, 4.0]])
    point = train(model, recipe, iter([(x,)]), lambda model, batch: model(*batch).sum())[0]
    assert point.gradient_norm == 5.0
    # Torch divides by the norm plus 1e-6.
    assert model.weight.norm().item() == pytest.approx(0.1 * moved, rel=1e-5)


def test_a_point_is_told_after_its_update():
    model = nn.Linear(1, 1)
    before, seen = model.weight.item(), []
    recipe = Recipe(steps=1, learning_rate=0.1, optimizer="sgd")
    train(
        model,
        recipe,
        iter([(torch.ones(1, 1),)]),
        lambda m, b: m(*b).sum(),
        report=lambda _: seen.append(model.weight.item()),
    )
    assert seen == [model.weight.item()]
    assert seen[0] != before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_without_an_update(value):
    model = nn.Linear(1, 1)
    factors = iter([1.0, value, 1.0])
    weights = []

    def loss(model, batch):
        weights.append(model.weight.item())
        return model(*batch).sum() * next(factors)

    points = train(model, Recipe(steps=3, learning_rate=0.1), iter([(torch.ones(1, 1),)] * 3), loss)
    assert [math.isfinite(point.loss) for point in points] == [True, False]
    assert model.weight.item() == weights[1]


def test_the_rate_of_a_step_and_the_groups_of_the_optimizer():
    recipe = Recipe(steps=100, learning_rate=2.0, warmup=10, final_rate=0.1)
    rates = [learning_rate(step, recipe) for step in range(1, 101)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[49] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert {learning_rate(step, Recipe(steps=9, learning_rate=3.0, final_rate=1.0)) for step in range(1, 10)} == {3.0}
    decayed, kept = parameter_groups(Model(), 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(12, 12)]
    # The tied embedding, the bias of the linear layer, gain and bias of two norms.
    assert len(kept["params"]) == 6
    optimizer = build_optimizer(Model(), Recipe(steps=1, learning_rate=0.1, optimizer="sgd"))
    assert isinstance(optimizer, torch.optim.SGD)
    assert {group["momentum"] for group in optimizer.param_groups} == {0}


def test_too_few_batches_are_one_line():
    with pytest.raises(InputError, match=r"^expected 30 batches, got 2; give more, or ask for fewer steps$"):
        train(Model(), RECIPE, iter([next(batches())] * 2), next_token_loss)
