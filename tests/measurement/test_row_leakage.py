"""Which norms let changes through, on real tiny models; and that nothing of the model is changed by looking."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.measurement.row_leakage import Leak, change, find_leaks, perturbations, put_back
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
    assert kinds(found) == {(kind, "training", "second") for kind in ("batch", "time", "padding")}


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


ROWS, TOKENS = 2, 5


class Masked(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return input_ids.float() if attention_mask is None else input_ids * attention_mask.float()


class Plain(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.float()


def few_ids(rows: int = 3, tokens: int = 30) -> Tensor:
    return torch.randint(0, 9, (rows, tokens), generator=torch.Generator().manual_seed(0))


def test_each_trial_changes_one_thing_and_nothing_that_is_kept() -> None:
    found = {
        perturbation.kind: perturbation for perturbation in perturbations(Masked(), {"input_ids": few_ids()}) or ()
    }
    assert list(found) == ["batch", "time", "padding"]
    for perturbation in found.values():
        before, after = perturbation.before["input_ids"], perturbation.after["input_ids"]
        assert before.shape == after.shape == perturbation.kept.shape == (2, 19)
        changed = before != after
        assert not (changed & perturbation.kept).any()
    assert bool((found["batch"].before["input_ids"] != found["batch"].after["input_ids"])[0].all())
    assert bool((found["time"].before["input_ids"] != found["time"].after["input_ids"])[:, 9:].all())
    mask = found["padding"].before["attention_mask"]
    assert mask.sum(1).tolist() == [19, 13]
    assert torch.equal(mask.bool(), found["padding"].kept)


def test_new_ids_are_among_the_old_ones() -> None:
    known = set(few_ids()[:2, :19].flatten().tolist())
    for perturbation in perturbations(Plain(), {"input_ids": few_ids()}) or ():
        assert set(perturbation.after["input_ids"].flatten().tolist()) <= known


def test_padding_is_tried_only_on_a_model_that_takes_a_mask() -> None:
    assert [each.kind for each in perturbations(Plain(), {"input_ids": few_ids()}) or ()] == [
        "batch",
        "time",
    ]


def test_other_inputs_come_along() -> None:
    batch = {
        "tokens": few_ids(),
        "token_type_ids": torch.zeros(3, 30, dtype=torch.long),
        "position_ids": torch.arange(30)[None],
        "attention_mask": few_ids() > 100,
        "image": torch.arange(3.0)[:, None, None].expand(3, 4, 4),
    }
    perturbation = (perturbations(Plain(), batch) or ())[0]
    shapes = {name: tuple(value.shape) for name, value in perturbation.before.items()}
    assert shapes == {
        "tokens": (2, 19),
        "token_type_ids": (2, 19),
        "position_ids": (1, 19),
        "attention_mask": (2, 19),
        "image": (2, 4, 4),
    }
    assert bool(perturbation.before["attention_mask"].all())
    assert perturbation.before["image"][:, 0, 0].tolist() == [0.0, 1.0]


def test_a_single_row_gets_a_companion_of_other_few_ids() -> None:
    perturbation = (perturbations(Plain(), {"input_ids": few_ids(rows=1)}) or ())[0]
    first, second = perturbation.before["input_ids"]
    assert torch.equal(first, few_ids(rows=1)[0, :19])
    assert bool((first != second).all())


def test_one_id_only_cannot_be_changed_without_a_vocabulary() -> None:
    assert perturbations(Plain(), {"input_ids": torch.zeros(2, 4, dtype=torch.long)}) is None

    class Embedded(Plain):
        def get_input_embeddings(self) -> nn.Module:
            return nn.Embedding(7, 2)

    perturbation = (perturbations(Embedded(), {"input_ids": torch.full((2, 4), 6)}) or ())[0]
    assert perturbation.after["input_ids"][0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"x": torch.randn(2, 5)},
        {"a": few_ids(), "b": few_ids()},
        {"input_ids": torch.zeros(2, 0, dtype=torch.long)},
    ],
)
def test_without_token_ids_there_is_no_trial(batch: dict[str, Tensor]) -> None:
    assert perturbations(Plain(), batch) is None


LAYOUTS = {
    "batch, token, feature": ((ROWS, TOKENS, 3), lambda row, token: (row, token, 1)),
    "batch, feature, token": ((ROWS, 3, TOKENS), lambda row, token: (row, 1, token)),
    "batch, head, token, feature": ((ROWS, 4, TOKENS, 3), lambda row, token: (row, 3, token, 1)),
    "folded heads": ((ROWS * 4, TOKENS, 3), lambda row, token: (row * 4 + 3, token, 1)),
    "folded tokens": ((ROWS * TOKENS, 3), lambda row, token: (row * TOKENS + token, 1)),
    "token, batch, feature": ((TOKENS, ROWS, 3), lambda row, token: (token, row, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_is_seen_where_it_is_kept_and_nowhere_else(layout: str) -> None:
    shape, place = LAYOUTS[layout]
    before = torch.ones(shape)
    kept = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    kept[1, 2] = True
    for row in range(ROWS):
        for token in range(TOKENS):
            after = before.clone()
            after[place(row, token)] += 0.25
            seen = change(before, after, kept)
            assert seen == (0.25 if (row, token) == (1, 2) else 0.0)
            patched = put_back(before, after, kept)
            assert torch.equal(patched, before if (row, token) == (1, 2) else after)
            assert after[place(row, token)] == 1.25


def test_rows_without_tokens_are_compared_where_all_tokens_are_kept() -> None:
    before = torch.ones(ROWS, 3)
    after = before + 1
    kept = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    assert change(before, after, kept) == 1.0
    kept[:, 3] = False
    assert change(before, after, kept) == 0.0


def test_a_change_is_measured_by_its_row_and_not_below_the_largest() -> None:
    kept = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    before = torch.ones(ROWS, TOKENS, 3)
    before[0, 0] = 1e-3
    after = before.clone()
    after[0, 0] += 1e-3
    assert change(before, after, kept) == pytest.approx(1.0)
    before[0, 0] = after[0, 0] = 0.0
    after[0, 0, 0] = 1e-9
    assert change(before, after, kept) == pytest.approx(1e-3)


def test_numbers_that_are_not_finite() -> None:
    kept = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    before = torch.ones(ROWS, TOKENS, 3)
    before[0, 0, 0], before[1, 0, 0] = math.nan, math.inf
    assert change(before, before.clone(), kept) == 0.0
    after = before.clone()
    after[0, 1, 0] = math.nan
    assert change(before, after, kept) > 1e100


@pytest.mark.parametrize("shape", [(3,), (7, 3)])
def test_a_tensor_without_such_rows_did_not_move(shape: tuple[int, ...]) -> None:
    kept = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    assert change(torch.zeros(shape), torch.ones(shape), kept) == 0.0
