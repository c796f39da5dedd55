"""Norms of two inputs: gated, where the second multiplies elementwise, and adaptive, where it sets scale or shift.

Which second input a norm takes is tried; its effect is measured on rows too long to feel eps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import IdentificationError, NormkitError
from normkit.identification import coupling, formula
from normkit.identification.maps import ACTIVATIONS
from normkit.identification.passport import Passport, Reading, without_spec
from normkit.identification.spec_readings import CONVENTIONS, value_of
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of

Recover = Callable[[Specimen, tuple[int, ...]], Passport | None]
"""The search: the passport of a norm of this input shape, or None where no spec describes it."""

_GATES = ("none", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh")
_LEVEL = 64.0
"""A gate held at this number multiplies by 1 or 64, exactly, through any of these functions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Second:
    """One or more further arguments with which a norm runs."""

    names: tuple[str, ...]
    """The arguments, all given tensors of the same shape."""
    shape: tuple[int, ...]

    def of(self, x: Tensor, values: Tensor | float) -> dict[str, Tensor]:
        """The arguments for the samples x: one number, or one sample's values for each of them."""
        whole = torch.as_tensor(values, dtype=x.dtype, device=x.device).expand(len(x), *self.shape[1:])
        return dict.fromkeys(self.names, whole.contiguous())


def second_that_works(specimen: Specimen, shape: Sequence[int]) -> Second | None:
    """The further arguments that make it return a tensor of x's shape, or None.

    Given are all arguments that have no default, or else the first that has None for one: as tensors of x's shape,
    with a row for each sample, or with as many features as a linear layer inside takes.
    """
    required = tuple(each.name for each in specimen.further if each.default is inspect.Parameter.empty)
    optional = tuple(each.name for each in specimen.further if each.default is None)
    x = torch.ones(tuple(shape), device=specimen.device, dtype=specimen.dtype)
    for names in (required, optional[:1]):
        for sizes in _shapes(specimen, shape) if names else ():
            second = Second(names=names, shape=sizes)
            try:
                holding(specimen, second, 0.5)(x)
            except (UnrecognisedError, NormkitError):
                continue
            return second
    return None


class Probe:
    """A norm far from eps, called with second inputs of many kinds."""

    def __init__(self, specimen: Specimen, second: Second, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.specimen, self.second, self.shape, self._generator = specimen, second, shape, generator
        precision = specimen.precision
        self._far, self._fits = precision.far, precision.fits
        self.x = self._far * self._normal(shape)

    def __call__(self, x: Tensor, values: Tensor | float) -> Tensor:
        """The output in float64; the values have a sample's shape, or are one number."""
        return holding(self.specimen, self.second, values)(x).double()

    def constant(self, level: float) -> Tensor:
        """One sample's second input: this number, and noise about it."""
        return level + 0.25 * self._normal(self.second.shape[1:])

    def felt(self) -> bool:
        """The output depends on the second input."""
        base = self(self.x, self.constant(0.75))
        return not self._close(self(self.x, self.constant(-0.75)), base)

    def gate(self) -> tuple[str, str | None] | None:
        """The place where the second input multiplies ("before" or "after" the norm) and its function; or None."""
        at = torch.linspace(-3, 3, 25, dtype=torch.float64)
        one, gates = self(self.x, 1.0), self._normal(self.second.shape[1:])
        outputs = torch.stack([self(self.x, float(level)) for level in at])
        factors = (outputs * one).flatten(1).sum(1) / one.square().sum()
        explained = factors.reshape(-1, *(1,) * one.dim()) * one
        if not self._close(outputs, explained):
            return None
        spread = self(self.x, gates)
        for name in _GATES:
            function = ACTIVATIONS[name]
            unit = function(torch.ones((), dtype=torch.float64))
            if self._close(spread, function(gates.double()) / unit * one):
                return "after", name
            # The norm does not feel the length of what it is given, only its sign.
            scaled = (self.x.double() * function(gates.double()) / unit).to(self.x.dtype)
            if self._close(spread, self(scaled, 1.0)) and not self._close(spread, one):
                return "before", name
        # An elementwise gate moves the output at its own place alone.
        other = gates.clone()
        other.view(-1)[0] += 1.0
        moved = (self(self.x, other) - spread).abs().flatten(1)
        return None if bool(moved[:, 1:].max() > self._fits * moved.max()) else ("after", None)

    def adds(self) -> bool:
        """f(x, z) = f(x + z, 0)."""
        other = self._far * self._normal(self.second.shape[1:])
        return self._close(self(self.x, other), self(self.x + other, 0.0))

    def steers(self) -> tuple[bool, bool]:
        """Whether the second input changes the scale, and the shift."""
        odds, evens = [], []
        for level in (0.75, -0.75):
            values = self.constant(level)
            plus, minus = self(self.x, values), self(-self.x, values)
            odds.append(plus - minus)
            evens.append(plus + minus)
        size = float(odds[0].norm() + odds[1].norm())
        scale, shift = (float((one - other).norm()) > self._fits * size for one, other in (odds, evens))
        return scale, shift

    def _close(self, values: Tensor, expected: Tensor) -> bool:
        return float((values - expected).norm()) <= self._fits * float(expected.norm())

    def _normal(self, sizes: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(sizes), generator=self._generator)
        return values.to(self.specimen.device, self.specimen.dtype)


def holding(specimen: Specimen, second: Second, values: Tensor | float) -> Specimen:
    """The norm with its second input held constant, whatever the number of samples."""
    return specimen.adapted(lambda run, x: one_of(run(x, **second.of(x, values))))


def _shapes(specimen: Specimen, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    widths = [shape[-1]]
    if specimen.module is not None:
        linear = (part for part in specimen.module.modules() if isinstance(part, nn.Linear))
        widths += [part.in_features for part in linear]
    candidates = [tuple(shape)]
    for width in widths:
        candidates += [(shape[0], width), (shape[0], *(1,) * (len(shape) - 2), width), (*shape[:-1], width)]
    yield from dict.fromkeys(candidates)


def two_inputs(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, seen: str, recover: Recover
) -> Passport:
    """The verdict on a norm that needs a second tensor, from its effect.

    Raises:
        IdentificationError: If there is none that it takes.
    """
    second = second_that_works(specimen, shape)
    if second is None:
        raise IdentificationError(f"{seen}, and with no second tensor either; pass call=")
    # Conditioning often begins at zero.
    specimen.draw(generator)
    probe = Probe(specimen, second, shape, generator)
    argument, adds = ", ".join(second.names), False
    try:
        adds = second.shape == shape and probe.adds()
        held = holding(specimen, second, 0.0 if adds else probe.constant(0.75))
        formula.check_kind(held, shape, generator)
        coupling.rows_of(held, shape, generator)
    except UnrecognisedError as error:
        if error.verdict == "not a norm":
            return without_spec("not a norm", f"with {argument} held constant, {error.reason}", seen)
    except NormkitError as error:
        return without_spec("undecidable", f"with {argument} held constant, {error}", seen)
    if adds:
        line = f"{argument} is added to x before it is normalized"
        passport = recover(holding(specimen, second, 0.0), shape)
        if passport is None or passport.spec is None:
            reading = Reading(value={"argument": argument}, evidence=(line,))
            return without_spec("norm", line, seen, residual=reading)
        line = f"{line}: {passport.spec} of the sum"
        reading = Reading(value={"argument": argument, "spec": _decided(passport)}, evidence=(line,))
        kind = Reading(value="norm", evidence=(line, seen))
        return replace(passport, readings={**passport.readings, "kind": kind, "residual": reading})
    if not probe.felt():
        return without_spec("norm", f"{argument} is needed, and changes nothing", seen)
    gate = probe.gate() if second.shape == shape and len(second.names) == 1 else None
    if gate is None:
        return _adaptive(probe, argument, seen, recover)
    reading = _gate_reading(probe, argument, *gate, recover)
    return without_spec("gated", *reading.evidence, seen, gate=reading)


def optional_gate(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "gate" of a norm that takes a gate and need not be given one; none otherwise."""
    required = any(each.default is inspect.Parameter.empty for each in specimen.further)
    if required or not any(each.default is None for each in specimen.further):
        return {}
    second = second_that_works(specimen, shape)
    if second is None or second.shape != shape:
        return {}
    probe = Probe(specimen, second, shape, generator)
    try:
        gate = None if probe.adds() or not probe.felt() else probe.gate()
    except (UnrecognisedError, NormkitError):
        return {}
    return {} if gate is None else {"gate": _gate_reading(probe, second.names[0], *gate, None)}


def _gate_reading(
    probe: Probe, argument: str, placement: str, activation: str | None, recover: Recover | None
) -> Reading:
    """The place where the gate acts, and the norm that remains when the gate is held constant."""
    unusual = {"none": "as it is", None: "through a function without a usual name"}
    words = unusual.get(activation, f"through {activation}")
    lines = [f"{argument} multiplies elementwise {placement} the norm, {words}"]
    value: dict[str, Any] = {"argument": argument, "placement": placement, "activation": activation}
    if recover is None:
        return Reading(value={**value, "optional": True}, evidence=(f"{lines[0]}; it need not be given",))
    if activation is None:
        return Reading(value=value, evidence=tuple(lines))
    factor = float(ACTIVATIONS[activation](torch.tensor(_LEVEL)))

    def held(run: Callable[..., Tensor], x: Tensor) -> object:
        further = probe.second.of(x, _LEVEL)
        if placement == "before":
            return one_of(run(x / factor, **further))
        y = one_of(run(x, **further))
        return y / factor if isinstance(y, Tensor) else y

    passport = recover(probe.specimen.adapted(held), probe.shape)
    if passport is not None and passport.spec is not None:
        value["spec"] = _decided(passport)
        lines.append(f"with {argument} held constant: {passport.spec}")
    return Reading(value=value, evidence=tuple(lines))


def _adaptive(probe: Probe, argument: str, seen: str, recover: Recover) -> Passport:
    """A norm whose second input sets its scale or its shift."""
    specimen, second, shape = probe.specimen, probe.second, probe.shape
    scale, shift = probe.steers()
    if not (scale or shift):
        return without_spec("norm", f"{argument} acts in a way that no gate, scale or shift explains", seen)
    # As a function, because the condition gives a gain and a bias like any other.
    passport = recover(holding(specimen, second, 0.5).as_function(), shape)
    if passport is None or passport.spec is None:
        return without_spec("norm", f"with {argument} held constant, no spec describes what is left", seen)
    what = " and ".join(word for word, acts in (("scale", scale), ("shift", shift)) if acts)
    lines = (
        f"the normalized row has its {what} from {argument}, of shape {second.shape}",
        f"with {argument} held constant: {passport.spec}",
    )
    of_the_condition = {*CONVENTIONS["gain"], *CONVENTIONS["bias"]}
    condition = {
        "argument": argument,
        "shape": list(second.shape),
        "scale": scale,
        "shift": shift,
        "spec": {name: value for name, value in _decided(passport).items() if name not in of_the_condition},
    }
    return without_spec("adaptive", *lines, seen, condition=Reading(value=condition, evidence=lines))


def _decided(passport: Passport) -> dict[str, Any]:
    """The conventions of its spec that a reading decided."""
    assert passport.spec is not None
    readings = (name for name in CONVENTIONS if name in passport.readings and name not in passport.undecidable)
    return {field: value for name in readings for field, value in value_of(passport.spec, name).items()}
