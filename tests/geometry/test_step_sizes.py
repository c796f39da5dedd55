"""A scale-invariant weight feels lr / |w|^2 under SGD and lr / |w| under Adam, and is orthogonal to its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from helpers import assert_close
from normkit.errors import DtypeError, InputError, ShapeError
from normkit.geometry import effective_learning_rate, equilibrium_length, radial_cosine

INPUTS, OUTPUTS, SAMPLES = 5, 7, 11


def problem(norm):
    """A weight (OUTPUTS, INPUTS) and a loss that sees it through a norm without eps."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (INPUTS, OUTPUTS))
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float64)
    dims = -1 if norm == "layer" else 0

    def loss(weight):
        y = x @ weight.T
        y = y - y.mean(dims, keepdim=True)
        return (y / y.square().mean(dims, keepdim=True).sqrt() - target).square().sum()

    return weight, loss


def trained(loss, start, make, steps):
    weight = nn.Parameter(start.clone())
    optimizer = make([weight])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(weight).backward()
        optimizer.step()
    return F.normalize(weight.detach().flatten(), dim=0)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sgd", lambda rate: lambda parameters: torch.optim.SGD(parameters, lr=rate)),
        ("sgd", lambda rate: lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True)),
        ("adam", lambda rate: lambda parameters: torch.optim.Adam(parameters, lr=rate, eps=0.0)),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("steps", [1, 5])
def test_weights_of_equal_effective_rate_turn_alike(kind, make, steps):
    weight, loss = problem("layer")
    rate, scale = 0.01, 7.3
    ratio = effective_learning_rate(weight, rate, optimizer=kind) / effective_learning_rate(
        scale * weight, rate, optimizer=kind
    )
    short = trained(loss, weight, make(rate), steps)
    long = trained(loss, scale * weight, make(rate * float(ratio)), steps)
    assert (short - F.normalize(weight.flatten(), dim=0)).norm() > 1e-3
    # A step repeats the whole computation, whose sums have some hundred terms.
    assert (short - long).norm() < 1e-13
    assert (short - trained(loss, scale * weight, make(rate), steps)).norm() > 1e-4


@pytest.mark.parametrize(("norm", "dims"), [("layer", None), ("batch", -1)])
def test_sgd_turns_each_group_by_the_effective_rate_times_the_gradient_at_its_direction(norm, dims):
    """The remainder of the first-order prediction falls with the square of the rate."""
    weight, loss = problem(norm)
    weight = weight * torch.linspace(0.5, 3.0, OUTPUTS, dtype=torch.float64)[:, None] if dims else weight
    direction = weight / torch.linalg.vector_norm(weight, dim=dims, keepdim=True)
    rates = torch.logspace(-3, -6, 7, dtype=torch.float64)
    remainders = []
    for rate in rates:
        after = weight - rate * grad(loss)(weight)
        turn = after / torch.linalg.vector_norm(after, dim=dims, keepdim=True) - direction
        effective = effective_learning_rate(weight, float(rate), optimizer="sgd", dims=dims)
        predicted = -(effective if dims is None else effective[:, None]) * grad(loss)(direction)
        remainders.append((turn - predicted).norm())
    slope = torch.log(remainders[0] / remainders[-1]) / torch.log(rates[0] / rates[-1])
    assert 1.95 < slope < 2.05


def test_formula_and_its_ends():
    weight = torch.tensor([[3.0, 4.0], [5.0, 12.0]], dtype=torch.float64)
    rate = torch.tensor(0.5, dtype=torch.float64)
    for kind, power in (("sgd", 2), ("adam", 1)):
        rows = effective_learning_rate(weight, rate, optimizer=kind, dims=-1)
        assert_close(rows, 0.5 / torch.tensor([5.0, 13.0], dtype=torch.float64) ** power)
        whole = effective_learning_rate(weight, 0.5, optimizer=kind)
        assert_close(whole, 0.5 / torch.tensor(194.0, dtype=torch.float64).sqrt() ** power)
        assert_close(effective_learning_rate(7.3 * weight, rate, optimizer=kind, dims=-1), rows / 7.3**power)
    filters = torch.ones(3, 2, 2, 2)
    assert effective_learning_rate(filters, 1.0, optimizer="sgd", dims=(1, 2, 3)).tolist() == pytest.approx([1 / 8] * 3)
    # |w| = 500 is a float16, its square is not.
    long = torch.tensor([300.0, 400.0], dtype=torch.float16)
    assert effective_learning_rate(long, 250.0, optimizer="sgd").item() == pytest.approx(1e-3, rel=2**-9)
    rates = effective_learning_rate(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), 0.1, optimizer="sgd", dims=-1)
    assert rates.tolist() == pytest.approx([float("inf"), 0.1])


def test_the_gradient_is_orthogonal_to_what_may_be_scaled_and_shorter_at_a_longer_weight():
    weight, loss = problem("layer")
    gradient = grad(loss)(weight)
    assert abs(radial_cosine(weight, gradient)) < 1e-14
    assert radial_cosine(weight, gradient, dims=-1).abs().min() > 1e-3
    assert_close(grad(loss)(4.0 * weight), gradient / 4.0, length=SAMPLES * OUTPUTS)
    weight, loss = problem("batch")
    assert radial_cosine(weight, grad(loss)(weight), dims=-1).abs().max() < 1e-13


def test_cosine_against_torch_and_at_its_ends():
    weight, gradient = torch.randn(2, 4, 6, dtype=torch.float64)
    assert_close(radial_cosine(weight, gradient, dims=-1), F.cosine_similarity(weight, gradient, dim=-1))
    assert_close(radial_cosine(weight, -3.0 * weight), torch.tensor(-1.0, dtype=torch.float64))
    # Their lengths are float16 numbers, the product of the lengths is not.
    long = torch.tensor([300.0, 400.0], dtype=torch.float16)
    assert radial_cosine(long, long).item() == pytest.approx(1.0, rel=2**-9)
    assert radial_cosine(weight, torch.zeros_like(weight)).isnan()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_decay_and_updates_balance_and_the_turn_depends_on_rate_times_decay_only(optimizer):
    """Updates across the weight, by torch's own SGD and by AdamW's rule."""
    rate, decay, size = 0.2, 0.05, 3.0
    share = rate * decay
    weight = nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.float64))
    descent = torch.optim.SGD([weight], lr=rate, weight_decay=decay)
    expected, power = equilibrium_length(rate, decay, size, optimizer=optimizer), 4 if optimizer == "sgd" else 2
    gaps = []
    for _ in range(1500):
        before, length = weight.detach().clone(), float(weight.detach().norm())
        across = torch.tensor([-before[1], before[0]], dtype=torch.float64) / length
        gaps.append(abs(length - expected))
        if optimizer == "sgd":
            # The gradient of a scale-invariant loss, `size` long where the weight is 1 long.
            weight.grad = across * size / length
            descent.step()
        else:
            weight.data = (1 - share) * before + rate * size * across
    assert gaps[-1] < 1e-11
    assert gaps[401] / gaps[400] == pytest.approx(
        (1 - share) ** 2 - (share * (2 - share) if power == 4 else 0), abs=1e-3
    )
    turn = F.cosine_similarity(before, weight.detach(), dim=0)
    assert float(turn) == pytest.approx(1 - share, rel=1e-9)
    assert equilibrium_length(rate, decay, 2 * size, optimizer=optimizer) == pytest.approx(2 ** (2 / power) * expected)


def test_batched_differentiable_and_of_the_same_dtype():
    weights, gradients = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    cosines = torch.vmap(radial_cosine)(weights, gradients)
    assert_close(cosines, torch.stack([radial_cosine(*pair) for pair in zip(weights, gradients, strict=True)]))
    rates = torch.vmap(lambda weight: effective_learning_rate(weight, 0.1, optimizer="adam"))(weights)
    assert_close(rates, effective_learning_rate(weights, 0.1, optimizer="adam", dims=(1, 2)))
    jacobian = torch.func.jacrev(lambda weight: effective_learning_rate(weight, 0.1, optimizer="sgd"))(weights[0])
    assert_close(jacobian, -0.2 * weights[0] / weights[0].norm() ** 4)
    assert torch.autograd.gradcheck(radial_cosine, (weights[0].requires_grad_(), gradients[0].requires_grad_()))
    assert radial_cosine(weights[0].float(), gradients[0].float()).dtype == torch.float32
    assert effective_learning_rate(weights.float(), 0.1, optimizer="sgd").dtype == torch.float32


def test_errors():
    weight = torch.ones(2, 3)
    with pytest.raises(InputError, match=r'"sgd" or, for scale-free updates, "adam", got \'lamb\''):
        effective_learning_rate(weight, 0.1, optimizer="lamb")
    with pytest.raises(InputError, match="adam"):
        equilibrium_length(0.1, 0.1, 1.0, optimizer="lamb")
    with pytest.raises(InputError, match="between 0 and 2 for an equilibrium, got 0"):
        equilibrium_length(0.1, 0.0, 1.0, optimizer="sgd")
    with pytest.raises(DtypeError, match="floating"):
        effective_learning_rate(weight.int(), 0.1, optimizer="sgd")
    with pytest.raises(DtypeError, match="floating"):
        radial_cosine(weight, weight.int())
    with pytest.raises(ShapeError, match=r"\(2, 3\) and \(3, 2\)"):
        radial_cosine(weight, weight.T)
