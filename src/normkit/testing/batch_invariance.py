"""Whether a whole model gives a sample the same bits whatever is beside it; if not, where bits first move."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.measurement.hooks import every_module
from normkit.measurement.running import (
    arguments,
    caller,
    evaluating,
    first_of,
    mapped,
    name_of_ids,
    prepared,
    rows,
    tensors,
    token_ids,
)
from normkit.text import percent

_PADDING = 5


@dataclass(frozen=True, kw_only=True)
class BitChange:
    """A surrounding in which a sample of a batch has other bits than alone."""

    surrounding: str
    """The samples beside it, in words."""
    path: str
    """The innermost module whose input has the same bits and whose output has not; "" for the model itself."""
    class_name: str
    """Its class."""
    between: tuple[str, str] | None
    """The last call inside that module that left the same bits, and the first that was given others; None for a module
    that itself makes other bits of the same."""
    share: float
    """Share of the model's outputs for this sample that have other bits."""
    largest: float
    """The largest change of an output over the largest magnitude of the outputs."""

    def __str__(self) -> str:
        """All of it on one line."""
        where = f"{self.path or 'the model'} ({self.class_name})"
        if self.between is not None:
            where = f"inside {where}, between {self.between[0] or 'its input'} and {self.between[1] or 'its output'}"
        return (
            f"{self.surrounding}: bits first move {'' if self.between else 'at '}{where}; {percent(self.share)} of the "
            f"outputs have other bits, by up to {self.largest:.1e} of the largest"
        )


class BatchInvarianceError(AssertionError):
    """A model gives a sample other bits than alone."""

    def __init__(self, name: str, changes: tuple[BitChange, ...]) -> None:
        super().__init__(name, changes)
        self.name = name
        self.changes = changes
        """In which surroundings, and where bits first move."""

    def __str__(self) -> str:
        """One line for each surrounding."""
        lines = [f"{self.name} gives a sample other bits than alone", *(f"  {change}" for change in self.changes)]
        return "\n".join(lines)


def assert_batch_invariant(model: nn.Module, batch: Any) -> None:
    """Assert that a model gives each sample the same bits alone, in its batch, elsewhere in it, and with padding.

    It runs in evaluation mode, without gradients, and is left as it was. With padding means: more tokens on the right,
    masked; this is tried for models that take `attention_mask`.

    Args:
        model: The model, on any device.
        batch: Two samples or more, as `inspect` takes it.

    Raises:
        BatchInvarianceError: If bits move; `.changes` says in which surroundings and where first.
        InputError: If the batch holds one sample, or the model takes no such arguments.

    Example:
        >>> class CentredBatch(nn.Module):
        ...     def forward(self, x):
        ...         return x - x.mean(0)
        >>> model = nn.Sequential(nn.LayerNorm(4), CentredBatch())
        >>> assert_batch_invariant(model, torch.randn(3, 4))
        Traceback (most recent call last):
        normkit.testing.batch_invariance.BatchInvarianceError: Sequential gives a sample other bits than alone
          in a batch of 3: bits first move at 1 (CentredBatch); 100 % of the outputs have other bits, by up to ...
    """
    __tracebackhide__ = True
    changes = bit_changes(model, batch)
    if changes:
        raise BatchInvarianceError(type(model).__name__, changes)


def bit_changes(model: nn.Module, batch: Any) -> tuple[BitChange, ...]:
    """The changes that `assert_batch_invariant` would raise: one for each surrounding; empty if all bits stay.

    Example:
        >>> bit_changes(nn.Tanh(), torch.randn(3, 4))
        ()
    """
    given = arguments(model, batch)
    count = len(first_of(given))
    if count < 2:
        raise InputError(f"expected a batch of two samples or more, got {count}: bits are compared with each alone")
    ids = token_ids(given)
    tokens = 0 if ids is None else ids.shape[1]
    with evaluating(model), torch.no_grad():
        alone = {place: _traced(model, rows(given, place), {place: 0}, 1, tokens)[place] for place in (0, count - 1)}
        everywhere = {place: place for place in alone}
        surroundings = [(f"in a batch of {count}", given, everywhere)]
        reordered = mapped(dict(given), lambda _name, value: value.flip(0) if len(value.shape) else value)
        surroundings.append(("in reverse order", reordered, {place: count - 1 - place for place in alone}))
        if (padded := _padded(model, given)) is not None:
            surroundings.append((f"with {padded[1]} tokens of padding", padded[0], everywhere))
        changes = []
        for words, one, places in surroundings:
            if (change := _change(words, model, alone, _traced(model, one, places, count, tokens))) is not None:
                changes.append(change)
    return tuple(changes)


@dataclass(kw_only=True, eq=False)
class _Call:
    """The inputs and outputs of one call of a module for one sample, as digests of their bits."""

    path: str
    parent: tuple[str, int] | None
    entered: list[bytes]
    left: list[bytes] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Trace:
    """The calls of a run for one sample, in the order in which they ended, and the model's output for it."""

    calls: dict[tuple[str, int], _Call] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)
    output: Tensor | None = None


def _traced(
    model: nn.Module, batch: Mapping[Any, Any], places: Mapping[int, int], count: int, tokens: int
) -> dict[int, _Trace]:
    """Run a batch of `count` samples; the trace of each sample by its number, `places` being where it lies."""
    width = 0 if (ids := token_ids(batch)) is None else ids.shape[1]
    traces = {number: _Trace() for number in places}
    made: Counter[str] = Counter()
    open_calls: list[tuple[str, int]] = []

    def before(path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        key = (path, made[path])
        made[path] += 1
        for number, place in places.items():
            # A mask is there with padding and absent without: it is no difference of its own.
            given = [args, *(value for name, value in kwargs.items() if "mask" not in name)]
            entered = _digests(given, place, count, width, tokens)
            parent = open_calls[-1] if open_calls else None
            traces[number].calls[key] = _Call(path=path, parent=parent, entered=entered)
        open_calls.append(key)

    def after(path: str, output: object) -> None:
        # A call that raised left its key behind.
        while open_calls and open_calls[-1][0] != path:
            open_calls.pop()
        key = open_calls.pop()
        for number, place in places.items():
            traces[number].calls[key].left = _digests(output, place, count, width, tokens)
            traces[number].ended.append(key)

    with every_module(model, before, after):
        result = caller(model, prepared(model, batch))()
    for number, place in places.items():
        floating = (each for _, each in tensors(result) if each.is_floating_point())
        rows_of_it = (_row(each, place, count, width, tokens) for each in floating)
        traces[number].output = next((row for row in rows_of_it if row is not None), None)
    return traces


def _change(
    words: str, model: nn.Module, alone: Mapping[int, _Trace], beside: Mapping[int, _Trace]
) -> BitChange | None:
    """The first place at which a sample's bits move; None if the model's output keeps them."""
    modules = dict(model.named_modules())
    for number, trace in beside.items():
        reference = alone[number]
        if trace.output is None or reference.output is None or trace.output.shape != reference.output.shape:
            raise InputError("expected a model that returns a tensor with a row for each sample, got another output")
        here, there = trace.output.double(), reference.output.double()
        same = (here == there) | (here.isnan() & there.isnan())
        if bool(same.all()):
            continue
        largest = float((here - there).abs().nan_to_num(posinf=torch.inf).max()) / max(float(there.abs().max()), 1e-300)
        share = 1 - float(same.double().mean())
        path, between = _origin(trace, reference)
        return BitChange(
            surrounding=words,
            path=path,
            class_name=type(modules[path]).__name__,
            between=between,
            share=share,
            largest=largest,
        )
    return None


def _origin(trace: _Trace, reference: _Trace) -> tuple[str, tuple[str, str] | None]:
    """The innermost module that makes other bits of the same, and between which calls inside it."""
    known = reference.calls
    moved = next((key for key in trace.ended if key in known and trace.calls[key].left != known[key].left), ("", 0))
    call = trace.calls[moved]
    if call.entered == known[moved].entered:
        inner = [key for key in trace.ended if trace.calls[key].parent == moved]
        if not inner:
            return call.path, None
        # All calls inside it keep their bits: what follows the last of them does not.
        return call.path, (inner[-1][0], "")
    first = moved
    parent = call.parent
    while parent is not None and trace.calls[parent].entered != known[parent].entered:
        first, parent = parent, trace.calls[parent].parent
    if parent is None:
        return "", ("", first[0])
    earlier = trace.ended[: trace.ended.index(moved)]
    last = next((key[0] for key in reversed(earlier) if trace.calls[key].parent == parent), "")
    return parent[0], (last, first[0])


def _digests(value: object, place: int, count: int, width: int, tokens: int) -> list[bytes]:
    """The bits of a sample in all tensors of a value."""
    found = []
    for _, tensor in tensors(value):
        row = _row(tensor, place, count, width, tokens)
        is_mask = tensor.dtype == torch.bool or (
            tensor.dim() == 4 and width > 0 and tensor.shape[1:] == (1, width, width)
        )
        if row is not None and not is_mask:
            content = row.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
            found.append(hashlib.blake2b(content, digest_size=16).digest())
    return found


def _row(tensor: Tensor, place: int, count: int, width: int, tokens: int) -> Tensor | None:
    """The part of a tensor that belongs to one sample, without padding; None for a tensor without samples."""
    if not tensor.dim():
        return None
    if tensor.shape[0] == count * width != count:
        tensor = tensor.reshape(count, width, *tensor.shape[1:])
    if tensor.shape[0] not in (1, count):
        return None
    row = tensor[place if tensor.shape[0] == count else 0]
    for axis, size in enumerate(row.shape):
        if width > tokens and size == width:
            row = row.narrow(axis, 0, tokens)
    return row


def _padded(model: nn.Module, batch: Mapping[Any, Any]) -> tuple[dict[Any, Any], int] | None:
    """The batch with masked tokens on the right, and how many; None for a model that takes no mask."""
    name = name_of_ids(batch)
    if name is None or "attention_mask" not in signature(model.forward).parameters:
        return None
    ids = cast(Tensor, batch[name])
    # No other axis has this length, so that padding can be cut off again.
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    extra = next(extra for extra in range(_PADDING, _PADDING + len(sizes) + 1) if ids.shape[1] + extra not in sizes)

    def longer(_name: str, value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != ids.shape[1]:
            return value
        return torch.cat([value, value[:, :1].expand(-1, extra, *value.shape[2:])], 1)

    padded = dict(mapped(dict(batch), longer))
    mask = cast(Tensor, batch.get("attention_mask", torch.ones_like(ids)))
    padded["attention_mask"] = torch.cat([mask, mask.new_zeros(len(mask), extra)], 1)
    return padded, extra
