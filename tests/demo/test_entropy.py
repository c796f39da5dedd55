import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from normkit.demo.entropy import bits_per_byte, unigram_entropy
from normkit.errors import InputError


class Favourite(nn.Module):
    """Gives one byte value probability 1/2 and shares the rest among the other 255."""

    def __init__(self, byte):
        super().__init__()
        self.byte = byte
        self.seen = []

    def forward(self, input_ids):
        self.seen.append((self.training, tuple(input_ids.shape)))
        logits = torch.zeros(*input_ids.shape, 256)
        logits[..., self.byte] = math.log(255)
        return SimpleNamespace(logits=logits)


class Repeater(nn.Module):
    """Certain, nearly, that the next byte is the one before it."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=60.0 * nn.functional.one_hot(input_ids, 256))


def test_unigram_entropy_of_known_texts():
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(b"abab") == 1
    assert unigram_entropy(bytes(range(256))) == 8


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
def test_every_byte_is_counted_once_whatever_the_windows(length):
    text = (b"abcd" * length)[:length]
    hits = text.count(b"a")
    expected = (hits + (length - hits) * math.log2(2 * 255)) / length
    # float32 logarithms of a few numbers.
    assert bits_per_byte(Favourite(ord("a")), text, window=8, batch=3) == pytest.approx(expected, rel=1e-5)


def test_a_byte_is_predicted_from_the_one_before_it():
    assert bits_per_byte(Repeater(), b"\0" * 20, window=8) == pytest.approx(0, abs=1e-6)
    # One of 20 bytes differs from the one before it: 60 nats.
    assert bits_per_byte(Repeater(), b"a" * 20, window=8) == pytest.approx(60 / math.log(2) / 20, rel=1e-5)


def test_the_model_is_evaluated_and_left_as_it_was():
    model = Favourite(0)
    bits_per_byte(model, b"text", window=8)
    assert model.seen == [(False, (1, 8))]
    assert model.training


def test_an_empty_text_is_refused():
    with pytest.raises(InputError, match="at least one byte"):
        bits_per_byte(Favourite(0), b"")
