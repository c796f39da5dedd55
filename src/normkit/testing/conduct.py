"""How a norm behaves whatever its formula: its input, layout, rows, the batch around a row, NaN, constant rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from normkit import reference
from normkit.identification.coupling import moved_outputs
from normkit.spec import NormSpec
from normkit.testing import agreement
from normkit.testing.norm_under_test import NormUnderTest, RefusedError
from normkit.testing.violation import Violation
from normkit.text import percent
from normkit.units import Exact

_ENOUGH = 0.8
"""Share of a row that must move: an output that is nearly zero may stay where it is by chance."""
_REPEATS = 4
_ROWS = 1 << 14
_ELEMENTS = 1 << 18
_SAMPLES = 32
"""Another order of a sum moves the bits of a fifth of all float32 rows: all of these keep theirs once in a thousand."""
_BATCHES = (2, 3, 7, 32, 129, 1024, 4096)
"""Sizes at which kernels change how they share out rows, and sizes that no tile divides."""
_LENGTHS = (2, 7, 64, 513)
_CONSTANTS = (0.0, 1.0, -3.3, 100.0)
_NEARLY = tuple(1.1 + 0.7 * step for step in range(16))


def input_kept(norm: NormUnderTest) -> Violation | None:
    """The input holds the same numbers after a call."""
    x = norm.normal(2)
    given = x.to(norm.device, copy=True)
    with torch.no_grad():
        norm.overwriting(given)
    if torch.equal(given.cpu(), x):
        return None
    return Violation(
        check="input kept",
        expected="the input as it was",
        found="other numbers in it after the call",
        confirm="before = x.clone(); norm(x); assert torch.equal(x, before)",
    )


def repeated_calls(norm: NormUnderTest) -> Violation | None:
    """The same input gives the same again, bit for bit, and an earlier output is not written over."""
    x = norm.normal(8)
    given = x.to(norm.device)
    with torch.no_grad():
        first = norm.overwriting(given)
        before = first.cpu().clone()
        norm.overwriting(-given)
        kept = torch.equal(first.cpu().nan_to_num(), before.nan_to_num())
        # The same memory each time: code may add up in another order where a tensor begins elsewhere.
        again = [norm.overwriting(given).cpu().clone() for _ in range(_REPEATS)]
    if kept and all(torch.equal(y.nan_to_num(), before.nan_to_num()) for y in again):
        return None
    others = "other last bits" if all(_same(norm, y, before, x) for y in again) else "other numbers"
    return Violation(
        check="repeated calls",
        expected="the same numbers each time, bit for bit, in a tensor of their own",
        found=f"{others} for the same input" if kept else "an output that the next call writes to",
        confirm="first = norm(x); before = first.clone(); norm(-x); compare first and norm(x) with before",
    )


def layout(norm: NormUnderTest) -> Violation | None:
    """Views of any layout give what contiguous tensors do, to rounding, as inputs and as gradients of the output."""
    x = norm.normal(4)
    for name, view in _views(x, norm.device).items():
        values = view.cpu().clone(memory_format=torch.contiguous_format)
        # A copy would be contiguous again: views are handed over as they are.
        try:
            with torch.no_grad():
                y = norm.overwriting(view).cpu()
        except RefusedError as error:
            wrong = f"it refuses {name} inputs ({error})"
        else:
            wrong = "" if _same(norm, y, norm.y(values), values) else f"other numbers for {name} inputs"
        if wrong:
            return Violation(
                check="layout",
                expected="views to give what contiguous tensors give",
                found=wrong,
                confirm=f"compare norm(x) with norm(x.contiguous()) for {name} x",
            )
    return None


def layout_of_gradients(norm: NormUnderTest) -> Violation | None:
    """Views give the gradients, of the input and of the parameters, that contiguous tensors give."""
    x, dy = norm.normal(4), norm.normal(4)
    inputs, outputs = _views(x, norm.device), _views(dy, norm.device)
    cases = [(f"{name} inputs", view, dy.to(norm.device)) for name, view in inputs.items()]
    cases += [(f"{name} gradients of the output", x.to(norm.device), view) for name, view in outputs.items()]
    for name, x_view, dy_view in cases:
        try:
            found = norm.all_gradients(x_view, dy_view)
            rights = norm.all_gradients(x_view.contiguous(), dy_view.contiguous())
        except RefusedError:
            # The check of the input gradient reports it.
            return None
        for of, gradient in found.items():
            right = rights[of]
            # Another order of summing moves the last bits; another layout that is missed moves all.
            if gradient is None or right is None or bool((gradient - right).norm() <= 0.05 * right.norm()):
                continue
            return Violation(
                check="layout",
                expected="views to give what contiguous tensors give",
                found=f"another gradient of {of or 'the input'} for {name}",
                confirm=f"compare x.grad and those of the parameters with those of contiguous tensors for {name}",
            )
    return None


def _views(x: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The same samples as views that no kernel may take for contiguous tensors; of one row over and over, too."""
    x = x.to(device)
    return {
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "strided": torch.stack([x, x + 1], dim=-1)[..., 0],
        "sliced": torch.cat([x[:1] + 1, x])[1:],
        "expanded": x[:1].expand(x.shape),
    }


def rows(norm: NormUnderTest) -> Violation | None:
    """The statistics are those of the spec's rows, and of nothing else."""
    x = norm.normal(norm.shape[0])
    # In the middle along each axis, so that movement before it and behind it is seen.
    index = tuple(size // 2 for size in x.shape)
    if not bool(norm.y(x).isfinite().all()):
        return Violation(
            check="formula",
            expected=str(norm.spec),
            found="outputs that are NaN or infinite for ordinary rows",
            confirm=f"norm(torch.randn{tuple(x.shape)})",
        )
    numbers = norm.spec.rows.numbers(x)
    own = numbers == numbers[index]
    tolerance = 0.05 if norm.is_half else 1e-4
    moved = moved_outputs(
        lambda given: norm.y(given).double(),
        x,
        index,
        8 * math.sqrt(int(own.sum())),
        # An output that is NaN has moved.
        lambda change, rest: ~(change <= tolerance * (rest.square().mean().sqrt() + rest.abs())),
    )
    leaked, reached = moved & ~own, moved & own
    # In 16 bits a small change can drown in the rounding of a bias.
    enough = 0.0 if norm.is_half else _ENOUGH
    if not bool(leaked.any()) and int(reached.sum()) >= enough * int(own.sum()):
        return None
    return Violation(
        check="rows",
        expected=f"only its own row, {int(own.sum())} outputs along {_axes(own, index)}, to move with one element",
        found=f"{int(moved.sum())} outputs along {_axes(moved, index)} move{_meaning(moved, leaked, index)}",
        confirm=f"change x[{', '.join(map(str, index))}] of x = torch.randn{tuple(x.shape)} and see which outputs move",
    )


def _axes(moved: Tensor, index: tuple[int, ...]) -> str:
    """The axes along which something but the element itself moved."""
    away = (moved.nonzero() != torch.tensor(index)).any(0).nonzero().flatten().tolist()
    return f"ax{'i' if len(away) == 1 else 'e'}s {', '.join(map(str, away))}" if away else "no axis"


def _meaning(moved: Tensor, leaked: Tensor, index: tuple[int, ...]) -> str:
    places = leaked.nonzero()
    if not len(places):
        # One axis, and a part of it that divides it, as where each rank normalizes its own heads.
        size = moved.shape[-1]
        along = moved[index[:-1]].nonzero().flatten()
        parts = (
            size // len(along) if len(along) > 1 and size % len(along) == 0 and len(along) == int(moved.sum()) else 0
        )
        is_part = parts > 1 and int(along[-1] - along[0]) == len(along) - 1
        words = f": {parts} parts of a row have statistics of their own, as where each rank takes those of its heads"
        return words if is_part else ": too few share statistics"
    if bool((places[:, 0] != index[0]).any()):
        return ": samples are coupled"
    if len(index) > 2 and bool((places[:, 1] < index[1]).any()):
        return ": earlier positions feel later ones"
    return ""


def batch_position(norm: NormUnderTest) -> Violation | None:
    """A sample gives the same alone, first and last in a batch, to rounding."""
    x = norm.normal(7)
    large = x.repeat(max(1, norm.samples(_ROWS, _ELEMENTS) // 7), *(1,) * (x.dim() - 1))
    for batch in (x, large):
        y = norm.y(batch)
        for place in (0, len(batch) - 1):
            one = slice(place, place + 1)
            if not _same(norm, norm.y(batch[one]), y[one], batch[one]):
                return _misplaced(f"sample {place} of a batch of {len(batch):,} differs from itself alone")
    if norm.free_axes > 1:
        y, first = norm.y(x), x[:1, :1]
        if not _same(norm, norm.y(first), y[:1, :1], first):
            return _misplaced(f"position 0 of sample 0 differs from itself alone, as {tuple(first.shape)}")
    return None


def batch_invariance(norm: NormUnderTest) -> Violation | None:
    """Samples give the same bits alone, and at any place in a batch or a sequence of any length."""
    samples = norm.normal(_SAMPLES)
    alone = torch.cat([norm.y(sample) for sample in samples[:, None]])
    most = norm.samples(_ROWS, _ELEMENTS)
    for size in sorted({size for size in _BATCHES if size < most} | {max(most, 2)}):
        for first in {0, max(0, size - _SAMPLES)}:
            batch = norm.normal(size)
            count = len(batch[first : first + _SAMPLES])
            batch[first : first + count] = samples[:count]
            if (found := _moved_bits(norm.y(batch)[first : first + count], alone[:count])) is not None:
                return _variant(f"{found} in a batch of {size:,}")
    if norm.free_axes > 1:
        firsts = samples[:, 0]
        alone = torch.cat([norm.y(first[:, None])[:, 0] for first in firsts[:, None]])
        for length in _LENGTHS:
            sequence = norm.normal(-(-length // norm.shape[1])).flatten(0, 1)[None, :length]
            count = min(length, _SAMPLES)
            sequence[0, length - count :] = firsts[:count]
            if (found := _moved_bits(norm.y(sequence)[0, length - count :], alone[:count])) is not None:
                return _variant(f"{found} in a sequence of {length:,}")
    return None


def _moved_bits(y: Tensor, alone: Tensor) -> str | None:
    """In words how many elements are others."""
    moved = int((y.nan_to_num() != alone.nan_to_num()).sum())
    return f"{percent(moved / y.numel())} of the outputs have other bits" if moved else None


def _variant(found: str) -> Violation:
    return Violation(
        check="batch invariance",
        expected="the same bits for a row alone and in any batch",
        found=found,
        confirm="compare norm(x)[place] with norm(x[place : place + 1])[0], bit for bit",
    )


def modes(norm: NormUnderTest) -> Violation | None:
    """Training mode and eval mode give the same, to rounding."""
    here, there = ("training", "eval") if norm.module.training else ("eval", "training")
    x = norm.normal(4)
    try:
        other = replace(norm, specimen=norm.specimen.in_mode(training=not norm.module.training))
        y = other.y(x)
        if _same(norm, y, norm.y(x), x):
            return None
        found = f"another output in {there} mode"
        changed = torch.cat([x[:-1], 2 * x[-1:] + 1])
        if not _same(norm, other.y(changed)[:-1], y[:-1], x[:-1]):
            found += ": samples are coupled there"
    except NotImplementedError:  # what was exported has one mode
        return None
    except RefusedError as error:
        found = f"in {there} mode {error}"
    return Violation(
        check="modes",
        expected="the same in training mode and in eval mode",
        found=found,
        confirm=f"compare norm.{'train' if there == 'training' else 'eval'}()(x) with what it gives in {here} mode",
    )


def _misplaced(found: str) -> Violation:
    return Violation(
        check="batch position",
        expected="a row to give the same alone and in any batch, to rounding",
        found=found,
        confirm="compare norm(x)[place] with norm(x[place : place + 1])[0]",
    )


def row_isolation(norm: NormUnderTest) -> Violation | None:
    """A NaN reaches no other row, neither in the output nor in the gradient of the input."""
    x = norm.normal(4)
    x[(1, *(0,) * (x.dim() - 1))] = float("nan")
    numbers = norm.spec.rows.numbers(x)
    others = numbers != numbers[(1, *(0,) * (x.dim() - 1))]
    leaked = "the output" if not bool(norm.y(x)[others].isfinite().all()) else ""
    if not leaked:
        try:
            dx = norm.gradients(x, torch.ones_like(x))[0]
        except RefusedError:
            # The check of the input gradient reports it.
            return None
        leaked = "the gradient of the input" if dx is not None and not bool(dx[others].isfinite().all()) else ""
    if not leaked:
        return None
    return Violation(
        check="row isolation",
        expected="a NaN to stay in its row",
        found=f"NaN in other rows of {leaked}",
        confirm="set one element of x to NaN and look at the other rows of norm(x) and of x.grad",
    )


def hidden_nan(norm: NormUnderTest) -> Violation | None:
    """A NaN shows in all of its row, as the formula has it."""
    x = norm.normal(4)
    x[(1, *(0,) * (x.dim() - 1))] = float("nan")
    if bool(norm.y(x)[norm.program(x).isnan()].isnan().all()):
        return None
    return Violation(
        check="row isolation",
        expected="a NaN to show in all of its row",
        found="numbers in the row of a NaN",
        confirm="set one element of x to NaN and look at its row of norm(x)",
    )


def constant_rows(norm: NormUnderTest, found: NormSpec) -> Violation | None:
    """Zero, constant and nearly constant rows give finite outputs wherever the spec does, and finite gradients.

    Args:
        norm: The norm, compared with the spec that it should be.
        found: The spec that it was found to be: a gradient that overflows there too is no other fault.
    """
    values = torch.tensor([*_CONSTANTS, *_NEARLY])
    names = [f"{value:.1f}" for value in _CONSTANTS] + [f"{value:.1f}, give or take an ulp" for value in _NEARLY]
    x = values.reshape(-1, *(1,) * (len(norm.shape) - 1)).repeat(1, *norm.shape[1:])
    # A variance of rounded squares can come out negative where a row is constant but for an ulp.
    noise = torch.randn(len(_NEARLY), *norm.shape[1:], generator=norm.generator)
    x[len(_CONSTANTS) :] *= 1 + torch.finfo(norm.dtype).eps * noise
    x = norm.cast(x)
    dy = norm.normal(len(x))
    what, wrong = "outputs", _not_finite(norm.program(x), norm.y(x), names)
    # In float16 1/s^3 is beyond the largest number where the spec itself stays there.
    if not wrong and not norm.stays_narrow:
        rights = [reference.backward(dy, x, spec, *norm.parameters_of(spec)).x for spec in {norm.spec, found}]
        try:
            dx = norm.gradients(x, dy)[0]
        except RefusedError:
            # The check of the input gradient reports it.
            return None
        what, wrong = "gradients", [] if dx is None else _not_finite(torch.stack(rights).sum(0), dx, names)
    if not wrong:
        return None
    row = f"torch.full({(1, *norm.shape[1:])}, {wrong[0].split(',')[0]}, dtype=torch.{norm.words})"
    return Violation(
        check="constant rows",
        expected="finite outputs and gradients for constant rows",
        found=f"{what} that are NaN or infinite for a row of {wrong[0]} ({norm.words})",
        confirm=f"look at norm(x) and, after .sum().backward(), at x.grad for x = {row}",
    )


def _not_finite(right: Tensor, found: Tensor, names: list[str]) -> list[str]:
    """The samples that should be finite and are not."""
    limit = torch.finfo(found.dtype).max
    should = (right.double().abs() <= limit).flatten(1).all(1)
    return [
        name
        for name, is_wrong in zip(names, (should & ~found.isfinite().flatten(1).all(1)).tolist(), strict=True)
        if is_wrong
    ]


def _same(norm: NormUnderTest, y: Tensor, other: Tensor, x: Tensor) -> bool:
    """Two outputs for the same input differ by no more than both may be off, and have NaN in the same places."""
    size = norm.truth(x).size
    # A wrong formula may give larger outputs, which round more.
    size = size.clamp_min(float(y.double().nan_to_num(0.0, 0.0, 0.0).abs().max()))
    equal_nan = torch.where(y.isnan() & other.isnan(), 0.0, y.double() - other.double())
    return Exact(torch.zeros_like(size), size).largest(equal_nan.to(y.dtype)) <= agreement.limit(norm)
