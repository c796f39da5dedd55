"""An `.onnx` file: opened with every part checked, its parameters, its norms, and a run of it that is recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normkit.checkpoint.model_folder import damaged
from normkit.comparison.onnx_norms import survey
from normkit.comparison.onnx_recording import overflow, record
from normkit.comparison.onnx_sites import Site, find, scope_of
from normkit.comparison.onnx_skeleton import read_skeleton
from normkit.comparison.onnx_tensors import OnnxSource, Quantized
from normkit.comparison.recording import Recording
from normkit.comparison.weights import Weights
from normkit.errors import InputError, ModelError
from normkit.identification.book import PassportBook
from normkit.text import counted, first_line, quoted

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

_MOST_NODES = 500_000
"""Nodes of a graph after its functions are written out; a model of 80 layers has about 5,000."""

_QUANTIZED = {
    "DequantizeLinear": ((0, 1, 2, 1),),
    "DynamicQuantizeLSTM": ((1, 8, 9, 2), (2, 10, 11, 2)),
    "QLinearMatMul": ((3, 4, 5, 1),),
    "QLinearConv": ((3, 4, 5, 0),),
}
"""Operator -> for each quantized input its position, those of scale and zero point, and the axis of a vector."""
_LINEAR = {"Conv", "ConvInteger", "Gemm", "MatMul", "MatMulInteger"}
"""Operators whose second input is the weight of a linear module; MatMul has it transposed."""
_INTEGER_PRODUCTS = {"MatMulInteger": -1, "ConvInteger": 0}
"""Operator with a quantized second input -> its axis; the scale is multiplied later."""


class OnnxModel:
    """An ONNX model that was opened: nothing of it has been run.

    Example:
        >>> model = OnnxModel.open("model.onnx")  # doctest: +SKIP
        >>> model.weights.eps["model.norm"]  # doctest: +SKIP
        1e-05
    """

    def __init__(self, path: Path, proto: ModelProto, source: OnnxSource) -> None:
        self.path = path
        """As the user gave it."""
        self.proto = proto
        """Without the values of large initializers, its functions written out in the main graph."""
        self.source = source
        """The initializers."""
        self._book: PassportBook | None = None

    @classmethod
    def open(cls, path: str | Path) -> OnnxModel:
        """Open a file, and check all of it but the values.

        Raises:
            InputError: If the package onnx or onnxruntime is missing.
            ModelError: If the file is no model, is truncated, names a tensor twice, has an unknown operator or dtype,
                keeps data outside its folder, or has functions that call themselves.
        """
        path = Path(path)
        skeleton = read_skeleton(path)
        proto = skeleton.model
        if not proto.HasField("graph") or not proto.opset_import or not proto.graph.output:
            raise ModelError(damaged(path, "it holds no graph with operators and outputs"))
        source = OnnxSource(path, proto.graph.initializer, skeleton.places)
        _check_graph(path, proto.graph)
        _check_functions(path, proto)
        _check_operators(path, proto)
        if proto.functions:
            from onnx import inliner

            try:
                proto = inliner.inline_local_functions(proto)
            except Exception as error:  # onnx raises RuntimeError and others
                raise ModelError(damaged(path, f"its functions: {first_line(error)}")) from None
        source.dequantize(dict(_quantized(proto.graph)))
        return cls(path, proto, source)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Where its norms may be."""
        return find(self.proto, self.source)

    @cached_property
    def weights(self) -> Weights:
        """The initializers by name, as they are stored; quantized ones as the numbers that the graph makes of them."""
        proto = self.proto
        settings = {
            "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
            "ir_version": proto.ir_version,
            "opsets": {each.domain or "ai.onnx": each.version for each in proto.opset_import},
            **{entry.key: entry.value for entry in proto.metadata_props},
        }
        left_out = Counter(
            tensor.encoding for name, tensor in self.source.stored.items() if name not in self.source.tensors
        )
        notes = tuple(
            f"{counted(number, 'initializer')} of dtype {dtype} cannot be compared"
            for dtype, number in sorted(left_out.items())
        )
        return Weights(
            name=str(self.path),
            runtime="ONNX",
            source=self.source,
            settings=settings,
            eps={site.path: site.eps for site in self.sites if site.eps is not None},
            adds={
                path: site.offset
                for site in self.sites
                if site.candidate.gain
                for path in (site.path, site.candidate.gain.rpartition(".")[0] or site.candidate.gain)
            },
            names=dict(self._names()),
            notes=notes,
        )

    def norms(self, progress: Callable[[int, int], None] | None = None) -> PassportBook:
        """The passports of its norms: each is cut out of the graph, run alone by onnxruntime, and identified.

        Args:
            progress: Is told how many places have been looked at, and how many there are.
        """
        if self._book is None:
            self._book = survey(self.path.name, self.proto, self.source, self.sites, progress)
        return self._book

    def record(self, batch: Mapping[Any, Tensor] | Tensor, *, rows: int = 512) -> Recording:
        """Run it in onnxruntime on the CPU, and keep what enters and leaves its norms.

        Args:
            batch: Token ids of shape (B, T), or inputs by name. Masks, positions and empty past keys are made.
            rows: Tokens that are kept, the first ones, with every head.

        Raises:
            InputError: If rows is less than 1, or the graph asks for an input that is not given.
            ModelError: If onnxruntime cannot run it.
        """
        if rows < 1:
            raise InputError(f"rows must be at least 1, got {rows}")
        sites = {site.path: site for site in self.sites}
        spans = {
            sites[entry.path]: entry.passport.spec.rows.num_trailing
            for entry in self.norms().entries
            if entry.passport.spec is not None
        }
        return record(self.path.name, self.proto, self.source, spans, batch, rows)

    def overflow(self, recording: Recording) -> str | None:
        """Where the first Inf or NaN of a run was born, in words; None if all rows of the norms are finite."""
        return overflow(self.proto, self.source, self.sites, recording)

    def _names(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Initializers that the exporter renamed, with the names that the module of their node gives them."""
        parts: dict[str, str] = {}
        # A constant that several norms share, such as ones, belongs to none of them.
        shared = Counter(each.candidate.gain for each in self.sites)
        for each in self.sites:
            if shared[each.candidate.gain] == 1:
                parts |= {each.candidate.gain: f"{each.path}.weight", each.candidate.bias: f"{each.path}.bias"}
        parts.pop("", None)
        for node in self.proto.graph.node:
            path, _ = scope_of(node)
            for name in node.input[1:2] if node.op_type in _LINEAR and path else ():
                if math.prod(self.source.stored[name].shape if name in self.source.stored else ()) > 1:
                    parts.setdefault(name, f"{path}.weight")
        for name, own in parts.items():
            stem = name.removesuffix("_quantized")
            # An exporter that keeps a module's own name writes it with dots.
            if stem != name and "." in stem:
                yield name, (stem,)
            elif "." not in name or name.startswith(("onnx::", "/")):
                yield name, (own,)


def _check_graph(path: Path, graph: GraphProto) -> None:
    """Refuse values that are made twice, names that cannot be printed, and subgraphs with data in other files."""
    made: set[str] = {tensor.name for tensor in graph.initializer}
    given = {value.name for value in graph.input}
    if not all(value.name.isprintable() for value in (*graph.input, *graph.output)):
        raise ModelError(damaged(path, "an input or output has no printable name"))
    if len(given) != len(graph.input):
        raise ModelError(damaged(path, "two inputs of a graph have one name"))
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output)
        if strange := next((text for text in texts if not text.isprintable()), None):
            raise ModelError(damaged(path, f"{quoted(strange)} is no name"))
        for name in node.output:
            if name and (name in made or name in given):
                raise ModelError(damaged(path, f"two nodes make the value {quoted(name)}"))
            made.add(name)
        for inner in _subgraphs(node):
            if external := next((each.name for each in inner.initializer if each.data_location), None):
                raise ModelError(f"{path} keeps {quoted(external)} of a subgraph in another file; export it anew")
            _check_graph(path, inner)
        for attribute in node.attribute:
            if any(each.data_location for each in (attribute.t, *attribute.tensors)):
                raise ModelError(f"{path} keeps an attribute of {quoted(node.name)} in another file; export it anew")


def _check_functions(path: Path, proto: ModelProto) -> None:
    """Refuse functions that call themselves, and those that grow without bound when they are written out."""
    functions = {(each.domain, each.name): each for each in proto.functions}
    sizes: dict[tuple[str, str], int] = {}
    calling: list[tuple[str, str]] = []

    def size(nodes: Iterator[NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in functions and key not in sizes:
                if key in calling or len(calling) > 100:
                    raise ModelError(damaged(path, f"its function {quoted(node.op_type)} calls itself"))
                calling.append(key)
                sizes[key] = size(_all_nodes(functions[key]))
                calling.pop()
            total += sizes.get(key, 1)
        return total

    count = size(_all_nodes(proto.graph))
    if count > _MOST_NODES:
        raise ModelError(f"{path} has {count:,} nodes with its functions, at most {_MOST_NODES:,} are read")


def _check_operators(path: Path, proto: ModelProto) -> None:
    """Refuse operators that neither the file defines nor onnxruntime has; no library of operators is loaded."""
    try:
        known = dict(_operators())
    except ImportError:
        raise InputError(f"{path} needs the package onnxruntime; pip install normkit[ports]") from None
    known |= {(each.domain, each.name): (0, 0) for each in proto.functions}
    for holder in (proto.graph, *proto.functions):
        for node in _all_nodes(holder):
            domain = "" if node.domain == "ai.onnx" else node.domain
            name = f"{domain}.{node.op_type}" if domain else node.op_type
            if (fewest := known.get((domain, node.op_type))) is None:
                raise ModelError(
                    f"{path} has the operator {quoted(name)}, which this onnxruntime does not have; normkit loads no "
                    "library of operators: export the model without it"
                )
            if len(node.input) < fewest[0] or len(node.output) < fewest[1]:
                counts = f"{counted(len(node.input), 'input')} and {counted(len(node.output), 'output')}"
                raise ModelError(damaged(path, f"a node {quoted(name)} has only {counts}"))


@cache
def _operators() -> dict[tuple[str, str], tuple[int, int]]:
    """Domain and name of every operator that onnx or onnxruntime has -> fewest inputs and outputs of its versions."""
    from onnx import defs
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found: dict[tuple[str, str], tuple[int, int]] = {}
    for schema in (*defs.get_all_schemas_with_history(), *get_all_operator_schema()):
        inputs, outputs = found.get((schema.domain, schema.name), (99, 99))
        found[schema.domain, schema.name] = min(inputs, schema.min_input), min(outputs, schema.min_output)
    return found


def _all_nodes(holder: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of all graphs inside it."""
    for node in holder.node:
        yield node
        for inner in _subgraphs(node):
            yield from _all_nodes(inner)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _quantized(graph: GraphProto) -> Iterator[tuple[str, Quantized]]:
    """The initializers that the graph itself makes numbers of, and how."""
    initializers = {tensor.name for tensor in graph.initializer}
    consumers: dict[str, list[NodeProto]] = {}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)

    def scale_after(node: NodeProto) -> str | None:
        """The constant factor of the product of integers: of its own Mul, or of the Mul that makes the factor."""
        following = consumers.get(node.output[0], [])
        while following and following[0].op_type in ("Add", "Cast"):
            following = consumers.get(following[0].output[0], [])
        for product in (each for each in following if each.op_type == "Mul"):
            factors = [*product.input]
            for name in product.input:
                if name in makers and makers[name].op_type == "Mul":
                    factors += makers[name].input
            return next((name for name in factors if name in initializers), None)
        return None

    for node in graph.node:
        inputs = [*node.input, *[""] * 12]
        for position, scale, zero_point, axis in _QUANTIZED.get(node.op_type, ()):
            if node.op_type == "DequantizeLinear":
                axis = next((each.i for each in node.attribute if each.name == "axis"), axis)
                # Of a table, the rows that were taken are dequantized.
                taken = makers.get(inputs[0])
                inputs[0] = taken.input[0] if taken is not None and taken.op_type == "Gather" else inputs[0]
            if inputs[position] in initializers and inputs[scale] in initializers:
                yield inputs[position], Quantized(scale=inputs[scale], zero_point=inputs[zero_point], axis=axis)
        if node.op_type in _INTEGER_PRODUCTS and inputs[1] in initializers and (scale_name := scale_after(node)):
            yield inputs[1], Quantized(scale=scale_name, zero_point=inputs[3], axis=_INTEGER_PRODUCTS[node.op_type])
