"""The studies by name, in the order in which they build on each other; each is loaded on demand."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from normkit.errors import InputError
from normkit.text import offer

if TYPE_CHECKING:
    from normkit.study.result import Study


@dataclass(frozen=True)
class Entry:
    """The facts about a study that are known before it is loaded."""

    asks: str
    """Its question in a few words."""
    seconds: int
    """On one core with the quick budget, measured on 2 virtual cores (AVX-512) on 2026-11-22."""
    module: str
    """Its module in `experiments`."""


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
}

NAMES = tuple(CATALOGUE)


def load(name: str) -> Study:
    """The study of this name.

    Raises:
        InputError: If there is none; the nearest name is offered.
    """
    if name not in CATALOGUE:
        raise InputError(f"no study is called {name!r}; {offer(name, NAMES, 'normkit study --list')}")
    study: Study = import_module(f"normkit.study.experiments.{CATALOGUE[name].module}").STUDY
    return study
