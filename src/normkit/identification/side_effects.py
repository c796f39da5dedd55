"""The effects of a call beside its result: on its input, its state and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.errors import NormkitError
from normkit.identification import coupling
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import same
from normkit.reference import HALF
from normkit.text import dtype_name

_SEED = 1
_FOLLOWS, _AS_LONG = 0.5, 1.25
"""An activation that saturates grows 1.4 times and more over this range; what norms leave beside noise stays."""


def side_effect_readings(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Readings "input" ("kept" or "overwritten"), "repeatable" and, of a module, "training".

    "overwritten in" are the dtypes in which the input is.

    "training" has the "output" in training mode ("as in eval", "random", "batch statistics" or "different") and
    the buffers that a call in training mode "updates".

    Raises:
        UnrecognisedError: If the same input gives different outputs; with a reading "scale" where that is of a norm.
    """
    x = torch.randn(tuple(shape), generator=generator).to(specimen.device, specimen.dtype)
    given = x.clone()
    first = specimen.overwriting(given)
    aliased = first.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    first = first.clone()
    if not same(first, specimen(x)):
        if same(*_seeded(specimen, x)):
            reason = "the same input gives different outputs: it draws random numbers"
        else:
            reason = "the same input gives different outputs, with the same random numbers: it keeps a state"
        repeatable = Reading(value=False, evidence=(reason,))
        raise UnrecognisedError("undecidable", reason, {"repeatable": repeatable, **_scale(specimen, x)})
    found = {"repeatable": Reading(value=True, evidence=("the same input gives the same output, bit for bit",))}
    if same(given, x):
        lines = ["the input is the same after the call"]
        if aliased:
            lines.append("the output lies in the memory of the input: what changes one changes the other")
        found = {"input": Reading(value="kept", evidence=tuple(lines)), **found}
    else:
        line = f"the call changes its own input{': it works in place' if aliased else ''}"
        overwritten = {
            "input": Reading(value="overwritten", evidence=(line,)),
            "overwritten in": Reading(value=_overwritten(specimen, x)),
        }
        found = {**overwritten, **found}
    return found if specimen.module is None else {**found, "training": _training(specimen, x, first, generator)}


def _overwritten(specimen: Specimen, x: Tensor) -> list[str]:
    """The dtypes in which a norm overwrites its input: where it converts the input first, it overwrites the copy."""
    found = [dtype_name(x.dtype)]
    for dtype in HALF:
        try:
            given = x.to(dtype)
            specimen.in_dtype(dtype).overwriting(given)
        except (UnrecognisedError, NormkitError):
            continue
        found += [] if same(given, x.to(dtype)) else [dtype_name(dtype)]
    return list(dict.fromkeys(found))


def _training(specimen: Specimen, x: Tensor, in_eval: Tensor, generator: torch.Generator) -> Reading:
    training = specimen.in_mode(training=True)
    assert training.module is not None
    before = {name: value.clone() for name, value in training.module.named_buffers()}
    try:
        first = training(x).clone()
        after = dict(training.module.named_buffers())
        updated = sorted(name for name, value in after.items() if name not in before or not same(value, before[name]))
        output, line = _difference(training, x, first, in_eval, generator)
    except (UnrecognisedError, NormkitError) as error:
        return Reading.open(f"it cannot be called in training mode ({error})")
    lines = [line] if not updated else [line, f"a call in training mode updates {', '.join(updated)}"]
    return Reading(value={"output": output, "updates": updated}, evidence=tuple(lines))


def _difference(
    training: Specimen, x: Tensor, first: Tensor, in_eval: Tensor, generator: torch.Generator
) -> tuple[str, str]:
    """The effect of training mode on the output, in one word and one line."""
    if not same(first, training(x)):
        if same(*_seeded(training, x)):
            return "random", "in training mode the same input gives different outputs: it draws random numbers"
        return "different", "in training mode the same input gives different outputs: it keeps a state"
    if same(first, in_eval):
        return "as in eval", "in training mode the output is the same, bit for bit"
    for parameter in training.parameters.values():
        # With a gain of 0 no input moves an output.
        parameter.fill_(1.0)
    reach = coupling.reach(training, x.shape, generator)
    if reach is not None and reach[0] > 1:
        return "batch statistics", "in training mode the output is another: changing one sample moves the others"
    return "different", "in training mode the output is another"


def _scale(specimen: Specimen, x: Tensor) -> dict[str, Reading]:
    """Reading "scale", "forgotten": outputs follow the input, and are as long for a short one as for a long one."""
    short, again, long, other = (specimen(given).clone().double().flatten() for given in (x / 4, x / 4, 64 * x, -x / 4))
    follows = torch.cosine_similarity(short, again, dim=0) - torch.cosine_similarity(short, other, dim=0)
    ratio = long.norm() / short.norm()
    if not (float(follows) > _FOLLOWS and 1 / _AS_LONG < float(ratio) < _AS_LONG):
        return {}
    return {"scale": Reading(value="forgotten", evidence=("an input 256 times as long gives an output as long",))}


def _seeded(specimen: Specimen, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs with the same random numbers from torch."""
    outputs = []
    for _ in range(2):
        torch.manual_seed(_SEED)
        outputs.append(specimen(x).clone())
    return outputs[0], outputs[1]
