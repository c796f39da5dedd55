"""Any torch optimiser, with its steps kept on the spheres that scale-invariant weights live on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normkit.errors import InputError
from normkit.geometry.invariant_groups import InvariantGroup
from normkit.geometry.scaling import unit

_SHARED = ("param_groups", "state", "defaults")


class TangentOptimizer(Optimizer):
    """Keeps the length of scale-invariant weights while another optimiser steps.

    The gradient of a scale-invariant weight w is orthogonal to w; an update of momentum, Adam or weight decay
    is not, so that |w| drifts and with it the effective learning rate. With w0 before and w1 after a
    step of the optimiser, each group (the whole matrix, or each row) becomes

        u = (w1 - w0) - w0 <w0, w1 - w0> / |w0|^2        the update's part tangent to the sphere at w0
        w = (w0 + u) * |w0| / |w0 + u|                   retracted to the sphere

    computed in float32 or wider. The lengths of a group with 16-bit parameters are kept in float32 from step to step,
    because the lengths of rounded weights would drift; lengths are measured anew where something else wrote weights in
    between, such as a checkpoint. A weight that the optimiser did not move keeps its bits; a zero weight has no
    direction, and takes the optimiser's step as it is. Weight decay of a group is purely radial, so that AdamW's does
    nothing; L2 decay inside the gradient still enters Adam's moments. The optimiser's own state is untouched: a
    momentum is not transported to the new tangent space.

    It is a torch Optimizer whose param_groups, state and defaults are the wrapped one's, so that schedulers and
    checkpoints work as without it; a checkpoint of either loads into the other. Hooks on state dicts belong on
    `optimizer`. LBFGS does not work with it: LBFGS judges its steps by the loss, before they are projected.

    Args:
        optimizer: Any torch optimiser that makes one update a step.
        groups: From `scale_invariant_groups`; all their parameters must be the optimiser's.

    Raises:
        InputError: If a parameter of a group is not the optimiser's, or is in two groups.

    Example:
        >>> from normkit.geometry import TangentOptimizer, scale_invariant_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.LayerNorm(8))
        >>> x = torch.randn(3, 4)
        >>> groups = scale_invariant_groups(model, lambda: model(x))
        >>> optimizer = TangentOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), groups)
        >>> before = model[0].weight.norm()
        >>> model(x).pow(3).sum().backward()
        >>> optimizer.step()
        >>> torch.allclose(model[0].weight.norm(), before)
        True

    Source:
        Projection: Heo et al. 2020, arXiv:2006.08217 (AdamP; it does not retract). Retraction by
        normalising: Absil, Mahony and Sepulchre 2008, Optimization Algorithms on Matrix Manifolds, section 4.1.
    """

    optimizer: Optimizer
    """The wrapped optimiser."""
    groups: tuple[InvariantGroup, ...]
    _kept: dict[int, tuple[Tensor, Tensor]]
    """By the index of each 16-bit group: the lengths of its spheres, and the lengths after rounding."""

    def __init__(self, optimizer: Optimizer, groups: Iterable[InvariantGroup]) -> None:
        # Optimizer.__init__ would build groups and state of its own; __setstate__ prepares the step's hooks only.
        self.__setstate__({"optimizer": optimizer, "groups": tuple(groups), "_kept": {}})
        known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for group in self.groups:
            for path, parameter in zip(group.paths, group.parameters, strict=True):
                if parameter not in known:
                    raise InputError(
                        f"{path} is in a group, but is not the optimizer's to step or is in two groups; "
                        "give each parameter to the optimizer, and in one group"
                    )
                known.remove(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a copy or a pickle needs."""
        return {"optimizer": self.optimizer, "groups": self.groups, "_kept": self._kept}

    def __getattr__(self, name: str) -> Any:
        """param_groups, state and defaults are always the wrapped optimiser's, also after it loads a checkpoint."""
        if name in _SHARED and "optimizer" in self.__dict__:
            return getattr(self.optimizer, name)
        raise AttributeError(f"TangentOptimizer has no attribute {name!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimiser more parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimiser does it."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's; the spheres' radii are the lengths of the weights."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this or of the bare optimiser returned."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the wrapped optimiser, then project and retract every group.

        Args:
            closure: Computes the loss and its gradients anew; passed on.

        Returns:
            What the wrapped optimiser returns: the loss if there is a closure.
        """
        starts = [[parameter.detach().clone() for parameter in group.parameters] for group in self.groups]
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        with torch.no_grad():
            for place, (group, start) in enumerate(zip(self.groups, starts, strict=True)):
                measured = radius = _lengths(_as_rows(group, start))
                if place in self._kept:
                    kept, left = self._kept[place]
                    radius = torch.where(measured == left, kept, measured)
                for parameter, value in zip(group.parameters, _on_sphere(group, start, radius), strict=True):
                    parameter.copy_(value)
                if any(parameter.dtype.itemsize < 4 for parameter in group.parameters):
                    self._kept[place] = radius, _lengths(_as_rows(group, group.parameters))
        return loss


def _on_sphere(group: InvariantGroup, start: Sequence[Tensor], radius: Tensor) -> Iterator[Tensor]:
    """The group's parameters with their step from `start` projected, and retracted to the spheres of these radii."""
    before, after = (_as_rows(group, tensors) for tensors in (start, group.parameters))
    direction = before / _lengths(before)
    update = after - before
    tangent = before + (update - direction * (direction * update).sum(1, keepdim=True))
    retracted = tangent * (radius / _lengths(tangent))
    is_moved = (update != 0).any(1, keepdim=True) & (radius > 0)
    kept = torch.where(is_moved, retracted, after)
    widths = [tensor.numel() // len(before) for tensor in start]
    for part, tensor in zip(torch.split(kept, widths, dim=1), start, strict=True):
        yield part.reshape(tensor.shape)


def _lengths(rows: Tensor) -> Tensor:
    # In this unit no square overflows; torch adds squares more exactly than `scaling.length`, whose error would add up.
    size = unit(rows)
    found: Tensor = size * torch.linalg.vector_norm(rows / size, dim=1, keepdim=True)
    return found


def _as_rows(group: InvariantGroup, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as a matrix with one row for each sphere of a group, in float32 or wider."""
    rows = len(tensors[0]) if group.kind == "rows" else 1
    flat = torch.cat([tensor.reshape(rows, -1) for tensor in tensors], dim=1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
