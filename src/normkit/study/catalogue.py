"""The studies by name, in the order in which they tell the story; each is loaded when it is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from normkit.errors import InputError
from normkit.study.result import Study

_MODULES = {
    "invariances": "invariances",
    "gradients": "gradients",
    "depth": "depth",
    "warmup": "warmup",
    "learning-rate": "learning_rate",
    "final-norm": "final_norm",
    "initialisation": "initialisation",
    "attention": "attention",
    "epsilon": "epsilon",
    "centring": "centring",
    "affine": "affine",
    "batch-vs-layer": "batch_against_layer",
    "noise": "noise",
}

NAMES = tuple(_MODULES)


def load(name: str) -> Study:
    """The study of a name.

    Raises:
        InputError: If there is none; the nearest name is offered.
    """
    if name not in _MODULES:
        near = get_close_matches(name, NAMES, n=1)
        offer = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise InputError(f"no study is called {name!r}; {offer}")
    study: Study = import_module(f"normkit.study.experiments.{_MODULES[name]}").STUDY
    return study
