import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.study.windows import held_out_loss, next_token_loss, text_of_the_library, windows


def first(text, **choices):
    return next(windows(text, **{"batch": 4, "window": 16, "seed": 3, **choices}))[0]


def test_a_seed_gives_its_batches_whatever_torch_has_drawn():
    text = bytes(range(256)) * 8
    torch.manual_seed(0)
    batch = first(text)
    torch.manual_seed(1)
    assert torch.equal(first(text), batch)
    assert not torch.equal(first(text, seed=4), batch)
    assert batch.shape == (4, 17)
    # Each window is a stretch of the text, which here counts upwards.
    assert torch.equal((batch[:, 1:] - batch[:, :-1]) % 256, torch.ones(4, 16, dtype=torch.int64))


def test_windows_reach_both_ends_of_the_text():
    text = b"a" + b"b" * 16 + b"c"
    supply = windows(text, batch=4, window=16, seed=0)
    seen = torch.cat([next(supply)[0] for _ in range(20)])
    assert set(seen[:, 0].tolist()) == {ord("a"), ord("b")}
    assert set(seen[:, -1].tolist()) == {ord("b"), ord("c")}


class Table(nn.Module):
    """Logits of the next token by a table of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(256, 256), nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.table(ids))


def test_the_loss_is_that_of_each_token_after_the_first():
    model = Table().eval()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = F.cross_entropy(model.table.weight[[5, 6, 8, 9]], torch.tensor([6, 7, 9, 10]))
    assert next_token_loss(model, (ids,)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary():
    model = Table()
    nn.init.zeros_(model.table.weight)
    assert held_out_loss(model, bytes(range(256)) * 4, window=16) == pytest.approx(math.log(256), rel=1e-6)


def test_held_out_text_is_measured_in_evaluation_mode_at_fixed_places():
    model = Table().train()
    nn.init.normal_(model.table.weight)
    text = bytes(range(256)) * 4
    losses = {held_out_loss(model, text, window=16, count=20) for _ in range(2)}
    assert len(losses) == 1
    assert model.training
    # 20 windows are more than a batch, and each counts alike: those that are spread over the text, to its end.
    starts = torch.linspace(0, len(text) - 17, 20).long()
    ids = torch.tensor(list(text))[starts[:, None] + torch.arange(17)]
    model.eval()
    expected = sum(next_token_loss(model, (row[None],)).item() for row in ids) / 20
    assert losses.pop() == pytest.approx(expected, rel=1e-5)


def test_the_library_gives_text_to_train_on_and_other_text_to_measure_on():
    training, held_out = text_of_the_library()
    assert len(training) > 10 * len(held_out) > 100_000
