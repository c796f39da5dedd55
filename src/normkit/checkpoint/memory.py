"""`nk.fold`: a model in memory, changed by the same plan and the same arithmetic as a checkpoint on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from normkit.checkpoint.applying import Outcome, made, vectors
from normkit.checkpoint.arithmetic import all_finite, one_thread_an_operation, partition
from normkit.checkpoint.matrices import factors
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.plan import Plan, TensorEdit, VectorEdit
from normkit.checkpoint.planning import DTYPE_KEYS, make_plan
from normkit.checkpoint.source import ModelSource, check_finite
from normkit.checkpoint.swaps import KEY, replay
from normkit.errors import InputError
from normkit.spec import NormSpec

_EPS = ("eps", "variance_epsilon")


@dataclass(frozen=True, kw_only=True, eq=False)
class Folding:
    """What was done to a model, and what undoes it: `nk.fold(model, inverse=folding)`.

    Attributes:
        plan: What became of each tensor and each norm, and what was refused and why.
        vectors: Gains and biases as they were, by name.
        columns: What a gain of zero has wiped out of a matrix, by its name.
        norms: Path -> the LayerNorm that an RMSNorm has replaced.
    """

    plan: Plan
    vectors: dict[str, Tensor]
    columns: dict[str, Tensor]
    norms: dict[str, nn.Module]

    def __str__(self) -> str:
        """Norms folded and refusals, a line each."""
        done = [norm for norm in self.plan.norms if {norm.gain, norm.bias} & {"folded", "divided"}]
        rms = sum(norm.becomes_rms for norm in self.plan.norms)
        lines = [f"{len(done)} of {len(self.plan.norms)} norms folded, {rms} made RMSNorms"]
        lines += [f"left: {refusal.place} ({refusal.operation}): {refusal.reason}" for refusal in self.plan.refusals]
        return "\n".join(lines)


def fold(
    model: nn.Module,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    for_training: bool = False,
    inverse: Folding | None = None,
) -> Folding:
    """Fold the norms of a model of transformers into the linear maps that read them; in place, exactly.

    W (g * z + b) + c = (W diag(g)) z + (c + W b), and what is said in `Operation`. The bits are those that
    `normkit fold` writes for the same model on disk. Equal in evaluation mode.

    Args:
        model: Of a declared family (`normkit.models.catalogue.names()`).
        operations: Any of "gain" and "bias" (of the norms within), "final" (the norm before the head), "centre" (all
            that is written to a sum that only LayerNorms read), "rms" (LayerNorms become RMSNorms), "value" (the bias
            of values moves behind the attention). None: "gain", "bias" and "final".
        untie: Give a tied head a table of its own.
        for_training: The model is to be trained further: dropout is then an error.
        inverse: Undo this folding instead: norms, gains and biases come back bit for bit, W is divided by g and
            rounded once. What was centred stays so, as no LayerNorm sees it, and a head that was untied keeps its own.

    Returns:
        What was done, and what undoes it.

    Raises:
        KindError: If it is no model of transformers.
        ModelError: If the model's family is not declared, or its weights are not finite.
        InputError: If nothing can be done, with the reason; or a LayerNorm that is to be an RMSNorm was given another
            eps than its config's.

    Source:
        Jiang et al. 2023, arXiv:2305.14858, for LayerNorm -> RMSNorm; the conditions: docs/explanation/folding.md.
    """
    if inverse is not None:
        return _undo(model, inverse)
    graph, config, source = open_model(model)
    plan = make_plan(
        graph,
        config,
        source,
        operations=operations,
        untie=untie,
        for_training=for_training,
        change_class=False,
    )
    require_change(plan)
    _require_eps(model, plan)
    with one_thread_an_operation():
        return _apply(model, plan, source)


def require_change(plan: Plan) -> None:
    """Refuse a plan that does nothing because nothing may be done.

    Raises:
        InputError: With the first reason.
    """
    if (
        plan.refusals
        and not plan.swaps
        and all(path.rpartition(".")[2] in DTYPE_KEYS for path in plan.config)
        and all(edit.relation == "identical" for edit in plan.edits)
    ):
        first, more = plan.refusals[0], len(plan.refusals) - 1
        rest = f" (and {more} more)" if more else ""
        raise InputError(f"nothing of what was asked can be done: {first.place}: {first.reason}{rest}")


def _require_eps(model: nn.Module, plan: Plan) -> None:
    """An RMSNorm gets the eps that its family's file gives; a module that was given another by hand would lose it."""
    for path, spec in plan.swaps.items():
        module = model.get_submodule(path)
        eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), spec["eps"])
        if eps != spec["eps"]:
            raise InputError(
                f"expected eps {spec['eps']:g} in {path}, as its class and config have it, got {eps:g}: it was set by "
                "hand; set it back, or fold without rms"
            )


def _apply(model: nn.Module, plan: Plan, source: ModelSource) -> Folding:
    state = model.state_dict()
    matrices = [edit for edit in plan.edits if isinstance(edit, TensorEdit) and _is_change(edit, source)]
    for edit in matrices:
        # Before anything is changed: a fault in the last matrix would leave the model half folded.
        _require_possible(edit, source)
    new = vectors(plan, source)
    before = {edit.name: state[edit.name].clone() for edit in plan.edits if isinstance(edit, VectorEdit)}
    columns: dict[str, Tensor] = {}
    with torch.no_grad():
        # A head of its own is made from the table before that is centred.
        for edit in sorted(matrices, key=lambda edit: edit.name in source.tensors):
            if edit.name not in source.tensors:
                state[edit.name] = _give_own(model, edit.name, state[edit.source])
            if edit.gain is not None and edit.gain_axis is not None:
                lost = (factors(edit.gain, before[edit.gain.weight].cpu()) == 0).nonzero().flatten()
                lost = lost.to(state[edit.name].device)
                columns[edit.name] = state[edit.source].index_select(edit.gain_axis, lost)
            _write(edit, source, state[edit.name])
        for name in before:
            if name not in source.tensors:
                state[name] = _give_own(model, name, state[name])
            state[name].copy_(new[name].value)
    norms = {path: model.get_submodule(path) for path in plan.swaps}
    replay(model, {path: NormSpec.from_json(spec) for path, spec in plan.swaps.items()}, "the plan")
    _configure(model, plan)
    return Folding(plan=plan, vectors=before, columns=columns, norms=norms)


def _require_possible(edit: TensorEdit, source: ModelSource) -> None:
    """Refuse NaN and infinity in a matrix, and in what is made of it: float16 is soon too narrow for a product."""
    if edit.dtype == "F16":
        deque(made(edit, source, Outcome()), maxlen=0)
        return
    for start, stop in partition(*source.tensors[edit.source].matrix):
        rows = source.rows(edit.source, start, stop)
        if not all_finite(rows):
            check_finite(edit.source, rows)


def _is_change(edit: TensorEdit, source: ModelSource) -> bool:
    return edit.relation != "identical" or edit.name not in source.tensors


def _write(edit: TensorEdit, source: ModelSource, target: Tensor) -> None:
    if not target.is_contiguous():
        target.copy_(torch.cat(list(made(edit, source, Outcome()))).view(target.shape))
        return
    rows, start = target.view(source.tensors[edit.source].matrix), 0
    for chunk in made(edit, source, Outcome()):
        rows[start : start + len(chunk)] = chunk
        start += len(chunk)


def _give_own(model: nn.Module, name: str, table: Tensor) -> Tensor:
    """A parameter of its own for a head that shared it."""
    path, _, last = name.rpartition(".")
    parameter = nn.Parameter(table.clone())
    setattr(model.get_submodule(path), last, parameter)
    return parameter.data


def _configure(model: Any, plan: Plan) -> None:
    for path, value in plan.config.items():
        *above, key = path.split(".")
        setattr(attrgetter(".".join(above))(model.config) if above else model.config, key, value)


def _undo(model: nn.Module, folding: Folding) -> Folding:
    for path, norm in folding.norms.items():
        model.set_submodule(path, norm)
    state = model.state_dict()
    with torch.no_grad():
        for edit in folding.plan.edits:
            if isinstance(edit, TensorEdit) and edit.gain is not None and edit.gain_axis is not None:
                by = factors(edit.gain, folding.vectors[edit.gain.weight].cpu())
                _divide(state[edit.name], edit.gain_axis, by, folding.columns[edit.name])
        for name, value in folding.vectors.items():
            state[name].copy_(value)
    if folding.norms:
        delattr(model.config, KEY)
    return folding


def _divide(matrix: Tensor, axis: int, by: Tensor, lost: Tensor) -> None:
    shape = [1] * matrix.dim()
    shape[axis] = -1
    by = by.to(matrix.device)
    zero = (by == 0).nonzero().flatten()
    matrix.copy_(matrix.double() / by.view(shape))
    matrix.index_copy_(axis, zero, lost)
