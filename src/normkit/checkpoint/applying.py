"""A plan carried out on a source: the vectors first, then each matrix a chunk of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter

import torch
from torch import Tensor

from normkit.checkpoint.arithmetic import (
    add_rows,
    all_finite,
    partition,
    quotient,
    rounded,
    row_sums,
    scaled,
    wide_room,
)
from normkit.checkpoint.matrices import Centring, GainByRow, check_axis, check_sum, check_written, factors
from normkit.checkpoint.plan import (
    Constant,
    Edit,
    Plan,
    Product,
    Quotient,
    Reference,
    Rows,
    Sum,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.source import FLOATS, TORCH, Source, found, vector
from normkit.errors import ModelError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class MadeVector:
    """A gain or a bias as it is written.

    Attributes:
        value: In the dtype of the output.
        residual: Largest |written - float64 value| / largest |float64 value|; 0 for constants.
    """

    value: Tensor
    residual: float


@dataclass
class Outcome:
    """What making a tensor showed, once it is made to the end.

    Attributes:
        residual: Largest |mean along the centred axis| of what is written / its root mean square; 0 where not centred.
    """

    residual: float = 0.0


def vectors(plan: Plan, source: Source, *, threads: int = 1, progress: Progress | None = None) -> dict[str, MadeVector]:
    """Every gain and bias of a plan, in the order of its edits; the same bits with any number of threads.

    Args:
        plan: What is done.
        source: What it is done to.
        threads: How many compute at a time.
        progress: Called with a stage's name, the vectors done and the vectors in all.

    Raises:
        ModelError: If a tensor is missing, does not fit, holds a NaN, or a result does not fit its dtype.
    """
    edits = {edit.name: edit for edit in plan.edits if isinstance(edit, VectorEdit)}
    values: dict[str, Tensor] = {}
    finished: dict[str, MadeVector] = {}
    order = TopologicalSorter({name: _awaited(edit) for name, edit in edits.items()})
    order.prepare()
    running: dict[Future[tuple[Tensor, MadeVector]], str] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            while order.is_active():
                for name in order.get_ready():
                    running[pool.submit(_vector, edits[name], source, values)] = name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name = running.pop(future)
                    values[name], finished[name] = future.result()
                    order.done(name)
                    if progress:
                        progress("gains and biases", len(finished), len(edits))
        finally:
            pool.shutdown(cancel_futures=True)
    return {name: finished[name] for name in edits}


def contents(edit: Edit, source: Source, vectors: Mapping[str, MadeVector], outcome: Outcome) -> Iterator[Tensor]:
    """What is written of an edit, a chunk at a time: a vector that is made already, or `made`.

    Args:
        edit: What is done.
        source: What it is done to.
        vectors: What `vectors` gave.
        outcome: Filled in at the end.
    """
    if isinstance(edit, TensorEdit):
        return made(edit, source, outcome)
    vector = vectors[edit.name]
    outcome.residual = vector.residual
    return iter([vector.value])


def made(edit: TensorEdit, source: Source, outcome: Outcome) -> Iterator[Tensor]:
    """The rows of an output tensor in order, a chunk at a time, in its dtype.

    The source is read in order too, a second time where the mean is taken along another axis than the last.

    Args:
        edit: What is done.
        source: What it is done to.
        outcome: Filled in at the end.

    Raises:
        ModelError: If the tensor is missing, has other axes or another dtype than the edit needs, or holds a NaN.
    """
    info = found(source, edit.source)
    if edit.relation == "identical" and edit.dtype == info.dtype:
        for start, stop in partition(*info.matrix):
            yield source.rows(edit.source, start, stop)
        return
    if info.dtype not in FLOATS:
        raise ModelError(f"{edit.source} is {info.dtype}, and only {', '.join(FLOATS)} are folded; give its source")
    if not math.prod(info.shape):
        yield torch.empty(info.matrix, dtype=TORCH[edit.dtype])
        return
    if edit.centred_axis is not None:
        check_axis(edit, info, edit.centred_axis)
        centring = Centring(edit, source, info)
        is_last = edit.centred_axis == len(info.shape) - 1
        yield from centring.by_rows() if is_last else centring.by_columns(info.shape, edit.centred_axis)
        outcome.residual = centring.residual
        return
    gain = GainByRow(edit, source, info, TORCH[edit.dtype]) if edit.gain else None
    for start, stop in partition(*info.matrix):
        rows = source.rows(edit.source, start, stop)
        if gain is None:
            yield rows.to(TORCH[edit.dtype])
            continue
        product = scaled(rows, gain.at(start, stop))
        check_written(edit, product, rows)
        yield product


def _awaited(edit: VectorEdit) -> set[str]:
    """The sums whose float64 values a vector needs."""
    terms = edit.value.terms if isinstance(edit.value, Sum) else ()
    return {term.vector.name for term in terms if term.vector.is_folded}


def _vector(edit: VectorEdit, source: Source, values: dict[str, Tensor]) -> tuple[Tensor, MadeVector]:
    """The float64 value before any zeroing, and what is written."""
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
            divisor = factors(gain, vector(source, gain.weight))
            _check_size(edit, gain.weight, divisor)
            if bool(((divisor == 0) & (start != 0)).any()):
                raise ModelError(
                    f"{gain.weight} is zero where {edit.source} is not, so the bias cannot be divided by it"
                )
            value = target = torch.where(start == 0, start, start / divisor)
            written = quotient(start, divisor, dtype)
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


def _referred(reference: Reference, source: Source, values: dict[str, Tensor]) -> Tensor:
    """The vector that a matrix is multiplied by."""
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
    if len(info.shape) != 2 or info.dtype not in FLOATS or info.shape[term.in_axis] != by.numel():
        raise ModelError(
            f"expected a matrix with {by.numel()} along axis {term.in_axis} in {term.matrix}, found {info.dtype} of "
            f"shape {info.shape}; the checkpoint does not fit its config"
        )
    rows_in_all, columns = info.shape
    result = torch.zeros(info.shape[1 - term.in_axis], dtype=torch.float64)
    for start, stop in partition(rows_in_all, columns):
        # The first row is room for the total.
        block = wide_room(1 + stop - start, columns)
        rows = source.rows(term.matrix, start, stop)
        products = block[1:].copy_(rows)
        if term.in_axis == 1:
            result[start:stop] = part = row_sums(products.mul_(by))
        else:
            products.mul_(by[start:stop].unsqueeze(1))
            add_rows(result, block)
            part = result
        check_sum(term.matrix, part, rows)
    return result
