"""One training step from the command line: one batch forward and backward under a watch; no weight changes."""

from __future__ import annotations

import dataclasses
import inspect as signatures
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.errors import InputError, ModelError
from normkit.identification.products import quick_products
from normkit.identification.state import buffers_kept, in_mode
from normkit.inspection.result import Inspection
from normkit.measurement.running import evaluating
from normkit.measurement.texts import Batches, check_runs
from normkit.rules import ranked
from normkit.rules.finding import Status
from normkit.watching.watcher import watch

_TOLD_FIRST: tuple[Status, ...] = ("finding", "clean", "not applicable", "not checked")


def training_step(loaded: LoadedModel, batches: Batches) -> Inspection:
    """Watch one forward and one backward pass of a loaded model in training mode, on its first batch.

    Dropout draws from a fixed seed; weights, buffers, gradients and random numbers are as they were afterwards.

    Raises:
        ModelError: If the model cannot be run or differentiated.
        InputError: If it has no loss that its input alone gives.
    """
    model, batch = loaded.model, batches.batches[0]
    with quiet_libraries(), evaluating(model):
        check_runs(model, batch)
    with quiet_libraries(), _untouched(model), torch.random.fork_rng(devices=[]), quick_products(model):
        torch.manual_seed(0)
        with watch(model, every=1, batch=batch, name=loaded.name, say=lambda _: None) as run:
            try:
                loss = _loss(model, batch)
                torch.autograd.backward(loss)
            except InputError:
                raise
            # A batch norm refuses a single value per channel with a ValueError.
            except (RuntimeError, ValueError) as error:
                raise ModelError(f"{type(model).__name__} cannot be differentiated ({error})") from error
            run.step(loss.detach())
            return run.inspection()


def joined(inspection: Inspection, step: Inspection) -> Inspection:
    """An inspection joined with a watched training step, and the findings of both."""
    known = {finding.rule for finding in inspection.findings}
    findings = [*inspection.findings, *(finding for finding in step.findings if finding.rule not in known)]
    seen = {check.rule: check for check in step.checks}
    return dataclasses.replace(
        inspection,
        findings=ranked(findings),
        checks=tuple(
            min(check, seen.get(check.rule, check), key=lambda either: _TOLD_FIRST.index(either.status))
            for check in inspection.checks
        ),
        training=step.training,
    )


@contextmanager
def _untouched(model: Any) -> Iterator[None]:
    """Context manager: training mode with gradients inside; modes, gradients and buffers are restored after it."""
    needed = {parameter: parameter.requires_grad for parameter in model.parameters()}
    with evaluating(model), in_mode(model, training=True), buffers_kept(model):
        try:
            for parameter in needed:
                parameter.requires_grad_(parameter.is_floating_point())
            yield
        finally:
            for parameter, wanted in needed.items():
                parameter.grad = None
                parameter.requires_grad_(wanted)


def draws_labels(batch: Mapping[str, Any]) -> bool:
    """Whether a training step needs classes that nobody told: of images or sound without token ids."""
    return "input_ids" not in batch and "decoder_input_ids" not in batch


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss on its token ids, or the cross-entropy of the next id; of a class drawn at random."""
    if draws_labels(batch):
        logits = getattr(model(**batch), "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
            raise InputError(
                f"{type(model).__name__} has no loss that its input alone gives; leave out --train-step, or put "
                "nk.watch around your own loop"
            )
        return F.cross_entropy(logits.float(), torch.randint(logits.shape[1], (len(logits),)).to(logits.device))
    ids = batch.get("input_ids", batch.get("decoder_input_ids"))
    assert ids is not None
    # A logit for every token of the vocabulary: then labels are token ids and not classes.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and "input_ids" in batch and "labels" in signatures.signature(model.forward).parameters:
        loss = getattr(model(**batch, labels=ids), "loss", None)
        if isinstance(loss, Tensor):
            return loss
    logits = getattr(model(**batch), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.shape[-1] <= int(ids.max()):
        raise InputError(
            f"{type(model).__name__} has no loss that token ids alone give; leave out --train-step, or put nk.watch "
            "around your own loop"
        )
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
