"""Signals in a model: activations and gradients by block, the backward pass of its norms, the loss along a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit import geometry, reference
from normkit.geometry.invariant_groups import replaced
from normkit.identification.state import hooked
from normkit.spec import NormSpec
from normkit.study.corpus import next_token_loss
from normkit.study.training_run import Batch, Loss
from normkit.study.transformer import Transformer

SHARES = (0.0025, 0.005, 0.01, 0.02)
"""Distances along the gradient, over the length of all parameters together; a step of training is about the first."""

FACTORS = (1.0, 1.5, 3.0, 7.0)
"""Lengths at which a scale-invariant weight is tried, over its own length."""

# The size of the noise of perturbed weights over their rms, and the rate of the steps that turn weights.
_RELATIVE, _RATE = 1e-3, 1e-4


@dataclass(frozen=True, kw_only=True)
class Propagation:
    """Forward and backward signals in a model of L blocks."""

    stream: tuple[float, ...]
    """E|x|^2 / n of the residual stream before the first block and after each, L + 1 values."""
    gradients: tuple[float, ...]
    """For each block the norm of the gradient of its MLP's two matrices together, L values."""
    token_gradient: float
    """That norm in the last block for the loss of one token: root of the mean square over tokens."""
    change: float
    """Mean squared change of the unembedding's input when each matrix of the blocks changes by noise of a thousandth of
    its rms, over the square of that thousandth."""


def propagate(model: Transformer, ids: Tensor, generator: torch.Generator) -> Propagation:
    """Measure one model on a batch of token ids (batch, tokens + 1); its matrices are perturbed in doing so."""
    stream: list[float] = []
    read: list[Tensor] = []

    def record(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        stream.extend(mean_square(x) for x in (*(() if stream else inputs), output))

    with model.unembedding.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].detach())):
        with hooked(block.register_forward_hook(record) for block in model.blocks):
            token_gradient = last_token_gradient(model, ids)
        perturb(model.blocks, _RELATIVE, generator)
        with torch.no_grad():
            model(ids[:, :-1])
    branches = [model.get_submodule(f"blocks.{number}.mlp.branch") for number in range(len(model.blocks))]
    return Propagation(
        stream=tuple(stream),
        gradients=tuple(gradient_norm(branch) for branch in branches),
        token_gradient=token_gradient,
        change=mean_square((read[1] - read[0]) / _RELATIVE),
    )


def last_token_gradient(model: Transformer, ids: Tensor) -> float:
    """The norm of the gradient of the last MLP's matrices under the loss of one token, after a backward pass of all.

    After the last attention no token depends on another, so the loss of a token t has the gradient g_t x_t^T, of norm
    |g_t| |x_t|, where x_t is the input of a matrix and g_t the gradient of its output. Unlike the gradient of a batch
    it does not depend on how similar the tokens are. The root of the mean square over tokens is returned.

    Args:
        model: Its gradients are filled as by any backward pass.
        ids: Token ids (batch, tokens + 1).
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def record(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls.append((inputs[0].detach(), output))

    branch = model.get_submodule(f"blocks.{len(model.blocks) - 1}.mlp.branch")
    with hooked(module.register_forward_hook(record) for module in branch.children()):
        loss = next_token_loss(model, (ids,))
    torch.autograd.backward(loss)
    total = 0.0
    for x, output in calls:
        assert output.grad is not None
        total += (x.double().square().sum(-1) * output.grad.double().square().sum(-1)).mean().item()
    # The loss is a mean over tokens; the gradient of one token's loss is larger by their number.
    return math.sqrt(total) * ids[:, 1:].numel()


@torch.no_grad()
def perturb(module: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Add to each matrix of a module, in place, normal noise of `relative` times the rms of the matrix."""
    for weight in module.parameters():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(relative * math.sqrt(mean_square(weight)) * noise)


def gradient_norm(module: nn.Module) -> float:
    """The norm of the gradients of a module's matrices together."""
    gradients = [weight.grad for weight in module.parameters() if weight.dim() == 2]
    return math.sqrt(sum(grad.double().square().sum().item() for grad in gradients if grad is not None))


def mean_square(x: Tensor) -> float:
    """The mean square of all elements, summed in float64: the squares of an explosion overflow float32."""
    return x.detach().double().square().mean().item()


@dataclass(frozen=True, kw_only=True)
class BackwardErrors:
    """How far the gradient dx that a norm passes on is from its formulas, for a gradient u of its output."""

    projected: float
    """|dx - P(g u) / s| / |dx|, where P is the projection tangent to the sphere through the normalized row and s
    includes eps; with eps > 0 the rest of the radial part counts as error."""
    exact: float
    """The same for the closed form with eps, `geometry.vjp`."""
    removed: float
    """Median over rows of the share of |g u|^2 that P removes; 2/n for a random direction, 1/n without centring."""


def backward_errors(
    model: nn.Module, norms: Mapping[str, nn.Module], spec: NormSpec, batch: Batch, loss_of: Loss
) -> dict[str, BackwardErrors]:
    """Compare the backward pass of norms with their formulas, in one pass of the model.

    Args:
        model: In float64, in which the formulas hold to rounding; its gradients are accumulated in `grad`.
        norms: Path -> module that computes `spec`, with `weight` as its gain, or none.
        spec: The norm that they compute.
        batch: On the model's device.
        loss_of: The loss.
    """
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, tuple[Tensor, Tensor]] = {}

    def record(path: str, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        def backward(_module: nn.Module, of_input: Any, of_output: Any) -> None:
            gradients[path] = of_input[0].detach(), of_output[0].detach()

        forward = module.register_forward_hook(lambda _, args, _output: inputs.update({path: args[0].detach()}))
        return [forward, module.register_full_backward_hook(backward)]

    with hooked(handle for path, module in norms.items() for handle in record(path, module)):
        torch.autograd.backward(loss_of(model, batch))
    errors = {}
    for path, module in norms.items():
        x, (dx, u) = inputs[path], gradients[path]
        gain = getattr(module, "weight", None)
        weight = None if gain is None else gain.detach()
        upstream = u if weight is None else u * weight
        scale = reference.statistics(x, spec, reference.machine_eps(x, spec)).scale
        tangent = geometry.tangent_projection(upstream, x, is_centred=spec.centring.numerator)
        removed = 1 - tangent.square().sum(-1) / upstream.square().sum(-1)
        errors[path] = BackwardErrors(
            projected=((dx - tangent / scale).norm() / dx.norm()).item(),
            exact=((dx - geometry.vjp(x, u, spec, weight)).norm() / dx.norm()).item(),
            removed=removed.nanmedian().item(),
        )
    return errors


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Loss and gradient at theta - t g / |g|, for some distances t."""

    distances: tuple[float, ...]
    """t, ascending."""
    losses: tuple[float, ...]
    """At each distance."""
    changes: tuple[float, ...]
    """|gradient(t) - g| at each distance."""
    loss: float
    """At t = 0."""
    gradient: float
    """|g|."""

    @property
    def measures(self) -> dict[str, float]:
        """Three numbers; each is infinite if a loss or gradient on the line is not finite.

        - "roughness": the largest change of the gradient over the distance, the "effective beta-smoothness";
        - "loss_range": greatest minus least loss on the line, its start included;
        - "surprise": the largest change of the gradient over its length, below 1 while it keeps its direction.
        """
        losses = (self.loss, *self.losses)
        slopes = [change / distance for change, distance in zip(self.changes, self.distances, strict=True)]
        is_finite = all(map(math.isfinite, self.changes))
        return {
            "roughness": max(slopes) if all(map(math.isfinite, slopes)) else math.inf,
            "loss_range": max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.inf,
            "surprise": max(self.changes) / self.gradient if is_finite else math.inf,
        }


def along_the_gradient(model: nn.Module, batch: Batch, loss_of: Loss, shares: Sequence[float] = SHARES) -> Landscape:
    """Loss and gradient down the gradient of one batch's loss; the parameters are restored to the bit.

    Distances are shares of |theta|, all parameters together, and not multiples of learning rate times gradient, so that
    models whose gradients differ in length are compared over equal distances.

    Args:
        model: A model; `grad` of its parameters is left alone.
        batch: On the model's device.
        loss_of: The loss.
        shares: Distances over |theta|.

    Source:
        Santurkar et al. 2018, arXiv:1805.11604, section 3.2, with distances of our own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss_and_gradient() -> tuple[float, tuple[Tensor, ...]]:
        with torch.enable_grad():
            loss = loss_of(model, batch)
            return loss.item(), torch.autograd.grad(loss, parameters, materialize_grads=True)

    loss, gradient = loss_and_gradient()
    length, size = _norm(gradient), _norm([parameter.detach() for parameter in parameters])
    losses, changes = [], []
    for share in shares:
        moved = [
            parameter.detach() - share * size / length * slope
            for parameter, slope in zip(parameters, gradient, strict=True)
        ]
        with replaced(parameters, moved):
            there, slopes = loss_and_gradient()
        losses.append(there)
        changes.append(_norm([slope - old for slope, old in zip(slopes, gradient, strict=True)]))
    return Landscape(
        distances=tuple(share * size for share in shares),
        losses=tuple(losses),
        changes=tuple(changes),
        loss=loss,
        gradient=length,
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class Turning:
    """How steps turn one scale-invariant group of weights w, at several lengths c |w|."""

    paths: tuple[str, ...]
    """Names of its parameters."""
    products: tuple[float, ...]
    """|gradient| |weight| at each c; a constant in theory."""
    cosine: float
    """Largest |cosine| of weight and gradient; 0 in theory."""
    by_gradient: tuple[float, ...]
    """Angle in radians by which a step of given rate times the gradient turns it, at each c: ~ 1 / c^2."""
    by_sign: tuple[float, ...]
    """The same for a step along the signs of the gradient, as Adam's first step is: ~ 1 / c."""


def turnings(model: nn.Module, run: Callable[[], Tensor], loss: Callable[[], Tensor]) -> tuple[Turning, ...]:
    """Find the scale-invariant groups of a model by behaviour, and measure each; the weights are restored to the bit.

    Args:
        model: In float64, so that rounding hides nothing; its norms with an eps that is practically 0.
        run: Its output for a small input.
        loss: Its loss, which must not depend on the scale.

    Source:
        van Laarhoven 2017, arXiv:1706.05350; Arora, Li & Lyu 2018, arXiv:1812.03981.
    """
    found = []
    for group in geometry.scale_invariant_groups(model, run):
        originals = [parameter.data for parameter in group.parameters]
        products, cosines, by_gradient, by_sign = [], [], [], []
        for factor in FACTORS:
            with replaced(group.parameters, [factor * original for original in originals]):
                weight, gradient = flat(group.parameters), flat(torch.autograd.grad(loss(), group.parameters))
                products.append((weight.norm() * gradient.norm()).item())
                cosines.append(abs(geometry.radial_cosine(weight, gradient).item()))
                by_gradient.append(geometry.angle_between(weight, weight - _RATE * gradient).item())
                by_sign.append(geometry.angle_between(weight, weight - _RATE * gradient.sign()).item())
        found.append(
            Turning(
                paths=group.paths,
                products=tuple(products),
                cosine=max(cosines),
                by_gradient=tuple(by_gradient),
                by_sign=tuple(by_sign),
            )
        )
    return tuple(found)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of some tensors as one vector, detached."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
