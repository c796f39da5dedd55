import math
import sys
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.study.digits import CLASSES, digit_batches, digit_loss, digit_score, digits


class Reader(nn.Module):
    """Says that every image shows the digit that its first pixel names."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, images):
        return self.scale * F.one_hot(images[:, 0, 0].long(), CLASSES)


def images_of(names):
    images = torch.zeros(len(names), 8, 8)
    images[:, 0, 0] = torch.tensor(names, dtype=torch.float32)
    return images


@pytest.mark.slow
def test_the_split_is_fixed_and_pixels_are_normalised():
    data = digits()
    assert data.training.shape == (1347, 8, 8)
    assert data.held_out.shape == (450, 8, 8)
    assert data.training.mean().abs().item() < 1e-5
    assert data.training.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    # scikit-learn's file begins with 0 to 9 and ends with 8 9 8.
    assert data.training_labels[:CLASSES].tolist() == list(range(CLASSES))
    assert data.held_out_labels[-3:].tolist() == [8, 9, 8]


@pytest.mark.slow
def test_batches_follow_from_their_seed_and_hold_no_image_twice():
    data = digits()
    first, again, other = (list(islice(digit_batches(data, batch=64, seed=seed), 3)) for seed in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])
    assert all(len(images.flatten(1).unique(dim=0)) == 64 for images, _ in first)


def test_loss_and_score_are_those_of_the_labels_in_full_batches():
    images, labels = images_of([0, 1, 2, 3]), torch.tensor([0, 1, 2, 4])
    right = math.log(math.exp(3) + 9) - 3
    wrong = math.log(math.exp(3) + 9)
    expected = (3 * right + wrong) / 4
    assert digit_loss(Reader(), (images, labels)).item() == pytest.approx(expected, rel=1e-6)
    score = digit_score(Reader(), images, labels)
    assert score.loss == pytest.approx(expected, rel=1e-6)
    assert score.error == 25
    score = digit_score(Reader(), images_of([0, 1, 2]), torch.tensor([0, 1, 5]), batch=2)
    assert score.error == 0
    assert math.isnan(digit_score(Reader(), images_of([0]), torch.tensor([0]), batch=2).error)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install \"normkit\[study\]\""):
        digits()
