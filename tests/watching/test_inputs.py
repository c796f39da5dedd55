"""What a model is fed, and its labels, read off the gradient of its logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.measurement.hooks import Failures
from normkit.watching.inputs import INPUTS, InputRecorder, batch_series

VOCABULARY = 11


class Echo(nn.Module):
    """Logits of its input; in a mapping where it is given labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor, labels: Any = None, **_: Tensor) -> Any:
        logits = self.table(ids)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def recorded(model: nn.Module, *losses: Any) -> dict[str, float]:
    """`INPUTS` of what a step's losses are made of."""
    recorder = InputRecorder(torch.device("cpu"), failures := Failures(), lambda: None)
    recorder.install(model)
    for loss in losses:
        loss().backward()
    found = recorder.take()
    recorder.remove()
    assert not failures.by_place
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return dict(zip(INPUTS, found.tolist(), strict=True))


def ids(rows: int = 4, tokens: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_batch_of_tokens():
    torch.manual_seed(0)
    model, x = Echo(), ids()
    mask = torch.ones_like(x)
    mask[0, 5:] = 0
    found = recorded(model, lambda: model(ids=x, attention_mask=mask).sum())
    assert (found["calls"], found["ids"], found["tokens"], found["sampled"]) == (1, 1, 32, 36)
    assert found["distinct"] == len(x.unique())
    assert (found["low"], found["high"]) == (x.min(), x.max())
    # A sum is no cross-entropy.
    assert found["labels"] == 0
    told = dict(batch_series(found))
    assert told["id rms"] == pytest.approx(float(x.double().square().mean().sqrt()))
    assert "batch rms" not in told


@pytest.mark.parametrize(("by", "name"), [(0, "copied"), (1, "next"), (-1, "back"), (2, "then")])
def test_how_labels_follow_from_the_input(by: int, name: str):
    torch.manual_seed(0)
    model, x = Echo(), ids(tokens=14)
    found = recorded(model, lambda: entropy(model(x[:, 2:-2]), x[:, 2 + by : 12 + by]))
    assert found["labels"] == 32
    whole = {"copied": "labels", "next": "nexts", "back": "backs", "then": "thens"}
    for kind, seen in whole.items():
        if kind == name:
            assert found[kind] == found[seen] > 20
        else:
            assert found[kind] < found[seen] / 2
    assert found["highest"] <= VOCABULARY - 1


def test_labels_that_the_model_shifts_itself_and_some_that_do_not_count():
    torch.manual_seed(0)
    model, x = Echo(), ids()
    labels = x.clone()
    labels[1] = -100
    found = recorded(model, lambda: model(x, labels=labels)["loss"])
    # Of 32 places of 36 the last ones, and those of the second row, have no label.
    assert found["next"] == found["nexts"] == found["labels"]
    assert 18 < found["labels"] <= 24


def test_a_sum_over_micro_batches_and_what_no_gradient_follows():
    torch.manual_seed(0)
    model, x = Echo(), ids()
    with torch.no_grad():
        assert recorded(model)["calls"] == 0

    def pair() -> Tensor:
        with torch.no_grad():
            model(ids(rows=99))
        return entropy(model(x[:2]), x[:2]) + entropy(model(x[2:]), x[2:])

    found = recorded(model, pair)
    assert (found["calls"], found["tokens"], found["labels"]) == (2, 36, 36)


def test_the_digest_tells_batches_apart():
    torch.manual_seed(0)
    model = Echo()

    def digest(x: Tensor) -> float:
        return recorded(model, lambda: model(x).sum())["digest"]

    x = ids()
    assert digest(x) == digest(x.clone())
    others = [digest(other) for other in (x.flip(0), x.roll(1), x[:, :-1], *(ids(seed=seed) for seed in range(1, 50)))]
    assert len({digest(x), *others}) == 1 + len(others)
    assert max(others) < 2**53


def test_numbers_that_are_no_ids():
    model = nn.Linear(3, 2)
    x = torch.arange(24.0).reshape(8, 3)
    found = recorded(model, lambda: model(x).sum())
    assert (found["ids"], found["tokens"], found["distinct"], found["low"], found["high"]) == (0, 8, 24, 0, 23)
    assert found["energy"] == pytest.approx(float(x.double().square().sum()))
    assert found["labels"] == 0
    x[3, 1] = math.nan
    assert math.isnan(recorded(model, lambda: model(x).sum())["high"])


def test_classes_have_labels_without_ids():
    torch.manual_seed(0)
    model, labels = nn.Linear(3, 5), torch.tensor([4, 1, 1, 4])
    found = recorded(model, lambda: F.cross_entropy(model(torch.randn(4, 3)), labels))
    assert (found["labels"], found["nexts"], found["lowest"], found["highest"]) == (4, 0, 1, 4)


def test_equal_samples_and_the_ends_of_padded_rows():
    model, x = nn.Conv1d(3, 2, 1), torch.zeros(8, 3, 1024)
    x[..., :128] = torch.randn(8, 3, 128)
    found = recorded(model, lambda: model(x).sum())
    # No stride of a sample skips the frames in front of the zeros.
    assert (found["others"], found["copies"]) == (7, 0)
    assert found["distinct"] > found["sampled"] / 16
    copied = x[:1].repeat(4, 1, 1)
    found = recorded(model, lambda: model(copied).sum() + model(x).sum())
    assert (found["others"], found["copies"]) == (10, 3)
    assert list(batch_series(found))[2] == ("batch copies", 0.3)
