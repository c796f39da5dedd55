"""Which norms let changes through, on real tiny models; and that nothing of the model is changed by looking."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.measurement.row_leakage import Leak, find_leaks
from normkit.measurement.running import first_tokens, runner
from normkit.measurement.structure import survey

WIDTH = 16


class OverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()


class OverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean((0, 2), keepdim=True) + 1e-5).sqrt()


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Tiny(nn.Module):
    """Attention to the past, or to all, between two norms; it heeds a mask and drops out in training."""

    def __init__(self, first: nn.Module, second: nn.Module, *, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal = causal
        self.embedding = nn.Embedding(50, WIDTH)
        self.first, self.second = first, second
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        query, key, value = self.projection(self.first(x))[:, None].chunk(3, -1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        allowed = (allowed.tril() if self.causal else allowed)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None]
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)[:, 0]
        return self.second(F.dropout(x, 0.5, training=self.training))


def layer_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def ids(rows: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(0, 50, (rows, tokens), generator=torch.Generator().manual_seed(0))


def leaks_of(model: nn.Module, batch: dict[str, Tensor] | None = None) -> tuple[Leak, ...] | None:
    batch = {"input_ids": ids()} if batch is None else batch
    model.eval()
    with torch.no_grad():
        structure = survey(model, runner(model, first_tokens(batch)))
    return find_leaks(model, structure, batch)


def kinds(leaks: tuple[Leak, ...] | None) -> set[tuple[str, str, str]]:
    assert leaks is not None
    return {(leak.kind, leak.mode, leak.path) for leak in leaks}


@pytest.mark.slow
def test_norms_of_single_tokens_do_not_leak() -> None:
    assert leaks_of(Tiny(layer_norm(), layer_norm())) == ()
    assert leaks_of(Tiny(layer_norm(), layer_norm(), causal=False)) == ()
    assert leaks_of(Tiny(layer_norm(), layer_norm()).bfloat16()) == ()


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_norm_over_tokens_leaks_time_and_padding_where_it_stands(where: str) -> None:
    model = Tiny(layer_norm(), layer_norm())
    setattr(model, where, OverTokens())
    assert kinds(leaks_of(model)) == {("time", "evaluation", where), ("padding", "evaluation", where)}


def test_time_counts_only_in_a_model_that_is_causal_otherwise() -> None:
    assert kinds(leaks_of(Tiny(OverTokens(), layer_norm(), causal=False))) == {("padding", "evaluation", "first")}


def test_a_norm_over_the_batch_leaks_samples() -> None:
    found = leaks_of(Tiny(layer_norm(), OverBatch()))
    assert ("batch", "evaluation", "second") in kinds(found)
    assert not [leak for leak in found or () if leak.path == "first"]


@pytest.mark.slow
def test_a_batch_norm_leaks_in_training_mode_only() -> None:
    found = leaks_of(Tiny(layer_norm(), BatchNorm()))
    seen = {(kind, "training", "second") for kind in ("batch", "time", "padding", "mode")}
    assert kinds(found) == seen
    gap = next(leak.change for leak in found or () if leak.kind == "mode")
    # A quarter of the output in evaluation mode, and the same in training mode: further apart.
    model = Tiny(layer_norm(), BatchNorm())
    model.second.inner.running_var.fill_(16.0)
    wide = next(leak.change for leak in leaks_of(model) or () if leak.kind == "mode")
    assert wide > 2 * gap


def test_a_model_that_couples_samples_without_a_norm() -> None:
    class Mixed(Tiny):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids, attention_mask) + self.embedding(input_ids).mean(0)

    # What padding holds reaches other samples on the same way.
    assert kinds(leaks_of(Mixed(layer_norm(), layer_norm()))) == {
        ("batch", "evaluation", ""),
        ("padding", "evaluation", ""),
    }


def test_a_single_row_gets_a_companion() -> None:
    found = leaks_of(Tiny(layer_norm(), OverBatch()), {"input_ids": ids(rows=1)})
    assert ("batch", "evaluation", "second") in kinds(found)


def test_inputs_without_token_ids_are_not_tried() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert leaks_of(model, {"input": torch.randn(2, 5, 8)}) is None


def test_a_model_that_refuses_the_small_batch_is_not_tried() -> None:
    class Strict(Tiny):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if input_ids.shape == (2, 19):
                raise RuntimeError("two rows of 19 tokens")
            return super().forward(input_ids, attention_mask)

    assert leaks_of(Strict(layer_norm(), layer_norm())) is None


def test_a_model_that_raises_in_training_mode_keeps_what_was_seen() -> None:
    class EvaluationOnly(Tiny):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            y = super().forward(input_ids, attention_mask)
            if self.training:
                raise RuntimeError("not in training")
            return y

    assert kinds(leaks_of(EvaluationOnly(OverTokens(), BatchNorm()))) >= {("time", "evaluation", "first")}


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_the_model_and_the_generators_are_left_as_they_were(raises: bool) -> None:
    class Raising(Tiny):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            y = super().forward(input_ids, attention_mask)
            if raises and self.training:
                raise RuntimeError("after the batch norm")
            return y

    model = Raising(layer_norm(), BatchNorm()).eval()
    model.first.train()
    with torch.no_grad():
        structure = survey(model, runner(model, first_tokens({"input_ids": ids()})))
    before, tensors = copy.deepcopy(model.state_dict()), {id(buffer) for buffer in model.buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    assert find_leaks(model, structure, {"input_ids": ids()}) is not None
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {id(buffer) for buffer in model.buffers()} == tensors
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
