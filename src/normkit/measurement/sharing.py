"""Norms at several places of a model: one module, or one parameter, that serves two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from normkit.identification.sites import NormSite
from normkit.measurement.structure import Structure


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The calls and the twins of a shared norm."""

    calls: int
    """Calls in one forward pass."""
    around: int
    """Calls of what is around it; a block that runs several times calls each of its norms as often, and so does a
    recurrence, in which the matrices beside a norm are called as often as it is."""
    twins: tuple[str, ...]
    """Other paths with the same module, or with a module that has the same parameter."""


def find_shared(model: nn.Module, structure: Structure) -> dict[str, Sharing]:
    """The norms that serve several places, by path.

    Args:
        model: The model; it is only looked at.
        structure: The structure of the model.
    """
    calls = Counter(call.path for call in structure.called.modules)
    twins = _twins(model, structure)
    shared = {}
    for site in structure.sites:
        made = structure.forward_calls[site.path]
        around = max(_calls_around(site, calls), _calls_in_a_recurrence(model, site, calls))
        if made > around or twins[site.path]:
            shared[site.path] = Sharing(calls=made, around=around, twins=twins[site.path])
    return shared


def _calls_around(site: NormSite, calls: Mapping[str, int]) -> int:
    """Calls of the enclosing module, or where it takes no activations, of the busiest module beside the norm."""
    parent = site.path.rpartition(".")[0]
    if parent in calls:
        return calls[parent]
    prefix = f"{parent}." if parent else ""
    beside = [
        made
        for path, made in calls.items()
        if path.startswith(prefix) and not f"{path}.".startswith(f"{site.path}.") and path != parent
    ]
    return max(beside, default=1)


def _calls_in_a_recurrence(model: nn.Module, site: NormSite, calls: Mapping[str, int]) -> int:
    """Calls of the busiest module with a matrix that stands right beside the norm, or beside the list that holds it."""
    parent = _parent(site.path)
    while parent and parent not in calls:
        parent = _parent(parent)
    prefix = f"{parent}." if parent else ""
    return max(
        (
            calls[f"{prefix}{name}"]
            for name, module in model.get_submodule(parent).named_children()
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        ),
        default=1,
    )


def _twins(model: nn.Module, structure: Structure) -> dict[str, tuple[str, ...]]:
    """By path of a site, the other places of its module and the sites that share a parameter with it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places = defaultdict(list)
    for path, module in modules.items():
        places[module].append(path)
    owners: dict[int, list[str]] = defaultdict(list)
    for site in structure.sites:
        held = [site.passport.weight, site.passport.bias] if site.module is None else list(site.module.parameters())
        for parameter in held:
            if isinstance(parameter, nn.Parameter) and site.path not in owners[id(parameter)]:
                owners[id(parameter)].append(site.path)
    twins = {}
    for site in structure.sites:
        own = [path for path in places.get(site.module, ()) if site.module is not None and path != site.path]
        # A block that is listed twice brings its norms along.
        parent = _parent(site.path)
        own = [path for path in own if _parent(path) == parent or modules[_parent(path)] is not modules[parent]]
        same = [path for paths in owners.values() if site.path in paths for path in paths if path != site.path]
        twins[site.path] = tuple(dict.fromkeys([*own, *same]))
    return twins


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
