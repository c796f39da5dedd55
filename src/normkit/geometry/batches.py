"""BatchNorm's two maps, and how far any norm's output depends on rows that are not its own.

The functions that take a `norm` measure: they return numbers to read, not to differentiate. `norm` is any
callable from a tensor to one of the same leading shape. A module is measured on deep copies in its own mode,
with the random state put back, so its parameters, running statistics and mode are left bit for bit as they were;
a function that only refers to a module from outside changes it as every call does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from normkit.errors import DtypeError, InputError, KindError, ShapeError
from normkit.geometry.rows import require_floating
from normkit.geometry.scaling import to_sphere

Norm = Callable[[Tensor], Tensor]

# Elements of x times rows of the Jacobian held at once: 128 MiB in float64.
_HELD_ELEMENTS = 2**24


def centre_over_batch(x: Tensor) -> Tensor:
    """Move a cloud of points so that its mean is the origin: BatchNorm's first step.

    y = x - mean of x over the batch axis, a vector; `centre` subtracts a number from each row instead.

    Args:
        x: Cloud of shape (..., N, n): N points of n features.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no batch axis or no elements.

    Example:
        >>> from normkit.geometry import centre_over_batch
        >>> centre_over_batch(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]])

    Source:
        Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1.
    """
    _require_samples(x, 1)
    centred = x - x.mean(-2, keepdim=True)
    # A mean is rounded in proportion to itself; where it dwarfs the deviations, what it leaves counts.
    return centred - centred.mean(-2, keepdim=True)


def scale_over_batch(x: Tensor, eps: float = 0.0) -> Tensor:
    """Give every feature of a cloud the root mean square 1: BatchNorm's second step, without centring.

    y = x / sqrt(mean of x^2 over the batch axis + eps). After `centre_over_batch` it is `torch.nn.BatchNorm1d`
    in training mode without gain and bias. A feature that is 0 throughout (one point, centred) gives NaN at
    eps = 0 and 0 at eps > 0.

    Args:
        x: Cloud of shape (..., N, n).
        eps: In units of x squared.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x has no batch axis or no elements.

    Example:
        >>> from normkit.geometry import scale_over_batch
        >>> scale_over_batch(torch.tensor([[-1.0, 0.5], [1.0, -0.5]]))
        tensor([[-1.,  1.],
                [ 1., -1.]])

    Source:
        Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1.
    """
    _require_samples(x, 1)
    return to_sphere(x.mT, eps=eps).mT


def cross_sample_jacobian(norm: Norm, x: Tensor) -> Tensor:
    """How much each sample's output depends on each sample's input.

    entry (i, j) = |dy_i / dx_j|, the Frobenius norm of that block of the Jacobian: exactly 0 off the diagonal
    for a norm of single samples, and for BatchNorm in training mode, with z = (x - mean) / s,
    |dy_i / dx_j|^2 = sum over features of (gain / s * ([i = j] - 1/N - z_i z_j / N))^2, s = sqrt(variance + eps)
    (derived here). One backward pass for every element of y, several at a time; the Jacobian is never held whole.

    Args:
        norm: Maps samples along the first axis to samples along the first axis.
        x: Samples of shape (N, ...), N >= 1.

    Returns:
        Tensor of shape (N, N), in y's dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x holds nothing, or y has another number of samples.

    Example:
        >>> from normkit.geometry import cross_sample_jacobian
        >>> x = torch.eye(3, 4)
        >>> cross_sample_jacobian(nn.LayerNorm(4), x).count_nonzero().item()
        3
        >>> cross_sample_jacobian(nn.BatchNorm1d(4), x).count_nonzero().item()
        9
    """
    _require_samples(x, 1)
    squares = _jacobian_rows(norm, x, 1, lambda _, gradients: gradients.square().flatten(2).sum(-1))
    return squares.reshape(x.shape[0], -1, x.shape[0]).sum(1).sqrt()


@torch.no_grad()
def batch_size_dependence(norm: Norm, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """How far sample 0's output moves when it shares its batch with fewer samples.

    entry k = max |norm(x[:sizes[k]])[0] - norm(x)[0]|: exactly 0 for a norm of single samples, up to the rounding
    of kernels that split their sums by batch size.

    What a batch of one gives depends on who computes it. In training mode BatchNorm's formula is 0 / 0 at eps = 0 and
    exactly the bias at eps > 0, whatever x is; `torch.nn.BatchNorm1d` refuses it, and its error passes through here;
    BatchNorm2d takes an image, which has many values a channel. In evaluation mode one sample is as good as many.

    Args:
        norm: Maps samples along the first axis to samples along the first axis.
        x: The whole batch, of shape (N, ...).
        sizes: Batch sizes from 1 to N.

    Returns:
        Tensor of shape (len(sizes),), in y's dtype.

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x holds nothing, or y has another number of samples.
        InputError: If a size is not from 1 to N.

    Example:
        >>> from normkit.geometry import batch_size_dependence
        >>> batch_size_dependence(nn.LayerNorm(4), torch.eye(3, 4), [1, 2, 3])
        tensor([0., 0., 0.])
    """
    _require_samples(x, 1)
    if wrong := [size for size in sizes if not 1 <= size <= x.shape[0]]:
        raise InputError(f"batch sizes from 1 to {x.shape[0]} are needed, as x holds so many samples; got {wrong[0]}")
    whole = _run(norm, x)
    _require_leading(whole, x, 1)
    changes = [(_run(norm, x[:size])[0] - whole[0]).abs().amax() for size in sizes]
    return torch.stack(changes) if changes else whole.new_empty(0)


@torch.no_grad()
def train_eval_difference(module: nn.Module, x: Tensor, batches: Sequence[Tensor] = ()) -> Tensor:
    """The difference between the outputs of one input in training and in evaluation mode.

    max |module.train()(x) - module.eval()(x)|, for the module as it is or after it has seen `batches` in training mode
    (no optimiser: only running statistics move). Whatever else the two modes do differently, dropout for one,
    counts too. BatchNorm keeps a difference when its running statistics have settled on x itself: training divides
    by the variance of N samples, evaluation by the unbiased estimate, N / (N - 1) times that.

    Args:
        module: Any module; measured on a copy.
        x: Its input.
        batches: Inputs that it sees first, in order.

    Returns:
        Tensor of shape ().

    Raises:
        KindError: If module is not a `torch.nn.Module`: a function has no modes.
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x holds nothing.

    Example:
        >>> from normkit.geometry import train_eval_difference
        >>> train_eval_difference(nn.LayerNorm(4), torch.eye(3, 4))
        tensor(0.)
    """
    if not isinstance(module, nn.Module):
        raise KindError(f"a torch.nn.Module is needed, as only it has modes, got {type(module).__name__}")
    _require_samples(x, 1)
    twin = copy.deepcopy(module)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        twin.train()
        for batch in batches:
            twin(batch.clone())
        # Evaluation first: the pass in training mode moves the running statistics.
        evaluated = twin.eval()(x.clone())
        change: Tensor = twin.train()(x.clone()) - evaluated
        return change.abs().amax()


@torch.no_grad()
def padding_dependence(norm: Norm, x: Tensor, mask: Tensor, fill: float | Tensor) -> Tensor:
    """How far the valid tokens' outputs move when the padding holds something else.

    max over valid tokens of |norm(x) - norm(x')|, x' = x with `fill` wherever mask is False. Exactly 0 for a norm
    of single tokens.

    Args:
        norm: Maps (B, T, ...) to (B, T, ...).
        x: Padded sequences of shape (B, T, n).
        mask: Which tokens are valid: bool, of shape (B, T).
        fill: A number, or a tensor that broadcasts to x.

    Returns:
        Tensor of shape (); 0 if no token is valid.

    Raises:
        DtypeError: If x is not of a floating dtype, or mask not bool.
        ShapeError: If x has no batch and time axis, or the mask or y has others.

    Example:
        >>> from normkit.geometry import padding_dependence
        >>> x, mask = torch.eye(4).reshape(2, 2, 4), torch.tensor([[True, True], [True, False]])
        >>> padding_dependence(nn.LayerNorm(4), x, mask, fill=9.0)
        tensor(0.)
    """
    _require_samples(x, 2)
    if mask.dtype != torch.bool:
        raise DtypeError(f"a bool mask, True at valid tokens, is needed, got {mask.dtype}; use mask.bool()")
    if mask.shape != x.shape[:2]:
        raise ShapeError(f"a mask of shape {tuple(x.shape[:2])} is needed, as x's, got {tuple(mask.shape)}")
    outputs = _run(norm, x)
    _require_leading(outputs, x, 2)
    refilled = torch.where(mask.reshape(*mask.shape, *(1,) * (x.dim() - 2)), x, fill).to(x.dtype)
    change = (outputs - _run(norm, refilled)).abs()
    return torch.where(mask.reshape(*mask.shape, *(1,) * (change.dim() - 2)), change, 0.0).amax()


def future_leakage(norm: Norm, x: Tensor) -> Tensor:
    """How much an output depends on later inputs: 0 is what an autoregressive model needs.

    max |d y_t / d x_s| over all s > t, features and, where there are several, pairs of sequences. One backward
    pass for every element of y, several at a time.

    Args:
        norm: Maps sequences to sequences of the same leading shape.
        x: Sequence of shape (T, n), or sequences of shape (B, T, n).

    Returns:
        Tensor of shape ().

    Raises:
        DtypeError: If x is not of a floating dtype.
        ShapeError: If x holds nothing or has other axes, or y has another batch or time axis.

    Example:
        >>> from normkit.geometry import future_leakage
        >>> future_leakage(nn.LayerNorm(4), torch.eye(3, 4))
        tensor(0.)
    """
    _require_samples(x, 1)
    if x.dim() not in (2, 3):
        raise ShapeError(f"sequences of shape (T, n) or (B, T, n) are needed, got shape {tuple(x.shape)}")
    times = torch.arange(x.shape[-2], device=x.device)

    def largest_later(tokens: Tensor, gradients: Tensor) -> Tensor:
        is_later = times > (tokens % len(times)).reshape(-1, *(1,) * (x.dim() - 1))
        return torch.where(is_later.unsqueeze(-1), gradients.abs(), 0.0).flatten(1).amax(1)

    return _jacobian_rows(norm, x, x.dim() - 1, largest_later).amax()


def _jacobian_rows(norm: Norm, x: Tensor, axes: int, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """reduce(token, dy_k / dx) of every element k of y, in order; token counts y's positions along its first axes."""
    # Not torch.func.jacrev: it refuses modules that count their batches in place, as BatchNorm does in training mode.
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _run(norm, x)
    _require_leading(y, x, axes)
    features = y[(0,) * axes].numel()
    reduced = []
    held = max(1, _HELD_ELEMENTS // max(x.numel(), y.numel()))
    for elements in torch.split(torch.arange(y.numel(), device=y.device), held):
        one_hot = y.new_zeros(len(elements), y.numel()).scatter_(1, elements.unsqueeze(1), 1.0).reshape(-1, *y.shape)
        (gradients,) = torch.autograd.grad(y, x, one_hot, retain_graph=True, is_grads_batched=True)
        reduced.append(reduce(elements // features, gradients))
    return torch.cat(reduced)


def _run(norm: Norm, x: Tensor) -> Tensor:
    """norm(x) by a copy of norm, from the state in which it and the random generators are now."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        # Some norms overwrite their input.
        return copy.deepcopy(norm)(x.clone())


def _require_samples(x: Tensor, axes: int) -> None:
    require_floating(x)
    if x.dim() <= axes or x.numel() == 0:
        names = "(N, n)" if axes == 1 else "(B, T, n)"
        raise ShapeError(f"a shape {names} with at least one element is needed, got {tuple(x.shape)}")


def _require_leading(y: Tensor, x: Tensor, axes: int) -> None:
    if y.shape[:axes] != x.shape[:axes]:
        raise ShapeError(f"the norm must keep the leading shape {tuple(x.shape[:axes])}, it gave {tuple(y.shape)}")
