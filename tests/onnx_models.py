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
