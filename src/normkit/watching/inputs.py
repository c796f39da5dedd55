"""The input of a model in a step: a digest of its batch, its range, and how its labels follow from it.

Labels are seen wherever the loss is computed: the gradient of a cross-entropy with respect to a row of logits is its
softmax less 1 at the label. So its lowest entry is at the label and is half of its 1-norm, and its sum is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.identification.sharding import is_distributed, local
from normkit.identification.tracing import members
from normkit.measurement.hooks import Failures, Hook
from normkit.measurement.row_counters import widest_dtype
from normkit.measurement.samples import digests, repetitions, stride
from normkit.measurement.training import Quantity

BATCH = ("calls", "ids", "others", "sampled", "tokens", "copies", "distinct", "low", "high", "energy", "digest")
"""For the batches of one step: calls of the model, and those with whole numbers; samples that are compared with earlier
ones of their call; elements taken from each batch; tokens that count, or samples where the data are no tokens; samples
equal to an earlier one; how many of the elements taken differ, the least and the largest element, the sum of squares of
those taken, and a number that others hardly share."""

LABELS = ("labels", "copied", "nexts", "next", "backs", "back", "thens", "then", "lowest", "highest")
"""For a sample of labels: how many were seen, how many equal the input at their place; for how many the next input is
known and how many equal it; the same for the input before and the next but one; the smallest and the largest label."""

INPUTS = (*BATCH, *LABELS)
_LEAST, _LARGEST = ("low", "lowest"), ("high", "highest")

_SAMPLE, _ROWS, _OF_A_ROW = 2048, 32, 512
_NOT_DATA = ("mask", "label", "target", "position", "type", "cache", "past")
_MOST_CALLS = 256
# In a smaller sample it is no wonder that all values are alike.
_FEWEST = 16


class InputRecorder:
    """Hooks on the model as the loop calls it; `begins` is called when a backward pass begins."""

    def __init__(self, device: torch.device, failures: Failures, begins: Callable[[], None]) -> None:
        self._device, self._failures, self._begins = device, failures, begins
        self._kind = widest_dtype(device)
        # Whole numbers of so many bits, and the sum of a few hundred of them, are exact.
        self._digest_bits = 16 if device.type == "mps" else 44
        ends = [math.inf if name in _LEAST else -math.inf if name in _LARGEST else 0.0 for name in INPUTS]
        self._empty = torch.tensor(ends, dtype=self._kind, device=device)
        self._least, self._largest = self._empty == math.inf, self._empty == -math.inf
        self._handles: list[RemovableHandle] = []
        self._calls: list[Tensor] = []
        self._ids: Tensor | None = None

    def install(self, given: nn.Module) -> None:
        """Put the hooks in."""
        before, after = Hook(self._failures, "the input", self.add), Hook(self._failures, "the labels", self._output)
        self._handles.append(given.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(given.register_forward_hook(after))

    def remove(self) -> None:
        """Take them out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> Tensor:
        """`INPUTS` of the calls since the last time."""
        calls, self._calls, self._ids = self._calls, [], None
        lines = torch.stack(calls or [self._empty])
        return torch.where(self._least, lines.amin(0), torch.where(self._largest, lines.amax(0), lines.sum(0)))

    def add(self, _module: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Count the batch of one call of training."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or len(self._calls) >= _MOST_CALLS:
            return
        self._ids = None
        x = _data(args, kwargs)
        if x is None:
            return
        x = local(x.detach())
        self._ids = None if x.is_floating_point() or x.dim() != 2 else x
        flat = x.flatten()
        sample = flat[:: stride(flat.numel(), _SAMPLE)]
        ordered = sample.sort().values
        distinct = (ordered[1:] != ordered[:-1]).sum() + 1
        # Over all elements, so that a single NaN is seen: both are NaN then.
        low, high = torch.aminmax(flat)
        squares = sample.to(self._kind).square().sum()
        # The tokens that count, of ids or their embeddings; the samples of other data.
        tokens: Any = x.shape[0]
        if x.dim() == (3 if x.is_floating_point() else 2):
            mask, tokens = kwargs.get("attention_mask"), x.shape[0] * x.shape[1]
            if isinstance(mask, Tensor) and mask.shape == x.shape[:2] and not mask.is_floating_point():
                tokens = (mask != 0).sum()
        line = self._empty.clone()
        rows = x[:_ROWS] if x.dim() > 1 else x[:1, None]
        line[0], line[1], line[2], line[3] = 1, not x.is_floating_point(), len(rows) - 1, len(sample)
        line[4] = tokens
        copies, digest = repetitions(rows, _OF_A_ROW), digests(sample[None], self._digest_bits)[0]
        line[5 : len(BATCH)] = self._stacked([copies, distinct, low, high, squares, digest])
        self._calls.append(line)

    def _stacked(self, numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack([number.to(self._device, self._kind) for number in numbers])

    def _output(self, _module: object, _args: object, output: object) -> None:
        """Count the labels when the gradient of the logits arrives."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        # The output of that name, else the first with rows.
        values = (output.get("logits"),) if isinstance(output, Mapping) else members(output)
        tensors = (each for each in values if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1)
        logits = next(tensors, None)
        if logits is None or not logits.requires_grad or is_distributed(logits) or logits.shape[-1] < 2:
            return
        shape = logits.shape[:-1]
        rows = math.prod(shape)
        if not rows:
            return
        count = min(_ROWS, rows)
        flat = torch.arange(count, device=logits.device) * (rows - 1) // max(count - 1, 1)
        near = None
        if self._ids is not None and self._ids.shape == shape:
            # The ids at these places, at the next, the one before and the next but one, -1 beyond an end: (4, places).
            tokens, columns = self._ids.flatten(), self._ids.shape[1]
            places = flat.to(tokens.device)
            around = [(by, places % columns + by) for by in (0, 1, -1, 2)]
            near = torch.stack(
                [
                    torch.where((at >= 0) & (at < columns), tokens[(places + by).clamp(0, len(tokens) - 1)], -1)
                    for by, at in around
                ]
            )
        index = torch.unravel_index(flat, shape)

        def count_labels(gradient: Tensor) -> None:
            self._failures.run("the loop", self._begins)
            self._failures.run("the labels", self._add_labels, gradient.detach()[index].float(), near)

        logits.register_hook(count_labels)  # type: ignore[no-untyped-call]

    def _add_labels(self, gradient: Tensor, near: Tensor | None) -> None:
        if len(self._calls) >= _MOST_CALLS:
            return
        least, label = gradient.min(-1)
        length, total = gradient.abs().sum(-1), gradient.sum(-1)
        known = (length > 0) & (-least >= 0.4 * length) & (total.abs() <= 0.05 * length)
        counts = [known.sum(), *(known.new_zeros(()),) * (len(LABELS) - 3)]
        if near is not None:
            near = near.to(label.device)
            has = known & (near >= 0)
            alike = has & (near == label)
            counts[1] = alike[0].sum()
            counts[2:] = [count for kind in (1, 2, 3) for count in (has[kind].sum(), alike[kind].sum())]
        wide = label.to(self._kind)
        lowest = torch.where(known, wide, math.inf).amin()
        highest = torch.where(known, wide, -math.inf).amax()
        line = self._empty.clone()
        line[len(BATCH) :] = self._stacked([*counts, lowest, highest])
        self._calls.append(line)


def _data(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """The first tensor of a call that is data: no mask, no label, no position."""
    named = [*(("", value) for value in args), *kwargs.items()]
    return next(
        (
            value
            for name, value in named
            if isinstance(value, Tensor)
            and value.dim() > 0
            and value.numel() > 0
            and value.dtype != torch.bool
            and not value.is_complex()
            and not any(word in name for word in _NOT_DATA)
        ),
        None,
    )


def batch_series(record: Mapping[str, float]) -> Iterator[tuple[Quantity, float]]:
    """The series that a step's record adds to, by the names of `INPUTS`; none if its batch was not seen."""
    if record["calls"]:
        yield "batch digest", record["digest"]
        # NaN counts as the largest.
        yield "batch largest", max(abs(record["low"]), abs(record["high"]), key=lambda each: (math.isnan(each), each))
        # In most runs there is none.
        if record["copies"]:
            yield "batch copies", record["copies"] / record["others"]
        if record["sampled"] >= _FEWEST:
            yield "batch distinct", record["distinct"]
            yield "id rms" if record["ids"] else "batch rms", math.sqrt(record["energy"] / record["sampled"])
    if record["labels"]:
        yield "labels", record["labels"]
        yield "label spread", record["highest"] - record["lowest"]
        shares: tuple[tuple[Quantity, str, str], ...] = (
            ("labels copied", "copied", "labels"),
            ("labels next", "next", "nexts"),
            ("labels back", "back", "backs"),
            ("labels then", "then", "thens"),
        )
        for quantity, part, whole in shares:
            # Data that are no ids have no input at a label's place.
            if record[whole] and record["nexts"]:
                yield quantity, record[part] / record[whole]
