"""How a watch begins: processes meet, the model is surveyed, the hooks are put in and tried, the pooling is proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normkit.identification.specimen import first_line
from normkit.inspection.baseline import Baseline
from normkit.inspection.structure import Structure
from normkit.watching.gauging import Gauging
from normkit.watching.meeting import Meeting, is_distributed_run, meet
from normkit.watching.ranks import Ranks
from normkit.watching.subject import Subject, introduced
from normkit.watching.surveying import Arguments, called, insensitive, surveyed
from normkit.watching.verification import verify


@dataclass(frozen=True, eq=False, kw_only=True)
class Wanted:
    """What is to be watched, and how.

    Attributes:
        given: The model as the loop calls it.
        model: The model inside.
        optimizers: Those that train it.
        every: Steps between two reports.
        scaler: The loss scaler, or None.
        baseline: What the model is meant to be, or None.
    """

    given: nn.Module
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    every: int
    scaler: Any
    baseline: Baseline | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Beginning:
    """What a watch has once it has begun.

    Attributes:
        subject: What is known of the model.
        gauging: What measures it; None where nothing can.
        ranks: The processes that train it.
        speaks: This one says and writes what there is to say.
        folder: Where within the report's folder it writes.
        observer: What the watch proved of itself, or "".
        remarks: What could not be watched, and why.
    """

    subject: Subject
    gauging: Gauging | None
    ranks: Ranks
    speaks: bool
    folder: str
    observer: str = ""
    remarks: tuple[str, ...] = ()


def begun(wanted: Wanted, arguments: Arguments) -> Beginning:
    """Find the norms and put the hooks in; where that fails the run goes on, unwatched, and a remark says so.

    Args:
        wanted: What is to be watched.
        arguments: Of a call of the model.

    Raises:
        InputError: If the baseline is that of another model.
    """
    meeting = meet()
    small = meeting.shared(wanted.model, arguments.shortened())
    # Tables made in inference mode could not be written to in a step.
    with torch.inference_mode(False):
        small = small.usual()
        return _met(wanted, meeting, small if is_distributed_run() else arguments.usual(), small)


def _met(wanted: Wanted, meeting: Meeting, arguments: Arguments, small: Arguments) -> Beginning:
    structure, remarks = None, []
    try:
        structure = surveyed(wanted.model, small)
    # Any model's own code runs here: what it cannot do on a part of a batch must not end the training.
    except Exception as error:
        try:
            structure = surveyed(wanted.model, small := arguments)
        except Exception:
            remarks.append(_unfound(error))
    ranks = meeting.ranks(wanted.given, wanted.model, structure)
    subject = Subject(model=wanted.model, structure=None)
    if structure is not None:
        subject = introduced(wanted.model, structure, wanted.baseline)
    unwatched = Beginning(
        subject=subject,
        gauging=None,
        ranks=ranks,
        speaks=meeting.is_first,
        folder=meeting.folder,
        remarks=(*remarks, *meeting.remarks),
    )
    return unwatched if structure is None else _installed(wanted, structure, small, unwatched)


def _installed(wanted: Wanted, structure: Structure, small: Arguments, unwatched: Beginning) -> Beginning:
    gauging = None
    try:
        gauging = Gauging(
            wanted.model,
            structure,
            wanted.optimizers,
            every=wanted.every,
            scaler=wanted.scaler,
            ranks=unwatched.ranks,
            # What is sharded cannot be doubled in place.
            invariant=frozenset() if is_distributed_run() else insensitive(wanted.model, small),
        )
        gauging.install(wanted.given)
        gauging.rehearse(lambda: called(wanted.model, small))
        observer = verify(unwatched.ranks, gauging.tables["rows"].device)
    # Any model's own code runs here too.
    except Exception as error:
        if gauging is not None:
            gauging.remove()
        return replace(unwatched, remarks=(*unwatched.remarks, _unfound(error)))
    bare = () if structure.sites else (_NO_NORMS,)
    return replace(unwatched, gauging=gauging, observer=observer, remarks=(*unwatched.remarks, *bare))


_NO_NORMS = "the model has no norm that a spec describes; loss, gradients and updates are watched"


def _unfound(error: Exception) -> str:
    return f"the norms could not be found, so nothing is measured: {first_line(error)}"
