"""From the graph of a checkpoint and what is asked for to a plan: reads headers and vectors, never a matrix.

gain, bias, final   W (g * z + b) + c = (W diag(g)) z + (c + W b)
value               where the weights of a row of attention sum to one, b_v passes through: b_o + W_o b_v, b_v = 0
centre              LN(P x) = LN(x), where P subtracts the mean
rms                 where P x = x: var(x) = mean(x^2), so that LayerNorm is RMSNorm with the same eps

A bias whose readers cannot all take it stays in the norm as b / g; a coordinate with g = 0 and b != 0 stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normkit import specs
from normkit.checkpoint.build_model import KEY, record
from normkit.checkpoint.model_folder import CONFIG, code_files
from normkit.checkpoint.opening import Opened, OpenedFolder, paths_to
from normkit.checkpoint.plan import (
    DTYPE_KEYS,
    DTYPES,
    FLOATS,
    OPERATIONS,
    Constant,
    Edit,
    Fate,
    FoldPlan,
    Gain,
    NormChange,
    Operation,
    PlanBuilder,
    Product,
    Quotient,
    Reference,
    Rows,
    TensorEdit,
)
from normkit.checkpoint.reader import Source, check_finite
from normkit.conventions import gain as gains
from normkit.errors import InputError, ModelError
from normkit.models.expansion import Settings
from normkit.models.graph import Attention, Graph, Linear, Norm
from normkit.spec import NormSpec

DEFAULT: tuple[Operation, ...] = ("gain", "bias", "final")
BATCH_NORMS = "batchnorm is folded in memory, and alone: nk.fold(model, operations=['batchnorm'], batch=...)"
ROUNDING = (
    "each product is rounded once to 16 bits, as the weights are: on SmolLM2-135M this moved logits by 0.37 of 50 (KL "
    "4e-5, the same first token at 99.7 % of places), on Gemma 3 270M by 5.7 of 64 (4e-4, 99.2 %); float32 avoids it"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldContext:
    """A checkpoint and what is asked of it. Of its tensors only vectors are read."""

    graph: Graph
    settings: Settings
    source: Source
    operations: tuple[Operation, ...]
    untie: bool
    """A tied head gets a table of its own."""
    _read: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, name: str) -> Tensor:
        """A gain or a bias in float64, read once; one for each of several heads is flattened.

        Raises:
            ModelError: If it holds NaN or infinity, or no floating-point numbers.
        """
        if name not in self._read:
            info = self.source.tensors[name]
            if info.dtype not in FLOATS:
                raise ModelError(f"expected {', '.join(FLOATS)} in {name}, got {info.dtype}; give an unquantized model")
            values = self.source.rows(name, 0, info.matrix[0]).flatten().to(torch.float64)
            check_finite(name, values)
            self._read[name] = values
        return self._read[name]


def make_plan(
    opened: Opened,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    for_training: bool = False,
    change_class: bool = True,
) -> FoldPlan:
    """Decide what folding does to each tensor, and what it does not do and why.

    Args:
        opened: The checkpoint.
        operations: Any of `OPERATIONS`; None is `DEFAULT`.
        untie: Give a tied head a table of its own, so that the final gain can enter it and the embeddings be centred.
        dtype: Dtype of what is written: "same", or "float32".
        for_training: The result will be trained further: dropout is then an error.
        change_class: The model may become one of another family, if that family computes the same.

    Raises:
        InputError: If an argument is not one of its choices, or the model has dropout and will be trained further.
        ModelError: If gains or biases hold NaN or infinity.
    """
    if "batchnorm" in (operations or ()):
        raise InputError(BATCH_NORMS)
    graph, config, source = opened.graph, opened.config, opened.source
    if unknown := [name for name in operations or () if name not in OPERATIONS]:
        raise InputError(f"operations are {', '.join(OPERATIONS)}, got {unknown[0]!r}")
    if operations is not None and not operations:
        raise InputError(f"expected at least one operation of {', '.join(OPERATIONS)}, got none")
    asked = DEFAULT if operations is None else tuple(name for name in OPERATIONS if name in operations)
    if dtype not in DTYPES:
        raise InputError(f"dtype must be 'same' or 'float32', got {dtype!r}")
    settings = Settings(graph.family, config)
    rates = {key: settings.value(key) for key in graph.family.config.dropout}
    dropout = ", ".join(f"{key} = {rate}" for key, rate in rates.items() if rate)
    if dropout and for_training:
        raise InputError(
            f"expected no dropout in a model to be trained further, got {dropout}: under it the folded model trains "
            "differently; set it to 0 in config.json, or leave out for_training"
        )
    context = FoldContext(
        graph=graph,
        settings=settings,
        source=source,
        operations=asked,
        untie=untie and graph.is_tied and graph.against_untying() is None,
    )
    builder = PlanBuilder(source.tensors, dtype)
    written: dict[str, Any] = {}
    if context.untie:
        head = next(linear for linear in graph.linears if linear.tied_to)
        if head.weight not in source.tensors:
            builder.copy_table(head.weight, str(head.tied_to))
        if head.parted_bias is not None:
            builder.copy_bias(head.parted_bias, str(head.bias))
        # The key is set at every level of the configuration that has it.
        key = graph.family.tie.key if graph.family.tie else ""
        written = dict.fromkeys(sorted({key, *paths_to(config, key)}), False)
    elif untie and (reason := graph.against_untying()):
        builder.refuse("final", graph.architecture, reason)
    changes = tuple(move_affine(context, builder, norm) for norm in graph.norms)
    centred = centre_writers(context, builder) if {"centre", "rms"} & set(asked) else ()
    if "value" in asked:
        for attention in graph.attentions:
            move_value_bias(context, builder, attention)
    swaps: dict[str, NormSpec] = {}
    dropped: tuple[str, ...] = ()
    if "rms" in asked:
        changes, swaps = become_rms(context, builder, changes)
        if swaps and change_class and (other := change_family(context, builder, len(swaps))) is not None:
            swaps, written, dropped = {}, written | other[0], tuple(key for key in other[1] if key in config)
    if swaps:
        written[KEY] = record(swaps)
    if dtype == "float32":
        # Loaders would round the weights again, at whatever level a key says so.
        found = sorted({path for key in DTYPE_KEYS for path in paths_to(config, key)})
        written |= dict.fromkeys(found if any(key in config for key in DTYPE_KEYS) else ["dtype", *found], dtype)
    if "auto_map" in config:
        dropped = (*dropped, "auto_map")
    edits = builder.edits()
    return FoldPlan(
        family=graph.family.model_type,
        architecture=graph.architecture,
        operations=asked,
        untie=context.untie,
        edits=edits,
        norms=changes,
        refusals=builder.refusals,
        centred=centred,
        config=written,
        dropped=dropped,
        swaps={path: spec.to_json() for path, spec in swaps.items()},
        remarks=(
            *([f"equal in evaluation mode, not under dropout ({dropout})"] if dropout else ()),
            *_remarks(context, opened, edits),
            *graph.family.remarks,
        ),
    )


def _remarks(context: FoldContext, opened: Opened, edits: Sequence[Edit]) -> list[str]:
    """Notes for the user about the edits, one sentence each."""
    remarks, graph = [], context.graph
    narrow = [edit for edit in edits if edit.dtype in ("F16", "BF16")]
    if any(edit.relation == "product" for edit in narrow):
        remarks.append(ROUNDING)
    if any(isinstance(edit, TensorEdit) and edit.centred_axis is not None for edit in edits):
        remarks.append("hidden states lose their mean; what norms and heads make of them is the same")
        if "rms" in context.operations and narrow:
            remarks.append(
                "writers rounded to 16 bits keep a small mean, which an RMSNorm sees and a LayerNorm does not; with "
                "dtype float32 it is some thousand times smaller"
            )
    if context.untie and (tie := graph.family.tie) is not None and tie.ignored_by:
        remarks.append(
            f"{tie.head}.weight of a {graph.family.model_type} model is not read by {' and '.join(tie.ignored_by)}: "
            "the embeddings are taken for the head, or the folder is refused; for use there fold without untying"
        )
    code = code_files(opened.states) if isinstance(opened, OpenedFolder) else []
    left_out = [f"auto_map of {CONFIG}"] if "auto_map" in opened.config else []
    left_out += [", ".join([*sorted(code)[:3], *(["..."] if len(code) > 3 else [])])] if code else []
    if left_out:
        remarks.append(
            f"code is not carried over ({'; '.join(left_out)}): what is folded is the stock class {graph.architecture}"
        )
    return remarks


def move_affine(context: FoldContext, builder: PlanBuilder, norm: Norm) -> NormChange:
    """Decide what becomes of the gain and the bias of a norm: into all its readers, or nowhere."""
    readers = context.graph.readers(norm.gives)
    gain = None if norm.weight is None else context.vector(norm.weight) + norm.offset
    bias = None if norm.bias is None else context.vector(norm.bias)
    has_gain, has_bias = gain is not None and bool((gain != 1).any()), bias is not None and bool((bias != 0).any())
    is_final = any(reader.is_head for reader in readers)
    wants_gain = gain is not None and ("final" if is_final else "gain") in context.operations
    wants_bias = bias is not None and ("final" if is_final else "bias") in context.operations
    reasons: list[str] = []
    if (
        (wants_gain or wants_bias)
        and (has_gain or has_bias)
        and (reason := context.graph.against_folding(norm, untie=context.untie))
    ):
        operation: Operation = "final" if is_final else "gain" if wants_gain else "bias"
        builder.refuse(operation, norm.name, reason)
        wants_gain, wants_bias, reasons = False, False, [reason]
    lacking = [reader.name for reader in readers if reader.bias is None and not context.graph.ignores_key_bias(reader)]
    folds_bias = wants_bias and has_bias and not lacking
    kept: tuple[int, ...] = ()
    if wants_gain and not folds_bias and gain is not None and bias is not None:
        # No division by the gain can carry the bias at these coordinates.
        kept = tuple(int(index) for index in ((gain == 0) & (bias != 0)).nonzero().flatten())
    # The gain is 0 at the coordinates that are kept.
    moves_gain = wants_gain and gain is not None and int((gain != 1).sum()) > len(kept)
    if moves_gain:
        factor = Gain(weight=str(norm.weight), offset=norm.offset, kept=kept)
        for reader in readers:
            builder.multiply(reader.weight, reader.in_axis, factor)
        builder.set_vector(factor.weight, Constant(value=1.0 - norm.offset, kept=kept))
        if has_bias and not folds_bias:
            builder.set_vector(str(norm.bias), Quotient(gain=factor))
    if folds_bias:
        for reader in readers:
            if reader.bias is not None:
                matrix = reader.weight if reader.weight in context.source.tensors else str(reader.tied_to)
                moved = Product(matrix=matrix, in_axis=reader.in_axis, vector=Reference(name=str(norm.bias)))
                builder.add(reader.bias, moved)
        builder.set_vector(str(norm.bias), Constant(value=0.0))
    if wants_bias and has_bias and lacking:
        stays = "stays in the norm, divided by the gain" if moves_gain else "stays in the norm"
        reasons.append(f"its bias {stays}, as {', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} none")
    return NormChange(
        name=norm.name,
        gain=_fate(gain, has_gain, "folded" if moves_gain else None),
        bias=_fate(bias, has_bias, "folded" if folds_bias else "divided" if has_bias and moves_gain else None),
        readers=tuple(reader.name for reader in readers) if moves_gain or folds_bias else (),
        kept=kept,
        reasons=tuple(reasons),
    )


def _fate(vector: Tensor | None, is_there: bool, moved: Fate | None) -> Fate:
    if vector is None:
        return "none"
    return moved or ("left" if is_there else "identity")


def move_value_bias(context: FoldContext, builder: PlanBuilder, attention: Attention) -> None:
    """Move the bias of the values of an attention into the bias behind it, where that is exact."""
    value, output = attention.value, attention.output
    if value.bias is None:
        return
    head = context.source.tensors[output.weight].shape[output.in_axis] // attention.heads
    rows = None
    if attention.layout == "last":
        rows = Rows(blocks=1, tail=attention.kv_heads * head)
    elif attention.layout == "last of each group":
        rows = Rows(blocks=attention.kv_heads, tail=head)
    stored = context.vector(value.bias)
    taken = stored if rows is None else stored.view(rows.blocks, -1)[:, -rows.tail :]
    if not builder.is_changed(value.bias) and not bool((taken != 0).any()):
        return
    if reason := Graph.against_value_fold(attention):
        builder.refuse("value", attention.name, reason)
        return
    repeat = attention.heads // attention.kv_heads
    moved = Reference(
        name=value.bias, is_folded=True, rows=rows, heads=attention.kv_heads if repeat > 1 else 0, repeat=repeat
    )
    builder.add(str(output.bias), Product(matrix=output.weight, in_axis=output.in_axis, vector=moved))
    builder.zero(value.bias, rows)


def centre_writers(context: FoldContext, builder: PlanBuilder) -> tuple[str, ...]:
    """Centre every writer that may be centred; their names."""
    operation: Operation = "centre" if "centre" in context.operations else "rms"
    centred: list[str] = []
    for space in context.graph.spaces:
        if reason := context.graph.against_centring(space):
            builder.refuse(operation, space, reason)
            continue
        for writer in context.graph.writers(space):
            if reason := context.graph.against_centring_writer(writer, untie=context.untie):
                builder.refuse(operation, writer.name, reason)
                continue
            centred.append(writer.name)
            if isinstance(writer, Linear):
                builder.centre(writer.weight, writer.out_axis)
                if writer.bias is not None:
                    builder.centre_bias(writer.bias)
            else:
                for name in (writer.name, *writer.aliases):
                    builder.centre(name, writer.axis)
    return tuple(centred)


def become_rms(
    context: FoldContext, builder: PlanBuilder, changes: Sequence[NormChange]
) -> tuple[tuple[NormChange, ...], dict[str, NormSpec]]:
    """The changes of all norms with those that become RMSNorms, and path in memory -> spec of these."""
    swaps: dict[str, NormSpec] = {}
    changed = {change.name: change for change in changes}
    if all(norm.kind == "rms" for norm in context.graph.norms):
        builder.refuse("rms", context.graph.architecture, "its norms are RMSNorms")
    for norm in context.graph.norms:
        if norm.kind == "rms":
            continue
        if reason := context.graph.against_rms(norm, untie=context.untie):
            builder.refuse("rms", norm.name, reason)
            continue
        changed[norm.name] = dataclasses.replace(changed[norm.name], becomes_rms=True)
        gain = gains.Gain(norm.weight is not None, norm.offset, has_bias=norm.bias is not None)
        swaps[norm.module] = specs.TORCH_RMS_NORM.replace(eps=norm.eps, **gain.conventions())
    return tuple(changed.values()), swaps


def change_family(
    context: FoldContext, builder: PlanBuilder, num_swapped: int
) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """The keys of config.json to set and to remove if the model becomes one of another family, else None.

    All norms must become RMSNorms. The builder gets the gains of one that the other family has and this one lacks.
    """
    graph, becomes = context.graph, context.graph.family.becomes
    if becomes is None:
        return None
    if not context.settings.holds(becomes.when):
        builder.refuse("rms", graph.architecture, becomes.otherwise)
        return None
    if num_swapped < len(graph.norms) or graph.architecture not in becomes.classes:
        return None
    for norm in graph.norms:
        if norm.weight is None:
            dtype = context.source.tensors[graph.tables[0].name].dtype
            builder.create_constant(f"{norm.name}.weight", graph.width, 1.0, dtype)
    written: dict[str, Any] = {
        "model_type": becomes.model_type,
        "architectures": [becomes.classes[graph.architecture]],
    }
    for key, value in becomes.config.items():
        is_taken = isinstance(value, str) and value.startswith("=")
        written[key] = context.settings.value(value[1:]) if is_taken else value
    return written, becomes.drop
