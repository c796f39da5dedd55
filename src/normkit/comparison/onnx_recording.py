"""A run of an ONNX model in onnxruntime on the CPU, with what enters and leaves its norms as further outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import torch
from torch import Tensor

from normkit.comparison.onnx_running import DTYPES, Site, array, cut, evaluator, printable, session, tensor
from normkit.comparison.onnx_tensors import OnnxSource, OnnxTensor
from normkit.comparison.recording import RecordedNorm, Recording
from normkit.comparison.torch_recorder import token_major
from normkit.errors import InputError, ModelError
from normkit.measurement.running import name_of_ids, token_mask
from normkit.text import offer

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

_INTEGERS = {6: torch.int32, 7: torch.int64, 9: torch.bool}
_KINDS = {**DTYPES, **_INTEGERS}
_OUTPUTS = 64
"""Rows of the model's output: one may have a quarter of a million numbers."""
_SAMPLES = 16
"""Samples of a norm that normalizes whole samples."""


def record(
    name: str,
    proto: ModelProto,
    source: OnnxSource,
    sites: Mapping[Site, int | None],
    batch: Mapping[Any, Tensor] | Tensor,
    rows: int,
) -> Recording:
    """`OnnxModel.record`, one sequence at a time; `sites` has how many trailing axes a norm takes as a row."""
    import onnxruntime

    given: dict[Any, Tensor] = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    outermost = {site: span for site, span in sites.items() if site.candidate.graph.outer is None}
    loaded = _loaded(proto, source, outermost)
    asked = [each for each in proto.graph.input if each.name not in source.stored]
    # Rows of each call of each norm: input, output and residual of each sequence.
    kept: dict[Site, list[list[tuple[Tensor, ...]]]] = {site: [[] for _ in site.calls] for site in outermost}
    tokens, outputs = list[tuple[int, ...]](), list[Tensor]()
    for sequence in _sequences(given, asked, rows):
        ids = sequence.get(name_of_ids(sequence))
        feeds = {each.name: _fed(each, sequence, ids) for each in asked}
        names = [each.name for each in loaded.get_outputs()]
        try:
            found = loaded.run_with_ort_values(names, {key: _value(part) for key, part in feeds.items()})
        except Exception as error:  # onnxruntime has one class for each of its codes
            raise ModelError(f"onnxruntime cannot run {name} on this ({printable(error)})") from None
        values = {**feeds, **{key: _tensor(part) for key, part in zip(names, found, strict=True) if part.is_tensor()}}
        chosen = None
        if ids is not None:
            missing = rows - sum(map(len, tokens))
            chosen = (torch.arange(ids.numel()) < missing).view(ids.shape)
            tokens.append(tuple(ids.flatten()[:missing].tolist()))
        for site, span in outermost.items():
            for call, candidate in zip(kept[site], site.calls, strict=True):
                x, y, *beside = (values[each] for each in (candidate.entry, candidate.exit, *candidate.residual))
                if candidate.shift:
                    x = (x.double() + source.values(candidate.shift).double()).to(x.dtype)
                if x.shape == y.shape and x.dim() > 1:
                    call.append(tuple(_picked(part, span, chosen, rows) for part in (x, y, *beside)))
        first = values.get(proto.graph.output[0].name)
        missing = _OUTPUTS - sum(map(len, outputs))
        if first is not None and first.is_floating_point() and first.dim() > 1 and missing > 0:
            outputs.append(_picked(first, 1, chosen, missing)[:missing])
    norms = {site.path: _norm(source, site, calls) for site, calls in kept.items() if all(calls)}
    if not norms:
        raise InputError(f"{name} has no norm in its main graph whose rows can be recorded")
    positions = sorted((candidate.core, site.path) for site in outermost for candidate in site.calls)
    return Recording(
        norms=norms,
        name=name,
        runtime=f"onnxruntime {onnxruntime.__version__}"
        + (
            ", on the CPU with float16 kept as float32 between nodes" if any(site.dtype == 10 for site in sites) else ""
        ),
        tokens=tuple(tokens),
        outputs=torch.cat(outputs) if outputs else None,
        order=tuple(path for _, path in positions if path in norms),
    )


def overflow(proto: ModelProto, source: OnnxSource, sites: Sequence[Site], recording: Recording) -> str | None:
    """The place of the first Inf or NaN in the norms of a run, on the longest row of each; None if there is none.

    Each norm is evaluated as its nodes are written: onnxruntime's CPU runs most nodes of float16 in float32, which
    hides an Inf that other hardware has. An Inf may also be absorbed: x / sqrt(Inf) is a row of zeros.
    """
    by_path = {site.path: site for site in sites}
    for place, path in enumerate(recording.order):
        norm = recording.norms[path]
        x = norm.normalized
        if not bool(x.isfinite().all()):
            before = f"after {recording.order[place - 1]}" if place else "before the first norm"
            return f"{_kind(x)} arrives at {path}: it was born {before}"
        row = x[int(x.double().flatten(1).square().sum(1).argmax())]
        born = _born(proto, source, by_path[path], row.to(norm.input.dtype))
        if born is not None:
            peak = f"in a row with elements up to {float(row.abs().max()):.4g}"
            hidden = "; the outputs recorded here are finite" if bool(norm.output.isfinite().all()) else ""
            return f"{born[0]} of {path}, {peak}; {born[1]}{hidden}"
    return None


def _kind(x: Tensor) -> str:
    return "NaN" if bool(x.isnan().any()) else "Inf"


def _born(proto: ModelProto, source: OnnxSource, site: Site, row: Tensor) -> tuple[str, str] | None:
    """The operation of a norm that makes the first number that is not finite, and what leaves; None if none does."""
    from onnx import helper

    candidate = site.candidate
    model = cut(proto, source, candidate, site.dtype or 1)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    names = [name for node in nodes for name in node.output if name]
    if not candidate.operator:
        del model.graph.output[:]
        model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    loaded = (session if candidate.operator else evaluator)(model)
    parameters = [source.values(name) for name in (candidate.gain, candidate.bias) if name]
    made = None
    for rank in (len(site.shape),) if site.shape else range(row.dim() + 1, row.dim() + 4):
        x = row.reshape(*[1] * (rank - row.dim()), *row.shape)
        fed = [x, *[torch.zeros_like(x)] * len(candidate.residual), *parameters]
        given = {each.name: array(part) for each, part in zip(model.graph.input, fed, strict=True)}
        # Where the file does not say how many axes enter, the nodes refuse too few.
        with catch_warnings(action="ignore"), suppress(Exception):
            made = loaded.run(None, given)
            break
    if made is None:
        return None
    values = dict(zip((each.name for each in model.graph.output), map(tensor, made), strict=True))
    y = values[candidate.exit]
    leaves = f"{_kind(y)} leaves" if not bool(y.isfinite().all()) else "it is absorbed, and zeros leave"
    for node in nodes:
        for name in node.output:
            part = values.get(name)
            if part is not None and part.is_floating_point() and not bool(part.isfinite().all()):
                return f"{_kind(part)} is born {_words(node, candidate.operator)}", leaves
    return None


def _words(node: NodeProto, operator: str) -> str:
    if operator:
        return f"in the {operator}"
    match node.op_type:
        case "Pow" | "ReduceSumSquare" | "ReduceL2":
            return f"in the squares ({node.op_type})"
        case "Mul":
            return "in the squares (Mul)" if node.input[0] == node.input[1] else "in a product (Mul)"
        case "ReduceMean" | "ReduceSum":
            return f"in the sum of squares ({node.op_type}, if it adds up in the dtype of its input)"
        case other:
            return f"in the {other}"


def _loaded(proto: ModelProto, source: OnnxSource, sites: Mapping[Site, int | None]) -> Any:
    """A session of the whole model with the rows of norms as outputs.

    Large initializers are handed over in memory that is mapped from their files: onnxruntime opens no file.
    """
    from onnx import ModelProto, ValueInfoProto

    changed = ModelProto()
    changed.CopyFrom(proto)
    values = {}
    for each in changed.graph.initializer:
        stored = source.stored[each.name]
        if stored.file is None:
            continue
        # In four bits two elements share a byte, which onnxruntime takes from a model only.
        if stored.bits < 8:
            each.raw_data = source.raw(each.name, 0, stored.stored).numpy().tobytes()
            each.data_location = each.DEFAULT
            del each.external_data[:]
            continue
        values[each.name] = _mapped(stored, stored.file)
        each.data_location = each.EXTERNAL
        del each.external_data[:]
        each.ClearField("float_data")
        for key, text in (("location", "held in memory"), ("offset", "0"), ("length", str(stored.stored))):
            each.external_data.add(key=key, value=text)
    present = {each.name for each in (*changed.graph.output, *changed.graph.input)} | set(source.stored)
    for candidate in (each for site in sites for each in site.calls):
        for value in (candidate.entry, candidate.exit, *candidate.residual):
            if value not in present:
                present.add(value)
                changed.graph.output.append(ValueInfoProto(name=value))
    return session(changed, values)


def _mapped(stored: OnnxTensor, file: Path) -> Any:
    """Its values in memory that is mapped from a file; copied if they lie so that kernels could not read registers."""
    import numpy
    from onnxruntime import OrtValue

    # numpy has no bfloat16 and no type of eight bits for floating point.
    kinds = {64: numpy.uint64, 32: numpy.uint32, 16: numpy.uint16, 8: numpy.uint8}
    plain = {1: numpy.float32, 3: numpy.int8, 5: numpy.int16, 6: numpy.int32, 7: numpy.int64, 9: numpy.bool_}
    plain |= {10: numpy.float16, 11: numpy.float64}
    dtype = numpy.dtype(plain.get(stored.code, kinds[stored.bits]))
    values = numpy.memmap(file, dtype, "r", stored.start, stored.shape)
    values = values if values.ctypes.data % 64 == 0 else values.copy()
    return OrtValue.ortvalue_from_numpy_with_onnx_type(values, stored.code)


def _value(tensor: Tensor) -> Any:
    from onnxruntime import OrtValue

    if tensor.dtype == torch.bfloat16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.contiguous().view(torch.uint16).numpy(), 16)
    return OrtValue.ortvalue_from_numpy(tensor.detach().contiguous().numpy())


def _tensor(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(value.numpy())


def _sequences(given: Mapping[Any, Tensor], asked: Sequence[ValueInfoProto], rows: int) -> Iterator[dict[Any, Tensor]]:
    """The sequences of a batch one after the other, without padding, until there are enough tokens; else the batch."""
    key = name_of_ids(given)
    if key is None:
        yield dict(given)
        return
    ids, mask = given[key], token_mask(given)
    lengths = [_fixed(each, 1) for each in asked if _kind_of(each) in _INTEGERS and _rank(each) == 2]
    longest = next((length for length in lengths if length), None)
    count = 0
    for place in range(len(ids)):
        if count >= rows:
            return
        here = {
            name: part[place : place + 1] if part.dim() and len(part) == len(ids) else part
            for name, part in given.items()
            if name != "attention_mask"
        }
        counted = torch.ones_like(ids[place], dtype=torch.bool) if mask is None else mask[place]
        if not bool(counted.any()):
            continue
        for name, part in here.items():
            if part.dim() == 2 and part.shape[1] == ids.shape[1] and not part.is_floating_point():
                here[name] = part[:, counted][:, :longest]
        if longest and here[key].shape[1] < longest:
            raise InputError(f"the graph was exported for {longest} tokens, got {here[key].shape[1]}; give as many")
        count += here[key].numel()
        yield here


def _fed(asked: ValueInfoProto, given: Mapping[Any, Tensor], ids: Tensor | None) -> Tensor:
    """The value for one input of the graph: by its name, or told from the tokens."""
    name, dtype = asked.name, _KINDS.get(_kind_of(asked))
    if dtype is None:
        raise InputError(f"the input {name} of the graph has a dtype that cannot be given; export it with another")
    known = {str(key): part for key, part in given.items()}
    if name in known:
        return known[name].to(dtype)
    low = name.lower()
    if ids is not None and _rank(asked) == 2 and dtype in (torch.int32, torch.int64, torch.bool):
        if "mask" in low:
            return torch.ones_like(ids).to(dtype)
        if "position" in low:
            return torch.arange(ids.shape[1])[None].to(dtype)
        if "type" in low or "segment" in low:
            return torch.zeros_like(ids).to(dtype)
        if name_of_ids({name: ids}) and not (set(known) - {"input_ids"} and len(known) > 1 and name in known):
            return ids.to(dtype)
    if ids is not None and low.startswith(("past", "cache")) and _rank(asked):
        if _rank(asked) == 1 and "position" in low:
            return torch.arange(ids.shape[1], dtype=dtype)
        # The batch comes first; the other open axis is that of earlier tokens, of which there are none.
        lengths = [_fixed(asked, axis) for axis in range(_rank(asked))]
        return torch.zeros([1 if axis == 0 else length or 0 for axis, length in enumerate(lengths)], dtype=dtype)
    # False, and 0 for all logits.
    if (dtype == torch.bool and "cache" in low) or "logits_to_keep" in low:
        return torch.zeros([_fixed(asked, axis) or 1 for axis in range(_rank(asked))], dtype=dtype)
    shape = "x".join(each.dim_param or str(each.dim_value) for each in asked.type.tensor_type.shape.dim) or "one number"
    said = offer(name, sorted(known), "the names of the graph's inputs")
    raise InputError(
        f"the graph asks for {name!r} ({str(dtype).removeprefix('torch.')}, {shape}); give it by name: {said}"
    )


def _picked(x: Tensor, span: int | None, chosen: Tensor | None, rows: int) -> Tensor:
    """Copies of rows: the tokens that are chosen, in their order, with every head; else the first rows."""
    if span is None:
        return x[: min(rows, _SAMPLES)].clone()
    leading = tuple(x.shape[: x.dim() - span])
    flat = x.reshape(-1, *x.shape[x.dim() - span :])
    places = None if chosen is None else token_major(leading, chosen)
    return flat[:rows].clone() if places is None else flat[places].clone()


def _norm(source: OnnxSource, site: Site, calls: Sequence[Sequence[tuple[Tensor, ...]]]) -> RecordedNorm:
    """The rows of one norm, call after call, with its parameters."""
    whole = [[torch.cat(parts) for parts in zip(*call, strict=True)] for call in calls]
    x, y, *residual = (torch.cat(parts) for parts in zip(*whole, strict=True))
    held: dict[str, Tensor] = {}
    for key, name in (("weight", site.candidate.gain), ("bias", site.candidate.bias)):
        if name and name in source.tensors and math.prod(source.tensors[name].shape) == x[0].numel():
            held[key] = source.values(name).flatten()
    return RecordedNorm(
        input=x,
        output=y,
        residual=residual[0] if residual else None,
        calls=tuple(len(call[0]) for call in whole),
        **held,
    )


def _kind_of(asked: ValueInfoProto) -> int:
    return asked.type.tensor_type.elem_type


def _rank(asked: ValueInfoProto) -> int:
    return len(asked.type.tensor_type.shape.dim)


def _fixed(asked: ValueInfoProto, axis: int) -> int | None:
    """The length of an axis that the graph fixes."""
    each = asked.type.tensor_type.shape.dim[axis]
    return each.dim_value if each.HasField("dim_value") and each.dim_value > 0 else None
