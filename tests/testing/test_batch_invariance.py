"""Bits of a whole model that depend on the batch: seen in each surrounding, and placed at what moves them first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.errors import InputError
from normkit.testing import BatchInvarianceError, assert_batch_invariant, bit_changes
from tiny_models import tiny


class Drifting(nn.Module):
    """A norm whose bits follow the number of rows; `limit` rows and more give others."""

    def __init__(self, limit):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.limit = limit

    def forward(self, x):
        y = x / x.square().mean(-1, keepdim=True).sqrt() * self.weight
        return y * (1 + torch.finfo(y.dtype).eps) if x[..., 0].numel() >= self.limit else y


class Block(nn.Module):
    def __init__(self, limit=1 << 40, mixed=False):
        super().__init__()
        self.norm, self.linear = Drifting(limit), Exact()
        self.mixed = mixed

    def forward(self, x):
        x = x + self.norm(x)
        return x + self.linear(x - x.mean() if self.mixed else x)


class Exact(nn.Module):
    """Elementwise, without transcendentals: no kernel makes its bits depend on a shape."""

    def forward(self, x):
        return x * 0.5 + 1


class Padded(nn.Module):
    """A model of tokens whose bits follow the length."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), Drifting(40)

    def forward(self, input_ids, attention_mask=None):  # noqa: ARG002
        return self.norm(self.embedding(input_ids))


def places(model, batch):
    return [(each.surrounding, each.path, each.between) for each in bit_changes(model, batch)]


def test_a_model_whose_bits_stay_passes():
    assert_batch_invariant(nn.Sequential(Block(), Block()), torch.randn(3, 4, 16))


def test_the_module_that_moves_bits_first_is_named():
    model = nn.Sequential(Block(), Block(limit=12), Block(limit=12))
    batch = torch.randn(3, 4, 16)
    assert places(model, batch) == [("in a batch of 3", "1.norm", None), ("in reverse order", "1.norm", None)]
    with pytest.raises(BatchInvarianceError) as raised:
        assert_batch_invariant(model, batch)
    lines = str(raised.value).splitlines()
    assert lines[0] == "Sequential gives a sample other bits than alone"
    assert lines[1].startswith("  in a batch of 3: bits first move at 1.norm (Drifting); ")
    assert raised.value.changes[0].class_name == "Drifting"
    assert 0 < raised.value.changes[0].share <= 1
    assert 0 < raised.value.changes[0].largest < 1e-6


def test_code_between_two_modules_is_placed_between_them():
    model = nn.Sequential(Block(), Block(mixed=True))
    # The mean of a batch is that of other samples.
    assert places(model, torch.randn(3, 4, 16))[0] == ("in a batch of 3", "1", ("1.norm", "1.linear"))


def test_a_place_in_the_batch_and_padding_are_surroundings_of_their_own():
    class Last(nn.Module):
        def forward(self, x):
            return torch.cat([x[:1] * (1 + 1e-6), x[1:]]) if len(x) > 1 else x * (1 + 1e-6)

    assert [each[0] for each in places(nn.Sequential(Last()), torch.randn(3, 16))] == [
        "in a batch of 3",
        "in reverse order",
    ]
    found = places(Padded(), {"input_ids": torch.arange(22).reshape(2, 11) % 11})
    assert found == []
    # 2 x 15 rows stay below the limit of 40; with 5 more tokens each they do not.
    found = places(Padded(), {"input_ids": torch.arange(30).reshape(2, 15) % 11})
    assert found == [("with 5 tokens of padding", "norm", None)]


def test_nan_at_the_same_places_are_the_same():
    x = torch.randn(3, 4, 16)
    x[0, 0, 0] = float("nan")
    assert_batch_invariant(nn.Sequential(Block()), x)


@pytest.mark.slow
def test_the_attention_of_a_model_of_transformers_is_named():
    model, _ = tiny("llama", dtype=torch.bfloat16)
    mode = model.training
    batch = {"input_ids": torch.arange(32).reshape(2, 16)}
    for change in bit_changes(model, batch):
        assert change.surrounding == "with 5 tokens of padding"
        assert "self_attn" in change.path
    assert model.training == mode
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Sequential(Block()), torch.randn(1, 4, 16), "expected a batch of two samples or more, got 1"),
        (
            nn.Sequential(nn.Flatten(0)),
            torch.randn(3, 16),
            "expected a model that returns a tensor with a row for each",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(model, batch, message):
    with pytest.raises(InputError, match=message):
        assert_batch_invariant(model, batch)
