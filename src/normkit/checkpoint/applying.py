"""A plan carried out on a source: its gains and biases, and what each edit writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import (
    add_rows,
    all_finite,
    partition,
    quotient,
    rounded,
    row_sums,
    wide_room,
)
from normkit.checkpoint.channel_maps import stored_affine
from normkit.checkpoint.hadamard import rotate_runs
from normkit.checkpoint.matrices import Outcome, check_sum, factors, made
from normkit.checkpoint.plan import (
    FLOATS,
    BatchNorm,
    Constant,
    Edit,
    FoldPlan,
    Mantissa,
    Product,
    Quotient,
    Reference,
    Rows,
    Shift,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.reader import TORCH, Source, found, vector
from normkit.errors import ModelError

if TYPE_CHECKING:
    from normkit.checkpoint.folding import Workers


@dataclass(frozen=True, eq=False)
class MadeVector:
    """A gain or a bias as it is written."""

    value: Tensor
    """In the dtype of the output."""
    residual: float
    """Largest |written - float64 value| / largest |float64 value|; 0 for constants."""


def vectors(plan: FoldPlan, source: Source, workers: Workers) -> dict[str, MadeVector]:
    """Every gain and bias of a plan, in the order of its edits; the same bits with any number of threads.

    The workers count the vectors that are done.

    Raises:
        ModelError: If a tensor is missing, does not fit, holds a NaN, or a result does not fit its dtype.
    """
    edits = {edit.name: edit for edit in plan.edits if isinstance(edit, VectorEdit)}
    values: dict[str, Tensor] = {}
    finished: dict[str, MadeVector] = {}
    workers.begin("gains and biases", len(edits))

    def make(name: str) -> None:
        values[name], finished[name] = _vector(edits[name], source, values)
        workers.step(1)

    # A bias may need the float64 value of another.
    awaited: dict[str, set[str]] = {}
    for name, edit in edits.items():
        referred = [term.vector for term in edit.value.terms] if isinstance(edit.value, Sum) else []
        awaited[name] = {each.name for each in referred if isinstance(each, Reference) and each.is_folded}
    order = TopologicalSorter(awaited)
    order.prepare()
    while order.is_active():
        ready = order.get_ready()
        workers.map([partial(make, name) for name in ready])
        order.done(*ready)
    return {name: finished[name] for name in edits}


def contents(edit: Edit, source: Source, vectors: Mapping[str, MadeVector], outcome: Outcome) -> Iterator[Tensor]:
    """The values that an edit writes, a chunk at a time: a vector that is made already, or the chunks of `made`."""
    if isinstance(edit, TensorEdit):
        return made(edit, source, outcome)
    vector = vectors[edit.name]
    outcome.residual = vector.residual
    return iter([vector.value])


def _vector(edit: VectorEdit, source: Source, values: Mapping[str, Tensor]) -> tuple[Tensor, MadeVector]:
    """The float64 value before any rows are set to zero, and the vector that is written."""
    dtype = TORCH[edit.dtype]
    start = vector(source, edit.source) if edit.source else torch.zeros(edit.size, dtype=torch.float64)
    if edit.source:
        _check_size(edit, edit.source, start)
    match edit.value:
        case Constant(value=number, kept=kept):
            value = target = torch.full((edit.size,), number, dtype=torch.float64)
            value[list(kept)] = start[list(kept)]
            written = rounded(target, dtype)
        case Quotient(gain=gain):
            divisor = factors(gain, vector(source, gain.weight)) / 2.0 ** (edit.exponent or 0)
            _check_size(edit, gain.weight, divisor)
            if bool(((divisor == 0) & (start != 0)).any()):
                raise ModelError(
                    f"{gain.weight} is zero where {edit.source} is not, so the bias cannot be divided by it"
                )
            value = target = torch.where(start == 0, start, start / divisor)
            written = quotient(start, divisor, dtype)
        case Mantissa(gain=gain):
            value = target = (start + gain.offset) / factors(gain, start) - gain.offset
            written = rounded(target, dtype)
        case Shift(norm=norm, added=added):
            by = stored_affine(norm, source)
            _check_size(edit, norm.mean, by.mean)
            value = target = ((0.0 if added is None else start) - by.mean) * by.scale + by.bias
            written = rounded(target, dtype)
        case Sum(terms=terms, is_centred=is_centred, zeroed=zeroed):
            value = start
            for term in terms:
                product = _product(term, source, _referred(term.vector, source, values))
                _check_size(edit, term.matrix, product)
                value = value + product
            if is_centred:
                value = value - row_sums(value.unsqueeze(0)) / edit.size
            target = value.clone()
            if zeroed:
                _tail(target, zeroed).zero_()
            written = rounded(target, dtype)
    if edit.exponent is not None and not isinstance(edit.value, Quotient):
        offset = edit.offset or 0.0
        target = (target + offset) * 2.0**edit.exponent - offset
        written = rounded(target, dtype)
    if edit.added is not None:
        target = target + edit.added
        written = rounded(target, dtype)
    if edit.rotations:
        target = target.clone()
        for rotation in edit.rotations:
            rotate_runs(target.numpy().reshape(1, -1, 1), rotation)
        written = rounded(target, dtype)
    if not all_finite(written):
        raise ModelError(f"{edit.name} does not fit into {edit.dtype} once folded; fold with --dtype float32")
    if isinstance(edit.value, Constant) or not bool(target.any()):
        return value, MadeVector(written, 0.0)
    return value, MadeVector(written, float((written.to(torch.float64) - target).abs().max() / target.abs().max()))


def _check_size(edit: VectorEdit, name: str, values: Tensor) -> None:
    if values.numel() != edit.size:
        raise ModelError(
            f"expected {edit.size} elements for {edit.name}, {name} gives {values.numel()}; the checkpoint does not "
            "fit its config"
        )


def _referred(reference: Reference | BatchNorm, source: Source, values: Mapping[str, Tensor]) -> Tensor:
    """The vector that a matrix is multiplied by."""
    if isinstance(reference, BatchNorm):
        return stored_affine(reference, source).shift
    value = values[reference.name] if reference.is_folded else vector(source, reference.name)
    if reference.rows:
        value = _tail(value, reference.rows).reshape(-1)
    if reference.heads:
        value = value.view(reference.heads, -1).repeat_interleave(reference.repeat, 0).reshape(-1)
    return value


def _tail(values: Tensor, rows: Rows) -> Tensor:
    """The last rows of each block, as a view."""
    return values.view(rows.blocks, -1)[:, -rows.tail :]


def _product(term: Product, source: Source, by: Tensor) -> Tensor:
    """W v in float64."""
    info = found(source, term.matrix)
    axes = len(info.shape)
    is_matrix = axes == 2 or (axes > 2 and term.in_axis == 1)
    if not is_matrix or info.dtype not in FLOATS or info.shape[term.in_axis] != by.numel():
        raise ModelError(
            f"expected a matrix with {by.numel()} along axis {term.in_axis} in {term.matrix}, found {info.dtype} of "
            f"shape {info.shape}; the checkpoint does not fit its config"
        )
    # A convolution has the weights of each of its outputs on several rows of the stored matrix.
    held, rows_in_all, columns = math.prod(info.shape[1:-1]), info.shape[0], math.prod(info.shape[1:])
    by = by.repeat_interleave(math.prod(info.shape[2:]))
    result = torch.zeros(info.shape[1 - term.in_axis], dtype=torch.float64)
    for start, stop in partition(rows_in_all, columns):
        # The first row is room for the total.
        block = wide_room(1 + stop - start, columns)
        rows = source.rows(term.matrix, start * held, stop * held).view(stop - start, columns)
        products = block[1:].copy_(rows)
        if term.in_axis == 1:
            result[start:stop] = part = row_sums(products.mul_(by))
        else:
            products.mul_(by[start:stop].unsqueeze(1))
            add_rows(result, block)
            part = result
        check_sum(term.matrix, part, rows)
    return result
