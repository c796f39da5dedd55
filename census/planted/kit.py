"""What a case of the catalogue is, how cases are registered, and how a draw is made."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class Subject:
    """A model with what it is run on, and what a case says of it."""

    model: Any = None
    batches: list = field(default_factory=list)
    processors: list = field(default_factory=list)
    where: tuple[str, ...] = ()  # paths at which the fault is, each of them right
    edit: Callable[[Path], None] | None = None  # what is done to the saved folder
    arguments: tuple[str, ...] = ()  # further arguments of the command
    sites: int | None = None  # norms over rows that should be found, for clean ones
    batch_norms: int | None = None
    placement: str = ""  # what each block should be called
    row: str = ""  # what one row is, for most norms


@dataclass(frozen=True)
class Case:
    """One case: how it is built, and what is true of it."""

    family: str
    name: str
    sort: str  # clean, fault, unseeable, oddity, other (a fault that is not a norm's)
    how: str  # folder, code, python, watch
    truth: str
    ideal: str
    say: tuple[str, ...]  # patterns: a finding that names the fault matches one of them
    build: Callable
    mild: bool = False  # a note is as much as one may say

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"


CASES: dict[str, Case] = {}
SUBJECTS: dict[str, Callable[[random.Random, int], Subject]] = {}


def subject(family: str) -> Callable:
    """Register the function that makes the clean subject of a family: (rng, seed) -> Subject."""

    def register(function: Callable) -> Callable:
        SUBJECTS[family] = function
        return function

    return register


def case(
    family: str, name: str, how: str, truth: str, *say: str, ideal: str = "", sort: str = "fault", mild: bool = False
) -> Callable:
    """Register a case; the function gets (rng, subject) and changes the subject."""

    def register(function: Callable) -> Callable:
        made = Case(family, name, sort, how, " ".join(truth.split()), ideal, say, function, mild)
        if made.id in CASES:
            raise ValueError(f"{made.id} is there twice")
        CASES[made.id] = made
        return function

    return register


def clean(family: str, how: str, truth: str = "healthy") -> None:
    """Register the clean case of a family."""
    case(family, "clean", how, truth, sort="clean", ideal="no finding above a note")(lambda rng, subject: None)


def build(identifier: str, seed: int) -> Subject:
    """Make the subject of a case, the same for the same seed in every process."""
    made = CASES[identifier]
    rng = random.Random(f"{seed} {identifier}")
    torch.manual_seed(rng.randrange(2**31))
    drawn = SUBJECTS[made.family](rng, seed) if made.family in SUBJECTS else Subject()
    made.build(rng, drawn)
    if isinstance(drawn.model, nn.Module):
        drawn.model.eval()
    return drawn


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm, live or frozen."""
    return "BatchNorm" in type(module).__name__


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """Norms over rows: path -> module, of torch's and transformers' classes."""
    kinds = ("LayerNorm", "RMSNorm", "GroupNorm")
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__.endswith(kinds) and not any(module.children())
    }


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Batch norms: path -> module."""
    return {path: module for path, module in model.named_modules() if is_batch_norm(module)}


def replace(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put another module at a path."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent) if parent else model
    if name.isdigit() and isinstance(holder, nn.Sequential | nn.ModuleList):
        holder[int(name)] = new
    else:
        setattr(holder, name, new)


def draw(rng: random.Random, paths: Any, *parts: str, without: tuple[str, ...] = ()) -> str:
    """Draw one path that contains all parts and none of the others."""
    found = [p for p in paths if all(part in p for part in parts) and not any(part in p for part in without)]
    return rng.choice(sorted(found))


def fresh(norm: nn.Module) -> None:
    """Give a norm the values it had before training."""
    with torch.no_grad():
        norm.weight.fill_(1.0)
        if getattr(norm, "bias", None) is not None:
            norm.bias.zero_()
