"""The steps of any optimiser, projected and retracted: by definition, by AdamP's formula, by geoopt."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from helpers import assert_close
from normkit.errors import InputError
from normkit.geometry import InvariantGroup, TangentOptimizer, scale_invariant_groups

OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda parameters: Adam(parameters, lr=0.05, weight_decay=0.1),
    "adamw": lambda parameters: AdamW(parameters, lr=0.05, weight_decay=0.5),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.02, momentum=0.5),
}


def layer_norm_model(dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.LayerNorm(8, dtype=dtype), nn.Linear(8, 3, dtype=dtype))


def batch_norm_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


MODELS = {"weight and bias": layer_norm_model, "rows": batch_norm_model}


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(16, size, generator=generator, dtype=dtype) for size in (6, 3))


def prepared(make_model, make_optimizer):
    model = make_model()
    x, _ = data(next(model.parameters()).dtype)
    optimizer = TangentOptimizer(make_optimizer(model.parameters()), scale_invariant_groups(model, lambda: model(x)))
    assert len(optimizer.groups) == 1
    return model, optimizer


def backward(model):
    x, target = data(next(model.parameters()).dtype)
    model.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps):
    for _ in range(steps):
        backward(model)
        optimizer.step()


def twin_of(model, optimizer):
    """A copy with its gradients, which a copied parameter lacks."""
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.clone()
    return twin, twin_optimizer


def spheres(group, tensors=None):
    """A group as a list of vectors, one for each sphere."""
    tensors = group.parameters if tensors is None else tensors
    if group.kind == "rows":
        return [row.flatten().detach().clone() for row in tensors[0]]
    return [torch.cat([tensor.detach().flatten() for tensor in tensors])]


def lone(*parameters, kind="matrix"):
    paths = tuple(f"w{index}" for index in range(len(parameters)))
    return InvariantGroup(paths=paths, parameters=parameters, kind=kind, error=0.0, control=1.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_the_retracted_part_of_the_update_orthogonal_to_the_weight(kind, name):
    """Against the projector as a matrix, from a copy that steps without us; what is in no group steps as ever."""
    model, optimizer = prepared(MODELS[kind], OPTIMIZERS[name])
    for _ in range(4):
        backward(model)
        free_model, free = twin_of(model, optimizer)
        starts = spheres(optimizer.groups[0])
        free.optimizer.step()
        optimizer.step()
        for start, updated, result in zip(starts, spheres(free.groups[0]), spheres(optimizer.groups[0]), strict=True):
            projector = torch.eye(len(start), dtype=start.dtype) - torch.outer(start, start) / (start @ start)
            expected = start + projector @ (updated - start)
            assert_close(result, expected * (start.norm() / expected.norm()), length=len(start))
            assert (result - start).norm() > 1e-4
        inside = set(optimizer.groups[0].parameters)
        for ours, theirs in zip(model.parameters(), free_model.parameters(), strict=True):
            assert ours in inside or torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_lengths_stay_over_many_steps(dtype):
    weight = nn.Parameter(torch.randn(8, 6, dtype=dtype))
    target = torch.randn(8, 6, dtype=dtype)
    bare = nn.Parameter(weight.detach().clone())
    lengths = torch.linalg.vector_norm(weight.detach().double(), dim=1)
    for parameter, optimizer in (
        (weight, TangentOptimizer(AdamW([weight], lr=0.05), [lone(weight, kind="rows")])),
        (bare, AdamW([bare], lr=0.05)),
    ):
        for _ in range(100):
            optimizer.zero_grad()
            (parameter / torch.linalg.vector_norm(parameter, dim=1, keepdim=True) - target).square().sum().backward()
            optimizer.step()
    drift = (torch.linalg.vector_norm(weight.detach().double(), dim=1) / lengths - 1).abs().max()
    # Each of 100 steps rounds every length anew by about one epsilon; signs are random.
    assert drift < 2 * 10 * torch.finfo(dtype).eps
    assert (torch.linalg.vector_norm(bare.detach().double(), dim=1) / lengths - 1).abs().max() > 0.01
    assert weight.dtype == dtype


@pytest.mark.slow
def test_in_bfloat16_lengths_do_not_drift():
    """Measured anew after each rounding, the length of 64 numbers sank by 2.7 % in 3,000 small steps."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 64).bfloat16())
    lengths = weight.detach().double().norm(dim=1)
    optimizer = TangentOptimizer(SGD([weight], lr=0.02), [lone(weight, kind="rows")])
    twin = None
    for step in range(600):
        weight.grad = torch.randn_like(weight)
        if step == 300:
            twin = copy.deepcopy((weight, optimizer))
            twin[0].grad = weight.grad.clone()
            twin[1].step()
        optimizer.step()
        if step == 300:
            # A copy goes on with the same lengths.
            assert torch.equal(twin[0], weight)
    # Rounding moves 64 numbers by 2**-9 of each at most, and they do not all move one way.
    assert (weight.detach().double().norm(dim=1) / lengths - 1).abs().max() < 2**-9
    # Weights that something else writes have a length of their own.
    with torch.no_grad():
        weight.mul_(4.0)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert (weight.detach().double().norm(dim=1) / (4 * lengths) - 1).abs().max() < 2**-8


def test_in_bfloat16_a_step_is_rounded_once():
    weight = nn.Parameter(torch.randn(8, 64, dtype=torch.bfloat16))
    start = weight.detach().double()
    weight.grad = torch.randn_like(weight)
    updated = torch.add(weight.detach(), weight.grad, alpha=-0.1).double()
    TangentOptimizer(SGD([weight], lr=0.1), [lone(weight)]).step()
    tangent = updated - start * ((start * (updated - start)).sum() / start.square().sum())
    assert torch.equal(weight, (tangent * (start.norm() / tangent.norm())).bfloat16())


@pytest.mark.parametrize("kind", ["matrix", "rows"])
def test_without_an_update_no_bit_moves(kind):
    weight = nn.Parameter(torch.randn(5, 7))
    with torch.no_grad():
        weight[0, :2], weight[1] = torch.tensor([-0.0, 0.0]), -0.0
    before = weight.detach().clone().numpy().tobytes()
    optimizer = TangentOptimizer(AdamW([weight], lr=0.0, weight_decay=0.1), [lone(weight, kind=kind)])
    optimizer.step()
    assert weight.detach().numpy().tobytes() == before
    weight.grad = torch.randn(5, 7)
    values = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, values)


def test_rows_without_a_tangent_step():
    """One that does not move keeps its bits; a purely radial update only rounds; a zero row takes the step as it is."""
    weight = nn.Parameter(torch.randn(4, 6))
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 6)
    weight.grad[2] = 1.0
    TangentOptimizer(SGD([weight], lr=0.1), [lone(weight, kind="rows")]).step()
    assert (weight.detach() == before).all(1).tolist() == [True, True, False, True]
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(before)
    TangentOptimizer(AdamW([weight], lr=0.1, weight_decay=5.0), [lone(weight)]).step()
    assert_close(weight, before)
    weight = nn.Parameter(torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64))
    weight.grad = torch.ones(2, 2, dtype=torch.float64)
    TangentOptimizer(SGD([weight], lr=0.5), [lone(weight, kind="rows")]).step()
    assert weight[0].tolist() == [-0.5, -0.5]
    assert weight[1].norm().item() == pytest.approx(5.0, rel=1e-15)


def test_decoupled_decay_of_a_group_does_nothing():
    results = []
    for decay in (0.0, 0.5):
        torch.manual_seed(3)
        model, optimizer = prepared(batch_norm_model, lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.0))
        optimizer.param_groups[0]["params"].remove(model[0].weight)
        optimizer.add_param_group({"params": [model[0].weight], "weight_decay": decay})
        train(model, optimizer, 5)
        results.append(model[0].weight.detach())
    # Rounding is the seed of a trajectory's divergence; five steps leave it small.
    assert (results[0] - results[1]).abs().max() < 1e-11


def adamp_projection(weight, gradient, perturbation, delta, eps):
    """Heo et al. 2020: where a weight and its gradient are nearly orthogonal, the radial part of the step goes."""
    for dims in (1, (0, 1)):
        size = weight.shape[1] if dims == 1 else weight.numel()
        product = (weight * gradient).sum(dims, keepdim=True)
        lengths = [torch.linalg.vector_norm(tensor, dim=dims, keepdim=True) for tensor in (weight, gradient)]
        if (product / (lengths[0] * lengths[1])).abs().max() < delta / size**0.5:
            normal = weight / (lengths[0] + eps)
            return perturbation - normal * (normal * perturbation).sum(dims, keepdim=True), dims
    return perturbation, None


@pytest.mark.parametrize(("make", "axes"), [(batch_norm_model, 1), (None, (0, 1))], ids=["rows", "matrix"])
def test_the_direction_after_one_step_is_that_of_adamp(make, axes):
    make = make or (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3)).double())
    model, optimizer = prepared(make, lambda parameters: Adam(parameters, lr=0.05))
    train(model, optimizer, 3)
    backward(model)
    _, free = twin_of(model, optimizer)
    weight = model[0].weight
    start, gradient = weight.detach().clone(), weight.grad.clone()
    free.optimizer.step()
    perturbation = start - free.groups[0].parameters[0].detach()
    projected, dims = adamp_projection(start, gradient, perturbation, delta=0.1, eps=1e-30)
    assert dims == axes
    optimizer.step()
    expected = start - projected
    shrink = torch.linalg.vector_norm(start, dim=axes, keepdim=True) / torch.linalg.vector_norm(
        expected, dim=axes, keepdim=True
    )
    assert_close(weight, expected * shrink, length=weight.numel())


def test_a_step_whose_square_overflows_keeps_the_length():
    """The length of the result was infinite in float32, and the weight became 0."""
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    weight.grad = torch.tensor([[-4e25, 3e25]])
    TangentOptimizer(SGD([weight], lr=1.0), [lone(weight)]).step()
    assert torch.allclose(weight, torch.tensor([[4.0, -3.0]]))


@pytest.mark.slow
def test_a_step_of_sgd_is_geoopts_on_the_unit_sphere():
    import geoopt

    start = nn.functional.normalize(torch.randn(5, 9, dtype=torch.float64), dim=1)
    gradient = torch.randn(5, 9, dtype=torch.float64)
    theirs = geoopt.ManifoldParameter(start.clone(), manifold=geoopt.Sphere())
    ours = nn.Parameter(start.clone())
    theirs.grad, ours.grad = gradient.clone(), gradient.clone()
    geoopt.optim.RiemannianSGD([theirs], lr=0.3).step()
    TangentOptimizer(SGD([ours], lr=0.3), [lone(ours, kind="rows")]).step()
    assert_close(ours, torch.tensor(theirs.detach().tolist(), dtype=torch.float64), length=9)


def test_schedulers_move_the_wrapped_rate():
    model, optimizer = prepared(layer_norm_model, OPTIMIZERS["momentum"])
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    rates = []
    for _ in range(4):
        train(model, optimizer, 1)
        scheduler.step()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.005, 0.005, 0.0005])
    earlier = CosineAnnealingLR(optimizer.optimizer, T_max=4)
    train(model, optimizer, 1)
    earlier.step()
    assert optimizer.param_groups[0]["lr"] < 0.0005


def test_a_closure_is_called_once_and_its_loss_returned():
    model, optimizer = prepared(layer_norm_model, OPTIMIZERS["adamw"])
    by_hand, twin = twin_of(model, optimizer)
    losses = []

    def closure():
        losses.append(backward(model).item())
        return losses[-1]

    assert optimizer.step(closure) == losses[0]
    assert len(losses) == 1
    backward(by_hand)
    assert twin.step() is None
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), by_hand.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_continues_bit_for_bit(name):
    model, optimizer = prepared(batch_norm_model, OPTIMIZERS[name])
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3)
    again, other = prepared(batch_norm_model, OPTIMIZERS[name])
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 3)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_checkpoints_of_the_bare_optimiser_are_the_same_and_groups_stay_shared():
    model, optimizer = prepared(layer_norm_model, OPTIMIZERS["adamw"])
    train(model, optimizer, 2)
    bare = AdamW(model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    assert bare.param_groups[0]["lr"] == 0.05
    assert repr(bare.state_dict()) == repr(optimizer.state_dict())
    optimizer.optimizer.load_state_dict(bare.state_dict())
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state


def test_it_is_an_optimizer():
    model, optimizer = prepared(layer_norm_model, OPTIMIZERS["sgd"])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults is optimizer.optimizer.defaults
    assert "lr: 0.1" in repr(optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("ours"))
    optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("wrapped"))
    train(model, optimizer, 1)
    assert calls == ["wrapped", "ours"]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.optimizer.param_groups) == 2
    with pytest.raises(AttributeError, match="no attribute 'momentum'"):
        _ = optimizer.momentum


def test_errors():
    weight, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    with pytest.raises(InputError, match="w0 is in a group, but is not the optimizer's"):
        TangentOptimizer(SGD([weight], lr=0.1), [lone(other)])
    with pytest.raises(InputError, match="in two groups"):
        TangentOptimizer(SGD([weight], lr=0.1), [lone(weight), lone(weight, kind="rows")])
