"""What is changed between two batches, and how far rows moved in tensors of several layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normkit.measurement.perturbed_batches import change, perturbations, put_back

ROWS, TOKENS = 2, 5


class Masked(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return input_ids.float() if attention_mask is None else input_ids * attention_mask.float()


class Plain(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.float()


def ids(rows: int = 3, tokens: int = 30) -> Tensor:
    return torch.randint(0, 9, (rows, tokens), generator=torch.Generator().manual_seed(0))


def test_each_trial_changes_one_thing_and_nothing_that_is_kept() -> None:
    found = {perturbation.kind: perturbation for perturbation in perturbations(Masked(), {"input_ids": ids()}) or ()}
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
    known = set(ids()[:2, :19].flatten().tolist())
    for perturbation in perturbations(Plain(), {"input_ids": ids()}) or ():
        assert set(perturbation.after["input_ids"].flatten().tolist()) <= known


def test_padding_is_tried_only_on_a_model_that_takes_a_mask() -> None:
    assert [each.kind for each in perturbations(Plain(), {"input_ids": ids()}) or ()] == [
        "batch",
        "time",
    ]


def test_other_inputs_come_along() -> None:
    batch = {
        "tokens": ids(),
        "token_type_ids": torch.zeros(3, 30, dtype=torch.long),
        "position_ids": torch.arange(30)[None],
        "attention_mask": ids() > 100,
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


def test_a_single_row_gets_a_companion_of_other_ids() -> None:
    perturbation = (perturbations(Plain(), {"input_ids": ids(rows=1)}) or ())[0]
    first, second = perturbation.before["input_ids"]
    assert torch.equal(first, ids(rows=1)[0, :19])
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
    [{}, {"x": torch.randn(2, 5)}, {"a": ids(), "b": ids()}, {"input_ids": torch.zeros(2, 0, dtype=torch.long)}],
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
