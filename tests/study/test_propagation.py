import math

import pytest
import torch
from torch import nn

from normkit.study import Transformer, TransformerConfig
from normkit.study.corpus import next_token_loss
from normkit.study.propagation import gradient_norm, last_token_gradient, mean_square, perturb, propagate


def small(**choices):
    config = TransformerConfig(vocabulary=16, context=8, width=16, layers=3, heads=2, **choices)
    return Transformer(config, seed=0).double()


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, (4, 9), generator=generator), generator


def test_the_stream_is_read_before_the_first_block_and_after_each():
    model = small(placement="post")
    ids, generator = draw()
    with torch.no_grad():
        embedded = model.embedding(ids[:, :-1]) + model.position(torch.arange(8))
    found = propagate(model, ids, generator)
    assert len(found.stream) == 4
    assert found.stream[0] == pytest.approx(mean_square(embedded))
    # After a LayerNorm every row has mean square 1, less what eps takes.
    assert found.stream[1:] == pytest.approx([1.0] * 3, abs=1e-3)


def test_without_branches_the_stream_is_the_embedding():
    model = small(placement="none", branch_gain=0.0)
    found = propagate(model, *draw())
    assert found.stream == pytest.approx([found.stream[0]] * 4)


def test_the_gradients_are_those_of_each_blocks_two_matrices():
    model, reference = small(), small()
    ids, generator = draw()
    found = propagate(model, ids, generator)
    next_token_loss(reference, (ids,)).backward()
    for block, value in zip(reference.blocks, found.gradients, strict=True):
        mlp = block.mlp.branch
        assert value == pytest.approx(math.hypot(mlp.up.weight.grad.norm(), mlp.down.weight.grad.norm()))


def test_the_gradient_of_a_token_is_that_of_its_own_loss():
    model, reference = small(), small()
    ids, _ = draw()
    found = last_token_gradient(model, ids)
    mlp = reference.blocks[-1].mlp.branch
    losses = nn.functional.cross_entropy(reference(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    squares = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, [mlp.up.weight, mlp.down.weight], retain_graph=True)
        squares.append(sum(gradient.square().sum() for gradient in gradients))
    assert found == pytest.approx(torch.stack(squares).mean().sqrt().item())


def test_the_change_is_that_of_what_the_unembedding_reads_over_the_square_of_the_nudge():
    model, reference = small(), small()
    ids, generator = draw()
    change = propagate(model, ids, generator).change
    ids, generator = draw()

    def features():
        x = reference.embedding(ids[:, :-1]) + reference.position(torch.arange(8))
        for block in reference.blocks:
            x = block(x)
        return reference.final_norm(x).detach()

    before = features()
    perturb(reference.blocks, 1e-3, generator)
    assert change == pytest.approx(mean_square(features() - before) / 1e-6, rel=1e-6)


def test_no_hook_is_left():
    model = small()
    propagate(model, *draw())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_nudge_is_relative_and_leaves_vectors_alone():
    module = nn.Linear(100, 100).double()
    before = [value.detach().clone() for value in module.parameters()]
    perturb(module, 0.1, torch.Generator().manual_seed(0))
    moved = module.weight.detach() - before[0]
    # 10,000 draws: their rms errs by 0.7 %.
    assert math.sqrt(mean_square(moved) / mean_square(before[0])) == pytest.approx(0.1, rel=0.03)
    assert torch.equal(module.bias, before[1])


def test_an_explosion_is_measured_beyond_the_squares_of_float32():
    assert mean_square(torch.full((2,), 1e30)) == pytest.approx(1e60, rel=1e-6)
    module = nn.Linear(1, 1, bias=False)
    module.weight.grad = torch.full((1, 1), 1e30)
    assert gradient_norm(module) == pytest.approx(1e30, rel=1e-6)
