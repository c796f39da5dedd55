"""`nk.fold`: a model in memory, changed by the same plan and the same arithmetic as a checkpoint on disk.

Its batch norms are folded from what one run of it shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.checkpoint.applying import vectors
from normkit.checkpoint.arithmetic import all_finite, one_thread_an_operation, partition
from normkit.checkpoint.batch_norms import FoldProof, plan_batch_norms, prove, set_folded
from normkit.checkpoint.build_model import KEY, replay
from normkit.checkpoint.folding import Workers
from normkit.checkpoint.given_files import GivenTensors
from normkit.checkpoint.matrices import Outcome, factors, made
from normkit.checkpoint.migration import asked_scales
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.orthogonal import asked_matrices
from normkit.checkpoint.plan import FoldPlan, Gain, TensorEdit, VectorEdit
from normkit.checkpoint.planning import BATCH_NORMS_ONLY, asks_batch_norms, make_plan
from normkit.checkpoint.reader import Source, check_finite
from normkit.errors import InputError
from normkit.models.graph import Norm
from normkit.spec import NormSpec

_EPS = ("eps", "variance_epsilon")


@dataclass(frozen=True, kw_only=True, eq=False)
class Folding:
    """A record of a fold, and the values that undo it: `nk.fold(model, inverse=folding)`."""

    plan: FoldPlan
    """The changes of each tensor and each norm, and the refusals with their reasons."""
    vectors: dict[str, Tensor]
    """Gains and biases as they were, by name; for batch norms, the parameters of the maps that took them."""
    columns: dict[str, Tensor]
    """The columns that gains of zero have wiped out of each matrix, by its name."""
    norms: dict[str, nn.Module]
    """Path -> the LayerNorm that an RMSNorm has replaced, or the BatchNorm that is folded."""
    scaled: tuple[str, ...] = ()
    """Paths of the norms that read what is halved, whose eps is changed."""
    proof: FoldProof | None = None
    """For batch norms: how near the outputs of the folded model are to the source's, in float64."""

    def __str__(self) -> str:
        """Norms folded and refusals, one line each."""
        done = f"{self.plan.num_folded} of {len(self.plan.norms)} norms folded"
        done += f", {self.plan.num_rms} made RMSNorms" if self.proof is None else f"; {self.proof}"
        left = [f"left: {refusal.place} ({refusal.operation}): {refusal.reason}" for refusal in self.plan.refusals]
        return "\n".join([done, *left])


def fold(
    model: nn.Module,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    for_training: bool = False,
    inverse: Folding | None = None,
    batch: Any = None,
    halvings: int = 0,
    fixed_eps: bool = False,
    seed: int | None = None,
    matrix: GivenTensors | Tensor | None = None,
    scales: GivenTensors | None = None,
    alpha: float | None = None,
    powers_of_two: bool = False,
) -> Folding:
    """Fold the norms of a model of transformers, or the batch norms of any, into the maps beside them; in place.

    W (g * z + b) + c = (W diag(g)) z + (c + W b). The bits are those that `normkit fold` writes for the same model on
    disk. The folded model is equal in evaluation mode.

    A BatchNorm y = a x + s with running statistics, a = weight / sqrt(running_var + eps), goes into the convolution or
    linear map before it, W' = a W and b' = (b - running_mean) a + bias, else into the one after it, W' = W a and
    b' = b + W s, and an Identity takes its place. What stands beside it is seen in one run on `batch`. A norm stays,
    with the reason, where the fold would not be exact: another reader between, a shared or hooked module, a shift
    into padded zeros.

    Args:
        model: A model of a declared family (`normkit.models.family.declared_types()`); with "batchnorm", any module.
        operations: Any of "gain" and "bias" (of all norms but the final one), "final" (the norm before the head),
            "centre" (what is written to a sum that only LayerNorms read loses its mean), "rms" (LayerNorms become
            RMSNorms), "value" (the bias of values moves behind the attention), "exponent" (in place of "gain" and
            "final": the power of two of each gain alone, without a rounding), "migrate" (gains are divided by scales,
            and the columns of their readers multiplied, as SmoothQuant and AWQ do), "scale" (the residual stream
            2^-halvings of what it was, for float16), "rotate" (stream and values in other orthogonal coordinates,
            after "gain", "bias", "final" and, with LayerNorms, "rms"). Or "batchnorm" alone. None: "batchnorm" for a
            model with batch norms, else "gain", "bias" and "final".
        untie: Give a tied head a table of its own, if what is done needs one.
        for_training: The model will be trained further: dropout is then an error.
        inverse: Undo this folding instead: norms, gains and biases come back bit for bit, W is divided by g and
            rounded once. Centred weights stay centred, which no LayerNorm sees, and an untied head keeps its table.
        batch: For batch norms, an input: a tensor, a tuple of arguments or a dictionary of keyword arguments. None:
            one is made up for the first convolution or linear map.
        halvings: For "scale", how often the residual stream is halved.
        fixed_eps: For "scale": accept norms whose eps cannot follow their input, as it stands in code; a row of
            variance v becomes shorter there, by (4^halvings - 1) eps / 2 v at most.
        seed: For "rotate", the seed of the random signs; None is 0.
        matrix: For "rotate", orthogonal matrices in place of a seed, float32 or float64, in a safetensors file or a
            dictionary: "R1" for the stream, PATH.R2 for the values of an attention's heads; what it lacks is not
            rotated. A row x becomes x R. Or R1 alone.
        scales: For "migrate": a vector for each norm, by its path or that of a linear map that reads it, in a
            safetensors file or a dictionary.
        alpha: For "migrate", 0 to 1: the vectors are the largest |x| of each channel (`ActivationStatistics.largest`),
            and the scales max|x|^alpha / max|w|^(1 - alpha). None: they are the scales.
        powers_of_two: For "migrate": round each scale to a power of two, so that no bit is lost.

    Returns:
        What was done, and what undoes it.

    Raises:
        KindError: If it is not a model of transformers, or no module at all.
        ModelError: If the model's family is not declared, or its weights are not finite.
        InputError: If nothing can be done, with the reason; or a LayerNorm that would become an RMSNorm has another
            eps than its config; or the model with batch norms does not run on the batch.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> fold(model).proof.is_exact, model
        (True, Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        ))

    Source:
        Jiang et al. 2023, arXiv:2305.14858, for LayerNorm -> RMSNorm; the conditions: docs/explanation/folding.md.
    """
    if inverse is not None:
        return _undo(model, inverse)
    if operations is None and isinstance(model, nn.Module):
        is_batch = any(isinstance(module, _BatchNorm) for module in model.modules())
        operations = ["batchnorm"] if is_batch else None
    if asks_batch_norms(operations, ()):
        if untie or for_training:
            raise InputError(BATCH_NORMS_ONLY)
        return _fold_batch_norms(model, batch)
    opened = open_model(model)
    plan = make_plan(
        opened,
        operations=operations,
        untie=untie,
        for_training=for_training,
        change_class=False,
        halvings=halvings,
        fixed_eps=fixed_eps,
        seed=seed,
        matrix=asked_matrices(matrix),
        scales=asked_scales(scales, alpha=alpha, powers_of_two=powers_of_two),
    )
    plan.require_change()
    scaled = {norm.module for norm in opened.graph.norms if norm.eps_key in plan.config}
    _require_eps(model, (norm for norm in opened.graph.norms if norm.module in {*plan.swaps, *scaled}))
    # Before modules that share a gain get their own.
    sharing = tuple(dict.fromkeys(each for path in scaled for each in _sharing_gain(model, path)))
    with one_thread_an_operation():
        return _apply(model, plan, opened.source, sharing)


def _fold_batch_norms(model: nn.Module, batch: Any) -> Folding:
    planned, call = plan_batch_norms(model, batch)
    proof = prove(model, planned, call)
    if not proof.is_exact:
        raise InputError(
            f"the folded {type(model).__name__} would differ by {proof.exact:.2g} of {proof.largest:.2g} in float64: a "
            "run does not show all that it computes; it is left as it was"
        )
    named = dict(model.named_parameters())
    before = {
        name: named[name].detach().clone()
        for path in planned.maps
        for name in (f"{path}.weight", f"{path}.bias")
        if name in named
    }
    norms = {norm.name: model.get_submodule(norm.name) for norm in planned.plan.norms if norm.readers}
    set_folded(model, planned)
    return Folding(plan=planned.plan, vectors=before, columns={}, norms=norms, proof=proof)


def _require_eps(model: nn.Module, norms: Iterable[Norm]) -> None:
    """Raise InputError if a norm whose eps will be read from a plan was given another than its family's file has."""
    for norm in norms:
        module = model.get_submodule(norm.module)
        eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), norm.eps)
        if eps != norm.eps:
            raise InputError(
                f"expected eps {norm.eps:g} in {norm.module}, as its class and config have it, got {eps:g}: it was set "
                "by hand; set it back, or fold without rms and scale"
            )


def _apply(model: nn.Module, plan: FoldPlan, source: Source, scaled: tuple[str, ...]) -> Folding:
    state = model.state_dict()
    matrices = [
        edit
        for edit in plan.edits
        if isinstance(edit, TensorEdit) and (edit.relation != "identical" or edit.name not in source.tensors)
    ]
    for edit in matrices:
        # Before anything is changed: an error in the last matrix would leave the model half folded.
        _require_possible(edit, source)
    new = vectors(plan, source, Workers())
    before = {edit.name: state[edit.name].clone() for edit in plan.edits if isinstance(edit, VectorEdit)}
    columns: dict[str, Tensor] = {}
    with torch.no_grad():
        # The own table of a head is copied before the shared table is centred.
        for edit in sorted(matrices, key=lambda edit: edit.name in source.tensors):
            if edit.name not in source.tensors:
                state[edit.name] = _give_own(model, edit.name, state[edit.source])
            if isinstance(edit.gain, Gain) and edit.gain_axis is not None:
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
    for path, value in plan.config.items():
        *above, key = path.split(".")
        config: Any = model.config
        setattr(attrgetter(".".join(above))(config) if above else config, key, value)
    for path in set(scaled) - plan.swaps.keys():
        _halve_eps(model, path, plan.options["halvings"])
    return Folding(plan=plan, vectors=before, columns=columns, norms=norms, scaled=scaled)


def _sharing_gain(model: nn.Module, path: str) -> list[str]:
    """Paths of a norm and of those that share its gain."""
    own: Any = model.get_submodule(path)
    gain = getattr(own, "weight", None)
    others = (
        name for name, norm in model.named_modules() if gain is not None and getattr(norm, "weight", None) is gain
    )
    return [path, *others]


def _halve_eps(model: nn.Module, path: str, halvings: int) -> None:
    """Set the eps of a norm for rows that are halved this often."""
    norm = model.get_submodule(path)
    for name in _EPS:
        if hasattr(norm, name):
            setattr(norm, name, getattr(norm, name) * 0.25**halvings)


def _require_possible(edit: TensorEdit, source: Source) -> None:
    """Raise ModelError for NaN or infinity in a matrix, or in its products, for which float16 is often too narrow."""
    if edit.dtype == "F16":
        deque(made(edit, source, Outcome()), maxlen=0)
        return
    for start, stop in partition(*source.tensors[edit.source].matrix):
        rows = source.rows(edit.source, start, stop)
        if not all_finite(rows):
            check_finite(edit.source, rows)


def _write(edit: TensorEdit, source: Source, target: Tensor) -> None:
    if not target.is_contiguous():
        target.copy_(torch.cat(list(made(edit, source, Outcome()))).view(target.shape))
        return
    rows, start = target.view(source.tensors[edit.source].matrix), 0
    for chunk in made(edit, source, Outcome()):
        rows[start : start + len(chunk)] = chunk
        start += len(chunk)


def _give_own(model: nn.Module, name: str, table: Tensor) -> Tensor:
    """Give a head that shared a parameter its own copy."""
    path, _, last = name.rpartition(".")
    parameter = nn.Parameter(table.clone())
    setattr(model.get_submodule(path), last, parameter)
    return parameter.data


def _undo(model: nn.Module, folding: Folding) -> Folding:
    if any(edit.rotations for edit in folding.plan.edits):
        raise InputError("expected a folding without a rotation, which is not undone in memory; load the model again")
    for path, norm in folding.norms.items():
        model.set_submodule(path, norm)
    if folding.proof is not None:
        for change in folding.plan.norms:
            for path in change.readers:
                if f"{path}.bias" not in folding.vectors:
                    model.get_submodule(path).register_parameter("bias", None)
    for path in folding.scaled:
        if path not in folding.norms:
            _halve_eps(model, path, -folding.plan.options["halvings"])
    for key, value in folding.plan.config.items() if folding.scaled else ():
        if isinstance(value, float):
            setattr(model.config, key, value * 4.0 ** folding.plan.options["halvings"])
    state = model.state_dict()
    with torch.no_grad():
        for edit in folding.plan.edits:
            if isinstance(edit, TensorEdit) and edit.exponent is not None:
                state[edit.name].mul_(2.0**-edit.exponent)
            if isinstance(edit, TensorEdit) and isinstance(edit.gain, Gain) and edit.gain_axis is not None:
                matrix = state[edit.name]
                by = factors(edit.gain, folding.vectors[edit.gain.weight].cpu()).to(matrix.device)
                shape = [1] * matrix.dim()
                shape[edit.gain_axis] = -1
                matrix.copy_(matrix.double() / by.view(shape))
                matrix.index_copy_(edit.gain_axis, (by == 0).nonzero().flatten(), folding.columns[edit.name])
        for name, value in folding.vectors.items():
            state[name].copy_(value)
    if folding.norms and folding.proof is None:
        delattr(model.config, KEY)
    return folding
