"""Claims C40 to C47: freedom removed, gradients projected, training against inference."""

from __future__ import annotations

import torch

from helpers import below
from normkit import NormSpec, geometry, reference, specs
from normkit.text import significant

N = 16
PLAIN = NormSpec(eps=0.0, has_weight=False, has_bias=False)
RMS = specs.TORCH_RMS_NORM.replace(eps=0.0, has_weight=False)


def rows(count: int = 64) -> torch.Tensor:
    return torch.randn(count, N, dtype=torch.float64) + 0.5


def test_c40_shift_and_positive_scale_are_removed(measured):
    x = rows()
    same = below(reference.forward(5 * x + 3, PLAIN) - reference.forward(x, PLAIN), 1e-13)
    below(reference.forward(-x, PLAIN) + reference.forward(x, PLAIN), 1e-15)
    small = 1e-3 * x
    with_eps = reference.forward(5 * small + 3, PLAIN.replace(eps=1e-5)) - reference.forward(
        small, PLAIN.replace(eps=1e-5)
    )
    assert with_eps.abs().max() > 0.1
    recovered = geometry.fiber(reference.forward(x, PLAIN.replace(eps=1e-5)), PLAIN.replace(eps=1e-5)).centred
    lost = below((recovered - geometry.centre(x)) / geometry.centre(x).norm(dim=-1, keepdim=True), 1e-10)
    measured(f"eps = 0: {same}, and the sign is kept; eps = 1e-5: only the mean is lost, the rest comes back {lost}")


def test_c41_rms_norm_removes_scale_and_keeps_the_mean(measured):
    x = rows()
    same = below(reference.forward(5 * x, RMS) - reference.forward(x, RMS), 1e-14)
    shifted = (reference.forward(x + 3, RMS) - reference.forward(x, RMS)).abs().max().item()
    assert shifted > 0.5
    measured(f"scale: {same}; a shift by 3 changes entries by up to {shifted:.1f}")


def test_c42_the_gradient_is_a_tangent_projection_divided_by_the_scale(measured):
    x, upstream = rows(), torch.randn(64, N, dtype=torch.float64)
    deviation = x.std(-1, correction=0, keepdim=True)
    z = x.clone().requires_grad_()
    torch.nn.functional.layer_norm(z, (N,), eps=0.0).backward(upstream)
    projected = geometry.tangent_projection(upstream, x) / deviation
    measured("error " + below(z.grad - projected, 1e-13))


def test_c43_the_radial_and_the_mean_part_of_the_gradient_vanish(measured):
    x, upstream = rows(), torch.randn(64, N, dtype=torch.float64)
    gradient = geometry.vjp(x, upstream, PLAIN)
    below(gradient.mean(-1), 1e-14)
    radial = below((gradient * geometry.centre(x)).sum(-1), 1e-12)
    spec = PLAIN.replace(eps=0.5)
    variance = x.var(-1, correction=0)
    left = (geometry.vjp(x, upstream, spec) * geometry.centre(x)).sum(-1)
    along = (upstream * geometry.centre(x)).sum(-1) * 0.5 / (variance + 0.5) ** 1.5
    below(left - along, 1e-13)
    measured(f"eps = 0: mean and radial part {radial}; with eps the radial part is eps / s^2 of what it was")


def test_c44_normalizing_preconditions_rows_of_unequal_length(measured):
    torch.manual_seed(0)
    plain = torch.randn(2000, N, dtype=torch.float64)
    lengths = torch.logspace(-3, 1, 2000, dtype=torch.float64)[torch.randperm(2000), None]
    offset = geometry.preconditioning(plain + 10, PLAIN)
    scaled = geometry.preconditioning(plain * torch.logspace(-2, 0, N, dtype=torch.float64), PLAIN)
    unequal = geometry.preconditioning(plain * lengths, PLAIN)
    words = [
        f"{name} {significant(float(case.raw))} to {significant(float(case.normalized))}"
        for name, case in [("common offset", offset), ("unequal rows", unequal), ("unequal features", scaled)]
    ]
    assert float(offset.normalized) < float(offset.raw) / 100
    assert float(scaled.normalized) > float(scaled.raw) / 10
    measured("condition number, " + "; ".join(words))


def test_c45_the_scale_of_the_weights_in_front_does_not_matter(measured):
    x, weight = rows(), torch.randn(N, N, dtype=torch.float64)
    results = []
    for factor in (1.0, 10.0):
        scaled = (factor * weight).requires_grad_()
        reference.forward(x @ scaled.T, PLAIN).pow(3).sum().backward()
        results.append((scaled.detach(), scaled.grad))
    (first, gradient), (_, smaller) = results
    below((smaller * 10 - gradient) / gradient.abs().max(), 1e-12)
    orthogonal = below(geometry.radial_cosine(first, gradient), 1e-12)
    measured(f"10 times the weight, a tenth of the gradient; cosine of weight and gradient {orthogonal}")


def test_c46_layer_norm_computes_the_same_in_training_and_inference(measured):
    layer, x = torch.nn.LayerNorm(N, dtype=torch.float64), rows()
    assert torch.equal(layer.train()(x), layer.eval()(x))
    assert geometry.train_eval_difference(layer, x) == 0
    measured("bit for bit")


def test_c47_batch_norm_computes_something_else_in_inference(measured):
    layer = torch.nn.BatchNorm1d(N, dtype=torch.float64)
    for _ in range(10):
        layer(rows())
    difference = float(geometry.train_eval_difference(layer, rows()))
    assert difference > 0.1
    dropout = torch.nn.Sequential(torch.nn.LayerNorm(N, dtype=torch.float64), torch.nn.Dropout(0.1))
    assert float(geometry.train_eval_difference(dropout, rows())) > 0.1
    measured(f"BatchNorm after 10 batches of 64: up to {difference:.1f} off; LayerNorm 0, unless dropout stands behind")
