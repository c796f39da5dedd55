"""Effects of training mode: on the output by the batch's statistics, and on the input of batch norms by dropout."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.identification.sites import is_within
from normkit.identification.state import buffers_kept, in_mode, undisturbed
from normkit.measurement.batch_norms import DataStatistics
from normkit.measurement.hooks import observed
from normkit.measurement.running import Batch, evaluating, first_of, rows, runner, tensors
from normkit.measurement.structure import Structure

_SEED = 0
# Dropout that changes nothing leaves rounding.
_SAME = 1e-4


@dataclass(frozen=True, kw_only=True)
class ModeChange:
    """The output of a model with its batch norms in training mode, against that in evaluation mode, for one batch."""

    samples: int
    """Samples of the batch."""
    change: float
    """Root mean square of the difference, over the larger of the two outputs' deviations across samples."""
    sampling: float
    """The same between the whole batch in training mode and each of its halves by itself: what so small a batch does.
    """
    decided: float
    """Share of samples whose largest entry of the output is another; NaN where an output is no row of numbers."""

    @property
    def beyond_sampling(self) -> float:
        """The change less what so small a batch explains."""
        return math.sqrt(max(0.0, self.change**2 - self.sampling**2))


def change_of_modes(model: nn.Module, structure: Structure, batch: Batch, data: DataStatistics) -> ModeChange | None:
    """Run a batch with the batch norms in training mode and in evaluation mode, and all else in evaluation mode.

    Four forward passes of the batch, or what the halves of it make of two. Parameters, buffers, modes and random
    generators are left as they were. `data.dropout` is filled on the way.

    Returns:
        The change of the output; None without batch norms, for fewer than four samples, or where the model does not run
        so.
    """
    modules = [model.get_submodule(site.path) for site in data.sites]
    if not modules:
        return None
    found = None
    # Not every model can be called in training mode: then that shows nothing.
    with undisturbed(), evaluating(model), buffers_kept(model), torch.no_grad():
        with suppress(Exception):
            found = _change_of_output(model, modules, batch)
        with suppress(Exception):
            data.dropout = dropout_in_front(model, structure, batch)
    return found


def _change_of_output(model: nn.Module, modules: list[nn.Module], batch: Batch) -> ModeChange | None:
    samples = len(first_of(batch))
    half = samples // 2
    if half < 2:
        return None

    def output(part: Batch) -> Tensor:
        floating = [value for _, value in tensors(runner(model, part)()) if value.is_floating_point()]
        return max(floating, key=lambda value: min(value.dim(), 2)).double().cpu()

    evaluated = output(batch)
    with ExitStack() as modes:
        for module in modules:
            modes.enter_context(in_mode(module, training=True))
        trained = output(batch)
        halves = torch.cat([output(rows(batch, 0, half)), output(rows(batch, half, samples))])
    if evaluated.dim() < 2 or len(evaluated) != samples or not evaluated.shape == trained.shape == halves.shape:
        return None
    size = max(float(each.var(0, correction=0).mean().sqrt()) for each in (evaluated, trained))
    if not size > 0 or not math.isfinite(size):
        return None
    other = evaluated.argmax(1) != trained.argmax(1)
    return ModeChange(
        samples=samples,
        change=float((trained - evaluated).square().mean().sqrt()) / size,
        sampling=float((halves - trained).square().mean().sqrt()) / size,
        decided=float(other.double().mean()) if evaluated.dim() == 2 and evaluated.shape[1] > 1 else math.nan,
    )


def dropout_in_front(model: nn.Module, structure: Structure, batch: Batch) -> dict[str, tuple[float, str]]:
    """`BatchNorm.dropout` and `BatchNorm.behind` of each batch norm, by path, from a pass of the batch in each mode.

    The model is in evaluation mode, and no gradient is recorded; random numbers are drawn from a fixed seed.
    """
    plain, dropped = DataStatistics(model, structure.others), DataStatistics(model, structure.others)
    with observed(model, plain.sites, (), (), plain):
        runner(model, batch)()
    torch.manual_seed(_SEED)
    with in_mode(model, training=True), ExitStack() as modes, observed(model, dropped.sites, (), (), dropped):
        for site in dropped.sites:
            modes.enter_context(in_mode(model.get_submodule(site.path), training=False))
        runner(model, batch)()
    last, before = "", dict[str, str]()
    for call in structure.called.modules:
        if drops(model.get_submodule(call.path)):
            last = call.path
        before.setdefault(call.path, last)
    found = {}
    for site in plain.sites:
        one, other = plain.variance(site.path), dropped.variance(site.path)
        ratios = (other / one).sqrt()[(one > 0) & other.isfinite()]
        ratio = float(ratios.median()) if len(ratios) else math.nan
        named = next((each for path, each in before.items() if is_within(path, site.path)), "")
        found[site.path] = (ratio, named if abs(ratio - 1) > _SAME else "")
    return found


def drops(module: nn.Module) -> bool:
    """A module of dropout whose rate is not 0."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
