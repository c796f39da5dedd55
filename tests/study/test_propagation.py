import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study import Transformer, TransformerConfig
from normkit.study.corpus import next_token_loss
from normkit.study.propagation import (
    FACTORS,
    along_the_gradient,
    backward_errors,
    flat,
    gradient_norm,
    last_token_gradient,
    mean_square,
    perturb,
    propagate,
    turnings,
)
from normkit.study.statistics import slope


def small(**choices):
    config = TransformerConfig(vocabulary=16, context=8, width=16, layers=3, heads=2, **choices)
    return Transformer(config, seed=0).double()


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, (4, 9), generator=generator), generator


def test_the_stream_is_read_before_the_first_block_and_after_each():
    model = small(placement="post")
    ids, generator = draw()
    with torch.no_grad():
        embedded = model.embedding(ids[:, :-1]) + model.position(torch.arange(8))
    found = propagate(model, ids, generator)
    assert len(found.stream) == 4
    assert found.stream[0] == pytest.approx(mean_square(embedded))
    # After a LayerNorm every row has mean square 1, less what eps takes.
    assert found.stream[1:] == pytest.approx([1.0] * 3, abs=1e-3)


def test_without_branches_the_stream_is_the_embedding_and_no_hook_is_left():
    model = small(placement="none", branch_gain=0.0)
    found = propagate(model, *draw())
    assert found.stream == pytest.approx([found.stream[0]] * 4)
    model = small()
    propagate(model, *draw())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_are_those_of_each_blocks_two_matrices_and_of_a_tokens_own_loss():
    model, reference = small(), small()
    ids, generator = draw()
    found = propagate(model, ids, generator)
    next_token_loss(reference, (ids,)).backward()
    for block, value in zip(reference.blocks, found.gradients, strict=True):
        mlp = block.mlp.branch
        assert value == pytest.approx(math.hypot(mlp.up.weight.grad.norm(), mlp.down.weight.grad.norm()))
    model, reference = small(), small()
    ids, _ = draw()
    found = last_token_gradient(model, ids)
    mlp = reference.blocks[-1].mlp.branch
    losses = nn.functional.cross_entropy(reference(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    squares = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, [mlp.up.weight, mlp.down.weight], retain_graph=True)
        squares.append(sum(gradient.square().sum() for gradient in gradients))
    assert found == pytest.approx(torch.stack(squares).mean().sqrt().item())


def test_the_change_is_that_of_what_the_unembedding_reads_over_the_square_of_the_nudge():
    model, reference = small(), small()
    ids, generator = draw()
    change = propagate(model, ids, generator).change
    ids, generator = draw()

    def features():
        x = reference.embedding(ids[:, :-1]) + reference.position(torch.arange(8))
        for block in reference.blocks:
            x = block(x)
        return reference.final_norm(x).detach()

    before = features()
    perturb(reference.blocks, 1e-3, generator)
    assert change == pytest.approx(mean_square(features() - before) / 1e-6, rel=1e-6)


def test_a_nudge_is_relative_and_an_explosion_is_measured():
    module = nn.Linear(100, 100).double()
    before = [value.detach().clone() for value in module.parameters()]
    perturb(module, 0.1, torch.Generator().manual_seed(0))
    moved = module.weight.detach() - before[0]
    # 10,000 draws: their rms errs by 0.7 %.
    assert math.sqrt(mean_square(moved) / mean_square(before[0])) == pytest.approx(0.1, rel=0.03)
    assert torch.equal(module.bias, before[1])
    assert mean_square(torch.full((2,), 1e30)) == pytest.approx(1e60, rel=1e-6)
    module = nn.Linear(1, 1, bias=False)
    module.weight.grad = torch.full((1, 1), 1e30)
    assert gradient_norm(module) == pytest.approx(1e30, rel=1e-6)


class Point(nn.Module):
    def __init__(self, *start):
        super().__init__()
        self.place = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))


CURVATURE = 3.0


def quadratic(model, batch):
    return 0.5 * CURVATURE * model.place.square().sum() + batch[0].sum()


def test_a_landscape_is_as_rough_as_it_is_curved():
    found = along_the_gradient(Point(3.0, 4.0), (torch.zeros(1),), quadratic, shares=(0.1, 0.2))
    assert found.distances == pytest.approx((0.5, 1.0))
    assert found.loss == pytest.approx(37.5)
    assert found.losses == pytest.approx((0.5 * 3 * 4.5**2, 0.5 * 3 * 4**2))
    assert found.measures["loss_range"] == pytest.approx(37.5 - 24)
    assert found.changes == pytest.approx((1.5, 3.0))
    assert found.measures["roughness"] == pytest.approx(CURVATURE)
    assert found.measures["surprise"] == pytest.approx(3.0 / 15.0)
    found = along_the_gradient(Point(1.0, 2.0), (), lambda model, _: model.place.sum())
    assert found.measures["roughness"] == 0
    assert found.measures["surprise"] == 0
    assert found.measures["loss_range"] > 0
    # The root ends at 0; one step further there is no loss.
    found = along_the_gradient(Point(1e-6, 0.0), (), lambda model, _: model.place[0].sqrt(), shares=(0.5, 2.0))
    assert found.measures["loss_range"] == math.inf
    assert found.measures["roughness"] == math.inf
    assert found.measures["surprise"] == math.inf


def test_weights_and_their_gradients_are_left_as_they_were():
    model = Point(1.0, 2.0)
    model.place.grad = torch.ones(2, dtype=torch.float64)
    memory = model.place.data_ptr()
    along_the_gradient(model, (torch.zeros(1),), quadratic)
    assert model.place.tolist() == [1.0, 2.0]
    assert model.place.data_ptr() == memory
    assert model.place.grad.tolist() == [1.0, 1.0]
    assert model.unused.grad is None


N = 12


def network(norm):
    return nn.Sequential(nn.Linear(5, N), norm, nn.Tanh(), nn.Linear(N, 3)).double()


def loss(model, batch):
    return model(batch[0]).square().sum()


def errors(spec, norm=None):
    norm = nk.Norm(spec, N) if norm is None else norm
    model = network(norm)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, N))
    return backward_errors(model, {"norm": model[1]}, spec, (torch.randn(7, 5, dtype=torch.float64),), loss)["norm"]


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_without_eps_the_backward_pass_is_the_projection(spec):
    result = errors(spec.replace(eps=1e-30))
    assert result.projected < 1e-13
    assert result.exact < 1e-13
    assert 0 < result.removed < 1


@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.TORCH_RMS_NORM])
def test_an_eps_leaves_part_of_the_radial_direction(spec):
    result = errors(spec.replace(eps=0.1))
    assert result.projected > 1e-3
    assert result.exact < 1e-13


def test_a_norm_of_another_formula_is_off_and_one_without_a_gain_is_not():
    rms = specs.TORCH_RMS_NORM.replace(eps=1e-30)
    result = errors(specs.TORCH_LAYER_NORM.replace(eps=1e-30), nk.Norm(rms, N))
    assert min(result.projected, result.exact) > 0.01
    assert errors(specs.TORCH_LAYER_NORM.replace(eps=1e-30, has_weight=False)).projected < 1e-13


@pytest.fixture
def model():
    norm = nk.Norm(specs.TORCH_LAYER_NORM.replace(eps=1e-30), 8)
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 3)).double()


def test_a_weight_before_a_norm_turns_by_the_rate_over_its_squared_length(model):
    x = torch.randn(9, 5, dtype=torch.float64)
    before = flat(tuple(model.parameters())).clone()
    (group,) = turnings(model, lambda: model(x), lambda: model(x).pow(3).sum())
    assert group.paths == ("0.weight", "0.bias")
    assert group.cosine < 1e-12
    assert max(group.products) / min(group.products) - 1 < 1e-12
    assert slope(FACTORS, group.by_gradient) == pytest.approx(-2, abs=1e-3)
    assert slope(FACTORS, group.by_sign) == pytest.approx(-1, abs=1e-3)
    assert torch.equal(flat(tuple(model.parameters())), before)


def test_a_model_without_a_norm_has_no_such_weight():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(9, 5, dtype=torch.float64)
    assert turnings(model, lambda: model(x), lambda: model(x).sum()) == ()
