import json

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.inspection.inspecting import inspect
from normkit.study.loop import Recipe, train
from normkit.study.norms import BatchNorm
from normkit.study.probing import findings
from normkit.study.transformer import Transformer, TransformerConfig
from normkit.study.windows import next_token_loss
from study_runs import Model, batches

pytestmark = pytest.mark.slow


def build(**choices):
    return Transformer(TransformerConfig(vocabulary=128, context=8, width=16, heads=2, **choices), seed=0)


def test_they_are_those_of_inspect_as_a_user_calls_it():
    model = build(layers=4)
    with torch.no_grad():
        model.blocks[2].attention.branch.query.weight.mul_(200)
        model.blocks[2].attention.branch.key.weight.mul_(200)
    (ids,) = next(batches())
    found = findings(model, (ids,), next_token_loss)
    expected = inspect(model, {"ids": ids[:, :-1]}).findings
    assert [(each["rule"], each["severity"], each["title"], tuple(each["sites"])) for each in found] == [
        (each.rule, each.severity, each.title, each.sites) for each in expected
    ]
    assert any("blocks.2.attention.branch" in each["sites"] for each in found)
    assert json.loads(json.dumps(found)) == list(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["pre", "post", "peri", "output"])
def test_a_healthy_model_has_no_finding_before_and_after_training(placement):
    model = build(layers=3, placement=placement)
    supply = batches()
    held_out = next(supply)
    assert findings(model, held_out, next_token_loss) == ()
    train(model, Recipe(steps=20, learning_rate=3e-3, warmup=5), supply, next_token_loss)
    assert findings(model, held_out, next_token_loss) == ()


def test_a_model_is_left_as_it_was():
    # Its batch norm would move its statistics in training mode.
    model = Model().train()
    model.final_norm.eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    findings(model, next(batches()), next_token_loss)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_norm_in_a_causal_model_is_named():
    found = findings(build(layers=2, norm=BatchNorm), next(batches()), next_token_loss)
    assert {each["severity"] for each in found} & {"error", "warning"}
    assert any("blocks.0.attention.norm" in each["sites"] for each in found)


class Named(nn.Module):
    """Called by keyword, with an argument that has a default, on rows without time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y if scale is None else y * scale


def test_a_model_of_vectors_called_by_keyword():
    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return model(x=batch[0], scale=batch[1]).sum()

    assert findings(Named(), (torch.randn(600, 5), torch.ones(600, 1)), loss) == ()
    # Not all rows of a large batch.
    assert seen == [512]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_diverged_model_is_inspected(value):
    model = build(layers=2)
    with torch.no_grad():
        model.blocks[1].mlp.branch.down.weight.fill_(value)
    found = findings(model, next(batches()), next_token_loss)
    assert json.dumps(found, allow_nan=False)
    assert found


def test_a_norm_with_a_large_epsilon_is_named_at_its_place():
    found = findings(build(layers=2, norm=specs.TORCH_LAYER_NORM.replace(eps=10.0)), next(batches()), next_token_loss)
    assert any("blocks.0.attention.norm" in each["sites"] for each in found)
