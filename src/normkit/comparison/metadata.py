"""The metadata beside the parameters of a port and its reference: eps of each norm, architecture, formats.

The eps that transformers' class of a model uses is read off the class itself, built without values: some classes have
an eps of their own for some norms, whatever config.json says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.opening import model_class
from normkit.comparison.gguf_file import Fault, faults_of
from normkit.comparison.parameter_pairs import pair_paths
from normkit.comparison.runtimes import OWN
from normkit.comparison.settings import SAME, Setting, compare_settings
from normkit.comparison.weights import Weights, eps_of_module
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family
from normkit.models.norm_classes import declared, key_of
from normkit.show.parts import Fact
from normkit.text import counted, shortened


@dataclass(frozen=True, kw_only=True)
class EpsPair:
    """The eps of a norm on both sides."""

    path: str
    """Path of the norm in the port."""
    reference_path: str
    """Path of the norm in the reference."""
    stored: float | None
    """The eps stored beside the port's parameters; None if none is."""
    used: float | None
    """The eps of the port's class in transformers; None if transformers does not run the port, or not this norm."""
    reference_stored: float | None
    """The eps stored beside the reference's parameters."""
    reference_used: float | None
    """The eps of the reference's class in transformers."""

    @property
    def given(self) -> float | None:
        """The port's eps: what its class uses, else what is stored."""
        return self.stored if self.used is None else self.used

    @property
    def expected(self) -> float | None:
        """The reference's eps: what its class uses, else what is stored."""
        return self.reference_stored if self.reference_used is None else self.reference_used

    @property
    def is_same(self) -> bool | None:
        """Whether both are the same number; None if one is not known."""
        return is_same(self.given, self.expected)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "is_same": self.is_same}


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a port and its reference."""

    port: str
    reference: str
    runtimes: tuple[str, str]
    """Who reads the port, and who the reference; "" if that is not known."""
    architectures: tuple[str, str]
    """The architecture of each, as its form names it; "" if it names none."""
    eps: tuple[EpsPair, ...]
    """One entry for each norm with a counterpart."""
    settings: tuple[Setting, ...] = ()
    """The settings that both state and that differ, those that compute something else first."""
    notes: tuple[str, ...] = ()
    """The parts that could not be compared, and why."""
    faults: tuple[Fault, ...] = ()
    """The faults other than the eps of single norms."""

    @property
    def differs(self) -> bool:
        """Whether an eps or a setting that changes what is computed differs, or something else is wrong."""
        has_other_setting = any(each.computes for each in self.settings)
        return bool(self.faults) or has_other_setting or any(each.is_same is False for each in self.eps)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "port": self.port,
            "reference": self.reference,
            "runtimes": [*self.runtimes],
            "architectures": [*self.architectures],
            "differs": self.differs,
            "eps": [each.to_json() for each in self.eps],
            "settings": [each.to_json() for each in self.settings],
            "notes": [*self.notes],
            "faults": [each.to_json() for each in self.faults],
        }


def compare_metadata(
    port: Weights, reference: Weights, pairs: Sequence[tuple[str, str]], holding: Collection[str] = ()
) -> Metadata:
    """Compare what is written beside the parameters of a port and its reference.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        pairs: Paths of norms, in the port and in the reference, as `compare_values` pairs them.
        holding: Names of the port's matrices that hold a gain of the reference.

    Example:
        >>> from dataclasses import replace
        >>> from normkit.comparison.weights import weights_of
        >>> port, reference = (replace(weights_of({}), eps={"": eps}) for eps in (1e-5, 1e-6))
        >>> compare_metadata(port, reference, [("norm", "model.norm")]).differs
        True
    """
    notes: list[str] = []
    pairs = [*dict.fromkeys(pairs)]
    used = _used(port, [one for one, _ in pairs], notes)
    used_there = _used(reference, [other for _, other in pairs], notes)
    return Metadata(
        port=port.name,
        reference=reference.name,
        runtimes=(port.runtime, reference.runtime),
        architectures=(port.architecture, reference.architecture),
        eps=tuple(
            EpsPair(
                path=one,
                reference_path=other,
                stored=port.eps.get(one, port.eps.get("")),
                used=used.get(one),
                reference_stored=reference.eps.get(other, reference.eps.get("")),
                reference_used=used_there.get(other),
            )
            for one, other in pairs
        ),
        settings=compare_settings(port, reference, holding),
        notes=tuple(notes),
        faults=tuple(faults_of(port, reference)) if pairs else (),
    )


def is_same(one: float | None, other: float | None) -> bool | None:
    """Whether two eps are one number, as far as float32 and decimals of seven digits tell; None if one is missing."""
    if one is None or other is None:
        return None
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def eps_as_declared(weights: Weights) -> dict[str, float]:
    """Path of a norm -> its eps by the file of its family: as `eps_of_classes`, seconds faster, without transformers.

    Raises:
        ModelError: If no file declares the family, or these tensors are not as it declares them.
    """
    if not weights.settings.get("architectures"):
        raise ModelError(f"expected architectures in the config.json of {weights.name}, found none; add them")
    shapes = {name: info.shape for name, info in weights.source.tensors.items()}
    graph = expand(declared_family(weights.architecture), weights.settings, shapes)
    return {norm.name: norm.eps for norm in graph.norms if norm.eps is not None}


def eps_of_classes(settings: Mapping[str, Any], name: str) -> dict[str, float]:
    """Path of a norm -> the eps that the class which a config.json names uses; the class is built without values.

    Raises:
        ModelError: If transformers does not have the class, or cannot build it.
    """
    if not isinstance(settings.get("model_type"), str) or not settings.get("architectures"):
        raise ModelError(f"expected model_type and architectures in the config.json of {name}, found none; add them")
    with quiet_libraries():
        config, class_ = model_class(dict(settings), Path(name))
        try:
            with torch.device("meta"):
                model = class_(config)
        except Exception as error:  # a configuration can fail in as many ways as there are models
            raise ModelError(f"transformers cannot build {class_.__name__} of {name}: {error}") from error
    known = declared()
    return {
        path: eps
        for path, module in model.named_modules()
        if key_of(type(module).__module__, type(module).__name__) in known
        and (eps := eps_of_module(module)) is not None
    }


def metadata_facts(found: Metadata) -> list[Fact]:
    """The metadata in words: eps, the architecture, classes that ignore it, settings."""
    facts = [Fact(each.label, each.words, "error") for each in found.faults if each.label == "eps"]
    is_told = bool(facts)
    for (given, expected), paths in _grouped((each.given, each.expected, each.path) for each in found.eps):
        at = f"at all {len(paths)} norms" if len(paths) == len(found.eps) > 1 else f"at {_where(paths)}"
        match is_same(given, expected):
            case True:
                facts.append(Fact("eps", f"{_number(given)} {at}", "good"))
            case False:
                facts.append(Fact("eps", f"{_number(given)} instead of {_number(expected)} {at}", "error"))
            case None if not is_told:
                lacks = "neither side states one" if given is expected is None else "one side states none"
                facts.append(Fact("eps", f"{_number(given)} against {_number(expected)} {at}: {lacks}", "note"))
    facts += [Fact(each.label, each.words, "error") for each in found.faults if each.label != "eps"]
    for name, entries in (
        (found.port, [(each.used, each.stored, each.path) for each in found.eps]),
        (found.reference, [(each.reference_used, each.reference_stored, each.reference_path) for each in found.eps]),
    ):
        for (used, stored), paths in _grouped(each for each in entries if is_same(*each[:2]) is False):
            words = f"{name} states eps {_number(stored)}, its class uses {_number(used)} at {_where(paths)}"
            facts.append(Fact("class", words, "note"))
    return facts + [Fact("setting", each.words, "error" if each.computes else "note") for each in found.settings]


def _used(weights: Weights, paths: Sequence[str], notes: list[str]) -> dict[str, float]:
    """Path of a norm in the file -> the eps that transformers' class uses; nothing where it does not run these.

    A module has eps of its own, which it uses whatever the class makes of its configuration.
    """
    if weights.runtime != OWN or not weights.settings:
        return {}
    try:
        used = eps_as_declared(weights)
    except ModelError:
        try:
            used = eps_of_classes(weights.settings, weights.name)
        except ModelError as error:
            notes.append(f"what the class of {weights.name} uses is not known: {error}")
            return {}
    # Prefixes differ between a file and the class.
    known = [*used]
    pairs = [(paths[place], known[other]) for place, other in pair_paths(paths, known)]
    return {path: used[other] for path, other in pairs if path not in weights.eps}


def _grouped(
    entries: Iterable[tuple[float | None, float | None, str]],
) -> list[tuple[tuple[float | None, float | None], list[str]]]:
    """The paths by their two numbers, the most first."""
    groups: dict[tuple[float | None, float | None], list[str]] = defaultdict(list)
    for one, other, path in entries:
        groups[(one, other)].append(path)
    return sorted(groups.items(), key=lambda item: (is_same(*item[0]) is not False, -len(item[1])))


def _where(paths: list[str]) -> str:
    """The norms, or how many and of which kinds: there is one of each kind in every layer."""
    kinds = sorted({path.rpartition(".")[2] for path in paths})
    return shortened(paths) if len(paths) <= 2 else f"{counted(len(paths), 'norm')}: {shortened(kinds)}"


def _number(eps: float | None) -> str:
    return "none" if eps is None else f"{eps:.7g}"
