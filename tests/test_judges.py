"""Other people's tests of these norms: PyTorch's OpInfo and ModuleInfo, and ONNX's node cases.

Each test states how many cases its judge holds, so that none of them can quietly become an empty loop.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from helpers import assert_close
from normkit import functional, layers, reference, specs

# Importing PyTorch's table of operations takes five seconds.
pytestmark = pytest.mark.slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAMPLES)
def test_opinfo_samples(name, dtype):
    op = operation(name)
    samples = list(op.sample_inputs("cpu", dtype))
    assert len(samples) == SAMPLES[name]
    for sample in samples:
        args, keywords = mapped(sample, lambda tensor: tensor)
        wide_args, wide_keywords = mapped(sample, lambda tensor: tensor.double())
        if name == "nn.functional.rms_norm":
            # Without eps it is the machine epsilon of the dtype's own arithmetic.
            wide_keywords.setdefault("eps", 2.0**-52 if dtype == torch.float64 else 2.0**-23)
        truth = first(op.op(*wide_args, **wide_keywords))
        # The result is rounded once; one eps in -0.5 makes some rows NaN, in both.
        assert_close(OURS[name](*args, **keywords), truth, dtype=dtype, units=8 if dtype == torch.float64 else 1)


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


@pytest.mark.parametrize("name", SAMPLES)
def test_opinfo_gradients(name):
    op = operation(name)
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
    assert len(samples) == SAMPLES[name]
    for sample in samples:
        tensors = [value for value in (sample.input, *sample.args) if isinstance(value, torch.Tensor)]
        assert all(tensor.requires_grad for tensor in tensors)
        ours = OURS[name](sample.input, *sample.args, **sample.kwargs)
        theirs = first(op.op(sample.input, *sample.args, **sample.kwargs))
        dy = torch.randn_like(ours)
        for mine, other in zip(
            torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(theirs, tensors, dy), strict=True
        ):
            # Rows of one or two features have a gradient that is all cancellation. Its terms are gain * dy / s: the
            # gains of these samples lie below 9, and s above sqrt(1e-5).
            assert_close(mine, other, terms=other.nan_to_num().abs() + 9 * 1e-5**-0.5 * dy.norm())


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
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
            y, expected = mine(x), theirs(x)
            assert_close(y, expected)
            if given.reference_fn is not None:
                # Its statistics are float32 whatever the input.
                assert_close(given.reference_fn(theirs, x).float(), y, dtype=torch.float32)
            dy, inputs = torch.randn_like(y), [x, *mine.parameters()]
            gradients = torch.autograd.grad(expected, [x, *theirs.parameters()], dy)
            for actual, other in zip(torch.autograd.grad(y, inputs, dy), gradients, strict=True):
                # Sums of up to 640 float32 terms on torch's side.
                assert_close(actual, other, units=16, length=max(1, x.numel() // x.shape[-1]))
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
        y = function(x, shape, *parameters, eps=eps)
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
