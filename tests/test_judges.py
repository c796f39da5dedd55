"""Other people's tests of these norms: PyTorch's OpInfo and ModuleInfo, and ONNX's node cases.

Each test states how many cases its judge holds, so that none of them can quietly become an empty loop, and where the
kernels are built, that these compute all of them.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from contract import Calls
from helpers import assert_close
from normkit import functional, layers, reference, specs
from normkit.kernels import cpu

# Importing PyTorch's table of operations takes five seconds.
pytestmark = pytest.mark.slow

# Units of the last place that an output may be off by.
UNITS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}
SAMPLES = {"nn.functional.layer_norm": 6, "nn.functional.rms_norm": 6, "native_layer_norm": 20}
ERRORS = {"nn.functional.rms_norm": 3, "native_layer_norm": 4}
MODULES = {"nn.LayerNorm": (layers.LayerNorm, 14), "nn.RMSNorm": (layers.RMSNorm, 12)}
OURS = {
    "nn.functional.layer_norm": functional.layer_norm,
    "nn.functional.rms_norm": functional.rms_norm,
    "native_layer_norm": functional.layer_norm,
}


def operation(name: str):
    """PyTorch's description of an operation: sample inputs, error inputs, a NumPy reference."""
    table = import_module("torch.testing._internal.common_methods_invocations").op_db
    return next(entry for entry in table if entry.name == name)


def mapped(sample, function):
    """The arguments of a sample with `function` applied to its tensors."""

    def apply(value):
        return function(value) if isinstance(value, torch.Tensor) else value

    args = [apply(value) for value in (sample.input, *sample.args)]
    return args, {key: apply(value) for key, value in sample.kwargs.items()}


def first(result):
    """The output; native_layer_norm returns mean and 1/s beside it."""
    return result[0] if isinstance(result, tuple) else result


def widened(name, sample, dtype):
    """The arguments of a sample in float64, with the eps that a narrower input has."""
    args, keywords = mapped(sample, lambda tensor: tensor.detach().double().requires_grad_(tensor.requires_grad))
    if name == "nn.functional.rms_norm":
        # Without eps it is the machine epsilon of the dtype's own arithmetic.
        keywords.setdefault("eps", 2.0**-52 if dtype == torch.float64 else 2.0**-23)
    return args, keywords


def assert_kernels_ran(calls, expected):
    """The expected operators and no others, where there are kernels."""
    assert calls.names == ([] if cpu.load() else expected)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", SAMPLES)
def test_opinfo_samples(name, dtype):
    op = operation(name)
    samples = list(op.sample_inputs("cpu", dtype))
    assert len(samples) == SAMPLES[name]
    with Calls() as calls:
        results = [OURS[name](sample.input, *sample.args, **sample.kwargs) for sample in samples]
    assert_kernels_ran(calls, ["normalize_rows"] * len(samples))
    for sample, ours in zip(samples, results, strict=True):
        args, keywords = widened(name, sample, dtype)
        # The result is rounded once; one eps in -0.5 makes some rows NaN, in both.
        assert_close(ours, first(op.op(*args, **keywords)), dtype=dtype, units=UNITS[dtype])


@pytest.mark.parametrize("name", SAMPLES)
def test_opinfo_numpy_reference(name):
    op = operation(name)
    samples = list(op.sample_inputs("cpu", torch.float64))
    assert len(samples) == SAMPLES[name]
    for sample in samples:
        args, keywords = mapped(sample, lambda tensor: tensor.numpy())
        with np.errstate(invalid="ignore"):
            expected = first(op.ref(*args, **keywords))
        ours = OURS[name](sample.input, *sample.args, **sample.kwargs)
        assert_close(ours, torch.from_numpy(np.asarray(expected)))


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", SAMPLES)
def test_opinfo_gradients(name, dtype):
    """Against torch's own in float64, whatever the dtype."""
    op = operation(name)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) == SAMPLES[name]
    with Calls() as calls:
        for sample in samples:
            tensors = [value for value in (sample.input, *sample.args) if isinstance(value, torch.Tensor)]
            tensors += [value for value in sample.kwargs.values() if isinstance(value, torch.Tensor)]
            assert all(tensor.requires_grad for tensor in tensors)
            ours = OURS[name](sample.input, *sample.args, **sample.kwargs)
            dy = torch.randn_like(ours)
            args, keywords = widened(name, sample, dtype)
            theirs = first(op.op(*args, **keywords))
            wide = [value for value in (*args, *keywords.values()) if isinstance(value, torch.Tensor)]
            for mine, other in zip(
                torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(theirs, wide, dy.double()), strict=True
            ):
                # Rows of one or two features have a gradient that is all cancellation. Its terms are gain * dy / s:
                # the gains of these samples lie below 9, and s above sqrt(1e-5). 16 bits are rounded at the end.
                terms = 9 * 1e-5**-0.5 * dy.double().norm()
                arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
                size = other.nan_to_num().abs() + terms * torch.finfo(arithmetic).eps / torch.finfo(dtype).eps
                assert_close(mine, other, dtype=dtype, terms=size)
    assert_kernels_ran(calls, ["normalize_forward", "normalize_backward"] * len(samples))


def test_opinfo_mean_and_reciprocal_scale():
    op = operation("native_layer_norm")
    seen = 0
    for sample in op.sample_inputs("cpu", torch.float64):
        shape, eps = sample.args[0], sample.args[3]
        spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes=tuple(range(-len(shape), 0)))
        _, mean, reciprocal = op.op(sample.input, *sample.args)
        ours = reference.statistics(reference.to_rows(sample.input, spec), spec, eps)
        assert_close(ours.mean.reshape(mean.shape), mean)
        assert_close(ours.scale.reciprocal().reshape(mean.shape), reciprocal, units=32)
        seen += 1
    assert seen == 20


@pytest.mark.parametrize("name", ERRORS)
def test_opinfo_error_inputs(name):
    errors = list(operation(name).error_inputs("cpu"))
    assert len(errors) == ERRORS[name]
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type):
            OURS[name](sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", MODULES)
def test_moduleinfo_inputs(name, dtype):
    table = import_module("torch.testing._internal.common_modules").module_db
    info = next(entry for entry in table if entry.name == name)
    ours, cases = MODULES[name]
    seen = 0
    for training in (True, False):
        for given in info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training):
            args, keywords = given.constructor_input.args, given.constructor_input.kwargs
            theirs = info.module_cls(*args, **keywords, dtype=dtype).train(training)
            for parameter in theirs.parameters():
                torch.nn.init.normal_(parameter)
            mine = ours(*args, **keywords, dtype=dtype).train(training)
            mine.load_state_dict(theirs.state_dict())
            (x,) = given.forward_input.args
            wide, input = theirs.to(torch.float64), x.detach().double().requires_grad_()
            if wide.eps is None and dtype != torch.float64:
                wide.eps = 2.0**-23
            with Calls() as calls:
                y = mine(x)
                dy, inputs = torch.randn_like(y), [x, *mine.parameters()]
                mine_of = torch.autograd.grad(y, inputs, dy)
            assert_kernels_ran(calls, ["normalize_forward", "normalize_backward"])
            expected = wide(input)
            assert_close(y, expected, dtype=dtype)
            if given.reference_fn is not None:
                # Its statistics are float32 whatever the input.
                assert_close(given.reference_fn(wide, input).float(), expected, dtype=torch.float32)
            gradients = torch.autograd.grad(expected, [input, *wide.parameters()], dy.double())
            for actual, other in zip(mine_of, gradients, strict=True):
                # Two float64 sums meet, of up to 640 terms.
                assert_close(actual, other, dtype=dtype, units=16 if dtype == torch.float64 else 8)
            seen += 1
    assert seen == cases


def onnx_cases(operator: str) -> list:
    """The node cases of one operator; the "expanded" forms are graphs of other operators."""
    import_module(f"onnx.backend.test.case.node.{operator.lower()}")
    cases = import_module("onnx.backend.test.case.node")._NodeTestCases
    return [case for case in cases if [node.op_type for node in case.model.graph.node] == [operator]]


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_onnx_node_cases(operator):
    cases = onnx_cases(operator)
    assert len(cases) == 19
    axes = set()
    for case in cases:
        (node,) = case.model.graph.node
        attributes = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        ((inputs, outputs),) = case.data_sets
        x, *parameters = (torch.from_numpy(array) for array in inputs)
        axis = attributes.get("axis", -1)
        axes.add((x.dim(), axis))
        shape = x.shape[axis:]
        function = functional.layer_norm if operator == "LayerNormalization" else functional.rms_norm
        eps = attributes.get("epsilon", 1e-5)
        with Calls() as calls:
            y = function(x, shape, *parameters, eps=eps)
        assert_kernels_ran(calls, ["normalize_rows"])
        # Their reference sums in float32, over up to 120 features.
        assert_close(y, torch.from_numpy(outputs[0]), units=4)
        if operator == "LayerNormalization":
            spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes=tuple(range(-len(shape), 0)))
            statistics = reference.statistics(reference.to_rows(x, spec).double(), spec, eps)
            for ours, theirs in zip((statistics.mean, statistics.scale.reciprocal()), outputs[1:], strict=True):
                assert_close(torch.from_numpy(theirs), ours.reshape(theirs.shape), dtype=torch.float32, units=4)
    assert {axis for dims, axis in axes if dims == 4} == {-4, -3, -2, -1, 0, 1, 2, 3}
    assert {axis for dims, axis in axes if dims == 3} == {-3, -2, -1, 0, 1, 2}
    assert {axis for dims, axis in axes if dims == 2} == {-2, -1, 0, 1}
