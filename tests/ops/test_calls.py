"""Values and gradients of every route, with and without kernels, eager, compiled and under every transform."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import normkit
from fake_kernels import python_kernels
from helpers import PRESETS, assert_close, diagonal
from normkit import reference, specs
from normkit.kernels import cpu, signatures
from normkit.ops import calls
from normkit.ops.plans import plan

pytestmark = pytest.mark.slow

ROWS = {name: spec for name, spec in PRESETS.items() if signatures.supports_spec(spec) is None}
ROUTES = ["kernels", "no kernels", *(["library"] if cpu.load() is None else [])]


@pytest.fixture(params=ROUTES)
def called(request, monkeypatch):
    """Names of the operators that were called; None where it is the library that computes, or there are no kernels."""
    if request.param == "kernels":
        with python_kernels() as names:
            yield names
    elif request.param == "library":
        yield None
    else:
        monkeypatch.setattr(calls, "_kernels_missing", "not wanted")
        yield None


def expect(called, *names):
    if called is not None:
        assert [called.pop(0) for _ in [*called]] == [*names]


def tensors(dtype=torch.float64, n=6, rows=4):
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=dtype) for shape in ((rows, n), (n,), (n,))]


def layer(x, weight, bias):
    return normkit.layer_norm(x, x.shape[-1:], weight, bias)


def llama(x, weight, bias):
    return normkit.normalize(x, specs.LLAMA, weight) + bias


def added(x, weight, bias):
    y, new_residual = normkit.add_layer_norm(x, x.sin(), x.shape[-1:], weight, bias)
    return y * new_residual.cos()


FUNCTIONS = {"layer": layer, "llama": llama, "added": added}


def plain(function):
    """The same by the reference and torch's autograd alone."""

    def call(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "is_plain", lambda *_: False)
            patch.setattr(calls, "choose", lambda *_: calls._PLAIN_REFERENCE)
            return function(*arguments)

    return call


def test_the_route_follows_what_is_asked(called):
    x, weight, bias = tensors(torch.float32)
    layer(x, weight, bias)
    expect(called, "normalize_rows")
    x.requires_grad_()
    layer(x, weight, bias).sum().backward()
    expect(called, "normalize_forward", "normalize_backward")
    with torch.no_grad():
        layer(x, weight, bias)
    expect(called, "normalize_rows")
    func.vmap(lambda row: layer(row, weight, bias))(x)
    with forward_ad.dual_level():
        layer(x, weight, bias)
    expect(called)
    normkit.normalize(x, specs.TORCH_LAYER_NORM.replace(centre_numerator=False), weight, bias)
    layer(x.to("meta"), weight.to("meta"), bias.to("meta"))
    expect(called)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_plan_says_all_of_a_spec(name, dtype):
    spec = ROWS[name]
    x, weight, bias = tensors(dtype)
    given = weight if spec.has_weight else None, bias if spec.has_bias else None
    with python_kernels():
        y = normkit.normalize(x, spec, *given)
        out = normkit.normalize(x, spec, *given, out=torch.empty_like(y))
    expected = reference.forward(x, spec, *given)
    assert torch.equal(y, expected)
    assert torch.equal(out, expected)
    assert y.dtype == expected.dtype


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_reference(name, dtype):
    spec = ROWS[name]
    x, weight, bias = tensors(dtype)
    given = [x, *([weight] if spec.has_weight else []), *([bias] if spec.has_bias else [])]
    inputs = [tensor.requires_grad_() for tensor in given]
    pair = weight if spec.has_weight else None, bias if spec.has_bias else None
    y = normkit.normalize(x, spec, *pair)
    dy = torch.randn_like(y)
    expected = [value for value in reference.backward(dy, x.detach(), spec, *pair) if value is not None]
    for actual, wanted in zip(torch.autograd.grad(y, inputs, dy), expected, strict=True):
        assert_close(actual, wanted.detach(), units=4)


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_finite_differences_agree_once_twice_forward_and_batched(name):
    inputs = [tensor.requires_grad_() for tensor in tensors(n=4, rows=2)]
    assert torch.autograd.gradcheck(FUNCTIONS[name], inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], inputs)


def loss(function):
    return lambda *arguments: function(*arguments).square().sum()


TRANSFORMS = {
    "grad": lambda f: func.grad(loss(f), argnums=(0, 1, 2)),
    "vmap": lambda f: lambda x, w, b: func.vmap(f, in_dims=(0, None, None))(x, w, b),
    "vmap over gains": lambda f: lambda x, w, b: func.vmap(f, in_dims=(None, 0, None))(x, torch.stack([w, w + 1]), b),
    "jvp": lambda f: lambda x, w, b: func.jvp(f, (x, w, b), (x.cos(), w.sin(), b.sin())),
    "jacrev": lambda f: func.jacrev(f, argnums=(0, 1, 2)),
    "jacfwd": lambda f: func.jacfwd(f, argnums=(0, 1, 2)),
    "hessian": lambda f: func.hessian(loss(f), argnums=(0, 1)),
    "vmap of grad": lambda f: func.vmap(func.grad(loss(f)), in_dims=(0, None, None)),
}


def assert_transformed(name, transform, transformed):
    """Against what torch itself makes of the reference's operations, without any of ours."""
    leaves = torch.utils._pytree.tree_leaves
    arguments = tensors(n=4, rows=3)
    expected = TRANSFORMS[transform](plain(FUNCTIONS[name]))(*arguments)
    actual = transformed(*arguments)
    for mine, wanted in zip(leaves(actual), leaves(expected), strict=True):
        assert_close(mine, wanted, units=256)


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_give_the_right_values(name, transform):
    assert_transformed(name, transform, TRANSFORMS[transform](FUNCTIONS[name]))


def compiled_cases():
    """Any two of route, function, transform and order meet; all four would be six times as many compilations."""
    for (row, name), (column, transform) in itertools.product(enumerate(FUNCTIONS), enumerate(TRANSFORMS)):
        route = ROUTES[(row + column) % len(ROUTES)]
        order = ["compiled", "compiled inside"][(row + column) % 2]
        is_quick = row == column % len(FUNCTIONS) and column < 4
        yield pytest.param(route, name, transform, order, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(("called", "name", "transform", "order"), [*compiled_cases()], indirect=["called"])
def test_compiled_transforms_give_the_right_values(name, transform, order):
    torch._dynamo.reset()
    if order == "compiled":
        transformed = torch.compile(TRANSFORMS[transform](FUNCTIONS[name]), fullgraph=True, backend="aot_eager")
    else:
        transformed = TRANSFORMS[transform](torch.compile(FUNCTIONS[name], backend="aot_eager"))
    assert_transformed(name, transform, transformed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dynamic"), diagonal([*FUNCTIONS], [False, True]))
def test_compile_keeps_the_operators_and_compiles_once(called, name, dynamic):
    function = FUNCTIONS[name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 5, 9) if dynamic else (3,):
        inputs = [tensor.requires_grad_() for tensor in tensors(torch.float32, rows=rows)]
        expected = function(*inputs)
        wanted = torch.autograd.grad(expected.sum(), inputs)
        if called is not None:
            called.clear()
        y = compiled(*inputs)
        assert torch.equal(y, expected)
        for mine, other in zip(torch.autograd.grad(y.sum(), inputs), wanted, strict=True):
            assert torch.equal(mine, other)
        forward = "add_normalize_forward" if name == "added" else "normalize_forward"
        expect(called, forward, "normalize_backward")
    assert len(graphs) == 1


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_compiler_partitions_forward_and_backward_around_them(name):
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    inputs = [tensor.requires_grad_() for tensor in tensors(torch.float32)]
    expected = FUNCTIONS[name](*inputs)
    for mine, other in zip(
        (compiled(*inputs), *torch.autograd.grad(compiled(*inputs).sum(), inputs)),
        (expected, *torch.autograd.grad(expected.sum(), inputs)),
        strict=True,
    ):
        assert_close(mine, other, units=16)


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("name", ["layer", "added"])
def test_little_is_kept_for_backward(name):
    kept = []
    inputs = [tensor.requires_grad_() for tensor in tensors(torch.bfloat16, n=64, rows=32)]
    x, weight, bias = inputs
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        if name == "layer":
            layer(*inputs)
        else:
            normkit.add_layer_norm(x, x.detach(), (64,), weight, bias)
    own = {weight.data_ptr(), bias.data_ptr()}
    extra = sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in own)
    assert extra == x.nbytes + (32 * 2 * 8 if calls._kernels_missing is None else 0)


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_one_output_of_the_added_form(part, residual_dtype):
    x, weight, bias = (tensor.requires_grad_() for tensor in tensors(torch.bfloat16))
    residual = torch.randn(4, 6).to(residual_dtype).requires_grad_()
    outputs = normkit.add_layer_norm(x, residual, (6,), weight, bias)
    assert [value.dtype for value in outputs] == [torch.bfloat16, residual_dtype]
    dy = torch.randn_like(outputs[part])
    dx, dresidual, dweight = torch.autograd.grad(outputs[part], [x, residual, weight], dy, allow_unused=True)
    if part == 0:
        wanted = reference.backward(dy, outputs[1].detach(), specs.TORCH_LAYER_NORM, weight, bias)
        assert_close(dresidual, wanted.x.detach(), units=1)
        assert_close(dweight, wanted.weight.detach(), units=1)
    else:
        assert torch.equal(dresidual, dy)
        assert dweight is None
    assert torch.equal(dx, dresidual.to(torch.bfloat16))


@pytest.mark.usefixtures("called")
def test_strided_input_rows_and_parameters():
    x, weight, bias = tensors(n=6, rows=4)
    expected = layer(x, weight, bias)
    transposed = x.T.contiguous().T
    apart = torch.stack([weight, bias], -1)
    assert torch.equal(layer(transposed, apart[:, 0], apart[:, 1]), expected)
    assert torch.equal(layer(x[:, None].expand(4, 2, 6), weight, bias)[:, 1], expected)
    two = normkit.layer_norm(x.reshape(2, 2, 6), (2, 6), weight.expand(2, 6), bias.expand(2, 6))
    assert torch.equal(
        two.reshape(2, 12), normkit.layer_norm(x.reshape(2, 12), (12,), weight.repeat(2), bias.repeat(2))
    )


def test_a_subclass_sees_the_references_operations(called):
    class Named(torch.Tensor):
        pass

    x, weight, bias = tensors(torch.float32)
    y = layer(x.as_subclass(Named), weight, bias)
    assert isinstance(y, Named)
    expect(called)
    assert_close(y.as_subclass(torch.Tensor), layer(x, weight, bias))


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing_on_the_cpu(autocast):
    x, weight, bias = (tensor.requires_grad_() for tensor in tensors(torch.float32))
    expected = torch.autograd.grad(layer(x, weight, bias).sum(), [x, weight, bias])
    with torch.autocast("cpu", autocast):
        y = layer(x, weight, bias)
    for mine, other in zip(torch.autograd.grad(y.sum(), [x, weight, bias]), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.usefixtures("called")
def test_the_short_way_is_that_of_plain_tensors(called, monkeypatch):
    """What `normalize_plain` gives is what `normalize` gives, and it is tried only where it may be."""
    tried = []
    short = calls.normalize_plain
    monkeypatch.setattr(calls, "normalize_plain", lambda *given: tried.append(1) or short(*given))
    x, weight, bias = tensors(torch.float32)
    y = layer(x, weight, bias)
    assert len(tried) == (calls._kernels_missing is None)
    monkeypatch.setattr(calls, "is_plain", lambda *_: False)
    assert torch.equal(layer(x, weight, bias), y)
    assert torch.equal(llama(x, weight, bias), plain(llama)(x, weight, bias)) or called is None
    monkeypatch.undo()
    if called is not None:
        called.clear()
    with torch.no_grad(), forward_ad.dual_level():
        assert not calls.is_plain(x, weight, bias)
    assert func.vmap(lambda row: row * calls.is_plain(row, None, None))(x).abs().max() == 0
    expect(called)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_calls_that_the_short_way_refuses_are_computed_all_the_same(called, wide):
    # Parameters wider than the kernels' arithmetic, and those of another dtype than x.
    x, weight, bias = tensors(torch.bfloat16)
    given = weight.to(wide).requires_grad_(), bias.to(wide)
    y = layer(x, *given)
    expected = plain(layer)(x, *given)
    assert_close(y, expected, units=1)
    (dweight,) = torch.autograd.grad(y.float().sum(), given[0])
    assert dweight.dtype == wide
    assert_close(dweight, torch.autograd.grad(expected.float().sum(), given[0])[0], units=64)
    # Of the wide ones the operator is tried, and refuses.
    expect(called, "normalize_forward", *(["normalize_backward"] if wide == torch.float32 else []))


@pytest.mark.usefixtures("called")
def test_a_tensor_that_outlived_its_transform_is_normalized():
    kept = []
    x, weight, bias = tensors(torch.float32)
    func.grad(lambda row: kept.append(row * 1.0) or row.sum())(x)
    (dead,) = kept
    assert_close(layer(dead, weight, bias), layer(x, weight, bias))
    weight.requires_grad_()
    y = layer(dead, weight, bias)
    wanted = torch.autograd.grad(layer(x, weight, bias).square().sum(), weight)[0]
    assert_close(torch.autograd.grad(y.square().sum(), weight)[0], wanted)


@pytest.mark.usefixtures("called")
def test_rows_of_several_axes_have_gradients_of_their_shape():
    x, weight, bias = torch.randn(3, 2, 6), torch.randn(2, 6), torch.randn(6, 2).T
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = normkit.layer_norm(x, (2, 6), weight, bias)
    dy = torch.randn(2, 3, 6).transpose(0, 1)
    expected = plain(normkit.layer_norm)(x, (2, 6), weight, bias)
    assert_close(y, expected)
    for mine, wanted in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True):
        assert_close(mine, wanted, units=16)


def test_an_export_holds_torchs_operations_alone_and_a_plan_is_made_once():
    module = normkit.LayerNorm(6)
    program = torch.export.export(module, (torch.randn(4, 6),))
    assert not [node for node in program.graph.nodes if "normkit" in str(node.target)]
    x = torch.randn(4, 6)
    assert_close(program.module()(x), module(x))
    assert plan(specs.LLAMA) is plan(specs.LLAMA.replace())
    assert plan(specs.LLAMA).unsupported is None
    assert "axes" in plan(specs.CONVNEXT).unsupported


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
def test_channels_are_computed_by_the_kernels_too(called, dtype, residual):
    spec, (x, weight, bias) = specs.CONVNEXT, (torch.randn(*shape, dtype=dtype) for shape in ((2, 6, 3, 5), (6,), (6,)))
    if residual:
        x = x.to(memory_format=torch.channels_last)
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    if residual:
        y, new_residual = normkit.add_normalize(x, x.detach().sin(), spec, weight, bias)
        expected, sums = reference.add_forward(x, x.detach().sin(), spec, weight, bias)
        assert torch.equal(new_residual, sums)
    else:
        y, expected, sums = normkit.normalize(x, spec, weight, bias), reference.forward(x, spec, weight, bias), x
    # A sum in another order is the only difference.
    assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = reference.backward(dy, sums.detach(), spec, weight.detach(), bias.detach())
    for mine, other in zip(torch.autograd.grad(y, given, dy), wanted, strict=True):
        assert_close(mine, other, units=64)
    name = "add_normalize_forward" if residual else "normalize_forward"
    expect(called, name, "normalize_backward")
