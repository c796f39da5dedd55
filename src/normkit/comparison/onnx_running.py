"""Norms of an ONNX graph as modules: each is cut out and run by onnxruntime on the CPU, as the graph is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normkit.comparison.onnx_graph import RUNNABLE, Candidate
from normkit.comparison.onnx_tensors import OnnxSource, OnnxTensor
from normkit.errors import ModelError
from normkit.reference import HALF
from normkit.text import first_line

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Number of a dtype in ONNX -> the dtype, for those in which norms run."""
_OTHER = {10, 11, 16}
"""Those but float32."""
_MOST_VALUES = 2**22
"""Elements of the constants of one norm, gain and bias among them."""
_MOST_NODES = 100
"""Nodes that compute the constants of one norm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A candidate with its name and the type of what enters."""

    path: str
    """The module that the exporter names, else the gain without its last part, else the node."""
    class_name: str
    """Name of the module's class, else the fused operator, else the operators that it is made of."""
    candidate: Candidate
    calls: tuple[Candidate, ...]
    """All nodes that share its gain, in order: the same norm called again."""
    eps: float | None
    """As stored; None where no single number is added."""
    offset: float
    """The number that the graph adds to the gain before it multiplies: 1.0 for `1 + weight` that was not folded."""
    dtype: int
    """Dtype of the input, as ONNX numbers it; 0 if it is not known."""
    shape: tuple[int | None, ...] | None
    """Shape of the input; None for an axis of open length, or if nothing is known of it."""


class OnnxNorm(nn.Module):
    """A norm of a graph as a module: its gain and bias are parameters, all else is as the graph has it.

    A decomposed norm runs in 16 bits as written. In float32 a graph of other numbers runs with its casts to them left
    out, so that its formula shows.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, loaded: Mapping[torch.dtype, Any], names: Sequence[str], parts: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._loaded, self._names = loaded, names
        for name, part in zip(("weight", "bias"), parts, strict=True):
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))

    @classmethod
    def of(cls, proto: ModelProto, source: OnnxSource, site: Site) -> OnnxNorm:
        """The norm of a site.

        Raises:
            ModelError: If it needs an operator or so large a constant that no norm has it, or onnxruntime refuses it.
        """
        candidate = site.candidate
        native = cut(proto, source, candidate, site.dtype or 1)
        _check_sizes(native)
        models = {DTYPES.get(site.dtype, torch.float32): native}
        if site.dtype in _OTHER:
            models[torch.float32] = _in_float32(native)
        loaded = {
            dtype: (evaluator if dtype in HALF and not candidate.operator else session)(model)
            for dtype, model in models.items()
        }
        parts = [source.values(name) if name else None for name in (candidate.gain, candidate.bias)]
        return cls(loaded, [value.name for value in native.graph.input], parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxNorm:
        """A copy with parameters of its own; what runs is shared."""
        return OnnxNorm(
            self._loaded, self._names, [part if part is None else part.clone() for part in (self.weight, self.bias)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """The output; what a fused operator adds to its input is 0. Other dtypes than the graph takes are refused."""
        if x.dtype not in self._loaded:
            raise ModelError(f"the graph takes no {x.dtype}")
        parameters = [*self.parameters()]
        residuals = len(self._names) - 1 - len(parameters)
        fed = [x, *[torch.zeros_like(x)] * residuals, *parameters]
        (y,) = self._loaded[x.dtype].run(None, {name: array(part) for name, part in zip(self._names, fed, strict=True)})
        return tensor(y)


def session(model: ModelProto, values: Mapping[str, Any] | None = None) -> Any:
    """A session of onnxruntime on the CPU: one thread, silent, no libraries of operators, nothing optimized.

    Raises:
        ModelError: If onnxruntime refuses the model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has one class for each of its codes
        raise ModelError(f"onnxruntime refuses it ({printable(error)})") from None


def evaluator(model: ModelProto) -> Any:
    """The model as onnx itself evaluates it: each node in the dtypes that the graph says.

    onnxruntime's CPU has no kernels of 16 bits for most nodes, runs them in float32, and leaves out the casts between.

    Raises:
        ModelError: If it has an operator of onnxruntime's own.
    """
    from onnx.reference import ReferenceEvaluator

    try:
        return ReferenceEvaluator(model)
    except Exception as error:  # it raises RuntimeError, NotImplementedError and others
        raise ModelError(f"onnx cannot evaluate it ({printable(error)})") from None


def printable(error: BaseException) -> str:
    """The first line of an error that quotes a file, without what no terminal should be sent."""
    return "".join(each if each.isprintable() else "?" for each in first_line(error))[:400]


def array(tensor: Tensor) -> Any:
    """A tensor as an array of numpy; bfloat16 as the package of onnx has it."""
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().contiguous().numpy()
    import ml_dtypes

    return tensor.detach().contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def tensor(values: Any) -> Tensor:
    """The reverse of `array`, in memory of its own."""
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view("uint16").copy()).view(torch.bfloat16)
    return torch.tensor(values)


def cut(proto: ModelProto, source: OnnxSource, candidate: Candidate, dtype: int) -> ModelProto:
    """A candidate as a model of its own; what enters, its residual, gain and bias are its inputs."""
    from onnx import helper

    graph = candidate.graph
    moving = (candidate.entry, *candidate.residual)
    parameters = tuple(filter(None, (candidate.gain, candidate.bias)))
    members = [graph.nodes[at] for at in candidate.nodes]
    # The nodes that compute its constants, those of outer graphs first.
    before: dict[tuple[int, int], NodeProto] = {}
    constants: dict[str, TensorProto] = {}
    seen = {"", *moving, *parameters, *(name for node in members for name in node.output)}
    waiting = [(name, graph) for node in members for name in node.input]
    total = 0
    while waiting:
        name, here = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        while name not in here.makers and name not in source.stored and here.outer is not None:
            here = here.outer
        node = here.maker(name)
        if node is not None and node.op_type in RUNNABLE and len(before) < _MOST_NODES:
            before[here.depth, here.makers[name]] = node
            waiting += [(each, here) for each in node.input]
        elif node is None and name in source.stored:
            total += math.prod(source.stored[name].shape)
            if total > _MOST_VALUES:
                raise ModelError(f"its constants have more than {_MOST_VALUES:,} numbers, which no norm needs")
            constants[name] = _tensor(source, name, source.stored[name], is_zero=name == candidate.shift)
        else:
            raise ModelError(f"it needs the value {name}, which is made by {node.op_type if node else 'nothing'}")
    given = [helper.make_tensor_value_info(name, dtype, None) for name in moving]
    stored = [source.stored[name] for name in parameters]
    given += [
        helper.make_tensor_value_info(name, part.code, part.shape)
        for name, part in zip(parameters, stored, strict=True)
    ]
    nodes = [*(before[place] for place in sorted(before)), *members]
    outputs = [helper.make_empty_tensor_value_info(candidate.exit)]
    made_of = helper.make_graph(nodes, "norm", given, outputs, [*constants.values()])
    for node in made_of.node:
        # onnxruntime refuses two nodes of one name.
        node.name = ""
    return helper.make_model(made_of, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def _tensor(source: OnnxSource, name: str, tensor: OnnxTensor, *, is_zero: bool) -> TensorProto:
    from onnx import TensorProto

    if tensor.code not in DTYPES and tensor.code not in (2, 3, 6, 7, 9):
        raise ModelError(f"its constant {name} has the dtype {tensor.encoding}")
    values = source.elements(name, 0, math.prod(tensor.shape)) * (0 if is_zero else 1)
    return TensorProto(
        name=name, data_type=tensor.code, dims=tensor.shape, raw_data=values.view(torch.uint8).numpy().tobytes()
    )


def _check_sizes(model: ModelProto) -> None:
    """Refuse nodes that would make large values of constants, as by a broadcast of a row against a column."""
    from onnx import shape_inference

    # Inferred shapes are no promise: operators whose output may grow without bound are not run at all.
    with suppress(Exception):
        model = shape_inference.infer_shapes(model, data_prop=True)
    for value in model.graph.value_info:
        if math.prod(each.dim_value or 1 for each in value.type.tensor_type.shape.dim) > _MOST_VALUES:
            raise ModelError(f"its value {value.name} has more than {_MOST_VALUES:,} numbers, which no norm needs")


def _in_float32(model: ModelProto) -> ModelProto:
    """The model with float32 in place of every other floating-point dtype."""
    from onnx import ModelProto, helper, numpy_helper

    wide = ModelProto()
    wide.CopyFrom(model)

    def widen(tensor: TensorProto) -> None:
        if tensor.data_type in _OTHER:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))

    for value in wide.graph.input:
        if value.type.tensor_type.elem_type in _OTHER:
            value.type.tensor_type.elem_type = 1
    for tensor in wide.graph.initializer:
        widen(tensor)
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                widen(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _OTHER:
                attribute.CopyFrom(helper.make_attribute("to", 1))
    return wide
