"""A norm is compared with normkit's computation of it, in every dtype it may run in, on several scales of input.

Copies are compared, with gains and biases moved away from their initial values; the module itself is not called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normkit import reference, units
from normkit.conventions.eps import EPS, eps_in
from normkit.conversion.replacement import Formula, swap
from normkit.conversion.result import Check
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import dtype_name
from normkit.units import Exact

_ELEMENTS = 2**17
_MANY_ELEMENTS = 8 * _ELEMENTS
"""A bfloat16 output may differ once in 10,000: enough of them to see that, and enough to be sure."""
_LEAST_ROWS = 16
_SEED = 0
_SCALES = (1.0, 0.01, 30.0)
_EQUAL = {torch.bfloat16: 0.9999, torch.float16: 0.9995}
"""Share of the outputs that must be those of the original, bit for bit."""
_UNITS = {torch.float32: 4.0, torch.float64: 16.0}
"""How far an output may be from float64's; another float64 sum is no better."""
_ORIGINAL_UNITS = 64.0
"""How far the original's may be, in units of float32, in which it may compute, or the root of a row's length if that is
more, as float32 sums leave; a wrong formula is further off."""
_GRADIENT_UNITS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 4.0, torch.float64: 16.0}
_PARAMETER_UNITS = {**_GRADIENT_UNITS, torch.float32: 1.0}
"""How far a gradient may be, however near the original's is: that of the input, and that of a gain or bias."""
_FOLLOWS = 1e-3
"""How far the original's float32 gradient may be from its formula's, relative to the terms of it."""


class Setting(NamedTuple):
    """The dtypes in which a norm is called."""

    parameters: torch.dtype
    input: torch.dtype
    autocast: bool

    def __str__(self) -> str:
        """As a report writes it."""
        names = [dtype_name(dtype) for dtype in (self.input, self.parameters)]
        if self.autocast:
            return f"{names[0]} under autocast"
        return names[0] if self.input == self.parameters else f"{names[0]} input, {names[1]} parameters"


def floating_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The dtypes of its floating-point parameters."""
    return {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}


def settings(own: Set[torch.dtype], model: Set[torch.dtype]) -> tuple[Setting, ...]:
    """The dtypes to verify in.

    Args:
        own: Of the norm's parameters.
        model: Of all parameters of the model.
    """
    found = [Setting(torch.float32, torch.float32, autocast=False)]
    for dtype in sorted(own or model or {torch.float32}, key=str):
        if dtype == torch.float32:
            found += [Setting(dtype, half, autocast=True) for half in HALF]
            found += [Setting(dtype, half, autocast=False) for half in HALF if half in model]
        else:
            found.append(Setting(dtype, dtype, autocast=False))
            found += [Setting(dtype, torch.float32, autocast=False)] if torch.float32 in model else []
    return tuple(found)


def verify(module: nn.Module, formula: Formula, shape: tuple[int, ...], wanted: tuple[Setting, ...]) -> list[Check]:
    """One check for each setting that the original runs in; none after the first that fails.

    Args:
        module: The norm, which is neither called nor changed.
        formula: What would take its place.
        shape: Of an input it takes.
        wanted: The dtypes.
    """
    checks: list[Check] = []
    for setting in wanted:
        check = _check(module, formula, shape, setting, _ELEMENTS)
        if check is not None and check.problem is not None:
            # By chance a share may be low on a few elements; on many it is not.
            check = _check(module, formula, shape, setting, _MANY_ELEMENTS)
        if check is not None:
            checks.append(check)
            if check.problem is not None:
                break
    return checks


def _check(
    module: nn.Module, formula: Formula, shape: tuple[int, ...], setting: Setting, elements: int
) -> Check | None:
    """The check, or None where the original does not run in this setting."""
    with undisturbed(), torch.inference_mode(mode=False), torch.enable_grad():
        theirs = Specimen(module, dtype=setting.parameters).module
        assert theirs is not None
        comparison = _Comparison(theirs, formula, shape, setting, elements)
        return comparison.check() if comparison.runs() else None


class _Comparison:
    """A norm's copy, the same made normkit's, and one input for both."""

    def __init__(
        self, theirs: nn.Module, formula: Formula, shape: tuple[int, ...], setting: Setting, elements: int
    ) -> None:
        self.formula, self.setting = formula, setting
        self.generator = torch.Generator().manual_seed(_SEED)
        for parameter in theirs.parameters():
            if parameter.is_floating_point():
                # A gain or a bias, moved so that each element is felt and none is like another.
                moves = self._normal(2, *parameter.shape).to(parameter.device)
                moved = parameter.detach().float() * (1.0 + 0.2 * moves[0]) + 0.3 * moves[1]
                parameter.data = moved.to(parameter.dtype)
                parameter.requires_grad_()
        self.theirs, self.ours = theirs, copy.copy(theirs)
        swap(self.ours, formula)
        self.weight, self.bias = formula.parameters_of(theirs)
        self.device = next((parameter.device for parameter in theirs.parameters()), torch.device("cpu"))
        self.x = self._inputs(shape, elements)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu")

    def _inputs(self, shape: tuple[int, ...], elements: int) -> Tensor:
        """Rows with a mean, of each scale in turn, the scale at which eps is felt among them."""
        rows = max(elements // math.prod(shape[1:]), _LEAST_ROWS)
        spec, dtype = self.formula.spec, self.setting.input
        eps = eps_in(dtype, spec.eps)
        felt = spec.placement.length(eps)
        information = torch.finfo(dtype)
        is_felt = felt > 64 * information.smallest_normal * information.eps
        scales = torch.tensor([*_SCALES, felt if is_felt else 1.0], device="cpu")
        along = scales[torch.arange(rows, device="cpu") % len(scales)].reshape(-1, *(1,) * (len(shape) - 1))
        x = (self._normal(rows, *shape[1:]) + 0.5) * along
        return x.to(self.device, dtype)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.setting.input, enabled=self.setting.autocast)

    def runs(self) -> bool:
        """Whether the original runs in this setting at all."""
        with torch.no_grad(), self._autocast():
            try:
                self.theirs(self.x[:2].clone())
            except Exception:  # a foreign module may refuse a dtype in any way
                return False
            return True

    def check(self) -> Check:
        """The outputs, then the gradients."""
        x = self.x.clone()
        with torch.no_grad(), self._autocast():
            expected = self.theirs(x)
            changes = not torch.equal(x, self.x)
            actual = self.ours(self.x)
            in_training = self.theirs.train()(self.x.clone())
        check = Check(setting=str(self.setting), elements=expected.numel())
        if changes:
            return replace(check, problem="it changes its input")
        if not torch.equal(in_training, expected):
            return replace(check, problem="in training mode it computes something else")
        if actual.dtype != expected.dtype:
            return replace(check, problem=f"its output is {expected.dtype}, the formula's {actual.dtype}")
        check = replace(check, equal=float((actual == expected).double().mean()))
        spec = self.formula.spec
        exact = units.output(self.x, spec, self.weight, self.bias)
        weight_dtype = self.setting.parameters if spec.has_weight else None
        casts = spec.casts.narrow_dtypes(self.setting.input, weight_dtype, actual.dtype)
        # The original may compute in float32, and its sums may be plain ones.
        row_length = reference.to_rows(self.x, spec).shape[-1]
        allowed = max(_ORIGINAL_UNITS, math.sqrt(row_length)) * EPS["float32"]
        if casts:
            check = _half(check, actual, expected, exact.size, allowed, spec, casts)
        else:
            check = _wide(check, actual, expected, exact, allowed)
        return check if check.problem is not None else self._with_gradients(check)

    def _with_gradients(self, check: Check) -> Check:
        """The check with the errors of both gradients, against each other."""
        x = self.x[: max(len(self.x) // 4, _LEAST_ROWS)].clone().requires_grad_()
        names = [name for name in (self.formula.weight, self.formula.bias) if name is not None]
        wanted = [x, *(self.theirs.get_parameter(name) for name in names)]
        with self._autocast():
            outputs = self.ours(x), self.theirs(x)
        if not outputs[1].requires_grad:
            return replace(check, problem="it has no gradient")
        dy = self._normal(*x.shape).to(x.device, outputs[0].dtype)
        ours: tuple[Tensor | None, ...] = torch.autograd.grad(outputs[0], wanted, dy, allow_unused=True)
        theirs: tuple[Tensor | None, ...] = torch.autograd.grad(outputs[1], wanted, dy, allow_unused=True)
        gradients = units.gradients(x, dy, self.formula.spec, self.weight, self.bias)
        exact = dict(zip(("input", "weight", "bias"), gradients, strict=True))
        found = []
        labels = ["input", *(label for label, name in zip(("weight", "bias"), self.formula[1:3], strict=True) if name)]
        for label, mine, other in zip(labels, ours, theirs, strict=True):
            if other is None:
                return replace(check, problem=f"its gradient does not reach its {label}")
            right = exact[label]
            assert mine is not None  # a formula uses all that it names
            assert right is not None
            right = Exact(right.value.reshape(mine.shape), right.size.reshape(mine.shape))
            found.append((label, right.largest(mine), right.largest(other)))
        check = replace(check, gradients=tuple(found))
        for label, error, others in found:
            is_plain = self.setting == (torch.float32, torch.float32, False)
            if is_plain and others * EPS["float32"] > _FOLLOWS:
                return replace(check, problem=f"its gradient of the {label} is not that of its formula")
            floor = (_GRADIENT_UNITS if label == "input" else _PARAMETER_UNITS)[wanted[labels.index(label)].dtype]
            if error > max(others, floor):
                return replace(
                    check,
                    problem=f"the gradient of the {label} would be off by {error:.3g} u, its own is by {others:.3g} u",
                )
        return check


def _half(
    check: Check,
    actual: Tensor,
    expected: Tensor,
    size: Tensor,
    allowed: float,
    spec: NormSpec,
    casts: set[torch.dtype],
) -> Check:
    """Whether 16-bit outputs are the original's, but for a few near-ties that fall to the other side.

    A near-tie before the gain is one ulp of the normalized row; the product can then be two away.
    """
    wanted = min(_EQUAL[dtype] for dtype in casts)
    if check.equal < wanted:
        return replace(
            check, problem=f"{100 * check.equal:.4f} % of the outputs are equal, {100 * wanted:g} % are wanted"
        )
    step = units.unit(expected.double().abs() if spec.casts.is_late else 2 * size, units.coarsest(casts))
    error = (actual.double() - expected.double()).abs() / (step + allowed * size)
    worst = float(error.nan_to_num(nan=math.inf).max())
    return check if worst <= 1.0 else replace(check, problem=f"an output is off by {worst:.3g} times its roundings")


def _wide(check: Check, actual: Tensor, expected: Tensor, exact: Exact, allowed: float) -> Check:
    """Whether wide outputs are the formula's, and the original's are too."""
    ours, theirs = exact.largest(actual), exact.largest(expected)
    check = replace(check, units=ours, original_units=theirs)
    if theirs * torch.finfo(expected.dtype).eps > allowed:
        return replace(check, problem=f"it is {theirs:.3g} u from its formula")
    most = _UNITS[actual.dtype]
    if ours > most:
        return replace(check, problem=f"it would be off by {ours:.3g} u, {most:g} u are allowed")
    return check
