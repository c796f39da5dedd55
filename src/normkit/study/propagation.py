"""Activations, gradients and the effect of perturbed weights in an untrained transformer, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.study.corpus import next_token_loss
from normkit.study.transformer import Transformer

_RELATIVE = 1e-3


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

    handles = [block.register_forward_hook(record) for block in model.blocks]
    handles.append(model.unembedding.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].detach())))
    token_gradient = last_token_gradient(model, ids)
    for handle in handles[:-1]:
        handle.remove()
    perturb(model.blocks, _RELATIVE, generator)
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
    handles = [module.register_forward_hook(record) for module in branch.children()]
    loss = next_token_loss(model, (ids,))
    for handle in handles:
        handle.remove()
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
