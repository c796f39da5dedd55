"""How a watch begins: processes meet, the model is surveyed, the hooks are put in and tried, the pooling is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normkit.identification.sharding import is_elsewhere
from normkit.measurement.baseline import Baseline, check_fits
from normkit.measurement.intent import Intent, stock_intent
from normkit.measurement.patches import Sharing, find_shared
from normkit.measurement.running import vocabulary
from normkit.measurement.structure import Structure
from normkit.measurement.weights import gain_gradient_errors
from normkit.text import dtype_name, first_line
from normkit.watching.ranks import Ranks
from normkit.watching.rendezvous import is_distributed_run, meet
from normkit.watching.step_recorder import StepRecorder
from normkit.watching.surveying import Arguments, called, insensitive, surveyed
from normkit.watching.verification import verify


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedModel:
    """What is known of a model before its first step."""

    model: nn.Module
    """The model without its wrappers."""
    structure: Structure | None = None
    """What it is made of; None if that could not be found."""
    vocabulary: int = 0
    """Tokens that it embeds, or 0."""
    baseline: Baseline | None = None
    """What it is meant to be."""
    intent: Intent | None = None
    """What the stock class of its config computes."""
    shared: Mapping[str, Sharing] = field(default_factory=dict)
    """Norms that serve several places, by path."""
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    """The error of the gradient of each norm's gain in 16 bits, by path."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Startup:
    """What a watch has once it has begun."""

    watched: WatchedModel
    recorder: StepRecorder | None
    """Measures the model; None where nothing can."""
    ranks: Ranks
    """The processes that train it."""
    is_reporting: bool
    """Whether this process speaks and writes."""
    folder: str
    """Where it writes, within the folder for reports."""
    observer: str
    """What the watch proved of itself, or ""."""
    remarks: tuple[str, ...]
    """What could not be watched, and why."""


def start_up(
    given: nn.Module,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    arguments: Arguments,
    *,
    every: int,
    scaler: Any,
    baseline: Baseline | None,
) -> Startup:
    """Find the norms and put the hooks in; if that fails, the run goes on without a watch, and a remark says so.

    The model comes as the loop calls it and without its wrappers; the arguments are those of one call of it.

    Raises:
        InputError: If the baseline is that of another model.
    """
    rendezvous = meet()
    small = rendezvous.common_arguments(model, arguments.shortened())
    structure, recorder, observer, remarks = None, None, "", []
    # Tables made in inference mode could not be written to in a step.
    with torch.inference_mode(False):
        small = small.detached()
        whole = small if is_distributed_run() else arguments.detached()
        try:
            structure = surveyed(model, small)
        # Any model's own code runs here: a failure on a part of a batch must not end the training.
        except Exception as error:
            try:
                structure = surveyed(model, small := whole)
            except Exception:
                remarks.append(_unfound(error))
        ranks = rendezvous.ranks(given, model, structure)
        watched = WatchedModel(model=model) if structure is None else _described(model, structure, baseline)
        remarks += rendezvous.remarks
        if structure is not None:
            try:
                recorder = StepRecorder(
                    model,
                    structure,
                    optimizers,
                    every=every,
                    scaler=scaler,
                    ranks=ranks,
                    # A sharded weight cannot be doubled in place.
                    invariant=frozenset() if is_distributed_run() else insensitive(model, small),
                )
                recorder.install(given)
                recorder.rehearse(lambda: called(model, small))
                observer = verify(ranks, recorder.tables["rows"].device)
                if not structure.sites:
                    remarks.append(_NO_NORMS)
            # Any model's own code runs here too.
            except Exception as error:
                if recorder is not None:
                    recorder.remove()
                recorder = None
                remarks.append(_unfound(error))
    return Startup(
        watched=watched,
        recorder=recorder,
        ranks=ranks,
        is_reporting=rendezvous.is_first,
        folder=rendezvous.folder,
        observer=observer,
        remarks=tuple(remarks),
    )


_NO_NORMS = "the model has no norm that a spec describes; loss, gradients and updates are watched"


def _unfound(error: Exception) -> str:
    return f"the norms could not be found, so nothing is measured: {first_line(error)}"


def _described(model: nn.Module, structure: Structure, baseline: Baseline | None) -> WatchedModel:
    """A surveyed model with everything that can be known before the first step."""
    check_fits(baseline, [site.path for site in structure.sites])
    # Where another process holds a part of a norm, this one cannot try it alone.
    held = [
        site for site in structure.sites if site.module is None or not any(map(is_elsewhere, site.module.parameters()))
    ]
    dtypes = {path: dtype_name(entering) for path, (entering, _) in structure.layout(is_pooled=True).dtypes.items()}
    return WatchedModel(
        model=model,
        structure=structure,
        vocabulary=vocabulary(model) or 0,
        baseline=baseline,
        intent=stock_intent(model),
        shared=find_shared(model, structure),
        gradient_errors=gain_gradient_errors(held, dtypes),
    )
