"""The part of a batch on which a model is surveyed, and what the survey leaves as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from normkit.watching.surveying import Arguments, describe_optimizers, insensitive, planned, surveyed, unwrapped
from normkit.watching.watcher import watch
from small_training import Transformer, fingerprint


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> None:
    """Here they are examined whenever a survey does."""


def test_a_batch_of_tokens_is_cut_to_two_rows_of_sixteen():
    tokens, mask = torch.arange(120).view(4, 30), torch.zeros(4, 30, dtype=torch.long)
    given = Arguments(
        args=(tokens, 3), kwargs={"attention_mask": mask, "labels": torch.zeros(4), "scale": torch.ones(2)}
    )
    small = given.shortened()
    assert small.args[0].equal(tokens[:2, :16])
    assert small.args[1] == 3
    # What the mask lets through in the first tokens may be nothing.
    assert small.kwargs["attention_mask"].equal(torch.ones(2, 16, dtype=torch.long))
    assert small.kwargs["labels"].shape == (2,)
    assert small.kwargs["scale"].shape == (2,)


def test_images_and_calls_without_tensors_are_cut_to_rows_or_not_at_all():
    images = torch.randn(5, 3, 20, 20)
    assert Arguments(args=(images,), kwargs={}).shortened().args[0].shape == (2, 3, 20, 20)
    assert Arguments(args=(1, "a"), kwargs={}).shortened().args == (1, "a")


@pytest.mark.parametrize(
    "wrap", [DataParallel, lambda model: torch.compile(model, backend="eager"), lambda model: model]
)
def test_wrappers_are_taken_off(wrap: Any):
    model = nn.Linear(2, 2)
    assert unwrapped(wrap(model)) is model


@pytest.mark.slow
def test_a_survey_leaves_model_and_random_numbers_as_they_were():
    model = Transformer().train()
    model.blocks[0].eval()
    before, state, numbers = fingerprint(model), torch.get_rng_state(), random.getstate()
    arguments = Arguments(args=(torch.zeros(2, 9, dtype=torch.long),), kwargs={})
    structure = surveyed(model, arguments)
    assert fingerprint(model) == before
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == numbers
    plan = planned(structure)
    assert [site.path for site in plan.sites][:4] == [
        "blocks.0.norm_1",
        "blocks.0.attention:rms_norm",
        "blocks.0.attention:rms_norm#2",
        "blocks.0.norm_2",
    ]
    assert [(each.parent, each.heads, each.head_dim) for each in plan.attentions] == [
        ("blocks.0.attention", 2, 8),
        ("blocks.1.attention", 2, 8),
    ]
    assert plan.hooked == 5 + 2
    order = [plan.sentinels[place] for place in plan.forward_order]
    assert order.index("blocks.0") == order.index("blocks.0.norm_2") + 1
    assert order[-1] == "norm"


@pytest.mark.slow
def test_calls_inside_a_norm_are_not_those_of_the_module_around_it():
    """A module that normalizes queries calls the same function as the attention does for its keys."""
    model = Transformer(in_modules=True)
    structure = surveyed(model, Arguments(args=(torch.zeros(2, 9, dtype=torch.long),), kwargs={}))
    plan = planned(structure)
    assert "blocks.0.attention:rms_norm" in [site.path for site in plan.sites]
    assert {"blocks.0.attention", "blocks.0.attention.q_norm"} <= set(plan.callers)


@pytest.mark.slow
@pytest.mark.parametrize("given", [lambda x: {"input": x}, lambda x: {"input": x, "args": [x]}])
def test_the_graph_that_an_input_comes_with_is_left_to_the_training(given: Callable[[torch.Tensor], dict[str, Any]]):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # The loop calls it, and gives the model what comes of it.
            self.embedding = nn.Linear(6, 6)
            self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 6))

        def forward(self, input: torch.Tensor, args: Any = None) -> torch.Tensor:
            y: torch.Tensor = self.body(input if args is None else args[0])
            return y

    model = Model()
    with watch(model, say=lambda _: None) as run:
        model(**given(model.embedding(torch.randn(4, 6)).tanh())).square().sum().backward()
        run.step()
    assert model.embedding.weight.grad is not None


def test_autocast_does_not_hide_that_a_weight_is_doubled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())
    call = Arguments(args=(torch.randn(2, 5, 16),), kwargs={})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The casts that a first call leaves are those of the weights as they are.
        model(*call.args)
        assert insensitive(model, call) == {"0.weight"}
        assert torch.is_autocast_cache_enabled()


def test_optimizers_are_described():
    weight = nn.Parameter(torch.ones(1500, 2))
    sgd = torch.optim.SGD([{"params": [weight], "lr": 0.25}], lr=1.0, weight_decay=0.125)
    assert describe_optimizers([sgd]) == ("SGD: 3,000 parameters with rate 0.25, decay 0.125",)
    sgd.param_groups[0]["lr"] = None
    assert describe_optimizers([sgd]) == ("SGD: 3,000 parameters with decay 0.125",)
