"""Norms of graphs written by hand: what is planted is what is found, and nothing else is found."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from helpers import ROOT
from normkit import reference
from normkit.comparison.onnx_file import OnnxModel
from onnx_models import (
    AXES,
    DECOMPOSED,
    EPS,
    F32,
    FUSED,
    LAYER_NORM,
    RMS,
    TWO,
    B,
    W,
    gain,
    graph_of,
    large,
    layer_norm,
    parsed,
    written,
)


def book(tmp_path, model):
    opened = OnnxModel.open(written(tmp_path, model))
    return opened, opened.norms()


def only(tmp_path, model):
    """The one norm of a model, checked against what onnx itself makes of the whole graph."""
    opened, found = book(tmp_path, model)
    assert found.left_out == {}
    (entry,) = found.entries
    passport = entry.passport
    x = torch.randn(5, 16) * 3 + 1
    if (
        passport.dtype == "float32"
        and opened.sites[0].dtype == 1
        and len(opened.proto.graph.input[0].type.tensor_type.shape.dim) == 2
    ):
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
        y = reference.forward(x.double(), passport.spec, passport.weight, passport.bias)
        # Both compute in float32 what is rounded once here; an output has a few terms.
        assert torch.allclose(y, torch.from_numpy(expected).double(), rtol=1e-5, atol=1e-5)
    return opened, entry


@pytest.mark.parametrize(("body", "constants", "facts"), DECOMPOSED.values(), ids=DECOMPOSED)
def test_decomposed_norms(tmp_path, body, constants, facts):
    opened, entry = only(tmp_path, parsed(body, constants))
    spec = entry.passport.spec.to_json()
    assert {name: spec[name] for name in facts} == pytest.approx(facts)
    if "norm.weight" in constants:
        assert entry.path == "norm"
        assert entry.passport.weight_name == "norm.weight"
        assert opened.weights.eps == {"norm": pytest.approx(1e-3)}


@pytest.mark.parametrize(("body", "constants", "facts"), FUSED.values(), ids=FUSED)
def test_fused_norms(tmp_path, body, constants, facts):
    _, found = book(tmp_path, parsed(body, constants, shape="1,rows,16" if "Skip" in body else "rows,16"))
    assert found.left_out == {}
    spec = found.entries[0].passport.spec.to_json()
    assert {name: spec[name] for name in facts} == pytest.approx(facts)


def test_rms_normalization_of_opset_23(tmp_path):
    body = "y = RMSNormalization<epsilon=0.001, axis=-1>(x, norm.weight)"
    _, entry = only(tmp_path, parsed(body, W, opset=23))
    assert entry.passport.spec.eps == pytest.approx(1e-3)
    assert not entry.passport.spec.centre_numerator


@pytest.mark.parametrize(
    ("body", "constants", "groups"),
    [
        ("y = GroupNormalization<epsilon=0.001, num_groups=4>(x, norm.weight, norm.bias)", W | B, 4),
        ("y = InstanceNormalization<epsilon=0.001>(x, norm.weight, norm.bias)", W | B, 16),
        (
            """a = Reshape(x, split)  n = InstanceNormalization<epsilon=0.001>(a, ones, zeros)  h = Shape(x)
            j = Reshape(n, h)  g = Mul(j, norm.weight)  y = Add(g, norm.bias)""",
            {
                "norm.weight": gain()[:, None],
                "norm.bias": gain()[:, None],
                "split": np.array([0, 4, -1]),
                "ones": np.ones(4, F32),
                "zeros": np.zeros(4, F32),
            },
            4,
        ),
    ],
    ids=["GroupNormalization", "InstanceNormalization", "as torch exports a group norm"],
)
def test_norms_over_places(tmp_path, body, constants, groups):
    _, entry = only(tmp_path, parsed(body, constants, shape="rows,16,6", opset=21))
    spec = entry.passport.spec
    assert (spec.groups, spec.eps) == (groups, pytest.approx(1e-3))
    assert spec.has_weight
    assert spec.has_bias
    assert entry.path == "norm"


def test_a_batch_norm_is_named(tmp_path):
    body = "y = BatchNormalization<epsilon=0.001>(x, norm.weight, norm.bias, mean, var)"
    _, found = book(tmp_path, parsed(body, W | B | {"mean": gain(), "var": gain()}, shape="rows,16,6"))
    assert found.entries == ()
    assert "batch norm" in found.left_out["norm"]


def test_an_adaptive_norm_is_named(tmp_path):
    """The gain is an activation: the norm in front of it has none."""
    body = LAYER_NORM + "t = Tanh(x)  a = MatMul(t, m_)  y = Mul(a, n)"
    _, entry = alone(tmp_path, parsed(body, AXES | TWO | EPS | {"m_": np.eye(16, dtype=F32)}))
    assert not entry.passport.spec.has_weight
    assert any("another activation multiplies its output" in line for line in entry.passport.readings["kind"].evidence)


def alone(tmp_path, model):
    opened, found = book(tmp_path, model)
    (entry,) = found.entries
    return opened, entry


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x)",
        "t = ReduceMean(x, axes)  y = Sub(x, t)",
        "t = ReduceMax(x, axes)  d = Sub(x, t)  p = Exp(d)  s = ReduceSum(p, axes)  y = Div(p, s)",
        "y = Softmax(x)",
        "q = Sigmoid(x)  t = ReduceMean(q, axes)  y = Mul(x, t)",
        "y = Mul(x, norm.weight)",
    ],
)
def test_what_is_no_norm_is_not_found(tmp_path, body):
    _, found = book(tmp_path, parsed(body, AXES | W))
    assert found.entries == ()
    assert found.left_out == {}


CASTS = {
    "Llama's order": (
        "w = Cast<to=1>(x) Q  r = Cast<to=10>(n)  y = Mul(norm.weight, r)",
        np.float16,
        {"cast": "early", "statistics_dtype": "float32"},
    ),
    "gain in float32": (
        "w = Cast<to=1>(x) Q  r = Mul(norm.weight, n)  y = Cast<to=10>(r)",
        F32,
        {"cast": "late", "statistics_dtype": "float32"},
    ),
    "all in float16": ("w = Identity(x) Q  y = Mul(norm.weight, n)", np.float16, {"statistics_dtype": "input"}),
}


@pytest.mark.parametrize(("body", "dtype", "facts"), CASTS.values(), ids=CASTS)
def test_casts_of_a_graph_in_float16(tmp_path, body, dtype, facts):
    """The casts are the graph's: onnxruntime's CPU would leave them out."""
    inner = np.float16 if "Identity" in body else F32
    squares = "q = Mul(w, w)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(w, s)"
    constants = AXES | {"eps": inner(1e-3), "norm.weight": gain().astype(dtype)}
    _, entry = only(tmp_path, parsed(body.replace("Q", squares), constants, dtype="float16"))
    spec = entry.passport.spec.to_json()
    assert {name: spec[name] for name in facts} == facts
    assert "casts" not in entry.passport.undecidable


def test_an_eps_that_float16_rounds_to_nothing(tmp_path):
    squares = "q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  "
    constants = AXES | {"eps": np.float16(1e-8), "norm.weight": gain().astype(np.float16)}
    _, entry = only(tmp_path, parsed(squares + "y = Mul(n, norm.weight)", constants, dtype="float16"))
    assert entry.passport.spec.eps == 0


def test_a_graph_in_float64(tmp_path):
    squares = "q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)"
    constants = AXES | {"eps": np.float64(1e-3), "norm.weight": gain().astype(np.float64)}
    _, entry = alone(tmp_path, parsed(squares + "  y = Mul(n, norm.weight)", constants, dtype="double"))
    assert entry.passport.spec.eps == pytest.approx(1e-3)


def test_gains_that_the_exporter_folded_are_the_graphs_own(tmp_path):
    """`1 + weight` computed at export: the graph has a plain gain, whatever the module had."""
    body = RMS + "n = Div(x, s)  y = Mul(n, onnx_Mul_7)"
    _, entry = only(tmp_path, parsed(body, AXES | TWO | EPS | {"onnx_Mul_7": 1 + gain()}))
    assert entry.passport.spec.weight_offset == 0
    assert torch.equal(entry.passport.weight, torch.from_numpy(1 + gain()))


def test_norms_in_a_row_are_apart(tmp_path):
    """The gain of the first ends it, and a stream that goes on beside it is no part of the second."""
    body = (
        RMS
        + """n = Div(x, s)  a = Mul(n, norm.weight)
        q2 = Pow(a, two)  v2 = ReduceMean(q2, axes)  e2 = Add(v2, small)  s2 = Sqrt(e2)  n2 = Div(a, s2)
        b = Mul(n2, after.weight)  y = Add(x, b)"""
    )
    constants = AXES | TWO | EPS | W | {"small": F32(1e-6), "after.weight": gain() * 2}
    _, found = book(tmp_path, parsed(body, constants))
    assert [(entry.path, entry.passport.spec.eps) for entry in found.entries] == [
        ("norm", pytest.approx(1e-3)),
        ("after", pytest.approx(1e-6)),
    ]


def test_norms_of_functions_and_subgraphs(tmp_path):
    """A module exported as a function, called in both branches of an If, as in a merged decoder."""
    nodes = parsed("y = LayerNormalization<epsilon=0.001>(x, w)", {}).graph.node
    imports = [helper.make_opsetid("", 20)]
    norm = helper.make_function("own", "Norm", ["x", "w"], ["y"], nodes, imports)
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, ("rows", 16))
    branches = {}
    for name, weight in (("then_branch", "first.weight"), ("else_branch", "second.weight")):
        call = helper.make_node("Norm", ["x", weight], ["z"], domain="own")
        branches[name] = helper.make_graph([call], name, [], [value])
    size = helper.make_node("Size", ["x"], ["n"])
    flag = helper.make_node("Cast", ["n"], ["flag"], to=9)
    model = graph_of(
        [size, flag, helper.make_node("If", ["flag"], ["y"], **branches)],
        {"first.weight": gain(), "second.weight": gain() * 2},
        opsets={"": 20, "own": 1},
        functions=[norm],
    )
    _, found = book(tmp_path, model)
    assert sorted(entry.path for entry in found.entries) == ["first", "second"]


def test_constants_that_would_fill_the_memory_are_not_computed(tmp_path):
    """A row against a column, 2**18 each: 2**36 numbers."""
    long = np.ones(2**18, F32)
    body = LAYER_NORM + "c = Unsqueeze(column, last)  w = Mul(c, row)  y = Mul(n, w)"
    constants = AXES | TWO | EPS | W | {"column": long, "row": long, "last": np.array([1])}
    _, found = book(
        tmp_path, parsed(body.replace("g = Mul(n, norm.weight)  y = Add(g, w)", "y = Mul(n, w)"), constants)
    )
    assert found.entries == () or found.entries[0].passport.spec.has_weight is False
    _, found = book(tmp_path, parsed(body.replace("v, eps", "v, w"), constants))
    assert found.entries == ()


FUZZ = """
import random, resource, sys
from pathlib import Path
import torch
from normkit.comparison.onnx_file import OnnxModel
from normkit.errors import NormkitError
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
draw = random.Random(int(sys.argv[1]))

def opened(path, whole, kinds, most):
    damaged = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, most])):
        at = draw.randrange(len(damaged))
        match draw.randrange(kinds):
            case 0: damaged[at] = draw.choice([draw.randrange(256), draw.randrange(16)])
            case 1: damaged[at] ^= 1 << draw.randrange(8)
            case 2: del damaged[at : at + draw.randrange(1, 9)]
            case _: damaged[at:at] = draw.randbytes(draw.randrange(1, 9))
    path.write_bytes(damaged)
    try:
        return OnnxModel.open(path)
    except NormkitError as error:
        assert str(error).isprintable() and len(str(error)) < 600, str(error)

for path in map(Path, sys.argv[2:4]):
    whole, models = path.read_bytes(), []
    for _ in range(150):
        if (model := opened(path, whole, 4, 8)) is not None:
            models.append(model)
            source = model.weights.source
            for name in source.tensors:
                try:
                    source.rows(name, 0, min(source.tensors[name].matrix[0], 4))
                except NormkitError as error:
                    assert str(error).isprintable(), str(error)
    assert 0 < len(models) < 100, len(models)
path, tried = Path(sys.argv[4]), 0
whole = path.read_bytes()
while tried < 12:
    if (model := opened(path, whole, 1, 4)) is None:
        continue
    tried += 1
    try:
        book = model.norms()
        assert all(reason.isprintable() for reason in book.left_out.values()), book.left_out
        model.overflow(model.record({"x": torch.ones(1, 3, 16)}))
    except NormkitError as error:
        assert str(error).isprintable() and len(str(error)) < 800, str(error)
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(24))
def test_mutated_files_are_one_line_or_a_model_whose_norms_are_named_or_left_out(tmp_path, seed):
    """Whatever the nodes have become, onnxruntime is given nothing that ends the process."""
    body, constants, _ = [*DECOMPOSED.values()][seed % len(DECOMPOSED)]
    if seed % 3 == 0:
        body, constants, _ = [*FUSED.values()][seed // 3 % len(FUSED)]
    models = [large(), layer_norm(), parsed(body, constants, shape="batch,rows,16")]
    paths = [written(tmp_path, model, f"{place}.onnx") for place, model in enumerate(models)]
    program = [sys.executable, "-c", FUZZ, str(seed), *map(str, paths)]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
