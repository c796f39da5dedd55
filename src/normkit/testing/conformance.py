"""`assert_conforms`: all checks in order, each against the spec found so far: it names causes, not symptoms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conventions.gain import Gain
from normkit.errors import InputError, KindError
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.testing import agreement, causes, conduct, derivatives, fused
from normkit.testing.fused import SUMS, Addition, ResidualSum
from normkit.testing.norm_under_test import RefusedError, Subject
from normkit.testing.violation import CHECKS, ConformanceError, Violation
from normkit.text import dtype_name

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def assert_conforms(
    norm: nn.Module | Callable[..., Any],
    spec: NormSpec,
    shape: int | Sequence[int] | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    device: torch.device | str | None = None,
    call: Callable[..., Any] | None = None,
    weight: str | Tensor | None = None,
    bias: str | Tensor | None = None,
    residual: ResidualSum | None = None,
    batch_invariant: bool = False,
    skip: Collection[str] = (),
) -> None:
    """Assert that a norm computes what its spec says: output, casts and gradients, on ordinary rows and odd ones.

    Copies are tested, in the mode that the norm is in, and against the other mode; their parameters are set to random
    values. Inputs are the same on every call. What a wrong eps, say, does to outputs, casts and gradients is not
    listed beside the eps.

    Args:
        norm: A module; or a function f(x), f(x, weight), f(x, bias) or f(x, weight, bias), as the spec has them.
        spec: What it should compute.
        shape: Of an example input, the batch first; n means (2, 3, n). By default the parameters tell it.
        dtypes: In which to test, inputs and parameters alike; float32 first, as it shows most.
        device: Where to test; by default where the norm is.
        call: call(norm, x) in place of norm(x); for a function call(function, x, weight, bias).
        weight: A function's gain; or the name of a module's parameter, where it cannot be found by its behaviour.
        bias: Likewise.
        residual: For a norm that is fused with an addition, norm(x, residual) -> (y, new residual): whether the sum is
            "rounded" to the residual's dtype before the statistics, as in `add_rms_norm`, or they are taken of the
            "wide" sum in float32. Its other checks are those of a residual of zeros.
        batch_invariant: Check as well that a row gives the same bits alone and in any batch.
        skip: Names of checks to leave out; `normkit.testing.violation.CHECKS` lists them.

    Raises:
        ConformanceError: If it does not; `.violations` says in what way.
        InputError: If a name in skip, a dtype or a parameter does not exist.
        ShapeError: If no input shape is given and no parameter tells it.

    Example:
        >>> from normkit import specs
        >>> assert_conforms(nn.RMSNorm(64, eps=1e-6), specs.OLMO2)
    """
    # pytest ends its traceback at the caller's line.
    __tracebackhide__ = True
    found = violations(
        norm,
        spec,
        shape,
        dtypes=dtypes,
        device=device,
        call=call,
        weight=weight,
        bias=bias,
        residual=residual,
        batch_invariant=batch_invariant,
        skip=skip,
    )
    if found:
        name = type(norm).__name__ if isinstance(norm, nn.Module) else getattr(norm, "__name__", repr(norm))
        raise ConformanceError(name, spec, found)


def violations(
    norm: nn.Module | Callable[..., Any],
    spec: NormSpec,
    shape: int | Sequence[int] | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    device: torch.device | str | None = None,
    call: Callable[..., Any] | None = None,
    weight: str | Tensor | None = None,
    bias: str | Tensor | None = None,
    residual: ResidualSum | None = None,
    batch_invariant: bool = False,
    skip: Collection[str] = (),
) -> tuple[Violation, ...]:
    """The violations that `assert_conforms` would raise, the cause first; empty for a norm that conforms.

    Example:
        >>> from normkit import specs
        >>> [seen] = violations(nn.RMSNorm(64, eps=1e-5), specs.OLMO2)
        >>> print(seen.check, "is", seen.found, "and should be", seen.expected)
        eps is 1e-05 inside the root and should be 1e-06 inside the root
    """
    _check(norm, spec, dtypes, residual, skip)
    widest = torch.float32 if torch.float32 in dtypes else dtypes[0]
    report = _Report(skip)
    addition = None if residual is None else Addition(call, residual)
    with _plain_torch():
        subject = Subject(norm, spec, shape, weight, bias, addition or call, device, widest)
        missing, asked = _missing(subject, spec)
        report.add(*missing)
        known: NormSpec | None = asked
        with torch.autocast(subject.device.type, enabled=False):
            for dtype in dtypes:
                try:
                    known = _test(subject, asked, known, dtype, report, addition, batch_invariant=batch_invariant)
                except RefusedError as error:
                    refused = Violation(
                        check="call",
                        expected=f"a tensor of the input's shape for {dtype_name(dtype)} inputs",
                        found=str(error),
                        confirm=f"norm.to({dtype})(torch.ones({subject.shape}, dtype={dtype}))",
                    )
                    report.add(refused)
    return report.in_order()


@contextmanager
def _plain_torch() -> Iterator[None]:
    """New tensors on the CPU, gradients and the random state kept, whatever the caller's settings.

    Warnings of the norm are ignored: a suite that makes errors of them would stop the test.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Report:
    """The first violation of each check that is not left out."""

    def __init__(self, skip: Collection[str]) -> None:
        self._skip = skip
        self._found: dict[str, Violation] = {}

    def add(self, *seen: Violation | None) -> None:
        for violation in seen:
            if violation is not None and violation.check not in self._skip:
                self._found.setdefault(violation.check, violation)

    def leaves_out(self, *checks: str) -> bool:
        return set(checks) <= set(self._skip)

    def in_order(self) -> tuple[Violation, ...]:
        return tuple(self._found[name] for name in CHECKS if name in self._found)


def _test(
    subject: Subject,
    asked: NormSpec,
    known: NormSpec | None,
    dtype: torch.dtype,
    report: _Report,
    addition: Addition | None,
    *,
    batch_invariant: bool,
) -> NormSpec | None:
    """All checks in one dtype.

    Args:
        subject: The norm.
        asked: The spec that it should be.
        known: The spec that it was found to be so far, so that what is wrong already is not said again. None where
            there is no such spec: then only what does not depend on the formula is checked.
        dtype: Of inputs and parameters.
        report: Where violations go.
        addition: What the norm is fused with, or None.
        batch_invariant: Whether bits may not depend on the batch.

    Returns:
        The spec that it is found to be, or None.
    """
    norm = subject.in_dtype(asked, dtype)
    kept = conduct.input_kept(norm)
    report.add(kept)
    if kept is None:
        # On a copy that was not called before.
        if (unsteady := conduct.repeated_calls(subject.in_dtype(asked, dtype))) is not None:
            report.add(unsteady)
            return None
        report.add(conduct.layout(norm))
    norm = subject.in_dtype(known or asked, dtype)
    report.add(agreement.output_dtype(norm))
    if dtype in HALF and (subject.weight_name is not None or subject.bias_name is not None):
        # Not every norm takes float32 parameters and a 16-bit input.
        with suppress(RefusedError):
            report.add(agreement.output_dtype(subject.in_dtype(norm.spec, dtype, torch.float32)))
    coupled = conduct.rows(norm) or causes.of_place(subject, conduct.batch_position(norm))
    report.add(coupled)
    if coupled is not None:
        return None
    report.add(conduct.modes(norm), conduct.row_isolation(norm))
    if batch_invariant:
        report.add(conduct.batch_invariance(norm))
    if known is None:
        return None
    here = _agreed(subject, known, dtype, report)
    if here is not None:
        if addition is not None:
            report.add(*fused.violations(subject.in_dtype(here, dtype), addition))
        report.add(conduct.hidden_nan(subject.in_dtype(here, dtype)))
        # A NaN in the output is named even where another fault makes it: it is what is met first.
        report.add(conduct.constant_rows(subject.in_dtype(asked, dtype), here))
        norm = subject.in_dtype(here, dtype)
        cancelling = agreement.cancelling_variance(norm)
        report.add(cancelling)
        # Autograd refuses what was written over: that is no second fault.
        if kept is None:
            report.add(
                derivatives.input_gradient(norm, has_variance=cancelling is None), conduct.layout_of_gradients(norm)
            )
        with_gradients = kept is None and not report.leaves_out("input gradient", "gain gradient", "bias gradient")
        if with_gradients or not report.leaves_out("batch position"):
            report.add(*derivatives.over_many_rows(norm, with_gradients=with_gradients))
    # A difference that shows only in 16 bits says nothing about the next dtype.
    return known if norm.is_half else here


def _agreed(subject: Subject, known: NormSpec, dtype: torch.dtype, report: _Report) -> NormSpec | None:
    """Hold the output against the spec; the spec that it is found to be in this dtype, or None."""
    norm = subject.in_dtype(known, dtype)
    if not norm.is_half:
        seen = agreement.misfit(norm)
        if seen is None and norm.weight is None and norm.bias is None and norm.spec.rows.num_trailing == 1:
            # No parameter sets the length of a row: rows four times as long hold outputs twice as large.
            with suppress(RefusedError):
                seen = agreement.misfit(replace(norm, shape=(*norm.shape[:-1], 4 * norm.shape[-1])))
        if seen is None:
            return known
        named, found = causes.of_formula(subject, norm, seen)
        report.add(*named)
        return found
    if (large := agreement.large_rows(norm)) is not None:
        report.add(large)
        norm = subject.in_dtype(known.replace(statistics_dtype="input"), dtype)
    if (difference := agreement.difference_in_bits(norm)) is not None:
        named, found = causes.of_rounding(subject, norm, difference)
        report.add(*named)
        return found
    if norm.weight is not None or norm.bias is not None:
        mixed = subject.in_dtype(norm.spec, dtype, torch.float32)
        if (difference := agreement.difference_with_wide_parameters(mixed)) is not None:
            report.add(*causes.of_rounding(subject, mixed, difference)[0])
    return norm.spec


def _missing(subject: Subject, spec: NormSpec) -> tuple[tuple[Violation, ...], NormSpec]:
    """Parameters that the spec has and the norm has not; and the spec without them."""
    missing, known = [], spec
    if spec.gain.is_present and subject.weight_name is None:
        missing.append(("gain", "weight"))
        known = known.replace(**Gain(is_present=False, has_bias=known.has_bias).conventions())
    if spec.has_bias and subject.bias_name is None:
        missing.append(("bias", "bias"))
        known = known.replace(has_bias=False)
    confirm = "set every parameter to other values and see what changes"
    return tuple(
        Violation(
            check=check,
            expected=f"a {check}",
            found=f"no parameter that acts as one (if there is one, name it: {argument}=)",
            confirm=confirm,
        )
        for check, argument in missing
    ), known


def _check(norm: object, spec: object, dtypes: Sequence[torch.dtype], residual: object, skip: Collection[str]) -> None:
    if isinstance(norm, type):
        raise KindError(f"expected a module or a function, got the class {norm.__name__}; make one of it")
    if not callable(norm):
        raise KindError(f"expected a module or a function, got {norm!r}")
    if not isinstance(spec, NormSpec):
        raise KindError(f"spec must be a NormSpec such as normkit.specs.LLAMA, got {spec!r}")
    if isinstance(skip, str) or not isinstance(skip, Collection) or not all(name in (*CHECKS,) for name in skip):
        raise InputError(f"skip takes names among {', '.join(CHECKS)}; got {skip!r}")
    if not isinstance(dtypes, Collection) or not dtypes or not all(dtype in _DTYPES for dtype in dtypes):
        raise InputError(f"dtypes must be some of {', '.join(map(str, _DTYPES))}; got {dtypes!r}")
    if residual is not None and residual not in SUMS:
        raise InputError(f"residual must be {' or '.join(map(repr, SUMS))}, got {residual!r}")
