"""What a case is: the truth, what a good tool says first, and what it is shown."""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Draw(random.Random):
    """The random choices of one case: they follow from the seed of the draw and the name of the case alone."""

    def __init__(self, seed: int, name: str, models: Path | None) -> None:
        super().__init__(f"{seed}:{name}")
        self.models = models
        torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


@dataclass
class Scene:
    """What `nk.inspect` is shown: a model and its input; `places` are the planted paths, empty where the whole is
    wrong."""

    model: nn.Module
    batch: Any
    places: Sequence[str] = ()
    sound: nn.Module | None = None
    note: str = ""


@dataclass
class Run:
    """What `nk.watch` is shown: a training run, step by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    steps: int
    places: Sequence[str] = ()
    every: int = 10
    before: Callable[[int], None] = lambda _step: None
    after_backward: Callable[[int], None] = lambda _step: None
    clears: bool = True
    parts: int = 1
    note: str = ""


@dataclass
class Single:
    """What `nk.identify` is shown, with the fields that are true; or `nk.testing.violations`, with the spec it is
    held to."""

    norm: Any
    shape: int | tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Sequence[str] = ()
    spec: Any = None
    skip: Sequence[str] = ()
    weight: Tensor | None = None
    bias: Tensor | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One case: its function, and what was said of it before anything ran."""

    name: str
    kind: str
    verb: str
    build: Callable[[Draw], Any]
    truth: str
    say: str = ""
    words: tuple[str, ...] = ()
    seeable: bool = True
    innocent: bool = False
    clean: bool = False
    needs: tuple[str, ...] = ()
    unchecked: str = ""


CASES: dict[str, Case] = {}


def _register(build: Callable[[Draw], Any], **facts: Any) -> Callable[[Draw], Any]:
    name = build.__name__
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = Case(name=name, build=build, truth=" ".join((build.__doc__ or "").split()), **facts)
    return build


def fault(
    kind: str,
    *words: str,
    say: str,
    verb: str = "inspect",
    seeable: bool = True,
    innocent: bool = False,
    needs: Sequence[str] = (),
    unchecked: str = "",
) -> Callable[[Callable[[Draw], Any]], Callable[[Draw], Any]]:
    """Register a fault.

    Args:
        kind: The row of the table.
        words: Patterns; one of them in the title, measured text or evidence of a finding means that it names the fault.
        say: What a good tool would say first.
        verb: inspect, watch, identify or violations.
        seeable: Whether any tool could see it without a reference.
        innocent: It is no norm's fault, and no norm must be blamed.
        needs: Real models that it uses.
        unchecked: Pattern of a line that says that this is not checked: right where no tool could see the fault.
    """
    facts = {"kind": kind, "verb": verb, "say": say, "words": words, "seeable": seeable, "innocent": innocent}
    return lambda build: _register(build, **facts, needs=tuple(needs), unchecked=unchecked)


def clean(verb: str = "inspect", needs: Sequence[str] = ()) -> Callable[[Callable[[Draw], Any]], Callable[[Draw], Any]]:
    """Register a case in which nothing is wrong: an error or a warning there is a false alarm."""
    return lambda build: _register(build, kind=f"healthy, {verb}", verb=verb, clean=True, needs=tuple(needs))


def get(model: nn.Module, path: str) -> nn.Module:
    """The module at a path."""
    return model.get_submodule(path)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def norm_paths(model: nn.Module, ending: str = "") -> list[str]:
    """Paths of the modules whose class is called a norm, in the order of the model; those that end so."""
    return [
        path
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not list(module.children()) and path.endswith(ending)
    ]
