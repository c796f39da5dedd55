"""How far one optimiser step turns a scale-invariant weight, and whether a weight is one.

A weight w is scale-invariant if f(c w) = f(w) for all c > 0: only its direction counts. Differentiating by c
gives w . grad(w) = 0, by w gives grad(c w) = grad(w) / c. A step of given size therefore turns a long
weight less than a short one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import length


def effective_learning_rate(
    weight: Tensor,
    learning_rate: float | Tensor,
    *,
    optimizer: Literal["sgd", "adam"],
    dims: int | tuple[int, ...] | None = None,
) -> Tensor:
    """The learning rate as the direction w / |w| of a scale-invariant weight feels it.

    learning_rate / |w|^2 for SGD, with or without momentum: the gradient is 1/|w| long for its direction,
    and a step of given length turns w by 1/|w|. learning_rate / |w| for Adam and every other update that
    is the same for g and for c g. A step from c w with c^2 (Adam: c) times the learning rate ends in the
    same direction as the step from w. Weight decay shortens w, and so raises this rate.

    Args:
        weight: The weight w, of any shape with at least one axis.
        learning_rate: The optimiser's; a tensor must broadcast with the result.
        optimizer: "sgd", or "adam" for updates that do not depend on the gradient's length.
        dims: The axes that form one group: None for the whole tensor, -1 for each row of a matrix
            (before a BatchNorm), (1, 2, 3) for each filter of a convolution.

    Returns:
        One rate for each group, of weight's shape without `dims`; infinite where a group is zero.

    Raises:
        DtypeError: If weight is not of a floating dtype.
        InputError: If optimizer is neither.

    Example:
        >>> from normkit.geometry import effective_learning_rate
        >>> effective_learning_rate(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), 1.0, optimizer="sgd", dims=-1)
        tensor([0.0400, 0.2500])

    Source:
        van Laarhoven 2017, arXiv:1706.05350; Arora et al. 2018, arXiv:1812.03981.
    """
    if optimizer not in ("sgd", "adam"):
        raise InputError(f'optimizer must be "sgd" or, for scale-free updates, "adam", got {optimizer!r}')
    size = length(weight, dims)
    # Divided twice, not by the square: that overflows first.
    return learning_rate / size / size if optimizer == "sgd" else learning_rate / size


def equilibrium_length(
    learning_rate: float, weight_decay: float, update_length: float, *, optimizer: Literal["sgd", "adam"]
) -> float:
    """The length at which weight decay takes from a scale-invariant weight what its updates add.

    An update across w lengthens it, |w'|^2 = (1 - a)^2 |w|^2 + |update|^2 with a = learning_rate * weight_decay. For
    SGD |update| = learning_rate * G / |w|, with G the gradient's length at |w| = 1:
    |w|^4 = learning_rate^2 G^2 / (a (2 - a)). For Adam |update| = learning_rate * U: |w|^2 = learning_rate^2 U^2 /
    (a (2 - a)). At this length each step turns w by arccos(1 - a), which is close to sqrt(2 a), whatever G and U are:
    two layers with unlike gradients turn alike. Lengths approach it like exp(-4 a t) for SGD, exp(-2 a t) for Adam.

    Args:
        learning_rate: The optimiser's.
        weight_decay: The optimiser's, coupled for SGD, decoupled for AdamW: w loses the share a in a step.
        update_length: G for SGD without momentum; U for Adam, at most about the root of the number of weights.
        optimizer: "sgd", or "adam" for updates that do not depend on the gradient's length.

    Returns:
        |w|, of the whole group that is scale-invariant.

    Raises:
        InputError: If optimizer is neither, or learning_rate * weight_decay is not between 0 and 2.

    Example:
        >>> from normkit.geometry import equilibrium_length
        >>> f"{equilibrium_length(0.1, 1e-3, 1.0, optimizer='sgd'):.3f}"
        '2.659'

    Source:
        van Laarhoven 2017, arXiv:1706.05350; Wan et al. 2020, arXiv:2006.08419 (to first order in a); the angle is
        that of Kosson, Messmer and Jaggi 2023, arXiv:2305.17212. With all orders of a derived here.
    """
    if optimizer not in ("sgd", "adam"):
        raise InputError(f'optimizer must be "sgd" or, for scale-free updates, "adam", got {optimizer!r}')
    share = learning_rate * weight_decay
    if not 0 < share < 2:
        raise InputError(
            f"learning_rate * weight_decay must lie between 0 and 2 for an equilibrium, got {share:g}; "
            "without decay a weight grows for ever"
        )
    square = learning_rate * update_length / math.sqrt(share * (2 - share))
    return math.sqrt(square) if optimizer == "sgd" else square


def radial_cosine(weight: Tensor, gradient: Tensor, *, dims: int | tuple[int, ...] | None = None) -> Tensor:
    """The cosine of the angle between a weight and its gradient: 0 for a scale-invariant weight.

    <w, g> / (|w| |g|), over the axes `dims`. By Euler's theorem for functions of degree 0 it is 0 exactly
    when the function does not change, to first order, as w grows.

    Args:
        weight: The weight w, of any shape with at least one axis.
        gradient: The gradient g of a loss by w, of the same shape.
        dims: The axes that form one group: None for the whole tensor, -1 for each row.

    Returns:
        One cosine for each group, of weight's shape without `dims`; NaN where w or g is zero.

    Raises:
        DtypeError: If weight or gradient is not of a floating dtype.
        ShapeError: If the shapes differ.

    Example:
        >>> from normkit.geometry import radial_cosine
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight[0] / weight.norm()).backward()
        >>> radial_cosine(weight.detach(), weight.grad).abs() < 1e-6
        tensor(True)

    Source:
        Euler's theorem; van Laarhoven 2017, arXiv:1706.05350.
    """
    if require_floating(weight).shape != require_floating(gradient).shape:
        raise ShapeError(
            f"weight and gradient must be of one shape, got {tuple(weight.shape)} and {tuple(gradient.shape)}"
        )
    direction, slope = (tensor / length(tensor, dims, keepdim=True) for tensor in (weight, gradient))
    return torch.sum(direction * slope, dim=dims)
