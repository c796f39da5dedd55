"""A study of milliseconds, for what runs studies: numbers that follow from arm and seed, slow or faulty on demand."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.errors import InputError
from normkit.study import catalogue
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.catalogue import Entry
from normkit.study.chart import Bars, Chart
from normkit.study.result import Arm, Claim, Condition, Decided, Judged, Study, decide
from normkit.study.statistics import Measurement, Paired
from normkit.study.training_run import Recipe

NAMES = ("left, slow", "left/slow", "right")


def arms(settings: Settings) -> tuple[Arm, ...]:
    del settings
    return tuple(Arm(name=name, cost=cost) for name, cost in zip(NAMES, (2.0, 1.0, 1.0), strict=True))


def measure(context: ArmContext, arm: Arm) -> Measurement:
    if arm.name == "right":
        fail(str(context.settings["fault"]))
    steps = context["steps"]
    for step in range(steps):
        time.sleep(context["pause"])
        context.report((step + 1) / steps)
    value = torch.rand(()).item() + NAMES.index(arm.name)
    losses = training(context) if context.settings["trains"] else []
    return {"value": value, "steps": (1, 2), "nothing": math.nan, "threads": torch.get_num_threads(), "losses": losses}


def training(context: ArmContext) -> list[float | None]:
    """The losses of a run that is saved after every step."""
    object.__setattr__(context, "checkpoint_seconds", 0.0)
    generator = torch.Generator().manual_seed(context.seed)
    batches = iter(lambda: (torch.randn(4, 8, generator=generator),), None)

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        time.sleep(context["pause"])
        return (model(batch[0]) - batch[0]).square().mean()

    torch.manual_seed(context.seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return context.train(model, Recipe(steps=context["steps"], learning_rate=0.01), batches, loss_of).losses


def fail(fault: str) -> None:
    match fault:
        case "input":
            raise InputError("expected a better setting; choose another")
        case "bug":
            raise KeyError("of nowhere\nat all")
        case "disk":
            raise OSError(28, "No space left on device", "checkpoint")
        case "memory":
            raise MemoryError
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ended":
            os._exit(3)
        case "asleep":
            Path(f"{os.getpid()}.asleep").touch()
            time.sleep(600)
        case fault if fault.startswith("meets in "):
            meet(Path(fault.removeprefix("meets in ")))
        case "device memory":
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")


def meet(folder: Path) -> None:
    """Wait until another process does the same."""
    (folder / f"{os.getpid()}").touch()
    end = time.monotonic() + 60.0
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < end, "no other process came"
        time.sleep(0.01)


def difference(paired: Paired) -> float:
    return float(paired["right"]["value"] - paired["left, slow"]["value"])


def charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    del settings
    values = tuple((name, tuple(float(paired[name]["value"]) for paired in seeds)) for name in NAMES)
    words = {"title": "Values", "caption": "One a seed.", "description": "The right one is above.", "label": "value"}
    return (Bars(name="values", values=values, **words),)


STUDY = Study(
    name="tiny",
    title="Tiny",
    question="Is the right one more?",
    claims=(
        Claim(
            says="the right one is more",
            source="nobody, 2020",
            conditions=(
                Condition(says="more by 1 at least", statistic=difference, low=1.0),
                Condition(says="shown only", statistic=lambda _: math.nan),
            ),
            ledger=("C0",),
        ),
    ),
    quick={
        "seeds": 2,
        "steps": 2,
        "pause": 0.0,
        "trains": False,
        "rates": (0.1, 1),
        "widths": (2, 4),
        "fault": "none",
    },
    standard={"seeds": 2},
    full={"seeds": 3, "steps": 4},
    arms=arms,
    measure=measure,
    charts=charts,
    data="none",
    regime="nowhere",
)


def install(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the command know "tiny", "other", which is the same, and "needy", which needs what is not there."""
    studies = {"tiny": STUDY, "other": renamed("other"), "needy": renamed("needy", needs=("no_such_package",))}
    known = catalogue.load
    set_attribute(catalogue, "CATALOGUE", {name: Entry(f"asks of {name}", 4, name) for name in studies})
    set_attribute(catalogue, "NAMES", tuple(studies))
    set_attribute(catalogue, "load", lambda name: studies.get(name) or known(name))


def renamed(name: str, **changes: object) -> Study:
    return Study(**{**vars(STUDY), "name": name, **changes})


def decided_claim(claim: Claim, measured: Mapping[int, Paired]) -> Decided:
    """A claim decided alone; a single seed counts twice, so that equal values decide."""
    seeds = list(measured.values())
    return decide([claim], dict(enumerate(seeds * 2 if len(seeds) == 1 else seeds)))[0]


def judged_condition(condition: Condition, measured: Mapping[int, Paired]) -> Judged:
    """A condition decided alone."""
    return decided_claim(Claim(says="", source="", conditions=(condition,)), measured).conditions[0]
