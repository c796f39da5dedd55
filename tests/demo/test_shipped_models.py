"""The text that ships is predicted as recorded; how many bits a model needs for a byte."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from normkit import demo
from normkit.demo.training import bits_per_byte, unigram_entropy
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


@pytest.fixture(scope="module", params=["layernorm", "rmsnorm"])
def shipped(request):
    """(model of stock classes, what loading it reported, its training record)."""
    folder = demo.directory(request.param)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model, report, json.loads((folder / "training.json").read_text())


def test_stock_transformers_load_it_without_a_missing_or_unexpected_key(shipped):
    model, report, _ = shipped
    assert type(model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")
    assert not any(report.values()), report


@pytest.mark.slow
def test_its_text_is_predicted_as_recorded_and_far_below_the_unigram_entropy(shipped):
    model, _, record = shipped
    text = demo.text().encode()
    measured = bits_per_byte(model, text)
    # The record is rounded to four digits; stock norms are float32, ours rounded float64.
    assert measured == pytest.approx(record["text"]["bits_per_byte"], abs=1e-3)
    assert unigram_entropy(text) == pytest.approx(record["text"]["unigram_entropy"], abs=1e-4)
    assert measured < 0.75 * unigram_entropy(text)


def test_it_learnt_files_that_it_never_saw(shipped):
    held_out = shipped[2]["held_out"]
    assert held_out["bits_per_byte"] < 0.6 * held_out["unigram_entropy"]


def test_the_configuration_holds_no_path_and_the_right_ids(shipped):
    model, _, record = shipped
    folder = demo.directory(record["model"])
    for name in ("config", "generation_config", "tokenizer_config", "training"):
        text = (folder / f"{name}.json").read_text()
        assert '"/' not in text
        assert " /" not in text
    assert (model.config.vocab_size, model.config.bos_token_id, model.config.eos_token_id) == (256, 0, 0)
    assert model.config.tie_word_embeddings


def test_the_curve_ends_where_the_record_does(shipped):
    record = shipped[2]
    lines = (demo.directory(record["model"]) / "training.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert [point["step"] for point in points] == sorted(point["step"] for point in points)
    assert points[-1]["step"] == record["recipe"]["steps"]
    assert points[-1]["held_out"] == pytest.approx(record["held_out"]["bits_per_byte"], abs=1e-4)
    assert points[0]["training"] > 2 * points[-1]["training"]


def test_the_twins_share_data_seed_and_size():
    first, second = (
        json.loads((demo.directory(name) / "training.json").read_text()) for name in ("layernorm", "rmsnorm")
    )
    assert first["recipe"] == second["recipe"]
    assert first["versions"] == second["versions"]
    listing = json.loads((demo.directory("rmsnorm").parent / "corpus.json").read_text())
    assert first["corpus"] == second["corpus"] == listing["digest"]
    assert first["parameters"] == pytest.approx(second["parameters"], rel=0.01)
    for name in ("layernorm", "rmsnorm"):
        assert (demo.directory(name) / "model.safetensors").stat().st_size < 1.5e6
