"""The formulas of runtimes on stored gains, as data (runtimes.toml), and the meaning of a relation there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from normkit.comparison.relations import Relation
from normkit.comparison.weights import Weights

OWN = "transformers"


@dataclass(frozen=True, kw_only=True)
class Convention:
    """The use of a stored gain by a runtime."""

    adds: float
    """Added to the stored gain."""
    may_reorder: bool = False
    """Whether it may store the gain in another order than transformers does."""
    twice: str = ""
    """The runtimes where the number is known to have been added twice, or ""."""


@cache
def runtimes() -> Mapping[str, Mapping[str, Any]]:
    """Runtime -> what runtimes.toml says of it."""
    return tomllib.loads((files("normkit.comparison") / "runtimes.toml").read_text(encoding="utf-8"))


def convention(weights: Weights, path: str) -> Convention | None:
    """The use of a norm's gain by the runtime of some weights; None if it is not known.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="transformers", architecture="gemma3_text")
        >>> convention(weights, "model.norm").adds
        1.0
    """
    if (added := weights.adds.get(path)) is not None:
        return Convention(adds=added, may_reorder=True)
    found: Mapping[str, Any] | None = _entry(weights, "entry", path)
    if found is None:
        found = runtimes().get(weights.runtime)
        if found is None or (weights.runtime == OWN and not is_stock(weights.architecture)):
            return None
    return Convention(**{key: found[key] for key in ("adds", "may_reorder", "twice") if key in found})


def reorders(weights: Weights, name: str) -> bool:
    """Whether the runtime of some weights stores the rows of a matrix of transformers in another order.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="llama.cpp", architecture="llama")
        >>> reorders(weights, "model.layers.0.self_attn.q_proj.weight")
        True
    """
    return _entry(weights, "reordered", name) is not None


def elsewhere(weights: Weights, name: str) -> str:
    """The place of a tensor of transformers that some weights do not hold; "" if it belongs there.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> from dataclasses import replace
        >>> weights = replace(weights_of({}), runtime="llama.cpp", architecture="gemma3")
        >>> elsewhere(weights, "vision_tower.post_layernorm.weight")
        'llama.cpp keeps what is not text in a second file (mmproj)'
        >>> elsewhere(weights, "model.norm.weight")
        ''
    """
    words = name.split(".")
    ends = (".".join(words[place:]) for place in range(len(words))) if weights.unread else ()
    if (why := next((weights.unread[end] for end in ends if end in weights.unread), None)) is not None:
        return f"not read: {why}"
    entry = _entry(weights, "elsewhere", name)
    return entry["where"] if entry else ""


def _entry(weights: Weights, kind: str, name: str) -> dict[str, Any] | None:
    """The first entry of one kind that holds for a name, in the table of the weights' runtime."""
    entries: list[dict[str, Any]] = runtimes().get(weights.runtime, {}).get(kind, [])
    for entry in entries:
        is_of_architecture = weights.architecture in entry.get("architectures", (weights.architecture,))
        if is_of_architecture and weights.architecture not in entry.get("other_architectures", ()):
            is_named, is_excepted = (
                any(fnmatchcase(name, each) for each in entry.get(key, ())) for key in ("names", "but")
            )
            if is_named and not is_excepted:
                return entry
    return None


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
    """The meaning of a relation of two gains, and whether it is right; None where that is undecided.

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
