"""The operators refuse what the kernels would read wrongly, and give what their fakes promise."""

from __future__ import annotations

import pytest
import torch

import kernel_laws
import normkit
from contract import draw
from normkit import specs
from normkit.errors import DtypeError, ShapeError
from normkit.ops import schemas
from normkit.ops.plans import plan
from triton_kernels import DEVICE, moved

pytestmark = pytest.mark.usefixtures("kernels")


def rest(spec, dtype, n=8):
    weight = torch.ones(n, dtype=dtype, device=DEVICE) if spec.has_weight else None
    bias = torch.ones(n, dtype=dtype, device=DEVICE) if spec.has_bias else None
    return weight, bias, *plan(spec)[1:4]


@pytest.mark.parametrize("wide", ["x", "residual", "weight", "bias"])
def test_float64_is_refused(wide):
    """What takes the short way to the operators is not asked about its dtypes before."""
    from normkit.kernels.triton import operators

    given = {"x": torch.ones(3, 8), "residual": torch.ones(3, 8), "weight": torch.ones(8), "bias": torch.ones(8)}
    given[wide] = given[wide].double()
    with pytest.raises(DtypeError, match=r"compute float32, bfloat16 and float16, got torch\.float64"):
        operators.add_normalize_forward(*given.values(), *plan(specs.TORCH_LAYER_NORM)[1:4])


def test_other_sizes_are_refused():
    from normkit.kernels.triton import operators

    numbers = plan(specs.TORCH_LAYER_NORM)[1:4]
    with pytest.raises(ShapeError, match="a gain or bias must have 8 numbers, one for each feature, got 7"):
        operators.normalize_rows(torch.ones(3, 8), torch.ones(7), None, *numbers)
    with pytest.raises(ShapeError, match="rows of at least one number"):
        operators.normalize_rows(torch.ones(3, 0), None, None, *numbers)


def test_other_sizes_are_refused_after_a_call_that_fits():
    """What is remembered of that call is not taken for this one: the kernel would read past the end."""
    from normkit.kernels.triton import operators

    x, numbers = torch.ones(3, 8), plan(specs.TORCH_LAYER_NORM)[1:4]
    _, statistics = operators.normalize_forward(x, torch.ones(8), None, *numbers)
    with pytest.raises(ShapeError, match="must have 8 numbers"):
        operators.normalize_forward(x, torch.ones(7), None, *numbers)
    operators.normalize_backward(x, x, statistics, torch.ones(8), None, *numbers, None, True, True, False)
    with pytest.raises(ShapeError, match=r"must have one shape, got \(2, 8\) and \(3, 8\)"):
        operators.normalize_backward(x[:2], x, statistics, torch.ones(8), None, *numbers, None, True, True, False)
    with pytest.raises(RuntimeError):
        normkit.rms_norm(torch.ones(3, 8), (4,), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [specs.TORCH_LAYER_NORM, specs.LLAMA, specs.SCALE_NORM.replace(has_weight=False)])
def test_statistics_are_those_that_the_fake_promises(spec, dtype):
    """On a GPU; where the interpreter runs, a tensor is taken for one that is there."""
    x = torch.randn(5, 8, dtype=dtype, device=DEVICE)
    given = rest(spec, dtype)
    real = schemas.normalize_forward(x, *given)[1]
    found = specs_of_cuda(x)
    promised = schemas._statistics(found, *given[:3])
    assert (promised.shape, promised.dtype) == (real.shape, real.dtype)


def specs_of_cuda(x):
    """As much of a tensor on a GPU as the fakes ask for."""

    class OnGpu:
        is_cuda, shape, dtype = True, x.shape, x.dtype

        def new_empty(self, shape, dtype):
            return torch.empty(shape, dtype=dtype)

    return OnGpu()


def test_the_input_of_a_backward_may_have_been_written_over_in_its_own_storage():
    """A stream that is added to in place: the sum is what is kept."""
    case = moved(draw(specs.OLMO2, 3, 8))
    x = case.x.clone().requires_grad_()
    inner = x * 1.0
    y = normkit.rms_norm(inner, (8,), case.weight)
    inner.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, case.dy)


@pytest.mark.parametrize("shift", [1, 8, 40])
@pytest.mark.parametrize("spec", [specs.NANOCHAT, specs.OLMO])
def test_an_out_that_overlaps_the_input_is_right_or_refused(spec, shift):
    base = torch.randn(48 + shift, device=DEVICE)
    first, second = base[:48].view(6, 8), base[shift:].view(6, 8)
    for x, out in ((first, second), (second, first)):
        kernel_laws.is_right_or_refuses_where_out_overlaps(x, out, spec)


@pytest.mark.parametrize("spec", [specs.NANOCHAT, specs.TORCH_LAYER_NORM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_may_be_the_input(spec, dtype):
    kernel_laws.may_write_over_its_input(spec, moved(draw(spec, 5, 24, dtype=dtype)))


def test_twice_and_under_transforms_the_reference_computes():
    case = moved(draw(specs.TORCH_LAYER_NORM, 3, 6))
    x = case.x.clone().requires_grad_()
    y = normkit.layer_norm(x, (6,), case.weight, case.bias)
    (dx,) = torch.autograd.grad(y, x, case.dy, create_graph=True)
    (twice,) = torch.autograd.grad(dx.square().sum(), x)
    plain = torch.nn.functional.layer_norm(x, (6,), case.weight, case.bias)
    (theirs,) = torch.autograd.grad(plain, x, case.dy, create_graph=True)
    assert torch.allclose(twice, torch.autograd.grad(theirs.square().sum(), x)[0], atol=1e-4)
    rows = torch.func.vmap(lambda row: normkit.layer_norm(row, (6,), case.weight, case.bias))(case.x)
    assert torch.allclose(rows, y, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer", "added", "root"])
def test_compiled_values_and_gradients_are_the_eager_ones(name):
    def function(x, weight, bias):
        if name == "layer":
            return normkit.layer_norm(x * 2, x.shape[-1:], weight, bias) * 3
        if name == "root":
            return normkit.rms_norm(x * 2, x.shape[-1:], weight) + bias
        y, new = normkit.add_layer_norm(x, x.sin(), x.shape[-1:], weight, bias)
        return y * new

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (3, 50, 700):
        inputs = [torch.randn(*sizes, device=DEVICE, requires_grad=True) for sizes in ((rows, 1000), (1000,), (1000,))]
        pairs = []
        for call in (function, compiled):
            y = call(*inputs)
            pairs.append((y, *torch.autograd.grad(y.sum(), inputs)))
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
