"""What runtimes compute from stored gains, as data (runtimes.toml); and what a relation therefore means."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from normkit.comparison.relations import Relation
from normkit.comparison.weights import Weights

FILE = "runtimes.toml"
OWN = "transformers"


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a runtime does with the stored gains of some norms."""

    adds: float
    """Added to the stored gain."""
    source: str
    """The file of the runtime that says so."""
    architectures: tuple[str, ...] = ()
    """The names of the architectures, or () for all."""
    norms: tuple[str, ...] = ("*",)
    """Patterns of the paths."""
    but: tuple[str, ...] = ()
    """Patterns of paths for which it does not hold."""
    may_reorder: bool = False
    """Whether it may store the gains in another order than transformers does."""
    twice: str = ""
    """Where the number is known to have been added twice, or ""."""

    def holds(self, architecture: str, path: str) -> bool:
        """Whether it is about a norm."""
        return (
            (not self.architectures or architecture in self.architectures)
            and any(fnmatchcase(path, pattern) for pattern in self.norms)
            and not any(fnmatchcase(path, pattern) for pattern in self.but)
        )


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Tensors of a model of transformers that a runtime does not keep in the file."""

    names: tuple[str, ...]
    """Patterns of their names in transformers."""
    where: str
    """Where they are, in words."""
    source: str
    """The file of the runtime that says so."""
    architectures: tuple[str, ...] = ()
    """The names of the architectures, or () for all."""
    but: tuple[str, ...] = ()
    """Architectures for which it does not hold."""

    def holds(self, architecture: str, name: str) -> bool:
        """Whether it is about a tensor."""
        is_of_architecture = not self.architectures or architecture in self.architectures
        return (
            is_of_architecture and architecture not in self.but and any(fnmatchcase(name, each) for each in self.names)
        )


@dataclass(frozen=True, kw_only=True)
class Reordered:
    """Matrices whose rows a runtime stores in another order."""

    names: tuple[str, ...]
    """Patterns of their names in transformers."""
    source: str
    """The file of the runtime that says so."""
    architectures: tuple[str, ...]
    """The names of the architectures."""


@cache
def runtimes() -> Mapping[str, tuple[Convention, ...]]:
    """Runtime -> its conventions; the last holds where no other does."""
    return MappingProxyType({name: _conventions(entry) for name, entry in _document().items()})


@cache
def _kept_elsewhere() -> Mapping[str, tuple[Elsewhere, ...]]:
    return MappingProxyType(
        {
            name: tuple(Elsewhere(**_frozen(each)) for each in entry.get("elsewhere", ()))
            for name, entry in _document().items()
        }
    )


@cache
def _reordered() -> Mapping[str, tuple[Reordered, ...]]:
    return MappingProxyType(
        {
            name: tuple(Reordered(**_frozen(each)) for each in entry.get("reordered", ()))
            for name, entry in _document().items()
        }
    )


def reorders(weights: Weights, name: str) -> bool:
    """Whether the runtime of some weights stores the rows of a matrix of transformers in another order.

    Example:
        >>> from normkit.comparison.weight_sources import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="llama.cpp", architecture="llama")
        >>> reorders(weights, "model.layers.0.self_attn.q_proj.weight")
        True
    """
    known = _reordered().get(weights.runtime, ())
    return any(
        weights.architecture in each.architectures and any(fnmatchcase(name, pattern) for pattern in each.names)
        for each in known
    )


def elsewhere(weights: Weights, name: str) -> str:
    """Where a runtime keeps a tensor of transformers that its file does not hold; "" if it belongs there.

    Example:
        >>> from normkit.comparison.weight_sources import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="llama.cpp", architecture="gemma3")
        >>> elsewhere(weights, "vision_tower.post_layernorm.weight")
        'llama.cpp keeps what is not text in a second file (mmproj)'
        >>> elsewhere(weights, "model.norm.weight")
        ''
    """
    known = _kept_elsewhere().get(weights.runtime, ())
    return next((each.where for each in known if each.holds(weights.architecture, name)), "")


def convention(weights: Weights, path: str) -> Convention | None:
    """What the runtime of some weights does with the gain of a norm; None if that is not known.

    Example:
        >>> from normkit.comparison.weight_sources import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="transformers", architecture="gemma3_text")
        >>> convention(weights, "model.norm").adds
        1.0
    """
    if (added := weights.adds.get(path)) is not None:
        return Convention(adds=added, source="the nodes of the file's own graph", may_reorder=True)
    known = runtimes().get(weights.runtime, ())
    found = next((each for each in known if each.holds(weights.architecture, path)), None)
    is_general = found is not None and not found.architectures
    return None if is_general and weights.runtime == OWN and not is_stock(weights.architecture) else found


@cache
def is_stock(architecture: str) -> bool:
    """Whether transformers itself has a type of model: one that brings its own code may add anything."""
    if (files("normkit.models") / f"{architecture}.toml").is_file():
        return True
    from transformers import CONFIG_MAPPING

    return architecture in CONFIG_MAPPING


def judged(
    found: Relation, port: Convention | None, reference: Convention | None, runtime: str
) -> tuple[str, bool | None]:
    """What a relation of two gains means, and whether it is right; None where that is undecided.

    Args:
        found: The relation of the stored gains.
        port: What the port's runtime does with the gain; None if that is not known, as for arrays.
        reference: What the reference's runtime does.
        runtime: The name of the port's runtime.
    """
    if found.kind == "folded":
        return "", True
    if found.kind == "permuted":
        if port is None or reference is None or port.may_reorder or reference.may_reorder:
            return "right only if its readers are in that order too", None
        return f"wrong: {runtime} reads them in the reference's order", False
    if found.kind not in ("equal", "offset"):
        return "", None if found.kind == "undecided" else False
    if found.rounding.startswith("float8"):
        return "wrong: too few digits for a gain", False
    stored = found.constant or 0.0
    if port is None or reference is None:
        return _without_runtime(stored, reference)
    excess = stored + port.adds - reference.adds
    if excess == 0:
        return (f"as {runtime} stores it" if stored else ""), True
    effect = f"gains {'+' if excess > 0 else '-'} {abs(excess):g}"
    does = f"{runtime} adds {port.adds:g} to it" if port.adds else f"{runtime} adds nothing to it"
    if excess == reference.adds:
        twice = f"; {port.twice}" if port.twice else ""
        return f"doubled: {does} and computes {effect}{twice}", False
    return f"{'dropped' if excess == -reference.adds else 'wrong'}: {does} and computes {effect}", False


def _without_runtime(stored: float, reference: Convention | None) -> tuple[str, bool | None]:
    """The same where nothing says who loads the port, or what the reference's runtime adds."""
    if stored == 0:
        return f"right for a loader that adds {reference.adds:g}" if reference and reference.adds else "", True
    number, adds = f"{'+' if stored > 0 else '-'} {abs(stored):g}", reference.adds if reference else None
    if adds is None:
        is_usual = abs(stored) == 1
        return (f"right only if the two loaders add numbers that are {abs(stored):g} apart" if is_usual else ""), (
            None if is_usual else False
        )
    if adds == 0:
        return f"wrong: gains {number}", False
    if stored == adds:
        return f"right for a loader that multiplies by it, doubled for one that adds {adds:g}", None
    twice = stored == 2 * adds
    return f"{'doubled' if twice else 'wrong'}: a loader needs {adds:+g}, or nothing if it adds {adds:g}", False


def _document() -> dict[str, Any]:
    return tomllib.loads((files("normkit.comparison") / FILE).read_text(encoding="utf-8"))


def _conventions(entry: Mapping[str, Any]) -> tuple[Convention, ...]:
    general = {key: value for key, value in entry.items() if key not in ("entry", "elsewhere", "reordered")}
    return tuple(Convention(**_frozen(each)) for each in (*entry.get("entry", ()), general))


def _frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
