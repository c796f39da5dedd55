"""How a norm behaves whatever its formula: its input, its layout, the batch around a row, NaN, constant rows."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.spec import NormSpec
from normkit.testing import agreement, subject, truth
from normkit.testing.subject import RefusedError
from normkit.testing.trial import Trial
from normkit.testing.truth import Truth
from normkit.testing.violation import Violation

_CONSTANTS = (0.0, 1.0, -3.3, 100.0)
_NEARLY = tuple(1.1 + 0.7 * step for step in range(16))


def input_kept(trial: Trial) -> Violation | None:
    """The input holds the same numbers after a call."""
    x = trial.normal(2)
    given = x.to(trial.device, copy=True)
    with torch.no_grad():
        subject.call(trial.module, given)
    if torch.equal(given.cpu(), x):
        return None
    return Violation(
        check="input kept",
        expected="the input as it was",
        found="other numbers in it after the call",
        confirm="before = x.clone(); norm(x); assert torch.equal(x, before)",
    )


def layout(trial: Trial) -> Violation | None:
    """Strided and transposed inputs give what contiguous ones do, to rounding."""
    x = trial.normal(4)
    swapped = x.transpose(0, -1).contiguous().transpose(0, -1)
    strided = torch.stack([x, x + 1], dim=-1)[..., 0]
    rest = trial.y(x)
    for name, other in (("transposed", swapped), ("strided", strided)):
        # A copy would be contiguous again: views are handed over as they are.
        try:
            with torch.no_grad():
                y = subject.call(trial.module, _moved_with_strides(other, trial.device)).cpu()
        except RefusedError as error:
            wrong = f"it refuses {name} ones ({error})"
        else:
            if _same(trial, y, rest, x):
                continue
            wrong = f"other numbers for {name} ones"
        return Violation(
            check="layout",
            expected="non-contiguous inputs to give what contiguous ones give",
            found=wrong,
            confirm="compare norm(x) with norm(x.transpose(0, -1).contiguous().transpose(0, -1))",
        )
    return None


def batch_position(trial: Trial) -> Violation | None:
    """A sample gives the same alone, first and last in a batch, to rounding."""
    x = trial.normal(7)
    batch = trial.y(x)
    for place in (0, 6):
        alone = trial.y(x[place : place + 1])
        if not _same(trial, alone, batch[place : place + 1], x[place : place + 1]):
            return Violation(
                check="batch position",
                expected="a sample to give the same alone and in a batch, to rounding",
                found=f"sample {place} of a batch of 7 differs from itself alone",
                confirm=f"compare norm(x)[{place}] with norm(x[{place}:{place + 1}])[0] for 7 samples",
            )
    return None


def row_isolation(trial: Trial) -> Violation | None:
    """A NaN reaches no other row, neither in the output nor in the gradient of the input."""
    x = trial.normal(4)
    x[(1, *(0,) * (x.dim() - 1))] = float("nan")
    numbers = truth.row_numbers(x, trial.spec)
    others = numbers != numbers[(1, *(0,) * (x.dim() - 1))]
    leaked = "the output" if not bool(trial.y(x)[others].isfinite().all()) else ""
    if not leaked:
        try:
            dx = trial.gradients(x, torch.ones_like(x))[0]
        except RefusedError:
            # That there are no gradients is said elsewhere.
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


def constant_rows(trial: Trial, found: NormSpec) -> Violation | None:
    """Zero, constant and nearly constant rows give finite outputs wherever the spec does, and finite gradients.

    Args:
        trial: Holds the norm against the spec that it should be.
        found: The spec that it was found to be: a gradient that overflows there too is no other fault.
    """
    values = torch.tensor([*_CONSTANTS, *_NEARLY])
    names = [f"{value:.1f}" for value in _CONSTANTS] + [f"{value:.1f}, give or take an ulp" for value in _NEARLY]
    x = values.reshape(-1, *(1,) * (len(trial.shape) - 1)).repeat(1, *trial.shape[1:])
    # A variance of rounded squares can come out negative where a row is constant but for an ulp.
    noise = torch.randn(len(_NEARLY), *trial.shape[1:], generator=trial.generator)
    x[len(_CONSTANTS) :] *= 1 + torch.finfo(trial.dtype).eps * noise
    x = trial.cast(x)
    dy = trial.normal(len(x))
    what, wrong = "outputs", _not_finite(trial.program(x), trial.y(x), names)
    if not wrong:
        rights = [truth.gradients(x, dy, spec, *trial.parameters_of(spec))[0].value for spec in {trial.spec, found}]
        try:
            dx = trial.gradients(x, dy)[0]
        except RefusedError:
            # That there are no gradients is said elsewhere.
            return None
        what, wrong = "gradients", [] if dx is None else _not_finite(torch.stack(rights).sum(0), dx, names)
    if not wrong:
        return None
    row = f"torch.full({(1, *trial.shape[1:])}, {wrong[0].split(',')[0]}, dtype=torch.{trial.words})"
    return Violation(
        check="constant rows",
        expected="finite outputs and gradients for constant rows",
        found=f"{what} that are NaN or infinite for a row of {wrong[0]} ({trial.words})",
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


def _same(trial: Trial, y: Tensor, other: Tensor, x: Tensor) -> bool:
    """Two outputs for the same input differ by no more than both may be off, and have NaN in the same places."""
    size = truth.output(x, trial.spec, *trial.parameters_of(trial.spec)).size
    # What a wrong formula makes larger rounds more.
    size = size.clamp_min(float(y.double().nan_to_num(0.0, 0.0, 0.0).abs().max()))
    equal_nan = torch.where(y.isnan() & other.isnan(), 0.0, y.double() - other.double())
    return bool((Truth(torch.zeros_like(size), size).units(equal_nan.to(y.dtype)) <= agreement.limit(trial)).all())


def _moved_with_strides(x: Tensor, device: torch.device) -> Tensor:
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return moved.copy_(x)
