"""Gains and biases of norms, and the biases of values, moved into the linear maps that read them.

gain, bias, final   W (g * z + b) + c = (W diag(g)) z + (c + W b)
exponent            g = 2^e m, 0.7 < |m| < 1.4: W (g * z + b) = (W diag(2^e)) (m * z + b / 2^e), and nothing is rounded
migrate             W (g * z + b) = (W diag(s)) (g / s * z + b / s)
value               where the weights of a row of attention sum to one, b_v passes through: b_o + W_o b_v, b_v = 0

A bias whose readers cannot all take it stays in the norm as b / g; a coordinate with g = 0 and b != 0 stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import rounded
from normkit.checkpoint.given import Given
from normkit.checkpoint.matrices import Outcome, factors, made
from normkit.checkpoint.plan import (
    Constant,
    Edit,
    Fate,
    Gain,
    Mantissa,
    NormChange,
    Operation,
    Product,
    Quotient,
    Reference,
    Rows,
    TensorEdit,
)
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder, fits
from normkit.checkpoint.reader import TORCH, Source
from normkit.models.graph import Attention, Graph, Linear, Norm

# Matrices of which a part is read before a fold.
_SAMPLED = 24


def move_affine(context: FoldContext, builder: PlanBuilder, norm: Norm) -> NormChange:
    """Decide what becomes of the gain and the bias of a norm: into all its readers, or nowhere."""
    if "exponent" in context.operations or "migrate" in context.operations:
        return move_in_part(context, builder, norm, "migrate" if "migrate" in context.operations else "exponent")
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
        _multiply(context, builder, readers, factor)
        builder.set_vector(factor.weight, Constant(value=1.0 - norm.offset, kept=kept))
        if has_bias and not folds_bias:
            builder.set_vector(str(norm.bias), Quotient(gain=factor))
    if folds_bias:
        for reader in readers:
            if reader.bias is not None:
                matrix = reader.weight if reader.weight in context.source.tensors else str(reader.tied_to)
                times = _times(context, reader, str(norm.bias))
                vector = Reference(name=str(norm.bias), heads=1 if times else 0, repeat=times or 1)
                builder.add(reader.bias, Product(matrix=matrix, in_axis=reader.in_axis, vector=vector))
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


def move_in_part(
    context: FoldContext, builder: PlanBuilder, norm: Norm, operation: Literal["exponent", "migrate"]
) -> NormChange:
    """Decide which powers of two, or which scales, leave the gain of a norm for its readers; the rest stays.

    A power of two loses no bit: a coordinate stays as it is where its gain or its bias would not fit the dtype that is
    written. Other scales become the gain over the gain that is written, so that a product with them is rounded once.
    """
    gain = None if norm.weight is None else context.vector(norm.weight) + norm.offset
    bias = None if norm.bias is None else context.vector(norm.bias)
    has_bias = bias is not None and bool((bias != 0).any())
    has_gain = gain is not None and bool((gain != 1).any())
    asked = context.scales.get(norm.name)
    if gain is None or (operation == "migrate" and asked is None):
        if asked is not None:
            builder.refuse(operation, norm.name, "it has no gain that could be divided by scales")
        return NormChange(name=norm.name, gain=_fate(gain, has_gain, None), bias=_fate(bias, has_bias, None))
    weight = str(norm.weight)
    if asked is None:
        factor = Gain(weight=weight, offset=norm.offset, is_power=True)
    else:
        factor = Gain(weight=weight, offset=norm.offset, is_power=context.has_powers, scales=Given(asked))
    by = factors(factor, context.vector(weight))
    if bool((by == 1).all()):
        return NormChange(name=norm.name, gain="identity", bias=_fate(bias, has_bias, None))
    if reason := context.graph.against_folding(norm, untie=context.untie):
        builder.refuse(operation, norm.name, reason)
        return NormChange(name=norm.name, gain="left", bias=_fate(bias, has_bias, None), reasons=(reason,))
    dtype = builder.written_dtype(weight)
    if factor.is_power:
        is_held = fits(gain / by - norm.offset, dtype)
        if norm.bias is not None and bias is not None:
            is_held &= fits(bias / by, builder.written_dtype(norm.bias))
    else:
        written = rounded(gain / by - norm.offset, TORCH[dtype]).to(torch.float64) + norm.offset
        is_held = written.isfinite() & ((written != 0) == (gain != 0))
        by = torch.where(is_held & (gain != 0), gain / written, by)
        factor = replace(factor, scales=Given(by))
    kept = tuple(int(index) for index in (~is_held & (by != 1)).nonzero().flatten())
    if len(kept) == int((by != 1).sum()):
        reason = f"{dtype} holds none of the gains that would remain"
        builder.refuse(operation, norm.name, reason)
        return NormChange(name=norm.name, gain="left", bias=_fate(bias, has_bias, None), reasons=(reason,))
    factor = replace(factor, kept=kept)
    readers = context.graph.readers(norm.gives)
    _multiply(context, builder, readers, factor)
    builder.set_vector(weight, Mantissa(gain=factor))
    if has_bias:
        builder.set_vector(str(norm.bias), Quotient(gain=factor))
    return NormChange(
        name=norm.name,
        gain="mantissa" if asked is None else "scaled",
        bias=_fate(bias, has_bias, "divided" if has_bias else None),
        readers=tuple(reader.name for reader in readers),
        kept=kept,
    )


def _multiply(context: FoldContext, builder: PlanBuilder, readers: Sequence[Linear], factor: Gain) -> None:
    """Multiply the columns of the readers by a gain."""
    for reader in readers:
        times = _times(context, reader, factor.weight)
        builder.multiply(reader.weight, reader.in_axis, replace(factor, times=times))


def _times(context: FoldContext, reader: Linear, vector: str) -> int | None:
    """How many rows a map reads side by side; None if it reads one."""
    size = context.vector(vector).numel()
    return context.source.tensors[reader.weight].shape[reader.in_axis] // size if reader.is_joined else None


def expected_rounding(edits: Sequence[Edit], source: Source) -> tuple[float, int]:
    """The error that 16 bits leave in folded matrices, relative, root mean square, and on how many weights it was seen.

    Taken are the first rows of some of the matrices, with their gains.
    """
    products = [edit for edit in edits if isinstance(edit, TensorEdit) and edit.relation == "product"]
    narrow = [edit for edit in products if edit.dtype in ("F16", "BF16")]
    lost = total = 0.0
    count = 0
    for edit in narrow[:: -(-len(narrow) // _SAMPLED)] if narrow else ():
        exact, written = (next(made(each, source, Outcome())) for each in (replace(edit, dtype="F64"), edit))
        lost += float((written.to(torch.float64) - exact).square().sum())
        total += float(exact.square().sum())
        count += exact.numel()
    return math.sqrt(lost / total) if total else 0.0, count


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
    rows = value_rows(attention, head)
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


def value_rows(attention: Attention, head: int) -> Rows | None:
    """The rows of the values, of `head` each, in the projection that gives them; None for all of it."""
    if attention.layout == "own":
        return None
    if attention.layout == "last":
        return Rows(blocks=1, tail=attention.kv_heads * head)
    return Rows(blocks=attention.kv_heads, tail=head)
