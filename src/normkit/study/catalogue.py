"""The studies by name, each loaded on demand, and their settings: the defaults of a budget, changed by `--set`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from normkit.errors import InputError
from normkit.text import offer

if TYPE_CHECKING:
    from normkit.study.arm_context import Setting, Settings
    from normkit.study.result import Study

Budget = Literal["quick", "standard", "full"]


@dataclass(frozen=True)
class Entry:
    """The facts about a study that are known before it is loaded."""

    asks: str
    """Its question in a few words."""
    seconds: int
    """On one core with the quick budget, measured on 2 virtual cores (AVX-512) on 2026-11-22."""
    module: str
    """Its module in `experiments`."""


# In the order in which they build on each other.
CATALOGUE = {
    "invariances": Entry("what a norm leaves unchanged: Ba's table", 10, "invariances"),
    "gradients": Entry("the backward pass as a projection, and what it does to steps", 70, "gradients"),
    "depth": Entry("activations and gradients over 2 to 48 layers", 55, "depth"),
    "warmup": Entry("does Post-LN need warm-up, and Pre-LN not", 300, "warmup"),
    "learning-rate": Entry("how far the learning rate may be off, with and without norms", 300, "learning_rate"),
    "final-norm": Entry("the norm before the unembedding, on and off", 80, "final_norm"),
    "initialisation": Entry("gains and biases that start elsewhere than at 1 and 0", 130, "initialisation"),
    "attention": Entry("attention scores and entropy as the input grows", 2, "attention"),
    "epsilon": Entry("size and place of epsilon against the scale of the input", 40, "epsilon"),
    "centring": Entry("LayerNorm against RMSNorm and other hyperplanes", 190, "centring"),
    "affine": Entry("gain and bias on and off", 90, "affine"),
    "batch-vs-layer": Entry("BatchNorm against LayerNorm over batch sizes and models", 230, "batch_against_layer"),
    "noise": Entry("injected covariate shift after BatchNorm", 100, "noise"),
    "late-blocks": Entry("what late blocks do, with LayerNorm Scaling and Mix-LN", 40, "late_blocks"),
    "placement": Entry("Peri-LN and HybridNorm beside Pre-LN and Post-LN", 30, "placement"),
    "removal": Entry("LayerNorm taken out at the end of training", 40, "removal"),
    "data-size": Entry("Dynamic Tanh in place of LayerNorm, on little text and much", 55, "data_size"),
    "gradient-rise": Entry("weight decay and gradients that rise as the rate falls", 25, "gradient_rise"),
    "tangent-steps": Entry("steps that keep the length of weights, with and without a norm", 35, "tangent_steps"),
    "selectable-keys": Entry("a majority, and keys that no query can select", 50, "selectable_keys"),
    "massive": Entry("massive activations and attention sinks of a trained model", 5, "massive"),
    "entropy": Entry("attention entropy and sigma-reparametrization", 55, "entropy"),
}

NAMES = tuple(CATALOGUE)

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def load(name: str) -> Study:
    """The study of this name.

    Raises:
        InputError: If there is none; the nearest name is offered.
    """
    if name not in CATALOGUE:
        raise InputError(f"no study is called {name!r}; {offer(name, NAMES, 'normkit study --list')}")
    study: Study = import_module(f"normkit.study.experiments.{CATALOGUE[name].module}").STUDY
    return study


def settings_of(study: Study, budget: Budget = "standard", changed: Mapping[str, str] | None = None) -> Settings:
    """All settings of a study; each keeps the type of its default.

    Args:
        study: A study.
        budget: Which of its sets of defaults; quick has three seeds, and standard the same sizes with ten, unless the
            study says otherwise.
        changed: Name -> text of the value; names that the study does not have are skipped.

    Raises:
        InputError: If a text is not a value of its setting's type.
    """
    from normkit.study.result import SEEDS

    ten = {"seeds": max(SEEDS, study.quick["seeds"])}
    settings = {**study.quick, **{"quick": {}, "standard": {**ten, **study.standard}, "full": study.full}[budget]}
    for name, text in (changed or {}).items():
        if name in settings:
            settings[name] = _typed(name, text, settings[name])
    check_seeds(settings["seeds"])
    return settings


def assignments(texts: Sequence[str], studies: Sequence[Study]) -> dict[str, str]:
    """Name -> text of the value, of each text "name=value" after `--set`.

    Raises:
        InputError: If a text is not of this form, a name comes twice, or none of the studies has it; the nearest name
            is offered.
    """
    known = tuple(dict.fromkeys(name for study in studies for name in study.quick))
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"--set takes name=value, as in steps=100, got {text!r}")
        if name not in known:
            of = f"{studies[0].name} has" if len(studies) == 1 else "these studies have"
            raise InputError(f"{of} no setting {name!r}; {offer(name, known)}")
        if name in found:
            raise InputError(f"--set {name} is given twice: {found[name]} and {value}; give it once")
        found[name] = value
    return found


def check_seeds(seeds: Setting) -> int:
    """The number of seeds.

    Raises:
        InputError: If it is below one.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds must be a whole number from 1, got {seeds}")
    return seeds


def _typed(name: str, text: str, default: Setting) -> Setting:
    """The value that a text gives a setting, of the type of its default."""
    is_whole = isinstance(default, tuple) and all(isinstance(member, int) for member in default)
    try:
        if isinstance(default, bool):
            return _BOOLEANS[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return _finite(text)
        if isinstance(default, str):
            return text
        parts = text.removesuffix(",").split(",")
        return tuple(map(int, parts)) if is_whole else tuple(map(_finite, parts))
    except (ValueError, KeyError):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}.get(type(default))
        if isinstance(default, tuple):
            shown = ",".join(f"{member:g}" for member in default)
            words = f"{'whole ' if is_whole else ''}numbers with commas between, as in {shown}"
        raise InputError(f"{name} takes {words}, got {text!r}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number
