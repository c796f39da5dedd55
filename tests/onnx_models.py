"""Small ONNX graphs written by hand, each with facts that are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

OPSETS = {"": 20, "com.microsoft": 1}


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Any],
    *,
    shape: Sequence[int | str] = ("rows", 16),
    dtype: int = onnx.TensorProto.FLOAT,
    opsets: Mapping[str, int] = OPSETS,
    **more: Any,
) -> onnx.ModelProto:
    """A model that makes y of x: its initializers are float32 arrays unless they have another dtype."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs = [helper.make_tensor_value_info("x", dtype, shape)]
    outputs = [helper.make_tensor_value_info("y", dtype, shape)]
    graph = helper.make_graph(list(nodes), "graph", inputs, outputs, tensors)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **more)


def written(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def gain(n: int = 16) -> np.ndarray:
    """A gain that is none of the usual ones."""
    return np.linspace(0.5, 1.5, n, dtype=np.float32)


def layer_norm(path: str = "") -> onnx.ModelProto:
    """A model of one fused norm."""
    node = helper.make_node("LayerNormalization", ["x", "norm.weight", "norm.bias"], ["y"], path, epsilon=1e-6)
    return graph_of([node], {"norm.weight": gain(), "norm.bias": gain() - 1})


def parsed(
    body: str,
    constants: Mapping[str, Any],
    *,
    shape: str = "rows,16",
    dtype: str = "float",
    opset: int = 20,
    **more: Any,
) -> onnx.ModelProto:
    """A model that makes y of x, its nodes in the text that onnx parses; a name may have a dot, as in norm.weight."""
    plain = re.sub(r"\b(\w+)\.(weight|bias)\b", r"\1_dot_\2", body)
    graph = onnx.parser.parse_graph(f"graph ({dtype}[{shape}] x) => ({dtype}[{shape}] y) {{ {plain} }}")
    for node in graph.node:
        node.input[:] = [name.replace("_dot_", ".") for name in node.input]
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **more)


def large() -> onnx.ModelProto:
    """A product with a matrix of 16 KB, and a constant of 8 bytes."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "sizes"], ["y"])]
    rows = np.arange(4096, dtype=np.float32).reshape(64, 64)
    return graph_of(nodes, {"w": rows, "sizes": np.array([-1, 64])}, shape=("rows", 64))


# Nodes of a norm, its constants, and what is true of its spec.

F32 = np.float32
AXES = {"axes": np.array([-1])}
TWO, ONE = {"two": F32(2)}, {"one": F32(1)}
EPS = {"eps": F32(1e-3)}
W, B = {"norm.weight": gain()}, {"norm.bias": gain() - 1}

LAYER_NORM = """
    m = ReduceMean(x, axes)  d = Sub(x, m)  q = Pow(d, two)  v = ReduceMean(q, axes)
    e = Add(v, eps)  s = Sqrt(e)  n = Div(d, s)
"""
RMS = "q = Pow(x, two)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  "
CENTRED = {"centre_numerator": True, "centre_statistics": True}
PLAIN = {"centre_numerator": False, "centre_statistics": False}
INSIDE = {"eps": 1e-3, "eps_placement": "inside"}

DECOMPOSED = {
    "layer norm": (
        LAYER_NORM + "g = Mul(n, norm.weight)  y = Add(g, norm.bias)",
        AXES | TWO | EPS | W | B,
        CENTRED | INSIDE | {"correction": 0, "has_weight": True, "has_bias": True},
    ),
    "without gain": (LAYER_NORM.replace("n =", "y ="), AXES | TWO | EPS, CENTRED | INSIDE | {"has_weight": False}),
    "divided by n - 1": (
        LAYER_NORM.replace("e = Add(v", "u = Mul(v, many)  e = Add(u") + "y = Mul(n, norm.weight)",
        AXES | TWO | EPS | W | {"many": F32(16 / 15)},
        CENTRED | INSIDE | {"correction": 1},
    ),
    "of two moments": (
        """m = ReduceMean(x, axes)  q = Mul(x, x)  p = ReduceMean(q, axes)  mm = Mul(m, m)  v = Sub(p, mm)
        e = Add(v, eps)  s = Sqrt(e)  d = Sub(x, m)  n = Div(d, s)  y = Mul(n, norm.weight)""",
        AXES | EPS | W,
        CENTRED | INSIDE,
    ),
    "eps outside the root": (
        LAYER_NORM.replace("e = Add(v, eps)  s = Sqrt(e)", "e = Sqrt(v)  s = Add(e, eps)") + "y = Mul(norm.weight, n)",
        AXES | TWO | EPS | W,
        CENTRED | {"eps": 1e-3, "eps_placement": "outside"},
    ),
    "RMS norm": (RMS + "n = Div(x, s)  y = Mul(norm.weight, n)", AXES | TWO | EPS | W, PLAIN | INSIDE),
    "RMS norm by reciprocal": (
        RMS + "r = Reciprocal(s)  n = Mul(x, r)  y = Mul(n, norm.weight)",
        AXES | TWO | EPS | W,
        PLAIN | INSIDE | {"weight_offset": 0.0},
    ),
    "RMS norm by power": (
        """q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  r = Pow(e, half)  n = Mul(x, r)
        y = Mul(n, norm.weight)""",
        AXES | EPS | W | {"half": F32(-0.5)},
        PLAIN | INSIDE,
    ),
    "RMS norm of a sum of squares": (
        """q = ReduceSumSquare(x, axes)  v = Div(q, n_)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)
        y = Mul(n, norm.weight)""",
        AXES | EPS | W | {"n_": F32(16)},
        PLAIN | INSIDE | {"reduction": "mean"},
    ),
    "gain in the factor": (
        RMS + "r = Reciprocal(s)  f = Mul(r, norm.weight)  y = Mul(x, f)",
        AXES | TWO | EPS | W,
        PLAIN | INSIDE | {"has_weight": True},
    ),
    "gain plus one": (
        RMS + "g = Add(norm.weight, one)  n = Div(x, s)  y = Mul(n, g)",
        AXES | TWO | EPS | W | ONE,
        PLAIN | INSIDE | {"weight_offset": 1.0},
    ),
    "no kept axis": (
        """q = Mul(x, x)  v = ReduceMean<keepdims=0>(q, axes)  e = Add(v, eps)  s = Sqrt(e)
        k = Unsqueeze(s, axes)  n = Div(x, k)  y = Mul(n, norm.weight)""",
        AXES | EPS | W,
        PLAIN | INSIDE,
    ),
    "L2 norm": (
        "l = ReduceL2(x, axes)  c = Clip(l, eps)  h = Shape(x)  f = Expand(c, h)  y = Div(x, f)",
        AXES | EPS,
        PLAIN | {"eps": 1e-3, "eps_placement": "clamp", "reduction": "sum"},
    ),
    "L2 norm times the root of n": (
        "l = ReduceL2(x, axes)  c = Clip(l, eps)  n = Div(x, c)  k = Mul(n, root)  y = Mul(k, norm.weight)",
        AXES | EPS | W | {"root": F32(4)},
        PLAIN | {"eps_placement": "clamp", "has_weight": True},
    ),
    "RMS norm of groups": (
        """a = Reshape(x, split)  q = Mul(a, a)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(a, s)
        h = Shape(x)  j = Reshape(n, h)  y = Mul(j, norm.weight)""",
        AXES | EPS | W | {"split": np.array([-1, 4, 4])},
        PLAIN | INSIDE | {"groups": 4, "has_weight": True},
    ),
}

FUSED = {
    "LayerNormalization": ("y = LayerNormalization<epsilon=0.001>(x, norm.weight, norm.bias)", W | B, CENTRED | INSIDE),
    "LayerNormalization without bias": ("y = LayerNormalization<epsilon=0.001>(x, norm.weight)", W, CENTRED | INSIDE),
    "SimplifiedLayerNormalization": (
        "y = SimplifiedLayerNormalization<epsilon=0.001, axis=-1>(x, norm.weight)",
        W,
        PLAIN | INSIDE,
    ),
    "SkipLayerNormalization": (
        "r = Tanh(x)  y = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, r, norm.weight, norm.bias)",
        W | B,
        CENTRED | INSIDE,
    ),
    "SkipLayerNormalization with the bias before": (
        "r = Tanh(x)  y = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, r, norm.weight, norm.bias, before)",
        W | B | {"before": gain() * 7},
        CENTRED | INSIDE,
    ),
    "SkipSimplifiedLayerNormalization": (
        "r = Tanh(x)  y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.001>(x, r, norm.weight)",
        W,
        PLAIN | INSIDE,
    ),
    "MeanVarianceNormalization": ("y = MeanVarianceNormalization<axes=[1]>(x)", {}, CENTRED | {"has_weight": False}),
    "LpNormalization": ("y = LpNormalization<axis=-1, p=2>(x)", {}, PLAIN | {"reduction": "sum"}),
}
