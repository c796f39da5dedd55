"""Which parameters of a model are scale-invariant: found by scaling them, never by their names.

The output is unchanged when a whole matrix in front of a LayerNorm or an RMSNorm is scaled, and when
single rows in front of a BatchNorm are. Only an eps of 0 makes this exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from normkit.errors import DtypeError, InputError

Kind = Literal["matrix", "rows"]

_FAR = 2.0**10
"""Here an eps inside the root is a million times weaker, and an unscaled addend a thousand times."""
_NEAR = 0.1
"""More than this share of the control at the weight's own size is no matter of eps."""
_FALL = 3.0
"""Four times the weight: an eps outside the root changes the output 4 times less, one inside 16 times."""
_SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class InvariantGroup:
    """Parameters whose common scale the output does not depend on."""

    paths: tuple[str, ...]
    """Names of the parameters: one, or those of one module that must be scaled together."""
    parameters: tuple[nn.Parameter, ...] = field(repr=False)
    kind: Kind
    """"matrix" if all of them share one scale; "rows" if each slice along the first axis has its own."""
    error: float
    """Largest relative change of the output at the factors tried; what eps leaves of the invariance."""
    control: float
    """Relative change of the output when the parameters turn: a random addend of their own length."""


def scale_invariant_groups(
    model: nn.Module,
    run: Callable[[], object],
    *,
    factors: Sequence[float] = (0.5, 4.0),
    tolerance: float = 1e-6,
) -> tuple[InvariantGroup, ...]:
    """Find the parameters that may be scaled without changing the output.

    Each parameter w is tried alone: every slice along its first axis times a factor of its own ("rows"), then
    the whole of it ("matrix"). The parameters of one module that are left over, such as a weight and its bias in
    front of a LayerNorm, are tried together ("matrix"). Changes are in units of the control, the change when w turns by
    45 degrees or so. With D(c) the largest change between the output at c w and at (factor c) w, w is in if

    - D(1) <= 0.1: at its own size it is invariant, or nearly;
    - D(1024) <= tolerance: the rest is a matter of eps, as LN_eps(c x) = LN_(eps / c^2)(x), or eps / c where it is
      outside the root. An unscaled addend (a bias, a residual) falls only as 1 / c, and shows;
    - D(4) <= D(1) / 3, unless D(1) <= 1024 * tolerance: it falls at once, as eps does and softmax does not.

    Powers of two scale floating-point numbers without rounding, so that the tolerance need not cover any; with
    other factors and norms in float32 1e-5 is right. Each parameter costs about 8 calls of `run`, at most 15.

    What stays open: an unscaled addend below 1024 * tolerance, a thousandth, passes; an eps outside the
    root above that share of the scale hides the invariance, as does one of some hundredths of the row's
    variance inside it. A tanh or softmax that is saturated throughout is scale-invariant too. Finer
    groups (heads) and groups across modules are not looked for. Rows that `run` does not reach (tokens of
    an embedding) are not tested. A parameter that is zero is in no group by itself, for zero has no
    direction; in the search it has random entries, as a zero bias would pass unnoticed.

    Args:
        model: The model, in the mode that is to be tested (a BatchNorm is a norm in training mode only). It and
            torch's random state are left bit for bit as they were, also if `run` raises.
        run: Calls the model on a small input and returns its output: a tensor, or tuples, lists and mappings of
            them; every floating-point tensor among them counts. float64 where the model allows it.
        factors: The factors that parameters are scaled by.
        tolerance: The largest change at c = 1024, in units of the control.

    Returns:
        The groups, in the order of the model's parameters.

    Raises:
        InputError: If a factor is not positive or is 1, or `run` returns no floating-point tensor, an output that is
            zero, or another one each time.
        DtypeError: If a parameter is of a 16-bit floating dtype, whose rounding hides what is looked for.

    Example:
        >>> from normkit.geometry import scale_invariant_groups
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> x = torch.randn(3, 4)
        >>> [(group.kind, group.paths) for group in scale_invariant_groups(model, lambda: model(x))]
        [('matrix', ('0.weight', '0.bias'))]

    Source:
        Definition: Arora et al. 2018, arXiv:1812.03981. The rule is derived here.
    """
    if not factors or not all(0 < factor < math.inf and factor != 1 for factor in factors):
        raise InputError(f"factors must be positive numbers other than 1, got {tuple(factors)}")
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < 4:
            raise DtypeError(f"{path} is in {parameter.dtype}, whose rounding hides eps; convert with model.float()")
    zeros = [each for each in model.parameters() if each.is_floating_point() and each.numel() and not each.any()]
    with replaced(zeros, _unit_responses(zeros)):
        trial = _Trial(model, run, tuple(factors), tolerance)
        found = [group for members in _by_module(model) for group in trial.groups(members)]
    return tuple(group for group in found if not set(group.parameters) <= set(zeros))


Members = Mapping[str, nn.Parameter]


def _by_module(model: nn.Module) -> Iterator[Members]:
    """The floating-point parameters that each module owns itself, shared ones at their first owner."""
    first = {parameter: path for path, parameter in model.named_parameters() if parameter.is_floating_point()}
    for prefix, module in model.named_modules():
        own = module.named_parameters(prefix=prefix, recurse=False)
        if members := {path: parameter for path, parameter in own if first.get(parameter) == path}:
            yield members


class _Trial:
    """A model, its output as it is, and what becomes of it when parameters are changed."""

    def __init__(
        self, model: nn.Module, run: Callable[[], object], factors: tuple[float, ...], tolerance: float
    ) -> None:
        self.model, self.run, self.factors, self.tolerance = model, run, factors, tolerance
        self.output = self._call()
        self.finite = self.output.isfinite()
        self.length = float(self.output[self.finite].norm())
        if self.length == 0:
            raise InputError("run returned zeros, whose relative change means nothing; give it another input")
        if self._change(self._call(), self.output) > 0:
            raise InputError("run must return the same output each time; let it use one input, and no state of its own")

    def groups(self, members: Members) -> Iterator[InvariantGroup]:
        """The groups among the parameters of one module: single ones, then what is left over together."""
        left: dict[str, nn.Parameter] = {}
        for path, parameter in members.items():
            control = self._control((parameter,))
            if not self.tolerance < control < math.inf:
                continue
            kinds: tuple[Kind, ...] = ("rows", "matrix") if parameter.dim() > 1 else ("matrix",)
            found = (self._group({path: parameter}, kind, control) for kind in kinds)
            if group := next((each for each in found if each), None):
                yield group
            else:
                left[path] = parameter
        if len(left) > 1 and (group := self._group(left, "matrix", self._control(tuple(left.values())))):
            yield group

    def _group(self, members: Members, kind: Kind, control: float) -> InvariantGroup | None:
        parameters = tuple(members.values())
        limit = self.tolerance * control
        error = self._spread(parameters, kind, 1.0)
        if not error <= _NEAR * control or not self._spread(parameters, kind, _FAR) <= limit:
            return None
        # Smaller ones may be float32's rounding, which does not fall.
        if error > _FAR * limit and not self._spread(parameters, kind, 4.0) <= error / _FALL:
            return None
        return InvariantGroup(paths=tuple(members), parameters=parameters, kind=kind, error=error, control=control)

    def _spread(self, parameters: Sequence[nn.Parameter], kind: Kind, size: float) -> float:
        """Largest change of the output at `size` times the parameters, when they are scaled from there."""
        start = self._call_with(parameters, [parameter.detach() * size for parameter in parameters])
        return max(
            self._change(self._call_with(parameters, scaled), start)
            for scaled in _scalings(parameters, kind, size, self.factors)
        )

    def _control(self, parameters: Sequence[nn.Parameter]) -> float:
        generator = torch.Generator().manual_seed(_SEED)
        turned = []
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
            turned.append(parameter.detach() + parameter.detach().square().mean().sqrt() * noise)
        return self._change(self._call_with(parameters, turned), self.output)

    def _change(self, output: Tensor, start: Tensor) -> float:
        """|output - start| in units of the model's output; infinite if a number stopped being one."""
        if output.shape != start.shape:
            raise InputError("run must return outputs of one shape each time; let it use one input")
        change = float((output - start)[self.finite].norm()) / self.length
        return change if math.isfinite(change) else math.inf

    def _call_with(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Tensor:
        with replaced(parameters, values):
            return self._call()

    def _call(self) -> Tensor:
        with torch.no_grad(), _undisturbed(self.model):
            outputs = [tensor.detach().cpu().double().flatten() for tensor in _tensors(self.run())]
        if not outputs:
            raise InputError("run must return the model's output, as floating-point tensors; it returned none")
        return torch.cat(outputs)


def _scalings(
    parameters: Sequence[nn.Parameter], kind: Kind, size: float, factors: tuple[float, ...]
) -> Iterator[list[Tensor]]:
    if kind == "matrix":
        for factor in factors:
            yield [parameter.detach() * (size * factor) for parameter in parameters]
        return
    # Neighbours differ, and each row meets every factor.
    choices = torch.tensor((1.0, *factors))
    for shift in range(len(choices)):
        scaled = []
        for parameter in parameters:
            own = size * choices[(torch.arange(len(parameter)) + shift) % len(choices)]
            scaled.append(parameter.detach() * own.to(parameter).reshape(-1, *(1,) * (parameter.dim() - 1)))
        yield scaled


def _unit_responses(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Random values in the shape of each, which turn an input of unit size into an output of unit size."""
    generator = torch.Generator().manual_seed(_SEED)
    terms = [each.numel() / len(each) if each.dim() else 1.0 for each in parameters]
    return [
        (torch.randn(each.shape, generator=generator) / math.sqrt(count)).to(each)
        for each, count in zip(parameters, terms, strict=True)
    ]


@contextmanager
def replaced(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Other values of tensors inside; their own memory, with its bits and version counters, afterwards."""
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """The model's buffers, modes and other attributes, and torch's random state, are afterwards as they were."""
    # A rotary embedding, for one, changes a buffer together with a number that says how far it reaches.
    held = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = [buffer for _, _, own in held for buffer in own.values() if buffer is not None]
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), replaced(buffers, [buffer.clone() for buffer in buffers]):
        try:
            yield
        finally:
            for module, attributes, own in held:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(own)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
