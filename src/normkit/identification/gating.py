"""Norms of two inputs: gated, where the second multiplies elementwise, and adaptive, where it sets scale or shift."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.errors import IdentificationError, NormkitError
from normkit.identification import coupling, formula
from normkit.identification.batch import Recover
from normkit.identification.elementwise import ACTIVATIONS
from normkit.identification.maps import FallbackVerdict
from normkit.identification.passport import CONVENTIONS, Passport, Reading, value_of
from normkit.identification.second_input import Probe, holding, second_that_works
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of

_LEVEL = 64.0
"""A gate held at this number multiplies by 1 or 64, exactly, through any of these functions."""


def two_inputs(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, seen: str, recover: Recover
) -> FallbackVerdict:
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
            return FallbackVerdict.of("not a norm", f"with {argument} held constant, {error.reason}", seen)
    except NormkitError as error:
        return FallbackVerdict.of("undecidable", f"with {argument} held constant, {error}", seen)
    if adds:
        return _residual(probe, argument, seen, recover)
    if not probe.felt():
        return FallbackVerdict.of("norm", f"{argument} is needed, and changes nothing", seen)
    gate = probe.gate() if second.shape == shape and len(second.names) == 1 else None
    if gate is None:
        return _adaptive(probe, argument, seen, recover)
    reading = _gate_reading(probe, argument, *gate, recover)
    return FallbackVerdict.of("gated", *reading.evidence, seen, gate=reading)


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
    """Where the gate acts, and the norm that remains when the gate is held constant."""
    words = {"none": "as it is", None: "through a function without a usual name"}.get(
        activation, f"through {activation}"
    )
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


def _residual(probe: Probe, argument: str, seen: str, recover: Recover) -> FallbackVerdict:
    """A norm of the sum of its two inputs."""
    line = f"{argument} is added to x before it is normalized"
    value: dict[str, Any] = {"argument": argument}
    passport = recover(holding(probe.specimen, probe.second, 0.0), probe.shape)
    if passport is not None and passport.spec is not None:
        value["spec"] = _decided(passport)
        line = f"{line}: {passport.spec} of the sum"
    return replace(
        FallbackVerdict.of("norm", line, seen, residual=Reading(value=value, evidence=(line,))), norm=passport
    )


def _adaptive(probe: Probe, argument: str, seen: str, recover: Recover) -> FallbackVerdict:
    """A norm whose second input sets its scale or its shift."""
    specimen, second, shape = probe.specimen, probe.second, probe.shape
    scale, shift = probe.steers()
    if not (scale or shift):
        return FallbackVerdict.of("norm", f"{argument} acts in a way that no gate, scale or shift explains", seen)
    # As a function, because the condition gives a gain and a bias like any other.
    passport = recover(holding(specimen, second, 0.5).as_function(), shape)
    if passport is None or passport.spec is None:
        return FallbackVerdict.of("norm", f"with {argument} held constant, no spec describes what is left", seen)
    what = " and ".join(word for word, acts in (("scale", scale), ("shift", shift)) if acts)
    lines = (
        f"the normalized row has its {what} from {argument}, of shape {second.shape}",
        f"with {argument} held constant: {passport.spec}",
    )
    of_the_condition = {"has_weight", "has_bias", "weight_offset", "weight_placement"}
    condition = {
        "argument": argument,
        "shape": list(second.shape),
        "scale": scale,
        "shift": shift,
        "spec": {name: value for name, value in _decided(passport).items() if name not in of_the_condition},
    }
    return FallbackVerdict.of("adaptive", *lines, seen, condition=Reading(value=condition, evidence=lines))


def _decided(passport: Passport) -> dict[str, Any]:
    """The conventions of its spec that a reading decided."""
    assert passport.spec is not None
    readings = (name for name in CONVENTIONS if name in passport.readings and name not in passport.undecidable)
    return {field: value for name in readings for field, value in value_of(passport.spec, name).items()}
