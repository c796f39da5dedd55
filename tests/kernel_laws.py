"""What the compiled kernels and the Triton kernels must both do: laws that the tests of each call with their own sizes.

A case lies where the kernels compute: on the CPU, or on `triton_kernels.DEVICE`.
"""

from __future__ import annotations

import contextlib
import math

import torch

import normkit
from contract import (
    DTYPES,
    GAIN_UNITS,
    UNITS,
    Case,
    added,
    assert_gradients,
    assert_rounded,
    assert_within,
    draw,
    outcome,
    roundings,
    truth,
)
from helpers import exact
from normkit import reference, specs, units
from normkit.errors import ShapeError
from normkit.units import spacing

LAYER = specs.TORCH_LAYER_NORM
FULL = {"layer_norm": LAYER, "rms_norm": specs.OLMO2}
BARE = {"layer_norm": specs.OLMO, "rms_norm": specs.NANOCHAT}
OTHERS = [0, 1, 3, 4]


def same(ours, theirs):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def has_the_exact_output(x, spec, allowed=4, device="cpu"):
    """Against 50 digits."""
    y = normkit.normalize(x.to(device), spec).cpu()
    assert_within(y, exact(x, spec), units.output(x, spec).size, allowed, "y")


def rounds_16_bit_rows_once(name, dtype, size, sizes, device="cpu"):
    dtype = DTYPES[dtype]
    size = min(max(size, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps), torch.finfo(dtype).max / 4)
    x = (torch.randn(*sizes, dtype=torch.float64).clamp(-4, 4) * size).to(dtype)
    spec = BARE[name].replace(eps=0.0)
    y, program = normkit.normalize(x.to(device), spec).cpu(), reference.forward(x, spec)
    assert_rounded(y, program, spec, {dtype}, units.output(x, spec).size)


def is_right_or_refuses_where_out_overlaps(x, out, spec):
    expected = normkit.normalize(x.clone(), spec)
    with contextlib.suppress(ShapeError):
        normkit.normalize(x, spec, out=out)
        assert torch.equal(out, expected)


def may_write_over_its_input(spec, case):
    expected = normkit.normalize(case.x, spec, case.weight, case.bias)
    x = case.x.clone()
    assert normkit.normalize(x, spec, case.weight, case.bias, out=x) is x
    assert torch.equal(x, expected)


# Rows without deviation, with NaN, of one feature or none.


def sees_no_deviation_in_a_constant_row(case, value):
    """The sum of equal numbers is exact in float64, and so is their mean: the deviation is 0, not almost 0."""
    x, n = torch.full_like(case.x, value), case.x.shape[-1]
    y = normkit.layer_norm(x, (n,), case.weight, case.bias)
    assert torch.equal(y, case.bias.expand_as(y))
    if x.dtype.itemsize > 2:
        assert_gradients(LAYER, case._replace(x=x))
    if x.dtype != torch.float64 or n < 1000:
        assert normkit.layer_norm(x, (n,), eps=0.0).isnan().all()


def gives_the_bias_and_a_steep_gradient_of_a_zero_row(spec, case):
    case = case._replace(x=torch.zeros_like(case.x))
    ours, _ = assert_gradients(spec, case)
    assert torch.equal(ours.y, torch.zeros_like(case.x) if case.bias is None else case.bias.expand_as(ours.y))
    assert torch.equal(ours.weight, torch.zeros_like(case.weight))
    # A sign is not part of a NaN, and 0 / 0 is one.
    assert normkit.normalize(case.x, spec.replace(eps=0.0), case.weight, case.bias).isnan().all()


def divides_by_eps_where_nothing_deviates(spec, device="cpu"):
    x, dy = torch.stack([torch.zeros(24), torch.full((24,), 2.5), torch.randn(24)]), torch.randn(3, 24)
    true = reference.backward(dy.double(), x.double(), spec.replace(output_dtype="input")).x
    ours = outcome(spec, Case(x.to(device), dy.to(device), None, None))
    assert_within(ours.y.cpu(), reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    flat = reference.statistics(x.double().unsqueeze(-2), spec, spec.eps).scale.flatten() == 0
    # dy / 0: infinite or NaN, by the order of the operations.
    assert not ours.x.cpu()[flat].isfinite().any()
    # The terms of a row without deviation are dy over its scale, which may be as small as eps.
    size = true.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True) + 1.0
    assert_within(ours.x.cpu()[~flat], true[~flat], size[~flat], 4, "dx")


def does_with_a_negative_eps_what_the_formula_does(device="cpu"):
    spec = specs.NANOCHAT.replace(eps=-0.5)
    x = torch.stack([torch.full((8,), 2.0), torch.full((8,), 0.1)])
    y = normkit.normalize(x.to(device), spec).cpu()
    assert_within(y, reference.forward(x.double(), spec), torch.ones(()).double(), 4, "y")
    assert y[1].isnan().all()


def keeps_an_odd_upstream_gradient_in_its_row(spec, case, odd):
    broken = case.dy.clone()
    broken[2, 3] = odd
    ours, clean = outcome(spec, case._replace(dy=broken)), outcome(spec, case)
    columns = [column for column in range(case.x.shape[-1]) if column != 3]
    assert torch.equal(ours.x[OTHERS], clean.x[OTHERS])
    assert not ours.x[2].isfinite().any()
    assert not ours.weight[3].isfinite()
    assert torch.equal(ours.weight[columns], clean.weight[columns])


def keeps_nan_of_a_parameter_in_its_column(spec, case):
    """Of the outputs; the gradient of every element of a row sees every gain."""
    n = case.x.shape[-1]
    column, clean = n // 2, outcome(spec, case)
    others = [place for place in range(n) if place != column]
    for what in ("weight", "bias"):
        if getattr(case, what) is not None:
            broken = getattr(case, what).clone()
            broken[column] = math.nan
            ours = outcome(spec, case._replace(**{what: broken}))
            assert ours.y[:, column].isnan().all()
            assert torch.equal(ours.y[:, others], clean.y[:, others])
            assert same((ours.weight, ours.bias), (clean.weight, clean.bias))
            assert ours.x.isnan().all() if what == "weight" else torch.equal(ours.x, clean.x)


def gives_zeros_for_no_rows_and_no_features(spec, case):
    ours = outcome(spec, case)
    assert ours.y.shape == ours.x.shape == case.x.shape
    for what in ("weight", "bias"):
        if getattr(ours, what) is not None:
            assert torch.equal(getattr(ours, what), torch.zeros_like(getattr(case, what))), f"d{what}"


def gives_the_bias_for_one_feature(centred, uncentred):
    ours = outcome(LAYER, centred)
    assert torch.equal(ours.y, centred.bias.expand_as(ours.y))
    assert torch.equal(ours.x, torch.zeros_like(centred.x))
    assert torch.equal(ours.weight, torch.zeros_like(centred.weight))
    true, _ = truth(specs.OLMO2, uncentred)
    assert_within(outcome(specs.OLMO2, uncentred).y, true.y, true.y.abs(), 4, "y")
    assert normkit.normalize(uncentred.x, specs.OLMO.replace(correction=1)).isnan().all()


# Gradients.


def has_the_same_gradients_whichever_are_wanted(spec, case, wanted):
    expected = outcome(spec, case)
    names = [part for part in wanted.split(" and ") if getattr(case, part) is not None]
    leaves = {part: getattr(case, part).clone().requires_grad_() for part in names}
    given = {part: leaves.get(part, getattr(case, part)) for part in ("x", "weight", "bias")}
    y = normkit.normalize(given["x"], spec, given["weight"], given["bias"])
    assert torch.equal(y, expected.y)
    if leaves:
        for part, gradient in zip(leaves, torch.autograd.grad(y, list(leaves.values()), case.dy), strict=True):
            assert torch.equal(gradient, getattr(expected, part)), part


def counts_the_rows_in_a_bias_gradient(x, parameter_dtype):
    """Sums kept in 16 bits stall: at 256 rows a thread in bfloat16, 2048 in float16, whatever the number of rows."""
    rows, n = x.shape
    weight, bias = (torch.ones(n, dtype=parameter_dtype or x.dtype, device=x.device).requires_grad_() for _ in range(2))
    normkit.layer_norm(x, (n,), weight, bias).backward(torch.ones_like(x))
    # 65536 is no float16 number: there the right answer is infinity.
    assert torch.equal(bias.grad, torch.full((n,), float(rows), dtype=torch.float64, device=x.device).to(bias.dtype))


def of_one_sign(case):
    """A case whose rounding errors add up; every term is as far from zero as the others."""
    rows, n = case.x.shape
    x = torch.arange(float(n)).expand(rows, n) + torch.rand(rows, 1)
    return case._replace(x=x.to(case.x.dtype), dy=torch.rand(rows, n).to(case.dy.dtype) + 1.0)


def of_every_size(spec, rows, n):
    """A case of rows from 1e-38 to 1e18: each adds its own part to the gain's gradient, and no more."""
    size = torch.logspace(-38, 18, rows, dtype=torch.float64)[torch.randperm(rows)].unsqueeze(1).float()
    case = draw(spec, rows, n)
    return Case(case.x * size, case.dy * size.clamp(1e-20, 1e10), case.weight, case.bias)


# A norm after an addition.


def adds_and_normalizes(spec, case, residual, d_new):
    """x and residual have one gradient: the norm's, plus what reaches the new stream from elsewhere, rounded once."""
    y, new, dx, d_residual, dweight, dbias = added(spec, case, residual, d_new)
    wide = torch.promote_types(torch.promote_types(case.x.dtype, residual.dtype), torch.float32)
    expected, stream = reference.add_forward(case.x, residual, spec, case.weight, case.bias)
    assert torch.equal(new, (case.x.to(wide) + residual.to(wide)).to(residual.dtype))
    assert torch.equal(new, stream)
    normed = case._replace(x=new)
    (true, size), casts = truth(spec, normed), roundings(spec, case)
    if casts:
        assert_rounded(y, expected, spec, casts, size.y)
    else:
        assert_within(y, true.y, size.y, UNITS[y.dtype], "y")
    total, room = true.x + d_new.double(), (size.x.square() + d_new.double().square()).sqrt()
    coarse = max(torch.finfo(case.x.dtype).eps, torch.finfo(residual.dtype).eps)
    # 0.501: a gradient that leaves in 16 bits may pass float32 on its way. From one 16 bits to the other it is rounded
    # twice.
    times = 1.0 if {case.x.dtype, residual.dtype} == {torch.bfloat16, torch.float16} else 0.501
    for gradient, dtype in ((dx, case.x.dtype), (d_residual, residual.dtype)):
        assert gradient.dtype == dtype
        bound = times * coarse * total.abs() + 4 * torch.finfo(torch.float32).eps * room + spacing(dtype)
        error = (gradient.double() - total).abs()
        assert (error <= bound).all(), f"{gradient.dtype}: {(error / bound).max():.3g} of what rounding once leaves"
    assert_within(dweight, true.weight, size.weight, GAIN_UNITS[case.weight.dtype], "dweight")
    if dbias is not None:
        assert_within(dbias, true.bias, size.bias, GAIN_UNITS[case.bias.dtype], "dbias")


def adds_in_place(spec, case, residual):
    """Into the inputs, and into each other's."""
    given = spec, case.weight, case.bias
    y, new = normkit.add_normalize(case.x, residual, *given)
    x, stream = case.x.clone(), residual.clone()
    if y.dtype == x.dtype:
        out = normkit.add_normalize(x, stream, *given, out=(x, stream))
        assert out[0] is x
        assert out[1] is stream
        assert same((x, stream), (y, new))
    x, stream = case.x.clone(), residual.clone()
    if y.dtype == stream.dtype == x.dtype:
        normkit.add_normalize(x, stream, *given, out=(stream, x))
        assert same((stream, x), (y, new))


# Layouts.


def _padded(tensor, more=3):
    """Rows that lie apart."""
    return tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + more), 7.0)[..., : tensor.shape[-1]]


# What the same numbers can look like in memory; all but the last three have a contiguous last axis.
LAYOUTS = {
    "apart": lambda t: _padded(t).copy_(t),
    "apart by 16": lambda t: _padded(t, 16 - t.shape[-1] % 16).copy_(t),
    "every other row": lambda t: t.new_zeros(2 * t.shape[0], *t.shape[1:])[::2].copy_(t),
    "transposed leading": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed and apart": lambda t: _padded(t.transpose(0, 1)).copy_(t.transpose(0, 1)).transpose(0, 1),
    "not aligned": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t),
    "a third of a fused projection": lambda t: t.new_zeros(*t.shape[:-1], 3, t.shape[-1])[..., 1, :].copy_(t),
    "negated": lambda t: torch._neg_view(t.neg()),
    "strided last": lambda t: t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t),
    "transposed last": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}


def takes_repeated_rows_that_are_not_stored(spec, case):
    sizes, one, upstream = case.x.shape, case.x[:1, :1], case.dy[:1, :1]
    for x, dy in (
        (one.expand(sizes), case.dy),
        (case.x[:, :1].expand(sizes), case.dy[:1].expand(sizes)),
        (case.x, upstream.expand(sizes)),
        (case.x[:, :, :1].expand(sizes), case.dy[:, :, :1].expand(sizes)),
        (case.x, upstream[..., :1].expand(sizes)),
        (one[..., :1].expand(sizes), case.dy),
    ):
        expected = outcome(spec, case._replace(x=x.contiguous(), dy=dy.contiguous()))
        assert same(outcome(spec, case._replace(x=x, dy=dy)), expected)


def takes_rows_that_overlap(spec, case):
    """Windows one number apart, as `Tensor.unfold` makes them."""
    rows, n = case.x.shape
    windows = torch.randn(rows + n - 1, device=case.x.device).unfold(0, n, 1)
    expected = outcome(spec, case._replace(x=windows.contiguous()))
    assert same(outcome(spec, case._replace(x=windows)), expected)


def takes_any_number_of_leading_axes(spec, case):
    sizes, ours = case.x.shape, outcome(spec, case)
    flat = outcome(spec, case._replace(x=case.x.reshape(-1, sizes[-1]), dy=case.dy.reshape(-1, sizes[-1])))
    assert torch.equal(ours.y, flat.y.reshape(sizes))
    assert torch.equal(ours.x, flat.x.reshape(sizes))
    if len(sizes) > 3:
        # Three strides and more: no two are enough.
        order = 2, 1, 0, *range(3, len(sizes))
        turned = outcome(spec, case._replace(x=case.x.permute(order), dy=case.dy.permute(order)))
        assert torch.equal(turned.x, ours.x.permute(order))


def takes_several_axes_as_one_row(spec, axes, device="cpu"):
    x = torch.randn(4, 2, 3, 4, device=device)
    parameter = x.shape[-len(axes) :]
    case = draw(spec, x.numel() // parameter.numel(), parameter.numel())
    case = Case(*(None if tensor is None else tensor.to(device) for tensor in case))
    expected = outcome(spec, case)
    folded = [None if tensor is None else tensor.reshape(parameter) for tensor in (case.weight, case.bias)]
    ours = outcome(spec.replace(axes=axes), Case(case.x.reshape(x.shape), case.dy.reshape(x.shape), *folded))
    assert all(a is None or torch.equal(a.flatten(), b.flatten()) for a, b in zip(ours, expected, strict=True))
    for layout in ("apart", "transposed leading", "transposed last"):
        change = LAYOUTS[layout]
        moved = Case(change(case.x.reshape(x.shape)), change(case.dy.reshape(x.shape)), *folded)
        assert same(outcome(spec.replace(axes=axes), moved), ours), layout


def takes_rows_more_than_two_billion_numbers_apart(spec, case):
    """The last of five rows has an offset that does not fit 32 bits. Memory that is never touched is never taken."""
    apart = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=case.x.device).as_strided((5, 70), (2**29, 1))
    expected = outcome(spec, case)
    assert torch.equal(normkit.normalize(apart.copy_(case.x), spec, case.weight, case.bias), expected.y)
    assert same(outcome(spec, case._replace(dy=apart.copy_(case.dy))), expected)
    assert normkit.normalize(case.x, spec, case.weight, case.bias, out=apart) is apart
    assert torch.equal(apart, expected.y)
