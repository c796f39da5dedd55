"""An `.onnx` file: its parameters, its norms, named as the exporter wrote them and identified, and recorded runs."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.checkpoint.model_folder import damaged
from normkit.comparison.onnx_graph import Candidate, candidates, graphs_of
from normkit.comparison.onnx_recording import overflow, record
from normkit.comparison.onnx_running import DTYPES, OnnxNorm, Site
from normkit.comparison.onnx_skeleton import check_model, read_skeleton
from normkit.comparison.onnx_tensors import OnnxSource
from normkit.comparison.recording import Recording
from normkit.comparison.weights import Weights
from normkit.errors import InputError, ModelError, NormkitError
from normkit.identification.book import Entry, PassportBook
from normkit.identification.finder import Finder
from normkit.identification.passport import Passport, Reading
from normkit.reference import HALF
from normkit.text import counted, first_line

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
"""Metadata of a node that torch.onnx.export(dynamo=True) writes: the modules around it, outermost first."""
_NUMBER = re.compile(r"_\d+(?=\.|$)")
_SIZES = (2, 3, 4, 5)
"""Lengths of axes whose length the graph leaves open."""
_CHANNELS_FIRST = {"InstanceNormalization", "GroupNormalization", "BatchNormalization"}
_LINEAR = {"Conv", "ConvInteger", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger"}
"""Operators whose second input is the weight of a linear module; MatMul has it transposed."""
_BIASED = {"Conv", "ConvTranspose", "Gemm"}
"""Those whose third input is its bias."""


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
        proto, places = read_skeleton(path)
        source = OnnxSource(path, proto.graph.initializer, places)
        check_model(path, proto)
        if proto.functions:
            from onnx import inliner

            try:
                proto = inliner.inline_local_functions(proto)
            except Exception as error:  # onnx raises RuntimeError and others
                raise ModelError(damaged(path, f"its functions: {first_line(error)}")) from None
        source.dequantize(proto.graph)
        return cls(path, proto, source)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The places of its possible norms, in the order of its nodes; nothing is run."""
        from onnx import TypeProto, shape_inference

        numbers, vectors = dict[str, float](), set[str]()
        for name, tensor in self.source.stored.items():
            if math.prod(tensor.shape) > 1:
                vectors.add(name)
            elif tensor.code in DTYPES and tensor.stored:
                numbers[name] = _said(float(self.source.values(name).flatten()[0]), tensor.code)
        typed = self.proto
        # The shapes that a file states may contradict its nodes.
        with suppress(Exception):
            typed = shape_inference.infer_shapes(self.proto)
        values = {each.name: each for each in (*typed.graph.input, *typed.graph.value_info, *typed.graph.output)}
        found: dict[tuple[Any, ...], list[Candidate]] = {}
        for graph in graphs_of(self.proto.graph, vectors):
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
            type_ = values[first.entry].type.tensor_type if first.entry in values else TypeProto.Tensor()
            lengths = tuple(each.dim_value if each.HasField("dim_value") else None for each in type_.shape.dim)
            sites.append(
                Site(
                    path=path if seen[path] == 1 else f"{path}#{seen[path]}",
                    class_name=class_name,
                    candidate=first,
                    calls=(first, *others),
                    eps=None if first.eps is None else _said(first.eps, 1),
                    offset=_offset(first, numbers),
                    dtype=type_.elem_type,
                    shape=lengths if type_.HasField("shape") else None,
                )
            )
        return tuple(sites)

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
        if self._book is not None:
            return self._book
        finder = Finder()
        entries, left_out = [], {}
        for count, site in enumerate(self.sites):
            if progress is not None:
                progress(count, len(self.sites))
            operator = site.candidate.operator
            try:
                module = OnnxNorm.of(self.proto, self.source, site)
                shape = _shape(module, site)
                found = finder.examined(module, site.path, shape)
            except NormkitError as error:
                left_out[site.path] = f"{site.class_name}: {error}"
                continue
            if found is None:
                if operator:
                    left_out[site.path] = f"{site.class_name}: it cannot be run on inputs of shape {shape}"
                continue
            passport = found.passport
            is_norm = passport.verdict in ("norm", "batch", "gated", "adaptive")
            if not is_norm and not operator and not passport.readings.keys() & {"degree", "scale"}:
                continue
            if operator == "BatchNormalization":
                reason = "batch norm: statistics of the training are stored in it, and each row is mapped alone"
                left_out[site.path] = f"{site.class_name}: {reason}"
            elif passport.spec is None:
                left_out[site.path] = f"{site.class_name}: {passport.readings['kind'].evidence[0]}"
            else:
                features = math.prod(passport.spec.rows.parameter_sizes(passport.shape))
                passport = _with_remarks(passport, site)
                entries.append(Entry(path=site.path, class_name=site.class_name, features=features, passport=passport))
        self._book = PassportBook(model=self.path.name, entries=tuple(entries), left_out=left_out)
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
        """The place of the first Inf or NaN of a run, in words; None if all rows of the norms are finite."""
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
            for name in node.input[2:3] if node.op_type in _BIASED and path else ():
                if name in self.source.stored:
                    parts.setdefault(name, f"{path}.bias")
        for node in self.proto.graph.node:
            # The exporter torch.onnx.export(dynamo=True) names the bias of a batch norm that it folds after the weight.
            for weight, name in [node.input[1:3]] if node.op_type in _BIASED and len(node.input) > 2 else ():
                if name == f"{weight}_bias" and weight.endswith(".weight") and name in self.source.stored:
                    yield name, (f"{weight.removesuffix('.weight')}.bias",)
                    parts.pop(name, None)
        for name, own in parts.items():
            stem = name.removesuffix("_quantized")
            # An exporter that keeps a module's own name writes it with dots.
            if stem != name and "." in stem:
                yield name, (stem,)
            elif "." not in name or name.startswith(("onnx::", "/")):
                yield name, (own,)


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


def _shape(module: OnnxNorm, site: Site) -> tuple[int, ...]:
    """The shape of an input to identify a norm with."""
    n = max((part.numel() for part in module.parameters()), default=64)
    known = site.shape
    if known is None or len(known) < 2:
        return (2, n, 6) if site.candidate.operator in _CHANNELS_FIRST else (2, 3, n)
    lengths = [size or _SIZES[place % 4] for place, size in enumerate(known)]
    if not known[-1] and site.candidate.operator not in _CHANNELS_FIRST:
        lengths[-1] = n
    if not known[1] and site.candidate.operator in _CHANNELS_FIRST:
        lengths[1] = n
    return (2, *lengths[1:])


def _with_remarks(passport: Passport, site: Site) -> Passport:
    """The passport with the graph's own names, and what the graph shows beside the norm."""
    candidate, lines = site.candidate, []
    nodes = ", ".join(candidate.graph.nodes[at].op_type for at in candidate.nodes)
    runtime = "onnxruntime on the CPU"
    if not candidate.operator and DTYPES.get(site.dtype) in HALF:
        runtime += ", in 16 bits by onnx's own evaluator"
    lines.append(f"{candidate.operator or f'made of {nodes}'}, run by {runtime} as the graph is written")
    if passport.weight is None and site.shape and not site.shape[-1]:
        lines.append(f"the graph leaves the length of its rows open: identified on {passport.shape[-1]}")
    if len(site.calls) > 1:
        lines.append(f"the graph calls it {len(site.calls)} times with the same gain; this is the first call")
    if candidate.residual:
        lines.append("what the operator adds to its input was 0: the norm is that of the sum")
    if candidate.modulated:
        lines.append("another activation multiplies its output: an adaptive or gated norm around this one")
    kind = passport.readings["kind"]
    readings: dict[str, Reading] = {**passport.readings, "kind": replace(kind, evidence=(*kind.evidence, *lines))}
    return replace(
        passport,
        readings=readings,
        weight_name=passport.weight_name and candidate.gain,
        bias_name=passport.bias_name and candidate.bias,
    )
