"""How a watch begins: processes meet, the model is surveyed, the hooks are put in and tried, the pooling is proved.

A survey calls the model on a small part of a batch. It shows what the model is made of, and the weights whose length
makes no difference because a norm removes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from normkit.identification.offloading import gathered
from normkit.identification.sharding import fully_sharded, is_elsewhere
from normkit.identification.state import buffers_kept, random_numbers_kept
from normkit.identification.tracing import first_output, members
from normkit.measurement.baseline import Baseline, check_fits
from normkit.measurement.intent import Intent, stock_intent
from normkit.measurement.modes import dropout_in_front, drops
from normkit.measurement.modulation import has_conditions, read_outputs
from normkit.measurement.patches import Sharing, find_shared
from normkit.measurement.running import Batch, caller, changed, evaluating, part, tensors, vocabulary
from normkit.measurement.structure import Structure, survey
from normkit.measurement.weights import GradientErrors, gradient_errors
from normkit.text import counted, dtype_name, first_line
from normkit.text import shortened as listed
from normkit.watching.ranks import Ranks
from normkit.watching.rendezvous import is_distributed_run, meet, verify
from normkit.watching.step_recorder import StepRecorder

_TOKENS = 16

# If f(c w) = f(w), no gradient has a part along w. In a wide model that holds nearly of other weights, too: of
# n numbers, a random direction has 1/sqrt(n) along any other. So its part is compared with that of a change of w.
_DIRECTIONS, _ALONG = 4, 0.25
_ORTHOGONAL = {torch.float16: 0.02, torch.bfloat16: 0.02}
_ORTHOGONAL_32 = 1e-3
# Relative change of the output when the weight is doubled: eps, and rounding.
_UNCHANGED = {torch.float16: 0.01, torch.bfloat16: 0.03}
_UNCHANGED_32 = 1e-3
# Where a weight hardly matters its length matters little too: other weights of its length must change 20 times as much.
_BESIDE_OTHERS = 0.05


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedModel:
    """The facts about a model before its first step."""

    model: nn.Module
    """The model without its wrappers."""
    structure: Structure | None = None
    """The structure of the model; None if it could not be found."""
    vocabulary: int = 0
    """Tokens that it embeds, or 0."""
    baseline: Baseline | None = None
    """The declared intent."""
    intent: Intent | None = None
    """The formulas of the stock class of its config."""
    shared: Mapping[str, Sharing] = field(default_factory=dict)
    """Norms that serve several places, by path."""
    gradient_errors: Mapping[str, GradientErrors] = field(default_factory=dict)
    """The errors of the gradients of each norm, by path."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Startup:
    """The parts of a watch that has begun."""

    watched: WatchedModel
    recorder: StepRecorder | None
    """Measures the model; None where nothing can."""
    ranks: Ranks
    """The processes that train it."""
    is_reporting: bool
    """Whether this process speaks and writes."""
    folder: str
    """The folder that it writes to, within the folder for reports."""
    observer: str
    """The result of the watch's check of itself, or ""."""
    remarks: tuple[str, ...]
    """The parts that could not be watched, and why."""


def start_up(
    given: nn.Module,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    *,
    every: int,
    scaler: Any,
    baseline: Baseline | None,
) -> Startup:
    """Find the norms and put the hooks in; if that fails, the run goes on without a watch, and a remark says so.

    The model comes as the loop calls it and without its wrappers; the batch is that of one call of it.

    Raises:
        InputError: If the baseline is that of another model.
    """
    rendezvous = meet()
    small = rendezvous.common_batch(model, shortened(batch))
    structure, recorder, observer, remarks = None, None, "", []

    def unfound(error: Exception) -> str:
        return f"the norms could not be found, so nothing is measured: {first_line(error)}"

    # Tables made in inference mode could not be written to in a step.
    with torch.inference_mode(False):
        small = _detached(small)
        whole = small if is_distributed_run() else _detached(batch)
        try:
            structure = surveyed(model, small)
        # Any model's own code runs here: a failure on a part of a batch must not end the training.
        except Exception as error:
            try:
                structure = surveyed(model, small := whole)
            except Exception:
                remarks.append(unfound(error))
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
                    readers=_readers(model, structure, small),
                )
                called, norms = structure.called.modules, {site.path for site in recorder.batch_norms.sites}
                last = max((place for place, call in enumerate(called) if call.path in norms), default=0)
                # A pass in training mode may change what a model counts: it is taken only where it tells something.
                if not is_distributed_run() and any(drops(call.module) for call in called[:last]):
                    with undisturbed(model), suppress(Exception):
                        recorder.batch_norms.dropout = dropout_in_front(model, structure, whole)
                recorder.install(given)
                with undisturbed(model):
                    recorder.rehearse(caller(model, small))
                observer = verify(ranks, recorder.tables["rows"].device)
                if not structure.sites and not recorder.batch_norms.sites:
                    remarks.append(_without_sites([other.path for other in structure.others]))
            # Any model's own code runs here too.
            except Exception as error:
                if recorder is not None:
                    recorder.remove()
                recorder = None
                remarks.append(unfound(error))
    return Startup(
        watched=watched,
        recorder=recorder,
        ranks=ranks,
        is_reporting=rendezvous.is_first,
        folder=rendezvous.folder,
        observer=observer,
        remarks=tuple(remarks),
    )


def _without_sites(others: Sequence[str]) -> str:
    """The instruments for a model whose norms, if there are any, no spec describes."""
    norms = (
        f"no spec describes the model's {counted(len(others), 'norm')} ({listed(others, 1)}): they were tried with "
        "random rows, and the rows of the run are not measured"
    )
    return f"{norms if others else 'the model has no norm'}; loss, gradients and updates are watched"


def _readers(model: nn.Module, structure: Structure, batch: Batch) -> dict[str, str]:
    """The modules that read the output of norms without a gain, by path of the norm; none without conditions."""
    bare = {site.path for site in structure.sites if site.gain is None and site.module is not None}
    if not bare or not has_conditions(batch):
        return {}
    with undisturbed(model):
        found = read_outputs(model, structure, batch)
    return {path: each.reader for path, each in found.items() if path in bare}


def shortened(batch: Batch) -> Batch:
    """The first two rows, and of token ids the first sixteen columns; what has no batch axis is kept."""
    first = next((value for _, value in tensors(batch) if value.dim()), None)
    if first is None:
        return batch
    is_tokens = first.dim() == 2 and not first.is_floating_point()
    return part(batch, first, slice(2), _TOKENS if is_tokens else None)


def _detached(batch: Batch) -> Batch:
    """The batch without the graphs that made it, which the training needs; inference tensors are copied."""
    return changed(batch, lambda _name, value: value.clone() if value.is_inference() else value.detach())


def _described(model: nn.Module, structure: Structure, baseline: Baseline | None) -> WatchedModel:
    """A surveyed model with everything that can be known before the first step."""
    check_fits(baseline, [site.path for site in structure.sites])
    dtypes = {path: dtype_name(entering) for path, (entering, _) in structure.layout(is_pooled=True).dtypes.items()}
    with gathered(model):
        # What an older FSDP frees between calls cannot be gathered.
        held = [
            site
            for site in structure.sites
            if site.module is None or not any(map(is_elsewhere, site.module.parameters()))
        ]
        errors = gradient_errors(held, dtypes)
    return WatchedModel(
        model=model,
        structure=structure,
        vocabulary=vocabulary(model) or 0,
        baseline=baseline,
        intent=stock_intent(model),
        shared=find_shared(model, structure),
        gradient_errors=errors,
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile` or a data-parallel wrapper makes of it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def surveyed(model: nn.Module, batch: Batch) -> Structure:
    """Survey a model without wrappers; it and the random numbers are left as they were."""
    with undisturbed(model):
        return survey(model, caller(model, batch), stages=False)


def insensitive(model: nn.Module, batch: Batch) -> frozenset[str]:
    """`scale_invariant` of a model without wrappers; it and the random numbers are left as they were."""
    with undisturbed(model):
        return scale_invariant(model, caller(model, batch))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model eagerly in evaluation mode, then restore modes, buffers and random numbers."""
    # Compiled code would be compiled again for the small shapes, and then for shapes that change.
    eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    # Autocast keeps the cast of a weight, and would not see that it is doubled.
    keeps_casts = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with random_numbers_kept(), buffers_kept(model), evaluating(model), torch.no_grad(), eager:
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
        for sharded in fully_sharded(model):
            # Its root keeps what it gathered until a backward pass, which does not come.
            sharded.reshard()


def scale_invariant(model: nn.Module, run: Callable[[], object]) -> frozenset[str]:
    """The paths of the weights that can be doubled without a change of the output: found by behaviour, not by place.

    A weight W before a norm: norm(c W x) = norm(W x) for c > 0, but for eps. Candidates have gradients orthogonal to
    them for random combinations of the outputs. They are doubled together and the model run again; where that changes
    the output, each half of them is tried alone. The elements of a weight in another order must change the output far
    more, as the gradients tell. Biases, gains, and weights without any gradient do not count. Parameters, their `grad`
    and the random numbers are as before. The model is in evaluation mode, and gives the same output for the same input
    each time that `run` calls it.

    Returns:
        Names as in `model.named_parameters()`; empty where the output is not finite, or none can be differentiated.
    """
    weights = {
        path: parameter
        for path, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.requires_grad and parameter.is_floating_point()
    }
    devices = {parameter.device for parameter in weights.values() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        candidates = _orthogonal(weights, run)
        if not candidates:
            return frozenset()
        with torch.no_grad():
            before = _output(run)
            return frozenset(each.path for each in _staying(candidates, before, run))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Candidate:
    """A weight that gradients are orthogonal to."""

    path: str
    weight: Tensor
    limit: float
    """Largest relative change of the output that counts as none."""
    beside: float
    """Length of the output's change when the elements change places, as far as the gradients tell."""


def _orthogonal(weights: Mapping[str, Tensor], run: Callable[[], object]) -> list[_Candidate]:
    """The weights whose length makes no difference to random combinations of the outputs, to first order."""
    with torch.enable_grad():
        output = _told(run())
        if output is None or not output.requires_grad or not bool(output.isfinite().all()):
            return []
        generator, left = torch.Generator().manual_seed(0), dict(weights)
        along, turned = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
        for _ in range(_DIRECTIONS):
            if not left:
                break
            direction = torch.randn(output.shape, generator=generator).to(output)
            # An input may come with a graph of its own, which the training still needs.
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                output, list(left.values()), direction, allow_unused=True, retain_graph=True
            )
            for (path, weight), gradient in zip([*left.items()], gradients, strict=True):
                limit = _ORTHOGONAL.get(_computed(weight, output.dtype), _ORTHOGONAL_32)
                inner, lengths = (0.0, 0.0) if gradient is None else _products(gradient, weight.detach())
                if gradient is None or not (0 < lengths < math.inf and abs(inner) <= limit * lengths):
                    del left[path]
                    continue
                along[path] += inner**2
                turned[path] += (_products(gradient, weight.detach().roll(1))[0] - inner) ** 2
    # Under autocast the dtype is that of the output. Doubling must be exact, so that halving restores.
    return [
        _Candidate(
            path=path,
            weight=weight,
            limit=_UNCHANGED.get(_computed(weight, output.dtype), _UNCHANGED_32),
            beside=math.sqrt(turned[path] / _DIRECTIONS),
        )
        for path, weight in left.items()
        if along[path] <= _ALONG**2 * turned[path] and bool((weight.detach() * 2).isfinite().all())
    ]


def _computed(weight: Tensor, output: torch.dtype) -> torch.dtype:
    """The dtype in which a weight's gradient was computed."""
    return output if output in _ORTHOGONAL else weight.dtype


def _products(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The inner product of two tensors, and the product of their lengths."""
    # The gradient of an embedding may be sparse.
    one, other = (each.to_dense().to(torch.promote_types(each.dtype, torch.float32)) for each in (one, other))
    lengths = [float(torch.linalg.vector_norm(each)) for each in (one, other)]
    return float((one * other).sum(dtype=torch.float64)), math.prod(lengths)


def _staying(candidates: Sequence[_Candidate], before: Tensor, run: Callable[[], object]) -> list[_Candidate]:
    """The candidates that can be doubled; all are restored to the bit, also after an error."""
    try:
        for each in candidates:
            each.weight.mul_(2)
        moved = _output(run) - before
    finally:
        for each in candidates:
            each.weight.div_(2)
    is_unchanged = bool(moved.abs().max() <= min(each.limit for each in candidates) * before.abs().max())
    if is_unchanged and float(moved.norm()) < _BESIDE_OTHERS * min(each.beside for each in candidates):
        return [*candidates]
    if len(candidates) == 1:
        return []
    half = len(candidates) // 2
    return _staying(candidates[:half], before, run) + _staying(candidates[half:], before, run)


def _output(run: Callable[[], object]) -> Tensor:
    output = _told(run())
    assert output is not None
    return output.detach().double()


def _told(output: object) -> Tensor | None:
    """The output that tells most: a loss, which models of transformers return first, is one number of many."""
    values = members(output)
    return first_output([each for each in values if isinstance(each, Tensor) and each.dim()] or values)
