"""Random arguments, right and wrong, for the public functions: run as a program, so that a crash is seen from outside.

Each call must give torch's exception type or a base of it, or the right result. What torch refuses and normkit computes
must be right too. The last line tells how many calls went which way. Arguments: the number of examples, and a seed.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import normkit
from normkit import reference, specs
from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.hadamard import compiled, rotate_runs
from normkit.checkpoint.plan import Rotation, Rows
from normkit.kernels import cpu
from normkit.kernels.hadamard import turn

SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 17])
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = st.sampled_from([*FLOATING * 3, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
COUNTS: Counter[str] = Counter()


@st.composite
def tensors(draw, shape):
    """A tensor of a shape, in one of many layouts, sometimes of a dtype that cannot be normalized."""
    dtype = draw(DTYPES)
    # Numbers that a failure can be repeated with.
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
    match draw(st.sampled_from(["plain", "plain", "transposed", "strided last", "strided rows", "expanded", "view"])):
        case "transposed" if tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided last" if shape:
            return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(tensor)
        case "strided rows" if tensor.dim() > 1:
            return torch.zeros(2 * shape[0], *shape[1:], dtype=dtype)[::2].copy_(tensor)
        case "expanded" if tensor.dim() > 1 and shape[0]:
            return tensor[:1].expand(shape)
        case "view" if tensor.numel():
            return torch.zeros(tensor.numel() + 1, dtype=dtype)[1:].view(shape).copy_(tensor)
    return tensor


@st.composite
def calls(draw):
    """Arguments that fit, or nearly do."""
    shape = draw(st.lists(SIZES, max_size=4).map(tuple))
    x = draw(tensors(shape))
    row = shape[len(shape) - draw(st.integers(0, len(shape))) :] if draw(st.integers(0, 4)) else shape[-1:]
    if not draw(st.integers(0, 5)):
        row = draw(st.lists(st.sampled_from([-1, 0, 1, 3, 4, 8]), max_size=3).map(tuple))

    def parameter():
        if not draw(st.integers(0, 2)):
            return None
        wanted = (
            tuple(max(size, 0) for size in row)
            if draw(st.integers(0, 4))
            else draw(st.sampled_from([(), (4,), (1, 8)]))
        )
        return draw(tensors(wanted))

    return x, row, parameter(), parameter(), draw(st.sampled_from([0.0, 1e-5, 1.0, -0.5, 1]))


def attempt(function, *args):
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def right(x, row, weight, bias, eps, name):
    """The value as it is defined."""
    spec = specs.TORCH_LAYER_NORM if name == "layer_norm" else specs.TORCH_RMS_NORM
    spec = spec.replace(
        eps=eps, axes=tuple(range(-len(row), 0)), has_weight=weight is not None, has_bias=bias is not None
    )
    return reference.forward(x, spec, weight, bias)


def compare(name, x, row, weight, bias, eps):
    args = (x, row, weight, bias, eps) if name == "layer_norm" else (x, row, weight, eps)
    bias = bias if name == "layer_norm" else None
    ours, refusal = attempt(getattr(normkit, name), *args)
    theirs, torchs = attempt(getattr(F, name), *args)
    if refusal is not None:
        # torch's rms_norm takes a gain of whole numbers; here one has to be of a floating dtype.
        is_whole = any(t is not None and not t.dtype.is_floating_point for t in (weight, bias))
        if is_whole and isinstance(refusal, normkit.errors.DtypeError):
            COUNTS["refused"] += 1
            return
        assert torchs is not None, f"torch computes what normkit refuses: {refusal}"
        assert isinstance(refusal, normkit.errors.NormkitError), f"not an error of ours: {refusal!r}"
        # torch says NotImplementedError of a dtype it has no kernel for; ours is a RuntimeError, its base.
        wanted = RuntimeError if type(torchs) is NotImplementedError else type(torchs)
        assert isinstance(refusal, wanted), f"{refusal!r}, torch {torchs!r}"
        COUNTS["refused"] += 1
        return
    expected = right(x, row, weight, bias, eps, name)
    COUNTS["computed"] += 1
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape == x.shape
    # Where a negative eps leaves little of a variance, errors of that grow as y does, squared.
    grown = 1.0 + (expected.double().nan_to_num().square().amax().item() if eps < 0 and expected.numel() else 0.0)
    unit = torch.finfo(x.dtype).eps * grown
    close = {"rtol": 4 * unit, "atol": 16 * unit, "equal_nan": True}
    assert torch.allclose(ours.double(), expected.double(), **close), f"off by {(ours - expected).abs().max()}"
    if theirs is not None:
        assert theirs.dtype == ours.dtype
    gradients(ours, name, args)


def gradients(y, name, args):
    """Backward of the same call: shapes and dtypes fit, and nothing falls over."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    y = getattr(normkit, name)(*leaves)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf, gradient in zip(inputs, torch.autograd.grad(y, inputs, torch.ones_like(y)), strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype


def normalize_is_robust(x, weight, bias, spec):
    """Any preset, whatever it is given: a result of x's shape, or an error of ours."""
    result, error = attempt(normkit.normalize, x, spec, weight, bias)
    if error is not None:
        assert isinstance(error, normkit.errors.NormkitError), f"not an error of ours: {error!r}"
        COUNTS["normalize refused"] += 1
        return
    assert result.shape == x.shape
    COUNTS["normalize computed"] += 1


def into_is_robust(x, other, weight, bias, spec):
    """Results written to tensors of any layout, also to the input: right, or an error of ours and nothing written."""
    for out in (other, x.clone(), x):
        if out.dtype.is_floating_point:
            expected, _ = attempt(normkit.normalize, x.clone(), spec, weight, bias)
            before = out.clone()
            result, error = attempt(functools.partial(normkit.normalize, out=out), x, spec, weight, bias)
            if error is not None:
                assert isinstance(error, normkit.errors.NormkitError), f"not an error of ours: {error!r}"
                assert same(out, before), "refused, and yet written to"
                COUNTS["out refused"] += 1
                continue
            assert result is out
            assert same(out, expected), "other numbers than without out"
            COUNTS["out computed"] += 1


def same(a, b):
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def add_is_robust(x, residual, weight, bias, spec):
    """The sum is what it is defined as, whatever the layouts; the gradients fit; else an error of ours."""
    leaves = [
        tensor.detach().requires_grad_(tensor.dtype.is_floating_point) if tensor is not None else None
        for tensor in (x, residual, weight, bias)
    ]
    result, error = attempt(normkit.add_normalize, leaves[0], leaves[1], spec, *leaves[2:])
    if error is not None:
        assert isinstance(error, normkit.errors.NormkitError), f"not an error of ours: {error!r}"
        COUNTS["add refused"] += 1
        return
    COUNTS["add computed"] += 1
    y, new = result
    assert same(new, reference.add_forward(x, residual, spec, weight, bias)[1])
    inputs = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad([y, new], inputs, [torch.ones_like(y), torch.ones_like(new)])
    for leaf, gradient in zip(inputs, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


def turn_is_right(draw):
    """Rotations of any rows, columns and layouts: the bits of plain torch."""
    shape = rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    made = []
    for axis, length in enumerate(shape):
        sizes = [size for size in (1, 2, 4, 8, 12, 16, 20, 32, 64) if length % size == 0]
        size = draw(st.sampled_from([None, *sizes]))
        parts = [Rows(blocks=1, tail=size), Rows(blocks=length // size, tail=size), None] if size else [None]
        rotation = Rotation(axis=axis, size=size or 1, seed="0", construction="", rows=draw(st.sampled_from(parts)))
        made.append(rotation if size else None)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    gap = draw(st.integers(0, 3))
    x = (torch.randn(rows, columns + gap, generator=generator) * 3).to(draw(st.sampled_from(FLOATING)))[:, gap:]
    factors = draw(
        st.sampled_from([None, torch.rand(columns, generator=generator), torch.rand(rows, 1, generator=generator)])
    )
    factors = None if factors is None else factors.double()
    out = torch.empty(rows, columns, dtype=draw(st.sampled_from(FLOATING)))
    wide = (x.double() if factors is None else x.double() * factors).contiguous().clone()
    for rotation, runs in zip(made, ((1, rows, columns), (rows, columns, 1)), strict=True):
        if rotation is not None:
            rotate_runs(wide.numpy().reshape(runs), rotation)
    down, across = (None if rotation is None else compiled(rotation) for rotation in made)
    turn(x, out, factors=factors, length=rows, down=down, across=across)
    assert torch.equal(out, rounded(wide, out.dtype)), (x.shape, made)
    COUNTS["turned"] += 1


def fuzz(examples, start):
    presets = [value for value in vars(specs).values() if isinstance(value, normkit.NormSpec)]

    @seed(start)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(calls(), st.sampled_from(["layer_norm", "rms_norm"]), st.sampled_from(presets), st.data())
    def every_call(call, name, spec, data):
        compare(name, *call)
        x, _, weight, bias, _ = call
        gain, shift = weight if spec.has_weight else None, bias if spec.has_bias else None
        normalize_is_robust(x, gain, shift, spec)
        other = data.draw(tensors(tuple(x.shape)))
        add_is_robust(x, other, gain, shift, spec)
        into_is_robust(x, other, gain, shift, spec)
        if cpu.load() is None:
            turn_is_right(data.draw)

    warnings.simplefilter("ignore")
    every_call()
    sys.stdout.write(f"{dict(COUNTS)}\n")
    # A fuzz that is refused throughout shows nothing.
    assert COUNTS["computed"] > examples // 10


if __name__ == "__main__":
    fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
