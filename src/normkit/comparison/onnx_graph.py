"""The possible norms of an ONNX graph, from its structure; a later run decides which of them are norms.

A candidate has one activation that enters and one that leaves. It is a fused operator, or the nodes between a value x
and the place where something that was reduced from x ("narrow": one number for each row) is multiplied with x again or
divides it. The gain and bias that follow belong to it, and so do casts around it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

POINTWISE = {
    *("Abs", "Add", "Cast", "CastLike", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal"),
    *("Sqrt", "Sub", "Where"),
}
REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMax", "GlobalAveragePool"}
SHAPES = {
    *("Concat", "Equal", "Expand", "Gather", "ReduceProd", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Unsqueeze"),
}
"""Operators that move no numbers between features, and those that compute sizes."""
_CONSTANT = {"Constant", "Transpose"}
RUNNABLE = POINTWISE | REDUCTIONS | SHAPES | _CONSTANT
"""Operators of decomposed norms; what a candidate needs beside them is not run."""

FUSED = {
    "LayerNormalization": (1, 2, (), 1e-5),
    "RMSNormalization": (1, None, (), 1e-5),
    "SimplifiedLayerNormalization": (1, None, (), 1e-5),
    "SkipLayerNormalization": (2, 3, (1, 4), 1e-12),
    "SkipSimplifiedLayerNormalization": (2, None, (1, 3), 1e-12),
    "GroupNormalization": (1, 2, (), 1e-5),
    "GroupNorm": (1, 2, (), 1e-5),
    "InstanceNormalization": (1, 2, (), 1e-5),
    "BatchNormalization": (1, 2, (), 1e-5),
    "MeanVarianceNormalization": (None, None, (), 0.0),
    "LpNormalization": (None, None, (), 0.0),
}
"""Operator -> positions of gain and bias, positions of what is added to the input first, and the default of epsilon."""

_LARGEST = 48
"""Nodes of a decomposed norm, its constants aside; the longest known has 20."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Nodes that may be one norm."""

    graph: Graph
    nodes: tuple[int, ...]
    """Their positions in the graph, in order."""
    entry: str
    """The value that enters."""
    exit: str
    """The value that leaves."""
    operator: str
    """The fused operator, or "" if it is decomposed."""
    core: int
    """The node that divides: it bears the name of the norm."""
    residual: tuple[str, ...] = ()
    """The value that a fused operator adds to its input, if it does."""
    shift: str = ""
    """Name of the initializer that a fused operator adds to its input, the bias of the layer before."""
    gain: str = ""
    """Name of the initializer that the gain is made of."""
    bias: str = ""
    """Name of the initializer that the bias is made of."""
    eps: float | None = None
    """As stored; None where no single number is added."""
    modulated: bool = False
    """Another activation multiplies what leaves."""


class Graph:
    """The values of one graph: what makes and uses them, and which are constant, narrow or sizes.

    Args:
        proto: A graph, or a graph inside another one.
        vectors: Initializers with more than one number.
        outer: The graph around it.
    """

    def __init__(self, proto: GraphProto, vectors: set[str], outer: Graph | None = None) -> None:
        self.nodes: Sequence[NodeProto] = list(proto.node)
        self.outer = outer
        self.depth: int = outer.depth + 1 if outer else 0
        self.outputs = {value.name for value in proto.output}
        self.initializers: set[str] = {tensor.name for tensor in proto.initializer} | (
            outer.initializers if outer else set()
        )
        self.constant: set[str] = set(self.initializers) | (outer.constant if outer else set())
        self.roots: dict[str, str] = dict(outer.roots) if outer else {name: name for name in vectors}
        """Name of a constant -> the one initializer of more than one number that it is made of."""
        self.makers: dict[str, int] = {}
        self.users: dict[str, list[int]] = {}
        self.narrow: set[str] = set()
        self.sizes: set[str] = set()
        for position, node in enumerate(self.nodes):
            inputs = [name for name in node.input if name]
            for name in inputs:
                self.users.setdefault(name, []).append(position)
            self.makers.update((name, position) for name in node.output if name)
            moving = [name for name in inputs if name not in self.constant]
            if node.op_type == "Constant" or (not moving and inputs and node.op_type in RUNNABLE):
                self.constant.update(node.output)
                roots = {self.roots[name] for name in inputs if name in self.roots}
                if len(roots) == 1:
                    self.roots[node.output[0]] = roots.pop()
            elif node.op_type in ("Shape", "Size") or (node.op_type in RUNNABLE and moving and {*moving} <= self.sizes):
                self.sizes.update(node.output)
            elif node.op_type in REDUCTIONS or (
                node.op_type in POINTWISE | SHAPES and moving and {*moving} <= self.narrow | self.sizes
            ):
                self.narrow.update(node.output)

    def moving(self, position: int) -> list[str]:
        """The inputs of a node that are not constant."""
        return [name for name in self.nodes[position].input if name and name not in self.constant]

    def wide(self, position: int) -> list[str]:
        """The inputs of a node that are activations with all their features."""
        return [name for name in self.moving(position) if name not in self.narrow | self.sizes]

    def maker(self, name: str) -> NodeProto | None:
        """The node that makes a value; None for an input of the graph."""
        return self.nodes[self.makers[name]] if name in self.makers else None

    def joins(self, name: str) -> bool:
        """Whether a value is made of an activation and of what is narrow."""
        at = self.makers.get(name, -1)
        is_joint = at >= 0 and self.nodes[at].op_type in ("Sub", "Mul", "Div")
        return is_joint and len(self.moving(at)) == 2 and len(self.wide(at)) == 1

    def before_cast(self, name: str) -> str:
        """The value that a cast is made of; the value itself where no cast makes it."""
        maker = self.maker(name)
        return maker.input[0] if maker is not None and maker.op_type == "Cast" else name

    def only_user(self, name: str) -> int | None:
        """The one node that uses a value; None if there are more or none, or the value leaves the graph."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.outputs else None


def graphs_of(proto: GraphProto, vectors: set[str], outer: Graph | None = None) -> Iterator[Graph]:
    """A graph and all graphs inside it, such as the two branches of a decoder with and without past keys."""
    graph = Graph(proto, vectors, outer)
    yield graph
    for node in proto.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g, vectors, graph)


def candidates(graph: Graph, number_of: dict[str, float]) -> list[Candidate]:
    """The candidates of one graph in the order of its nodes; `number_of` has the values of single numbers."""
    found = []
    for position, node in enumerate(graph.nodes):
        if node.op_type in FUSED:
            found.append(_fused(graph, position))
        elif node.op_type in ("Mul", "Div") and (each := _decomposed(graph, position, number_of)) is not None:
            found.append(each)
    found = [_with_casts_and_affine(each) for each in found]
    # A part of a norm that looks like one itself, as the L2 norm in a rescaled one.
    held = [set(each.nodes) for each in found]
    return [
        each
        for place, each in enumerate(found)
        if not any(held[place] < other or (held[place] == other and place > at) for at, other in enumerate(held))
    ]


def _fused(graph: Graph, position: int) -> Candidate:
    node = graph.nodes[position]
    gain, bias, added, eps = FUSED[node.op_type]
    inputs = [*node.input, "", "", "", ""]
    said = [attribute.f for attribute in node.attribute if attribute.name == "epsilon"]
    parts = [
        graph.roots.get(inputs[at], "") if at is not None and inputs[at] in graph.constant else ""
        for at in (gain, bias)
    ]
    return Candidate(
        graph=graph,
        nodes=(position,),
        entry=inputs[0],
        exit=node.output[0] if node.output else "",
        operator=node.op_type,
        core=position,
        residual=tuple(
            inputs[at] for at in added if inputs[at] not in ("", inputs[0]) and inputs[at] not in graph.constant
        ),
        shift=next((inputs[at] for at in added if inputs[at] in graph.initializers), ""),
        gain=parts[0],
        bias=parts[1],
        eps=said[0] if said else eps,
        modulated=any(at is not None and inputs[at] and inputs[at] not in graph.constant for at in (gain, bias)),
    )


def _decomposed(graph: Graph, core: int, number_of: dict[str, float]) -> Candidate | None:
    """The nodes back from one that joins x and what was reduced from it, to the value that alone enters them."""
    if not graph.joins(graph.nodes[core].output[0]):
        return None
    walk = _Walk(graph, core)
    entry = walk.back()
    # The mean, or a factor against overflow, goes first; a cast may lie between.
    while entry is not None and (graph.joins(entry) or graph.joins(graph.before_cast(entry))):
        entry = walk.back()
    if entry is None or not any(graph.nodes[at].op_type in REDUCTIONS for at in walk.nodes):
        return None
    if (maker := graph.maker(entry)) is not None and maker.op_type == "Exp":
        # A softmax, node by node.
        return None
    eps = None
    for at in walk.nodes:
        node = graph.nodes[at]
        if node.op_type in ("Add", "Max", "Clip") and set(graph.moving(at)) <= graph.narrow:
            numbers = [number_of[name] for name in node.input if name in number_of]
            eps = numbers[0] if numbers else eps
    return Candidate(
        graph=graph,
        nodes=tuple(sorted(walk.nodes)),
        entry=entry,
        exit=graph.nodes[core].output[0],
        operator="",
        core=core,
        eps=eps,
    )


class _Walk:
    """Back from one node, to each value in turn through which all that reaches the node has come."""

    def __init__(self, graph: Graph, start: int) -> None:
        self._graph = graph
        self.nodes = {start}
        self._waiting: list[tuple[int, str]] = []
        self._seen: set[str] = set()
        self._add(graph.moving(start))

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                heapq.heappush(self._waiting, (-self._graph.makers.get(name, -1), name))

    def back(self) -> str | None:
        """The next such value with all features; None if there is none."""
        while self._waiting and len(self.nodes) <= _LARGEST:
            _, name = heapq.heappop(self._waiting)
            position = self._graph.makers.get(name)
            if position is None or self._graph.nodes[position].op_type not in RUNNABLE:
                return None
            self.nodes.add(position)
            self._add(self._graph.moving(position))
            if len(self._waiting) == 1:
                only = self._waiting[0][1]
                if only not in self._graph.narrow | self._graph.sizes:
                    return only
        return None


def _with_casts_and_affine(found: Candidate) -> Candidate:
    """The candidate with the casts and reshapes around it, and the gain and bias that follow."""
    graph = found.graph
    gain, bias = (found.gain, found.bias) if found.operator else _inside(found)
    found = replace(found, gain=gain, bias=bias)
    regrouped = _regrouped(found)
    if regrouped is not None:
        found, gain, bias = regrouped, "", ""
    nodes, end, modulated = set(found.nodes), found.exit, found.modulated
    # Nodes that belong to the norm if a gain or bias follows them.
    waiting: list[int] = []
    reached = end
    while (position := graph.only_user(reached)) is not None:
        node = graph.nodes[position]
        others = [name for name in node.input if name not in (reached, "")]
        root = graph.roots.get(others[0], "") if len(others) == 1 and others[0] in graph.constant else ""
        if node.op_type in ("Cast", "Identity"):
            waiting.append(position)
        elif root and ((node.op_type == "Mul" and not gain and not bias) or (node.op_type == "Add" and not bias)):
            gain, bias = (root, bias) if node.op_type == "Mul" else (gain, root)
            nodes |= {*waiting, position}
            waiting, end = [], node.output[0]
        elif node.op_type == "Mul" and len(others) == 1 and others[0] in graph.constant and not root and not gain:
            waiting.append(position)
        else:
            modulated = modulated or (
                node.op_type == "Mul" and not gain and graph.wide(position) == graph.moving(position)
            )
            break
        reached = node.output[0]
    entry = found.entry
    before = graph.makers.get(entry)
    # A stream that others read in float32 too enters as it is.
    if before is not None and graph.nodes[before].op_type == "Cast" and nodes.issuperset(graph.users[entry]):
        if waiting and graph.nodes[waiting[0]].op_type == "Cast":
            nodes.add(waiting[0])
            end = graph.nodes[waiting[0]].output[0]
        nodes.add(before)
        entry = graph.nodes[before].input[0]
    return replace(found, nodes=tuple(sorted(nodes)), entry=entry, exit=end, gain=gain, bias=bias, modulated=modulated)


def _inside(found: Candidate) -> tuple[str, str]:
    """The initializers that multiply and that are added within a decomposed norm."""
    gain = bias = ""
    for at in found.nodes:
        node = found.graph.nodes[at]
        roots = [found.graph.roots.get(name, "") for name in node.input if name in found.graph.constant]
        if root := next(filter(None, roots), ""):
            gain, bias = (root, bias) if node.op_type in ("Mul", "Div") else (gain, root)
    return gain, bias


def _regrouped(found: Candidate) -> Candidate | None:
    """The candidate with the reshapes that put groups of channels on an axis of their own, and back."""
    graph = found.graph
    before, after = graph.makers.get(found.entry), graph.only_user(found.exit)
    if before is None or after is None or {graph.nodes[at].op_type for at in (before, after)} != {"Reshape"}:
        return None
    nodes = {*found.nodes, before, after}
    entry = graph.nodes[before].input[0]
    waiting = [graph.nodes[at].input[1] for at in (before, after)]
    while waiting:
        name = waiting.pop()
        if name in graph.constant or name == entry:
            continue
        if name not in graph.sizes or name not in graph.makers:
            return None
        nodes.add(graph.makers[name])
        waiting += graph.moving(graph.makers[name])
    return replace(found, nodes=tuple(sorted(nodes)), entry=entry, exit=graph.nodes[after].output[0])
