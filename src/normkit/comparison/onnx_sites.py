"""The places of an ONNX model that may be norms: their names, as the exporter wrote them, their eps and their types."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normkit.comparison.onnx_graph import Candidate, candidates, graphs_of
from normkit.comparison.onnx_tensors import OnnxSource

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Number of a dtype in ONNX -> the dtype, for those in which norms run."""
_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
"""Metadata of a node that torch.onnx.export(dynamo=True) writes: the modules around it, outermost first."""
_NUMBER = re.compile(r"_\d+(?=\.|$)")


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
    """What the graph adds to the gain before it multiplies by it: 1.0 for `1 + weight` that was not folded."""
    dtype: int
    """Of what enters, as ONNX numbers it; 0 if it is not known."""
    shape: tuple[int | None, ...] | None
    """Of what enters; None for an axis of open length, or if nothing is known of it."""


def find(proto: ModelProto, source: OnnxSource) -> tuple[Site, ...]:
    """The places of a model that may be norms, in the order of its nodes; nothing is run."""
    numbers, vectors = dict[str, float](), set[str]()
    for name, tensor in source.stored.items():
        if math.prod(tensor.shape) > 1:
            vectors.add(name)
        elif tensor.code in DTYPES and tensor.stored:
            numbers[name] = _said(float(source.values(name).flatten()[0]), tensor.code)
    types = _types(proto)
    found: dict[tuple[Any, ...], list[Candidate]] = {}
    for graph in graphs_of(proto.graph, vectors):
        for node in graph.nodes:
            if node.op_type == "Constant" and (number := _number(node)) is not None:
                numbers[node.output[0]] = number
        for each in candidates(graph, numbers):
            # A module that is called again is the same norm; exporters number its calls from the second one on.
            module = _NUMBER.sub("", _named(each)[0])
            key = (module, each.gain, each.bias, each.operator) if each.gain else (id(graph), each.nodes)
            found.setdefault(key, []).append(each)
    seen = Counter[str]()
    sites = []
    for first, *others in found.values():
        path, class_name = _named(first)
        seen[path] += 1
        dtype, shape = types.get(first.entry, (0, None))
        sites.append(
            Site(
                path=path if seen[path] == 1 else f"{path}#{seen[path]}",
                class_name=class_name,
                candidate=first,
                calls=(first, *others),
                eps=None if first.eps is None else _said(first.eps, 1),
                offset=_offset(first, numbers),
                dtype=dtype,
                shape=shape,
            )
        )
    return tuple(sites)


def _offset(candidate: Candidate, numbers: Mapping[str, float]) -> float:
    """The single numbers that constant nodes add to the gain."""
    graph, name, total = candidate.graph, candidate.gain, 0.0
    while users := [at for at in graph.users.get(name, ()) if graph.nodes[at].output[0] in graph.roots]:
        node = graph.nodes[users[0]]
        others = [numbers[each] for each in node.input if each in numbers and each != name]
        if node.op_type in ("Add", "Sub") and others:
            total += others[0] if node.op_type == "Add" else -others[0]
        name = node.output[0]
    return total


def _named(candidate: Candidate) -> tuple[str, str]:
    """The path of a norm and its class."""
    node = candidate.graph.nodes[candidate.core]
    path, class_name = scope_of(node)
    class_name = class_name or candidate.operator or "decomposed norm"
    stem, _, last = (candidate.gain or candidate.bias).rpartition(".")
    # Containers that are not called are no part of a node's name, and a second call is numbered.
    if stem and last and (not path or f".{stem}".endswith(f".{_NUMBER.sub('', path)}")):
        path = stem
    return path or candidate.gain or node.name or candidate.exit, class_name


def scope_of(node: NodeProto) -> tuple[str, str]:
    """The path of the module that a node was exported from, and its class; "" for what the exporter did not write."""
    said = {entry.key: entry.value for entry in node.metadata_props}
    scopes, classes = _listed(said.get(_SCOPES, "")), _listed(said.get(_CLASSES, ""))
    if len(scopes) > 1:
        return scopes[-2], classes[-2].rpartition(".")[2] if len(classes) == len(scopes) else ""
    parts: list[str] = []
    for part in node.name.strip("/").split("/")[:-1]:
        # A container that is not called itself is written again in the name of what it holds.
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts), ""


def _listed(text: str) -> list[str]:
    """A list of texts, as Python writes it."""
    try:
        value = ast.literal_eval(text[:10_000]) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    texts = [str(each) for each in value] if isinstance(value, list) else []
    return texts if all(text.isprintable() for text in texts) else []


def _types(proto: ModelProto) -> dict[str, tuple[int, tuple[int | None, ...] | None]]:
    """Name of a value -> its dtype and shape, as far as the file says or onnx infers them."""
    from onnx import shape_inference

    # What a file says of its values may contradict its nodes.
    with suppress(Exception):
        proto = shape_inference.infer_shapes(proto)
    found = {}
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        tensor = value.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(each.dim_value if each.HasField("dim_value") else None for each in tensor.shape.dim)
        found[value.name] = (tensor.elem_type, shape)
    return found


def _number(node: NodeProto) -> float | None:
    """The value of a Constant node that is one number."""
    from onnx import numpy_helper

    for attribute in node.attribute:
        if attribute.name == "value_float":
            return _said(attribute.f, 1)
        if attribute.name == "value" and attribute.t.data_type in DTYPES and math.prod(attribute.t.dims) == 1:
            try:
                return _said(float(numpy_helper.to_array(attribute.t).flatten()[0]), attribute.t.data_type)
            except (ValueError, TypeError, IndexError):
                return None
    return None


def _said(value: float, code: int) -> float:
    """A number with no more digits than its dtype holds: 1e-05 and not 9.999999747378752e-06."""
    if code == 11 or not math.isfinite(value):
        return value
    return next(
        short
        for digits in range(1, 18)
        if (short := float(f"{value:.{digits}g}")) == value or torch.tensor(short) == torch.tensor(value)
    )
