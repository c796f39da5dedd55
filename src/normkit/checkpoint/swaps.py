"""The norms of a checkpoint that no class of transformers has, recorded in its configuration.

The record is the key "normkit" of config.json: {"schema_version": 1, "norms": {path: spec}}. To open the checkpoint,
build the stock class, load its weights, and replace each named norm by `normkit.Norm`. The record can ask for nothing
else, and whatever does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normkit.errors import ModelError, SpecError
from normkit.spec import NormSpec
from normkit.text import clipped

if TYPE_CHECKING:
    from torch import nn

KEY = "normkit"
SCHEMA_VERSION = 1

_PARAMETERS = ("weight", "bias")


def record(norms: Mapping[str, NormSpec]) -> dict[str, Any]:
    """The value of `KEY` in a configuration, for specs by the paths of their norms."""
    return {"schema_version": SCHEMA_VERSION, "norms": {path: spec.to_json() for path, spec in norms.items()}}


def recorded(values: Mapping[str, Any], place: object) -> dict[str, NormSpec]:
    """The specs that a configuration records, by the paths of their norms; none if there is no record.

    Args:
        values: The configuration as JSON.
        place: Named in messages.

    Raises:
        ModelError: If there is a record and it is malformed.
    """
    if KEY not in values:
        return {}
    found = values[KEY]
    if not isinstance(found, dict) or not isinstance(found.get("norms"), dict):
        raise ModelError(f"expected the norms that were replaced under {KEY!r} in {place}, found none; fold it again")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ModelError(
            f"expected schema_version {SCHEMA_VERSION} under {KEY!r} in {place}, found "
            f"{_shown(found.get('schema_version'))}; open it with the version of normkit that wrote it"
        )
    if unknown := sorted(set(found) - {"schema_version", "norms"}):
        raise ModelError(f"expected only norms under {KEY!r} in {place}, found {_shown(unknown[0])} too; fold it again")
    return {path: _spec(path, spec, place) for path, spec in found["norms"].items()}


def replay(model: nn.Module, norms: Mapping[str, NormSpec], place: object) -> None:
    """Replace each named norm by a `normkit.Norm` with the same parameters; all are checked before the first.

    Args:
        model: Changed in place; may be on the meta device.
        norms: The result of `recorded`.
        place: Named in messages.

    Raises:
        ModelError: If a path leads to no norm, or a spec does not fit the parameters there.
    """
    modules = dict(model.named_modules())
    made = {}
    for named, spec in norms.items():
        # In the oldest checkpoints of a class with a head, names lack the prefix of its body.
        path = named if named in modules else f"{getattr(model, 'base_model_prefix', '')}.{named}"
        if path not in modules:
            raise ModelError(
                f"expected {_shown(named)}, named under {KEY!r} in {place}, in {type(model).__name__}; it has no such "
                "module: the record belongs to another model"
            )
        made[path] = _made(path, modules[path], spec, place)
    for path, norm in made.items():
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, norm)


def _spec(path: str, values: Any, place: object) -> NormSpec:
    reason = f"found {_shown(values)}"
    if isinstance(values, dict):
        try:
            return NormSpec.from_json(values)
        except SpecError as error:
            reason = clipped(str(error), 160)
        except OverflowError:
            reason = "found a number that no float can hold"
    raise ModelError(f"expected the spec of {_shown(path)} under {KEY!r} in {place}, {reason}; fold it again")


def _made(path: str, module: nn.Module, spec: NormSpec, place: object) -> nn.Module:
    """The norm that replaces a module."""
    from normkit.layers import Norm

    where = f"{_shown(path)}, named under {KEY!r} in {place},"
    shape = _shape(module)
    if shape is None:
        raise ModelError(
            f"expected a norm at {where} found {type(module).__name__}; the record belongs to another model"
        )
    found = {name for name in _PARAMETERS if getattr(module, name, None) is not None}
    wanted = {name for name, has in zip(_PARAMETERS, (spec.has_weight, spec.has_bias), strict=True) if has}
    if found != wanted:
        raise ModelError(
            f"expected {_listed(wanted)} in {where} found {_listed(found)}; spec and weights belong to different models"
        )
    if len(shape) != spec.rows.parameter_dim or shape[-1] % spec.rows.groups:
        raise ModelError(
            f"expected {where} to fit its spec, its shape {shape} does not: {clipped(str(spec), 160)}; fold it again"
        )
    norm = Norm(spec, shape, device="meta")
    for name in found:
        norm.register_parameter(name, getattr(module, name))
    return norm.train(module.training)


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of a norm's parameters; None for a module that is not a norm of rows."""
    has_more = next(module.children(), None) is not None or next(module.buffers(), None) is not None
    if has_more or "norm" not in type(module).__name__.lower():
        return None
    parameters = dict(module.named_parameters())
    if not set(parameters) <= set(_PARAMETERS):
        return None
    # The shape of a norm without parameters is known only if it has this attribute.
    shapes = {tuple(parameter.shape) for parameter in parameters.values()} or {
        tuple(getattr(module, "normalized_shape", ()))
    }
    shape = shapes.pop()
    return shape if shape and not shapes else None


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names, reverse=True)) or "no parameters"


def _shown(value: object) -> str:
    """Any value from a file, short and on one line."""
    return clipped(ascii(value), 160)
