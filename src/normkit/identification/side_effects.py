"""How a norm behaves beside its formula: what a call does to its input, its state and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError
from normkit.identification import coupling
from normkit.identification.half_precision_calls import HALF
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError

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
    aliased = _share_memory(first, given)
    first = first.clone()
    if not _same(first, specimen(x)):
        if _same(*_seeded(specimen, x)):
            reason = "the same input gives different outputs: it draws random numbers"
        else:
            reason = "the same input gives different outputs, with the same random numbers: it keeps a state"
        repeatable = Reading(value=False, evidence=(reason,))
        raise UnrecognisedError("undecidable", reason, {"repeatable": repeatable, **_scale(specimen, x)})
    found = {
        **_input(_overwritten(specimen, x) if not _same(given, x) else [], aliased),
        "repeatable": Reading(value=True, evidence=("the same input gives the same output, bit for bit",)),
    }
    return found if specimen.module is None else {**found, "training": _training(specimen, x, first, generator)}


def _overwritten(specimen: Specimen, x: Tensor) -> list[str]:
    """The dtypes in which a norm that overwrites x does so: where it first converts its input, that is spared."""
    found = [str(x.dtype).removeprefix("torch.")]
    for dtype in HALF:
        try:
            given = x.to(dtype)
            specimen.in_dtype(dtype).overwriting(given)
        except (UnrecognisedError, NormkitError):
            continue
        found += [] if _same(given, x.to(dtype)) else [str(dtype).removeprefix("torch.")]
    return list(dict.fromkeys(found))


def _input(overwritten: list[str], aliased: bool) -> dict[str, Reading]:
    if overwritten:
        where = ": it works in place" if aliased else ""
        reading = Reading(value="overwritten", evidence=(f"the call changes its own input{where}",))
        return {"input": reading, "overwritten in": Reading(value=overwritten)}
    lines = ["the input is the same after the call"]
    if aliased:
        lines.append("the output lies in the memory of the input: what changes one changes the other")
    return {"input": Reading(value="kept", evidence=tuple(lines))}


def _training(specimen: Specimen, x: Tensor, in_eval: Tensor, generator: torch.Generator) -> Reading:
    training = specimen.in_training_mode()
    assert training.module is not None
    before = {name: value.clone() for name, value in training.module.named_buffers()}
    try:
        first = training(x).clone()
        after = dict(training.module.named_buffers())
        updated = sorted(name for name, value in after.items() if name not in before or not _same(value, before[name]))
        output, line = _difference(training, x, first, in_eval, generator)
    except (UnrecognisedError, NormkitError) as error:
        return Reading.open(f"it cannot be called in training mode ({error})")
    lines = [line] if not updated else [line, f"a call in training mode updates {', '.join(updated)}"]
    return Reading(value={"output": output, "updates": updated}, evidence=tuple(lines))


def _difference(
    training: Specimen, x: Tensor, first: Tensor, in_eval: Tensor, generator: torch.Generator
) -> tuple[str, str]:
    """What training mode does to the output, in one word and one line."""
    if not _same(first, training(x)):
        if _same(*_seeded(training, x)):
            return "random", "in training mode the same input gives different outputs: it draws random numbers"
        return "different", "in training mode the same input gives different outputs: it keeps a state"
    if _same(first, in_eval):
        return "as in eval", "in training mode the output is the same, bit for bit"
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
    return {"scale": Reading(value="forgotten", evidence=("what enters 256 times as long leaves as long",))}


def _seeded(specimen: Specimen, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs with the same random numbers from torch."""
    outputs = []
    for _ in range(2):
        torch.manual_seed(_SEED)
        outputs.append(specimen(x).clone())
    return outputs[0], outputs[1]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, not-a-numbers included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def kept(norm: object) -> Iterator[None]:
    """Keep the modules and tensors that a function reaches: by cells, globals, defaults, its object, or as a partial.

    Identification copies a module; a function's own state cannot be copied, so it is put back: parameters and
    buffers (the same tensors, with the same bits), and which modules are in training mode.
    """
    modules, tensors = _held(norm)
    states = [_State(part) for module in modules for part in module.modules()]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for state in states:
            state.restore()
        for tensor, value in values:
            _put_back(tensor, value)


class _State:
    """What a call may change of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.attributes = dict(vars(module))
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        held = [*self.parameters.values(), *self.buffers.values()]
        self.values = [(tensor, tensor.detach().clone()) for tensor in held if tensor is not None]

    def restore(self) -> None:
        """As it was."""
        _register(vars(self.module), self.attributes)
        self.module.training = self.training
        _register(self.module._parameters, self.parameters)
        _register(self.module._buffers, self.buffers)
        for tensor, value in self.values:
            _put_back(tensor, value)


def _register(registered: dict[str, Any], stored: dict[str, Any]) -> None:
    if {name: id(value) for name, value in registered.items()} != {name: id(value) for name, value in stored.items()}:
        registered.clear()
        registered.update(stored)


def _put_back(tensor: Tensor, value: Tensor) -> None:
    # What did not change is not written, so that its version counter stays too.
    if not tensor.is_meta and not _same(tensor.detach(), value):
        with torch.no_grad():
            tensor.copy_(value)


def _held(norm: object) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and tensors that a function holds on to; none for a module or its method: these are copied."""
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.append(thing)
        elif isinstance(thing, Tensor):
            tensors.append(thing)
        elif isinstance(thing, partial):
            for inner in (thing.func, *thing.args, *thing.keywords.values()):
                look(inner, depth + 1)
        elif isinstance(thing, (list, tuple)):
            for inner in thing:
                look(inner, depth + 1)
        elif isinstance(thing, dict):
            for inner in thing.values():
                look(inner, depth + 1)
        else:
            _look_inside(thing, look, depth)

    if not isinstance(norm, nn.Module) and not isinstance(getattr(norm, "__self__", None), nn.Module):
        look(norm, 0)
    return modules, tensors


def _look_inside(thing: Any, look: Callable[[Any, int], None], depth: int) -> None:
    """Cells, defaults and globals of a function, the object of a method, the attributes of a callable object."""
    for cell in getattr(thing, "__closure__", None) or ():
        try:
            look(cell.cell_contents, depth + 1)
        except ValueError:  # an empty cell
            continue
    code = getattr(thing, "__code__", None)
    scope = getattr(thing, "__globals__", {})
    for name in () if code is None else code.co_names:
        if isinstance(scope.get(name), nn.Module | Tensor):
            look(scope[name], depth + 1)
    for inner in (getattr(thing, "__self__", None), getattr(thing, "__wrapped__", None)):
        if inner is not None:
            look(inner, depth + 1)
    look(getattr(thing, "__defaults__", None) or (), depth + 1)
    if callable(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
        look(vars(thing), depth + 1)
