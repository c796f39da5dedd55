"""What a transformer does to activations, gradients and nudges of its weights at the start, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.study.transformer import Transformer
from normkit.study.windows import next_token_loss

_RELATIVE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Propagation:
    """What goes through a model of L blocks, forward and back.

    Attributes:
        stream: E|x|^2 / n of the residual stream before the first block and after each, L + 1 values.
        gradients: For each block the norm of the gradient of its MLP's two matrices together, L values.
        token_gradient: That of the last block, of the loss of one token: root of the mean square over tokens.
        change: Mean squared change of what the unembedding reads, when each matrix of the blocks changes by noise of
            a thousandth of its rms, over the square of that thousandth.
    """

    stream: tuple[float, ...]
    gradients: tuple[float, ...]
    token_gradient: float
    change: float


def propagate(model: Transformer, ids: Tensor, generator: torch.Generator) -> Propagation:
    """Measure one model on one batch by one backward pass and two forward passes; its weights are nudged by it.

    Args:
        model: Untrained or trained.
        ids: Token ids (batch, tokens + 1).
        generator: Of the noise.
    """
    stream: list[float] = []
    read: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        stream.extend(mean_square(x) for x in (*(() if stream else inputs), output))

    handles = [block.register_forward_hook(keep) for block in model.blocks]
    handles.append(model.unembedding.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].detach())))
    token_gradient = last_token_gradient(model, ids)
    for handle in handles[:-1]:
        handle.remove()
    nudge(model.blocks, _RELATIVE, generator)
    with torch.no_grad():
        model(ids[:, :-1])
    handles[-1].remove()
    branches = [model.get_submodule(f"blocks.{number}.mlp.branch") for number in range(len(model.blocks))]
    return Propagation(
        stream=tuple(stream),
        gradients=tuple(gradient_norm(branch) for branch in branches),
        token_gradient=token_gradient,
        change=mean_square((read[1] - read[0]) / _RELATIVE),
    )


def last_token_gradient(model: Transformer, ids: Tensor) -> float:
    """The norm of the gradient of the last MLP's matrices under the loss of one token, after a backward pass of all.

    Beyond the last attention tokens do not meet, so that the loss of a token t has the gradient g_t x_t^T, of norm
    |g_t| |x_t|, with x_t what a matrix multiplies and g_t the gradient of what comes of it. Unlike the gradient of a
    batch it does not depend on how much alike the tokens are. The root of the mean square over tokens is returned.

    Args:
        model: Whose gradients are filled as by any backward pass.
        ids: Token ids (batch, tokens + 1).
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls.append((inputs[0].detach(), output))

    branch = model.get_submodule(f"blocks.{len(model.blocks) - 1}.mlp.branch")
    handles = [module.register_forward_hook(keep) for module in branch.children()]
    loss = next_token_loss(model, (ids,))
    for handle in handles:
        handle.remove()
    torch.autograd.backward(loss)
    total = 0.0
    for x, output in calls:
        assert output.grad is not None
        total += (x.double().square().sum(-1) * output.grad.double().square().sum(-1)).mean().item()
    # The loss is a mean over tokens: a token's own gradient is as many times as large.
    return math.sqrt(total) * ids[:, 1:].numel()


@torch.no_grad()
def nudge(module: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Add to each matrix normal noise of `relative` times its rms, in place.

    Args:
        module: Whose matrices, gains and biases excepted.
        relative: Rms of the noise over that of the matrix.
        generator: Of the noise.
    """
    for weight in module.parameters():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(relative * math.sqrt(mean_square(weight)) * noise)


def gradient_norm(module: nn.Module) -> float:
    """The norm of the gradients of a module's matrices together."""
    gradients = [weight.grad for weight in module.parameters() if weight.dim() == 2]
    return math.sqrt(sum(grad.double().square().sum().item() for grad in gradients if grad is not None))


def mean_square(x: Tensor) -> float:
    """Of all elements, summed in float64: squares of an explosion leave float32."""
    return x.detach().double().square().mean().item()
